"""Losses of self-distillation (:mod:`outrider.algorithms.distill`).

The *student* is the context that is trained, the *teacher* the other one; both contain the same policy
tokens. Shapes: T tokens in the flat packed layout, K tokens of a support. Only the student's log-probs carry
gradient; the teacher, gates, gaps and step ratios are detached. All log-probs are natural. Sources of each
form: docs/algorithms/distill.md.
"""

import math

import torch
from torch import Tensor

from outrider.algorithms.distill import DistillSettings
from outrider.algorithms.losses import kl_per_token


def divergence_per_token(
    student_TK: Tensor, teacher_TK: Tensor, *, alpha: float = 0.0, tail: bool = True
) -> Tensor:
    """Compute the generalised Jensen-Shannon divergence of two next-token distributions [T] (arXiv
    2306.13649, 2601.20802).

    0 is KL(teacher, student), 1 is KL(student, teacher), else ``(1 - alpha) KL(student, m) + alpha
    KL(teacher, m)`` with ``m = (1 - alpha) student + alpha teacher``.

    Args:
        student_TK: log-probs of the K tokens of the support. Only these carry gradient.
        teacher_TK: the teacher's log-probs of the same tokens.
        tail: the tokens outside of the support count as one token, which gives a lower bound of the full
            divergence. Otherwise both distributions are renormalised over the support.

    Raises:
        ValueError: for ``alpha`` outside [0, 1], unequal shapes, or one token that is renormalised.
    """
    if not 0.0 <= alpha <= 1.0 or student_TK.shape != teacher_TK.shape:
        raise ValueError(f"invalid divergence: alpha {alpha}, {student_TK.shape} and {teacher_TK.shape}")
    if student_TK.shape[1] == 1 and not tail:
        raise ValueError("one token, renormalised, has probability 1 in both contexts")
    student, teacher = (_normalised(logprobs, tail=tail) for logprobs in (student_TK, teacher_TK.detach()))
    if alpha == 0.0:
        return (teacher.exp() * (teacher - student)).sum(-1)
    if alpha == 1.0:
        return (student.exp() * (student - teacher)).sum(-1)
    mixture = torch.logaddexp(student + math.log1p(-alpha), teacher + math.log(alpha))
    to_student = (student.exp() * (student - mixture)).sum(-1)
    to_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    return (1.0 - alpha) * to_student + alpha * to_teacher


def _normalised(logprobs_TK: Tensor, *, tail: bool) -> Tensor:
    """Log-probs over the support that sum to 1: with the rest as one more token, or renormalised."""
    total_T = logprobs_TK.logsumexp(-1, keepdim=True)
    if not tail:
        return logprobs_TK - total_T
    # The rest is at least one rounding error, also where the support has all of the probability.
    rest_T = torch.log1p(-total_T.exp().clamp(max=1.0 - torch.finfo(total_T.dtype).eps))
    return torch.cat([logprobs_TK, rest_T], dim=-1)


def gap_to_go(gap_T: Tensor, *, discount: float, rollout_T: Tensor, ordinal_T: Tensor) -> Tensor:
    """Compute ``sum_{k >= t} discount^(k - t) gap_k`` [T] over the later tokens of each rollout. A gap that
    is NaN (a token without help) counts as 0 for the earlier ones.
    """
    if discount == 0.0:
        return gap_T
    sums, rollouts, ordinals = gap_T.double().tolist(), rollout_T.tolist(), ordinal_T.tolist()
    later: dict[int, float] = {}
    for token in sorted(range(len(sums)), key=lambda t: (rollouts[t], ordinals[t]), reverse=True):
        own = 0.0 if math.isnan(sums[token]) else sums[token]
        later[rollouts[token]] = own + discount * later.get(rollouts[token], 0.0)
        sums[token] = math.nan if math.isnan(sums[token]) else later[rollouts[token]]
    return torch.tensor(sums, dtype=torch.float64).to(gap_T)


def scaled_advantages(advantages_T: Tensor, gap_T: Tensor, *, scale: float, band: float) -> Tensor:
    """Compute ``A ((1 - scale) + scale clip(exp(sign(A) gap), 1 - band, 1 + band))`` [T] (RLSD)."""
    factor_T = (advantages_T.sign() * gap_T).exp().clamp(1.0 - band, 1.0 + band)
    return advantages_T * ((1.0 - scale) + scale * factor_T)


def distill_losses(
    settings: DistillSettings,
    *,
    logprobs_T: Tensor,
    teacher_T: Tensor,
    start_T: Tensor,
    gate_mean: float = 0.0,
    to_go_T: Tensor | None = None,
    divergence_T: Tensor | None = None,
) -> Tensor:
    """The term's loss of every token [T] with help, before its weight; use it for the tokens with help only.

    Args:
        logprobs_T: log-probs of the sampled tokens in the trained context, with gradient.
        teacher_T: their log-probs in the other context.
        start_T: the trained context's log-probs at the start of the update.
        gate_mean: mean gate of the mini-batch, for ``gap_centered``.
        to_go_T: bounded gaps with those of later tokens, for ``discount`` > 0.
        divergence_T: divergence of the whole distributions, for ``form = divergence``.
    """
    own_T = logprobs_T.detach()
    gap_T = teacher_T - own_T
    factor_T = factors(settings, gap_T=gap_T, log_step_ratio_T=own_T - start_T, gate_mean=gate_mean)
    if settings.form == "divergence":
        assert divergence_T is not None
        return factor_T * divergence_T
    if settings.form == "k3_ratio":
        return factor_T * kl_per_token(
            estimator="k3_ratio", logprobs=logprobs_T, reference_logprobs=teacher_T, old_logprobs=start_T
        )
    return -pushes(settings, factor_T=factor_T, gap_T=gap_T, to_go_T=to_go_T) * logprobs_T


def factors(
    settings: DistillSettings, *, gap_T: Tensor, log_step_ratio_T: Tensor, gate_mean: float = 0.0
) -> Tensor:
    """The gate of every token [T], less its mean, times its capped ratio to the policy at the start."""
    factor_T = gates(gap_T, settings) - gate_mean
    if (cap := settings.step_ratio_cap) is not None and settings.form != "k3_ratio":
        factor_T = factor_T * log_step_ratio_T.exp().clamp(max=cap)
    return factor_T


def pushes(
    settings: DistillSettings, *, factor_T: Tensor, gap_T: Tensor, to_go_T: Tensor | None = None
) -> Tensor:
    """Minus the slope of the losses of ``likelihood`` and ``reverse_kl`` for the log-prob of every token."""
    if settings.form == "likelihood":
        return factor_T
    assert settings.form == "reverse_kl"
    return factor_T * (bounded(gap_T, settings.max_gap) if to_go_T is None else to_go_T)


def gates(gap_T: Tensor, settings: DistillSettings) -> Tensor:
    """The gate of every token [T]: 1, or the sigmoid of the gap."""
    if settings.gate == "none":
        return torch.ones_like(gap_T)
    return torch.sigmoid(settings.gate_beta * gap_T)


def bounded(gap_T: Tensor, limit: float | None) -> Tensor:
    """The gaps, at most ``limit`` in size."""
    return gap_T if limit is None else gap_T.clamp(-limit, limit)
