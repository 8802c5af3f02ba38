"""Weights, masks and rejection between engine and trainer: upstream vectors, a numpy reference, and rules for
all inputs.
"""

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.losses import clipped_surrogate_per_token, token_weights, weighted_loss
from outrider.algorithms.sampler_correction import (
    ImportanceStats,
    Level,
    Scope,
    Statistic,
    correction_stats,
    over_rollouts,
    rejection_mask_per_token,
    sampler_weights_per_token,
)
from tests.vectors import load_vectors

CASES = load_vectors("sampler_correction", "kl_importance_aggregation")


def flat(rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(-1)


def tokens_of(inputs: dict[str, Any], old: str = "train_log_prob") -> dict[str, torch.Tensor]:
    """The padded rows as one packed row, with the padding masked."""
    rows = torch.tensor(inputs["response_mask"]).bool()
    return {
        "old_logprobs": flat(inputs[old]),
        "sampler_logprobs": flat(inputs["rollout_log_prob"]),
        "rollout_index": torch.arange(len(rows)).repeat_interleave(rows.shape[1]),
        "mask": rows.reshape(-1),
    }


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_verl_masked_weights(level: Any) -> None:
    """The pair "0.5_2.0" zeroes what lies outside."""
    case = CASES[f"tis.verl.{level}.0.5_2.0"]
    tokens = tokens_of(case["inputs"])
    applied = sampler_weights_per_token(**tokens, level=level, lower=0.5, upper=2.0, outside="zero")
    np.testing.assert_allclose(applied.weights, flat(case["expected"]["weights"]), rtol=1e-12)
    raw = sampler_weights_per_token(**tokens, level=level, upper=None).weights
    assert torch.equal(applied.changed, (applied.weights != raw)) and applied.changed.any()
    stats = correction_stats(
        applied,
        old_logprobs=tokens["old_logprobs"],
        sampler_logprobs=tokens["sampler_logprobs"],
        mask=tokens["mask"],
    )
    assert stats.mean == pytest.approx(case["expected"]["mean"], abs=1e-8)
    assert stats.mean**2 / stats.mean_square == pytest.approx(case["expected"]["ess"], abs=1e-7)
    assert stats.num_truncated == int(applied.changed.sum()) and stats.num_tokens == int(tokens["mask"].sum())


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_mask"])
def test_trl_weights(mode: str) -> None:
    """TRL's weight is 1 at masked positions, where ours is 0; neither is ever used."""
    case = CASES[f"tis.trl.{mode}"]
    tokens = tokens_of(case["inputs"])
    level, outside = mode.split("_")
    applied = sampler_weights_per_token(
        **tokens,
        level=level,  # type: ignore[arg-type]
        upper=case["inputs"]["clip_max"],
        outside="zero" if outside == "mask" else "truncate",
    )
    ratio = torch.tensor(case["expected"]["ratio"], dtype=torch.float64)
    expected = ratio.expand(len(ratio), 7).reshape(-1)
    mask = tokens["mask"]
    np.testing.assert_allclose(applied.weights[mask], expected[mask], rtol=1e-12)
    assert not applied.weights[~mask].any()


def corrected(
    old: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, ImportanceStats]:
    """The correction that is on by default: each token's own weight, up to 2."""
    index = torch.zeros(len(old), dtype=torch.int64)
    applied = sampler_weights_per_token(
        old_logprobs=old, sampler_logprobs=sampler, rollout_index=index, mask=mask
    )
    return applied.weights, correction_stats(applied, old_logprobs=old, sampler_logprobs=sampler, mask=mask)


def test_sampler_correction_vector() -> None:
    case = CASES["tis.verl.token.2.0"]
    old, sampler = flat(case["inputs"]["train_log_prob"]), flat(case["inputs"]["rollout_log_prob"])
    mask = flat(case["inputs"]["response_mask"]) > 0
    weights, stats = corrected(old.requires_grad_(), sampler, mask)
    assert not weights.requires_grad
    np.testing.assert_allclose(weights, flat(case["expected"]["weights"]), rtol=1e-12)
    raw = np.exp((old - sampler).detach().numpy()[mask.numpy()])
    assert stats.mean == pytest.approx(case["expected"]["mean"], abs=1e-8)
    assert stats.mean**2 / stats.mean_square == pytest.approx(case["expected"]["ess"], abs=1e-7)
    assert stats.max == pytest.approx(raw.max()) and stats.num_truncated == int((raw > 2.0).sum()) > 0
    assert stats.num_tokens == raw.size


def test_sampler_equal_to_trainer_is_a_no_op_and_faults_are_loud() -> None:
    old = torch.tensor([-1.0, -2.0, -3.0])
    mask = torch.tensor([True, True, False])
    spoiled = torch.tensor([-1.0, -2.0, math.nan])
    weights, stats = corrected(old, spoiled, mask)
    assert weights.tolist() == [1.0, 1.0, 0.0]
    assert (stats.mean, stats.max, stats.mean_square) == (1.0, 1.0, 1.0)
    for broken in (torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)):
        with pytest.raises(ValueError, match="sampler correction"):
            corrected(old, spoiled, broken)


