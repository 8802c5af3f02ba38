"""Credit as the trainer asks for it, over all groups of a step: upstream vectors and numpy references through
the algorithms.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outrider.algorithms.base import Algorithm, group_advantages, write_advantages
from outrider.algorithms.grpo import (
    GroupSettings,
    Grpo,
    GrpoSettings,
    ReinforcePlusPlus,
    ReinforcePlusPlusSettings,
)
from outrider.config import validate
from outrider.errors import ConfigError
from outrider.trace import Leaf, Trace
from outrider.training import trainer as advantage_stage
from outrider.types import Outcome
from tests.algorithms.grouped import Played, grouped, token_credit, trace_of

VECTORS = Path(__file__).parents[1] / "vectors"
CASES: dict[str, dict[str, Any]] = {
    case["id"]: case
    for name in ("credit_family", "group_credit")
    for case in json.loads((VECTORS / f"{name}.json").read_text())
}


def grpo(**options: Any) -> Grpo:
    return Grpo(validate(GrpoSettings, options))


def plus(**options: Any) -> ReinforcePlusPlus:
    return ReinforcePlusPlus(validate(ReinforcePlusPlusSettings, options))


def rows_in_group_order(groups: list[Any]) -> list[int]:
    return [row for name in dict.fromkeys(groups) for row, group in enumerate(groups) if group == name]


GROUP_CASES = {
    "adv.grpo.std.verl": {},
    "adv.dr_grpo.verl": {"advantage": "group_centered"},
    "adv.rloo.verl": {"advantage": "leave_one_out"},
    "adv.trl.scale_none": {"advantage": "group_centered"},
    "adv.trl.scale_batch": {"advantage_std": "batch"},
    "adv.trl.rloo.normalize_False": {"advantage": "leave_one_out"},
    "adv.trl.rloo.normalize_True": {"advantage": "leave_one_out", "advantage_std": "batch"},
}


@pytest.mark.parametrize("name", GROUP_CASES)
def test_vectors_of_one_advantage_a_rollout(name: str) -> None:
    """Except that a group of one has 0, where verl hands its raw reward out."""
    inputs, expected = CASES[name]["inputs"], CASES[name]["expected"]["sequence_advantage"]
    groups = inputs.get("group") or [
        row // inputs["num_generations"] for row in range(len(inputs["rewards"]))
    ]
    order = rows_in_group_order(groups)
    traces = grouped(inputs["rewards"], groups)
    credits_ = grpo(**GROUP_CASES[name]).assign_step_advantages(traces)
    lone = [groups.count(groups[row]) == 1 for row in order]
    np.testing.assert_allclose(
        token_credit(traces),
        np.where(lone, 0.0, np.array(expected)[order]),
        atol=1e-12 if "trl" in name else 1e-9,
    )
    assert (
        np.concatenate([one.advantages.values for one in credits_]).tolist() == token_credit(traces).tolist()
    )


@pytest.mark.parametrize("name", ["adv.reinforce_pp.gamma0.95.verl", "adv.reinforce_pp.kl_in_reward.verl"])
def test_reinforce_plus_plus_vectors(name: str) -> None:
    """All rollouts in one group: REINFORCE++ does not look at groups."""
    inputs = CASES[name]["inputs"]
    mask = np.array(inputs["response_mask"]) > 0
    kl = np.array(inputs.get("kl_k1", np.zeros(mask.shape)))
    played = [
        Played(value=value, mask=row.astype(int).tolist(), kl=own[row].tolist())
        for value, row, own in zip(inputs["rewards"], mask, kl, strict=True)
    ]
    weight = inputs.get("kl_coef", 0.0)
    trace = trace_of(played)
    [credit] = plus(gamma=inputs["gamma"], reward_kl_weight=weight).assign_step_advantages([trace])
    np.testing.assert_allclose(
        token_credit([trace]), np.array(CASES[name]["expected"]["token_advantage"])[mask], atol=1e-8
    )
    sums = [own[row].sum() for row, own in zip(mask, kl, strict=True)]
    assert credit.measurements["reward/kl_mean"] == pytest.approx(sums if weight else [], abs=1e-12)
    # counted on its tokens, not on the return
    assert all(leaf.intrinsic == 0.0 for leaf, _ in trace.rollouts())


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline"])
def test_openrlhf_vectors(name: str) -> None:
    case = CASES[f"adv.openrlhf.{name}"]
    rewards, size = case["inputs"]["rewards"], case["inputs"]["n_samples_per_prompt"]
    traces = grouped(rewards, [row // size for row in range(len(rewards))], case["inputs"]["action_mask"])
    plus(variance="population", group_baseline=name != "reinforce").assign_step_advantages(traces)
    mask = np.array(case["inputs"]["action_mask"]) > 0
    np.testing.assert_allclose(
        token_credit(traces), np.array(case["expected"]["token_advantage"])[mask], atol=1e-6
    )


VALUE = st.floats(-10.0, 10.0).map(lambda value: round(value, 2))
MASK = st.lists(st.integers(0, 1), min_size=1, max_size=6)
GROUPS = st.lists(
    st.lists(st.tuples(st.one_of(st.none(), VALUE), MASK), min_size=2, max_size=4), min_size=1, max_size=4
)  # None: a fault


def batch(groups: Any) -> list[Trace]:
    return [
        trace_of([Played(value=value, mask=mask) for value, mask in rollouts], key=str(number))
        for number, rollouts in enumerate(groups)
    ]


def scored(groups: Any) -> tuple[list[list[float]], np.ndarray]:
    """Returns of each group without its faults, and the number of policy tokens of every such rollout."""
    returns = [[value for value, _ in rollouts if value is not None] for rollouts in groups]
    lengths = [sum(mask) for rollouts in groups for value, mask in rollouts if value is not None]
    return returns, np.array(lengths, dtype=int)


@given(groups=GROUPS)
def test_numpy_references(groups: Any) -> None:
    returns, lengths = scored(groups)
    every = np.array([value for own in returns for value in own])
    assume(
        lengths.sum() > 1 and all(len(own) < 2 or np.ptp(own) == 0 or np.ptp(own) > 0.1 for own in returns)
    )
    centred = np.concatenate([np.array(own) - np.mean(own) if own else [] for own in returns])
    flat = np.concatenate(
        [np.full(len(own), len(own) < 2 or np.ptp(own) == 0, dtype=bool) for own in returns]
    )
    centred = np.where(flat, 0.0, centred)
    left_out = (
        np.concatenate([np.full(len(own), len(own) / max(1, len(own) - 1)) for own in returns]) * centred
    )
    grpo(advantage_std="batch").assign_step_advantages(traces := batch(groups))
    std = every.std(ddof=1) if every.size > 1 else 0.0
    np.testing.assert_allclose(token_credit(traces), np.repeat(centred / (std + 1e-4), lengths), atol=1e-9)
    grpo(advantage="leave_one_out", advantage_std="batch").assign_step_advantages(traces := batch(groups))
    std = left_out.std(ddof=1) if every.size > 1 else 0.0
    np.testing.assert_allclose(token_credit(traces), np.repeat(left_out / (std + 1e-4), lengths), atol=1e-9)
    grpo(advantage_std="population").assign_step_advantages(traces := batch(groups))
    z = np.concatenate([np.array(own) - np.mean(own) if own else [] for own in returns]) / np.concatenate(
        [np.full(len(own), np.std(own) + 1e-6 if own else 1.0) for own in returns]
    )
    np.testing.assert_allclose(token_credit(traces), np.repeat(np.where(flat, 0.0, z), lengths), atol=1e-7)
    for options, tokens in (
        ({}, np.repeat(every, lengths)),
        ({"group_baseline": True}, np.repeat(centred, lengths)),
    ):
        for variance, ddof in (("sample", 1), ("population", 0)):
            plus(variance=variance, **options).assign_step_advantages(traces := batch(groups))
            if np.ptp(tokens) == 0.0:
                assert not token_credit(traces).any()
            elif np.ptp(tokens) > 0.1:
                white = (tokens - tokens.mean()) / math.sqrt(tokens.var(ddof=ddof) + (1e-8 if ddof else 0.0))
                np.testing.assert_allclose(token_credit(traces), white, atol=1e-9)


def test_every_page_is_asked_for_the_whole_batch() -> None:
    """A split into single groups would give other numbers: the first group's credit depends on the second's
    returns.
    """
    for algorithm in (grpo(advantage_std="batch"), plus(), plus(group_baseline=True)):
        assert type(algorithm).advantages is not Algorithm.advantages
        found = []
        for far in (1.0, 50.0):
            traces = batch([[(0.0, [1]), (1.0, [1])], [(0.0, [1]), (far, [1])]])
            algorithm.assign_step_advantages(traces)
            found.append(traces[0].leaves[1].advantage)
        assert found[0] != found[1]
    alone, together = (
        batch([[(0.0, [1]), (1.0, [1])]]),
        batch([[(0.0, [1]), (1.0, [1])], [(0.0, [1]), (9.0, [1])]]),
    )
    grpo().assign_advantages(alone[0])
    grpo().assign_step_advantages(together)
    assert [leaf.advantage for leaf, _ in alone[0].rollouts()] == [
        leaf.advantage for leaf, _ in together[0].rollouts()
    ]


def test_a_group_of_one_never_gets_its_raw_return() -> None:
    """REINFORCE++ alone plays groups of one: their credit is against the batch."""
    for wrong in ({}, {"preset": "rloo-paper"}, {"preset": "dapo-paper"}):
        with pytest.raises(ConfigError, match="group_size"):
            validate(GrpoSettings, wrong | {"group_size": 1})
    with pytest.raises(ConfigError, match="no baseline"):
        validate(ReinforcePlusPlusSettings, {"group_size": 1, "group_baseline": True})
    algorithm = plus(group_size=1)
    assert algorithm.modes == ("on_policy",)
    traces = batch([[(2.0, [1])], [(4.0, [1, 0, 1])]])
    first, second = algorithm.assign_step_advantages(traces)
    assert first.advantages.has_signal and first.advantages.values[0] == pytest.approx(
        -4 / 3 / math.sqrt(4 / 3), rel=1e-6
    )
    assert second.advantages.values[0] == pytest.approx(2 / 3 / math.sqrt(4 / 3), rel=1e-6)
    survivors = batch([[(2.0, [1]), (None, [1])], [(0.0, [1]), (1.0, [1])]])  # faults leave a group of one
    for algorithm in (grpo(), grpo(advantage="leave_one_out", advantage_std="batch")):
        traces = batch([[(2.0, [1]), (None, [1])], [(0.0, [1]), (1.0, [1])]])
        credit = algorithm.assign_step_advantages(traces)[0]
        assert credit.advantages.reason == "singleton" and traces[0].leaves[0].advantage == 0.0
    plus(group_baseline=True).assign_step_advantages(survivors)
    # 0 before whitening, and the others' mean is 0
    assert survivors[0].leaves[0].advantage == pytest.approx(0.0, abs=1e-12)
    [constant] = plus().assign_step_advantages(batch([[(0.3, [1]), (0.3, [1, 1])]]))
    assert constant.advantages.reason == "no_spread" and not constant.advantages.values.any()


def test_long_rollouts_are_punished_in_credit_and_not_in_the_record() -> None:
    """DAPO's Eq. 13 on the vector's lengths; verl's own values below the longest length, the paper's floor
    beyond.
    """
    case = CASES["dapo.overlong.verl"]
    lengths, expected = case["inputs"]["lengths"], case["expected"]["penalty"]
    overlong = {"max_tokens": case["inputs"]["max_len"], "buffer": case["inputs"]["buffer"]}
    trace = trace_of([Played(value=1.0, mask=[0] * 3 + [1] * length) for length in lengths])
    [credit] = Grpo(
        validate(GrpoSettings, {"overlong": overlong}), max_response_tokens=10_000
    ).assign_step_advantages([trace])
    penalties = [max(-1.0, value) for value in expected]
    assert [leaf.intrinsic for leaf, _ in trace.rollouts()] == pytest.approx(penalties, abs=1e-12)
    assert credit.measurements["reward/overlong_mean"] == pytest.approx(penalties, abs=1e-12)
    assert all(leaf.episode_return == 1.0 for leaf, _ in trace.rollouts())
    z = (np.array(penalties) - np.mean(penalties)) / (np.std(penalties, ddof=1) + 1e-6)
    np.testing.assert_allclose(credit.advantages.values, z, atol=1e-9)
    half = trace_of([Played(value=0.0, mask=[0] * 45 + [1] * 45), Played(value=0.0, mask=[1])])
    for counted, penalty in (("policy", 0.0), ("all", -0.5)):
        algorithm = Grpo(validate(GrpoSettings, {"overlong": overlong | {"counted": counted}}))
        for node in half.nodes:
            node.credit = None
        algorithm.assign_advantages(half)
        assert half.leaves[0].intrinsic == penalty
    # buffer: a fifth
    derived = Grpo(validate(GrpoSettings, {"overlong": {"factor": 0.5}}), max_response_tokens=50)
    derived.assign_advantages(
        trace := trace_of([Played(value=0.0, mask=[1] * 45), Played(value=0.0, mask=[1] * 40)])
    )
    assert [leaf.intrinsic for leaf, _ in trace.rollouts()] == [-0.25, 0.0]


def test_the_kl_of_the_reward_is_summed_over_a_rollout() -> None:
    """TRL's RLOO: the sum of k1 over the tokens leaves the scalar reward, and then comes leave-one-out."""
    played = [
        Played(value=1.0, mask=[1, 0, 1], kl=[0.5, 0.25]),
        Played(value=0.0, mask=[1], kl=[-2.0]),
        Played(value=0.5, mask=[0], kl=[]),
    ]
    trace = trace_of(played)
    [credit] = grpo(preset="rloo-paper").assign_step_advantages([trace])
    shaped = np.array([1.0 - 0.05 * 0.75, 0.1, 0.5])
    np.testing.assert_allclose(credit.advantages.values, (shaped - shaped.mean()) * 1.5, atol=1e-12)
    assert credit.measurements["reward/kl_mean"] == [0.75, -2.0, 0.0]
    for algorithm in (grpo(reward_kl_weight=0.1), plus(reward_kl_weight=0.1)):
        with pytest.raises(ValueError, match="no KL"):
            algorithm.assign_step_advantages([trace_of([Played(value=1.0), Played(value=0.0)])])


