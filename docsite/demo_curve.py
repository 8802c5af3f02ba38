"""Draws docs/images/demo.svg, the curves of the demo's recorded seeds, from the committed records.

python -m docsite.demo_curve
"""

import sys
from pathlib import Path
from typing import Final

from benchmarks.demo_beside import charts, read_pairs

from outrider.viewer.report_parts import svg_chart

_ROOT: Final = Path(__file__).parents[1]
FILE: Final = _ROOT / "docs" / "images" / "demo.svg"
_RUNS: Final = _ROOT / "records" / "packs" / "demo.pack" / "runs"
_STYLE: Final = """<style>
text { fill: #57606a; font: 11px system-ui, sans-serif } .title { font-weight: 600 }
.grid { stroke: #d0d7de; stroke-width: .6 } .axis { stroke: #57606a } .line { fill: none; stroke-width: 2 }
.s0 { stroke: #0072b2 } .s1 { stroke: #d55e00 } .line.s1 { stroke-dasharray: 6 3 }
.dot.s0 { fill: #0072b2 } .dot.s1 { fill: #d55e00 } .raw { opacity: .35 }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1 } .grid { stroke: #3d444d } .axis { stroke: #9198a1 }
  .s0 { stroke: #56b4e9 } .dot.s0 { fill: #56b4e9 } .s1 { stroke: #e69f00 } .dot.s1 { fill: #e69f00 }
}
</style>"""


def curves() -> str:
    """Return both charts as one SVG: means over the seeds, bars from the lowest to the highest."""
    drawn = [str(svg_chart(chart)) for chart in charts(read_pairs(_RUNS), None)]
    placed = [
        one.replace("<svg ", f'<svg x="{460 * place}" width="460" height="230" ', 1)
        for place, one in enumerate(drawn)
    ]
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 230" role="img">'
    title = "<title>The demo: rewards while training, and held-out scores before and after</title>"
    return "\n".join([head, title, _STYLE, *placed, "</svg>"]) + "\n"


if __name__ == "__main__":
    FILE.write_text(curves(), encoding="utf-8")
    sys.stdout.write(f"{FILE}\n")
