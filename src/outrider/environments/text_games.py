"""Text games: the policy types one command per turn between ``<action>`` and ``</action>``."""

import copy
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal, Protocol, Self

from outrider.environments.base import Env, EnvironmentFactory, Episode, EpisodeResult, StepResult
from outrider.errors import EnvironmentFault
from outrider.types import Message, Step, Task

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


@dataclass(slots=True, kw_only=True)
class GameRecord:
    """Counters of one episode."""

    score: int = 0
    max_score: int = 1
    num_moves: int = 0
    num_turns: int = 0
    num_invalid: int = 0
    num_refused: int = 0
    won: bool = False
    lost: bool = False
    cut_by_moves: bool = False

    @property
    def done(self) -> bool:
        return self.won or self.lost or self.cut_by_moves


class GameEnvironment:
    """One episode of a game. The observation is a user message.

    ``close`` may come from another thread while a call is in progress. It does not wait: that thread then
    closes the game when its call returns, because closing a simulator in use may crash the process.
    """

    name: ClassVar[str]
    """Name in error messages."""
    metrics: ClassVar[tuple[str, ...]]
    """Fields of the record that are reported as metrics."""

    def __init__(self, open_game: Callable[[], Game], *, max_moves: int, num_shown: int = 0) -> None:
        """``num_shown``: append up to this many possible commands to every observation."""
        self._open_game = open_game
        self._max_moves = max_moves
        self._num_shown = num_shown
        self._game: Game | None = None
        self._record = GameRecord()
        self._inside = threading.Lock()
        self._closed = False

    def reset(self, seed: int) -> Sequence[Message]:
        """Start the game. ``seed`` is not used, because a task is one fixed game."""
        with self._exclusive():
            self._end_game()
            self._record = GameRecord()
            self._game = game = self._open_game()
            self._record.max_score = game.max_score
            return (Message(role="user", content=game.opening + self._listing(game)),)

    def step(self, message: Message) -> StepResult:
        with self._exclusive():
            record, game = self._record, self._game
            if record.done:
                raise RuntimeError(f"the {self.name} episode has ended")
            if game is None:
                raise EnvironmentFault(f"the {self.name} environment has no game; call reset first")
            record.num_turns += 1
            command, problem = parse_action(message.content)
            problem = problem or self._find_problem(command)
            if problem:
                record.num_invalid += 1
                return StepResult(message=Message(role="user", content=problem), invalid=True)
            before, reply = self._value, game.act(command)
            invalid, refused = self._classify(command, reply)
            record.score, record.won, record.lost = reply.score, reply.won, reply.lost
            record.num_moves += 1
            record.num_invalid += invalid
            record.num_refused += refused
            record.cut_by_moves = not (reply.won or reply.lost) and record.num_moves >= self._max_moves
            text = reply.text or "Nothing happens."
            if record.done:
                self._end_game()
            else:
                text += self._listing(game)
            return StepResult(
                message=Message(role="user", content=text),
                reward=self._value - before,
                done=record.done,
                invalid=invalid,
                refused=refused,
                truncated=record.cut_by_moves,
            )

    def result(self) -> EpisodeResult:
        return EpisodeResult(
            episode_return=self._value,
            success=self._record.won,
            metrics={name: float(getattr(self._record, name)) for name in self.metrics},
        )

    def admitted(self) -> tuple[str, ...]:
        """The commands that are possible now, sorted; empty without a game."""
        return () if self._game is None else self._game.commands()

    def copy(self) -> Self:
        """An independent episode in the same state."""
        with self._exclusive():
            twin = copy.copy(self)
            twin._inside = threading.Lock()
            twin._record = replace(self._record)
            twin._game = None if self._game is None else self._game.copy()
            return twin

    def close(self) -> None:
        self._closed = True
        if self._inside.acquire(blocking=False):
            try:
                self._end_game()
            finally:
                self._inside.release()

    @property
    def _value(self) -> float:
        """The return so far."""
        return self._record.score / self._record.max_score

    def _find_problem(self, command: str) -> str:
        """Why a command must not reach the game, in words for the policy; empty if it may."""
        return ""

    def _classify(self, command: str, reply: Reply) -> tuple[bool, bool]:
        """Whether the game could not parse the command, and whether it refused it."""
        return False, reply.refused

    def _listing(self, game: Game) -> str:
        if not self._num_shown:
            return ""
        return "\n\n" + render_valid_actions(game.commands(), self._num_shown)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        try:
            with self._inside:
                if self._closed:
                    raise EnvironmentFault(f"the {self.name} environment is closed")
                yield
        finally:
            if self._closed:  # closed by another thread, which could not end the game
                self.close()

    def _end_game(self) -> None:
        game, self._game = self._game, None
        if game is not None:
            game.close()


class SimpleFactory:
    """A factory whose environments share only what does not change."""

    def __init__(self, make: Callable[[Task], Env]) -> None:
        self._make = make

    def __call__(self, task: Task) -> Any:
        return self._make(task)

    def close(self) -> None:
        """Nothing to release."""


class GameTaskSet(ABC):
    """Base of the task sets of text games, whose expert plays a known list of commands."""

    stop: tuple[str, ...] = (STOP,)
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True

    @abstractmethod
    def environment(self, task: Task) -> Env:
        """An episode of the task. Raises ConfigError for a task of other games."""

    @abstractmethod
    def solution(self, task: Task) -> Sequence[str]:
        """The expert's commands. Raises ConfigError for a task of other games."""

    def make(self) -> EnvironmentFactory:
        return SimpleFactory(self.environment)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """Steps of the solution; None if it does not succeed, for example within ``max_moves``."""
        return play_commands(self.environment(task), self.solution(task), seed)

    def close(self) -> None:  # noqa: B027 - a default that does nothing
        """Nothing to release."""


def play_commands(environment: Env, commands: Sequence[str], seed: int) -> Sequence[Step] | None:
    """Play commands in a new episode and close it. Returns None if the episode is no success."""
    try:
        environment.reset(seed)
        steps = Episode(environment).play([render_action(command) for command in commands])
    finally:
        environment.close()
    return steps if environment.result().success else None
