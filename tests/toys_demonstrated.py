"""Toys whose groups are joined by an expert's rollout (LUFFY): the demonstration is played through the
environment in every step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.rollout.experts import join_demonstration, play_experts
from outrider.rollout.scheduler import RolloutReport, Scheduler
from outrider.types import Step, Task
from tests.toys import ToyRun, expert_trajectory


def expert_paths(run: ToyRun) -> dict[str, Sequence[Step] | None]:
    """What the expert does in each of the toy's tasks."""
    return {task.key: expert_trajectory(task, run.factory(task)).steps for task in run.tasks}


class Demonstrated:
    """A scheduler whose groups are joined by the expert's rollout, as the trainer joins them."""

    def __init__(self, own: Scheduler, run: ToyRun, paths: Mapping[str, Sequence[Step] | None]) -> None:
        self._own, self._run, self._paths = own, run, paths

    def run(self, tasks: Sequence[Task], *, modes: Any, training_step: int) -> RolloutReport:
        """Play both."""
        report = self._own.run(tasks, modes=modes, training_step=training_step)
        played = play_experts(
            tasks=tasks, expert=lambda task: self._paths[task.key], factory=self._own.factory,
            tokenizer=self._run.renderer.tokenizer, limits=self._own.limits, stop=(),
            run_seed=self._own.run_seed, context_length=4096, training_step=training_step,
        )  # fmt: skip
        for trace, one in zip(report.traces, played, strict=True):
            join_demonstration(trace, one)
        return report
