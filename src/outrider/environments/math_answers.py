r"""Whether two mathematical answers are equal, by ``math-verify``, kept away from inputs on which it does not return.

Its time-outs use signals, which only work in the main thread, while environments step in threads; and a signal does not
interrupt a big-integer power. So what may explode (power towers, high powers of groups, integrals, factorials) is not
evaluated at all: such answers are compared as strings and counted as undecided when they differ.
"""

import math
import re
from enum import StrEnum

from math_verify import parse, verify

from outrider.environments.answers import exact_match, unwrap_text

MAX_CHARS = 200
_MAX_EXPONENT = 1000
_MAX_GROUP_EXPONENT = 30
_MAX_TERMS = 2000  # of the expanded power of a group, by the number of symbols in it
_POWER = r"(?:\^|\*\*)\s*"
_EXPONENT = re.compile(_POWER + r"(\{[^{}]*\}|\([^()]*\)|-?\d+(?:\.\d+)?|-?[A-Za-z]|\\[A-Za-z]+)")
_REFUSED = (
    re.compile(r"!|\\(?:i*int|oint|sum|prod|lim|d?binom|choose)(?![A-Za-z])"),
    # Nested functions and towers of powers, with or without braces.
    re.compile(r"(?:\\(?:sin|cos|tan|exp|log|ln)(?![A-Za-z]).*){3}", re.DOTALL),
    re.compile(_EXPONENT.pattern + r"\s*(?:\^|\*\*)"),
)


class Verdict(StrEnum):
    """What comparing two answers gave. ``undecided``: different strings that are not safe to evaluate."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


def compare_math(prediction: str, gold: str) -> Verdict:
    r"""Compare two LaTeX or plain expressions, ``\frac{1}{2}`` and ``0.5`` being equal. Never raises.

    Answers that hold a word are compared as text: as products of letters "Paris" and "pairs" would be equal.
    """
    if not prediction.strip() or not gold.strip():
        return Verdict.DIFFERENT
    if "".join(prediction.split()) == "".join(gold.split()) and not re.search(r"\d\s+\d", prediction + " " + gold):
        return Verdict.EQUAL
    if " ".join(prediction.split()) == " ".join(gold.split()):
        return Verdict.EQUAL
    if _has_word(prediction) or _has_word(gold):
        return Verdict.EQUAL if exact_match(unwrap_text(prediction), (unwrap_text(gold),)) else Verdict.DIFFERENT
    if not (_is_safe(prediction) and _is_safe(gold)):
        return Verdict.UNDECIDED
    return Verdict.EQUAL if verify(_parse(gold), _parse(prediction), timeout_seconds=None) else Verdict.DIFFERENT


def _parse(text: str) -> list[object]:
    return list(parse(f"${text.strip().strip('$')}$", parsing_timeout=None))


def _has_word(text: str) -> bool:
    r"""A run of three letters that is neither a command nor a unit in ``\text{}`` behind a number."""
    bare = re.sub(r"(?<=\d)\s*\\(?:text|mathrm)\{[^{}]*\}", "", text)
    return re.search(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", " ", bare)) is not None


def _is_safe(text: str) -> bool:
    if len(text) > MAX_CHARS or any(pattern.search(text) for pattern in _REFUSED):
        return False
    exponents = _EXPONENT.findall(text)
    if text.count("^") + text.count("**") != len(exponents) or any("^" in e or "**" in e for e in exponents):
        return False
    sizes = [max((int(digits[:6]) for digits in re.findall(r"\d+", exponent)), default=1) for exponent in exponents]
    product = math.prod(max(size, 1) for size in sizes)
    is_group_power = re.search(r"[)}\]]\s*(?:\^|\*\*)", text) is not None
    if not is_group_power:
        return product <= (_MAX_GROUP_EXPONENT if "=" in text else _MAX_EXPONENT)
    num_symbols = len(set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", text))))
    return product <= _MAX_GROUP_EXPONENT and math.comb(product + num_symbols, num_symbols) <= _MAX_TERMS
