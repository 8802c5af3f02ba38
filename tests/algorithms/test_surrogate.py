"""The clipped surrogate, alone and shared by several rollouts, against upstream vectors and scalar
references.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.algorithms.losses import clipped_surrogate_per_token, kl_per_token, token_weights, weighted_loss

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "surrogate_losses.json").read_text()
)
KINDS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "constant_length",
    "dapo": "token_mean",
    "grpo": "sequence_mean_token_mean",
    "dr_grpo": "constant_length",
}


def flat(rows: Any) -> torch.Tensor:
    """[B, L] padded rows as one packed row [B * L], float64."""
    return torch.tensor(rows, dtype=torch.float64).reshape(-1)


def padded_weights(
    mask: Any, agg: str, *, num_rollouts: int | None = None, max_length: int | None = None
) -> torch.Tensor:
    """Token weights for padded rows. Upstream leaves empty rows out of the sequence count unless told
    otherwise.
    """
    rows = torch.tensor(mask).bool()
    kept = [index for index in range(len(rows)) if rows[index].any() or num_rollouts is not None]
    number = torch.zeros(len(rows), dtype=torch.int64)
    number[kept] = torch.arange(len(kept))
    kind: Any = KINDS[agg]
    return token_weights(
        kind=kind,
        rollout_index=number[:, None].expand(rows.shape).reshape(-1),
        num_rollouts=num_rollouts or len(kept),
        max_length=(max_length or rows.shape[1]) if kind == "constant_length" else None,
        mask=rows.reshape(-1),
        dtype=torch.float64,
    )


@pytest.mark.parametrize("case", [case for case in CASES if "inputs" in case], ids=lambda case: case["id"])
def test_upstream_loss_and_gradient(case: dict[str, Any]) -> None:
    inputs, expected = case["inputs"], case["expected"]
    trl = "loss_type" in inputs
    logprobs = flat(inputs["log_prob"]).requires_grad_()
    advantages = torch.tensor(inputs["advantages"], dtype=torch.float64)
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(len(inputs["log_prob"]), len(inputs["log_prob"][0]))
    surrogate = clipped_surrogate_per_token(
        logprobs=logprobs,
        old_logprobs=flat(inputs["old_log_prob"]),
        advantages=advantages.reshape(-1),
        clip_low=inputs["epsilon_low"] if trl else inputs["clip_low"],
        clip_high=inputs["epsilon_high"] if trl else inputs["clip_high"],
        dual_clip=inputs.get("delta") if trl else inputs["clip_c"],
    )
    mask = inputs["response_mask"]
    weights = padded_weights(
        mask,
        inputs["loss_type"] if trl else inputs["agg"],
        num_rollouts=len(mask) if trl else inputs.get("global_batch_size"),
        max_length=inputs.get("max_completion_length") if trl else inputs.get("loss_scale_factor"),
    )
    if "batch_num_tokens" in inputs:  # the upstream call sees one of two ranks, and a mean over ranks follows
        weights = weights * float(np.sum(mask)) / inputs["batch_num_tokens"] * inputs["dp_size"]
    losses = surrogate.losses
    if "beta" in inputs:
        kl = kl_per_token(
            estimator="k3_ratio",
            logprobs=logprobs,
            reference_logprobs=flat(inputs["ref_log_prob"]),
            old_logprobs=flat(inputs["old_log_prob"]),
        )
        losses = losses + inputs["beta"] * kl
    if "rollout_is_weights" in inputs:
        weights = weights * flat(inputs["rollout_is_weights"])
    loss = weighted_loss(losses=losses, weights=weights)
    assert loss.item() == pytest.approx(
        expected["loss"], abs=1e-7 if "klear" in case["id"] or "tree" in case["id"] else 1e-9
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    np.testing.assert_allclose(gradient, flat(expected["grad_log_prob"]), atol=1e-8)
    if "metrics" in expected:
        trained = flat(mask) > 0
        clipped = (surrogate.clipped_high | surrogate.clipped_low)[trained].double().mean()
        assert float(clipped) == pytest.approx(expected["metrics"]["actor/pg_clipfrac"], abs=1e-8)
        dual = surrogate.dual_clipped[trained].double().mean()
        assert float(dual) == pytest.approx(expected["metrics"]["actor/pg_clipfrac_lower"], abs=1e-8)


@pytest.mark.parametrize(
    "case", [case for case in CASES if "inputs" not in case], ids=lambda case: case["id"]
)
def test_arpo_loss_and_gradient(case: dict[str, Any]) -> None:
    logprobs = flat(case["ratio"]).log().requires_grad_()
    surrogate = clipped_surrogate_per_token(
        logprobs=logprobs,
        old_logprobs=torch.zeros_like(logprobs),
        advantages=flat(case["advantage"]),
        clip_low=case["clip_low"],
        clip_high=case["clip_high"],
        dual_clip=case["clip_c"],
    )
    loss = weighted_loss(losses=surrogate.losses, weights=padded_weights(case["mask"], case["agg"]))
    assert loss.item() == pytest.approx(case["loss"], abs=1e-8)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    np.testing.assert_allclose(gradient, flat(case["grad_wrt_logprob"]), atol=1e-7)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [(1.28, 1.0, -1.28, -1.28), (0.8, -1.0, 0.8, 0.8), (3.0, -1.0, 3.0, 3.0), (1.0, 2.0, -2.0, -2.0)],
)
def test_a_ratio_exactly_on_a_bound_keeps_its_whole_gradient(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    """minimum() would hand half of it to the constant branch."""
    logprobs = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    surrogate = clipped_surrogate_per_token(
        logprobs=logprobs,
        old_logprobs=torch.zeros(1, dtype=torch.float64),
        advantages=flat([advantage]),
        clip_high=0.28,
        dual_clip=3.0,
        ratio_scale=flat([ratio]),
    )
    (gradient,) = torch.autograd.grad(surrogate.losses.sum(), logprobs)
    assert surrogate.losses.item() == pytest.approx(loss) and gradient.item() == pytest.approx(slope)


def test_huge_log_ratios_stay_finite() -> None:
    logprobs = torch.tensor([900.0, -900.0], requires_grad=True)
    surrogate = clipped_surrogate_per_token(
        logprobs=logprobs, old_logprobs=torch.zeros(2), advantages=torch.tensor([-1.0, 1.0])
    )
    (gradient,) = torch.autograd.grad(surrogate.losses.sum(), logprobs)
    assert torch.isfinite(surrogate.losses).all() and not gradient.any()


@pytest.mark.parametrize(
    "change",
    [
        {"clip_low": 1.1},
        {"clip_low": -0.1},
        {"clip_high": -0.1},
        {"dual_clip": 1.0},
        {"advantages": torch.zeros(3, 1)},
        {"advantages": torch.zeros(1)},
        {"old_logprobs": torch.zeros(3, dtype=torch.bfloat16)},
        {"logprobs": torch.zeros(3, dtype=torch.float16)},
    ],
)
def test_impossible_settings_shapes_and_half_precision_raise(change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {name: torch.zeros(3) for name in ("logprobs", "old_logprobs", "advantages")}
    with pytest.raises(ValueError):
        clipped_surrogate_per_token(**(arguments | change))
