"""Wraps long lines of Markdown, or names them.

    python -m docsite.reflow [--check] [FILE ...]        (make docs-lines; make lint checks)

Only paragraphs and list items with a line over 110 columns are wrapped. Tables, code, headings, figure marks,
HTML and code spans do not change. ``--check`` changes nothing and names the long lines, except tables, data
in code blocks, and lines with a single long link or code span.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

WIDTH: Final = 110
_ROOT: Final = Path(__file__).parents[1]
_FENCE: Final = re.compile(r"^\s*(```|~~~)(\w*)")
_DATA: Final = frozenset({"json", "jsonl", "toml", "text"})  # an example of one line must remain one line
_ITEM: Final = re.compile(r"^(\s*)([-*+]|\d+[.)]) +")
_NO_TEXT: Final = re.compile(
    r"^\s*(\||#{1,6} |>|<(?!!-- figure: )|!!!|\?\?\?|:::|---+\s*$|===+\s*$|\[[^\]]+\]: )"
)
_ATOM: Final = re.compile(r"(?:<!--.*?-->|`[^`]*`|\S)+")
_OPENS_A_BLOCK: Final = re.compile(r"^([-*+]$|\d+[.)]$|#|>|\||<|=+$|-+$|~~~|```|:)")
_LINK: Final = re.compile(r"\]\([^)\s]*\)|https?://\S+|<!--.*?-->")


def reflowed(text: str) -> str:
    """Return the document with wrapped paragraphs. Raises ValueError if wrapping would change a word."""
    lines, number, new = text.split("\n"), 0, []
    code = {at for at, _ in _code_lines(lines)}
    while number < len(lines):
        end = _end_of_block(lines, number, code)
        block = lines[number:end]
        is_long = number not in code and any(len(line) > WIDTH for line in block)
        new += _broken(block) if is_long else block
        number = end
    result = "\n".join(new)
    if result.split() != text.split():
        raise ValueError("a word was changed")
    return result


def long_lines(text: str) -> list[int]:
    """Numbers, from 1, of the lines that are too long for no reason."""
    lines = text.split("\n")
    languages = dict(_code_lines(lines))
    return [
        number + 1
        for number, line in enumerate(lines)
        if len(_LINK.sub("", line)) > WIDTH
        and not line.lstrip().startswith("|")
        and languages.get(number) not in _DATA
        and (number in languages or len(_ATOM.findall(line)) > 1)
    ]


def _code_lines(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Lines of code blocks, fences included, with the language of their block."""
    language, is_open = "", False
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence and not is_open:
            is_open, language = True, fence[2]
            yield number, language
        elif is_open or line.startswith("    "):
            yield number, language if is_open else ""
            is_open = is_open and not fence


def _end_of_block(lines: Sequence[str], start: int, code: set[int]) -> int:
    """Return the end of the paragraph or list item that starts at ``start``, or of the line."""

    def is_text(number: int) -> bool:
        return bool(lines[number].strip()) and number not in code and not _NO_TEXT.match(lines[number])

    end = start + 1
    while is_text(start) and end < len(lines) and is_text(end) and not _ITEM.match(lines[end]):
        end += 1
    return end


def _broken(block: Sequence[str]) -> list[str]:
    item = _ITEM.match(block[0])
    first = item[0] if item else re.match(r"\s*", block[0])[0]  # type: ignore[index]
    if _NO_TEXT.match(block[0]) or any(line.endswith(("  ", "\\")) for line in block):
        return list(block)  # no text, or a line break that is meant
    words = _ATOM.findall(" ".join([block[0][len(first) :], *(line.strip() for line in block[1:])]))
    lines, current = [], first + words[0]
    for word in words[1:]:
        if len(current) + 1 + len(word) > WIDTH and not _OPENS_A_BLOCK.match(word):
            lines.append(current)
            current = " " * len(first) + word
        else:
            current += " " + word
    return [*lines, current]


def documents(root: Path) -> list[Path]:
    """Every Markdown file of the project's own."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if ``--check`` names a line."""
    parser = argparse.ArgumentParser(
        prog="python -m docsite.reflow", description="Line breaks of the documents."
    )
    parser.add_argument("--check", action="store_true", help="change nothing, name lines over 110 columns")
    parser.add_argument("files", nargs="*", type=Path)
    given = parser.parse_args(arguments)
    found = 0
    for path in given.files or documents(_ROOT):
        text = path.read_text(encoding="utf-8")
        if not given.check:
            new = reflowed(text)
            if new != text:
                path.write_text(new, encoding="utf-8")
            text = new
        for line in long_lines(text):
            found += 1
            print(f"{path}:{line}: over {WIDTH} columns")
    return int(given.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
