"""Observations as text."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np

ObservationMode = Literal["text", "render", "json"]
_COLOURED: Final = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def observation_text(observation: Any, info: Mapping[str, Any], mode: ObservationMode, rendered: Any) -> str:
    """What the policy reads. ``rendered`` is what ``render`` gave; GEM's games put text around an observation
    by ``info["prefix"]`` and ``info["suffix"]``.
    """
    if mode == "render":
        body = plain(str(rendered))
    elif mode == "json":
        body = json.dumps(_keyed(observation), default=_listed, ensure_ascii=False)
    else:
        body = str(observation)
    sections = (str(info.get("prefix") or ""), body, str(info.get("suffix") or ""))
    return "\n".join(part.strip("\n") for part in sections if part.strip())


def plain(rendered: str) -> str:
    """A terminal's picture without its escapes. What was coloured stands in brackets: often the colour alone
    says where the player is.
    """
    return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", rendered))


def _keyed(value: Any) -> Any:
    """With keys that JSON can have: a dictionary's may be numbers of NumPy's or tuples."""
    if isinstance(value, Mapping):
        return {_key(key): _keyed(item) for key, item in value.items()}
    return [_keyed(item) for item in value] if isinstance(value, list | tuple) else value


def _key(key: Any) -> Any:
    if isinstance(key, np.generic):
        return str(key)
    return key if key is None or isinstance(key, str | int | float) else str(key)


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        # Row by row, so that numbers of less than double precision come by themselves.
        return (
            list(value) if value.dtype.kind == "f" and value.ndim and value.itemsize < 8 else value.tolist()
        )
    if isinstance(value, np.floating):
        return float(str(value))  # the shortest digits of its own precision: 0.1 and not 0.10000000149
    return value.item() if isinstance(value, np.generic) else str(value)
