"""Group credit against upstream vectors and a numpy reference, and the rules that hold for every group."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outrider.algorithms.advantages import (
    RolloutAdvantages,
    group_normalized_advantages_per_rollout,
    leave_one_out_advantages_per_rollout,
)

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "group_credit.json").read_text()
)
BY_ID = {case["id"]: case for case in CASES}
BATCHES = [case for case in CASES if "rewards" in case["inputs"]]

RETURNS = st.lists(st.floats(-100.0, 100.0).map(lambda value: round(value, 3)), min_size=2, max_size=16)


def credit_batch(case: dict[str, Any]) -> tuple[list[float], list[str | None]]:
    """Credit group by group, as the public functions want it; also the reason that each rollout's group
    gave.
    """
    inputs = case["inputs"]
    rewards = inputs["rewards"]
    groups = inputs.get("group") or [index // inputs["num_generations"] for index in range(len(rewards))]
    values: list[float] = [0.0] * len(rewards)
    reasons: list[str | None] = [None] * len(rewards)
    for key in dict.fromkeys(groups):
        members = [index for index, group in enumerate(groups) if group == key]
        returns = [rewards[index] for index in members]
        if "rloo" in case["id"]:
            credit = leave_one_out_advantages_per_rollout(returns=returns)
        else:
            normalize_std = inputs.get("norm_adv_by_std_in_grpo", "scale_none" not in case["id"])
            credit = group_normalized_advantages_per_rollout(
                returns=returns, eps=inputs.get("epsilon", 1e-6), normalize_std=normalize_std
            )
        for index, value in zip(members, credit.values, strict=True):
            values[index], reasons[index] = float(value), credit.reason
    return values, reasons


@pytest.mark.parametrize("case", BATCHES, ids=lambda case: case["id"])
def test_upstream_vectors_except_that_singletons_get_zero(case: dict[str, Any]) -> None:
    expected = case["expected"]["sequence_advantage"]
    values, reasons = credit_batch(case)
    for value, upstream, reason in zip(values, expected, reasons, strict=True):
        assert value == (
            0.0
            if reason == "singleton"
            else pytest.approx(upstream, abs=1e-6 if "arpo" in case["id"] else 1e-12)
        )


@pytest.mark.parametrize(
    "name", ["adv.grpo.std.verl", "adv.dr_grpo.verl", "adv.rloo.verl", "arpo.grpo_advantage.2"]
)
def test_the_difference_to_upstream_on_singletons_is_on_purpose(name: str) -> None:
    """Upstream hands the raw reward of a lone rollout out as its advantage; a gradient without a baseline."""
    values, reasons = credit_batch(BY_ID[name])
    lone = reasons.index("singleton")
    raw = BY_ID[name]["inputs"]["rewards"][lone]
    assert BY_ID[name]["expected"]["sequence_advantage"][lone] == pytest.approx(raw, rel=2e-6)
    assert values[lone] == 0.0 and raw != 0.0


def test_rollout_level_vector() -> None:
    case = BY_ID["grpo_rollout_level"]
    returns, expected = case["inputs"]["returns"], case["expected"]
    credit = group_normalized_advantages_per_rollout(returns=returns)
    np.testing.assert_allclose(credit.values, expected["advantage"], atol=1e-6)
    centred = group_normalized_advantages_per_rollout(returns=returns, normalize_std=False)
    np.testing.assert_allclose(centred.values, expected["no_std"], atol=1e-12)
    survivor = group_normalized_advantages_per_rollout(returns=[None, None, -100.0, None])
    assert expected["single_survivor_group"] == [-99.9999]
    assert survivor.values.tolist() == [0.0] * 4 and survivor.reason == "singleton"
    assert survivor.assigned.tolist() == [False, False, True, False]


@given(returns=RETURNS, std_ddof=st.sampled_from([0, 1]))
def test_numpy_reference(returns: list[float], std_ddof: Any) -> None:
    array = np.array(returns)
    assume(np.ptp(array) > 0.0)
    credit = group_normalized_advantages_per_rollout(returns=returns, std_ddof=std_ddof)
    np.testing.assert_allclose(
        credit.values, (array - array.mean()) / (array.std(ddof=std_ddof) + 1e-6), rtol=1e-9, atol=1e-9
    )
    others = [np.delete(array, index).mean() for index in range(array.size)]
    np.testing.assert_allclose(
        leave_one_out_advantages_per_rollout(returns=returns).values, array - others, rtol=1e-9, atol=1e-9
    )


@given(returns=RETURNS, position=st.integers(0, 16))
def test_an_unscorable_rollout_leaves_the_others_bit_for_bit_alone(
    returns: list[float], position: int
) -> None:
    position = min(position, len(returns))
    for credit in (group_normalized_advantages_per_rollout, leave_one_out_advantages_per_rollout):
        base = credit(returns=returns)
        for hole in (None, math.nan):
            with_fault = credit(returns=[*returns[:position], hole, *returns[position:]])
            assert with_fault.values[position] == 0.0 and not with_fault.assigned[position]
            assert np.delete(with_fault.values, position).tolist() == base.values.tolist()
            assert np.delete(with_fault.assigned, position).all()
            assert (with_fault.has_signal, with_fault.reason) == (base.has_signal, base.reason)


@pytest.mark.parametrize(
    ("returns", "reason"),
    [
        ([0.7], "singleton"),
        ([None, 0.7, math.nan], "singleton"),
        ([None, None], "unscorable"),
        ([0.1, 0.1, 0.1], "no_spread"),
        ([0.3, 0.1 + 0.2, 0.3], "no_spread"),  # equal but for rounding: std is 3e-17, not 0
        ([0.1 + 0.2 - 0.3, 0.0, 0.0], "no_spread"),  # rounding of a sum that should be 0
        ([1e9, 1e9 + 0.5], "no_spread"),  # the tolerance scales with the returns
        ([0.0, 1e-6], None),
    ],
)
def test_no_signal_has_a_reason_and_exactly_zero_credit(
    returns: list[float | None], reason: str | None
) -> None:
    for credit in (group_normalized_advantages_per_rollout, leave_one_out_advantages_per_rollout):
        group: RolloutAdvantages = credit(returns=returns)
        assert (group.reason, group.has_signal) == (reason, reason is None)
        assert reason is None or not group.values.any()


def test_impossible_input_raises() -> None:
    with pytest.raises(ValueError, match="at least one"):
        group_normalized_advantages_per_rollout(returns=[])
    with pytest.raises(ValueError, match="infinite"):
        leave_one_out_advantages_per_rollout(returns=[1.0, math.inf])
    with pytest.raises(ValueError, match="eps"):
        group_normalized_advantages_per_rollout(returns=[1.0, 0.0], eps=-1.0)
