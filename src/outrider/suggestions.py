"""Suggestions for mistyped names."""

from collections.abc import Iterable
from difflib import get_close_matches


def closest_match(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name closest to ``word``, ignoring case; None if difflib's ratio is below
    ``cutoff``.
    """
    names_by_lowercase = {name.lower(): name for name in known}
    matches = get_close_matches(word.lower(), names_by_lowercase, n=1, cutoff=cutoff)
    return names_by_lowercase[matches[0]] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown ``word``: ``, did you mean NAME?`` or ""."""
    suggestion = closest_match(word, known)
    return "" if suggestion is None else f", did you mean {suggestion}?"
