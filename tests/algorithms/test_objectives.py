"""GPPO, CISPO, GSPO, REINFORCE, LUFFY and replay: upstream vectors, scalar references, and rules that hold
for all inputs.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.algorithms.losses import (
    TokenLoss,
    cispo_per_token,
    clipped_surrogate_per_token,
    gppo_per_token,
    gspo_per_token,
    luffy_per_token,
    reinforce_per_token,
    replay_centred_per_token,
    token_weights,
    weighted_loss,
)
from outrider.algorithms.sampler_correction import log_ratio

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "vectors" / "objectives.json").read_text())
}


def flat(rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(-1)


def three(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> dict[str, Any]:
    return {"logprobs": logprobs, "old_logprobs": old, "advantages": advantages}


class Packed:
    """The policy tokens of padded upstream rows, without the padding, as the library packs them."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        rows = torch.tensor(inputs["response_mask"] if "response_mask" in inputs else inputs["mask"]).bool()
        self.mask, self.shape = rows.reshape(-1), rows.shape
        self.rollout_index = torch.nonzero(rows)[:, 0]
        # without the empty last row: upstream does not count it
        self.num_rollouts = int(self.rollout_index.max()) + 1
        self.logprobs = self.of(inputs["log_prob"]).requires_grad_()
        self.old = self.of(inputs["old_log_prob"]) if "old_log_prob" in inputs else self.logprobs.detach()
        if "advantages" in inputs:
            advantages = flat(inputs["advantages"]).reshape(len(rows), -1)
            self.advantages = advantages.expand(rows.shape).reshape(-1)[self.mask]

    def of(self, rows: Any) -> torch.Tensor:
        return flat(rows)[self.mask]

    @property
    def tensors(self) -> dict[str, Any]:
        return three(self.logprobs, self.old, self.advantages)

    def weights(self, kind: Any) -> torch.Tensor:
        return token_weights(
            kind=kind, rollout_index=self.rollout_index, num_rollouts=self.num_rollouts, dtype=torch.float64
        )

    def check(
        self, losses: torch.Tensor, weights: torch.Tensor, expected: dict[str, Any], atol: float = 1e-9
    ) -> None:
        loss = weighted_loss(losses=losses, weights=weights)
        assert loss.item() == pytest.approx(expected["loss"], abs=atol)
        (gradient,) = torch.autograd.grad(loss, self.logprobs)
        np.testing.assert_allclose(gradient, self.of(expected["grad_log_prob"]), atol=atol)


def share(mask: torch.Tensor) -> float:
    return float(mask.double().mean())


SEQUENCE_MEAN, TOKEN_MEAN = "sequence_mean_token_mean", "token_mean"


RATIO_CASES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "loss.gspo.0.2_0.2.verl": (SEQUENCE_MEAN, ("token", "sequence")),
    "loss.gspo.0.2_0.2.token_mean.verl": (TOKEN_MEAN, ("token", "sequence")),
    "loss.trl.gspo.dapo_agg": (TOKEN_MEAN, ("token", "sequence")),
    "loss.trl.rloo": (SEQUENCE_MEAN, ("product",)),
}


@pytest.mark.parametrize("name", RATIO_CASES)
def test_sequence_ratio_vectors(name: str) -> None:
    """Both sides are clipped at 0.2 there, so that some rollouts keep a gradient."""
    kind, forms = RATIO_CASES[name]
    packed, expected = Packed(CASES[name]["inputs"]), CASES[name]["expected"]
    for form in forms:
        arguments = packed.tensors | {"rollout_index": packed.rollout_index, "form": form}
        surrogate = gspo_per_token(**arguments, clip_low=0.2, clip_high=0.2)
        packed.check(surrogate.losses, packed.weights(kind), expected)
        clipped = share(surrogate.clipped_high | surrogate.clipped_low)
        assert "metrics" not in expected or clipped == pytest.approx(
            expected["metrics"]["actor/pg_clipfrac"], abs=1e-8
        )


