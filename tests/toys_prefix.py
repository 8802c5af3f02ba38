"""Toys whose groups may start behind steps of the expert, as the trainer prepares and adapts them."""

from types import SimpleNamespace
from typing import Any

from outrider.algorithms.grpo import Grpo
from outrider.rollout.scheduler import RolloutReport
from tests.toys import ToyRun
from tests.toys_demonstrated import expert_paths


class PrefixRun(ToyRun):
    """ToyRun of GRPO with prefixes; evaluation has none."""

    algorithm: Any

    def _algorithm(self, settings: Any) -> Any:
        return Grpo(settings, groups_per_step=len(self.tasks), seed=self.toy.seed)

    def scheduler(self, *, training: bool) -> Any:
        own = super().scheduler(training=training)
        return _Prepared(self, own) if training else own


class _Prepared:
    def __init__(self, run: PrefixRun, own: Any) -> None:
        self._run, self._own = run, own
        paths = expert_paths(run)
        self._play = SimpleNamespace(
            request_expert_paths=lambda tasks: ({task.key: paths[task.key] for task in tasks}, [])
        )

    def run(self, tasks: Any, *, modes: Any, training_step: int) -> RolloutReport:
        """Prepare, sample and adapt."""
        algorithm = self._run.algorithm
        each = [modes(number) for number in range(len(tasks))]
        algorithm.prepare(tasks, each, step=training_step, play=self._play)
        report: RolloutReport = self._own.run(tasks, modes=each.__getitem__, training_step=training_step)
        algorithm.augment(report.traces, step=training_step, play=self._play)
        return report
