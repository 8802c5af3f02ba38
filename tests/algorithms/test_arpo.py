"""ARPO and AEPO: numbers of the papers and the released code, advantages on trees, decisions of the hook."""

import math
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.base import ObjectiveSettings
from outrider.algorithms.entropy_branching import (
    BranchHook,
    BranchSettings,
    branch_probability,
    branches,
    entropy_advantage_factors,
    first_wave_budget,
    require_countable,
    segment_entropy,
)
from outrider.algorithms.exploration import ARPO_PRESETS as PRESETS
from outrider.algorithms.exploration import Arpo, ArpoSettings, RapoSettings
from outrider.algorithms.loss_settings import (
    CispoLoss,
    GppoLoss,
    GspoLoss,
    ReinforceLoss,
    RejectionMask,
    SamplerCorrection,
)
from outrider.algorithms.losses import clipped_surrogate_per_token
from outrider.config import validate
from outrider.environments.base import Episode, StepResult
from outrider.errors import ConfigError
from outrider.rollout.hooks import EpisodeState
from outrider.seeding import stream
from outrider.trace import Node, Trace
from outrider.types import Message, Origin
from tests.algorithms.builders import add_node, finish, new_trace
from tests.rollout.fakes import Fake
from tests.vectors import load_vectors

VECTORS: Any = load_vectors("arpo_branching")
V = 256


@pytest.mark.parametrize("case", VECTORS["branch_decision_sweep"])
def test_released_branching(case: dict[str, Any]) -> None:
    change = case["H_now"] - case["H_init"]
    found = branches(case["u"], change=change, base=case["branch_probability"], weight=case["entropy_weight"])
    assert found is case["branch"]


@pytest.mark.parametrize("base", [0.3, 0.7])
@pytest.mark.parametrize("change", [-1.0, 0.2])
def test_bernoulli_forks_with_the_probability_of_the_formula(base: float, change: float) -> None:
    draws = [(number + 0.5) / 1000 for number in range(1000)]
    share = fmean(branches(u, change=change, base=base, weight=0.4) for u in draws)
    assert share == pytest.approx(branch_probability(change=change, base=base, weight=0.4), abs=1e-3)


@pytest.mark.parametrize("case", VECTORS["entropy"])
def test_released_entropy(case: dict[str, Any]) -> None:
    raw = -math.fsum(math.exp(value) * value for value in case["logprobs"])
    assert raw == pytest.approx(case["raw"], abs=1e-12)
    for size, value in case["normalised_by_ln_V"].items():
        found = segment_entropy([raw], vocabulary_size=int(size), reduce="sum")
        assert found == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("case", VECTORS["aepo_budget"])
def test_aepo_budget(case: dict[str, Any]) -> None:
    found = first_wave_budget(total=case["n"], entropy_root=case["H_root"], entropy_tools=case["H_tool_mean"])
    assert found == case["initial_rollouts"]


@pytest.mark.parametrize("case", VECTORS["aepo_branch"])
def test_released_aepo_branching(case: dict[str, Any]) -> None:
    found = branches(
        case["u"],
        change=case["delta"],
        base=0.5,
        weight=0.2,
        decision="aepo_released",
        penalty=0.05,
        streak=case["consecutive"],
    )
    assert found is case["branch"]


@pytest.mark.parametrize("case", VECTORS["aepo_clip"])
@pytest.mark.parametrize("kind", ["standard", "balanced"])
def test_aepo_clip_keeps_value_and_gives_gradient(case: dict[str, Any], kind: str) -> None:
    logprobs = torch.tensor([math.log(case["ratio"])], dtype=torch.float64, requires_grad=True)
    loss = clipped_surrogate_per_token(
        logprobs=logprobs, old_logprobs=torch.zeros(1, dtype=torch.float64),
        advantages=torch.tensor([case["advantage"]], dtype=torch.float64), clip_low=case["clip_low"],
        clip_high=case["clip_high"], dual_clip=case["clip_c"], keep_clipped_gradient=kind == "balanced",
    ).losses.sum()  # fmt: skip
    loss.backward()
    assert float(loss) == pytest.approx(case[kind]["loss"], abs=1e-9)
    assert float(logprobs.grad[0]) == pytest.approx(  # type: ignore[index]
        case[kind]["grad_wrt_logprob"], abs=1e-9
    )


