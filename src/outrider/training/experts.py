"""Expert trajectories: requested from the environment or read from a file, for buffers and cold starts."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from outrider.environments.base import EnvironmentFactory, EnvironmentSettings, TaskSet
from outrider.errors import DataError, EnvironmentFault, OutriderError, ToolFault
from outrider.files import append, readable
from outrider.memory.chat_files import import_trajectories
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.memory.step_store import BuildReport, StepFilter, TokenCounter, question_key
from outrider.printing import plural
from outrider.rollout.endpoint import Collected
from outrider.rollout.episode import play_texts
from outrider.rollout.experts import to_trajectory
from outrider.rollout.faults import fault_line, run_timed
from outrider.seeding import reset_seed
from outrider.tokens.call_formats import CALL_FORMATS
from outrider.tokens.tool_calls import read_calls, split_thinking
from outrider.trace import Trace
from outrider.training.settings import BufferSettings, RunSettings
from outrider.types import Step, Task, Trajectory

# The rollouts that a buffer build has finished. The buffer does not contain all of them, because it retains
# only the best ones.


class CollectionLog:
    """One JSON line per rollout that ended without a fault, in a file next to the buffer.

    A torn line is ignored: its rollout is generated again and found in the buffer.
    """

    def __init__(self, buffer: Path) -> None:
        self.path = buffer.with_name(f"{buffer.name}.collected.jsonl")
        if not buffer.exists():  # the log belongs to a buffer that is gone
            self.path.unlink(missing_ok=True)

    def done(self) -> frozenset[str]:
        """Trajectory ids of finished rollouts."""
        if not self.path.exists():
            return frozenset()
        names = (entry.get("trajectory_id") for _, entry in readable(self.path) if entry is not None)
        return frozenset(name for name in names if isinstance(name, str))

    def add(self, collected: Sequence[Collected]) -> None:
        """Record what has reached the buffer, and force it to disk."""
        lines = [
            json.dumps(
                {
                    "trajectory_id": rollout.trajectory_id,
                    "outcome": rollout.outcome.value,
                    "reward": rollout.trajectory.reward,
                }
            )
            for rollout in collected
            if rollout.trajectory is not None
        ]
        # begins with a line end, in case a kill left a torn line
        append(self.path, "".join(f"\n{line}\n" for line in lines).encode())


# Experts' trajectories for the step-trace buffer, with the returns of the environment.


_PORTION = 32
_CHECKED_STEPS = 200
_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class FillReport:
    """Counts of tasks: ``present`` ones were in the buffer, ``without_expert`` ones have no expert,
    ``fault`` ones were lost, ``unsolved`` ones were offered with their return. ``builds`` has one report
    per portion.
    """

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    builds: list[BuildReport] = field(default_factory=list)

    def outcomes(self) -> str:
        """Describe the counts, to explain why a buffer is empty."""
        num_low = sum(build.num_below_min_reward for build in self.builds)
        num_empty = sum(build.num_empty for build in self.builds)
        counts = {
            "have no expert": self.counts["without_expert"],
            "have an expert who did not solve the task": self.counts["unsolved"],
            "have a trajectory below buffer.min_reward": num_low,
            "have a trajectory without a step": num_empty,
            "were lost to faults": self.counts["fault"],
        }
        text = (
            ", ".join(f"{num} {outcome}" for outcome, num in counts.items() if num) or "nothing was counted"
        )
        return text + (f"; {fault_line(self.faults)}" if self.faults else "")


def request_expert_path(
    task_set: TaskSet, task: Task, settings: RunSettings, *, seed: int
) -> Sequence[Step] | None:
    """Return the expert's path through the episode that ``reset(seed)`` starts. Blocks, so call it outside of
    an event loop.

    Raises ToolFault or EnvironmentFault if infrastructure failed or after ``train.expert_timeout_s``. Errors
    of the settings (ConfigError, ToolUnavailable) are raised unchanged.
    """
    try:
        return run_timed(task_set.expert, task, seed, timeout_s=settings.train.expert_timeout_s)
    except (ToolFault, EnvironmentFault) as fault:
        task_set.close()  # the call may still run in its thread and use what the next one needs
        if isinstance(fault.__cause__, OutriderError):
            raise fault.__cause__ from fault
        raise


def request_expert_paths(
    task_set: TaskSet,
    tasks: Sequence[Task],
    settings: RunSettings,
    *,
    training_step: int,
    on_task_done: Callable[[int], None] = lambda num_done: None,
) -> tuple[dict[str, Sequence[Step] | None], list[str]]:
    """Return the steps by task key (None: no expert), and one reason per task whose expert failed.

    The paths are for the episodes of ``training_step``, whose reset has the same seed. A fault is retried
    ``train.max_retries`` times. The task set's experts are closed at the end.
    """
    paths: dict[str, Sequence[Step] | None] = {}
    reasons: dict[str, str] = {}
    for number, task in enumerate(tasks, start=1):
        for _ in range(settings.train.max_retries + 1):
            try:
                seed = reset_seed(settings.seed, training_step, task.key)
                paths[task.key] = request_expert_path(task_set, task, settings, seed=seed)
                break
            except (ToolFault, EnvironmentFault) as fault:
                reasons[task.key] = f"the expert of {task.key}: {fault}"
        on_task_done(number)
    if repeated := [reason for key, reason in reasons.items() if key in paths]:
        _LOG.warning("requests of experts were repeated: %s", fault_line(repeated))
    if tasks:
        task_set.close()
    return paths, [reason for key, reason in reasons.items() if key not in paths]


def play_expert(
    task_set: TaskSet, factory: EnvironmentFactory, task: Task, settings: RunSettings
) -> tuple[Trajectory, bool] | None:
    """Roll out the expert's path in a new environment. Returns its steps with the environment's observations,
    and the environment's verdict; None if there is no expert.

    Both have the run's seed, because a buffer belongs to no training step. Raises ToolFault or
    EnvironmentFault if infrastructure failed or hangs.
    """
    steps = request_expert_path(task_set, task, settings, seed=settings.seed)
    if not steps:
        return None
    texts = [step.text for step in steps]
    timeout_s = settings.limits.step_timeout_s
    episode, record = play_texts(factory, task, texts, seed=settings.seed, timeout_s=timeout_s)
    trajectory = Trajectory(
        trajectory_id=_trajectory_id(task),
        task_key=task.key,
        agent="expert",
        prompt=episode.prompt,
        steps=episode.steps,
        reward=record.episode_return,
    )
    return trajectory, record.success


def fill_buffer(
    buffer: StepTraceBuffer,
    task_set: TaskSet,
    factory: EnvironmentFactory,
    tasks: Sequence[Task],
    settings: RunSettings,
    note: Callable[[str], None],
    *,
    count_tokens: TokenCounter | None = None,
) -> FillReport:
    """Add the expert's trajectory of every task that has none in the buffer, a portion of tasks at a time.

    Without ``count_tokens`` their lengths are unknown. A fault is retried ``train.max_retries`` times, then
    counted and skipped.
    """
    report = FillReport()
    questions = {task.key: task.question for task in tasks}
    for start in range(0, len(tasks), _PORTION):
        portion = tasks[start : start + _PORTION]
        missing = [task for task in portion if not buffer.trajectory(_trajectory_id(task))]
        report.counts["present"] += len(portion) - len(missing)
        plays = [_play_with_retries(task_set, factory, task, settings, report) for task in missing]
        trajectories = [trajectory for trajectory, _ in filter(None, plays)]
        report.counts["unsolved"] += sum(not is_solved for _, is_solved in filter(None, plays))
        if trajectories:
            report.builds.append(
                buffer.add_trajectories(
                    trajectories,
                    keep_best=settings.buffer.keep_best,
                    min_reward=settings.buffer.min_reward,
                    questions=questions,
                    count_tokens=count_tokens,
                )
            )
        note(
            f"buffer: expert paths of {start + len(portion)} of {plural(len(tasks), 'task')}, "
            f"{plural(len(buffer), 'step')}"
        )
    outcomes = {name: count for name, count in report.counts.items() if count and name != "present"}
    if outcomes:
        counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in outcomes.items())
        note(f"buffer: {counts}{'; ' if report.faults else ''}{fault_line(report.faults)}")
    return report


def read_demonstrations(
    file: str, tasks: Sequence[Task], environment: EnvironmentSettings | None = None
) -> dict[str, Sequence[Step] | None]:
    """Return the steps of :func:`read_trajectories` by task key. Raises the same errors."""
    trajectories = read_trajectories(file, tasks, environment)
    return {key: trajectory.steps for key, trajectory in trajectories.items()}


def read_trajectories(
    file: str, tasks: Sequence[Task], environment: EnvironmentSettings | None = None
) -> dict[str, Trajectory]:
    """Return by task key the trajectory with the highest reward in a file (of equal ones, the first).

    A record belongs to the task of its ``task_key`` or, without a key, to the task with its question. Raises
    DataError for a file that cannot be used or has nothing for ``tasks``, and for demonstrations whose calls
    ``environment`` cannot parse. Logs what was left out of the file's chats.
    """
    imported = import_trajectories(file)
    keys = {task.key for task in tasks}
    keys_by_question: dict[str, list[str]] = {}  # several tasks may ask the same
    for task in tasks:
        keys_by_question.setdefault(question_key(task.question), []).append(task.key)
    best: dict[str, Trajectory] = {}
    for trajectory in imported.trajectories:
        for key in (
            [trajectory.task_key]
            if trajectory.task_key in keys
            else keys_by_question.get(trajectory.task_key, [trajectory.task_key])
        ):
            if key not in best or trajectory.reward > best[key].reward:
                best[key] = trajectory
    if not keys & best.keys():
        raise DataError(
            f"{file} holds no demonstration of a training task: "
            "its records have other task keys and questions"
        )
    if imported.dropped:
        dropped = ", ".join(f"{name} ({count})" for name, count in imported.dropped.items())
        _LOG.warning("%s: left out of the chats: %s", file, dropped)
    if unmatched := sorted(best.keys() - keys):
        records = plural(len(unmatched), "demonstration belongs to", "demonstrations belong to")
        prompt = best[unmatched[0]].prompt
        example = prompt[-1].content if prompt else unmatched[0]
        _LOG.warning("%s: %s no training task, for example %r", file, records, example[:100])
    if environment is not None:
        _check_calls(file, [best[key] for key in sorted(keys & best.keys())], environment)
    return best


def _check_calls(file: str, demonstrations: Sequence[Trajectory], environment: EnvironmentSettings) -> None:
    """Check that the environment can parse the calls of demonstrations. Raises DataError if it can parse
    none of them, and logs those that it cannot parse.
    """
    names = environment.tool_names()
    native_names = [
        {name for step in item.steps for name in _native_call_names(step.text)} for item in demonstrations
    ]
    call = plural(len(demonstrations), "demonstration calls", "demonstrations call")
    if environment.call_format is None:
        if num := sum(map(bool, native_names)):
            message = f"{file}: {num} of {call} tools natively, and {_describe_action_format(environment)}"
            is_program = environment.keeps_conversations and environment.rebuilt_prompt_tokens is None
            if num == len(demonstrations) and not is_program:
                raise DataError(message)
            _LOG.warning(message)
        return
    tagged = [
        item
        for item in demonstrations
        if any(f"</{name}>" in step.text for step in item.steps for name in names)
    ]
    if tagged and not any(native_names):
        raise DataError(
            f"{file}: {len(tagged)} of {call} tools between tags, and "
            f"environment.protocol = {environment.call_format} reads native calls: set "
            "environment.protocol=tags"
        )
    unknown = Counter(name for item in native_names for name in item if names and name not in names)
    if unknown:
        message = ", ".join(f"{name} ({count})" for name, count in sorted(unknown.items()))
        _LOG.warning(
            "%s: demonstrations call tools that the environment lacks: %s; it has %s",
            file, message, ", ".join(names),
        )  # fmt: skip


def check_buffer_calls(
    buffer: StepTraceBuffer, environment: EnvironmentSettings, note: Callable[[str], None]
) -> None:
    """Note that steps of a buffer, which a policy is to continue, contain calls that the environment cannot
    parse or whose tools it lacks. Looks at the steps of ``_CHECKED_STEPS`` random draws.
    """
    generator = np.random.default_rng(0)
    drawn = [buffer.sample(StepFilter(), generator) for _ in range(_CHECKED_STEPS)]
    texts = {record.step_id: record.text for record in drawn if record is not None}
    called = [_native_call_names(text) for text in texts.values()]
    names = environment.tool_names()
    of_steps = f"of {plural(len(called), 'step')} that were drawn from {buffer.path}"
    if environment.call_format is None:
        if num := sum(map(bool, called)):
            expected = _describe_action_format(environment)
            note(f"STEPS THAT CANNOT BE READ: {num} {of_steps} call tools natively, and {expected}")
        return
    unknown = Counter(name for step in called for name in step if names and name not in names)
    if unknown:
        listed = ", ".join(f"{name} ({num})" for name, num in sorted(unknown.items()))
        note(f"STEPS WITH OTHER TOOLS: {of_steps}, these call tools that the environment lacks: {listed}")


def _describe_action_format(environment: EnvironmentSettings) -> str:
    """Describe the actions of an environment without native calls, and what to do."""
    forms = ", ".join(CALL_FORMATS)
    if environment.keeps_conversations and environment.rebuilt_prompt_tokens is None:
        return f"environment.tool_calls names no form of calls: set it to one of {forms}"
    if names := environment.tool_names():
        return (
            f"environment.protocol = tags reads calls such as <{names[0]}>...</{names[0]}>: set "
            f"environment.protocol to one of {forms}, or write calls and answers as tags"
        )
    return f"environment.type = {environment.type} reads actions in text"


def _native_call_names(text: str) -> list[str]:
    """Names of the tools that a recorded turn calls natively."""
    _, rest, _ = split_thinking(text, CALL_FORMATS["hermes"])
    return [call.name for call in read_calls(rest, CALL_FORMATS["hermes"], ()).calls]


def _trajectory_id(task: Task) -> str:
    return f"expert/{task.key}"


def _play_with_retries(
    task_set: TaskSet, factory: EnvironmentFactory, task: Task, settings: RunSettings, report: FillReport
) -> tuple[Trajectory, bool] | None:
    for attempt in range(settings.train.max_retries + 1):
        try:
            play = play_expert(task_set, factory, task, settings)
        except (ToolFault, EnvironmentFault) as fault:
            report.counts["retries"] += attempt < settings.train.max_retries
            last = fault
        else:
            report.counts["without_expert"] += play is None
            return play
    report.counts["fault"] += 1
    report.faults.append(f"{task.key}: {last}")
    return None


def evolve_buffer(
    buffer: StepTraceBuffer,
    traces: Sequence[Trace],
    *,
    settings: BufferSettings,
    step: int,
    count_tokens: TokenCounter,
) -> dict[str, float]:
    """Offer the successful rollouts of a step to the buffer if ``settings.evolve`` is set (RAPO, future
    work).

    Returns the buffer's metrics in any case.
    """
    if not settings.evolve:
        return {"buffer/num_steps": float(len(buffer))}
    trajectories = [
        to_trajectory(
            trace,
            leaf.rollout,
            agent="self",
            trajectory_id=f"self/{step}/{trace.task.key}/{leaf.rollout}",
            count_tokens=count_tokens,
        )
        for trace in traces
        for leaf, _ in trace.rollouts()
        if leaf.success
    ]
    report = buffer.add_trajectories(
        [trajectory for trajectory in trajectories if trajectory is not None],
        keep_best=settings.keep_best,
        min_reward=settings.min_reward,
        count_tokens=count_tokens,
        questions={trace.task.key: trace.task.question for trace in traces},
    )
    return {
        "buffer/num_added": float(report.num_inserted),
        "buffer/num_removed": float(report.num_removed),
        "buffer/num_rejected": float(report.num_outranked + report.num_below_min_reward),
        "buffer/num_steps": float(len(buffer)),
    }
