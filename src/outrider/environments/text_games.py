"""Text games: the policy types one command per turn between ``<action>`` and ``</action>``."""

import copy
import re
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Protocol, Self

from outrider.environments.base import Environment, EpisodeResult, StepResult
from outrider.errors import EnvironmentFault
from outrider.types import Step, Task

STOP: Final = "</action>"
MAX_ACTION_CHARACTERS: Final = 200
TAGGED: Final = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.DOTALL)


def parse_action(text: str, *, lower: bool = True, verbatim: bool = False) -> tuple[str, str]:
    """Find the one ``<action>...</action>`` of a turn; text around it is ignored. Never raises.

    Args:
        text: the turn.
        lower: convert the command to lower case.
        verbatim: return the text between the tags as it is, at any length (a program, or JSON). Otherwise
            white space is collapsed.

    Returns:
        The command and an empty string; or an empty string and, for the policy, what is wrong with the turn.
    """
    commands = TAGGED.findall(text)
    if not commands:
        return "", "No command found. Write exactly one command as <action>command</action>."
    if len(commands) > 1:
        count = len(commands)
        return "", f"Found {count} commands; nothing was done. Write exactly one <action>command</action>."
    command = commands[0].strip() if verbatim else " ".join(commands[0].split())
    command = command.lower() if lower and not verbatim else command
    if not command:
        return "", "The command is empty. Write one command as <action>command</action>."
    if len(command) > MAX_ACTION_CHARACTERS and not verbatim:
        return "", f"The command is longer than {MAX_ACTION_CHARACTERS} characters; nothing was done."
    return command, ""


def render_action(command: str) -> str:
    """A turn that consists of the command only."""
    return f"<action>{command}{STOP}"


