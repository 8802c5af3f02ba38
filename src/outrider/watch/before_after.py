"""One held-out task before and after reinforcement learning: the same draws, played by two policies."""

from collections.abc import Sequence
from pathlib import Path

from outrider.errors import DataError
from outrider.watch.run_directory import Evaluation
from outrider.watch.samples import Sample, samples_from_rows
from outrider.watch.traces import TraceReader


def pick_before_after(
    directory: Path, evaluations: Sequence[Evaluation], notes: list[str]
) -> tuple[Sample, ...]:
    """(before, after) of the first task that the start failed and the end solved; empty where there is none.

    The start is the last evaluation of step 0, after a cold start where there was one; the end, the last of
    all. Nothing is shown of evaluations on different panels, or where the rollouts are not on file (runs of
    earlier versions).
    """
    starts = [number for number, evaluation in enumerate(evaluations) if evaluation.step == 0]
    if not starts or evaluations[-1].step == 0:
        return ()
    first, last = evaluations[starts[-1]], evaluations[-1]
    if (first.panel_hash, first.split) != (last.panel_hash, last.split):
        return ()
    gained = (
        key for key, score in last.task_scores.items() if score == 1.0 and first.task_scores.get(key) == 0.0
    )
    key = next(gained, None)
    reader = TraceReader(directory)
    if key is None or not reader.has_evaluation(starts[-1]):
        return ()
    try:
        sides = [reader.read_evaluation(number) for number in (starts[-1], len(evaluations) - 1)]
    except DataError as error:
        notes.append(f"traces: {error}")
        return ()
    samples = [
        next((s for s in samples_from_rows(rows, notes) if s.leaf.task_key == key), None) for rows in sides
    ]
    return tuple(sample for sample in samples if sample is not None) if None not in samples else ()
