"""Draws one figure per method, docs/images/methods/NAME.svg: what a rollout contains and what is trained.

python -m docsite.method_pictures
"""

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final, Literal

FOLDER: Final = Path(__file__).parents[1] / "docs" / "images" / "methods"
_WIDTH, _HEIGHT, _STEP_X, _STEP_Y, _MARGIN = 82, 34, 96, 52, 6
_STYLE: Final = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 } .note { fill: #59636e }
  rect { stroke-width: 1.5; fill: #f6f8fa; stroke: #818b98 } path { fill: none; stroke: #818b98; stroke-width: 1.5 }
  .masked { stroke-dasharray: 4 3 }
  .policy { fill: #ddf4ff; stroke: #0969da } .retrieved { fill: #fff8c5; stroke: #9a6700 }
  .tip { fill: #fbefff; stroke: #8250df } .expert { fill: #dafbe1; stroke: #1a7f37 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .note { fill: #9198a1 } rect { fill: #151b23; stroke: #656c76 }
    .policy { fill: #121d2f; stroke: #4493f8 } .retrieved { fill: #272115; stroke: #d29922 }
    .tip { fill: #1f1530; stroke: #ab7df8 } .expert { fill: #12261e; stroke: #3fb950 }
  }"""  # noqa: E501 - one rule per line

Kind = Literal["prompt", "policy", "result", "retrieved", "tip", "expert"]


@dataclass(frozen=True)
class Box:
    """A part of a rollout. ``trained`` means that the update computes a gradient for its tokens."""

    kind: Kind
    text: str
    trained: bool = False


@dataclass(frozen=True)
class Row:
    """A rollout: its boxes from column ``start`` on, and a note behind them. If ``parent`` is a row, the
    rollout forks from that row's box in the column before ``start``.
    """

    boxes: tuple[Box, ...]
    note: str
    start: int = 0
    parent: int | None = None


def _turn(text: str, trained: bool = True) -> Box:
    return Box("policy", text, trained)


_QUESTION = Box("prompt", "question")
_RESULT = Box("result", "result")
_ROLLOUT = (_QUESTION, _turn("turn 1"), _RESULT, _turn("answer"))

METHODS: Final[dict[str, tuple[Row, ...]]] = {
    "grpo": (
        Row(_ROLLOUT, "return 1: advantage above 0"),
        Row(_ROLLOUT, "return 0: advantage below 0"),
    ),
    "rapo": (
        Row(_ROLLOUT, "on-policy rollout"),
        Row(
            (_QUESTION, _turn("turn 1"), _RESULT, Box("retrieved", "retrieved"), _turn("answer")),
            "hybrid rollout",
        ),
    ),
    "arpo": (
        Row((*_ROLLOUT[:3], _turn("turn 2"), _RESULT, _turn("answer")), "rollout 1"),
        Row((_turn("turn 2'"), _RESULT, _turn("answer")), "fork", start=3, parent=0),
    ),
    "empo2": (
        Row(_ROLLOUT, "plain"),
        Row((Box("tip", "tips"), *_ROLLOUT), "tips on"),
        Row(
            (Box("tip", "tips"), _QUESTION, _turn("turn 1", False), _RESULT, _turn("answer", False)),
            "tips off, sampled",
        ),
        Row((_QUESTION, _turn("turn 1"), _RESULT, _turn("answer")), "tips off, trained", start=1),
    ),
    "luffy": (
        Row(_ROLLOUT, "the policy's rollout"),
        Row(
            (_QUESTION, Box("expert", "turn 1", True), _RESULT, Box("expert", "answer", True)),
            "demonstration",
        ),
    ),
    "tree_grpo": (
        Row(_ROLLOUT, "chain of the first round"),
        Row((_turn("answer'"),), "expansion at a random turn", start=3, parent=0),
    ),
}  # fmt: skip


def picture(rows: tuple[Row, ...]) -> str:
    """Return an SVG with one line per rollout. Solid boxes are trained, dashed boxes are context only."""
    shapes, kinds = [], {box.kind for row in rows for box in row.boxes}
    for number, row in enumerate(rows):
        top = _MARGIN + number * _STEP_Y
        middle = top + _HEIGHT / 2
        for offset, box in enumerate(row.boxes):
            left = _MARGIN + (row.start + offset) * _STEP_X
            if offset or row.parent is not None:
                before = middle if offset else _MARGIN + (row.parent or 0) * _STEP_Y + _HEIGHT / 2
                shapes.append(f'<path d="M{left - _STEP_X + _WIDTH} {before} L{left} {middle}"/>')
            name = box.kind if box.trained else f"{box.kind} masked"
            shapes.append(
                f'<rect class="{name}" x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>'
                f'<text x="{left + _WIDTH / 2}" y="{middle + 4}" text-anchor="middle">'
                f"{escape(box.text)}</text>"
            )
        left = _MARGIN + (row.start + len(row.boxes)) * _STEP_X
        shapes.append(f'<text class="note" x="{left}" y="{middle + 4}">{escape(row.note)}</text>')
    columns = max(row.start + len(row.boxes) for row in rows)
    width, height = max(columns * _STEP_X + 190, 600), _MARGIN + len(rows) * _STEP_Y + 24
    colours = {"policy": "blue: the policy", "retrieved": "yellow: a retrieved step", "tip": "violet: tips"}
    colours["expert"] = "green: an expert"
    legend = [text for kind, text in colours.items() if kind in kinds]
    legend.append("solid: trained, dashed: context only")
    shapes.append(f'<text class="note" x="{_MARGIN}" y="{height - 8}">{" · ".join(legend)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>Rollouts of one group</title>\n<style>{_STYLE}\n</style>\n"
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, rows in METHODS.items():
        (FOLDER / f"{name}.svg").write_text(picture(rows), encoding="utf-8")
        sys.stdout.write(f"{FOLDER / name}.svg\n")