REJECTION = {
    "rs.verl.token_k1.0.5_2.0": ("k1", "token", 0.5, 2.0),
    "rs.verl.token_k1.0.4_1.3": ("k1", "token", 0.4, 1.3),
    "rs.verl.seq_mean_k1.0.9_1.1": ("k1", "mean", 0.9, 1.1),
    "rs.verl.seq_mean_k3.0.05": ("k3", "mean", None, 0.05),
}


@pytest.mark.parametrize("name", REJECTION)
def test_verl_rejection_masks(name: str) -> None:
    statistic, scope, lower, upper = REJECTION[name]
    case = CASES[name]
    tokens = tokens_of(case["inputs"])
    choice: dict[str, Any] = {"statistic": statistic, "scope": scope, "lower": lower, "upper": upper}
    kept = rejection_mask_per_token(**tokens, **choice)
    assert kept.dtype is torch.bool and kept.double().tolist() == flat(case["expected"]["mask"]).tolist()
    rejected = float((~kept)[tokens["mask"]].double().mean())
    assert rejected == pytest.approx(case["expected"]["masked_fraction"], abs=1e-8)


def test_the_bounds_of_k1_are_those_of_the_inverse_weight() -> None:
    """(0.4, 1.3) reads like bounds on w, but keeps w between 1 / 1.3 and 1 / 0.4."""
    weights = flat([0.5, 0.76, 0.78, 1.0, 1.31, 2.4, 2.6])
    tokens: dict[str, Any] = {
        "old_logprobs": weights.log(),
        "sampler_logprobs": torch.zeros_like(weights),
        "rollout_index": torch.zeros(7, dtype=torch.int64),
        "mask": torch.ones(7),
    }
    kept = rejection_mask_per_token(**tokens, statistic="k1", lower=0.4, upper=1.3)
    assert kept.tolist() == [False, False, True, True, True, True, False]
    symmetric = rejection_mask_per_token(**tokens, statistic="k1", upper=2.0)
    assert symmetric.tolist() == [True, True, True, True, True, False, False]


@pytest.mark.parametrize(
    "name", ["loss.trl.dapo.token_tis2", "loss.openrlhf.icepop", "loss.openrlhf.seq-mask-tis"]
)
def test_weighted_losses(name: str) -> None:
    """Weight times clipped loss, over the denominators without the weight."""
    case = CASES[name]
    inputs = case["inputs"]
    mask = torch.tensor(inputs["response_mask"]).bool()
    advantages = flat(inputs["advantages"]).reshape(len(mask), -1).expand(mask.shape).reshape(-1)
    if "importance_sampling_ratio" in inputs:
        weights = flat(inputs["importance_sampling_ratio"])
    else:
        tokens, (low, high) = tokens_of(inputs, "old_log_prob"), inputs["thresholds"]
        if "seq-mask" in name:  # whole rollouts by their geometric mean, the other tokens' own weights
            kept = rejection_mask_per_token(
                **tokens, statistic="k1", scope="mean", lower=1 / high, upper=1 / low
            )
            weights = sampler_weights_per_token(**tokens, upper=None).weights * kept
        else:
            weights = sampler_weights_per_token(**tokens, lower=low, upper=high, outside="zero").weights
    logprobs = flat(inputs["log_prob"]).requires_grad_()
    surrogate = clipped_surrogate_per_token(
        logprobs=logprobs, old_logprobs=flat(inputs["old_log_prob"]), advantages=advantages, clip_high=0.28
    )
    index = torch.arange(len(mask)).repeat_interleave(mask.shape[1])
    every = token_weights(
        kind="token_mean",
        rollout_index=index,
        num_rollouts=len(mask),
        mask=mask.reshape(-1),
        dtype=torch.float64,
    )
    loss = weighted_loss(losses=surrogate.losses * weights, weights=every)
    assert loss.item() == pytest.approx(case["expected"]["loss"], abs=1e-9)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    np.testing.assert_allclose(gradient, flat(case["expected"]["grad_log_prob"]), atol=1e-9)