@pytest.mark.parametrize("case", VECTORS["aepo_advantage"])
def test_aepo_advantage(case: dict[str, Any]) -> None:
    valid = [h for h, kept in zip(case["token_entropy"], case.get("mask", [1] * 9), strict=False) if kept]
    factors = entropy_advantage_factors(valid, weight=case["a"])
    expected = [s / a for s, a in zip(case["shaped"], case["advantage"], strict=True)][: len(valid)]
    assert factors == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("case", VECTORS["soft_vs_hard_shared_token"])
def test_soft_and_hard_on_a_shared_token(case: dict[str, Any]) -> None:
    """Upstream averages over both branches' copies; our sums are twice that for soft, and hard counts
    once.
    """
    advantages = torch.tensor(case["advantages_of_two_branches"], dtype=torch.float64)
    for kind in ("soft", "hard"):
        logprobs = torch.tensor(
            [math.log(case["shared_token_ratio"])], dtype=torch.float64, requires_grad=True
        )
        each = advantages if kind == "soft" else advantages.mean()[None]
        loss = clipped_surrogate_per_token(
            logprobs=logprobs.expand(len(each)), old_logprobs=torch.zeros(len(each), dtype=torch.float64),
            advantages=each, dual_clip=3.0,
        ).losses.sum() / len(each)  # fmt: skip
        loss.backward()
        assert float(loss) == pytest.approx(case[f"{kind}_loss"], abs=1e-7)
        assert float(logprobs.grad[0]) == pytest.approx(  # type: ignore[index]
            case[f"{kind}_grad_sum"], abs=1e-7
        )


@given(
    change=st.floats(-3, 3), base=st.floats(0.01, 0.99), weight=st.floats(0, 2), penalty=st.floats(0, 0.2),
    streak=st.integers(0, 12),
)  # fmt: skip
def test_the_share_of_draws_that_branch_is_the_probability(
    change: float, base: float, weight: float, penalty: float, streak: int
) -> None:
    draws = (np.arange(2000) + 0.5) / 2000
    options = {"change": change, "base": base, "weight": weight, "penalty": penalty, "streak": streak}
    share = np.mean([branches(float(u), **options) for u in draws])
    assert share == pytest.approx(branch_probability(**options), abs=1e-3)
    assert branches(0.999, decision="threshold", threshold=0.5, **options) is (
        branch_probability(**options) > 0.5
    )


def test_presets_set_the_defaults_of_missing_keys() -> None:
    for name in PRESETS:
        chosen = validate(ArpoSettings, {"type": "arpo", "preset": name, "window": 7})
        assert chosen.window == 7 and chosen.preset == name
    released = validate(ArpoSettings, {"preset": "aepo-released", "branch_penalty": 0.5})
    assert (
        released.decision == "aepo_released" and released.branch_penalty == 0.5 and not released.pre_monitor
    )
    assert validate(ArpoSettings, {"preset": "aepo"}).pre_monitor
    advised = validate(ArpoSettings, {"preset": "aepo-advised", "branch_penalty": 0.5})
    assert advised == released.model_copy(update={"preset": "aepo-advised", "pre_monitor": True})
    assert validate(ArpoSettings, {}).source == "after_result"


def state_with(entropies: list[list[float]], *, rollout: int = 0, num_tool_calls: int = 1) -> EpisodeState:
    """Return a lineage of policy turns with observations between them; the newest turn was just sampled."""
    trace = new_trace()
    node = add_node(trace, None, Origin.PROMPT)
    for number, values in enumerate(entropies):
        if number:
            node = add_node(trace, node, Origin.ENVIRONMENT)
        node = add_node(trace, node, Origin.POLICY, num_tokens=len(values), entropies=values)
    return EpisodeState(
        task=trace.task, trace=trace, episode=Episode(Fake(on_step=lambda n, t: StepResult(message=None))),
        run_seed=0, training_step=0, rollout=rollout, mode="m", last_node=node, turn=len(entropies) - 1,
        last_result=StepResult(message=Message(role="user", content=""), num_tool_calls=num_tool_calls),
    )  # fmt: skip


