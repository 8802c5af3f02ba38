"""Which TextWorld games there are, and by which rules they are played."""

import importlib.metadata
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, model_validator

from outrider.environments.base import EnvironmentSettings, EpisodeResult, StepResult
from outrider.environments.episode import Episode
from outrider.environments.scienceworld import tasks as scienceworld_text
from outrider.environments.textworld import games as textworld_games
from outrider.environments.textworld.games import GameSettings, GameShelf, QuestGame, Split
from outrider.environments.textworld.play import Game, Opening, StoryGame, walkthrough
from outrider.errors import ConfigError, EnvironmentFault, ToolUnavailable
from outrider.types import Message, Step, Task


class TextWorldConfig(EnvironmentSettings):
    """Which games are made and by which rules they are played."""

    starts_quickly: ClassVar[bool] = False

    type: Literal["textworld"] = "textworld"
    game: GameSettings = QuestGame()
    """Kind of game: ``quest``, ``coin_collector``, ``treasure_hunter`` or ``cooking``, each with its own
    sizes.
    """
    num_train: Annotated[int, Field(ge=0)] = 8
    """Games of the split. All differ in their seeds; of tiny games some can still be equal, across splits
    too.
    """
    num_valid: Annotated[int, Field(ge=0)] = 2
    num_test: Annotated[int, Field(ge=0)] = 4
    game_seed: int = 0
    """Decides the games, together with ``game``. More games leave the first ones as they are."""
    max_moves: Annotated[int, Field(ge=1)] = 50
    """Commands given to the game after which an episode is cut, understood or not; text without a command
    costs none.
    """
    show_admissible: bool = False
    """Append the list of commands that change or show something now to every observation (halves the
    speed).
    """
    num_shown_actions: Annotated[int, Field(ge=1)] = 100
    cache: Path | None = None
    """Folder of made games; None is ``$OUTRIDER_CACHE/textworld`` or ``~/.cache/outrider/textworld``.
    Processes may share it.
    """
    make_ahead: bool = True
    """Make all games before the first rollout, so that impossible settings stop the run at its start and no
    episode waits (2-5 s per game, once). Otherwise one game is made then and each other one, in turn, when it
    is first played: the rollout's limit of a step must leave time for that.
    """
    num_makers: Annotated[int, Field(ge=1)] = 2
    """Processes that make games; more than one per core gains nothing."""
    make_limit_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds a game, after which its making counts as broken."""

    @model_validator(mode="after")
    def _not_empty(self) -> "TextWorldConfig":
        if self.num_train + self.num_valid + self.num_test == 0:
            raise ValueError("num_train, num_valid and num_test are all 0: there is nothing to play")
        return self

    def shelf(self) -> GameShelf:
        """Where the games of these settings are kept."""
        return GameShelf(
            root=self.cache or cache_folder(),
            game=self.game,
            game_seed=self.game_seed,
            num_makers=self.num_makers,
            make_limit_s=self.make_limit_s,
        )


def cache_folder() -> Path:
    """Where games lie by default: ``$OUTRIDER_CACHE/textworld`` or ``~/.cache/outrider/textworld``."""
    return Path(os.environ.get("OUTRIDER_CACHE", Path.home() / ".cache" / "outrider")) / "textworld"


def identity(task: Task, config: TextWorldConfig) -> tuple[Split, int]:
    """Split and number of the task's game. Raises ConfigError for a task of other games."""
    games, split, index = (task.metadata.get(name) for name in ("games", "split", "index"))
    if games != config.shelf().name or not isinstance(index, int):
        raise ConfigError(f"{task.key} is not a task of these TextWorld games")
    for known in ("train", "valid", "test"):
        if known == split:
            return known, index
    raise ConfigError(f"{task.key} is of no split")


# Which commands reach a game.


MAX_COMMAND_CHARACTERS: Final = 100
"""The interpreter cuts off what is longer than its line."""
_READABLE: Final = re.compile(r"[a-z0-9' -]+")
# Commands to the interpreter: they write files, restart or end it, change how it talks, or repeat what the
# package typed unseen. Its dictionary holds nine letters of a word.
_OUTSIDE: Final = frozenset(
    word[:9]
    for word in (
        "again", "brief", "g", "long", "normal", "noscript", "notify", "nouns", "o", "oops", "pronouns",
        "q", "quit", "record", "recording", "replay", "restart", "restore", "save", "script", "short",
        "superbrief", "transcript", "undo", "unscript", "verbose", "verify", "version",
    )
)  # fmt: skip


