"""Conversion of what the code of others returns (rewards, success flags, metrics) to Python's own types.

The one place where such values are checked: :func:`~outrider.environments.base.take_step` and
:func:`~outrider.environments.base.episode_result` use these functions, as do the adapters and the agent
programs. Scalars of NumPy, PyTorch and other array libraries are read by their ``item()``, so none of them is
imported.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from numbers import Real
from typing import Any, Final

from outrider.errors import InvalidResult, NonFiniteResult

_MAX_CHARS: Final = 60
_TEXT: Final = (str, bytes, bytearray, complex)  # what float() would read, or what silently loses a part


def as_float(value: Any, name: str) -> float:
    """A number as a float: Python's, a scalar of an array library with one element, a Decimal or a Fraction.

    ``name`` is the field in messages. Raises InvalidResult for what is no number and NonFiniteResult for NaN
    and infinity.
    """
    if type(value) is float and math.isfinite(value):
        return value
    number = _number(value, name)
    if not math.isfinite(number):
        raise NonFiniteResult(f"{name} is {describe(value)}, no finite number")
    return number


def as_bool(value: Any, name: str) -> bool:
    """A flag: True and False, 1 and 0, and scalars with these values.

    Raises InvalidResult for anything else, NonFiniteResult for NaN and infinity.
    """
    if isinstance(value, bool):
        return value
    number = _number(value, name, expected="neither true nor false")
    if not math.isfinite(number):
        raise NonFiniteResult(f"{name} is {describe(value)}, neither true nor false")
    if number not in (0.0, 1.0):
        raise InvalidResult(f"{name} is {describe(value)}, neither true nor false")
    return number == 1.0


def as_count(value: Any, name: str) -> int:
    """A whole number of at least 0. Raises InvalidResult for anything else."""
    if type(value) is int and value >= 0:
        return value
    number = _number(value, name, expected="no whole number")
    if not (number >= 0 and number.is_integer()):
        raise InvalidResult(f"{name} is {describe(value)}, no whole number of at least 0")
    return int(number)


def as_metrics(value: Any, name: str = "metrics") -> dict[str, float]:
    """Named numbers. A metric that is None is not defined in this episode and is left out.

    Raises InvalidResult for what is no mapping or holds what is no number, NonFiniteResult for NaN and
    infinity.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidResult(f"{name} is {describe(value)}, no mapping of names to numbers")
    metrics: dict[str, float] = {}
    for key, number in value.items():
        if not str(key).strip():
            raise InvalidResult(f"{name} has a metric with an empty name")
        if number is not None:
            metrics[str(key)] = as_float(number, f"the metric {key}")
    return metrics


def describe(value: Any) -> str:
    """A value and its type in a few words, for a message of one line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an object of somebody else's class
        text = "a value"
    shortened = text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
    return shortened if value is None else f"{shortened} ({type(value).__name__})"


def _number(value: Any, name: str, *, expected: str = "no finite number") -> float:
    scalar = value
    if not isinstance(scalar, int | float):
        if _is_masked(value):
            raise InvalidResult(f"{name} is masked, {expected}")
        item = getattr(scalar, "item", None)
        if callable(item):
            try:
                scalar = item()
            except Exception:  # several elements, or an array that is not on any device
                scalar = None
        is_number = isinstance(scalar, Real | Decimal) or hasattr(type(scalar), "__float__")
        if isinstance(scalar, _TEXT) or not is_number or _is_date(value) or _is_date(scalar):
            raise InvalidResult(f"{name} is {describe(value)}, {expected}")
    try:
        return float(scalar)
    except OverflowError:
        return math.inf
    except Exception as error:  # a number type of somebody else's
        raise InvalidResult(f"{name} is {describe(value)}, {expected}") from error


def _is_masked(value: Any) -> bool:
    """Whether an element of NumPy's masked arrays is masked: ``item()`` returns the data below the mask."""
    if not (hasattr(value, "mask") and hasattr(value, "filled")):
        return False
    try:
        return bool(value.mask)
    except ValueError:  # several elements, which are no number anyway
        return False


def _is_date(value: Any) -> bool:
    """Whether a value is a date or duration of NumPy, which ``float()`` reads as a count of its unit."""
    return getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M")