def hook(**options: Any) -> BranchHook:
    return BranchHook(validate(ArpoSettings, options), group_size=16, vocabulary_size=V)


def test_the_change_is_the_look_ahead_minus_the_first_turn_of_the_lineage() -> None:
    state = state_with([[0.1, 0.3], [9.0] * 30, [1.0] * 2 + [2.0] * 2 + [50.0]])
    hook(window=4).num_forks(state)
    assert state.last_node.metadata["entropy_change"] == pytest.approx((1.5 - 0.2) / math.log(V))
    hook(window=4, preset="arpo-released").num_forks(state)  # the turn before the call, summed
    assert state.last_node.metadata["entropy_change"] == pytest.approx((4 * 9.0 - 0.4) / math.log(V))


def test_forks_only_after_an_executed_call_and_not_in_the_probing_rollout() -> None:
    always: dict[str, Any] = {"base_probability": 1.0, "num_children": 3}
    assert hook(**always).num_forks(state_with([[1.0], [1.0]])) == 3
    assert hook(**always).num_forks(state_with([[1.0], [1.0]], num_tool_calls=0)) is None
    assert hook(**always).num_forks(state_with([[1.0]])) is None
    assert hook(**always, preset="aepo").num_forks(state_with([[1.0], [1.0]])) is None
    assert hook(**always, preset="aepo").num_forks(state_with([[1.0], [1.0]], rollout=4)) == 3


def test_moves_of_a_simulator_count_like_tool_calls() -> None:
    chosen = validate(ArpoSettings, {"base_probability": 1.0})
    moves = BranchHook(chosen, group_size=16, vocabulary_size=V, every_action=True)
    assert moves.num_forks(state_with([[1.0], [1.0]], num_tool_calls=0)) == 1


def test_combinations_without_meaning_are_errors() -> None:
    with pytest.raises(ConfigError, match="counts a shared token once"):
        validate(ArpoSettings, {"attribution": "hard", "aggregation": "sequence_mean_token_mean"})
    with pytest.raises(ConfigError, match="positive_nll"):
        validate(ArpoSettings, {"attribution": "hard", "positive_nll": 0.1})
    with pytest.raises(ConfigError, match="no room for forks"):
        validate(RapoSettings, {"branch": {"first_wave": 8}})
    with pytest.raises(ConfigError, match="exceeds group_size"):
        validate(ArpoSettings, {"group_size": 4, "first_wave": 8})


@pytest.mark.parametrize(("group_size", "num_first"), [(2, 1), (7, 3), (16, 8)])
def test_the_first_wave_is_half_of_the_group_unless_it_is_set(group_size: int, num_first: int) -> None:
    hook = Arpo(validate(ArpoSettings, {"group_size": group_size}), vocabulary_size=V).hooks[0]
    assert hook.first_wave == num_first
    broken = BranchHook(BranchSettings(pre_monitor=True), group_size=group_size, vocabulary_size=V)
    assert broken.budget(group_of_one([])) == num_first
    validate(RapoSettings, {"group_size": 8, "num_hybrid": 2, "branch": {}})


def test_the_threshold_rule_of_the_paper_forks_iff_entropy_rose() -> None:
    rule = hook(decision="threshold")
    for entropy, num_forks in ((1.1, 1), (0.9, 0), (1.0, 0)):  # the threshold must be exceeded
        assert rule.num_forks(state_with([[1.0], [entropy]])) == num_forks


