r"""Whether two mathematical answers are equal, by ``math-verify``, in processes that are killed where it does
not return.

What clearly explodes (power towers, high powers of groups, huge powers of ten, integrals, factorials) is not
sent there at all, which saves the time until the limit; such answers are compared as strings and counted as
undecided when they differ. That is no defence: one short answer can keep a computer algebra system busy in
one call for years. The processes are (:mod:`math_pool`).
"""

import math
import re
from collections.abc import Sequence
from enum import StrEnum

from outrider.environments.grading.answers import exact_match, unwrap_text
from outrider.environments.grading.math_pool import math_pool
from outrider.environments.grading.math_structure import is_same_unit
from outrider.environments.grading.math_text import normalize_spelling, split_unit

MAX_CHARS = 200
_MAX_SPELLED = 1000  # characters; a longer answer is compared as it is written
_MAX_EXPONENT = 1000
_MAX_GROUP_EXPONENT = 30
_MAX_TERMS = 2000  # of the expanded power of a group, by the number of symbols in it
_POWER = r"(?:\^|\*\*)\s*"
_NESTED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_EXPONENT = re.compile(_POWER + rf"({_NESTED}|\([^()]*\)|-?\d+(?:\.\d+)?|-?[A-Za-z]|\\[A-Za-z]+)")
_REFUSED = (
    re.compile(
        r"\d{4,}\s*!|[}\]!]\s*!|!\s*\)\s*!|\([^()A-Za-z]*\)\s*!|\\(?:i*int|oint|sum|prod|lim|choose)(?![A-Za-z])|\\[dt]?binom\{?[^{}]*\d{4}"
    ),
    re.compile(r"\d\.?\s*E\s*[+-]?\s*\d{4,}"),
    # Nested functions and towers of powers, with or without braces.
    re.compile(r"(?:\\(?:sin|cos|tan|exp|log|ln)(?![A-Za-z])[\s({]*){3}", re.DOTALL),
    re.compile(_EXPONENT.pattern + r"\s*(?:\^|\*\*)"),
)
# "Answer: 5", "\text{Area} = 5"
_LABEL = re.compile(
    r"(?:\\text\s*\{\s*[A-Za-z][A-Za-z ]*\}\s*[:=]|\\text\s*\{[A-Za-z\s]+[:=]\s*\}"
    r"|(?=[A-Za-z ]{0,28}[A-Za-z]{3})[A-Za-z][A-Za-z ]{2,30}[:=]"
    r"|(?:\\text\s*\{)?\s*(?:the )?(?:final )?answer is:?\s*\}?)\s*(?=\S)",
    re.IGNORECASE,
)
# A hyphen between two words is none; every other sign tells one answer from another.
_OPERATOR = re.compile(r"[+*/^_<>=]|(?<![A-Za-z]{2})-|-(?![A-Za-z]{2})")


