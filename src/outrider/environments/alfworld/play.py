"""Playing one game, whoever made it: what it shows, what it answers, its copies."""

from dataclasses import dataclass
from typing import Protocol

from outrider.environments.alfworld import texts
from outrider.environments.alfworld.rules import apply, commands
from outrider.environments.alfworld.scene import Scene, State, is_reached, opening_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer to a command. ``refused``: the game did nothing, because the command is none that it admits
    now.
    """

    text: str
    won: bool = False
    refused: bool = False


class Game(Protocol):
    """A started game. Calls of one game must not overlap; those of different games may."""

    opening: str

    def act(self, command: str) -> Reply:
        """Perform a command. Raises EnvironmentFault when a simulator broke."""
        ...

    def commands(self) -> tuple[str, ...]:
        """The commands that the game admits now, sorted."""
        ...

    def copy(self) -> "Game":
        """The same game at the same point, independent from then on."""
        ...

    def close(self) -> None:
        """Release what it holds; may be called twice."""
        ...


class OfflineGame:
    """A game of :mod:`outrider.environments.alfworld.making`, in pure Python."""

    def __init__(self, scene: Scene, state: State | None = None) -> None:
        """At the start, or in a state that the game takes over."""
        self.scene = scene
        self.state = state or opening_state(scene)
        self.opening = texts.opening(scene)

    def act(self, command: str) -> Reply:
        """Do one of :meth:`commands`; any other leaves the game as it is."""
        known_command = commands(self.scene, self.state).get(command)
        if known_command is None:
            return Reply(text=texts.NOTHING_HAPPENS, refused=True)
        apply(self.scene, self.state, known_command)
        return Reply(
            text=texts.feedback(self.scene, self.state, known_command), won=is_reached(self.scene, self.state)
        )

    def commands(self) -> tuple[str, ...]:
        """Those of the rules."""
        return tuple(commands(self.scene, self.state))

    def copy(self) -> "OfflineGame":
        """Shares the scene, which does not change."""
        return OfflineGame(self.scene, self.state.copy())

    def close(self) -> None:
        """Nothing is held."""