def test_cispo_vectors_of_both_conventions() -> None:
    """verl's bounds are around 1, TRL's cap is the number itself, and it has no floor."""
    for name, bounds in (
        ("loss.cispo.low0.2_high0.28.verl", (1.28, 0.8)),
        ("loss.trl.cispo.eh0.2", (0.2, 0.0)),
    ):
        packed, expected = Packed(CASES[name]["inputs"]), CASES[name]["expected"]
        surrogate = cispo_per_token(**packed.tensors, cap=bounds[0], floor=bounds[1])
        packed.check(surrogate.losses, packed.weights("token_mean"), expected)
        clipped = share(surrogate.clipped_high | surrogate.clipped_low)
        assert "metrics" not in expected or clipped == pytest.approx(
            expected["metrics"]["actor/pg_clipfrac"], abs=1e-8
        )
        assert bool(surrogate.clipped_low.any()) == (bounds[1] > 0.0)


def test_gppo_vector() -> None:
    case = CASES["loss.gppo.0.2_0.28.c10.0"]
    packed = Packed(case["inputs"])
    surrogate = gppo_per_token(**packed.tensors, dual_clip=case["inputs"]["clip_c"])
    packed.check(surrogate.losses, packed.weights("token_mean"), case["expected"], atol=1e-7)
    assert share(surrogate.clipped_high | surrogate.clipped_low) == pytest.approx(
        case["expected"]["clipfrac"], abs=1e-8
    )
    assert share(surrogate.dual_clipped) == case["expected"]["clipfrac_lower"]


def test_negative_log_likelihood_and_replay_vectors() -> None:
    case = CASES["loss.sft.luffy"]
    packed = Packed(case["inputs"])
    surrogate = reinforce_per_token(logprobs=packed.logprobs, advantages=torch.ones_like(packed.old))
    packed.check(surrogate.losses, packed.weights("token_mean"), case["expected"])
    case = CASES["loss.rollout_replay"]
    packed = Packed(case["inputs"])
    start, wrote = (packed.of(case["inputs"][name]) for name in ("step_start_log_prob", "behaviour_log_prob"))
    surrogate = replay_centred_per_token(
        **three(packed.logprobs, start, packed.advantages), behaviour_logprobs=wrote
    )
    packed.check(surrogate.losses, packed.weights("token_mean"), case["expected"])
    assert share(surrogate.clipped_high | surrogate.clipped_low) == pytest.approx(
        case["expected"]["clipfrac"], abs=1e-8
    )


