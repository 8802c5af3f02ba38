"""Attention of one training segment over its context; in bfloat16 on CPU with a backward pass of matrix
products.

The fused CPU kernel's backward pass does not use the matrix unit of a processor that has one, and a unit is
what bfloat16 is chosen for there. So the forward is fused, and the backward computes the probabilities again
and uses plain products, a block of queries at a time: what lies after the block is never computed. In float32
the fused backward pass is the faster one (benchmarks/update_profile.py prints both).

Shape letters: B sequences, H query heads, K key-value heads, G query heads per key-value head, N queries, T
keys, D head size.
"""

from itertools import product
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

_BLOCK = 128  # queries: with them a block's scores over a thousand keys take about a megabyte


def causal_attention(
    query_BHND: torch.Tensor, key_BKTD: torch.Tensor, value_BKTD: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention [B, H, N, D] in which the queries are the last N of the T keys."""
    if query_BHND.requires_grad and query_BHND.device.type == "cpu" and query_BHND.dtype.itemsize < 4:
        output: torch.Tensor = _CpuAttention.apply(  # type: ignore[no-untyped-call]
            query_BHND, key_BKTD, value_BKTD, scale
        )
        return output
    return _fused(query_BHND, key_BKTD, value_BKTD, scale)


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    num_new, num_seen = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if num_new == num_seen:
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
    if num_new > 1 and query.device.type == "cuda":
        return _lower_right(query, key, value, scale)
    mask = None if num_new == 1 else _hidden(query, num_seen).logical_not()
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _lower_right(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """The same with a mask that a GPU's flash kernel knows: for a boolean one with grouped heads there is
    only the kernel that holds all scores in memory.
    """
    mask = causal_lower_right(query.shape[2], key.shape[2])
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _hidden(query: torch.Tensor, num_seen: int) -> torch.Tensor:
    """[N, T]: True where a key lies after its query."""
    num_new = query.shape[2]
    return torch.ones(num_new, num_seen, dtype=torch.bool, device=query.device).triu(num_seen - num_new + 1)


class _CpuAttention(torch.autograd.Function):
    """Saves queries, keys and values only; P = softmax(QK') is computed again.

    Products are rounded to the precision of the queries (of bfloat16, QK' too, where the fused forward pass
    keeps float32); softmax and what lies between the products are computed in float32 or better.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        return _fused(query, key, value, scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Head by head and block by block, so that a block's scores stay in cache; sums over blocks in
        float32 or better.
        """
        query_BHND, key_BKTD, value_BKTD = ctx.saved_tensors
        num_new, num_seen, size = query_BHND.shape[2], key_BKTD.shape[2], query_BHND.shape[3]
        repeats = query_BHND.shape[1] // key_BKTD.shape[1]
        exact = torch.promote_types(query_BHND.dtype, torch.float32)
        grad_query = torch.empty_like(query_BHND)
        # Sums over query blocks, in which bfloat16 would lose small terms.
        grad_key, grad_value = (torch.zeros_like(tensor, dtype=exact) for tensor in (key_BKTD, value_BKTD))
        for row, head in product(range(len(key_BKTD)), range(key_BKTD.shape[1])):
            queries = slice(head * repeats, (head + 1) * repeats)
            for start in range(0, num_new, _BLOCK):
                block = slice(start, min(start + _BLOCK, num_new))
                seen = num_seen - num_new + block.stop
                # the query heads of a key-value head lie one below the other
                query, output = (
                    tensor[row, queries, block].reshape(-1, size) for tensor in (query_BHND, gradient)
                )
                key, value = key_BKTD[row, head, :seen], value_BKTD[row, head, :seen]
                gradients = _block_gradients(query, key, value, output, repeats, ctx.scale)
                grad_query[row, queries, block] = gradients[0].view(repeats, -1, size)
                grad_key[row, head, :seen] += gradients[1]
                grad_value[row, head, :seen] += gradients[2]
        return grad_query, grad_key.to(key_BKTD.dtype), grad_value.to(value_BKTD.dtype), None


def _block_gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gradient: torch.Tensor,
    repeats: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dV = P'dO, dS = P * (dO V' - rowsum), dQ = dS K, dK = dS'Q; the last keys are the block's own."""
    exact = torch.promote_types(query.dtype, torch.float32)
    num_own = len(query) // repeats
    scores = (query @ key.t()).to(exact).mul_(scale)
    # Only the block's own keys can lie after one of its queries: the mask covers no others.
    hidden = torch.ones(num_own, num_own, dtype=torch.bool, device=query.device).triu(1)
    scores.view(repeats, num_own, -1)[:, :, len(key) - num_own :].masked_fill_(hidden, float("-inf"))
    probs = torch.softmax(scores, dim=-1)
    grad_scores = (gradient @ value.t()).to(exact).mul_(probs)
    grad_scores.sub_(probs * grad_scores.sum(dim=-1, keepdim=True)).mul_(scale)
    rounded = grad_scores.to(query.dtype)
    return rounded @ key, rounded.t() @ query, probs.to(query.dtype).t() @ gradient