def test_credit_is_written_once_and_by_one_rollout() -> None:
    for algorithm in (grpo(), plus()):
        algorithm.assign_step_advantages(traces := batch([[(0.0, [1]), (1.0, [1])]]))
        with pytest.raises(ValueError, match="already has credit"):
            algorithm.assign_step_advantages(traces)
    shared = trace_of([Played(value=0.0), Played(value=1.0)])
    shared.leaves[1].node_id = shared.leaves[0].node_id
    with pytest.raises(ValueError, match="already has credit"):
        plus().assign_advantages(shared)
    assert all(node.credit is None for node in shared.nodes)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (GrpoSettings, {"advantage": "group_centered", "advantage_std": "batch"}, "divides by no std"),
    (GrpoSettings, {"advantage": "leave_one_out", "advantage_std": "population"}, "no meaning"),
    (GrpoSettings, {"overlong": {"max_tokens": 10, "buffer": 11}}, "exceeds"),
    (ReinforcePlusPlusSettings, {"advantage": "leave_one_out"}, "leave advantage out"),
    (ReinforcePlusPlusSettings, {"group_baseline": True, "gamma": 0.9}, "one value a rollout"),
    (ReinforcePlusPlusSettings, {"group_baseline": True, "reward_kl_weight": 0.1}, "one value a rollout"),
    (ReinforcePlusPlusSettings, {"gamma": 1.1}, "gamma"),
]


