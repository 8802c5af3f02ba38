"""Loss and gradient of N ranks equal those of one process, and the same N gives the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.algorithms.base import ObjectiveSettings
from outrider.algorithms.distill import DistillSettings
from outrider.config import validate
from outrider.distributed.learner import RankGroup
from outrider.trace import Insertion, Trace
from outrider.training.cold_start import cold_start, successful_paths
from outrider.training.settings import RunSettings, UpdateSettings
from outrider.training.update import measure_kl
from tests.algorithms.test_every_objective import EVERY
from tests.distributed.groups import distinct_objectives, groups
from tests.distributed.probe import (
    SETTINGS,
    Found,
    RingObjective,
    alone,
    assign_ring_advantages,
    distance,
    near_the_truth,
    rank_settings,
    run,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
PROMISE = 1e-6
_SPREAD = next(  # a seed whose two rollouts have different returns
    seed
    for seed in range(99)
    if len({one.episode_return for one, _ in groups(1, rollouts=2, seed=seed)[0].rollouts()}) == 2
)
RanksOf = Callable[[int], RankGroup]


def objective_of(name: str) -> ObjectiveSettings:
    return validate(RunSettings, {"environment": {"type": "factbook"}, "algorithm": EVERY[name]}).algorithm


def differs(found: Found, wanted: Found) -> list[str]:
    """What is further away than the promise."""
    differences = []
    if found.gradients and (apart := distance(found.gradients, wanted.gradients)) > PROMISE:
        differences.append(f"gradient {apart:.1e}")
    assert found.metrics.keys() == wanted.metrics.keys()
    terms = ("policy", "kl", "positive_nll", "observation_nll", "entropy")
    for name in (*(f"loss/{term}" for term in terms), "grad/norm"):
        if name in wanted.metrics and found.metrics[name] != pytest.approx(
            wanted.metrics[name], rel=PROMISE, abs=PROMISE
        ):
            differences.append(f"{name} {found.metrics[name]} for {wanted.metrics[name]}")
    for name, value in wanted.metrics.items():  # counts and means: nothing is counted twice, or not at all
        if found.metrics[name] != pytest.approx(value, rel=1e-4, abs=1e-5):
            differences.append(f"{name} {found.metrics[name]} for {value}")
    return differences


@pytest.mark.parametrize(
    ("size", "nth"),
    [(2, 3), (3, 7), *(pytest.param(one, 1, marks=pytest.mark.slow) for one in (2, 3))],
)
def test_every_objective_has_the_gradient_of_one_process(
    ranks_of: RanksOf, folder: Path, size: int, nth: int
) -> None:
    differences = {}
    ranks = ranks_of(size)
    policy, reference = alone(folder)
    traces = near_the_truth(policy, groups(5, rollouts=3, longest=16))
    traces[4].is_replayed = True
    start = {name: one.clone() for name, one in policy.masters.items()}
    for name, objective in list(distinct_objectives().items())[::nth]:
        given = reference if objective.kl_weight > 0 else None
        for key, one in policy.masters.items():
            one.copy_(start[key])
        policy.fresh_optimizer()
        wanted = run(policy, given, traces, objective, SETTINGS)
        assert wanted.gradients and wanted.norms[0] > 0, name
        ranks.call("anew")
        if found := differs(ranks.call("found", traces, objective, SETTINGS)[0], wanted):
            differences[name] = found
    assert differences == {}


def test_an_objective_of_a_plugin_has_the_gradient_of_one_process(ranks_of: RanksOf, folder: Path) -> None:
    """Pairs in a ring of five rollouts, whose advantages fade, and a KL."""
    policy, reference = alone(folder)
    traces = [groups(1, rollouts=5, longest=16, seed=seed)[0] for seed in range(3)]
    traces = assign_ring_advantages(near_the_truth(policy, traces))
    objective = RingObjective(kl_weight=0.1)
    for size in (2, 3):
        ranks = ranks_of(size)
        ranks.call("anew")
        ranks.call("found", traces, objective, SETTINGS)  # moves away from the reference
        for name, weights in ranks.call("state")[0].items():
            policy.masters[name].copy_(weights)
        wanted = run(policy, reference, traces, objective, SETTINGS)
        assert wanted.norms[0] > 0 and wanted.metrics["loss/kl"] > 0
        assert differs(ranks.call("found", traces, objective, SETTINGS)[0], wanted) == []


def test_only_the_first_rank_returns_values_of_tokens(ranks_of: RanksOf, folder: Path) -> None:
    policy, _ = alone(folder)
    traces = near_the_truth(policy, groups(3, longest=16))
    reports = [report for report, *_ in ranks_of(2).call("update", traces, objective_of("grpo"), None, 0, [])]
    assert reports[0].tokens and not reports[1].tokens
    assert reports[0].metrics == reports[1].metrics


def test_observations_are_counted_over_all_ranks(ranks_of: RanksOf, folder: Path) -> None:
    policy, _ = alone(folder)
    traces = near_the_truth(policy, groups(5, rollouts=3, longest=16))
    objective = objective_of("echo")
    wanted = run(policy, None, traces, objective, SETTINGS)
    assert wanted.metrics["loss/observation_nll"] > 0
    ranks = ranks_of(2)
    ranks.call("anew")
    assert differs(ranks.call("found", traces, objective, SETTINGS)[0], wanted) == []


@pytest.mark.parametrize(
    ("size", "distill"),
    [
        (2, {"support": 8}), (3, {"form": "likelihood", "gate": "gap_centered"}), (2, {"support": "all"}),
        (3, {"support": "all", "alpha": 0.5}),
    ],
    ids=str,
)  # fmt: skip
def test_self_distillation_has_the_gradient_of_one_process(
    ranks_of: RanksOf, folder: Path, size: int, distill: dict[str, object]
) -> None:
    policy, _ = alone(folder)
    traces = near_the_truth(policy, groups(4, rollouts=3, longest=16))
    for trace in traces[:3]:
        for leaf, path in list(trace.rollouts())[1:]:
            help_ = Insertion(
                node_id=path[0].node_id, offset=3, token_ids=(20 + leaf.rollout, 9), text="", source="file"
            )
            trace.help[leaf.rollout] = (help_,)
    objective = ObjectiveSettings(distill=validate(DistillSettings, {"help": "tips", **distill}))
    wanted = run(policy, None, traces, objective, SETTINGS)
    assert wanted.norms[0] > 0 and wanted.metrics["distill/num_tokens"] > 0
    ranks = ranks_of(size)
    ranks.call("anew")
    found = ranks.call("found", traces, objective, SETTINGS)[0]
    for one in (found, wanted):
        assert one.metrics.pop("time/help") > 0
    assert differs(found, wanted) == []
    assert found.metrics["distill/loss"] == pytest.approx(wanted.metrics["distill/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("size", "cut", "num_steps"),
    [
        (2, {"num_mini_batches": 2}, 4),
        (3, {"num_mini_batches": 2}, 4),
        (2, {"mini_batch_samples": 7}, 8),  # 24 rollouts
    ],
    ids=str,
)
def test_several_steps_and_the_same_bits_twice(
    ranks_of: RanksOf, folder: Path, size: int, cut: dict[str, Any], num_steps: int
) -> None:
    policy, _ = alone(folder)
    traces = near_the_truth(policy, groups(6, seed=1, longest=20))
    settings = UpdateSettings(**cut, num_epochs=2, max_tokens=120, max_logprob_gap=1e9)
    objective = objective_of("grpo")
    wanted = run(policy, None, traces, objective, settings)
    ranks = ranks_of(size)
    found = ranks.call("found", traces, objective, settings)[0]
    assert len(wanted.norms) == len(found.norms) == num_steps
    assert differs(found, wanted) == []
    assert distance(found.weights, wanted.weights) < 1e-6
    ranks.call("anew")
    again = ranks.call("found", traces, objective, settings)[0]
    assert again.norms == found.norms and again.metrics == found.metrics
    assert all(again.weights[name].equal(one) for name, one in found.weights.items())


def test_ranks_without_work_take_part(ranks_of: RanksOf, folder: Path) -> None:
    """One group of one rollout with a gradient: two of three ranks have nothing to compute."""
    policy, _ = alone(folder)
    [trace] = near_the_truth(policy, groups(1, rollouts=2, seed=_SPREAD))
    trace.pruned = frozenset({1})
    objective = objective_of("grpo")
    wanted = run(policy, None, [trace], objective, SETTINGS)
    assert wanted.gradients
    found = ranks_of(3).call("found", [trace], objective, SETTINGS)[0]
    assert differs(found, wanted) == []


@pytest.mark.parametrize("size", [2, 3])
def test_the_cold_start_and_the_reward_s_kl_are_those_of_one_process(
    ranks_of: RanksOf, folder: Path, size: int
) -> None:
    policy, reference = alone(folder)
    ranks = ranks_of(size)
    losses: list[float] = []
    cold_start(
        policy,
        successful_paths(lone_groups()),
        rank_settings(folder).cold_start,
        run_seed=0,
        max_tokens=SETTINGS.max_tokens,
        on_step=lambda done, total, values: losses.append(values["sft/loss"]),
    )
    found = ranks.call("fit", successful_paths(lone_groups()))[0]
    assert [values["sft/loss"] for *_, values in found] == pytest.approx(losses, rel=1e-5) and len(
        losses
    ) >= 2
    assert distance(ranks.call("state")[0], dict(policy.masters)) < PROMISE
    traces = lone_groups()
    measure_kl(policy, reference, traces, max_tokens=SETTINGS.max_tokens)
    wanted = [value for trace in traces for node in trace.nodes for value in node.kl or ()]
    kls = ranks.call("score", lone_groups())[0]
    flat = [value for trace in kls for node in trace for value in node or ()]
    assert flat == pytest.approx(wanted, rel=1e-3, abs=2e-5) and max(map(abs, wanted)) > 1e-3


def lone_groups() -> list[Trace]:
    """Without forks, whose shared tokens neither a cold start nor the reward's KL takes."""
    return [groups(1, seed=seed, longest=20)[0] for seed in range(4)]