class Verdict(StrEnum):
    """Result of comparing two answers. ``undecided``: different strings, and no value within the limits."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


_EVALUATED = {True: Verdict.EQUAL, False: Verdict.DIFFERENT, None: Verdict.UNDECIDED}


def compare_math(prediction: str, gold: str) -> Verdict:
    r"""Compare two LaTeX or plain expressions, ``\frac{1}{2}`` and ``0.5`` being equal.

    Two numbers with different units are different; where one of them has none, the numbers decide. Answers
    that hold a word are compared as text and sign by sign: as products of letters "Paris" and "pairs" would
    be equal. Raises EnvironmentFault when the grading processes cannot be kept up; no answer raises
    anything. An answer that is too slow to evaluate is undecided.
    """
    return compare_all(prediction, (gold,))[0]


def compare_all(prediction: str, golds: Sequence[str]) -> list[Verdict]:
    """:func:`compare_math` with each of several accepted answers, in one visit to the grading processes."""
    results = [_compare_text(prediction, gold) for gold in golds]
    pairs = [result for result in results if isinstance(result, tuple)]
    same = iter(math_pool().same_values(pairs) if pairs else [])
    return [_EVALUATED[next(same)] if isinstance(result, tuple) else result for result in results]


def _compare_text(prediction: str, gold: str) -> Verdict | tuple[str, str]:
    """The verdict, where the texts alone give it; else what is to be evaluated."""
    if not prediction.strip() or not gold.strip():
        return Verdict.DIFFERENT
    predicted, expected = (
        normalize_spelling(text) if len(text) <= _MAX_SPELLED else text.strip() for text in (prediction, gold)
    )
    if _is_same_text(predicted, expected):
        return Verdict.EQUAL
    labels = [_LABEL.match(text) for text in (predicted, expected)]
    if labels[0] and not labels[1]:
        predicted = predicted[labels[0].end() :]
    elif labels[1] and not labels[0]:
        expected = expected[labels[1].end() :]
    (predicted, its_unit), (expected, unit) = (
        split_unit(text) if len(text) <= _MAX_SPELLED else (text, "") for text in (predicted, expected)
    )
    if unit and not its_unit:
        predicted, its_unit = _with_short_unit(predicted, unit)
    elif its_unit and not unit:
        expected, unit = _with_short_unit(expected, its_unit)
    is_other_unit = (its_unit and expected.endswith(r"\%")) or (unit and predicted.endswith(r"\%"))
    if is_other_unit or not is_same_unit(its_unit, unit):
        return Verdict.DIFFERENT
    if _is_same_text(predicted, expected):
        return Verdict.EQUAL
    words = [sorted(_words(text)) for text in (predicted, expected)]
    if any(words) and _is_same_wording(predicted, expected):
        return Verdict.EQUAL
    if words[0] != words[1]:
        return Verdict.DIFFERENT
    return (predicted, expected) if _is_safe(predicted) and _is_safe(expected) else Verdict.UNDECIDED


def _with_short_unit(text: str, unit: str) -> tuple[str, str]:
    """``5m`` as ``("5", "m")`` if that is the unit of the other answer; else ``(text, "")``."""
    amount = text.removesuffix(unit)
    is_unit = unit in ("m", "g") and amount != text and amount[-1:].isdigit()
    return (amount, unit) if is_unit else (text, "")


def _is_same_text(left: str, right: str) -> bool:
    """Blanks apart, but for one between two digits."""
    if "".join(left.split()) == "".join(right.split()) and not re.search(r"\d\s+\d", left + " | " + right):
        return True
    return " ".join(left.split()) == " ".join(right.split())


def _is_same_wording(left: str, right: str) -> bool:
    bare = [unwrap_text(text) for text in (left, right)]
    return _OPERATOR.findall(bare[0]) == _OPERATOR.findall(bare[1]) and exact_match(bare[0], (bare[1],))


def _words(text: str) -> list[str]:
    """The runs of three letters that are neither a command nor the name of an environment."""
    bare = re.sub(r"\\(?:begin|end)\s*\{[A-Za-z]+\*?\}|\\text\{ (?:and|or) \}", " ", text)
    return re.findall(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", " ", bare))


def _is_safe(text: str) -> bool:
    if len(text) > MAX_CHARS or any(pattern.search(text) for pattern in _REFUSED):
        return False
    exponents = _EXPONENT.findall(text)
    towers = [exponent for exponent in exponents if "^" in exponent]
    if text.count("^") != len(exponents) + sum(exponent.count("^") for exponent in towers):
        return False
    # An exponent that is a power itself, such as that of e^{-x^2}, must hold a letter: else it may be huge.
    if any(not _is_small_tower(exponent) for exponent in towers):
        return False
    sizes = [
        max((int(digits[:6]) for digits in re.findall(r"\d+", exponent)), default=1) for exponent in exponents
    ]
    product = math.prod(max(size, 1) for size in sizes)
    is_group_power = re.search(r"[)}\]]\s*(?:\^|\*\*)", text) is not None
    if not is_group_power:
        is_small = "=" not in text and max(sizes, default=1) <= _MAX_GROUP_EXPONENT  # a sum of small powers
        return is_small or product <= (_MAX_GROUP_EXPONENT if "=" in text else _MAX_EXPONENT)
    num_symbols = len(set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", text))))
    return product <= _MAX_GROUP_EXPONENT and math.comb(product + num_symbols, num_symbols) <= _MAX_TERMS


def _is_small_tower(exponent: str) -> bool:
    has_letter = (
        re.search(r"[A-Za-z]", re.sub(r"\\(?:frac|cdot|times|pi)(?![A-Za-z])", " ", exponent)) is not None
    )
    return has_letter and all(len(digits) == 1 for digits in re.findall(r"\d+", exponent))
