"""Self-distillation: recorded values of released code, enumerated gradients, and refused settings."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.algorithms.distill import DISTILL_PRESETS, DistillSettings
from outrider.algorithms.distill_losses import (
    bounded,
    distill_losses,
    divergence_per_token,
    gap_to_go,
    gates,
    scaled_advantages,
)
from outrider.config import validate
from outrider.errors import ConfigError
from outrider.training.settings import RunSettings
from tests.vectors import load_vectors

VECTORS = load_vectors("distill")


def cases(group: str) -> list[Any]:
    return [pytest.param(case, id=case["name"][:60]) for case in VECTORS[group]["cases"]]


def tensor(values: Any, *, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def settings(**options: Any) -> DistillSettings:
    return validate(DistillSettings, {"help": ["file"], "path": "x", **options})


def mean_and_slopes(losses: Tensor, mask: Tensor, inputs: Tensor) -> tuple[float, list[float]]:
    """The mean over the masked tokens and its gradient; both 0 without a token."""
    loss = (losses * mask).sum() / max(1.0, float(mask.sum()))
    (slopes,) = torch.autograd.grad(loss, inputs)
    return float(loss.detach()), slopes.flatten().tolist()


@pytest.mark.parametrize("case", cases("sdar.released"))
def test_sdar_vectors(case: dict[str, Any]) -> None:
    """The released loss is the likelihood of one's own samples with a gate; its value also has the teacher's
    constant.
    """
    student, teacher = tensor(case["student_logprobs"], grad=True), tensor(case["teacher_logprobs"])
    mask = tensor(case["mask"])
    # beta 0 is refused by the settings, so that the gate is computed for any beta
    chosen = settings(form="likelihood", gate="gap").model_copy(update={"gate_beta": case["beta"]})
    gate = gates(teacher - student.detach(), chosen)
    np.testing.assert_allclose(gate.numpy(), case["gate"], rtol=1e-9)
    losses = distill_losses(chosen, logprobs_T=student, teacher_T=teacher, start_T=student.detach())
    loss, slopes = mean_and_slopes(losses + gate * teacher, mask, student)
    assert loss == pytest.approx(case["released_loss"], rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(slopes, np.ravel(case["released_d_loss_d_logprob"]), rtol=1e-9, atol=1e-14)
    gated = chosen.model_copy(update={"form": "reverse_kl"})
    losses = distill_losses(gated, logprobs_T=student, teacher_T=teacher, start_T=student.detach())
    loss, slopes = mean_and_slopes(losses, mask, student)
    assert loss == pytest.approx(case["gated_reverse_kl_loss"], rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(
        slopes, np.ravel(case["gated_reverse_kl_d_loss_d_logprob"]), rtol=1e-9, atol=1e-14
    )


@pytest.mark.parametrize("case", cases("reverse_kl.sampled"))
def test_reverse_kl_vectors(case: dict[str, Any]) -> None:
    student = tensor(case["student_logprobs"], grad=True)
    mask = tensor(case["mask"]) * tensor(case["has_help"])[:, None]
    chosen = settings(form="reverse_kl", step_ratio_cap=case["step_ratio_cap"])
    losses = distill_losses(
        chosen,
        logprobs_T=student,
        teacher_T=tensor(case["teacher_logprobs"]),
        start_T=tensor(case["start_logprobs"]),
    )
    loss, slopes = mean_and_slopes(losses, mask, student)
    assert loss == pytest.approx(case["loss"], rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(slopes, np.ravel(case["d_loss_d_logprob"]), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("case", cases("k3_ratio.skill_sd"))
def test_k3_ratio_vectors(case: dict[str, Any]) -> None:
    student = tensor(np.ravel(case["student_logprobs"]), grad=True)
    losses = distill_losses(
        settings(form="k3_ratio"),
        logprobs_T=student,
        teacher_T=tensor(np.ravel(case["teacher_logprobs"])),
        start_T=tensor(np.ravel(case["start_logprobs"])),
    )
    loss, slopes = mean_and_slopes(losses, tensor(np.ravel(case["mask"])), student)
    assert loss == pytest.approx(case["loss"], rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(slopes, np.ravel(case["d_loss_d_logprob"]), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    "case", [case for case in cases("divergence.full") if "student_logits" in case.values[0]]
)
@pytest.mark.parametrize("tail", [False, True])
def test_divergence_vectors(case: dict[str, Any], tail: bool) -> None:
    """Over the whole vocabulary the tail is empty, and both forms agree."""
    logits = tensor([case["student_logits"]], grad=True)
    teacher = tensor([case["teacher_logits"]]).log_softmax(-1)
    loss = divergence_per_token(logits.log_softmax(-1), teacher, alpha=case["alpha"], tail=tail)
    (slopes,) = torch.autograd.grad(loss.sum(), logits)
    assert float(loss.detach()) == pytest.approx(case["loss"], rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(slopes[0].numpy(), case["d_loss_d_student_logits"], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("case", [case for case in cases("divergence.top_k") if "support" in case.values[0]])
def test_top_k_vectors(case: dict[str, Any]) -> None:
    student, teacher = (
        tensor([case[name]]).log_softmax(-1)[:, case["support"]]
        for name in ("student_logits", "teacher_logits")
    )
    tail = "tail" in case["name"]
    loss = (
        divergence_per_token(student, teacher, alpha=case["alpha"], tail=tail)
        if (tail or len(case["support"]) > 1)
        else torch.zeros(1)
    )
    assert float(loss) == pytest.approx(case["loss"], rel=1e-9, abs=1e-12)
    assert float(student.exp().sum()) == pytest.approx(case["student_mass"], rel=1e-9)
    assert float(teacher.exp().sum()) == pytest.approx(case["teacher_mass"], rel=1e-9)


def test_one_renormalised_token_is_refused() -> None:
    with pytest.raises(ValueError, match="one token, renormalised"):
        divergence_per_token(tensor([[-0.1]]), tensor([[-0.2]]), tail=False)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(20))
def test_a_support_with_its_tail_is_a_lower_bound(alpha: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (
        (2.0 * torch.randn(1, 12, generator=generator, dtype=torch.float64)).log_softmax(-1) for _ in "ab"
    )
    order = teacher[0].argsort(descending=True)
    values = [
        float(divergence_per_token(student[:, order[:k]], teacher[:, order[:k]], alpha=alpha))
        for k in range(1, 13)
    ]
    assert all(after >= before - 1e-12 for before, after in itertools.pairwise(values))
    assert values[0] >= -1e-12


@pytest.mark.parametrize("case", cases("advantage.scale_and_add"))
def test_advantage_vectors(case: dict[str, Any]) -> None:
    gap = tensor(case["teacher_logprobs"]) - tensor(case["student_logprobs"])
    if "credit_scale" in case:
        mask, advantages = tensor(case["mask"]), tensor(case["advantages"])[:, None].expand_as(gap)
        scaled = scaled_advantages(advantages, gap, scale=case["lambda"], band=case["clip"]) * mask
        np.testing.assert_allclose(scaled.numpy(), case["credit_scale"], atol=1e-11)
        added = (advantages + case["credit_add_weight"] * gap) * mask
        np.testing.assert_allclose(added.numpy(), case["credit_add"], atol=1e-11)
        return
    rows, width = gap.shape
    rollout, ordinal = torch.arange(rows).repeat_interleave(width), torch.arange(width).repeat(rows)
    found = gap_to_go(gap.flatten(), discount=case["discount"], rollout_T=rollout, ordinal_T=ordinal)
    np.testing.assert_allclose(found.numpy(), np.ravel(case["credit_add"]), atol=1e-11)


def test_gaps_are_bounded_and_tokens_without_help_count_as_0() -> None:
    assert bounded(tensor([-9.0, 1.0, 7.0]), 5.0).tolist() == [-5.0, 1.0, 5.0]
    gap = tensor([1.0, math.nan, 2.0, 4.0])
    found = gap_to_go(
        gap, discount=0.5, rollout_T=torch.tensor([0, 0, 0, 1]), ordinal_T=torch.tensor([0, 1, 2, 0])
    )
    assert found[[0, 2, 3]].tolist() == [1.5, 2.0, 4.0] and math.isnan(found[1])


# Enumerated: two turns, three tokens; every trajectory once, with its probability


TREE = next(case for case in VECTORS["enumerated.token_gradients"]["cases"] if case["name"] == "tree")


def expected_gradient(
    token_losses: Any, *, plays_helped: bool = False, to_go: bool = False
) -> np.ndarray[Any, Any]:
    """Minus the expected gradient for the student's logits of the summed token losses of one rollout.

    ``token_losses`` gets the student's rows with gradient, the teacher's rows, and the sampled tokens.
    """
    student = tensor(TREE["student_logits"], grad=True)
    helped = tensor(TREE["helped_logits"]).log_softmax(-1)
    acting = helped if plays_helped else student.detach().log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for first, second in itertools.product(range(3), repeat=2):
        rows, tokens = torch.tensor([0, 1 + first]), torch.tensor([first, second])
        probability = acting[rows].gather(1, tokens[:, None]).sum().exp()
        losses = token_losses(
            student[rows].log_softmax(-1), helped[rows], tokens, TREE["returns"][first][second]
        )
        total = total + probability * losses.sum()
    (gradient,) = torch.autograd.grad(total, student)
    return -gradient.numpy()


def sampled(**options: Any) -> Any:
    """The token losses of a form of sampled tokens."""
    beta = options.pop("beta", None)
    chosen = settings(**options)
    if beta is not None:
        chosen = chosen.model_copy(update={"gate": "gap", "gate_beta": beta})

    def losses(student: Tensor, teacher: Tensor, tokens: Tensor, value: float) -> Tensor:
        own, other = (rows.gather(1, tokens[:, None])[:, 0] for rows in (student, teacher))
        to_go = gap_to_go(
            other - own.detach(),
            discount=chosen.discount,
            rollout_T=torch.zeros(2, dtype=torch.long),
            ordinal_T=torch.arange(2),
        )
        return distill_losses(
            chosen,
            logprobs_T=own,
            teacher_T=other,
            start_T=own.detach(),
            to_go_T=to_go if chosen.discount else None,
        )

    return losses


def divergence(alpha: float) -> Any:
    return lambda student, teacher, tokens, value: divergence_per_token(student, teacher, alpha=alpha)


def successes(student: Tensor, teacher: Tensor, tokens: Tensor, value: float) -> Tensor:
    return value * sampled(form="likelihood", where="succeeded")(student, teacher, tokens, value)


@pytest.mark.parametrize(
    ("name", "losses", "plays_helped"),
    [
        ("reverse_kl, unhelped plays", sampled(form="reverse_kl"), False),
        *(
            (f"divergence alpha {alpha}, unhelped plays", divergence(alpha), False)
            for alpha in (0.0, 0.5, 1.0)
        ),
        ("divergence alpha 0.0, helped plays", divergence(0.0), True),
        *(
            (
                f"sdar released beta {beta}, unhelped plays",
                sampled(form="likelihood", where="succeeded", beta=beta),
                False,
            )
            for beta in (0.0, 1.0, 5.0)
        ),
        ("gated reverse_kl beta 5, unhelped plays", sampled(form="reverse_kl", beta=5.0), False),
        ("likelihood of helped successes", successes, True),
        (
            "reverse_kl to go (discount 1), unhelped plays: the KL of whole sequences",
            sampled(form="reverse_kl", discount=1.0),
            False,
        ),
    ],
)
def test_enumerated_gradients(name: str, losses: Any, plays_helped: bool) -> None:
    (case,) = (one for one in VECTORS["enumerated.token_gradients"]["cases"] if one["name"] == name)
    found = expected_gradient(losses, plays_helped=plays_helped)
    np.testing.assert_allclose(found, case["minus_expected_gradient"], atol=1e-10)


def test_the_released_sdar_loss_pushes_no_sampled_token_down() -> None:
    """Every slope is at most 0, also in failed rollouts, which have 60.8 % of the absolute push; reverse KL
    raises tokens of failed rollouts with 13.6 % of its push.
    """
    student = tensor(TREE["student_logits"]).log_softmax(-1)
    helped = tensor(TREE["helped_logits"]).log_softmax(-1)
    shares = {}
    for name, form in (("sdar released beta 5", "likelihood"), ("reverse_kl", "reverse_kl")):
        failed = total = 0.0
        for first, second in itertools.product(range(3), repeat=2):
            rows, tokens = torch.tensor([0, 1 + first]), torch.tensor([[first], [second]])
            own, other = (table[rows].gather(1, tokens)[:, 0] for table in (student, helped))
            push = torch.sigmoid(5.0 * (other - own)) if form == "likelihood" else other - own
            weights = float(own.sum().exp()) * push
            total += float(weights.abs().sum())
            if not TREE["returns"][first][second]:
                failed += float(weights.clamp(min=0.0).sum())
            if form == "likelihood":
                assert bool((push > 0.0).all())
        shares[name] = failed / total
    (case,) = (one for one in VECTORS["enumerated.token_gradients"]["cases"] if "sdar released beta 5" in one)
    assert shares == pytest.approx({name: case[name] for name in shares}, rel=1e-9)


# Settings


def test_the_divergence_of_a_preset_does_not_apply_to_another_form() -> None:
    chosen = validate(DistillSettings, {"preset": "sdpo", "form": "reverse_kl"})
    assert (chosen.alpha, chosen.support, chosen.teacher) == (0.0, 64, "ema")
    with pytest.raises(ConfigError, match="alpha belongs to form = divergence"):
        validate(DistillSettings, {"preset": "sdpo", "form": "reverse_kl", "alpha": 0.5})


@pytest.mark.parametrize("preset", DISTILL_PRESETS)
def test_presets_are_settings_and_survive_the_run_directory(preset: str) -> None:
    path = {"path": "help.jsonl"} if "file" in DISTILL_PRESETS[preset].get("help", []) else {}
    chosen = validate(DistillSettings, {"preset": preset, **path})
    assert validate(DistillSettings, chosen.model_dump()) == chosen
    for key, value in DISTILL_PRESETS[preset].items():
        assert getattr(chosen, key) == (tuple(value) if key == "help" else value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": 0.0}, "distill.weight is 0: remove the section"),
        ({"form": "reverse_kl", "alpha": 1.0}, "distill.alpha belongs to form = divergence"),
        ({"form": "likelihood", "gate": "gap", "support": 8}, "distill.support belongs to form = divergence"),
        ({"scale": 0.3}, "distill.scale belongs to form = advantage_scale"),
        ({"discount": 0.5}, "distill.discount belongs to form = reverse_kl or advantage_add"),
        ({"max_gap": 1.0}, "distill.max_gap belongs to form = reverse_kl or advantage_add"),
        (
            {"form": "advantage_add", "gate": "gap"},
            "gate belongs to form = divergence, reverse_kl, likelihood",
        ),
        ({"form": "advantage_scale", "over": "all"}, "distill.over belongs to form = divergence"),
        ({"form": "k3_ratio", "step_ratio_cap": 2.0}, "distill.step_ratio_cap belongs to form = divergence"),
        ({"form": "advantage_scale", "weight": 0.5}, "distill.weight has no effect"),
        ({"form": "advantage_add", "policy_weight": 0.0}, "nothing would be learned"),
        ({"form": "reverse_kl", "plays": "helped"}, "samples the context that is trained"),
        ({"form": "k3_ratio", "plays": "helped"}, "samples the context that is trained"),
        ({"form": "ratio"}, "form = ratio needs plays = helped"),
        ({"form": "ratio", "plays": "helped", "teacher": "ema"}, "the policy that acted"),
        ({"help": "sibling", "plays": "helped"}, "cannot be shown before it is played"),
        ({"support": 1, "tail": False}, "has probability 1 in both contexts"),
        ({"form": "likelihood", "gate": "gap", "gate_beta": 0.0}, "contains no teacher"),
        ({"gate": "gap_centered"}, "a divergence would then be pushed up"),
        ({"form": "likelihood"}, "likelihood of rollouts without help contains no teacher"),
        ({"help": "file"}, "distill.path belongs to help = file"),
        ({"path": "x"}, "distill.path belongs to help = file"),
    ],
)
def test_settings_without_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(DistillSettings, options)


def test_an_averaged_teacher_goes_without_adapters_and_with_several_ranks() -> None:
    tree = {
        "environment": {"type": "factbook"},
        "algorithm": {"type": "grpo", "distill": {"help": "feedback", "teacher": "ema", "support": "all"}},
    }
    for cluster in ({}, {"num_trainers": 2}):
        assert validate(RunSettings, {**tree, "cluster": cluster}).algorithm.needs_reference is False
    with pytest.raises(ConfigError, match=r"teacher = ema with model\.lora: the mean of two factors"):
        validate(RunSettings, {**tree, "model": {"lora": {}}})


def test_a_frozen_teacher_needs_the_reference() -> None:
    tree = {"type": "grpo", "distill": {"help": "feedback", "teacher": "frozen"}}
    run = validate(RunSettings, {"environment": {"type": "factbook"}, "algorithm": tree})
    assert run.algorithm.needs_reference
