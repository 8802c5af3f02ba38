"""Likelihood ratios between policies, per token.

Shapes: T tokens in the flat packed layout. ``logprobs`` is the policy in training (carries gradient), ``old`` the trainer's
policy at the start of the update, ``sampler`` the policy as the engine computed it while sampling.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceStats:
    """How far the sampler is from the trainer, over the unmasked tokens.

    ``mean`` and ``mean_square`` describe the truncated weights that are applied, so that means over parts of a batch add up;
    ``max`` and ``mean_abs_log`` the weights before truncation, because a template or weight-sync fault shows there.
    """

    num_tokens: int
    num_truncated: int
    mean: float
    max: float
    mean_square: float
    mean_abs_log: float

    @property
    def effective_sample_share(self) -> float:
        """ESS / tokens, in (0, 1]; 0 where every weight is 0."""
        return self.mean**2 / self.mean_square if self.mean_square else 0.0


def require_tokens(**tensors: Tensor) -> None:
    """Raise ValueError unless all are floating tensors of one shape [T], with at least float32 for log-probabilities.

    Broadcasting [T] against [T, 1] would give a wrong loss in silence, and a half-precision ratio rounds small updates away.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"expected tensors of one shape [T], got {shapes}")
    low = [name for name, tensor in tensors.items() if tensor.dtype not in (torch.float32, torch.float64)]
    if low:
        raise ValueError(f"expected float32 or float64 for {', '.join(low)}")


def log_ratio(*, logprobs: Tensor, reference_logprobs: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """``logprobs - reference_logprobs`` [T] clamped to +-``limit`` so that exp cannot overflow; no gradient beyond the clamp.

    The reference is detached.
    """
    require_tokens(logprobs=logprobs, reference_logprobs=reference_logprobs)
    return (logprobs - reference_logprobs.detach()).clamp(-limit, limit)


def token_ratio(*, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """``r = pi / pi_old`` [T] (PPO, arXiv 1707.06347 Eq. 6), from the clamped log-ratio."""
    return log_ratio(logprobs=logprobs, reference_logprobs=old_logprobs).exp()


def shaped_ratio(*, ratio: Tensor, scale: Tensor) -> Tensor:
    """``(1 + m * F_ret) * r`` [T]; the clip acts on the product (RAPO Eq. 8 and 11). The scale carries no gradient."""
    require_tokens(ratio=ratio, scale=scale)
    return scale.detach() * ratio


def truncated_importance_weights_per_token(
    *, old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, upper: float = 2.0
) -> Tensor:
    """``min(pi_old / pi_sampler, upper)`` [T], detached, 0 where ``mask`` [T] is False (truncated importance sampling).

    Multiplies the token loss; the denominators of the aggregation stay as they are.
    """
    weights = log_ratio(logprobs=old_logprobs.detach(), reference_logprobs=sampler_logprobs).exp().clamp(max=upper)
    return torch.where(mask.bool(), weights, torch.zeros_like(weights))


def importance_stats(*, old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, upper: float = 2.0) -> ImportanceStats:
    """Statistics of the sampler correction over the tokens where ``mask`` [T] is True.

    Raises ValueError when no token is left or a log-probability is not finite: either is a fault, not noise.
    """
    difference = (old_logprobs.detach() - sampler_logprobs.detach())[mask.bool()].double()
    if difference.numel() == 0 or not bool(torch.isfinite(difference).all()):
        raise ValueError("sampler correction needs at least one token and finite log-probabilities")
    weights = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    truncated = weights.clamp(max=upper)
    return ImportanceStats(
        num_tokens=weights.numel(),
        num_truncated=int((weights > upper).sum()),
        mean=float(truncated.mean()),
        max=float(weights.max()),
        mean_square=float((truncated**2).mean()),
        mean_abs_log=float(difference.abs().mean()),
    )
