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
from outrider.train.state.queue import QUEUE, read_group, read_task, told_group
from outrider.types import Task


@dataclass(slots=True, kw_only=True)
class PlayedGroup:
    """One group that has ended after ``seconds``; ``gathered`` is what the copies of the hooks bring, None
    once the hooks have it.
    """

    report: RolloutReport
    gathered: list[Any] | None
    seconds: float


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """A step that has begun: the task and the modes of every group, the ``cursor`` behind its tasks, and the
    groups that have ended, by number.
    """

    step: int
    tasks: Sequence[Task]
    modes: Sequence[tuple[str, ...]]
    cursor: int
    ended: dict[int, PlayedGroup] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Steps that have begun, in their order; ``counts`` are the algorithm's as the newest metrics have
    them.
    """

    steps: Sequence[OpenStep]
    counts: Sequence[Mapping[str, int]]


def write_kept(folder: Path, kept: Kept) -> None:
    """Into a checkpoint that is being written. Raises OSError."""
    head = {
        "counts": [dict(one) for one in kept.counts],
        "steps": [
            {
                "step": one.step,
                "tasks": [asdict(task) for task in one.tasks],
                "modes": [list(modes) for modes in one.modes],
                "cursor": one.cursor,
            }
            for one in kept.steps
        ],
    }
    groups = [
        {
            "step": one.step,
            "group": number,
            "seconds": group.seconds,
            "num_batches": group.report.num_batches,
            "num_retries": group.report.num_retries,
            "faults": dict(group.report.faults),
            "fault_reasons": list(group.report.fault_reasons),
            "loop_lag_s": group.report.loop_lag_s,
            "traces": [told_group(trace) for trace in group.report.traces],
        }
        for one in kept.steps
        for number, group in sorted(one.ended.items())
    ]
    lines = [json.dumps(one, default=str) + "\n" for one in (head, *groups)]
    (folder / QUEUE).write_text("".join(lines), encoding="utf-8")


def read_kept(folder: Path) -> Kept | None:
    """Of a checkpoint whose files are known to be whole; None where nothing was under way. Raises OSError,
    and ValueError, KeyError or TypeError for damage.
    """
    lines = [parsed(line) for line in whole_lines(folder / QUEUE)]
    if not lines:
        return None
    head, *groups = lines
    steps = {int(one["step"]): _step(one) for one in head["steps"]}
    for group in groups:
        report = RolloutReport(
            traces=[read_group(trace) for trace in group["traces"]],
            num_batches=int(group["num_batches"]),
            num_retries=int(group["num_retries"]),
            faults=Counter(group["faults"]),
            fault_reasons=tuple(group["fault_reasons"]),
            loop_lag_s=group["loop_lag_s"],
        )
        played = PlayedGroup(report=report, gathered=None, seconds=float(group["seconds"]))
        steps[int(group["step"])].ended[int(group["group"])] = played
    return Kept(steps=list(steps.values()), counts=head["counts"])


def _step(told: Mapping[str, Any]) -> OpenStep:
    return OpenStep(
        step=int(told["step"]),
        tasks=[read_task(task) for task in told["tasks"]],
        modes=[tuple(modes) for modes in told["modes"]],
        cursor=int(told["cursor"]),
    )
