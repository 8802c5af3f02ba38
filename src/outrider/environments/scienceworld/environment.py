"""ScienceWorld: 30 elementary-science tasks in a text simulator (Wang et al. 2022, arXiv 2203.07540).

The simulator is a Java process. Its score runs from 0 to 100; if the agent focuses on a wrong object, it
drops to -100 and the episode ends. A step's reward is the change of the score, so that rewards add up to the
return, the score at the end.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from outrider.environments.base import Environment, EpisodeResult, StepResult, known_split
from outrider.environments.parse_rules import NUM_NUMBERED, parse
from outrider.environments.scienceworld import tasks as texts
from outrider.environments.scienceworld.simulator import JavaSimulator, SimulatorPool
from outrider.environments.text_games import (
    MAX_ACTION_CHARACTERS,
    STOP,
    parse_action,
    play_commands,
    render_valid_actions,
)
from outrider.environments.window import WindowedSettings
from outrider.errors import ConfigError, EnvironmentFault, ToolUnavailable
from outrider.types import Step, Task

FULL_SCORE: Final = 100
SUCCESS_REWARD: Final = 10.0


class ScienceWorldConfig(WindowedSettings):
    """Which episodes are played, by which rules, and on how many simulators."""

    starts_quickly: ClassVar[bool] = False
    own_prompt: ClassVar[str] = "scienceworld"
    has_templates: ClassVar[bool] = True

    type: Literal["scienceworld"] = "scienceworld"
    task_names: Annotated[tuple[str, ...], Field(min_length=1)] = ("find-animal",)
    """Names as in the simulator; their order is that of the task list."""
    num_train_variations: Annotated[int, Field(ge=1)] | None = 5
    """Number of variations per task: the first ones of the simulator's split; None for all."""
    num_valid_variations: Annotated[int, Field(ge=1)] | None = 5
    num_test_variations: Annotated[int, Field(ge=1)] | None = 20
    max_moves: Annotated[int, Field(ge=1)] = 100
    """Limit of simulator moves per episode. ``wait`` counts as several, an unreadable command as none. The
    published wrapper ends an episode after more moves than its limit: its limit of 30 is ``max_moves = 31``.
    """
    simplification: str = ""
    """Comma-separated names from the simulator's list, or ``easy``."""
    success_at: Literal["full", "positive"] = "full"
    """Episodes that are a success: those with the full score of 100; or, as in the released code of RLVMR and
    OPID, all that end with a score above 0, also if they end because the moves have run out. Reports mark
    scores of the second rule.
    """
    reward: Literal["score", "success10"] = "score"
    """The return of an episode: the score, or 10 for a success and 0 otherwise."""
    actions: Literal["templates", "numbered"] = "templates"
    """How a conversation presents the commands: as templates in the first message, or below every observation
    as a numbered list of the first 50 valid ones. A reply then contains nothing but a number, for example
    ``### ACTION: 3 ###``; any other reply plays number 0 and is invalid.
    """
    show_valid_actions: bool = False
    """Append the list of valid commands to every observation (20 to 80 ms and thousands of characters per
    step).
    """
    num_shown_actions: Annotated[int, Field(ge=1)] = 200
    """Most commands in the list of ``show_valid_actions``, and in that of a window."""
    correct_actions: bool = False
    """Replace a command by the most similar valid one, as EMPO²'s released wrapper does. This can cause a
    fatal ``focus on``.
    """
    clip_negative: bool = False
    """Count a negative score as 0 in reward and return; the metrics have the raw score."""
    reward_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Factor of reward and return; with ``reward = "score"``, 0.01 gives returns up to 1."""
    num_workers: Annotated[int, Field(ge=1)] = 1
    """Number of Java processes; more than one per core has no benefit."""
    heap: Annotated[str, Field(pattern=r"^[1-9][0-9]*[mg]$")] = "512m"
    """Maximum heap of a simulator's Java process."""
    deterministic: bool = True
    """Fix the order of objects, so that equal actions give equal episodes, unlike in the published simulator.
    """
    start_limit_s: Annotated[float, Field(gt=0)] = 60.0
    """Time limit for the start of a simulator."""
    load_limit_s: Annotated[float, Field(gt=0)] = 120.0
    """Time limit for loading a task."""
    step_limit_s: Annotated[float, Field(gt=0)] = 30.0
    """Time limit of one command."""
    borrow_limit_s: Annotated[float, Field(gt=0)] = 600.0
    """Time limit of the wait for a free simulator."""

    @model_validator(mode="after")
    def _validate(self) -> "ScienceWorldConfig":
        parts = [part for part in self.simplification.split(",") if part]
        for kind, names, known in (
            ("ScienceWorld tasks", self.task_names, list(texts.NUM_VARIATIONS)),
            ("simplifications", parts, list(texts.SIMPLIFICATIONS)),
        ):
            if unknown := [name for name in names if name not in known]:
                raise ValueError(f"unknown {kind} {unknown}; known: {known}")
        if len(set(self.task_names)) < len(self.task_names):
            raise ValueError("task_names contains a name twice")
        electrical = [name for name in self.task_names if "power-component" in name or "conductivity" in name]
        if "noElectricalAction" in parts and electrical:
            raise ValueError(f"noElectricalAction makes {electrical} impossible")
        if self.context == "window" and (self.show_valid_actions or self.actions == "numbered"):
            raise ValueError(
                'show_valid_actions and actions are of conversations: with context = "window", set '
                "window.actions"
            )
        if self.show_valid_actions and self.actions == "numbered":
            raise ValueError('actions = "numbered" already lists the valid commands: drop show_valid_actions')
        return self

    @property
    def has_experts(self) -> bool:
        """None for numbered commands: the command of a walkthrough may not be in the list."""
        has_numbers = self.window.parse == "index" if self.context == "window" else self.actions == "numbered"
        return not has_numbers

    @property
    def score_mark(self) -> str:
        """``success_at = "positive"`` is weaker than the benchmark's rule."""
        return "" if self.success_at == "full" else 'success_at = "positive": any score above 0 is a success'

    @property
    def max_concurrent(self) -> int:
        """The number of simulators: an episode that waits for one would block the batch."""
        return self.num_workers

    def replayed_differently(self) -> list[str]:
        """All tasks of the published simulator: even if scores repeat, the order of a room's contents does
        not.

        In deterministic mode all 30 tasks replay exactly: measured with gold paths mixed with other actions,
        twice in one process and once in a new one.
        """
        return [] if self.deterministic else list(self.task_names)


