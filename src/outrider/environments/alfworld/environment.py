"""One episode of one ALFWorld game."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from outrider.environments.alfworld.play import Game
from outrider.environments.alfworld.rules import VERBS
from outrider.environments.alfworld.settings import AlfworldConfig
from outrider.environments.base import EpisodeResult, StepResult
from outrider.environments.scienceworld import text as scienceworld_text
from outrider.errors import EnvironmentFault
from outrider.types import Message

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
