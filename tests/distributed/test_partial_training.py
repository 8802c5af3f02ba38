"""Adapters and the last layers alone, in shards over real ranks: what trains, its gradient, and what a step
leaves are those of one process.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.distributed.learner import RankGroup
from outrider.distributed.processes import Cluster
from outrider.training.settings import LoraSettings
from tests.distributed.groups import groups
from tests.distributed.probe import SETTINGS, alone, distance, near_the_truth, rank_group, run
from tests.distributed.test_rank_updates import differs, objective_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
PARTS: dict[str, dict[str, Any]] = {
    "adapters": {"lora": LoraSettings(rank=2, target_modules=("q_proj", "down_proj"))},
    "the last layer": {"trained_layers": 1},
}


@pytest.fixture(scope="module", params=PARTS)
def part(
    request: pytest.FixtureRequest, cluster: Cluster, folder: Path
) -> Iterator[tuple[dict[str, Any], RankGroup]]:
    ranks = rank_group(cluster, folder, 2, **PARTS[request.param])
    yield PARTS[request.param], ranks
    ranks.close()


def test_the_update_is_that_of_one_process(folder: Path, part: tuple[dict[str, Any], RankGroup]) -> None:
    """Several objectives one after the other, so from weights that both have moved; one has a reference."""
    given, ranks = part
    policy, reference = alone(folder, **given)
    begun = ranks.call("state")[0]
    assert begun.keys() == policy.masters.keys()
    assert 0 < len(begun) < len(list(policy.model.parameters()))
    assert all(begun[name].equal(one) for name, one in policy.masters.items())  # drawn alike
    for name in ("grpo", "grpo with a reference"):
        objective = objective_of("grpo")
        if name != "grpo":
            objective = objective.model_copy(update={"kl_weight": 0.5})
        traces = near_the_truth(policy, groups(5, longest=20))
        wanted = run(policy, reference if objective.kl_weight else None, traces, objective, SETTINGS)
        assert wanted.norms[0] > 0
        found = ranks.call("found", traces, objective, SETTINGS)[0]
        assert differs(found, wanted) == []
        assert distance(found.weights, wanted.weights) < 1e-6


def test_a_checkpoint_is_read_by_one_process_and_by_ranks(
    folder: Path, part: tuple[dict[str, Any], RankGroup], tmp_path: Path
) -> None:
    given, ranks = part
    ranks.call("save", str(tmp_path))
    whole = ranks.call("state")[0]
    policy, _ = alone(folder, **given)
    policy.load(tmp_path, num_steps=3)
    assert all(policy.masters[name].equal(one) for name, one in whole.items())
    (tmp_path / "one").mkdir()
    policy.save(tmp_path / "one")
    assert ranks.call("load", str(tmp_path / "one"), 3)[0][0] == 3
    assert all(ranks.call("state")[0][name].equal(one) for name, one in whole.items())


def test_in_half_precision_adapters_begin_alike_and_gradients_are_near(
    cluster: Cluster, folder: Path
) -> None:
    """A working copy in bfloat16 in front of shards in float32: rounding is what differs (spec: 8e-3)."""
    lora = LoraSettings(rank=2)
    policy, _ = alone(folder, precision="bfloat16", lora=lora, seed=3)
    ranks = rank_group(cluster, folder, 2, precision="bfloat16", lora=lora, seed=3)
    try:
        begun = ranks.call("state")[0]
        assert all(begun[name].equal(one) for name, one in policy.masters.items())
        traces = near_the_truth(policy, groups(5, longest=20))
        wanted = run(policy, None, traces, objective_of("grpo"), SETTINGS)
        found = ranks.call("found", traces, objective_of("grpo"), SETTINGS)[0]
        assert wanted.norms[0] > 0 and distance(found.gradients, wanted.gradients) < 3e-2
    finally:
        ranks.close()