def test_a_whole_rollout_is_masked_if_its_geometric_mean_is_outside() -> None:
    tokens: dict[str, Any] = {
        "old_logprobs": flat([6.0, 0.25, 8.0, 2.0]).log(),
        "sampler_logprobs": torch.zeros(4, dtype=torch.float64),
        "rollout_index": torch.tensor([0, 0, 1, 1]),
        "mask": torch.ones(4, dtype=torch.bool),
    }
    kept = rejection_mask_per_token(**tokens, statistic="k1", scope="mean", lower=0.5, upper=2.0)
    assert kept.tolist() == [True, True, False, False]
    both = sampler_weights_per_token(**tokens, lower=0.5, upper=5.0, outside="truncate")
    np.testing.assert_allclose(both.weights, [5.0, 0.5, 5.0, 2.0])  # OpenRLHF's two-sided clamp
    assert both.changed.tolist() == [True, True, True, False]


BATCH = st.lists(
    st.tuples(st.integers(0, 3), st.floats(-3.0, 0.0), st.floats(-3.0, 0.0), st.booleans()),
    min_size=1,
    max_size=16,
)
GARBAGE = st.sampled_from([math.nan, math.inf, -math.inf, 9.0])


def columns(batch: Any) -> dict[str, torch.Tensor]:
    index, old, sampler, mask = (list(column) for column in zip(*batch, strict=True))
    return {
        "old_logprobs": flat(old),
        "sampler_logprobs": flat(sampler),
        "rollout_index": torch.tensor(index),
        "mask": torch.tensor(mask),
    }


@given(batch=BATCH, garbage=GARBAGE, level=st.sampled_from(get_args(Level)))
def test_masked_tokens_change_nothing(batch: Any, garbage: float, level: Any) -> None:
    tokens = columns(batch)
    mask = tokens["mask"]
    spoiled = tokens | {
        name: torch.where(mask, tokens[name], torch.full_like(tokens[name], garbage))
        for name in ("old_logprobs", "sampler_logprobs")
    }
    only = {name: value[mask] for name, value in tokens.items()}
    for outside in ("truncate", "zero"):
        applied, other, alone = (
            sampler_weights_per_token(
                **each,  # type: ignore[arg-type]
                level=level,
                upper=1.5,
                outside=outside,
            )
            for each in (tokens, spoiled, only)
        )
        assert torch.equal(applied.weights, other.weights) and torch.equal(applied.changed, other.changed)
        assert torch.equal(applied.weights[mask], alone.weights)
    for statistic in ("k1", "k2", "k3"):
        for scope in ("token", "sum", "mean"):
            choice: dict[str, Any] = {"statistic": statistic, "scope": scope, "upper": 1.5}
            kept = rejection_mask_per_token(**tokens, **choice)
            assert torch.equal(kept, rejection_mask_per_token(**spoiled, **choice)) and not kept[~mask].any()
            assert torch.equal(kept[mask], rejection_mask_per_token(**only, **choice))


def test_over_rollouts_keeps_the_gradient_and_empty_batches() -> None:
    values = flat([1.0, 2.0, 4.0, 8.0]).requires_grad_()
    index, mask = torch.tensor([1, 0, 1, 2]), torch.tensor([True, True, True, False])
    mean = over_rollouts(values, rollout_index=index, mask=mask, reduce="mean")
    assert mean.tolist() == [2.5, 2.0, 2.5, 0.0]
    (gradient,) = torch.autograd.grad(mean[0], values)
    assert gradient.tolist() == [0.5, 0.0, 0.5, 0.0]
    assert over_rollouts(values, rollout_index=index, mask=mask, reduce="max").tolist() == [
        4.0,
        2.0,
        4.0,
        0.0,
    ]
    nothing = torch.zeros(0, dtype=torch.int64)
    assert over_rollouts(torch.zeros(0), rollout_index=nothing, mask=nothing.bool(), reduce="sum").shape == (
        0,
    )