class ScienceWorldEnvironment(Environment):
    """One episode on a borrowed simulator. ``shared`` is the pool of simulators."""

    Settings = ScienceWorldConfig
    name = "scienceworld"
    stop = (STOP,)
    can_copy = False

    def __init__(self, settings: Any = None, shared: Any = None) -> None:
        super().__init__(settings, shared)
        self._simulator: JavaSimulator | None = None
        self.task_text = self.opening = ""
        self._templates: tuple[str, ...] = ()
        self._numbered: tuple[str, ...] = ()  # the numbered list that the policy sees
        # close() may come from another thread than step(); a simulator must be returned exactly once.
        self._lock = threading.Lock()
        self._closed = False
        self._is_busy = False
        self._start()

    def _start(self) -> None:
        names = ("score", "num_moves", "num_turns", "num_invalid", "num_ambiguous", "num_corrected")
        self.metrics = dict.fromkeys((*names, "wrong_focus", "cut_by_moves"), 0.0)
        self._is_over = False
        self._is_ambiguous = False  # whether the simulator waits for the number of a meaning
        self._corrects = self.settings.correct_actions

    @classmethod
    def start_simulator(cls, settings: ScienceWorldConfig) -> Any:
        """Start a simulator; tests replace it."""
        return JavaSimulator(*find_simulator(), settings)

    @classmethod
    def tasks(cls, settings: ScienceWorldConfig, split: str) -> Sequence[Task]:
        """The tasks of the simulator's own split; needs no Java."""
        known = known_split(split, "ScienceWorld")
        limit: int | None = getattr(settings, f"num_{known}_variations")
        return texts.make_tasks(settings.task_names, known, limit)

    @classmethod
    def open_shared(cls, settings: ScienceWorldConfig) -> SimulatorPool:
        """Start one simulator and compare its number of variations with ours. Raises ToolUnavailable."""
        pool = SimulatorPool(
            start=lambda: cls.start_simulator(settings),
            num_workers=settings.num_workers,
            borrow_limit_s=settings.borrow_limit_s,
        )
        expected = {name: texts.NUM_VARIATIONS[name] for name in settings.task_names}
        try:
            simulator = pool.borrow()
            sizes = {name: simulator.num_variations(name) for name in expected}
            pool.release(simulator)
        except EnvironmentFault as error:
            pool.close()
            raise ToolUnavailable(f"ScienceWorld does not run here: {error}") from error
        if sizes != expected:
            pool.close()
            raise ToolUnavailable(
                f"this ScienceWorld has other variations ({sizes}) than our frozen splits ({expected})"
            )
        return pool

    def reset(self, task: Task, seed: int) -> str:
        """Borrow a simulator and start the episode.

        ``seed`` is not used: the simulator's draws depend on the task's variation only, so all rollouts of a
        task start in the same state (up to the order of listed objects if the config is not deterministic).
        """
        task_name, variation = identity(task)
        self._return_simulator()
        self._start()
        self._simulator = simulator = self.shared.borrow()
        if self._closed:  # closed during the wait; nothing else would return the simulator
            self._return_simulator()
            raise EnvironmentFault("the ScienceWorld environment was closed while it waited for a simulator")
        with self._call():
            opening = simulator.load(
                task_name=task_name, variation=variation, simplification=self.settings.simplification
            )
            observation = opening.observation + self._listing(simulator)
        self.task_text = " ".join(opening.task_text.split())
        self.opening, self._templates = opening.observation.strip(), opening.action_templates
        return texts.render_prompt(
            task_text=opening.task_text,
            observation=observation,
            action_templates=() if self.settings.actions == "numbered" else opening.action_templates,
        )

    def step(self, action: str) -> StepResult:
        simulator = self._start_turn()
        is_bad_number = False
        if self.settings.actions == "numbered":
            parsed = parse("index", action, self._numbered)
            command, is_bad_number = parsed.command, not parsed.valid
        else:
            command, problem = parse_action(action)
            if problem:
                self.metrics["num_invalid"] += 1
                return StepResult(message=problem, invalid=True)
        with self._call():
            result = self._execute(simulator, command)
            if not result.done:
                result = replace(result, message=result.text + self._listing(simulator))
        if is_bad_number and not result.invalid:
            self.metrics["num_invalid"] += 1
            result = replace(result, invalid=True)
        return result

    def admitted(self) -> Sequence[str]:
        """The first ``num_shown_actions`` commands that the simulator understands now."""
        with self._call():
            actions: tuple[str, ...] = self._require_simulator().valid_actions()
        return actions[: self.settings.num_shown_actions]

    def command_templates(self) -> Sequence[str]:
        """Two lines: the templates of commands, and the objects that can replace OBJ now."""
        with self._call():
            objects = self._require_simulator().objects()
        return (f"{list(self._templates)}", f"where OBJ is one of {list(objects)}")

    def act(self, command: str) -> StepResult:
        """Execute a command without tags. The observation has no list of commands."""
        simulator = self._start_turn()
        with self._call():
            return self._execute(simulator, " ".join(command.split())[:MAX_ACTION_CHARACTERS])

    def result(self) -> EpisodeResult:
        """Return and success by the settings; ``score`` in the metrics is neither clipped nor scaled."""
        metrics = self.metrics
        end = "the simulator ended the episode" if self._is_over else "the episode did not end"
        if metrics["wrong_focus"]:
            end = "the focus was on a wrong object"
        elif metrics["cut_by_moves"]:
            end = f"not completed within max_moves = {self.settings.max_moves}"
        return EpisodeResult(
            episode_return=self._value,
            success=self._is_success,
            metrics=dict(metrics),
            reason=f"{end}: score {metrics['score']:g} of {FULL_SCORE:g}",
        )

    def expert(self) -> Sequence[Step] | None:
        """Steps of the simulator's gold path; None if it does not reach 100 within ``max_moves``."""
        task_name, variation = identity(self.task)
        simulator = self._require_simulator()
        with self._call():
            gold = simulator.gold_actions(
                task_name=task_name, variation=variation, simplification=self.settings.simplification
            )
        self.reset(self.task, 0)
        self._corrects = False
        steps = play_commands(self, gold)
        return steps if self.metrics["score"] >= FULL_SCORE else None

    def close(self) -> None:
        """Return the simulator, for good; may be called twice.

        If another thread is still in a call, the simulator is killed first, because the requests of that
        thread must not reach the next episode.
        """
        self._closed = True
        self._return_simulator(kill=self._is_busy)

    @property
    def _is_success(self) -> bool:
        score = self.metrics["score"]
        return score >= FULL_SCORE if self.settings.success_at == "full" else self._is_over and score > 0

    @property
    def _value(self) -> float:
        """The return so far."""
        if self.settings.reward == "success10":
            return SUCCESS_REWARD * float(self.settings.reward_scale) * self._is_success
        score = self.metrics["score"]
        clipped = max(score, 0) if self.settings.clip_negative else score
        return float(clipped * self.settings.reward_scale)

    def _start_turn(self) -> JavaSimulator:
        if self._is_over:
            raise RuntimeError("the ScienceWorld episode has ended")
        simulator = self._require_simulator()
        self.metrics["num_turns"] += 1
        return simulator

    def _require_simulator(self) -> JavaSimulator:
        if self._simulator is None:
            raise EnvironmentFault(
                "the ScienceWorld environment has no simulator (never reset, closed, or its simulator died)"
            )
        return self._simulator

    def _return_simulator(self, *, kill: bool = False) -> None:
        with self._lock:
            simulator, self._simulator = self._simulator, None
        if simulator is not None:
            if kill:
                simulator.close()
            self.shared.release(simulator)

    @contextmanager
    def _call(self) -> Iterator[None]:
        """A call of the simulator; a fault returns it."""
        self._is_busy = True
        try:
            yield
        except EnvironmentFault:
            self._return_simulator()
            raise
        finally:
            self._is_busy = False

    def _execute(self, simulator: JavaSimulator, command: str) -> StepResult:
        metrics, before = self.metrics, self._value
        reply = simulator.act(self._corrected(simulator, command))
        unreadable = texts.is_unreadable(reply.observation)
        self._is_ambiguous = texts.is_ambiguous(reply.observation)
        metrics["num_invalid"] += unreadable
        metrics["num_ambiguous"] += self._is_ambiguous
        over = reply.completed or reply.score < 0
        truncated = not over and reply.num_moves >= self.settings.max_moves
        metrics |= {
            "score": float(reply.score),
            "num_moves": float(reply.num_moves),
            "wrong_focus": float(reply.score < 0),
            "cut_by_moves": float(truncated),
        }
        self._is_over = over or truncated
        if self._is_over:
            self._return_simulator()
        return StepResult(
            message=reply.observation.strip(),
            reward=self._value - before,
            done=self._is_over,
            invalid=unreadable,
            refused=texts.is_refused(reply.observation),
            truncated=truncated,
        )

    def _corrected(self, simulator: JavaSimulator, command: str) -> str:
        # A number that answers the simulator's question is not in the list of valid actions.
        if not self._corrects or (self._is_ambiguous and command.isdigit()):
            return command
        nearest = texts.nearest_action(command, simulator.valid_actions())
        if nearest is None or nearest == command:
            return command
        self.metrics["num_corrected"] += 1
        return nearest

    def _listing(self, simulator: JavaSimulator) -> str:
        if self.settings.actions == "numbered":
            self._numbered = simulator.valid_actions()[:NUM_NUMBERED]
            return "\n\n" + texts.render_numbered(self._numbered)
        if not self.settings.show_valid_actions:
            return ""
        return "\n\n" + render_valid_actions(simulator.valid_actions(), self.settings.num_shown_actions)


