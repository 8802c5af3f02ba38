"""The text of an HTML page: no script is run, nothing is loaded.

One pass from left to right, in time that grows with the page and no faster: the standard library's parser
needs minutes for two megabytes of ``<a``, and a page is what a stranger wrote.
"""

import html
import re
from typing import Final

# Their content is no text. The first four end at their own closing tag, whatever they hold.
_RAW: Final = frozenset({"script", "style", "iframe", "noscript"})
_HIDDEN: Final = _RAW | {"template", "svg", "object"}
_INLINE: Final = frozenset(
    (
        "a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "dfn", "em", "font", "i", "kbd", "mark", "q",
        "s", "samp", "small", "span", "strong", "sub", "sup", "time", "tt", "u", "var", "wbr",
    )
)  # fmt: skip
_CELLS: Final = frozenset({"td", "th"})
_OPENS: Final = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9:-]{0,31})|<!--|<[!?/]")
_ENDS: Final = re.compile(r"""(?>[^>"']+|"[^"]*"|'[^']*')*+>""")
# Beside line breaks and tabs
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_controls(text: str) -> str:
    """Blanks in the place of what a terminal would do, and no reader see."""
    return _CONTROLS.sub(" ", text)


def title_and_text(page: str) -> tuple[str, str]:
    """Title and visible text: a line for each block, blanks between cells of a row."""
    scan = _Scan(page)
    while scan.read_next():
        pass
    lines = (" ".join(_unescape(line).split()) for line in "".join(scan.parts).split("\n"))
    return " ".join(_unescape(scan.title).split()), "\n".join(line for line in lines if line)


class _Scan:
    """Where the pass is. Whatever is looked for and not there ends it or is not looked for again."""

    def __init__(self, page: str) -> None:
        self._page, self._position = page, 0
        self._knows_quotes = True
        self.parts: list[str] = []
        self.title = ""

    def read_next(self) -> bool:
        """Read up to and with the next tag; False at the end."""
        tag = _OPENS.search(self._page, self._position)
        self.parts.append(self._page[self._position : tag.start() if tag else None].replace("\n", " "))
        if tag is None:
            return False
        if tag[0] == "<!--":
            end = self._page.find("-->", tag.start() + 2)
            self._position = end + 3
            return end >= 0
        if not self._close(tag.end()):
            return False
        name = (tag[2] or "").lower()
        if name == "title" and not tag[1]:
            return self._read_title()
        is_closed = self._page[self._position - 2] == "/" and name not in _RAW
        if name in _HIDDEN and not tag[1] and not is_closed:
            return self._skip(name)
        if name and name not in _INLINE:
            self.parts.append(" " if name in _CELLS else "\n")
        return True

    def _close(self, start: int) -> bool:
        """Go behind the tag's ``>``, which does not count within quotes while these are closed."""
        if self._knows_quotes:
            if match := _ENDS.match(self._page, start):
                self._position = match.end()
                return True
            self._knows_quotes = False
        self._position = self._page.find(">", start) + 1
        return self._position > 0

    def _skip(self, name: str) -> bool:
        end = re.compile(f"</{name}", re.IGNORECASE).search(self._page, self._position)
        return end is not None and self._close(end.end())

    def _read_title(self) -> bool:
        """Up to its closing tag, or to any where it has none."""
        end = self._page.find("<", self._position)
        text = self._page[self._position : end if end >= 0 else None]
        self.title = self.title or text.strip()
        self._position = end
        return end >= 0


def _unescape(text: str) -> str:
    try:
        return without_controls(html.unescape(text))
    except ValueError:  # a number of thousands of digits
        return text
