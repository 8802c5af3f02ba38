"""From a turn's text to an action of the environment's space."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.environments.scienceworld.text import parse_action


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
        parsed = parse_action(text, lower=False)
        return Read(problem=parsed.problem) if parsed.problem else Read(action=parsed.action)

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
        parsed = parse_action(text)
        if parsed.problem:
            return Read(problem=parsed.problem)
        if parsed.action not in self._numbers:
            return Read(problem=f"There is no action {parsed.action!r}. The actions are: {self._listing}.")
        return Read(action=self._numbers[parsed.action])

    def probe(self, number: int) -> str:
        """A turn with which the environment is tried."""
        return f"<action>{list(self._numbers)[number % len(self._numbers)]}</action>"
