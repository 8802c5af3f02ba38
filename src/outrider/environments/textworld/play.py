"""Playing one made TextWorld game: what it shows, what it answers, and its copies."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from outrider.errors import EnvironmentFault

# Games with the same rules share one object of the package that holds them. Its parser is not re-entrant, and
# its rules remember what they were applied to: a game that lists commands adds to that whenever it starts,
# moves or is copied, and the copy of any game walks through it ("dictionary changed size during iteration").
# So all of these take turns.
_RULES: Final = threading.Lock()
# A traced game reports its actions so, between the lines that a player reads. Those with a parenthesis are
# parts of others.
_TRACED: Final = re.compile(r"\[[^]]+\]\n?")
_DONE: Final = re.compile(r"\[[^]()]+ - succeeded\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer of a game: its text, the points so far, and whether the game has ended.

    ``refused``: the command was not done, whether the game did not understand it or did not allow it.
    """

    text: str
    score: int
    won: bool = False
    lost: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a game starts: its goal and first room in words, the commands with their gaps, the points that it
    can give.
    """

    text: str
    command_templates: tuple[str, ...]
    max_score: int


class Game(Protocol):
    """A started game. Calls of one game must not overlap; those of different games may."""

    opening: Opening

    def act(self, command: str) -> Reply:
        """Perform a command. Raises EnvironmentFault when the interpreter broke."""
        ...

    def commands(self) -> tuple[str, ...]:
        """The commands that the game understands now, sorted; needs a game that was started for it."""
        ...

    def copy(self) -> "Game":
        """The same game at the same point, independent from then on."""
        ...

    def close(self) -> None:
        """End the interpreter; may be called twice."""
        ...


class StoryGame:
    """A story file in the package's interpreter, which loads a library of its own for every game (0.02-0.5
    s).
    """

    def __init__(self, environment: Any, state: Any, *, with_commands: bool) -> None:
        """Take over a started environment of the package; use :meth:`start`."""
        self._environment = environment
        self._state = state
        self._with_commands = with_commands
        templates = {re.sub(r"\{.*?\}", "OBJ", template) for template in state["command_templates"]}
        self.opening = Opening(
            text=clean(state["feedback"]),
            command_templates=tuple(sorted(templates)),
            max_score=int(state["max_score"]),
        )

    @classmethod
    def start(cls, story: Path, *, with_commands: bool) -> "StoryGame":
        """Start a game; ``with_commands`` follows its logic too, which halves the speed. Raises
        EnvironmentFault.
        """
        with _faults(f"cannot start the game {story} (delete its folder to have it made again)"):
            import textworld

            infos = textworld.EnvInfos(admissible_commands=with_commands)
            with _RULES:
                environment = textworld.start(str(story), infos)
                state = environment.reset()
                # as the package does itself where it follows the game's logic
                environment.unwrapped._send("tw-trace-actions")
                return cls(environment, state, with_commands=with_commands)

    def act(self, command: str) -> Reply:
        """Play one command. Raises EnvironmentFault when the interpreter breaks."""
        with _faults("the game broke"), _RULES if self._with_commands else nullcontext():
            self._state, _, _ = self._environment.step(command)
            state = self._state
            won, lost = bool(state["won"]), bool(state["lost"])
            return Reply(
                text=clean(_TRACED.sub("", state["feedback"])),
                score=int(state["score"]),
                won=won,
                lost=lost,
                refused=not (won or lost or _DONE.search(state["raw"])),
            )

    def commands(self) -> tuple[str, ...]:
        """Those that the game admits now."""
        return tuple(self._state["admissible_commands"])

    def copy(self) -> "StoryGame":
        """An independent game in the same state."""
        with _faults("the game cannot be copied"), _RULES:
            twin = StoryGame.__new__(StoryGame)
            twin._environment, twin._state, twin.opening = self._environment.copy(), self._state, self.opening
            twin._with_commands = self._with_commands
            return twin

    def close(self) -> None:
        """Release the interpreter."""
        self._environment.close()


def walkthrough(story: Path) -> tuple[str, ...]:
    """The commands that win a made game. Raises EnvironmentFault where its description cannot be read."""
    with _faults(f"cannot read the description of {story}"):
        description = json.loads(story.with_suffix(".json").read_text(encoding="utf-8"))
        return tuple(str(command) for command in description["metadata"]["walkthrough"])


def clean(text: str) -> str:
    """A game's text for a player: without banner, status line and prompt, the question after the end, and
    empty lines.
    """
    text = re.sub(r"(?m)^[ _|\\/$<>]*[_|$][ _|\\/$<>]*$", "", text)
    text = re.sub(r"\n>[^\n]*\Z", "", text.rstrip())
    text = re.sub(r"\n\s*Would you like to RESTART, RESTORE a saved game.*\Z", "", text, flags=re.DOTALL)
    lines = [line.strip() if "***" in line else line.rstrip() for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


@contextmanager
def _faults(operation: str) -> Iterator[None]:
    try:
        yield
    # whatever a package of this size raises, the episode is lost and the run goes on
    except Exception as error:
        raise EnvironmentFault(f"TextWorld: {operation}: {type(error).__name__}: {error}") from error
