"""Playing one game, whoever made it: what it shows, what it answers, its copies."""

import importlib.metadata
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from outrider.environments.alfworld import made_games as texts
from outrider.environments.alfworld.made_games import Scene, State, apply, commands, is_reached, opening_state
from outrider.errors import EnvironmentFault, ToolUnavailable


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
    """A game of :mod:`outrider.environments.alfworld.made_games`, in pure Python."""

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


# Playing one of the published games in the package's own engine (extra ``alfworld``).


PACKAGE_VERSION: Final = "0.4.2"
# The package's parsers of texts are shared by all games of a process and not re-entrant; and while its
# translator reads a game, it keeps what the process prints and its arguments for itself.
_ENGINE: Final = threading.Lock()


class Engine(Protocol):
    """What is used of TextWorld's environment for PDDL games."""

    def load(self, path: str, /) -> None:
        """Read a game file."""
        ...

    def reset(self) -> Any:
        """Start it; the state has ``feedback``, ``admissible_commands`` and ``policy_commands``."""
        ...

    def step(self, command: str, /) -> tuple[Any, float, bool]:
        """Act; the state has ``won`` besides."""
        ...


class Engines:
    """Engines to borrow. Each loads a copy of the planner's library, which a process never gives back: so one
    that is free plays the next game.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        """Make none yet."""
        self._make = make
        self._free: list[Engine] = []

    def borrow(self) -> Engine:
        """A free one, or a new one."""
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def release(self, engine: Engine) -> None:
        """It will load another game."""
        self._free.append(engine)


class PublishedGame:
    """A game file in an engine of its own. All engines of a process take turns."""

    def __init__(self, path: Path, engines: Engines) -> None:
        """Load and start it. Raises EnvironmentFault."""
        self._path = path
        self._engines = engines
        self._acted: list[str] = []
        with _turn(f"cannot start the game {path}"):
            self._engine: Engine | None = engines.borrow()
            self._engine.load(str(path))
            state = self._engine.reset()
            self.opening = str(state["feedback"])
            self._commands = tuple(sorted(state["admissible_commands"]))

    def act(self, command: str) -> Reply:
        """Play one command. Raises EnvironmentFault where the engine breaks, or was closed."""
        refused = command not in self._commands
        with _turn("the game broke"):
            # Looked at inside: another thread may have closed the game while this one waited for its turn.
            engine, self._engine = self._engine, None
            if engine is None:
                raise RuntimeError("it is closed")
            state, _, _ = engine.step(command)
            reply = Reply(text=str(state["feedback"]), won=bool(state["won"]), refused=refused)
            self._commands = tuple(sorted(state["admissible_commands"]))
            self._engine = engine
        self._acted.append(command)
        return reply

    def commands(self) -> tuple[str, ...]:
        """Those that the engine admits now."""
        return self._commands

    def copy(self) -> "PublishedGame":
        """Another engine in which the same commands are done again: these games hold no chance."""
        twin = PublishedGame(self._path, self._engines)
        for command in self._acted:
            twin.act(command)
        return twin

    def close(self) -> None:
        """Give the engine back. One that broke, or that a thread is inside of, is not used again."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._engines.release(engine)


def planned(path: Path, engines: Engines) -> tuple[str, ...]:
    """The commands of the engine's own planner from the start of a game; empty where it finds none. Raises
    EnvironmentFault.
    """
    with _turn(f"cannot plan the game {path}"):
        engine = engines.borrow()
        engine.load(str(path))
        plan = tuple(engine.reset()["policy_commands"])
        engines.release(engine)
        return plan


def new_engine(*, with_plan: bool = False) -> Engine:
    """The package's engine, with names as players see them. Raises :class:`ToolUnavailable`."""
    check_package()
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld import EnvInfos
    from textworld.envs import PddlEnv

    infos = EnvInfos(feedback=True, won=True, admissible_commands=True, policy_commands=with_plan)
    engine: Engine = AlfredDemangler(PddlEnv(infos))
    return engine


def check_package() -> None:
    """Raises :class:`ToolUnavailable` where the package or its planner is missing, or of another version."""
    missing = [
        name for name in ("alfworld", "textworld", "fast_downward") if not importlib.util.find_spec(name)
    ]
    if missing:
        raise ToolUnavailable(
            f"the published ALFWorld games need {', '.join(missing)}: pip install 'outrider[alfworld]'"
        )
    version = importlib.metadata.version("alfworld")
    if version != PACKAGE_VERSION:
        raise ToolUnavailable(f"ALFWorld {version} found, {PACKAGE_VERSION} is what its games are read with")


@contextmanager
def _turn(operation: str) -> Iterator[None]:
    with _ENGINE:
        argv = sys.argv  # the planner's translator puts its own there
        try:
            yield
        except ToolUnavailable:
            raise
        # whatever packages of this size raise, the episode is lost and the run goes on
        except Exception as error:
            raise EnvironmentFault(f"ALFWorld: {operation}: {type(error).__name__}: {error}") from error
        finally:
            sys.argv = argv
