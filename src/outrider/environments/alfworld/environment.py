"""One episode of one ALFWorld game."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from outrider.environments.alfworld.games import (
    AlfworldConfig,
    Games,
    OfflineGames,
    PublishedGames,
    known_split,
)
from outrider.environments.alfworld.made_games import VERBS, Split
from outrider.environments.alfworld.play import Engine, Game
from outrider.environments.base import EpisodeResult, StepResult
from outrider.environments.episode import Episode
from outrider.environments.scienceworld import tasks as scienceworld_text
from outrider.errors import EnvironmentFault
from outrider.types import Message, Step, Task

PROMPT: Final = (
    "You do a task in a room by typing commands, one a turn.\n"
    "You may think first. Then write exactly one command between <action> and </action>, for example "
    "<action>look</action>. The next message tells what happened.\n"
    "Commands, where RECEPTACLE and OBJECT stand for what you see, with its number (for example: open "
    "fridge 1): go to RECEPTACLE, open RECEPTACLE, close RECEPTACLE, take OBJECT from RECEPTACLE, move "
    "OBJECT to RECEPTACLE, examine RECEPTACLE, examine OBJECT, use OBJECT, heat OBJECT with RECEPTACLE, "
    "clean OBJECT with RECEPTACLE, cool OBJECT with RECEPTACLE, slice OBJECT with OBJECT, inventory, look.\n"
    "You can carry one object.\n\n{opening}"
)


@dataclass(slots=True, kw_only=True)
class _Record:
    """Counts of one episode."""

    won: bool = False
    num_moves: int = 0
    num_turns: int = 0
    num_invalid: int = 0
    num_refused: int = 0
    cut_by_moves: bool = False

    @property
    def done(self) -> bool:
        return self.won or self.cut_by_moves


class AlfworldEnvironment:
    """One episode. Chat protocol: the command in ``<action>...</action>``, the observation as a user message.
    The return is ``reward_scale`` when the goal is reached, else 0.
    """

    def __init__(self, *, config: AlfworldConfig, open_game: Callable[[], Game]) -> None:
        """Nothing is started before :meth:`reset`; ``open_game`` starts the task's game anew."""
        self._config = config
        self._open_game = open_game
        self._game: Game | None = None
        self._record = _Record()

    def reset(self, seed: int) -> Sequence[Message]:
        """Start the game from its beginning. ``seed`` changes nothing: a game is fixed by its making."""
        self.close()
        self._record = _Record()
        self._game = game = self._open_game()
        return (Message(role="user", content=PROMPT.format(opening=game.opening) + self._listing(game)),)

    def step(self, message: Message) -> StepResult:
        """Perform the one command of the message; text without a command changes nothing and is answered in
        words.
        """
        record, game = self._record, self._game
        if record.done:
            raise RuntimeError("the ALFWorld episode has ended")
        if game is None:
            raise EnvironmentFault("the ALFWorld environment holds no game (never reset, or closed)")
        record.num_turns += 1
        parsed = scienceworld_text.parse_action(message.content)
        if parsed.problem:
            record.num_invalid += 1
            return StepResult(message=Message(role="user", content=parsed.problem), invalid=True)
        return self._act(game, parsed.action)

    def result(self) -> EpisodeResult:
        """The return and success of a game that was won, and what was counted."""
        record = self._record
        counts = ("num_moves", "num_turns", "num_invalid", "num_refused", "cut_by_moves")
        return EpisodeResult(
            episode_return=self._reward,
            success=record.won,
            metrics={name: float(getattr(record, name)) for name in counts},
        )

    def admitted(self) -> tuple[str, ...]:
        """The commands that do or tell something now, sorted; none where no game is held."""
        return () if self._game is None else self._game.commands()

    def copy(self) -> "AlfworldEnvironment":
        """The same episode at the same point; neither sees what the other does from then on."""
        twin = AlfworldEnvironment(config=self._config, open_game=self._open_game)
        twin._record = replace(self._record)
        twin._game = None if self._game is None else self._game.copy()
        return twin

    def close(self) -> None:
        """Release the game; may be called twice."""
        game, self._game = self._game, None
        if game is not None:
            game.close()

    @property
    def _reward(self) -> float:
        return self._config.reward_scale * self._record.won

    def _act(self, game: Game, command: str) -> StepResult:
        record = self._record
        reply = game.act(command)
        # The game answers both alike: what begins with none of its verbs, and what it does not do now.
        unreadable = reply.refused and command.partition(" ")[0] not in VERBS
        refused = reply.refused and not unreadable
        record.won = reply.won
        record.num_moves += 1
        record.num_invalid += unreadable
        record.num_refused += refused
        record.cut_by_moves = not reply.won and record.num_moves >= self._config.max_moves
        observation = reply.text if record.done else reply.text + self._listing(game)
        return StepResult(
            message=Message(role="user", content=observation),
            reward=self._reward,
            done=record.done,
            invalid=unreadable,
            refused=refused,
            truncated=record.cut_by_moves,
        )

    def _listing(self, game: Game) -> str:
        if not self._config.show_admissible:
            return ""
        return "\n\n" + scienceworld_text.render_valid_actions(
            game.commands(), self._config.num_shown_actions
        )


