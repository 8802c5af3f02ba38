"""Attention of one training segment over its context, with a backward pass of matrix products on CPU.

The fused CPU kernel's backward runs at a tenth of the machine's matrix rate (benchmarks/speed.py prints the update). Here
the forward is fused, and the backward computes the probabilities again and uses plain products.

Shape letters: H query heads, K key-value heads, G query heads a key-value head, N queries, T keys, D head size.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def causal_attention(query_1HND: torch.Tensor, key_1KTD: torch.Tensor, value_1KTD: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention [1, H, N, D] in which the queries are the last N of the T keys."""
    if query_1HND.requires_grad and query_1HND.device.type == "cpu":
        output: torch.Tensor = _CpuAttention.apply(query_1HND, key_1KTD, value_1KTD, scale)  # type: ignore[no-untyped-call]
        return output
    return _fused(query_1HND, key_1KTD, value_1KTD, scale)


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    num_new, num_seen = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if num_new == num_seen:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    mask = None if num_new == 1 else _hidden(query, num_seen).logical_not()
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _hidden(query: torch.Tensor, num_seen: int) -> torch.Tensor:
    """[N, T]: True where a key lies after its query."""
    num_new = query.shape[2]
    return torch.ones(num_new, num_seen, dtype=torch.bool, device=query.device).triu(num_seen - num_new + 1)


class _CpuAttention(torch.autograd.Function):
    """Saves queries, keys and values only; P = softmax(QK') is computed again, in float32 or better."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        return _fused(query, key, value, scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """dV = P'dO, dS = P * (dO V' - rowsum), dQ = dS K, dK = dS'Q; head by head, so that a head's scores stay in cache."""
        query_1HND, key_1KTD, value_1KTD = ctx.saved_tensors
        num_new, num_seen, size = query_1HND.shape[2], key_1KTD.shape[2], query_1HND.shape[3]
        repeats = query_1HND.shape[1] // key_1KTD.shape[1]
        hidden = _hidden(query_1HND, num_seen)
        grads = tuple(torch.empty_like(tensor) for tensor in (query_1HND, key_1KTD, value_1KTD))
        for head in range(key_1KTD.shape[1]):
            queries = slice(head * repeats, (head + 1) * repeats)
            rows = (repeats * num_new, size)  # the query heads of a key-value head, one below the other
            query, output = query_1HND[0, queries].reshape(rows), gradient[0, queries].reshape(rows)
            found = _head_gradients(query, key_1KTD[0, head], value_1KTD[0, head], output, hidden, ctx.scale)
            grads[0][0, queries] = found[0].view(repeats, num_new, size)
            grads[1][0, head], grads[2][0, head] = found[1], found[2]
        return *grads, None


def _head_gradients(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.t()).to(exact).mul_(scale)
    scores.view(-1, *hidden.shape).masked_fill_(hidden, float("-inf"))
    probs = torch.softmax(scores, dim=-1)
    grad_scores = (gradient @ value.t()).to(exact).mul_(probs)
    grad_scores.sub_(probs * grad_scores.sum(dim=-1, keepdim=True)).mul_(scale)
    rounded = grad_scores.to(query.dtype)
    return rounded @ key, rounded.t() @ query, probs.to(query.dtype).t() @ gradient
