"""One episode of one TextWorld game."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from outrider.environments.base import EpisodeResult, StepResult
from outrider.environments.scienceworld import text as scienceworld_text
from outrider.environments.textworld.commands import refusal
from outrider.environments.textworld.kinds import Split
from outrider.environments.textworld.play import Game, Opening
from outrider.environments.textworld.settings import TextWorldConfig, identity
from outrider.errors import EnvironmentFault
from outrider.types import Message, Task

_UNREADABLE: Final = (
    "That's not a verb I recognise",
    "I didn't understand",
    "I only understood you",
    "I beg your pardon",
)

INSTRUCTIONS: Final = (
    "You play a text adventure and reach its goal by typing commands, one a turn.\n"
    "You may think first. Then write exactly one command between <action> and </action>, for example "
    "<action>look</action>. The next message tells what happened.\n"
    "Commands, where OBJ stands for a thing that you can see or carry (for example: open fridge):\n"
    "{templates}"
)


@dataclass(slots=True, kw_only=True)
class _Record:
    """Counts of one episode."""

    score: int = 0
    max_score: int = 1
    num_moves: int = 0
    num_turns: int = 0
    num_invalid: int = 0
    won: bool = False
    lost: bool = False
    cut_by_moves: bool = False

    @property
    def done(self) -> bool:
        return self.won or self.lost or self.cut_by_moves

    @property
    def value(self) -> float:
        return self.score / self.max_score


class TextWorldEnvironment:
    """One episode of one game. Chat protocol: the command in ``<action>...</action>``, the observation as a
    user message.

    Every environment has an interpreter of its own, so several may run in threads; loading takes a lock of
    the process.
    """

    def __init__(
        self, *, task: Task, config: TextWorldConfig, open_game: Callable[[Split, int], Game]
    ) -> None:
        """Nothing is started before :meth:`reset`. Raises :class:`ConfigError` for a task of other games."""
        self._key = identity(task, config)
        self._task = task
        self._config = config
        self._open_game = open_game
        self._game: Game | None = None
        self._record = _Record()
        # The interpreter must not be closed while another thread is inside it: that would crash the whole
        # process.
        self._inside = threading.Lock()
        self._closed = False

    def reset(self, seed: int) -> Sequence[Message]:
        """Start the game from its beginning. ``seed`` changes nothing: a game and its texts are fixed by its
        making.
        """
        with self._exclusive():
            self._end_game()
            self._record = _Record()
            self._game = game = self._open_game(*self._key)
            self._record.max_score = game.opening.max_score
            return (Message(role="user", content=render_prompt(game.opening) + self._listing(game)),)

    def step(self, message: Message) -> StepResult:
        """Perform the one command of the message; unreadable text changes nothing and is answered in
        words.
        """
        with self._exclusive():
            if self._record.done:
                raise RuntimeError("the TextWorld episode has ended")
            if self._game is None:
                raise EnvironmentFault("the TextWorld environment holds no game (never reset, or closed)")
            self._record.num_turns += 1
            parsed = scienceworld_text.parse_action(message.content)
            problem = parsed.problem or refusal(parsed.action)
            if problem:
                self._record.num_invalid += 1
                return StepResult(message=Message(role="user", content=problem), invalid=True)
            return self._act(self._game, parsed.action)

    def result(self) -> EpisodeResult:
        """The share of the largest score as the return; ``score`` in the metrics counts points."""
        record = self._record
        return EpisodeResult(
            episode_return=record.value,
            success=record.won,
            metrics={
                "score": float(record.score),
                "max_score": float(record.max_score),
                "num_moves": float(record.num_moves),
                "num_turns": float(record.num_turns),
                "num_invalid": float(record.num_invalid),
                "lost": float(record.lost),
                "cut_by_moves": float(record.cut_by_moves),
            },
        )

    def copy(self) -> "TextWorldEnvironment":
        """The same episode at the same point (0.05-0.2 s); neither sees what the other does from then on."""
        with self._exclusive():
            twin = TextWorldEnvironment(task=self._task, config=self._config, open_game=self._open_game)
            twin._record = replace(self._record)
            twin._game = None if self._game is None else self._game.copy()
            return twin

    def close(self) -> None:
        """End the interpreter; may be called twice. While another thread is inside, that thread ends it when
        it comes out.
        """
        self._closed = True
        if self._inside.acquire(blocking=False):
            try:
                self._end_game()
            finally:
                self._inside.release()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        try:
            with self._inside:
                if self._closed:
                    raise EnvironmentFault("the TextWorld environment is closed")
                yield
        finally:
            if self._closed:  # someone closed it meanwhile and could not get in
                self.close()

    def _end_game(self) -> None:
        game, self._game = self._game, None
        if game is not None:
            game.close()

    def _act(self, game: Game, command: str) -> StepResult:
        record, before = self._record, self._record.value
        reply = game.act(command)
        unreadable = reply.text.startswith(_UNREADABLE)
        record.score, record.won, record.lost = reply.score, reply.won, reply.lost
        record.num_moves += 1
        record.num_invalid += unreadable
        record.cut_by_moves = not (reply.won or reply.lost) and record.num_moves >= self._config.max_moves
        observation = reply.text or "Nothing happens."
        if record.done:
            self._end_game()
        else:
            observation += self._listing(game)
        return StepResult(
            message=Message(role="user", content=observation),
            reward=record.value - before,
            done=record.done,
            invalid=unreadable,
            refused=reply.refused,
            truncated=record.cut_by_moves,
        )

    def _listing(self, game: Game) -> str:
        if not self._config.show_admissible:
            return ""
        return "\n\n" + scienceworld_text.render_valid_actions(
            game.commands(), self._config.num_shown_actions
        )


def render_prompt(opening: Opening) -> str:
    """The first user message: how to act, the goal, and what the player sees."""
    return f"{INSTRUCTIONS.format(templates=', '.join(opening.command_templates))}\n\n{opening.text}"
