"""Near matches of a mistyped name."""

from collections.abc import Iterable
from difflib import get_close_matches


def near_match(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that is most like ``word``, whatever its case.

    None where none is: difflib's ratio is below ``cutoff``.
    """
    by_lower = {name.lower(): name for name in known}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown ``word``: ``, did you mean NAME?`` or nothing."""
    found = near_match(word, known)
    return "" if found is None else f", did you mean {found}?"
