"""What a program came back with, as the JSON text that its launcher is told: some text whatever it is."""

import json
import math
from collections.abc import Mapping
from typing import Any

from outrider.environments.values import as_float
from outrider.errors import InvalidResult, NonFiniteResult


def normalize_reward(value: Any) -> Any:
    """A reward as :func:`~outrider.environments.agent.session.read_reward` takes it: a pair of a number and
    a mapping is a reward with its metrics, as many libraries give it.
    """
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        return {"reward": value[0], "metrics": dict(value[1])}
    return value


def result_to_json(result: Mapping[str, Any]) -> str:
    """``result`` as JSON; where that cannot be, why not, under ``unusable``."""
    try:
        return json.dumps(result, default=_plain)
    except Exception as error:  # somebody else's object may raise anything
        kind = type(result.get("value")).__name__
        return json.dumps(
            {"unusable": f"what came back cannot be written as JSON ({kind}): {one_line_text(error)}"}
        )


def format_error(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {one_line_text(error)}"


def one_line_text(value: object) -> str:
    """The words of an object, such as an exception, in one line."""
    try:
        return " ".join(str(value).split())
    except BaseException:  # what a program wrote is as total as it wants
        return "(it has no words)"


def _plain(value: Any) -> float:
    """A number of NumPy's, PyTorch's or another library's; NaN stands for what is not finite."""
    try:
        return as_float(value, "")
    except NonFiniteResult:
        return math.nan
    except InvalidResult as error:
        raise TypeError(f"{type(value).__name__} is no number") from error
