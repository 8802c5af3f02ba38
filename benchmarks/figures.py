"""Writes recorded figures into the documents, or checks them.

    python -m benchmarks.figures [--check]        (make figures, make figures-check)

A document marks the position of a figure, and the text between the marks is written from ``records/``:

    <!-- figures: toys-lock -->            a block: a table or a list, on lines of its own

    | method | ... |

    <!-- /figures -->
    it ended at <!-- figure: demo/end -->28.0 % [21.4, 35.7]<!-- /figure --> after five steps

The marks are comments, which are not displayed. ``--check`` changes nothing: it names document, line,
recorded and written text of every figure that differs, and exits with status 1.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.figure_records import render_all
from outrider.errors import DataError, OutriderError
from outrider.files import replace_file

_MARKED: Final = re.compile(r"<!-- figure(s?): (\S+) -->(.*?)<!-- /figure\1 -->", re.DOTALL)
_MARK: Final = re.compile(r"<!-- /?figures?\b.*?-->")
# marks in code blocks are examples
_CODE: Final = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_SHOWN: Final = 100  # characters of a text in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A figure that differs from its record; both texts start at the first difference."""

    document: str
    line: int
    name: str
    recorded: str
    written: str

    @property
    def sentence(self) -> str:
        """One line for a log."""
        return (
            f"{self.document}:{self.line}: {self.name}: recorded {self.recorded!r}, written {self.written!r}"
        )


def differences(text: str, figures: Mapping[str, str], *, document: str) -> list[Difference]:
    """Figures of a document that differ. Raises DataError for marks that do not pair, and for a figure that
    no record has.
    """
    found = []
    for match in _marked(text, figures, document=document):
        recorded, written = _words(figures[match[2]]), _words(match[3])
        if recorded != written:
            pairs = enumerate(zip(recorded, written, strict=False))
            start = next(
                (n for n, (ours, theirs) in pairs if ours != theirs), min(len(recorded), len(written))
            )
            parts = [" ".join(words[max(0, start - 2) :])[:_SHOWN] for words in (recorded, written)]
            line = text.count("\n", 0, match.start(3)) + _lines_before(match[3], start)
            found.append(
                Difference(document=document, line=line, name=match[2], recorded=parts[0], written=parts[1])
            )
    return found


def rewritten(text: str, figures: Mapping[str, str], *, document: str) -> str:
    """Return the document with its figures. Figures that differ in line breaks only are unchanged. Raises the
    errors of :func:`differences`.
    """
    parts, end = [], 0
    for match in _marked(text, figures, document=document):
        recorded = figures[match[2]]
        block = f"\n\n{recorded}\n\n" if match[1] else recorded
        parts += [text[end : match.start(3)], match[3] if _words(recorded) == _words(match[3]) else block]
        end = match.end(3)
    return "".join([*parts, text[end:]])


def _marked(text: str, figures: Mapping[str, str], *, document: str) -> Iterator[re.Match[str]]:
    text = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)
    matches = list(_MARKED.finditer(text))
    paired = {position for match in matches for position in (match.start(), match.end(3))}
    for mark in _MARK.finditer(text):
        if mark.start() not in paired:
            raise DataError(
                f"{document}:{text.count(chr(10), 0, mark.start()) + 1}: {mark[0]} has no other half"
            )
    for match in matches:
        if match[2] not in figures:
            raise DataError(
                f"{document}:{text.count(chr(10), 0, match.start()) + 1}: no record has the figure {match[2]}"
            )
        yield match


def _words(text: str) -> list[str]:
    return text.split()


def _lines_before(text: str, num_words: int) -> int:
    """Return the line of a word, counted from the line of the mark."""
    words = list(re.finditer(r"\S+", text))
    return 1 + text.count("\n", 0, words[min(num_words, len(words) - 1)].start() if words else 0)


def documents(root: Path) -> list[Path]:
    """Return README, everything in docs, and the page of earlier measurements beside the records."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md")), root / "records" / "README.md"]
    return [page for page in pages if page.exists()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if all figures agree with their records, 1 if one differs or a record cannot
    be read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.figures", description="Recorded figures in the documents."
    )
    parser.add_argument("--check", action="store_true", help="change nothing, print differences")
    parser.add_argument("--root", type=Path, default=Path(), help="folder of README.md, docs and records")
    parsed = parser.parse_args(arguments)
    try:
        figures = render_all(parsed.root / "records")
        found = []
        for path in documents(parsed.root):
            text, name = path.read_text(encoding="utf-8"), path.relative_to(parsed.root).as_posix()
            new = rewritten(text, figures, document=name)
            found += differences(text, figures, document=name)
            if new != text and not parsed.check:
                replace_file(path, new.encode())
    except (OutriderError, OSError) as error:
        print(f"benchmarks.figures: {error}", file=sys.stderr)
        return 1
    for one in found:
        print(one.sentence if parsed.check else f"{one.document}:{one.line}: {one.name} rewritten")
    return int(parsed.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
