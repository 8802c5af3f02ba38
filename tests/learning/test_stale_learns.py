"""RAPO opens the lock also with tokens of weights that are one and two versions old, and where an episode
meets older and newer ones.
"""

from pathlib import Path

import pytest
import torch

from outrider.training.policy import set_threads
from outrider.training.step_metrics import staleness_metrics
from tests.toys import Toy, rapo
from tests.toys_stale import StaleRun, play

pytestmark = pytest.mark.long

# of ten, that learn at every age; all ten: python -m benchmarks.stale_toy
SEED = 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "is_mixed"),
    [
        (1, False),
        (2, False),
        (1, True),
        (2, True),
    ],
)
def test_it_learns_from_older_tokens(staleness: int, is_mixed: bool) -> None:
    set_threads(1)
    result = play(rapo(), seed=SEED, staleness=staleness, is_mixed=is_mixed)
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


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_an_episode_meets_newer_weights_and_none_too_old(staleness: int, tmp_path: Path) -> None:
    run = StaleRun(Toy(seed=0), rapo(), staleness=staleness, folder=tmp_path, is_mixed=True)
    spans = set()
    for step in range(4):
        traces = run.scheduler(training=True).run(run.tasks, modes=("plain",) * 2, training_step=step).traces
        staleness_metrics(traces, version=step, limit=staleness)  # raises for one that is too old
        for trace in traces:
            for _, path in trace.rollouts():
                versions = [node.weight_version for node in path if node.trainable]
                assert versions == sorted(versions) and versions[0] == max(0, step - staleness)
                spans.add(len(set(versions)))
        run.engine.load(0)
    assert max(spans) == staleness + 1
    run.buffer.close()