def render_valid_actions(actions: Sequence[str], limit: int) -> str:
    """The list of valid commands, truncated to ``limit``, with the number of omitted ones."""
    listing = "\n".join(actions[:limit])
    num_hidden = len(actions) - limit
    return f"Commands understood now:\n{listing}" + (f"\n... and {num_hidden} more" if num_hidden > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A game's reply to a command. ``refused``: the game did not execute the command."""

    text: str
    score: int = 0
    won: bool = False
    lost: bool = False
    refused: bool = False


class Game(Protocol):
    """A started game. Calls of one game must not overlap; calls of different games may.

    Attributes:
        opening: text of the first message.
        max_score: score of a solved game.
    """

    opening: str
    max_score: int

    def act(self, command: str) -> Reply:
        """Execute a command. Raises EnvironmentFault if a simulator breaks."""
        ...

    def commands(self) -> tuple[str, ...]:
        """The commands that are possible now, sorted."""
        ...

    def copy(self) -> "Game":
        """An independent game in the same state."""
        ...

    def close(self) -> None:
        """Release resources; may be called twice."""
        ...


_COUNTERS: Final = (
    "score", "max_score", "num_moves", "num_turns", "num_invalid", "num_refused", "lost", "cut_by_moves"
)  # fmt: skip


class TextGame(Environment):
    """Base class of text games. The settings need ``max_moves``, ``show_admissible`` and
    ``num_shown_actions``.

    ``close`` may come from another thread while a call is in progress. It does not wait: that thread then
    closes the game when its call returns, because closing a simulator in use may crash the process.

    Class attributes:
        title: name in error messages.
        prompt: text before the game's opening.
        reported: the counters that are metrics.
    """

    stop = (STOP,)
    title: ClassVar[str]
    prompt: ClassVar[str] = ""
    reported: ClassVar[tuple[str, ...]]

    def __init__(self, settings: object = None, shared: object = None) -> None:
        super().__init__(settings, shared)
        self.game: Game | None = None
        self.opening = ""
        self._counters = dict.fromkeys(_COUNTERS, 0.0)
        self._reply = Reply(text="")
        self._is_over = False
        self._inside = threading.Lock()
        self._closed = False

    @abstractmethod
    def open_game(self) -> Game:
        """Start the game of ``self.task``. Raises ConfigError for a task of other games."""

    @abstractmethod
    def solution(self) -> Sequence[str]:
        """The expert's commands for ``self.task``."""

    def reset(self, task: Task, seed: int) -> str:
        """Start the game. ``seed`` is not used, because a task is one fixed game."""
        with self._exclusive():
            self._end_game()
            self._counters = dict.fromkeys(_COUNTERS, 0.0)
            self._reply, self._is_over = Reply(text=""), False
            self.game = game = self.open_game()
            self.opening = game.opening
            self._counters["max_score"] = float(game.max_score)
            return self.prompt + game.opening + self._listing(game)

    def step(self, action: str) -> StepResult:
        """Execute the command between the tags, and append the list of commands to the observation."""
        with self._exclusive():
            game = self._running_game()
            command, problem = parse_action(action)
            problem = problem or self.find_problem(command)
            if problem:
                return self._not_executed(problem)
            result = self._execute(game, command)
            return result if result.done else replace(result, message=result.text + self._listing(game))

    def act(self, command: str) -> StepResult:
        """Execute a command without tags. The observation has no list of commands."""
        with self._exclusive():
            game, command = self._running_game(), " ".join(command.split())
            problem = self.find_problem(command)
            return self._not_executed(problem) if problem else self._execute(game, command)

    def admitted(self) -> tuple[str, ...]:
        """The commands that are possible now."""
        with self._exclusive():
            return () if self.game is None else self.game.commands()

    @property
    def task_text(self) -> str:
        """The goal in one line."""
        return self.task.question

    def _running_game(self) -> Game:
        """The game of a new turn."""
        if self._is_over:
            raise RuntimeError(f"the {self.title} episode has ended")
        if self.game is None:
            raise EnvironmentFault(f"the {self.title} environment has no game; call reset first")
        self._counters["num_turns"] += 1
        return self.game

    def _not_executed(self, problem: str) -> StepResult:
        self._counters["num_invalid"] += 1
        return StepResult(message=problem, invalid=True)

    def _execute(self, game: Game, command: str) -> StepResult:
        counters, before, reply = self._counters, self.value, game.act(command)
        self._reply = reply
        invalid, refused = self.classify(command, reply)
        truncated = not (reply.won or reply.lost) and counters["num_moves"] + 1 >= self.settings.max_moves
        counters["num_moves"] += 1
        counters["num_invalid"] += invalid
        counters["num_refused"] += refused
        counters |= {
            "score": float(reply.score),
            "lost": float(reply.lost),
            "cut_by_moves": float(truncated),
        }
        self._is_over = reply.won or reply.lost or truncated
        if self._is_over:
            self._end_game()
        return StepResult(
            message=reply.text or "Nothing happens.",
            reward=self.value - before,
            done=self._is_over,
            invalid=invalid,
            refused=refused,
            truncated=truncated,
        )

    def result(self) -> EpisodeResult:
        metrics = {name: self._counters[name] for name in self.reported}
        return EpisodeResult(
            episode_return=self.value, success=self._reply.won, metrics=metrics, reason=self._reason
        )

    @property
    def _reason(self) -> str:
        score = f"score {self._counters['score']:g} of {self._counters['max_score']:g}"
        if self._reply.won or self._reply.lost:
            return f"the game was {'won' if self._reply.won else 'lost'}: {score}"
        if self._counters["cut_by_moves"]:
            return f"not solved within max_moves = {self.settings.max_moves}: {score}"
        return f"the game did not end: {score}"

    @property
    def value(self) -> float:
        """The return so far."""
        return self._counters["score"] / (self._counters["max_score"] or 1.0)

    def find_problem(self, command: str) -> str:
        """Why a command must not reach the game, in words for the policy; empty if it may."""
        return ""

    def classify(self, command: str, reply: Reply) -> tuple[bool, bool]:
        """Whether the game could not parse the command, and whether it refused it."""
        return False, reply.refused

    def expert(self) -> Sequence[Step] | None:
        """Steps of the solution; None if it does not succeed, for example within ``max_moves``."""
        return play_commands(self, self.solution())

    def copy(self) -> Self:
        """An independent episode in the same state."""
        with self._exclusive():
            twin = copy.copy(self)
            twin._inside = threading.Lock()
            twin._counters = dict(self._counters)
            twin.game = None if self.game is None else self.game.copy()
            return twin

    def close(self) -> None:
        self._closed = True
        if self._inside.acquire(blocking=False):
            try:
                self._end_game()
            finally:
                self._inside.release()

    def _listing(self, game: Game) -> str:
        if not self.settings.show_admissible:
            return ""
        return "\n\n" + render_valid_actions(game.commands(), self.settings.num_shown_actions)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        try:
            with self._inside:
                if self._closed:
                    raise EnvironmentFault(f"the {self.title} environment is closed")
                yield
        finally:
            if self._closed:  # closed by another thread, which could not end the game
                self.close()

    def _end_game(self) -> None:
        game, self.game = self.game, None
        if game is not None:
            game.close()


def play_commands(environment: Environment, commands: Sequence[str]) -> Sequence[Step] | None:
    """Play commands in an episode that was reset. Returns None if it is no success."""
    steps: list[Step] = []
    for command in commands:
        text = render_action(command)
        result = environment.step(text)
        assert isinstance(result, StepResult)
        steps.append(Step(text=text, observation=result.text, is_terminal=result.done))
        if result.done:
            break
    return steps if environment.result().success else None
