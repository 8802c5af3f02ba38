"""A short spelling of an objective's settings for tests that have many of them in lists."""

from collections.abc import Mapping
from typing import Any

_OF_LOSS = {
    "clip_low", "clip_high", "dual_clip", "keep_clipped_gradient", "ratio_cap", "ratio_floor",
    "sequence_ratio",
}  # fmt: skip
_OF_CORRECTION = {"sampler_level": "level", "sampler_floor": "lower", "sampler_outside": "outside"}


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """The tables ``loss`` and ``sampler_correction`` of ``options`` that name their keys one by one.

    ``loss`` is the loss's type there, and a number for ``sampler_correction`` its upper bound.
    """
    table: dict[str, Any] = {}
    for key, value in options.items():
        if key in _OF_LOSS:
            table.setdefault("loss", {})[key] = value
        elif key == "loss" and isinstance(value, str):
            table.setdefault("loss", {})["type"] = value
        elif key in _OF_CORRECTION:
            table.setdefault("sampler_correction", {})[_OF_CORRECTION[key]] = value
        elif key == "sampler_correction" and isinstance(value, int | float):
            table.setdefault("sampler_correction", {})["upper"] = value
        elif key == "sampler_correction" and isinstance(table.get(key), dict):
            raise ValueError("there is no correction to set the bounds of")
        else:
            table[key] = value
    return table