@pytest.mark.parametrize("scope", ["lineage", "prompt"])
def test_a_streak_lowers_the_probability(scope: str) -> None:
    branching = hook(base_probability=1.0, branch_penalty=1.0, penalty_scope=scope)
    state = state_with([[1.0], [1.0]])
    assert branching.streak_scope == scope
    # it remembers nothing: the loop counts streaks
    assert branching.num_forks(state) == 1 == branching.num_forks(state)
    assert branching.num_forks(replace(state, branch_streak=1)) == 0


@given(
    change=st.floats(-3, 3), base=st.floats(0, 1), weight=st.floats(0, 2), penalty=st.floats(0, 1),
    u=st.floats(0, 0.999), decision=st.sampled_from(["bernoulli", "threshold", "aepo_released"]),
)  # fmt: skip
def test_a_longer_streak_never_branches_where_a_shorter_one_does_not(
    decision: Any, u: float, **options: float
) -> None:
    """So a point that wants nothing without a streak needs no copy, whatever the group's streak will be."""
    found = [
        branches(u, decision=decision, streak=streak, **options)  # type: ignore[arg-type]
        for streak in range(8)
    ]
    assert found == sorted(found, reverse=True)


def tree(returns: list[float]) -> Trace:
    """Return two leaves below a shared first turn, and a separate rollout."""
    trace = new_trace()

    def turn(parent: Node, size: int) -> Node:
        entropies = [0.5 + i for i in range(size)]
        return add_node(trace, parent, Origin.POLICY, num_tokens=size, entropies=entropies)

    root = add_node(trace, None, Origin.PROMPT)
    seen = add_node(trace, turn(root, 2), Origin.ENVIRONMENT)
    for leaf, value in zip((turn(seen, 1), turn(seen, 3), turn(root, 2)), returns, strict=True):
        finish(trace, leaf, value)
    return trace


def arpo(**options: Any) -> Arpo:
    settings = validate(ArpoSettings, {"group_size": 3, "first_wave": 1, **options})
    return Arpo(settings, vocabulary_size=V)


def test_soft_attribution_gives_every_leaf_its_own_advantage_and_hard_their_mean() -> None:
    soft, hard = tree([1.0, 0.0, 0.0]), tree([1.0, 0.0, 0.0])
    values = arpo().assign_advantages(soft).advantages.values
    arpo(attribution="hard").assign_advantages(hard)
    assert soft.nodes[1].credit is None and soft.nodes[1].shares is not None
    shares = {rollout: share.credit for rollout, share in soft.nodes[1].shares.items()}
    assert shares == {0: (values[0],) * 2, 1: (values[1],) * 2}
    assert hard.nodes[1].credit == pytest.approx(((values[0] + values[1]) / 2,) * 2)
    assert hard.nodes[1].owner == 0
    expected = [(values[0],), (values[1],) * 3, (values[2],) * 2]
    for trace in (soft, hard):
        assert [trace.nodes[i].credit for i in (3, 4, 5)] == expected


def test_the_entropy_aware_advantage_scales_every_token() -> None:
    plain, scaled = tree([1.0, 0.0, 0.0]), tree([1.0, 0.0, 0.0])
    arpo().assign_advantages(plain)
    arpo(entropy_advantage=0.2).assign_advantages(scaled)
    entropies = [e for node in scaled.nodes for e in node.entropies]
    factors = iter(entropy_advantage_factors(entropies, weight=0.2))
    for one, other in zip(plain.nodes, scaled.nodes, strict=True):
        own = [next(factors) for _ in other.entropies]
        if one.credit is not None:
            assert other.credit == pytest.approx([c * f for c, f in zip(one.credit, own, strict=True)])
        if one.shares is not None:
            assert other.shares is not None
            for rollout, share in one.shares.items():
                assert other.shares[rollout].credit == pytest.approx(
                    [c * f for c, f in zip(share.credit, own, strict=True)]
                )


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("normalizer", ["log_vocabulary", "vocabulary", "none"])
def test_the_entropy_of_a_segment_by_hand(reduce: Any, normalizer: Any) -> None:
    divisor = {"log_vocabulary": math.log(8), "vocabulary": 8.0, "none": 1.0}[normalizer] * (
        2 if reduce == "mean" else 1
    )
    found = segment_entropy(
        [1.0, 3.0, 50.0], vocabulary_size=8, window=2, reduce=reduce, normalizer=normalizer
    )
    assert found == pytest.approx(4.0 / divisor)
    assert segment_entropy([], vocabulary_size=8, reduce=reduce, normalizer=normalizer) == 0.0


