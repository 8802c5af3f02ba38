"""A TextWorld game in play."""

import copy
import json
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from outrider.environments.text_games import Reply
from outrider.errors import EnvironmentFault

# Games with the same rules share one object of the package. Its parser is not re-entrant, and its rules
# remember what they were applied to: a game that lists commands adds to that whenever it starts, moves or is
# copied, and copying any game iterates over it ("dictionary changed size during iteration"). Hence one lock
# for all of it.
_RULES: Final = threading.Lock()
# Reports of a traced game between the lines that a player reads. Those with a parenthesis are parts of
# others.
_TRACED: Final = re.compile(r"\[[^]]+\]\n?")
_DONE: Final = re.compile(r"\[[^]()]+ - succeeded\]")


INSTRUCTIONS: Final = (
    "You play a text adventure and reach its goal by typing commands, one a turn.\n"
    "You may think first. Then write exactly one command between <action> and </action>, for example "
    "<action>look</action>. The next message tells what happened.\n"
    "Commands, where OBJ stands for a thing that you can see or carry (for example: open fridge):\n"
    "{templates}"
)


def render_opening(command_templates: Iterable[str], text: str) -> str:
    """The first message: instructions, goal and first room. Gaps of a template are written as OBJ."""
    templates = sorted({re.sub(r"\{.*?\}", "OBJ", template) for template in command_templates})
    return f"{INSTRUCTIONS.format(templates=', '.join(templates))}\n\n{text}"


class StoryGame:
    """A story file in the package's interpreter, which loads a library per game (0.02 to 0.5 s)."""

    def __init__(self, environment: Any, state: Any, *, with_commands: bool) -> None:
        """``environment`` is a started environment of the package; see :meth:`start`."""
        self._environment = environment
        self._state = state
        self._with_commands = with_commands
        self.opening = render_opening(state["command_templates"], clean(state["feedback"]))
        self.max_score = int(state["max_score"])

    @classmethod
    def start(cls, story: Path, *, with_commands: bool) -> "StoryGame":
        """Start a game. ``with_commands``: track the possible commands, which halves the speed.

        Raises EnvironmentFault.
        """
        with _faults(f"cannot start the game {story} (delete its folder to make it again)"):
            import textworld

            infos = textworld.EnvInfos(admissible_commands=with_commands)
            with _RULES:
                environment = textworld.start(str(story), infos)
                state = environment.reset()
                # The package does the same when it tracks the game's logic.
                environment.unwrapped._send("tw-trace-actions")
                return cls(environment, state, with_commands=with_commands)

    def act(self, command: str) -> Reply:
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
        """The possible commands; only for a game that was started ``with_commands``."""
        return tuple(self._state["admissible_commands"])

    def copy(self) -> "StoryGame":
        with _faults("the game cannot be copied"), _RULES:
            twin = copy.copy(self)
            twin._environment = self._environment.copy()
            return twin

    def close(self) -> None:
        self._environment.close()


def walkthrough(story: Path) -> tuple[str, ...]:
    """The commands that win a game. Raises EnvironmentFault if its description cannot be read."""
    with _faults(f"cannot read the description of {story}"):
        description = json.loads(story.with_suffix(".json").read_text(encoding="utf-8"))
        return tuple(str(command) for command in description["metadata"]["walkthrough"])


def clean(text: str) -> str:
    """A game's text without banner, status line, prompt, the question after the end, and repeated blank
    lines.
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
    # The package raises all kinds of exceptions; the run must survive each of them.
    except Exception as error:
        raise EnvironmentFault(f"TextWorld: {operation}: {type(error).__name__}: {error}") from error