def refusal(command: str) -> str:
    """Why a command does not reach the game, in words for the policy; empty where it does.

    Kept out: several commands in one line, and commands to the interpreter (``save`` and ``script`` would
    write files).
    """
    if len(command) > MAX_COMMAND_CHARACTERS:
        return f"The command is longer than {MAX_COMMAND_CHARACTERS} characters; nothing was done."
    if not _READABLE.fullmatch(command):
        return "A command holds only letters, digits, spaces, hyphens and apostrophes; nothing was done."
    words = command.split()
    if "then" in words:
        return "Found several commands; nothing was done. Write exactly one command."
    if words[0][:9] in _OUTSIDE or words[0].startswith("tw-"):
        return f"'{words[0]}' is not part of the game; nothing was done."
    return ""


# One episode of one TextWorld game.


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


# TextWorld: small text adventures made on the spot (Côté et al. 2018, arXiv 1806.11532), with forks through
# the package itself.
#
# The return is the game's score over its largest; a step's reward is what the step added, so rewards add up
# to the return. A game that is won or lost ends; ``max_moves`` cuts the others.


class TextWorldFactory:
    """Makes environments; each owns its interpreter, so there is nothing to share but the folder of games."""

    def __init__(self, *, config: TextWorldConfig, open_game: Callable[[Split, int], Game]) -> None:
        """``open_game`` starts the game of a split and number."""
        self._config = config
        self._open_game = open_game

    def __call__(self, task: Task) -> TextWorldEnvironment:
        """A fresh environment for one episode of the task."""
        return TextWorldEnvironment(task=task, config=self._config, open_game=self._open_game)

    def close(self) -> None:
        """Nothing is held."""


class TextWorldTaskSet:
    """The TextWorld games of a config. ``open_game`` replaces the package in tests."""

    Settings = TextWorldConfig
    name = "textworld"
    stop: tuple[str, ...] = (scienceworld_text.STOP,)
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True

    def __init__(
        self, config: TextWorldConfig, *, open_game: Callable[[Split, int], Game] | None = None
    ) -> None:
        """Make nothing."""
        self.config = config
        self._substitute = open_game

    def tasks(self, split: str) -> Sequence[Task]:
        """The frozen list of ``train``, ``valid`` or ``test``; needs no package and makes no game."""
        name, game = self.config.shelf().name, self.config.game.type.replace("_", " ")
        return tuple(
            Task(
                key=f"textworld/{name}/{known}/{index}",
                question=f"TextWorld {game} {index} of {known}",
                metadata={"games": name, "split": known, "index": index},
            )
            for known, index in self._keys(split)
        )

    def make(self) -> TextWorldFactory:
        """Make the games (all, or one: ``make_ahead``) and start one. Raises :class:`ToolUnavailable` or
        :class:`ConfigError`.
        """
        open_game = self._substitute or self._open
        keys = [key for split in ("train", "valid", "test") for key in self._keys(split)]
        if self._substitute is None:
            check_package()
        try:
            if self._substitute is None:
                self.config.shelf().ensure(keys if self.config.make_ahead else keys[:1])
            open_game(*keys[0]).close()
        except EnvironmentFault as error:
            raise ToolUnavailable(f"TextWorld does not run here: {error}") from error
        return TextWorldFactory(config=self.config, open_game=open_game)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """The game's walkthrough, played in the episode that ``reset(seed)`` starts; None where it needs more
        than ``max_moves``.
        """
        check_package()
        shelf, key = self.config.shelf(), identity(task, self.config)
        shelf.ensure([key])
        environment = TextWorldEnvironment(task=task, config=self.config, open_game=self._open)
        try:
            environment.reset(seed)
            commands = walkthrough(shelf.story(*key))
            steps = Episode(environment).play(
                [scienceworld_text.render_action(command) for command in commands]
            )
        finally:
            environment.close()
        return steps if environment.result().success else None

    def close(self) -> None:
        """Nothing is held."""

    def _keys(self, split: str) -> list[tuple[Split, int]]:
        sizes: dict[Split, int] = {
            "train": self.config.num_train,
            "valid": self.config.num_valid,
            "test": self.config.num_test,
        }
        for name, size in sizes.items():
            if name == split:
                return [(name, index) for index in range(size)]
        raise ConfigError(f"unknown split {split!r}; TextWorld has {', '.join(sizes)}")

    def _open(self, split: Split, index: int) -> Game:
        shelf = self.config.shelf()
        shelf.ensure([(split, index)])
        return StoryGame.start(shelf.story(split, index), with_commands=self.config.show_admissible)


def check_package() -> None:
    """Raises :class:`ToolUnavailable` where the package is missing or of another version, which would make
    other games.
    """
    if importlib.util.find_spec("textworld") is None:
        raise ToolUnavailable("TextWorld is not installed: pip install 'outrider[textworld]'")
    version = importlib.metadata.version("textworld")
    if version != textworld_games.PACKAGE_VERSION:
        raise ToolUnavailable(
            f"TextWorld {version} found, the games are of {textworld_games.PACKAGE_VERSION}"
        )
