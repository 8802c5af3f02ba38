"""Which ScienceWorld episodes are played, by which rules, and on how many simulators."""

import importlib.metadata
import importlib.util
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, model_validator

from outrider.environments.base import EnvironmentSettings, EpisodeResult, StepResult
from outrider.environments.episode import Episode
from outrider.environments.scienceworld import tasks as scienceworld_tasks
from outrider.environments.scienceworld import tasks as scienceworld_text
from outrider.environments.scienceworld.simulator import JavaSimulator, Launch, Loan, Simulator, SimulatorPool
from outrider.errors import ConfigError, EnvironmentFault, ToolUnavailable
from outrider.types import Message, Step, Task


class ScienceWorldConfig(EnvironmentSettings):
    """Which episodes are played, by which rules, and on how many simulators."""

    starts_quickly: ClassVar[bool] = False

    type: Literal["scienceworld"] = "scienceworld"
    task_names: Annotated[tuple[str, ...], Field(min_length=1)] = ("find-animal",)
    """Names as in the simulator; the order fixes the order of the task list."""
    num_train_variations: Annotated[int, Field(ge=1)] | None = 5
    """First variations of the simulator's train split per task (fewer where it has fewer); None for all."""
    num_valid_variations: Annotated[int, Field(ge=1)] | None = 5
    num_test_variations: Annotated[int, Field(ge=1)] | None = 20
    max_moves: Annotated[int, Field(ge=1)] = 100
    """Simulator moves after which an episode is cut. ``wait`` costs more than one, an unreadable command
    none.
    """
    simplification: str = ""
    """Comma-separated names out of the simulator's list, or ``easy``."""
    show_valid_actions: bool = False
    """Append the list of understood commands to every observation (20-80 ms and thousands of characters per
    step).
    """
    num_shown_actions: Annotated[int, Field(ge=1)] = 200
    correct_actions: bool = False
    """Replace a command by the most similar valid one, as EMPO²'s released wrapper does; it can trigger a
    fatal focus.
    """
    clip_negative: bool = False
    """Count a negative score as 0 in reward and return; the raw score stays in the metrics."""
    reward_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Reward and return are score times this; 0.01 gives returns up to 1."""
    num_workers: Annotated[int, Field(ge=1)] = 1
    """Java processes; more than one per core gains nothing."""
    heap: Annotated[str, Field(pattern=r"^[1-9][0-9]*[mg]$")] = "512m"
    deterministic: bool = True
    """Fix the order of objects, so that equal actions give equal episodes; the published simulator does
    not.
    """
    start_limit_s: Annotated[float, Field(gt=0)] = 60.0
    load_limit_s: Annotated[float, Field(gt=0)] = 120.0
    step_limit_s: Annotated[float, Field(gt=0)] = 30.0
    borrow_limit_s: Annotated[float, Field(gt=0)] = 600.0

    @model_validator(mode="after")
    def _known(self) -> "ScienceWorldConfig":
        unknown = [name for name in self.task_names if name not in scienceworld_tasks.NUM_VARIATIONS]
        if unknown:
            raise ValueError(
                f"unknown ScienceWorld tasks {unknown}; known: {list(scienceworld_tasks.NUM_VARIATIONS)}"
            )
        if len(set(self.task_names)) < len(self.task_names):
            raise ValueError("task_names holds a name twice")
        parts = [part for part in self.simplification.split(",") if part]
        unknown = [part for part in parts if part not in scienceworld_tasks.SIMPLIFICATIONS]
        if unknown:
            raise ValueError(
                f"unknown simplifications {unknown}; known: {list(scienceworld_tasks.SIMPLIFICATIONS)}"
            )
        electrical = [name for name in self.task_names if scienceworld_tasks.is_electrical(name)]
        if "noElectricalAction" in parts and electrical:
            raise ValueError(f"noElectricalAction makes {electrical} impossible")
        return self

    @property
    def max_concurrent(self) -> int:
        """As many as there are simulators: an episode that waits for one would hold the batch."""
        return self.num_workers

    def replayed_differently(self) -> list[str]:
        """Tasks whose objects move by themselves."""
        return [
            name
            for name in self.task_names
            if not scienceworld_tasks.replays_exactly(name, deterministic=self.deterministic)
        ]


# One episode on a borrowed ScienceWorld simulator.


FULL_SCORE: Final = 100


class ScienceWorldEnvironment:
    """One episode on a borrowed simulator. Chat protocol: the action in ``<action>...</action>``, the
    observation as a user message.
    """

    def __init__(self, *, task: Task, config: ScienceWorldConfig, pool: SimulatorPool) -> None:
        """Nothing is borrowed before :meth:`reset`. Raises :class:`ConfigError` for a task of another
        family.
        """
        self._task_name, self._variation = identity(task)
        self._config = config
        self._pool = pool
        self._loan: Loan | None = None
        # close() may come from another thread than step(); a loan must go back exactly once.
        self._lock = threading.Lock()
        self._closed = False
        self._is_busy = False
        self._start_record()

    def reset(self, seed: int) -> Sequence[Message]:
        """Borrow a simulator and start the episode.

        ``seed`` changes nothing: the simulator draws from the task's variation alone, so all rollouts of a
        task start equal (exactly so when the config is deterministic, up to the order of listed objects
        otherwise).
        """
        self._return_loan()
        self._start_record()
        self._loan = loan = self._pool.borrow()
        if self._closed:  # the loop gave this reset up: nobody else would return the simulator
            self._return_loan()
            raise EnvironmentFault("the ScienceWorld environment was closed while it waited for a simulator")
        self._is_busy = True
        try:
            opening = loan.simulator.load(
                task_name=self._task_name,
                variation=self._variation,
                simplification=self._config.simplification,
            )
            observation = opening.observation + self._listing(loan.simulator)
        except EnvironmentFault:
            self._return_loan()
            raise
        finally:
            self._is_busy = False
        prompt = scienceworld_text.render_prompt(
            task_text=opening.task_text, observation=observation, action_templates=opening.action_templates
        )
        return (Message(role="user", content=prompt),)

    def step(self, message: Message) -> StepResult:
        """Perform the one action of the message; unreadable text changes nothing and is answered in words."""
        if self._done:
            raise RuntimeError("the ScienceWorld episode has ended")
        loan = self._loan
        if loan is None:
            raise EnvironmentFault(
                "the ScienceWorld environment holds no simulator (never reset, closed, or its simulator died)"
            )
        self._num_turns += 1
        parsed = scienceworld_text.parse_action(message.content)
        if parsed.problem:
            self._num_invalid += 1
            return StepResult(message=Message(role="user", content=parsed.problem), invalid=True)
        self._is_busy = True
        try:
            return self._act(loan.simulator, parsed.action)
        except EnvironmentFault:
            self._return_loan()
            raise
        finally:
            self._is_busy = False

    def result(self) -> EpisodeResult:
        """The simulator's own score as the return; ``score`` in the metrics is neither clipped nor scaled."""
        return EpisodeResult(
            episode_return=self._record(self._score),
            success=self._score >= FULL_SCORE,
            metrics={
                "score": float(self._score),
                "num_moves": float(self._num_moves),
                "num_turns": float(self._num_turns),
                "num_invalid": float(self._num_invalid),
                "num_ambiguous": float(self._num_ambiguous),
                "num_corrected": float(self._num_corrected),
                "wrong_focus": float(self._score < 0),
                "cut_by_moves": float(self._cut_by_moves),
            },
        )

    def close(self) -> None:
        """Give the simulator back, for good; may be called twice.

        While another thread is inside a call (the loop gave it up), the simulator is killed first: what that
        thread still asks must not reach the next episode.
        """
        self._closed = True
        loan = self._pop_loan()
        if loan is not None:
            if self._is_busy:
                loan.simulator.close()
            self._pool.release(loan)

    def _return_loan(self) -> None:
        loan = self._pop_loan()
        if loan is not None:
            self._pool.release(loan)

    def _pop_loan(self) -> Loan | None:
        with self._lock:
            loan, self._loan = self._loan, None
        return loan

    def _start_record(self) -> None:
        self._score = 0
        self._num_moves = 0
        self._num_turns = 0
        self._num_invalid = 0
        self._num_ambiguous = 0
        self._num_corrected = 0
        self._done = False
        self._cut_by_moves = False
        self._is_ambiguous = False

    def _act(self, simulator: Simulator, action: str) -> StepResult:
        reply = simulator.act(self._corrected(simulator, action))
        unreadable = scienceworld_text.is_unreadable(reply.observation)
        self._is_ambiguous = scienceworld_text.is_ambiguous(reply.observation)
        self._num_invalid += unreadable
        self._num_ambiguous += self._is_ambiguous
        reward = self._record(reply.score) - self._record(self._score)
        self._score, self._num_moves = reply.score, reply.num_moves
        over = reply.completed or reply.score < 0
        self._cut_by_moves = not over and reply.num_moves >= self._config.max_moves
        self._done = over or self._cut_by_moves
        observation = reply.observation.strip()
        if self._done:
            self._return_loan()
        else:
            observation += self._listing(simulator)
        return StepResult(
            message=Message(role="user", content=observation),
            reward=reward,
            done=self._done,
            invalid=unreadable,
            refused=scienceworld_text.is_refused(reply.observation),
            truncated=self._cut_by_moves,
        )

    def _corrected(self, simulator: Simulator, action: str) -> str:
        # A number that answers the simulator's question is no command of the list.
        if not self._config.correct_actions or (self._is_ambiguous and action.isdigit()):
            return action
        nearest = scienceworld_text.nearest_action(action, simulator.valid_actions())
        if nearest is None or nearest == action:
            return action
        self._num_corrected += 1
        return nearest

    def _listing(self, simulator: Simulator) -> str:
        if not self._config.show_valid_actions:
            return ""
        return "\n\n" + scienceworld_text.render_valid_actions(
            simulator.valid_actions(), self._config.num_shown_actions
        )

    def _record(self, score: int) -> float:
        return (max(score, 0) if self._config.clip_negative else score) * self._config.reward_scale


def identity(task: Task) -> tuple[str, int]:
    """Name and variation of a task. Raises ConfigError for one of another family."""
    name, variation = task.metadata.get("task_name"), task.metadata.get("variation")
    if not isinstance(name, str) or not isinstance(variation, int):
        raise ConfigError(f"{task.key} is not a ScienceWorld task")
    return name, variation


# ScienceWorld: 30 elementary-science tasks in a text simulator (Wang et al. 2022, arXiv 2203.07540), over a
# real Java process.
#
# The score runs from 0 to 100 and falls to -100 when the agent focuses on a wrong object, which ends the
# episode. A step's reward is the change of the record, so that rewards add up to the return: the simulator's
# own score at the end.


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
            steps = Episode(environment).play([scienceworld_text.render_action(action) for action in gold])
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
