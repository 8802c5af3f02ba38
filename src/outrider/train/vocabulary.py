"""Log-probs of given tokens and entropies from hidden states, in chunks: no tensor of all logits in memory.

The backward pass computes a chunk's logits again and writes their gradient in place.
Shape letters: T scored tokens, C tokens of a chunk, E hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

_CHUNK = 128  # rows whose float32 logits (25 MB at 49,152 entries) stay below what the allocator returns to the system


def score_tokens(hidden_TE: Tensor, targets_T: Tensor, head: nn.Module) -> tuple[Tensor, Tensor]:
    """Log-probs of ``targets_T`` (with gradient) and entropies in nats over the whole vocabulary (without)."""
    if type(head) is nn.Linear:
        result: tuple[Tensor, Tensor] = _ScoreTokens.apply(hidden_TE, targets_T, head.weight, head.bias)  # type: ignore[no-untyped-call]
        return result
    pieces = [
        checkpoint(_scores, hidden_CE, targets_C, head, use_reentrant=False)  # a head with an adapter or a cap of its own
        for hidden_CE, targets_C in zip(hidden_TE.split(_CHUNK), targets_T.split(_CHUNK), strict=True)
    ]
    return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat([entropies for _, entropies in pieces])


def _exact(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _scores(hidden_CE: Tensor, targets_C: Tensor, head: nn.Module) -> tuple[Tensor, Tensor]:
    return _picked(torch.log_softmax(_exact(head(hidden_CE)), dim=-1), targets_C)


def _picked(logprobs_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    chosen = logprobs_CV.gather(1, targets_C[:, None])[:, 0]
    with torch.no_grad():
        entropies_C = -(torch.softmax(logprobs_CV, dim=-1).mul_(logprobs_CV)).sum(dim=-1)
    return chosen, entropies_C


class _ScoreTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TE: Tensor, targets_T: Tensor, weight_VE: Tensor, bias_V: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_TE, targets_T, weight_VE, bias_V)
        pieces = [
            _picked(torch.log_softmax(_exact(linear(hidden_CE, weight_VE, bias_V)), dim=-1), targets_C)
            for hidden_CE, targets_C in zip(hidden_TE.split(_CHUNK), targets_T.split(_CHUNK), strict=True)
        ]
        logprobs_T, entropies_T = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        ctx.mark_non_differentiable(entropies_T)
        return logprobs_T, entropies_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """d logits = (onehot - softmax) * d logprob; the weight's gradient is summed in float32 over the blocks."""
        hidden_TE, targets_T, weight_VE, bias_V = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden_TE) if ctx.needs_input_grad[0] else None
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        for start in range(0, len(targets_T), 4 * _CHUNK):
            block = slice(start, start + 4 * _CHUNK)
            grad_logits = _grad_logits(hidden_TE[block], targets_T[block], grad_T[block], weight_VE, bias_V)
            if grad_hidden is not None:
                grad_hidden[block] = grad_logits @ weight_VE
            if ctx.needs_input_grad[2]:
                part = grad_logits.t() @ hidden_TE[block]
                grad_weight = part if grad_weight is None else grad_weight.to(_exact(part).dtype).add_(part)
            if bias_V is not None and ctx.needs_input_grad[3]:
                total = _exact(grad_logits).sum(dim=0)
                grad_bias = total if grad_bias is None else grad_bias + total
        grad_weight = None if grad_weight is None else grad_weight.to(weight_VE.dtype)
        return grad_hidden, None, grad_weight, None if grad_bias is None or bias_V is None else grad_bias.to(bias_V.dtype)


def _grad_logits(hidden: Tensor, targets: Tensor, gradient: Tensor, weight_VE: Tensor, bias_V: Tensor | None) -> Tensor:
    """[block, V] in the precision of the hidden states, filled chunk by chunk."""
    filled = hidden.new_empty((len(targets), len(weight_VE)))
    for start in range(0, len(targets), _CHUNK):
        rows = slice(start, start + _CHUNK)
        probs_CV = torch.softmax(_exact(linear(hidden[rows], weight_VE, bias_V)), dim=-1)
        scale_C = gradient[rows].to(probs_CV.dtype)
        probs_CV.mul_(-scale_C[:, None])
        probs_CV[torch.arange(len(probs_CV), device=probs_CV.device), targets[rows]] += scale_C
        filled[rows] = probs_CV
    return filled
