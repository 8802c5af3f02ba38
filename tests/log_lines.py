"""The lines of a log without their times."""

import re
from typing import Final

_LINE: Final = re.compile(r"(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d (.*)")


def messages(output: str) -> list[str]:
    """Each line without its time; other lines, for example of a table, are unchanged."""
    return [match[1] if (match := _LINE.fullmatch(line)) else line for line in output.splitlines()]


def texts(output: str) -> list[str]:
    """Each line without its time. Fails if a line has none."""
    without = [line for line in output.splitlines() if not _LINE.fullmatch(line)]
    assert not without, f"without a time: {without}"
    return messages(output)
