"""Observations as text."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np

How = Literal["text", "render", "json"]
_COLOURED: Final = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def written(observation: Any, info: Mapping[str, Any], how: How, rendered: Any) -> str:
    """What the policy reads. ``rendered`` is what ``render`` gave; GEM's games put text around an observation
    by ``info["prefix"]`` and ``info["suffix"]``.
    """
    if how == "render":
        body = plain(str(rendered))
    elif how == "json":
        body = json.dumps(observation, default=_listed)
    else:
        body = str(observation)
    around = (str(info.get("prefix") or ""), body, str(info.get("suffix") or ""))
    return "\n".join(part.strip("\n") for part in around if part.strip())


def plain(rendered: str) -> str:
    """A terminal's picture without its escapes. What was coloured stands in brackets: often the colour alone
    says where the player is.
    """
    return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", rendered))


def _listed(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)
