"""From a turn's text to an action of the environment's space."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from outrider.environments.text_games import parse_action


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """An action, or ``problem``: what was wrong, in words for the policy."""

    action: Any = None
    problem: str = ""


class RawAction:
    """The whole text of a turn."""

    instructions = ""

    def read(self, text: str) -> Read:
        """Never a problem: the environment looks for its own marks."""
        return Read(action=text)

    def probe(self, number: int) -> str:
        """A turn with which the environment is tried; GEM's games read what is boxed."""
        return f"\\boxed{{{number + 1}}}"


class TextAction(RawAction):
    """The text between ``<action>`` and ``</action>``."""

    instructions = "Write one action a turn, for example <action>look</action>."

    def read(self, text: str) -> Read:
        """The text as it is written, with its white space collapsed."""
        action, problem = parse_action(text, lower=False)
        return Read(problem=problem) if problem else Read(action=action)

    def probe(self, number: int) -> str:
        """A turn with which the environment is tried."""
        return f"<action>{number + 1}</action>"


class WordAction(TextAction):
    """One of the words of an environment that lists them. The environment reads the text and judges it: some
    look for the word inside a mark of their own, such as GEM's games inside a box.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        example = f"Write one action a turn, for example <action>{words[0]}</action>."
        self.instructions = f"{example} The actions are: {', '.join(words)}."

    def probe(self, number: int) -> str:
        """A turn with which the environment is tried."""
        return f"<action>{self._words[number % len(self._words)]}</action>"


class DiscreteAction:
    """One of a discrete space's actions between the tags; ``first`` is the space's smallest number."""

    def __init__(self, names: Sequence[str], first: int) -> None:
        self._numbers = {" ".join(name.lower().split()): first + number for number, name in enumerate(names)}
        self._listing = ", ".join(names)
        example = f"Write one action a turn, for example <action>{names[0]}</action>."
        self.instructions = f"{example} The actions are: {self._listing}."

    def read(self, text: str) -> Read:
        """Case does not matter."""
        action, problem = parse_action(text)
        if problem:
            return Read(problem=problem)
        if action not in self._numbers:
            return Read(problem=f"There is no action {action!r}. The actions are: {self._listing}.")
        return Read(action=self._numbers[action])

    def probe(self, number: int) -> str:
        """A turn with which the environment is tried."""
        return f"<action>{list(self._numbers)[number % len(self._numbers)]}</action>"


# Observations as text.


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
