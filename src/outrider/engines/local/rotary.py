"""Attention modules of the Llama and Qwen families with the rotary embedding as one operation, a block of
rows at a time.

Written with slices and concatenations, its backward pass makes a tensor of zeros for every slice. Values are
the same bits. Shape letters: B rows, N tokens of a row, H heads, D head size.
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.engines.local.attention import IMPLEMENTATION

ATTENTIONS = ("LlamaAttention", "Qwen2Attention", "Qwen3Attention")
_BLOCK = 2**16  # elements of a block per thread: a few of them fit its second-level cache


def attention(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    past_key_values: object | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The module's own forward pass; what only transformers' caches or attentions need is left to it."""
    cos, sin = position_embeddings
    if (
        past_key_values is not None
        or self.config._attn_implementation != IMPLEMENTATION
        or cos.shape[-1] != self.head_dim
    ):
        output: tuple[torch.Tensor, torch.Tensor | None] = type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, past_key_values, **options
        )
        return output
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (
        linear(hidden_states).view(shape) for linear in (self.q_proj, self.k_proj, self.v_proj)
    )
    if isinstance(getattr(self, "q_norm", None), nn.Module):  # Qwen3
        query, key = self.q_norm(query), self.k_norm(key)
    query, key = (_Rotate.apply(tensor, cos, sin) for tensor in (query, key))  # type: ignore[no-untyped-call]
    attend = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]
    heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    mixed, weights = attend(self, *heads, attention_mask, dropout=0.0, scaling=self.scaling, **options)
    return self.o_proj(mixed.reshape(*hidden_states.shape[:-1], -1)), weights


class _Rotate(torch.autograd.Function):
    """(a, b) -> (a cos - b sin, b cos + a sin) for the two halves of every head; cos and sin are those of the
    first half.
    """

    @staticmethod
    def forward(ctx: Any, x_BNHD: torch.Tensor, cos_BND: torch.Tensor, sin_BND: torch.Tensor) -> torch.Tensor:
        half = x_BNHD.shape[-1] // 2
        size = (*x_BNHD.shape[:2], half)
        cos, sin = (tensor[..., :half].expand(size).reshape(-1, 1, half) for tensor in (cos_BND, sin_BND))
        ctx.save_for_backward(cos, sin)
        return _rotated(x_BNHD, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """A rotation's transpose turns back."""
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, -sin), None, None


def _rotated(x_BNHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    output = torch.empty(x_BNHD.shape, dtype=x_BNHD.dtype, device=x_BNHD.device)
    # Every thread gets a block of its own.
    rows = max(1, torch.get_num_threads() * _BLOCK // (x_BNHD.shape[2] * x_BNHD.shape[3]))
    tensors = (x_BNHD.flatten(0, 1), output.flatten(0, 1), cos, sin)
    for x, y, c, s in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
        (x_first, x_second), (first, second) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
        torch.mul(x_first, c, out=first).sub_(x_second * s)
        torch.mul(x_second, c, out=second).add_(x_first * s)
    return output
