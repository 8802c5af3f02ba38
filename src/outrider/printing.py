"""Text for people: that of others made fit for a terminal, and scores, which every command and page writes
alike.
"""

import math
import sys
from collections.abc import Iterable
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_SAME: Final = 1e-9


def one_line(text: str) -> str:
    """The text with every control character, line breaks and terminal escapes included, replaced by a
    space.
    """
    return "".join(char if char.isprintable() else " " for char in text)


def print_lines(*lines: str, to_stderr: bool = False) -> None:
    """Print each on a line of its own, whatever it holds; tables go through
    :class:`outrider.printing.Terminal`.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    encoding = stream.encoding or "utf-8"
    for line in lines:
        print(one_line(line).encode(encoding, "replace").decode(encoding), file=stream)


def score(value: float, low: float = math.nan, high: float = math.nan, *, is_share: bool = True) -> str:
    """A score with its interval, where it has one.

    A share (0 to 1) of solved tasks, or a mean of the task set's own scores from 0 to 1, is written in per
    cent: ``35.0 % [25.5, 45.9]``. What is no share, as a return, is a number of four digits: ``1.25 [0.9,
    1.6]``.
    """
    if not math.isfinite(value):
        return "not measured"
    scale, form = (100.0, ".1f") if is_share else (1.0, ".4g")
    unit = " %" if is_share else ""
    return f"{scale * value:{form}}{unit}{_interval(scale * low, scale * high, form)}"


def is_graded(share: float, mean_return: float | None) -> bool:
    """Whether the mean return says more than the share of solved tasks: they differ."""
    return mean_return is not None and math.isfinite(mean_return) and abs(mean_return - share) > _SAME


def format_mean_return(share: float, mean_return: float | None) -> str:
    """The mean return to print behind a share of solved tasks, if it is another number: rewards may be
    graded, and then a share of 0 % hides what was learned.
    """
    if mean_return is None or not is_graded(share, mean_return):
        return ""
    return f", mean return {score(mean_return, is_share=False)},"


def points(difference: float, low: float = math.nan, high: float = math.nan) -> str:
    """A difference (-1 to 1) of two such shares, in percentage points: ``+28.7 points [+16.0, +40.1]``."""
    if not math.isfinite(difference):
        return "not measured"
    return f"{100 * difference:+.1f} points{_interval(100 * low, 100 * high, '+.1f')}"


def _interval(low: float, high: float, form: str) -> str:
    return f" [{low:{form}}, {high:{form}}]" if math.isfinite(low) and math.isfinite(high) else ""


# A terminal for tables: files, servers and models write what is shown, and none of it may steer it.


class Terminal(Console):
    """A console of rich that shows a space for every control character of a text: its own styles are the only
    ones. Line breaks stay.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich has it; a table asks for its cells here before it measures them."""
        for segment in super().render(renderable, options):
            is_clean = segment.control is not None or segment.text.isprintable()
            yield segment if is_clean else segment._replace(text=_clean(segment.text))


def _clean(text: str) -> str:
    return "\n".join(map(one_line, text.split("\n")))