@pytest.mark.parametrize(("kind", "wrong", "told"), WRONG, ids=str)
def test_what_has_no_meaning_is_refused(kind: Any, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        validate(kind, wrong)


def test_two_rollouts_that_share_a_turn_need_an_attribution() -> None:
    trace = trace_of([Played(value=1.0)])
    (leaf,) = trace.leaves.values()
    trace.finish(Leaf(node_id=leaf.node_id, rollout=1, outcome=Outcome.FINISHED, episode_return=0.0))
    advantages = group_advantages([1.0, 0.0], "group_centered")
    with pytest.raises(ValueError, match="already has credit"):
        write_advantages(trace, advantages)
    write_advantages(trace, advantages, attribution="hard")
    with pytest.raises(ValueError, match="already has credit"):
        write_advantages(trace, advantages, attribution="hard")


@pytest.mark.parametrize(
    ("weight", "has_reference", "is_batch"), [(0.1, True, True), (0.1, False, False), (0.0, True, True)]
)
def test_credit_of_a_step_measures_the_kl_that_the_reward_counts_first(
    weight: float, has_reference: bool, is_batch: bool
) -> None:
    calls: list[Any] = []
    traces: list[Any] = ["one", "two"]
    learner = SimpleNamespace(has_reference=has_reference, score=lambda given: calls.append(("KL", given)))

    class Each(Algorithm):
        def assign_advantages(self, trace: Any) -> Any:
            calls.append(trace)
            return f"of {trace}"

    class Batch(Each):
        def assign_step_advantages(self, traces: Any) -> Any:
            calls.append(traces)
            return [f"of {trace}" for trace in traces]

    run = SimpleNamespace(algorithm=GroupSettings(reward_kl_weight=weight))
    parts: Any = SimpleNamespace(settings=run, learner=learner, algorithm=Batch() if is_batch else Each())
    assert advantage_stage.assign_step_advantages(parts, traces) == ["of one", "of two"]
    measured = [("KL", traces)] if weight and has_reference else []
    assert calls == [*measured, *([traces] if is_batch else traces)]
