"""Common parts of the contract checks."""

import math
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, Final

from outrider.config import Settings

# What small models write, and what nobody expects: nothing, half a tag, control characters, bytes that were
# no text, far too much.
GARBAGE: Final = (
    "", " \n", "<", "</", "<answer>", "</answer>", "<action></action>", "\x00\x1b[2J", "\ud800", "%s {} \\",
    "ß𝔘\u202e", "1" * 5000, "<action>" * 300, '{"a": [1, 2',
)  # fmt: skip


def require(condition: object, message: str) -> None:
    """Raises AssertionError, whatever the interpreter is told about assertions."""
    if not condition:
        raise AssertionError(message)


def require_finite(values: Mapping[str, Any] | Iterable[tuple[str, Any]], subject: str) -> None:
    """Every value is a finite number."""
    for name, value in dict(values).items():
        is_number = isinstance(value, int | float) and math.isfinite(value)
        require(is_number, f"{subject}: {name} is {value!r}, which is no finite number")


def require_picklable(label: str, value: Any) -> None:
    """Other processes get a copy of it."""
    try:
        same = pickle.loads(pickle.dumps(value))
    except Exception as error:
        raise AssertionError(f"{label} cannot go to another process: {error}") from error
    require(same == value, f"{label} is another one after pickle")


def find_settings(plugin: Any) -> Settings | None:
    """The settings that it was made with, where it keeps them as ``settings`` or ``config``."""
    candidates = (getattr(plugin, name, None) for name in ("settings", "config"))
    return next((candidate for candidate in candidates if isinstance(candidate, Settings)), None)
