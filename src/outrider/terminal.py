"""A terminal for tables: files, servers and models write what is shown, and none of it may steer it."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from outrider.printing import one_line


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
