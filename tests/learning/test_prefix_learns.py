"""The promise of prefixes on the smallest task that shows it: a lock that GRPO's rollouts never open, and an
expert behind whose steps groups may start.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from outrider.algorithms.grpo import GrpoSettings
from outrider.config import validate
from outrider.training.policy import set_threads
from tests.toy_result import Result
from tests.toys import _SHARED, TABLE_HEAD, Toy, grpo, play, table_row
from tests.toys_prefix import PrefixRun

pytestmark = pytest.mark.slow

SEEDS = range(3)
MAX_POLICY_TOKENS = 9000


def guided(seed: int, **options: Any) -> tuple[Result, dict[str, int]]:
    """The result of a run, and k of its task at the end."""
    settings = validate(GrpoSettings, {**_SHARED, "prefix": options})
    with TemporaryDirectory() as folder:
        run = PrefixRun(Toy(seed=seed), settings, folder=Path(folder))
        try:
            result = run.train(max_policy_tokens=MAX_POLICY_TOKENS)
            return result, run.algorithm.prefix.lengths
        finally:
            run.buffer.close()


def test_prefixes_open_the_lock_that_grpo_does_not_find() -> None:
    set_threads(1)
    played = [guided(seed) for seed in SEEDS]
    plain = [play(grpo(), seed=seed, max_policy_tokens=MAX_POLICY_TOKENS) for seed in SEEDS]
    results = [result for result, _ in played]
    print("\n".join(["", TABLE_HEAD, table_row("prefix", results), table_row("GRPO", plain)]))
    assert all(result.expected_return > 0.9 for result in results)
    assert all(set(lengths.values()) == {0} for _, lengths in played)  # withdrawn
    assert all(result.expected_return < 0.1 for result in plain)