def test_gppo_keeps_a_finite_gradient_where_the_ratio_overflows() -> None:
    """The printed form divides by a ratio that is infinite, and returns NaN."""
    logprobs = torch.tensor([900.0, -900.0], requires_grad=True)
    old, ones = torch.zeros(2), torch.ones(2)
    surrogate = gppo_per_token(**three(logprobs, old, torch.tensor([1.0, -1.0])))
    (gradient,) = torch.autograd.grad(surrogate.losses.sum(), logprobs)
    np.testing.assert_allclose(gradient, [-1.28, 0.8], rtol=1e-6)
    for losses in (
        cispo_per_token(**three(logprobs, old, ones), cap=2.0).losses,
        gspo_per_token(**three(logprobs, old, -ones), rollout_index=torch.arange(2)).losses,
    ):
        (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
        assert torch.isfinite(losses).all() and torch.isfinite(gradient).all()


def every_loss(logprobs: Any, old: Any, advantages: Any, index: torch.Tensor) -> dict[str, TokenLoss]:
    tensors = three(logprobs, old, advantages)
    return {
        "reinforce": reinforce_per_token(logprobs=logprobs, advantages=advantages),
        "clip": clipped_surrogate_per_token(**tensors),
        "gppo": gppo_per_token(**tensors, dual_clip=3.0),
        "cispo": cispo_per_token(**tensors, cap=2.0),
        "gspo": gspo_per_token(**tensors, rollout_index=index),
        "luffy": luffy_per_token(**tensors, is_demonstration=torch.zeros_like(index, dtype=torch.bool)),
        "replay": replay_centred_per_token(**tensors, behaviour_logprobs=old),
    }


def test_only_the_token_form_gives_each_token_its_own_advantage() -> None:
    logprobs, old, advantages = flat([-0.9, -1.8]).requires_grad_(), flat([-1.0, -2.0]), flat([2.0, -1.0])
    ratio = math.exp(0.15)
    for form, slopes in (("token", [-2.0 * ratio, ratio]), ("sequence", [-0.5 * ratio] * 2)):
        arguments = three(logprobs, old, advantages) | {"rollout_index": torch.tensor([0, 0]), "form": form}
        surrogate = gspo_per_token(**arguments, clip_low=0.5, clip_high=0.5)
        (gradient,) = torch.autograd.grad(surrogate.losses.sum(), logprobs)
        np.testing.assert_allclose(gradient, slopes, rtol=1e-12)
        np.testing.assert_allclose(surrogate.losses.detach(), [-2.0 * ratio, ratio], rtol=1e-12)


def test_only_the_current_policy_carries_gradient() -> None:
    logprobs, old, advantages, weights = (flat([-0.1, 0.2]).requires_grad_() for _ in range(4))
    tensors = three(logprobs, old, advantages)
    for surrogate in (
        *every_loss(logprobs, old, advantages, torch.tensor([0, 0])).values(),
        reinforce_per_token(logprobs=logprobs, advantages=advantages, weights=weights),
        replay_centred_per_token(**tensors, behaviour_logprobs=weights),
        luffy_per_token(**tensors, is_demonstration=torch.tensor([True, False])),
    ):
        gradients = torch.autograd.grad(
            surrogate.losses.sum(), [logprobs, old, advantages, weights], allow_unused=True
        )
        assert (
            gradients[0] is not None
            and gradients[0].all()
            and all(gradient is None for gradient in gradients[1:])
        )
        assert not any(
            mask.requires_grad
            for mask in (surrogate.clipped_high, surrogate.clipped_low, surrogate.dual_clipped)
        )


def test_reinforce_weights_and_impossible_input() -> None:
    logprobs = flat([-1.0, -2.0])
    weighted = reinforce_per_token(logprobs=logprobs, advantages=flat([1.0, -0.5]), weights=flat([2.0, 4.0]))
    assert weighted.losses.tolist() == [2.0, -4.0] and not weighted.clipped_high.any()
    zeros = three(torch.zeros(3), torch.zeros(3), torch.zeros(3))
    index = torch.zeros(3, dtype=torch.int64)
    shapes: list[dict[str, Any]] = [
        {"advantages": torch.zeros(3, 1)},
        {"old_logprobs": torch.zeros(3, dtype=torch.bfloat16)},
    ]
    impossible: dict[Callable[..., TokenLoss], list[dict[str, Any]]] = {
        gppo_per_token: [{"clip_low": 1.5}, {"dual_clip": 1.0}, *shapes],
        cispo_per_token: [
            {"cap": 0.0},
            *({"cap": 1.0} | c for c in ({"floor": 1.0}, {"floor": -0.1}, *shapes)),
        ],
        gspo_per_token: [{"rollout_index": index} | change for change in ({"clip_high": -1.0}, *shapes)],
        luffy_per_token: [{"is_demonstration": index.bool(), "shaping": 0.0}],
        replay_centred_per_token: [{"behaviour_logprobs": torch.zeros(2)}],
    }
    with pytest.raises(ValueError, match="weight_cap"):
        replay_centred_per_token(**zeros, behaviour_logprobs=torch.zeros(3), weight_cap=0.0)
    for function, changes in impossible.items():
        for change in changes:
            with pytest.raises(ValueError):
                function(**(zeros | change))


def test_a_weight_exactly_on_a_bound_of_cispo_is_inside_and_masks_are_masks() -> None:
    tensors = three(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, -1.0]))  # every ratio is exactly 1
    for bounds in ({"cap": 1.0}, {"cap": 2.0, "floor": 1.0}):
        surrogate = cispo_per_token(**tensors, **bounds)
        assert not (surrogate.clipped_high | surrogate.clipped_low).any()
    for surrogate in every_loss(*tensors.values(), torch.tensor([0, 1])).values():
        for mask in (surrogate.clipped_high, surrogate.clipped_low, surrogate.dual_clipped):
            assert mask.dtype == torch.bool and mask.shape == (2,)


