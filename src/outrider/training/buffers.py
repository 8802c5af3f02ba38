"""A buffer that grows while the agent trains: its own successful rollouts join the off-policy steps (RAPO,
future work).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.environments.base import EnvironmentFactory, TaskSet
from outrider.errors import CheckpointError, DataError
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.memory.step_store import TokenCounter, copy_database
from outrider.rollout.experts import to_trajectory
from outrider.trace import Trace
from outrider.training.experts import fill_buffer
from outrider.training.settings import BufferSettings, RunSettings
from outrider.types import Task


def evolve_buffer(
    buffer: StepTraceBuffer,
    traces: Sequence[Trace],
    *,
    settings: BufferSettings,
    step: int,
    count_tokens: TokenCounter,
) -> dict[str, float]:
    """Offer this step's successful rollouts where ``settings.evolve`` says so; the buffer's metrics either
    way.
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


# The step-trace buffer of a run: the one that is named, a copy of it, or one that experts fill.


def open_buffer(
    settings: RunSettings,
    *,
    path: Path,
    task_set: TaskSet,
    factory: EnvironmentFactory,
    train_tasks: Sequence[Task],
    resumed: bool,
    note: Callable[[str], None],
    count_tokens: TokenCounter,
) -> StepTraceBuffer | None:
    """The buffer of an algorithm that retrieves: the one that is named, or one that the family's experts
    fill.

    None where nothing retrieves.

    An evolving run writes to a copy of its own of the buffer that is named: other runs may use that one.
    """
    if not settings.algorithm.retrieves or not settings.train.num_steps:
        return None
    embedder = load_embedder(settings.buffer.embedder)
    source_path = Path(settings.buffer.path) if settings.buffer.path else None
    if source_path is not None and not settings.buffer.evolve:
        return _require_steps(StepTraceBuffer(source_path, embedder, mode="read"), "")
    if resumed and not path.exists():
        raise CheckpointError(f"{path} is missing: it holds the steps that this run retrieves; put it back")
    if source_path is not None and not path.exists():
        copy_database(source_path, path)
    buffer = StepTraceBuffer(path, embedder, mode="write")
    reason = ""
    try:
        if buffer.report.lost_batch:
            note("the buffer's last writer was killed inside a batch: that batch is added again")
        if source_path is None and not resumed:
            tasks = train_tasks[: settings.buffer.num_tasks]
            filled = fill_buffer(buffer, task_set, factory, tasks, settings, note, count_tokens=count_tokens)
            task_set.close()
            reason = f": no trajectory of an expert entered it (of {len(tasks)} tasks: {filled.outcomes()})"
        _require_steps(buffer, reason)
    except BaseException:
        buffer.close()
        raise
    return buffer


def _require_steps(buffer: StepTraceBuffer, reason: str) -> StepTraceBuffer:
    if len(buffer) == 0:
        buffer.close()
        raise DataError(f"the step-trace buffer {buffer.path} is empty{reason}")
    return buffer
