"""Ratios refuse what broadcasting or half precision would change in silence; statistics by hand."""

import math
from typing import Any

import pytest
import torch

from outrider.algorithms.losses import Aggregation, SequenceForm, gspo_per_token, token_weights
from outrider.algorithms.sampler_correction import Scope, Statistic, log_ratio, rejection_mask_per_token

UNFIT = pytest.mark.parametrize(
    ("new", "old"),
    [
        (torch.zeros(1), torch.zeros(3)),
        (torch.zeros(3), torch.zeros(1)),
        (torch.zeros(3, dtype=torch.float16), torch.zeros(3)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)),
    ],
    ids=["one new value", "one old value", "half precision", "half precision of the old ones"],
)


@UNFIT
def test_a_log_ratio_of_what_does_not_fit_is_refused(new: torch.Tensor, old: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected"):
        log_ratio(logprobs=new, reference_logprobs=old)


@UNFIT
@pytest.mark.parametrize("form", ["token", "sequence", "product"])
def test_a_ratio_a_rollout_of_what_does_not_fit_is_refused(
    new: torch.Tensor, old: torch.Tensor, form: SequenceForm
) -> None:
    rollouts = torch.tensor([0, 0, 1])
    with pytest.raises(ValueError, match="expected"):
        gspo_per_token(
            logprobs=new, old_logprobs=old, advantages=torch.ones(3), rollout_index=rollouts, form=form
        )


def kept(
    log_weight: float, statistic: Statistic, upper: float, *, scope: Scope = "token", **bounds: Any
) -> bool:
    """Of one token whose trainer and engine are that far apart."""
    mask = rejection_mask_per_token(
        old_logprobs=torch.tensor([log_weight], dtype=torch.float64),
        sampler_logprobs=torch.zeros(1, dtype=torch.float64), rollout_index=torch.zeros(1, dtype=torch.int64),
        mask=torch.ones(1), statistic=statistic, scope=scope, upper=upper, **bounds,
    )  # fmt: skip
    return bool(mask[0])


@pytest.mark.parametrize(
    ("statistic", "log_weight", "value"),
    [
        ("k2", 1.0, 0.5),
        ("k2", -1.0, 0.5),
        ("k2", 3.0, 4.5),
        ("k3", 1.0, math.e - 2),
        ("k3", -1.0, 1 / math.e),
        ("k2", 1000.0, 200.0),  # the log-ratio ends at 20
        ("k2", -1000.0, 200.0),
        ("k3", -1000.0, 19.0 + math.exp(-20)),
        ("k3", 1000.0, math.exp(20) - 21),
    ],
)
@pytest.mark.parametrize("scope", ["token", "sum", "mean", "max"])
def test_the_bound_of_a_rejection_is_one_on_the_printed_statistic(
    statistic: Statistic, log_weight: float, value: float, scope: Scope
) -> None:
    assert kept(log_weight, statistic, value * (1 + 1e-9), scope=scope)
    assert not kept(log_weight, statistic, value * (1 - 1e-9), scope=scope)


def test_the_bounds_of_k1_are_ratios_of_engine_to_trainer() -> None:
    """A trainer that is e times likelier: the ratio is 1 / e."""
    assert kept(1.0, "k1", 2.0, lower=math.exp(-1) * (1 - 1e-9)) and not kept(
        1.0, "k1", 2.0, lower=math.exp(-1) * (1 + 1e-9)
    )
    assert kept(-1.0, "k1", math.e * (1 + 1e-9)) and not kept(-1.0, "k1", math.e * (1 - 1e-9))
    # without a lower one: 1 / upper
    assert kept(1.0, "k1", math.e * (1 + 1e-9)) and not kept(1.0, "k1", math.e * (1 - 1e-9))


@pytest.mark.parametrize(
    ("kind", "max_length", "expected"),
    [
        ("token_mean", None, (1 / 3, 1 / 3, 1 / 3)),
        ("sequence_mean_token_mean", None, (1 / 4, 1 / 8, 1 / 8)),
        ("sequence_mean_token_sum", None, (1 / 4, 1 / 4, 1 / 4)),
        ("constant_length", 5, (1 / 20, 1 / 20, 1 / 20)),
        ("sum_over_length", 5, (1 / 5, 1 / 5, 1 / 5)),
        ("token_sum", None, (1.0, 1.0, 1.0)),
    ],
)
def test_the_weights_of_tokens_by_hand(
    kind: Aggregation, max_length: int | None, expected: tuple[float, ...]
) -> None:
    """One token of the first of four rollouts and two of the second. A masked token counts nowhere."""
    options: dict[str, Any] = {
        "kind": kind,
        "num_rollouts": 4,
        "max_length": max_length,
        "dtype": torch.float64,
    }
    assert token_weights(rollout_index=torch.tensor([0, 1, 1]), **options).tolist() == pytest.approx(
        expected, abs=1e-15
    )
    mask = torch.tensor([True, False, True, True])
    weights = token_weights(rollout_index=torch.tensor([0, 3, 1, 1]), mask=mask, **options).tolist()
    assert weights == pytest.approx([expected[0], 0.0, *expected[1:]], abs=1e-15)
