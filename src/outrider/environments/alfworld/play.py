"""ALFWorld games in play: made offline, or published ones in the package's engine (extra ``alfworld``)."""

import importlib.metadata
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from outrider.environments.alfworld import made_games as texts
from outrider.environments.alfworld.made_games import Scene, State, apply, commands, is_reached
from outrider.environments.text_games import Reply
from outrider.errors import EnvironmentFault, ToolUnavailable

PACKAGE_VERSION: Final = "0.4.2"
# The package's text parsers are shared by all games of a process and are not re-entrant. While its translator
# reads a game, it redirects the process's output and replaces its arguments.
_ENGINE: Final = threading.Lock()


class OfflineGame:
    """A game of :mod:`outrider.environments.alfworld.made_games`, in pure Python."""

    max_score = 1

    def __init__(self, scene: Scene, state: State | None = None) -> None:
        self.scene = scene
        self.state = state or State(locations=dict(scene.locations))
        self.opening = texts.opening(scene)

    def act(self, command: str) -> Reply:
        known_command = commands(self.scene, self.state).get(command)
        if known_command is None:
            return Reply(text=texts.NOTHING_HAPPENS, refused=True)
        apply(self.scene, self.state, known_command)
        return Reply(
            text=texts.feedback(self.scene, self.state, known_command), won=is_reached(self.scene, self.state)
        )

    def commands(self) -> tuple[str, ...]:
        return tuple(commands(self.scene, self.state))

    def copy(self) -> "OfflineGame":
        return OfflineGame(self.scene, self.state.copy())

    def close(self) -> None:
        """Nothing to release."""


class Engines:
    """A pool of engines: TextWorld's environments for PDDL games, with ``load``, ``reset`` and ``step``. Each
    loads its own copy of the planner's library, which a process never unloads, so engines are reused.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        """``make`` takes ``with_plan``: whether the engine also plans."""
        self._make = make
        self._free: dict[bool, list[Any]] = {False: [], True: []}

    def borrow(self, *, with_plan: bool = False) -> Any:
        try:
            return self._free[with_plan].pop()
        except IndexError:
            return self._make(with_plan=with_plan)

    def release(self, engine: Any, *, with_plan: bool = False) -> None:
        self._free[with_plan].append(engine)


class PublishedGame:
    """A game file in an engine of its own. All engines of a process take turns."""

    max_score = 1

    def __init__(self, path: Path, engines: Engines) -> None:
        """Load and start the game. Raises EnvironmentFault."""
        self._path = path
        self._engines = engines
        self._acted: list[str] = []
        with _turn(f"cannot start the game {path}"):
            self._engine: Any = engines.borrow()
            self._engine.load(str(path))
            state = self._engine.reset()
            self.opening = str(state["feedback"])
            self._commands = tuple(sorted(state["admissible_commands"]))

    def act(self, command: str) -> Reply:
        refused = command not in self._commands
        with _turn("the game broke"):
            # Checked inside the lock: another thread may have closed the game while this one waited.
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
        return self._commands

    def copy(self) -> "PublishedGame":
        """Replay the commands in another engine: the games are deterministic."""
        twin = PublishedGame(self._path, self._engines)
        for command in self._acted:
            twin.act(command)
        return twin

    def close(self) -> None:
        """Return the engine to the pool, unless it broke or a thread is using it."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._engines.release(engine)


def plan_game(path: Path, engines: Engines) -> tuple[str, ...]:
    """The plan of the engine's own planner; empty if it finds none. Raises EnvironmentFault."""
    with _turn(f"cannot plan the game {path}"):
        engine = engines.borrow(with_plan=True)
        engine.load(str(path))
        plan = tuple(engine.reset()["policy_commands"])
        engines.release(engine, with_plan=True)
        return plan


def new_engine(*, with_plan: bool = False) -> Any:
    """The package's engine, with object names as players see them. Raises ToolUnavailable."""
    check_package()
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld import EnvInfos
    from textworld.envs import PddlEnv

    infos = EnvInfos(feedback=True, won=True, admissible_commands=True, policy_commands=with_plan)
    return AlfredDemangler(PddlEnv(infos))


def check_package() -> None:
    """Raises ToolUnavailable if the package or its planner is missing or has another version."""
    missing = [
        name for name in ("alfworld", "textworld", "fast_downward") if not importlib.util.find_spec(name)
    ]
    if missing:
        raise ToolUnavailable(
            f"the published ALFWorld games need {', '.join(missing)}: pip install 'outrider[alfworld]'"
        )
    version = importlib.metadata.version("alfworld")
    if version != PACKAGE_VERSION:
        raise ToolUnavailable(f"ALFWorld {version} found, but its games need version {PACKAGE_VERSION}")


@contextmanager
def _turn(operation: str) -> Iterator[None]:
    with _ENGINE:
        argv = sys.argv  # replaced by the planner's translator
        try:
            yield
        except ToolUnavailable:
            raise
        # The packages raise all kinds of exceptions; the run must survive each of them.
        except Exception as error:
            raise EnvironmentFault(f"ALFWorld: {operation}: {type(error).__name__}: {error}") from error
        finally:
            sys.argv = argv