# ALFWorld: household tasks as text games (Shridhar et al. 2021, arXiv 2010.03768), made offline or
# published.
#
# Six types: put a thing somewhere, look at it under a lamp, put it there clean, hot or cool, or put two
# there. A game that is won pays 1 at its end, else 0. Games made offline come from the package's floor plans,
# rules and texts; the published ones are played by the package itself.


class AlfworldFactory:
    """Makes environments; what they share (floor plans, made games) does not change."""

    def __init__(self, config: AlfworldConfig, games: Games) -> None:
        """``games`` starts those of tasks."""
        self._config = config
        self._games = games

    def __call__(self, task: Task) -> AlfworldEnvironment:
        """A fresh episode of the task. Raises :class:`ConfigError` for a task of other games."""
        return AlfworldEnvironment(config=self._config, open_game=self._games.opener(task))

    def close(self) -> None:
        """Nothing is held."""


class AlfworldTaskSet:
    """The ALFWorld games of a config. ``new_engine`` replaces the package in tests."""

    Settings = AlfworldConfig
    name = "alfworld"
    stop: tuple[str, ...] = (scienceworld_text.STOP,)
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True

    def __init__(self, config: AlfworldConfig, *, new_engine: Callable[[], Engine] | None = None) -> None:
        """Make and read nothing."""
        self.config = config
        self._games: Games = (
            OfflineGames(config) if config.data is None else PublishedGames(config, config.data, new_engine)
        )
        self._listed: dict[Split, tuple[Task, ...]] = {}

    def tasks(self, split: str) -> Sequence[Task]:
        """The frozen list of ``train``, ``valid`` or ``test``. A task's ``digest`` is that of its whole game,
        so that the hash of a panel freezes the games. Raises DataError where published games are missing.
        """
        known = known_split(split)
        if known not in self._listed:
            self._listed[known] = self._games.tasks(known)
        return self._listed[known]

    def make(self) -> AlfworldFactory:
        """Start one of the published games, where they are played. Raises :class:`ToolUnavailable`."""
        self._games.check()
        return AlfworldFactory(self.config, self._games)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """The planner's commands, played in the episode that ``reset(seed)`` starts; None where they need
        more than ``max_moves``. On games made offline no plan is shorter.
        """
        environment = AlfworldEnvironment(config=self.config, open_game=self._games.opener(task))
        try:
            environment.reset(seed)
            texts = [scienceworld_text.render_action(command) for command in self._games.plan(task)]
            steps = Episode(environment).play(texts)
        finally:
            environment.close()
        return steps if environment.result().success else None

    def close(self) -> None:
        """Nothing is held."""