def test_the_default_window_is_of_twenty_tokens_and_the_smallest_vocabulary_of_two() -> None:
    assert segment_entropy([1.0] * 20 + [50.0], vocabulary_size=2) == pytest.approx(1.0 / math.log(2))
    with pytest.raises(ValueError, match="vocabulary of 1"):
        segment_entropy([1.0], vocabulary_size=1)


def test_one_token_has_no_spread_and_none_no_factor() -> None:
    assert entropy_advantage_factors([0.7], weight=2.0) == [1.0]
    assert entropy_advantage_factors([0.7, 0.7], weight=2.0) == [1.0, 1.0]
    assert entropy_advantage_factors([], weight=2.0) == []


@given(st.integers(2, 200), st.integers(2, 60))
def test_equal_entropies_have_no_spread(vocabulary_size: int, count: int) -> None:
    assert entropy_advantage_factors([math.log(vocabulary_size)] * count, weight=0.2) == [1.0] * count


def group_of_one(entropies: list[list[float]]) -> Trace:
    """Return the first rollout of AEPO, finished; without entropies it ended by a fault."""
    state = state_with(entropies or [[1.0]])
    finish(state.trace, state.last_node, 0.0 if entropies else None)
    return state.trace


def test_the_entropies_of_the_first_rollout_determine_the_first_wave() -> None:
    """k sigmoid((H_root - H_tool) / 2), rounded down, and one more; H_tool is the mean over the turns after a
    tool, in the released script over all turns.
    """
    advised = hook(preset="aepo-advised", normalizer="none", reduce="mean", window=4)
    trace = group_of_one([[3.0] * 2, [1.0] * 3, [2.0] * 3])
    assert advised.budget(trace) == first_wave_budget(total=16, entropy_root=3.0, entropy_tools=2.0)
    probing = hook(preset="aepo", normalizer="none", reduce="mean", window=4)
    for root, after in ((3.0, [1.0, 2.0]), (1.0, [4.0]), (2.0, [])):
        trace = group_of_one([[root] * 2, *([value] * 3 for value in after)])
        tool = sum(after) / len(after) if after else root
        expected = math.floor(16 / (1 + math.exp(-0.5 * (root - tool)))) + 1
        assert probing.budget(trace) == expected
    assert probing.first_wave == 1
    broken = group_of_one([])
    assert probing.budget(broken) == 8  # half of the group
    assert hook().budget(broken) is None and hook(first_wave=5).first_wave == 5


def test_the_draws_of_a_fork_are_from_the_stream_of_its_turn() -> None:
    state = state_with([[1.0], [1.0]])
    draws = stream(0, "branch", 0, "t", 0, 1).random(64)
    found = hook(base_probability=0.4, num_children=64).num_forks(state)
    assert found == int((draws <= 0.4).sum()) and 0 < found < 64


# Borders of the rule, by hand (arXiv 2507.19849 section 3.1; arXiv 2510.14545)

STREAK = {"penalty": 0.5, "streak": 1}


