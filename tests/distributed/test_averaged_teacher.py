"""Averaged teachers of self-distillation on several ranks: their weights, and checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from outrider.algorithms.base import Algorithm, ObjectiveSettings
from outrider.algorithms.distill import DistillSettings
from outrider.config import validate
from outrider.distributed.learner import RankGroup
from outrider.distributed.processes import Cluster
from outrider.trace import Insertion, Trace
from outrider.training.cold_start import successful_paths
from outrider.training.learner import LocalLearner
from outrider.training.policy import TEACHER
from tests.distributed.groups import groups
from tests.distributed.probe import SETTINGS, alone, distance, near_the_truth, rank_group
from tests.distributed.test_rank_updates import lone_groups

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
RATE = 0.25


def objective(**distill: Any) -> ObjectiveSettings:
    options = {"help": "tips", "teacher": "ema", "teacher_rate": RATE, "support": "all", **distill}
    return ObjectiveSettings(distill=validate(DistillSettings, options))


@pytest.fixture(scope="module")
def ranks(cluster: Cluster, folder: Path) -> Iterator[RankGroup]:
    made = rank_group(cluster, folder, 2, teacher_rate=RATE)
    yield made
    made.close()


def local(folder: Path) -> LocalLearner:
    policy, reference = alone(folder)
    settings = SimpleNamespace(
        algorithm=objective(), update=SETTINGS, engine=SimpleNamespace(is_exact=True),
        cluster=SimpleNamespace(is_remote=True), seed=0,
    )  # fmt: skip
    return LocalLearner(settings=cast(Any, settings), policy=policy, reference=reference)


def step(learner: LocalLearner, traces: list[Trace]) -> None:
    algorithm = SimpleNamespace(objective=objective(), token_loss=objective().token_loss)
    learner.update(traces, cast(Algorithm, algorithm), on_batch=lambda num: None)


def helped(folder: Path, seed: int) -> list[Trace]:
    policy, _ = alone(folder)
    traces = near_the_truth(policy, groups(4, rollouts=3, longest=16, seed=seed))
    for trace in traces[:3]:
        for leaf, path in list(trace.rollouts())[1:]:
            help_ = Insertion(
                node_id=path[0].node_id, offset=3, token_ids=(20 + leaf.rollout, 9), text="", source="file"
            )
            trace.help[leaf.rollout] = (help_,)
    return traces


def state(ranks: RankGroup) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return ranks.call("state")[0], ranks.call("teacher_state")[0]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_ranks_have_the_averages_of_one_process_and_continue_with_the_same_bits(
    ranks: RankGroup, folder: Path, tmp_path: Path
) -> None:
    first, second = helped(folder, 0), helped(folder, 3)
    own, chosen, saved = local(folder), objective(), tmp_path / "ranks"
    saved.mkdir()
    assert own.teacher is not None
    start = {name: average.clone() for name, average in own.teacher.averages.items()}
    step(own, first)
    ranks.call("update", first, chosen, None, None, [])
    masters, averages = state(ranks)
    assert 0.0 < distance(averages, own.teacher.averages) < 1e-6
    assert distance(averages, start) > 10 * distance(averages, own.teacher.averages)
    assert not equal(masters, averages)
    ranks.call("save", str(saved))
    step(own, second)
    ranks.call("update", second, chosen, None, None, [])
    whole = state(ranks)
    assert distance(whole[1], own.teacher.averages) < 1e-5
    # the same bits after a checkpoint
    ranks.call("anew")
    assert ranks.call("load", str(saved), 1)[0][0] == 1
    assert equal(state(ranks)[0], masters) and equal(state(ranks)[1], averages)
    ranks.call("update", second, chosen, None, None, [])
    resumed = state(ranks)
    assert equal(resumed[0], whole[0]) and equal(resumed[1], whole[1])
    # one process reads it
    read = local(folder)
    read.load(saved, num_steps=1)
    assert read.teacher is not None
    assert equal(dict(read.policy.masters), masters) and equal(read.teacher.averages, averages)


def test_ranks_read_the_averages_of_one_process(ranks: RankGroup, folder: Path, tmp_path: Path) -> None:
    own = local(folder)
    step(own, helped(folder, 0))
    own.save(tmp_path)
    assert own.teacher is not None and {*load_file(tmp_path / TEACHER)} == {*own.teacher.averages}
    ranks.call("load", str(tmp_path), 1)
    masters, averages = state(ranks)
    assert equal(masters, dict(own.policy.masters)) and equal(averages, own.teacher.averages)
    (tmp_path / TEACHER).unlink()  # weights that another run wrote
    ranks.call("load", str(tmp_path), 1)
    masters, averages = state(ranks)
    assert equal(masters, averages) and equal(masters, dict(own.policy.masters))


def test_a_cold_start_and_bfloat16(cluster: Cluster, folder: Path) -> None:
    """The average starts at the weights of the cold start, and a forward pass rounds it."""
    ranks = rank_group(cluster, folder, 2, teacher_rate=RATE, precision="bfloat16")
    try:
        report, num_steps, _ = ranks.call("update", helped(folder, 0), objective(), None, None, [])[0]
        assert num_steps == 1 and report.metrics["distill/loss"] > 0.0
        masters, averages = state(ranks)
        assert not equal(masters, averages)
        ranks.call("fit", successful_paths(lone_groups()))
        assert equal(*state(ranks)) and not equal(state(ranks)[0], masters)
    finally:
        ranks.close()
