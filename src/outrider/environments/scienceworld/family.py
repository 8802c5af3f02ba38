"""ScienceWorld: 30 elementary-science tasks in a text simulator (Wang et al. 2022, arXiv 2203.07540), over a
real Java process.

The score runs from 0 to 100 and falls to -100 when the agent focuses on a wrong object, which ends the
episode. A step's reward is the change of the record, so that rewards add up to the return: the simulator's
own score at the end.
"""

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from outrider.environments.base import play_steps
from outrider.environments.scienceworld import tasks as scienceworld_tasks
from outrider.environments.scienceworld import text as scienceworld_text
from outrider.environments.scienceworld.environment import ScienceWorldEnvironment, identity
from outrider.environments.scienceworld.gateway import JavaSimulator, Launch, Simulator
from outrider.environments.scienceworld.pool import SimulatorPool
from outrider.environments.scienceworld.settings import ScienceWorldConfig
from outrider.errors import ConfigError, EnvironmentFault, ToolUnavailable
from outrider.types import Step, Task


class ScienceWorldFactory:
    """Makes environments and owns their simulators."""

    def __init__(self, *, config: ScienceWorldConfig, pool: SimulatorPool) -> None:
        """``pool`` is closed with the factory."""
        self._config = config
        self.pool = pool

    def __call__(self, task: Task) -> ScienceWorldEnvironment:
        """A fresh environment for one episode; it waits for a free simulator in ``reset``."""
        return ScienceWorldEnvironment(task=task, config=self._config, pool=self.pool)

    def close(self) -> None:
        """Kill all simulators; may be called twice."""
        self.pool.close()


class ScienceWorldTaskSet:
    """The ScienceWorld tasks of a config. ``start`` replaces the Java process in tests."""

    Settings = ScienceWorldConfig
    name = "scienceworld"
    stop: tuple[str, ...] = (scienceworld_text.STOP,)
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True

    def __init__(self, config: ScienceWorldConfig, *, start: Callable[[], Simulator] | None = None) -> None:
        """Start nothing."""
        self.config = config
        self._start = start
        # Only expert() plays here; the environments of make() have their own pool, closed with their factory.
        self._expert_pool = self._new_pool(num_workers=1)

    def tasks(self, split: str) -> Sequence[Task]:
        """The frozen list of ``train``, ``valid`` or ``test``: the simulator's own split, no Java needed."""
        limits = {
            "train": self.config.num_train_variations,
            "valid": self.config.num_valid_variations,
            "test": self.config.num_test_variations,
        }
        if split not in limits:
            raise ConfigError(f"unknown split {split!r}; ScienceWorld has {', '.join(limits)}")
        return scienceworld_tasks.make_tasks(self.config.task_names, split, limits[split])

    def content_hash(self, split: str) -> str:
        """SHA-256 of the split's frozen list."""
        return scienceworld_tasks.hash_tasks(self.tasks(split))

    def fork_by_replay_is_exact(self, task_name: str) -> bool:
        """Whether the same actions lead to the same state (see ``scienceworld_tasks``)."""
        return scienceworld_tasks.replays_exactly(task_name, deterministic=self.config.deterministic)

    def make(self) -> ScienceWorldFactory:
        """Start one simulator and compare its task sizes with ours. Raises :class:`ToolUnavailable`."""
        pool = self._new_pool(num_workers=self.config.num_workers)
        try:
            loan = pool.borrow()
            sizes = {name: loan.simulator.num_variations(name) for name in self.config.task_names}
            pool.release(loan)
        except EnvironmentFault as error:
            pool.close()
            raise ToolUnavailable(f"ScienceWorld does not run here: {error}") from error
        expected = {name: scienceworld_tasks.NUM_VARIATIONS[name] for name in self.config.task_names}
        if sizes != expected:
            pool.close()
            raise ToolUnavailable(
                f"this ScienceWorld has other variations ({sizes}) than our frozen splits ({expected})"
            )
        return ScienceWorldFactory(config=self.config, pool=pool)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """The simulator's gold path, played in the episode that ``reset(seed)`` starts; None where it misses
        100 or ``max_moves``.
        """
        task_name, variation = identity(task)
        loan = self._expert_pool.borrow()
        try:
            gold = loan.simulator.gold_actions(
                task_name=task_name, variation=variation, simplification=self.config.simplification
            )
        finally:
            self._expert_pool.release(loan)
        config = self.config.model_copy(update={"correct_actions": False})
        environment = ScienceWorldEnvironment(task=task, config=config, pool=self._expert_pool)
        try:
            environment.reset(seed)
            steps = play_steps(environment, [scienceworld_text.render_action(action) for action in gold])
        finally:
            environment.close()
        return steps if environment.result().success else None

    def close(self) -> None:
        """Kill the simulator that :meth:`expert` started; a later call of ``expert`` starts another. May be
        called twice.
        """
        self._expert_pool.close()

    def _new_pool(self, *, num_workers: int) -> SimulatorPool:
        start = self._start or self._start_java
        return SimulatorPool(start=start, num_workers=num_workers, borrow_limit_s=self.config.borrow_limit_s)

    def _start_java(self) -> Simulator:
        return JavaSimulator(find_launch(self.config))


def find_launch(config: ScienceWorldConfig) -> Launch:
    """Find Java and the simulator. Raises :class:`ToolUnavailable` with what is missing."""
    java = shutil.which("java")
    if java is None:
        raise ToolUnavailable("ScienceWorld needs Java: no 'java' on PATH")
    package = importlib.util.find_spec("scienceworld")
    if package is None or package.origin is None:
        raise ToolUnavailable("ScienceWorld is not installed: pip install 'outrider[scienceworld]'")
    version = importlib.metadata.version("scienceworld")
    if version != scienceworld_tasks.SIMULATOR_VERSION:
        raise ToolUnavailable(
            f"ScienceWorld {version} found, the frozen splits are of {scienceworld_tasks.SIMULATOR_VERSION}"
        )
    from py4j.java_gateway import find_jar_path

    # Py4J's own jar goes first: the copy inside the simulator's jar is older and knows no secret.
    jars = (str(find_jar_path()), str(Path(package.origin).parent / "scienceworld.jar"))
    return Launch(
        java=java,
        class_path=os.pathsep.join(str(Path(jar).resolve()) for jar in jars),
        heap=config.heap,
        deterministic=config.deterministic,
        start_limit_s=config.start_limit_s,
        load_limit_s=config.load_limit_s,
        step_limit_s=config.step_limit_s,
    )