def test_bounds_of_the_clip_reach_every_loss_that_has_them() -> None:
    """Ratios of 3 and 1 / 3 against bounds of their own: what the clip gives, centred on r0 = 1 or shaped by
    nothing.
    """
    ratio, advantages = torch.tensor([3.0, 1 / 3]), torch.tensor([1.0, -1.0])
    tensors = three(ratio.log(), torch.zeros(2), advantages)
    bounds = {"clip_low": 0.5, "clip_high": 0.75}
    expected = [-1.75, 0.5]
    nobody = torch.zeros(2, dtype=torch.bool)
    for surrogate in (
        gppo_per_token(**tensors, **bounds),
        gspo_per_token(**tensors, **bounds, rollout_index=torch.tensor([0, 1])),
        luffy_per_token(**tensors, **bounds, is_demonstration=nobody),
        replay_centred_per_token(**tensors, **bounds, behaviour_logprobs=torch.zeros(2)),
    ):
        assert surrogate.losses.tolist() == pytest.approx(expected)
        assert surrogate.clipped_high.tolist() == [True, False] and surrogate.clipped_low.tolist() == [
            False,
            True,
        ]


def test_default_bounds_are_those_of_the_papers() -> None:
    ratio, advantages = torch.tensor([3.0, 1 / 3]), torch.tensor([1.0, -1.0])
    tensors = three(ratio.log(), torch.zeros(2), advantages)
    assert clipped_surrogate_per_token(**tensors).losses.tolist() == pytest.approx([-1.2, 0.8])
    assert gppo_per_token(**tensors).losses.tolist() == pytest.approx([-1.28, 0.8])
    gspo = gspo_per_token(**tensors, rollout_index=torch.tensor([0, 1]))
    assert gspo.losses.tolist() == pytest.approx([-1.0004, 0.9997])
    replay = replay_centred_per_token(**tensors, behaviour_logprobs=torch.zeros(2))
    assert replay.losses.tolist() == pytest.approx([-1.2, 0.8])
    assert not cispo_per_token(**tensors, cap=5.0).clipped_low.any()  # no floor


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3, 1), torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)], ids=str
)
def test_log_probs_of_another_shape_or_in_half_precision_are_refused(wrong: torch.Tensor) -> None:
    zeros = torch.zeros(3)
    with pytest.raises(ValueError):
        reinforce_per_token(logprobs=wrong, advantages=zeros)
    for pair in ((wrong, zeros), (zeros, wrong)):
        with pytest.raises(ValueError):
            log_ratio(logprobs=pair[0], reference_logprobs=pair[1])


@pytest.mark.parametrize("cap", [0.25, 1.0, 3.0])
def test_a_cap_bounds_the_weight_of_stored_rollouts_on_either_side_of_one(cap: float) -> None:
    old = torch.tensor([2.0]).log()
    tensors = three(old, old, torch.tensor([1.0]))
    surrogate = replay_centred_per_token(**tensors, behaviour_logprobs=torch.zeros(1), weight_cap=cap)
    assert surrogate.losses.tolist() == pytest.approx([-min(2.0, cap)])