def identity(task: Task) -> tuple[str, int]:
    """Name and variation of a task. Raises ConfigError for a task of another environment."""
    name, variation = task.metadata.get("task_name"), task.metadata.get("variation")
    if not isinstance(name, str) or not isinstance(variation, int):
        raise ConfigError(f"{task.key} is not a ScienceWorld task")
    return name, variation


def find_simulator() -> tuple[str, str]:
    """Find Java, and the class path of the simulator. Raises ToolUnavailable if something is missing."""
    java = shutil.which("java")
    if java is None:
        raise ToolUnavailable("ScienceWorld needs Java: no 'java' on PATH")
    package = importlib.util.find_spec("scienceworld")
    if package is None or package.origin is None:
        raise ToolUnavailable("ScienceWorld is not installed: pip install 'outrider[scienceworld]'")
    version = importlib.metadata.version("scienceworld")
    if version != texts.SIMULATOR_VERSION:
        raise ToolUnavailable(
            f"ScienceWorld {version} found, but the frozen splits need version {texts.SIMULATOR_VERSION}"
        )
    from py4j.java_gateway import find_jar_path

    # Py4J's own jar goes first: the copy inside the simulator's jar is older and does not support the secret.
    jars = (str(find_jar_path()), str(Path(package.origin).parent / "scienceworld.jar"))
    return java, os.pathsep.join(str(Path(jar).resolve()) for jar in jars)
