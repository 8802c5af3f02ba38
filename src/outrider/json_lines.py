"""Files of one JSON object per line that grow while a run lives: a kill may have torn the last line, and
damage may be anywhere.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.atomic_io import replace_file


def read_lines(path: Path) -> tuple[list[bytes], bytes]:
    """The whole lines, and what a kill has left of one more (mostly nothing). Raises OSError."""
    *lines, torn = path.read_bytes().split(b"\n")
    return lines, torn


def whole_lines(path: Path) -> list[bytes]:
    """The whole lines; none of a file that is not there. Raises OSError."""
    return read_lines(path)[0] if path.is_file() else []


def replace_lines(path: Path, lines: list[bytes]) -> None:
    """Replace the file by these lines, as a whole. Raises OSError."""
    replace_file(path, b"".join(line + b"\n" for line in lines))


def parsed(line: bytes | str) -> dict[str, Any]:
    """The object of a line. Raises ValueError for anything else."""
    try:
        value = json.loads(line)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return value


def readable(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """For those who show what there is: the number of every line that is not blank, and its object, None
    where it is damaged.

    A last line without an end counts where it can be read. Raises OSError.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, parsed(line)
        except ValueError:
            yield number, None
