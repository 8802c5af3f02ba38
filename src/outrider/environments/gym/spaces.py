"""Actions and observations of Gymnasium's spaces as text."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from outrider.environments.seeded import ActionFormat
from outrider.environments.text_games import parse_action

NUM_PROBES: Final = 5


def raw_action() -> ActionFormat:
    """The whole text of a turn, for environments that look for their own marks."""
    boxes = tuple(f"\\boxed{{{number}}}" for number in range(1, NUM_PROBES + 1))  # as GEM's games read
    return ActionFormat(instructions="", probes=boxes, read=lambda text: (text, ""))


def text_action(words: Sequence[str] = ()) -> ActionFormat:
    """The text between the tags with white space collapsed.

    ``words`` are the actions of an environment that lists them. It checks the text itself: some environments
    look for the word inside a mark of their own, such as GEM's games inside a box.
    """
    instructions = f"Write one action a turn, for example <action>{words[0] if words else 'look'}</action>."
    if words:
        instructions += f" The actions are: {', '.join(words)}."
    texts = tuple(words) or tuple(map(str, range(1, NUM_PROBES + 1)))
    return ActionFormat(
        instructions=instructions,
        probes=tuple(f"<action>{text}</action>" for text in texts),
        read=lambda text: parse_action(text, lower=False),
    )


def discrete_action(names: Sequence[str], first: int) -> ActionFormat:
    """The name of an action of a discrete space between the tags, in upper or lower case.

    ``first`` is the space's smallest number.
    """
    numbers = {" ".join(name.lower().split()): first + number for number, name in enumerate(names)}
    listing = ", ".join(names)
    example = f"Write one action a turn, for example <action>{names[0]}</action>."

    def read(text: str) -> tuple[int | None, str]:
        action, problem = parse_action(text)
        if not problem and action not in numbers:
            problem = f"There is no action {action!r}. The actions are: {listing}."
        return numbers.get(action), problem

    return ActionFormat(
        instructions=f"{example} The actions are: {listing}.",
        probes=tuple(f"<action>{name}</action>" for name in numbers),
        read=read,
    )


ObservationMode = Literal["text", "render", "json"]
_COLOURED: Final = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def observation_text(observation: Any, info: Mapping[str, Any], mode: ObservationMode, rendered: Any) -> str:
    """The text of an observation. ``rendered`` is the result of ``render``; GEM's games add text before and
    after with ``info["prefix"]`` and ``info["suffix"]``.
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
    """A terminal's picture without its escapes. Coloured text is put in brackets, because often only the
    colour shows where the player is.
    """
    return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", rendered))


def _keyed(value: Any) -> Any:
    """Convert keys that JSON does not allow, such as numbers of NumPy and tuples."""
    if isinstance(value, Mapping):
        return {
            key
            if (key is None or isinstance(key, str | int | float)) and not isinstance(key, np.generic)
            else str(key): _keyed(item)
            for key, item in value.items()
        }
    return [_keyed(item) for item in value] if isinstance(value, list | tuple) else value


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        # Row by row, so that numbers of less than double precision are converted one by one.
        return (
            list(value) if value.dtype.kind == "f" and value.ndim and value.itemsize < 8 else value.tolist()
        )
    if isinstance(value, np.floating):
        return float(str(value))  # the shortest digits of its own precision: 0.1, not 0.10000000149
    return value.item() if isinstance(value, np.generic) else str(value)
