"""The promise of LUFFY on the smallest task that shows it: a lock that its own rollouts never open, and one demonstration of how.

Same loop, credit and update as in :mod:`tests.toys`; the demonstration is played through the environment in every step.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from outrider.algorithms.luffy import Luffy, LuffySettings
from outrider.config import validate
from outrider.rollout.demonstrations import join_demonstration
from outrider.rollout.expert import play_experts
from outrider.rollout.scheduler import RolloutReport, Scheduler
from outrider.train.policy import set_threads
from outrider.types import Task
from tests.toys import _SHARED, TABLE_HEAD, Result, Toy, ToyRun, expert_trajectory, grpo, play, table_row

SEEDS = range(5)
MAX_POLICY_TOKENS = 3000


class Demonstrated:
    """A scheduler whose groups are joined by the expert's rollout."""

    def __init__(self, own: Scheduler, run: "LuffyRun") -> None:
        self._own, self._run = own, run

    def run(self, tasks: Sequence[Task], *, modes: Any, training_step: int) -> RolloutReport:
        """Play both."""
        report = self._own.run(tasks, modes=modes, training_step=training_step)
        played = play_experts(
            tasks=tasks, expert=lambda task: self._run.algorithm.paths[task.key], factory=self._own.factory,
            tokenizer=self._run.renderer.tokenizer, limits=self._own.limits, stop=(), run_seed=self._own.run_seed,
            context_length=4096, training_step=training_step,
        )  # fmt: skip
        for trace, one in zip(report.traces, played, strict=True):
            join_demonstration(trace, one)
        return report


class LuffyRun(ToyRun):
    """ToyRun with demonstrations."""

    algorithm: Any

    def __init__(self, toy: Toy, settings: Any, *, folder: Path) -> None:
        super().__init__(toy, settings, folder=folder)

    def _algorithm(self, settings: Any) -> Any:
        return Luffy(settings, paths={task.key: expert_trajectory(task).steps for task in self.tasks})

    def scheduler(self, *, training: bool) -> Any:
        """Evaluation has no demonstrations."""
        own = super().scheduler(training=training)
        return Demonstrated(own, self) if training else own


def luffy(seed: int, **options: Any) -> Result:
    settings = validate(LuffySettings, {**_SHARED, **options})
    with TemporaryDirectory() as folder:
        run = LuffyRun(Toy(seed=seed), settings, folder=Path(folder))
        try:
            return run.train(max_policy_tokens=MAX_POLICY_TOKENS)
        finally:
            run.buffer.close()


@pytest.fixture(scope="module")
def results() -> dict[str, list[Result]]:
    """Equal numbers of generated tokens."""
    set_threads(1)
    official: dict[str, Any] = {"clip_own": False, "advantage": "group_centered"}
    played = {
        "LUFFY": [luffy(seed) for seed in SEEDS],
        "LUFFY, no clip, no std": [luffy(seed, **official) for seed in SEEDS],
        "GRPO": [play(grpo(), seed=seed, max_policy_tokens=MAX_POLICY_TOKENS) for seed in SEEDS],
    }
    print("\n".join(["", TABLE_HEAD, *(table_row(name, rows) for name, rows in played.items())]))
    return played


def test_luffy_opens_the_lock_that_grpo_does_not_find(results: dict[str, list[Result]]) -> None:
    for name in ("LUFFY", "LUFFY, no clip, no std"):
        assert all(row.expected_return > 0.9 for row in results[name])
    assert all(row.expected_return < 0.1 for row in results["GRPO"])


def test_demonstrations_cost_no_generated_tokens(results: dict[str, list[Result]]) -> None:
    for rows in results.values():
        assert all(MAX_POLICY_TOKENS <= row.num_policy_tokens < MAX_POLICY_TOKENS + 12 * 6 for row in rows)