def test_faults_and_impossible_settings_raise() -> None:
    tokens: dict[str, Any] = {
        "old_logprobs": torch.zeros(2),
        "sampler_logprobs": torch.tensor([0.0, math.nan]),
        "rollout_index": torch.zeros(2, dtype=torch.int64),
        "mask": torch.ones(2, dtype=torch.bool),
    }
    applied = sampler_weights_per_token(**tokens)
    three = {name: tokens[name] for name in ("old_logprobs", "sampler_logprobs", "mask")}
    for wrong in (three, three | {"mask": torch.zeros(2, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="sampler correction"):
            correction_stats(applied, **wrong)
    for bounds in ({"lower": 2.0, "upper": 2.0}, {"lower": -1.0}, {"upper": 0.0}):
        with pytest.raises(ValueError, match="bounds"):
            sampler_weights_per_token(**tokens, **bounds)
    impossible: list[dict[str, Any]] = [
        {"statistic": "k1", "upper": 2.0, "scope": "max"},
        {"statistic": "k1", "upper": 0.5},
        {"statistic": "k1", "upper": -1.0},
        {"statistic": "k1", "lower": 0.0, "upper": 2.0},
        {"statistic": "k2", "lower": 0.1, "upper": 2.0},
        {"statistic": "k3", "upper": -0.1},
    ]
    for choice in impossible:
        with pytest.raises(ValueError):
            rejection_mask_per_token(**tokens, **choice)
    with pytest.raises(ValueError, match="shape"):
        sampler_weights_per_token(**(tokens | {"old_logprobs": torch.zeros(3)}))
    rejected = sampler_weights_per_token(
        **(tokens | {"sampler_logprobs": torch.full((2,), -5.0)}), upper=2.0, outside="zero"
    )
    stats = correction_stats(rejected, **(three | {"sampler_logprobs": torch.full((2,), -5.0)}))
    assert (stats.mean, stats.mean_square, stats.num_truncated) == (0.0, 0.0, 2)


@pytest.mark.parametrize("bounds", [{"upper": 1.0}, {"lower": 1.0, "upper": 2.0}], ids=str)
@pytest.mark.parametrize("outside", ["truncate", "zero"])
def test_a_weight_exactly_on_a_bound_is_inside(bounds: dict[str, float], outside: Any) -> None:
    tokens: dict[str, Any] = columns([(0, -1.0, -1.0, True), (1, -2.0, -2.0, True)])
    applied = sampler_weights_per_token(**tokens, **bounds, outside=outside)
    assert applied.weights.tolist() == [1.0, 1.0] and not applied.changed.any()


@pytest.mark.parametrize(("level", "expected"), [("token", [20.0, -20.0]), ("sequence", [10.0, 10.0])])
def test_the_logarithm_of_a_weight_is_limited_on_both_sides(level: Any, expected: list[float]) -> None:
    """A sum is limited as a whole: 50 - 40 stays 10."""
    tokens: dict[str, Any] = columns([(0, 0.0, -50.0, True), (0, -40.0, 0.0, True)])
    weights = sampler_weights_per_token(**tokens, level=level, upper=None).weights
    assert weights.log().tolist() == pytest.approx(expected)


def test_a_statistic_exactly_on_a_bound_is_kept() -> None:
    tokens: dict[str, Any] = columns([(0, -1.0, -1.0, True)])
    for bounds in ({"lower": 1.0, "upper": 2.0}, {"lower": 0.5, "upper": 1.0}):
        assert rejection_mask_per_token(**tokens, statistic="k1", **bounds).tolist() == [True]


def kept(
    log_weight: float, statistic: Statistic, upper: float, *, scope: Scope = "token", **bounds: Any
) -> bool:
    """Return whether one token with this log-weight is trained on."""
    mask = rejection_mask_per_token(
        old_logprobs=torch.tensor([log_weight], dtype=torch.float64),
        sampler_logprobs=torch.zeros(1, dtype=torch.float64), rollout_index=torch.zeros(1, dtype=torch.int64),
        mask=torch.ones(1), statistic=statistic, scope=scope, upper=upper, **bounds,
    )  # fmt: skip
    return bool(mask[0])


def test_the_bounds_of_k1_are_ratios_of_engine_to_trainer() -> None:
    """If a token is e times as likely in the trainer, the ratio is 1 / e."""
    for sign, is_kept in ((1, True), (-1, False)):
        assert kept(1.0, "k1", 2.0, lower=math.exp(-1) * (1 - sign * 1e-9)) is is_kept
        assert kept(-1.0, "k1", math.e * (1 + sign * 1e-9)) is is_kept
        # without a lower bound it is 1 / upper
        assert kept(1.0, "k1", math.e * (1 + sign * 1e-9)) is is_kept
