"""The step-trace buffer of a run: the one that is named, a copy of it, or one that experts fill."""

from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.environments.base import EnvironmentFactory, TaskSet
from outrider.errors import CheckpointError, DataError
from outrider.memory.embedder import load_embedder
from outrider.memory.steps.buffer import StepTraceBuffer
from outrider.memory.steps.database import copy_database
from outrider.memory.steps.history import TokenCounter
from outrider.train.data.experts import fill_buffer
from outrider.train.settings import RunSettings
from outrider.types import Task


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
