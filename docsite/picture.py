"""Draws docs/images/trace.svg from the tiny trace.

python -m docsite.picture
"""

import sys
from html import escape
from pathlib import Path
from typing import Final

from docsite.tiny_trace import play
from outrider.trace import Node, Trace

_FILE: Final = Path(__file__).parents[1] / "docs" / "images" / "trace.svg"
_WIDTH, _HEIGHT, _STEP_X, _STEP_Y, _SHOWN = 158, 40, 184, 62, 24
_STYLE: Final = """
  text { font: 11px ui-monospace, monospace; fill: #1f2328 } .small { font-size: 10px; fill: #59636e }
  rect { stroke-width: 1.5; fill: #f6f8fa; stroke: #818b98 } \
path { fill: none; stroke: #818b98; stroke-width: 1.5 }
  .policy { fill: #ddf4ff; stroke: #0969da } .buffer { fill: #fff8c5; stroke: #9a6700 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } rect { fill: #151b23; stroke: #656c76 }
    .policy { fill: #121d2f; stroke: #4493f8 } .buffer { fill: #272115; stroke: #d29922 }
  }"""


def picture(trace: Trace) -> str:
    """Return an SVG: a column per turn, a row per rollout, an edge per parent; colours by origin."""
    places = _places(trace)
    columns, rows = (1 + max(place[axis] for place in places.values()) for axis in (0, 1))
    width, height = round(columns * _STEP_X + 150), round(rows * _STEP_Y + 34)
    shapes = [
        _edge(places, node) for node in trace.nodes if node.parent is not None and node.node_id in places
    ]
    shapes += [_box(places, node) for node in trace.nodes if node.node_id in places]
    for leaf, path in trace.scored_rollouts():
        x, y = places[path[-1].node_id]
        left, top = x * _STEP_X + _WIDTH + 12, y * _STEP_Y + 26
        told = f"return {leaf.episode_return:g}, advantage {leaf.advantage or 0:+.2f}"
        shapes.append(f'<text x="{left}" y="{top}">rollout {leaf.rollout}</text>')
        shapes.append(f'<text class="small" x="{left}" y="{top + 14}">{told}</text>')
    legend = "blue: the policy wrote it, and is trained on it · yellow: retrieved · grey: prompt and results"
    shapes.append(f'<text class="small" x="8" y="{height - 10}">{legend}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>A trace</title>\n<style>{_STYLE}\n</style>\n" + "\n".join(shapes) + "\n</svg>\n"
    )


def _places(trace: Trace) -> dict[int, tuple[int, float]]:
    """Return column and row of every node of a rollout; a parent is in the first row of its children."""
    places: dict[int, tuple[int, float]] = {}
    for row, (_, path) in enumerate(trace.scored_rollouts()):
        for column, node in enumerate(path):
            places.setdefault(node.node_id, (column, float(row)))
    return places


def _edge(places: dict[int, tuple[int, float]], node: Node) -> str:
    (x0, y0), (x1, y1) = places[node.parent or 0], places[node.node_id]
    start, end = (x0 * _STEP_X + 8 + _WIDTH, y0 * _STEP_Y + 30), (x1 * _STEP_X + 8, y1 * _STEP_Y + 30)
    middle = (start[0] + end[0]) / 2
    return f'<path d="M{start[0]} {start[1]} C{middle} {start[1]} {middle} {end[1]} {end[0]} {end[1]}"/>'


def _box(places: dict[int, tuple[int, float]], node: Node) -> str:
    x, y = places[node.node_id][0] * _STEP_X + 8, places[node.node_id][1] * _STEP_Y + 10
    text = node.message.content.strip().replace("\n", " ")
    text = text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
    return (
        f'<rect class="{node.origin}" x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>'
        f'<text class="small" x="{x + 7}" y="{y + 15}">{node.origin}</text>'
        f'<text x="{x + 7}" y="{y + 30}">{escape(text)}</text>'
    )


if __name__ == "__main__":
    _FILE.parent.mkdir(parents=True, exist_ok=True)
    _FILE.write_text(picture(play()), encoding="utf-8")
    sys.stdout.write(f"{_FILE}\n")
