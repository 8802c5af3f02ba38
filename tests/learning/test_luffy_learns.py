"""The promise of LUFFY on the smallest task that shows it: a lock that its own rollouts never open, and one
demonstration of how.

Same loop, credit and update as in :mod:`tests.toys`; the demonstration is played through the environment in
every step.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from outrider.algorithms.luffy import Luffy, LuffySettings
from outrider.config import validate
from outrider.training.policy import set_threads
from tests.toy_result import Result
from tests.toys import _SHARED, TABLE_HEAD, Toy, ToyRun, grpo, play, table_row
from tests.toys_demonstrated import Demonstrated, expert_paths

pytestmark = pytest.mark.slow

SEEDS = range(5)
FEW_SEEDS = range(1)  # the others take minutes: `make test-slow`
MAX_POLICY_TOKENS = 3000


class LuffyRun(ToyRun):
    """ToyRun with demonstrations."""

    algorithm: Any

    def _algorithm(self, settings: Any) -> Any:
        return Luffy(settings, paths=expert_paths(self))

    def scheduler(self, *, training: bool) -> Any:
        """Evaluation has no demonstrations."""
        own = super().scheduler(training=training)
        return Demonstrated(own, self, self.algorithm.paths) if training else own


def luffy(seed: int, **options: Any) -> Result:
    settings = validate(LuffySettings, {**_SHARED, **options})
    with TemporaryDirectory() as folder:
        run = LuffyRun(Toy(seed=seed), settings, folder=Path(folder))
        try:
            return run.train(max_policy_tokens=MAX_POLICY_TOKENS)
        finally:
            run.buffer.close()


@pytest.fixture(scope="module", params=[FEW_SEEDS, pytest.param(SEEDS, marks=pytest.mark.slow)], ids=len)
def results(request: pytest.FixtureRequest) -> dict[str, list[Result]]:
    """Equal numbers of generated tokens."""
    set_threads(1)
    official: dict[str, Any] = {"clip_own": False, "advantage": "group_centered"}
    played = {
        "LUFFY": [luffy(seed) for seed in request.param],
        "LUFFY, no clip, no std": [luffy(seed, **official) for seed in request.param],
        "GRPO": [play(grpo(), seed=seed, max_policy_tokens=MAX_POLICY_TOKENS) for seed in request.param],
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
