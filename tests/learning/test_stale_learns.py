"""RAPO opens the lock also with tokens of weights that are one and two versions old."""

from pathlib import Path

import pytest
import torch

from outrider.train.update.policy import set_threads
from tests.toys import Toy, rapo
from tests.toys_stale import StaleRun, play

# of ten, that learn at every age; all ten: python -m benchmarks.stale_toy
SEED = 1


@pytest.mark.parametrize("staleness", [1, 2])
def test_it_learns_from_older_tokens(staleness: int) -> None:
    set_threads(1)
    result = play(rapo(), seed=SEED, staleness=staleness)
    assert result.expected_return > 0.95 and result.sampled_return > 0.9


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_the_engine_is_as_many_versions_behind(staleness: int, tmp_path: Path) -> None:
    run = StaleRun(Toy(seed=0), rapo(), staleness=staleness, folder=tmp_path)
    seen = []
    for step in range(5):
        assert run.engine.weight_version == max(0, step - staleness)
        seen.append(run.model.table.weight.detach().clone())
        assert torch.equal(run.engine._model.table.weight, seen[max(0, step - staleness)])
        with torch.no_grad():
            run.model.table.weight.add_(1.0)
        run.engine.load(0)
    run.buffer.close()
