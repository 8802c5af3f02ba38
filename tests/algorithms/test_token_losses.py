"""Token losses: upstream vectors, references by hand, and rules for all inputs."""

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch

from outrider.algorithms.losses import (
    SequenceForm,
    TokenLoss,
    cispo_per_token,
    clipped_surrogate_per_token,
    gppo_per_token,
    gspo_per_token,
    kl_per_token,
    luffy_per_token,
    reinforce_per_token,
    replay_centred_per_token,
    token_weights,
    weighted_loss,
)
from outrider.algorithms.sampler_correction import log_ratio
from tests.vectors import load_vectors

CASES = load_vectors("objectives")
SURROGATE_CASES = load_vectors("surrogate_losses")


def flat(rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(-1)


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


def padded_weights(
    mask: Any, agg: str, *, num_rollouts: int | None = None, max_length: int | None = None
) -> torch.Tensor:
    """Token weights for padded rows. Upstream does not count empty rows as sequences unless
    ``num_rollouts`` includes them.
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


@pytest.mark.parametrize("name", [name for name, case in SURROGATE_CASES.items() if "inputs" in case])
def test_upstream_loss_and_gradient(name: str) -> None:
    inputs, expected = (SURROGATE_CASES[name][key] for key in ("inputs", "expected"))
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
        expected["loss"], abs=1e-7 if "klear" in name or "tree" in name else 1e-9
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    np.testing.assert_allclose(gradient, flat(expected["grad_log_prob"]), atol=1e-8)
    if "metrics" in expected:
        trained = flat(mask) > 0
        clipped = (surrogate.clipped_high | surrogate.clipped_low)[trained].double().mean()
        assert float(clipped) == pytest.approx(expected["metrics"]["actor/pg_clipfrac"], abs=1e-8)
        dual = surrogate.dual_clipped[trained].double().mean()
        assert float(dual) == pytest.approx(expected["metrics"]["actor/pg_clipfrac_lower"], abs=1e-8)


@pytest.mark.parametrize("name", [name for name, case in SURROGATE_CASES.items() if "inputs" not in case])
def test_arpo_loss_and_gradient(name: str) -> None:
    case = SURROGATE_CASES[name]
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
    """minimum() would split it between the ratio and the constant."""
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


def test_only_the_token_form_uses_the_advantage_of_each_token() -> None:
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


def test_reinforce_weights() -> None:
    logprobs = flat([-1.0, -2.0])
    weighted = reinforce_per_token(logprobs=logprobs, advantages=flat([1.0, -0.5]), weights=flat([2.0, 4.0]))
    assert weighted.losses.tolist() == [2.0, -4.0] and not weighted.clipped_high.any()


WRONG_TENSORS: list[dict[str, torch.Tensor]] = [
    {"advantages": torch.zeros(3, 1)},
    {"advantages": torch.zeros(1)},
    {"old_logprobs": torch.zeros(1)},
    {"old_logprobs": torch.zeros(3, dtype=torch.bfloat16)},
    {"logprobs": torch.zeros(1)},
    {"logprobs": torch.zeros(3, dtype=torch.float16)},
]
INDEX = torch.zeros(3, dtype=torch.int64)
# the arguments that each loss needs, and invalid values of its own
INVALID: dict[Callable[..., Any], tuple[dict[str, Any], list[dict[str, Any]]]] = {
    clipped_surrogate_per_token: (
        {},
        [{"clip_low": 1.1}, {"clip_low": -0.1}, {"clip_high": -0.1}, {"dual_clip": 1.0}],
    ),
    gppo_per_token: ({}, [{"clip_low": 1.5}, {"dual_clip": 1.0}]),
    cispo_per_token: ({"cap": 1.0}, [{"cap": 0.0}, {"floor": 1.0}, {"floor": -0.1}]),
    gspo_per_token: ({"rollout_index": INDEX}, [{"clip_high": -1.0}]),
    luffy_per_token: ({"is_demonstration": INDEX.bool()}, [{"shaping": 0.0}]),
    replay_centred_per_token: (
        {"behaviour_logprobs": torch.zeros(3)},
        [{"weight_cap": 0.0}, {"behaviour_logprobs": torch.zeros(2)}],
    ),
}


@pytest.mark.parametrize("loss", INVALID)
def test_invalid_settings_shapes_and_half_precision_raise(loss: Callable[..., Any]) -> None:
    zeros = three(*torch.zeros(3, 3))
    needed, invalid = INVALID[loss]
    for change in (*invalid, *WRONG_TENSORS):
        with pytest.raises(ValueError):
            loss(**(zeros | needed | change))


@pytest.mark.parametrize("wrong", WRONG_TENSORS[2:], ids=str)
def test_log_ratios_of_other_shapes_or_in_half_precision_raise(wrong: dict[str, torch.Tensor]) -> None:
    pair = {"logprobs": torch.zeros(3), "old_logprobs": torch.zeros(3)} | wrong
    with pytest.raises(ValueError, match="expected"):
        log_ratio(logprobs=pair["logprobs"], reference_logprobs=pair["old_logprobs"])
    if "logprobs" in wrong:
        with pytest.raises(ValueError, match="expected"):
            reinforce_per_token(logprobs=wrong["logprobs"], advantages=torch.zeros(3))
    for form in get_args(SequenceForm):
        arguments = pair | {"advantages": torch.ones(3), "rollout_index": torch.tensor([0, 0, 1])}
        with pytest.raises(ValueError, match="expected"):
            gspo_per_token(**arguments, form=form)


def test_a_weight_exactly_on_a_bound_of_cispo_is_inside_and_masks_are_masks() -> None:
    tensors = three(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, -1.0]))  # every ratio is exactly 1
    for bounds in ({"cap": 1.0}, {"cap": 2.0, "floor": 1.0}):
        surrogate = cispo_per_token(**tensors, **bounds)
        assert not (surrogate.clipped_high | surrogate.clipped_low).any()
    for surrogate in every_loss(*tensors.values(), torch.tensor([0, 1])).values():
        for mask in (surrogate.clipped_high, surrogate.clipped_low, surrogate.dual_clipped):
            assert mask.dtype == torch.bool and mask.shape == (2,)


def test_bounds_of_the_clip_reach_every_loss_that_has_them() -> None:
    """Ratios of 3 and 1 / 3 with bounds other than the defaults; r0 is 1, and nothing is shaped."""
    ratio, advantages = torch.tensor([3.0, 1 / 3]), torch.tensor([1.0, -1.0])
    tensors = three(ratio.log(), torch.zeros(2), advantages)
    bounds = {"clip_low": 0.5, "clip_high": 0.75}
    expected = [-1.75, 0.5]
    for surrogate in (
        gppo_per_token(**tensors, **bounds),
        gspo_per_token(**tensors, **bounds, rollout_index=torch.tensor([0, 1])),
        luffy_per_token(**tensors, **bounds, is_demonstration=torch.zeros(2, dtype=torch.bool)),
        replay_centred_per_token(**tensors, **bounds, behaviour_logprobs=torch.zeros(2)),
    ):
        assert surrogate.losses.tolist() == pytest.approx(expected)
        assert surrogate.clipped_high.tolist() == [True, False]
        assert surrogate.clipped_low.tolist() == [False, True]


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


@pytest.mark.parametrize("cap", [0.25, 1.0, 3.0])
def test_a_cap_bounds_the_weight_of_stored_rollouts_on_either_side_of_one(cap: float) -> None:
    old = torch.tensor([2.0]).log()
    tensors = three(old, old, torch.tensor([1.0]))
    surrogate = replay_centred_per_token(**tensors, behaviour_logprobs=torch.zeros(1), weight_cap=cap)
    assert surrogate.losses.tolist() == pytest.approx([-min(2.0, cap)])
