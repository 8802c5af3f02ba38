"""Likelihood ratios between policies, per token.

Shapes: T tokens in the flat packed layout. ``logprobs`` is the policy in training (carries gradient), ``old``
the trainer's policy at the start of the update, ``sampler`` the policy as the engine computed it while
sampling.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# exp(20) is 5e8: beyond any ratio worth training on, and even its square is far from overflow in float32.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceStats:
    """How far the sampler is from the trainer, over the unmasked tokens.

    ``mean`` and ``mean_square`` describe the truncated weights that are applied, so that means over parts of
    a batch add up; ``max`` and ``mean_abs_log`` the weights before truncation, because a template or
    weight-sync fault shows there.
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
    """Raise ValueError unless all are floating tensors of one shape [T], with at least float32 for
    log-probabilities.

    Broadcasting [T] against [T, 1] would give a wrong loss in silence, and a half-precision ratio rounds
    small updates away.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"expected tensors of one shape [T], got {shapes}")
    low = [name for name, tensor in tensors.items() if tensor.dtype not in (torch.float32, torch.float64)]
    if low:
        raise ValueError(f"expected float32 or float64 for {', '.join(low)}")


def log_ratio(*, logprobs: Tensor, reference_logprobs: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """``logprobs - reference_logprobs`` [T] clamped to +-``limit`` so that exp cannot overflow; no gradient
    beyond the clamp.

    The reference is detached.
    """
    require_tokens(logprobs=logprobs, reference_logprobs=reference_logprobs)
    return (logprobs - reference_logprobs.detach()).clamp(-limit, limit)


def token_ratio(*, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """``r = pi / pi_old`` [T] (PPO, arXiv 1707.06347 Eq. 6), from the clamped log-ratio."""
    return log_ratio(logprobs=logprobs, reference_logprobs=old_logprobs).exp()


def shaped_ratio(*, ratio: Tensor, scale: Tensor) -> Tensor:
    """``(1 + m * F_ret) * r`` [T]; the clip acts on the product (RAPO Eq. 8 and 11). The scale carries no
    gradient.
    """
    require_tokens(ratio=ratio, scale=scale)
    return scale.detach() * ratio