@pytest.mark.parametrize(
    ("u", "options", "expected"),
    [
        # Released ARPO: clip(u - w dH, 0, 1) <= p.
        (0.5, {"base": 0.5}, True),
        (0.5001, {"base": 0.5}, False),
        (0.75, {"base": 0.5, "change": 1.0}, True),
        (0.76, {"base": 0.5, "change": 1.0}, False),
        (0.1, {"base": 0.0, "change": 1.0}, True),  # clipped to 0
        (0.9, {"base": 1.0, "change": -1.0}, True),  # clipped to 1
        # A penalty without a streak, and a streak without a penalty.
        (0.5, {"base": 0.5, "penalty": 0.5}, True),
        (0.5, {"base": 0.5, "streak": 3}, True),
        # With both, a draw below the probability.
        (0.25, {"base": 0.5, **STREAK}, False),
        (0.2499, {"base": 0.5, **STREAK}, True),
        # The paper's threshold must be exceeded.
        (0.0, {"base": 0.5, "decision": "threshold"}, False),
        (0.99, {"base": 0.5, "change": 0.1, "decision": "threshold"}, True),
        (0.99, {"base": 0.5, "change": 0.1, "decision": "threshold", "threshold": 0.6}, False),
        (0.0, {"base": 0.5, "change": 0.1, "decision": "threshold", **STREAK}, False),
        # Released AEPO: clip((u + w dH) (1 - penalty l), 0, 1) >= p.
        (0.5, {"base": 0.5, "decision": "aepo_released"}, True),
        (0.4999, {"base": 0.5, "decision": "aepo_released"}, False),
        (0.25, {"base": 0.5, "change": 1.0, "decision": "aepo_released"}, True),
        (0.25, {"base": 0.25, "change": 1.0, "decision": "aepo_released", **STREAK}, True),
        (0.24, {"base": 0.25, "change": 1.0, "decision": "aepo_released", **STREAK}, False),
        (0.9, {"base": 1.0, "change": 9.0, "decision": "aepo_released"}, True),
        (0.1, {"base": 0.0, "change": -9.0, "decision": "aepo_released"}, True),
        (0.1, {"base": 0.1, "change": -9.0, "decision": "aepo_released", "penalty": 1.0, "streak": 3}, False),
    ],
)
def test_decisions_on_their_borders(u: float, options: dict[str, Any], expected: bool) -> None:
    assert branches(u, **{"change": 0.0, "weight": 0.25} | options) is expected


def test_the_first_wave_is_between_one_and_the_group() -> None:
    def budget(root: float, tools: float) -> int:
        return first_wave_budget(total=8, entropy_root=root, entropy_tools=tools)

    assert [budget(1.0, 1.0), budget(0.0, 900.0), budget(900.0, 0.0)] == [5, 1, 8]
    assert first_wave_budget(total=1, entropy_root=0.0, entropy_tools=0.0) == 1
    assert budget(2 * math.log(3), 0.0) == 7  # a share of 3/4: the paper's slope is a half
    assert budget(0.0, 2 * math.log(3)) == 3  # and of 1/4


OBJECTIVES: list[tuple[str, dict[str, Any]]] = [
    ("soft", {"loss": GspoLoss()}),
    ("soft", {"sampler_correction": SamplerCorrection(level="sequence")}),
    ("soft", {"sampler_correction": SamplerCorrection(level="geometric")}),
    ("soft", {"sampler_correction": None, "sampler_rejection": RejectionMask(scope="mean")}),
    ("hard", {"positive_nll": 0.1}),
    ("hard", {"aggregation": "sequence_mean_token_mean"}),
]


@pytest.mark.parametrize(("attribution", "options"), OBJECTIVES)
def test_objectives_that_cannot_count_shared_tokens_are_errors(
    attribution: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError):
        require_countable(ObjectiveSettings(**options), attribution)


@pytest.mark.parametrize(
    ("attribution", "options"),
    [
        ("soft", {"positive_nll": 0.1}),
        ("soft", {"aggregation": "sequence_mean_token_mean"}),
        ("hard", {}),
        ("soft", {"sampler_correction": None}),
        ("soft", {"sampler_rejection": RejectionMask(scope="token")}),
        *(("soft", {"loss": loss}) for loss in (GppoLoss(), CispoLoss(ratio_cap=2.0), ReinforceLoss())),
    ],
)
def test_objectives_that_can_count_shared_tokens_are_valid(attribution: Any, options: dict[str, Any]) -> None:
    require_countable(ObjectiveSettings(**options), attribution)
