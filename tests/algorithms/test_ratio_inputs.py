"""Ratios refuse what broadcasting or half precision would change in silence; statistics by hand."""

import math
from typing import Any

import pytest
import torch

from outrider.algorithms.losses import SequenceForm, gspo_per_token
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


def test_the_bounds_of_k1_are_ratios_of_engine_to_trainer() -> None:
    """A trainer that is e times likelier: the ratio is 1 / e."""
    assert kept(1.0, "k1", 2.0, lower=math.exp(-1) * (1 - 1e-9)) and not kept(
        1.0, "k1", 2.0, lower=math.exp(-1) * (1 + 1e-9)
    )
    assert kept(-1.0, "k1", math.e * (1 + 1e-9)) and not kept(-1.0, "k1", math.e * (1 - 1e-9))
    # without a lower one: 1 / upper
    assert kept(1.0, "k1", math.e * (1 + 1e-9)) and not kept(1.0, "k1", math.e * (1 - 1e-9))
