"""``queue.jsonl`` of a checkpoint where groups of several steps were under way: those that had ended.

The first line names the steps with their tasks, every other one is a group. Nothing is pickled.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.json_lines import parsed, whole_lines
from outrider.rollout.scheduler import RolloutReport
from outrider.train.state.queue import QUEUE, group_to_dict, read_group, read_task
from outrider.types import Task


@dataclass(slots=True, kw_only=True)
class GroupResult:
    """One group that has ended after ``seconds``; ``gathered`` is what the copies of the hooks bring, None
    once the hooks have it.
    """

    report: RolloutReport
    gathered: list[Any] | None
    seconds: float


@dataclass(slots=True, kw_only=True)
class PendingStep:
    """A step that has begun: the task and the modes of every group, the ``cursor`` behind its tasks, and the
    groups that have ended, by number.
    """

    step: int
    tasks: Sequence[Task]
    modes: Sequence[tuple[str, ...]]
    cursor: int
    results: dict[int, GroupResult] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """Steps that have begun, in their order; ``counts`` are the algorithm's as the newest metrics have
    them.
    """

    steps: Sequence[PendingStep]
    counts: Sequence[Mapping[str, int]]


def write_snapshot(folder: Path, snapshot: QueueSnapshot) -> None:
    """Into a checkpoint that is being written. Raises OSError."""
    head = {
        "counts": [dict(entry) for entry in snapshot.counts],
        "steps": [
            {
                "step": entry.step,
                "tasks": [asdict(task) for task in entry.tasks],
                "modes": [list(modes) for modes in entry.modes],
                "cursor": entry.cursor,
            }
            for entry in snapshot.steps
        ],
    }
    groups = [
        {
            "step": entry.step,
            "group": number,
            "seconds": group.seconds,
            "num_batches": group.report.num_batches,
            "num_retries": group.report.num_retries,
            "faults": dict(group.report.faults),
            "fault_reasons": list(group.report.fault_reasons),
            "loop_lag_s": group.report.loop_lag_s,
            "traces": [group_to_dict(trace) for trace in group.report.traces],
        }
        for entry in snapshot.steps
        for number, group in sorted(entry.results.items())
    ]
    lines = [json.dumps(entry, default=str) + "\n" for entry in (head, *groups)]
    (folder / QUEUE).write_text("".join(lines), encoding="utf-8")


def read_snapshot(folder: Path) -> QueueSnapshot | None:
    """Of a checkpoint whose files are known to be whole; None where nothing was under way. Raises OSError,
    and ValueError, KeyError or TypeError for damage.
    """
    lines = [parsed(line) for line in whole_lines(folder / QUEUE)]
    if not lines:
        return None
    head, *groups = lines
    steps = {int(entry["step"]): _parse_step(entry) for entry in head["steps"]}
    for group in groups:
        report = RolloutReport(
            traces=[read_group(trace) for trace in group["traces"]],
            num_batches=int(group["num_batches"]),
            num_retries=int(group["num_retries"]),
            faults=Counter(group["faults"]),
            fault_reasons=tuple(group["fault_reasons"]),
            loop_lag_s=group["loop_lag_s"],
        )
        result = GroupResult(report=report, gathered=None, seconds=float(group["seconds"]))
        steps[int(group["step"])].results[int(group["group"])] = result
    return QueueSnapshot(steps=list(steps.values()), counts=head["counts"])


def _parse_step(values: Mapping[str, Any]) -> PendingStep:
    return PendingStep(
        step=int(values["step"]),
        tasks=[read_task(task) for task in values["tasks"]],
        modes=[tuple(modes) for modes in values["modes"]],
        cursor=int(values["cursor"]),
    )
