"""Whether two answers have one value, by ``math-verify``. Runs in a grading process only: nothing bounds its
time or memory.
"""

import re
from functools import lru_cache
from typing import Any, Final

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.math_normalization import normalize_latex
from math_verify import verify

from outrider.environments.grading.math_structure import same_structure

# Units, boxes and words were read before; what this removes would be lost.
_NORMALIZATION: Final = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
# The parser reads these only in part, or as something else.
_UNREADABLE: Final = re.compile(
    r"(?<![_\d])\d+\s+\.?\d|\d\.\d+\.\d|\d_|\\ldots|\\approx|\\p?mod|\\overline\{\d|\\dot|\\bar\s*\{?\d|\\sim|\\equiv|\\ne\b.*="
)
_CLOSE: Final = 1e-6
_MIRRORED: Final = {">": "<", r"\ge": r"\le"}


def is_same_value(left: str, right: str) -> bool:
    """Whether two answers are equal in all their parts. The comparison does not depend on the side."""
    return same_structure(left, right, _is_same_expression)


def _is_same_expression(left: str, right: str) -> bool:
    if r"\plainlog" in left or r"\plainlog" in right:  # natural in Python, decadic in school
        return any(
            _is_same_expression(left.replace(r"\plainlog", name), right.replace(r"\plainlog", name))
            for name in (r"\ln", r"\log")
        )
    is_cased = any(
        letter.swapcase() in text for text in (left, right) for letter in re.findall(r"[A-Z]", _letters(text))
    )
    is_complex = any(re.search(r"(?<![A-Za-z\\])i(?![A-Za-z])", _letters(text)) for text in (left, right))
    parsed = [_parse(text, is_cased, is_complex) for text in (left, right)]
    if parsed[0] is None or parsed[1] is None:
        return False
    if not _is_verified(parsed[0], parsed[1]) and not _is_verified(parsed[1], parsed[0]):
        return is_complex and _is_zero_difference(*parsed)
    return _is_close(*parsed)


def _letters(text: str) -> str:
    return re.sub(r"\\[A-Za-z]+", " ", text)


@lru_cache(maxsize=64)
def _parse(text: str, is_cased: bool, is_complex: bool) -> Any:
    """The whole text as an expression; None if the parser does not read all of it."""
    if _UNREADABLE.search(text):
        return None
    text = re.sub(r"('+)", lambda run: r"^{\prime" + " \\prime" * (len(run[1]) - 1) + "}", text)
    latex = normalize_latex(_ordered(text), _NORMALIZATION)
    config = ConversionConfig(lowercase_symbols=not is_cased)
    try:
        expression = latex2sympy(
            latex,
            is_real=not is_complex,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=config,
        )
    except Exception:  # the parser raises all kinds
        return None
    return expression if isinstance(expression, (sympy.Basic, sympy.MatrixBase)) else None


def _ordered(text: str) -> str:
    """A chain of inequalities with the smallest first."""
    parts = re.split(r"(<|>|\\le(?![a-z])|\\ge(?![a-z]))", text)
    if len(parts) < 5 or not all(sign in _MIRRORED for sign in parts[1::2]):
        return text
    return " ".join(_MIRRORED.get(part, part) for part in reversed(parts))


def _is_verified(gold: Any, answer: Any) -> bool:
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq):
        return _is_same_equation(gold, answer)
    return bool(verify(gold, answer, timeout_seconds=None))


def _is_same_equation(left: sympy.Eq, right: sympy.Eq) -> bool:
    """Whether one is a multiple of the other. Two equations without solutions are not equal for that."""
    if left == right or (left.lhs == right.rhs and left.rhs == right.lhs):
        return True
    if left.free_symbols != right.free_symbols or not left.free_symbols:
        return False
    try:
        differences = [sympy.sympify(equation.lhs - equation.rhs).doit() for equation in (left, right)]
        ratio = sympy.simplify(differences[0] / differences[1])
        if ratio.is_number:
            return bool(ratio.is_finite and not ratio.is_zero)
        solutions = [sympy.solve(equation, equation.free_symbols) for equation in (left, right)]
    except Exception:
        return False
    return bool(solutions[0]) and bool(solutions[1]) and bool(verify(left, right, timeout_seconds=None))


def _is_zero_difference(left: Any, right: Any) -> bool:
    """With ``i`` as the imaginary unit."""
    try:
        unit = {
            symbol: sympy.I for side in (left, right) for symbol in side.free_symbols if symbol.name == "i"
        }
        return bool(sympy.simplify((left - right).subs(unit).doit()).is_zero)
    except Exception:
        return False


def _is_close(left: Any, right: Any) -> bool:
    """The library compares a fixed number of decimals; small numbers must not be equal for that."""
    try:
        if (
            isinstance(left, (sympy.MatrixBase, sympy.Set, sympy.Tuple))
            or left.free_symbols
            or right.free_symbols
        ):
            return True
        values = [_number(side) for side in (left, right)]
    except Exception:
        return True
    size = max(map(abs, values))
    if size >= 1e-3 or size == 0:
        return True
    return abs(values[0] - values[1]) <= _CLOSE * size or any(
        abs(values[0] * factor - values[1]) <= _CLOSE * size for factor in (100, 0.01)
    )


def _number(expression: Any) -> complex:
    """The value; 0 for parts that cancel, of which the library evaluates no digit: ``1 - 1`` is
    ``0.e-125``.
    """
    real, imaginary = (
        0.0 if getattr(part, "_prec", 53) == 1 else float(part) for part in sympy.N(expression).as_real_imag()
    )
    return complex(real, imaginary)
