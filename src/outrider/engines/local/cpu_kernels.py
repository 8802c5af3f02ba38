"""Linear layers on weights in oneDNN's own layout: the only private operators of torch that are called.

Not every processor can run them, nor does every build of torch have them: whoever calls asks :func:`can_pack`
first and has a plain way beside. Tests replace :func:`can_pack`, so that each machine takes both.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.engines.local.attention import IMPLEMENTATION, Plan

_NUM_ROWS_HINT = 32
_NUM_IN, _NUM_OUT = 32, 48


def pack(weight: Tensor) -> Tensor:
    """A copy of ``weight`` [out, in] in the layout that :func:`packed_linear` reads."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _NUM_ROWS_HINT)
    return packed


def packed_linear(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """[..., out] for ``rows`` [..., in] and a weight from :func:`pack`."""
    output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return output


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether packed layers of this precision run here and are right: asked once, by trying a small one.

    For bfloat16 torch asks oneDNN, which wants AVX-512 (BW, VL, DQ) or AVX-NE-CONVERT, and obeys
    ``ONEDNN_MAX_CPU_ISA``.
    """
    rows = torch.linspace(-1.0, 1.0, 4 * _NUM_IN).view(4, _NUM_IN).to(dtype)
    weight = torch.linspace(-0.5, 1.0, _NUM_OUT * _NUM_IN).view(_NUM_OUT, _NUM_IN).to(dtype)
    try:
        output = packed_linear(rows, pack(weight), None)
    except (AttributeError, RuntimeError, TypeError):
        return False  # no such operator in this torch, refused on this processor, or with other arguments
    return torch.allclose(output.float(), rows.float() @ weight.float().T, rtol=0.02, atol=0.02)


# Weights of linear layers in the layout that the CPU's matrix kernels read.
#
# A decoding step multiplies a few dozen rows with every weight; bringing the weights into that layout costs
# as much as the product, and is the same work at every step. The packed copies live as long as a generation
# does.


_MIN_ROWS = 2
_MAX_ROWS = 256  # above, the product itself dominates


class PackedLinears:
    """Lets the plain linear layers of a CPU model use packed weights while :meth:`active`.

    It does nothing where they cannot be had.
    """

    def __init__(self, model: nn.Module) -> None:
        linears = (module for module in model.modules() if isinstance(module, nn.Linear))
        self._linears = [linear for linear in linears if _is_packable(linear)]
        self._packed: list[torch.Tensor] | None = None

    def drop(self) -> None:
        """Forget the copies: the weights moved, or their memory is needed."""
        self._packed = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Decoding steps inside use the copies, which are made at the first one after :meth:`drop`."""
        if self._packed is None:
            self._packed = [pack(linear.weight.detach()) for linear in self._linears]
        for linear, packed in zip(self._linears, self._packed, strict=True):
            linear.forward = MethodType(_Forward(packed), linear)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for linear in self._linears:
                with suppress(AttributeError):
                    del linear.forward


class _Forward:
    def __init__(self, packed: torch.Tensor) -> None:
        self._packed = packed

    def __call__(self, linear: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        if not _MIN_ROWS <= rows.numel() // rows.shape[-1] <= _MAX_ROWS:
            return nn.functional.linear(rows, linear.weight, linear.bias)
        return packed_linear(rows, self._packed, linear.bias)


def _is_packable(module: nn.Linear) -> bool:
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.float32, torch.bfloat16)
        and can_pack(module.weight.dtype)
    )


# Attention modules of the Llama and Qwen families with the rotary embedding as one operation, a block of
# rows at a time.
#
# Written with slices and concatenations, its backward pass makes a tensor of zeros for every slice. Values
# are the same bits. Shape letters: B rows, N tokens of a row, H heads, D head size.


ATTENTIONS = ("LlamaAttention", "Qwen2Attention", "Qwen3Attention")
_ROTARY_BLOCK = 2**16  # elements of a block per thread: a few of them fit its second-level cache


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
        return _apply_rotary(x_BNHD, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """A rotation's transpose turns back."""
        cos, sin = ctx.saved_tensors
        return _apply_rotary(gradient, cos, -sin), None, None


def _apply_rotary(x_BNHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    output = torch.empty(x_BNHD.shape, dtype=x_BNHD.dtype, device=x_BNHD.device)
    # Every thread gets a block of its own.
    rows = max(1, torch.get_num_threads() * _ROTARY_BLOCK // (x_BNHD.shape[2] * x_BNHD.shape[3]))
    tensors = (x_BNHD.flatten(0, 1), output.flatten(0, 1), cos, sin)
    for x, y, c, s in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
        (x_first, x_second), (first, second) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
        torch.mul(x_first, c, out=first).sub_(x_second * s)
        torch.mul(x_second, c, out=second).add_(x_first * s)
    return output


# RMSNorm and SwiGLU of the Llama and Qwen families, a block of rows at a time on CPU.
#
# Eager elementwise operations on thousands of rows stream every intermediate value through memory; a block
# that stays in the processor's cache does not, and only inputs are kept for the backward pass. The forward
# pass does the operations of the transformers modules in their order and precision, so its values are the
# same bits.
#
# Shape letters: N rows, E hidden size, F intermediate size.


_FUSED_BLOCK = 2**18  # elements of a block: 1 MiB in float32, several of which fit the second-level cache
NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
MLPS = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP")


def fuse(model: nn.Module) -> None:
    """Let norms, gated MLPs and rotary embeddings of exactly these formulas run in blocks on a CPU; others
    stay as they are.
    """
    for module in model.modules():
        if type(module).__name__ in NORMS:
            module.forward = MethodType(_norm, module)
        elif type(module).__name__ in MLPS and isinstance(module.act_fn, (nn.SiLU, SiLUActivation)):
            module.forward = MethodType(_gated_mlp, module)
        elif type(module).__name__ in ATTENTIONS:
            module.forward = MethodType(attention, module)


def _norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = _RmsNorm.apply(  # type: ignore[no-untyped-call]
        hidden_states, self.weight, self.variance_epsilon
    )
    return output


def _gated_mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = self.down_proj(
        _SwiGlu.apply(self.gate_proj(x), self.up_proj(x))  # type: ignore[no-untyped-call]
    )
    return output


def _rows(tensor: torch.Tensor) -> int:
    return max(1, _FUSED_BLOCK // tensor.shape[-1])


class _RmsNorm(torch.autograd.Function):
    """y = w * round(x / rms(x)), with the division in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_E: torch.Tensor, epsilon: float) -> torch.Tensor:
        x_NE = x.reshape(-1, x.shape[-1])
        output_NE = torch.empty_like(x_NE)
        # Kept for the backward pass in float32 whatever the model's precision: one number per row.
        inverse_N1 = x_NE.new_empty((len(x_NE), 1), dtype=torch.float32)
        size = _rows(x_NE)
        for block, output, inverse in zip(
            x_NE.split(size), output_NE.split(size), inverse_N1.split(size), strict=True
        ):
            exact = block.to(torch.float32)
            inverse.copy_(torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + epsilon))
            torch.mul(weight_E, (exact * inverse).to(x.dtype), out=output)
        ctx.save_for_backward(x_NE, weight_E, inverse_N1)
        return output_NE.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With n = x / rms and g = w dy: dx = (g - n mean(g n)) / rms, dw = sum of dy n."""
        x_NE, weight_E, inverse_N1 = ctx.saved_tensors
        grad_NE = torch.empty_like(x_NE)
        grad_weight = torch.zeros_like(weight_E, dtype=torch.float32)
        size = _rows(x_NE)
        blocks = (tensor.split(size) for tensor in (x_NE, inverse_N1, gradient.reshape(x_NE.shape), grad_NE))
        for x, inverse, dy, dx in zip(*blocks, strict=True):
            normal = x.to(torch.float32) * inverse
            grad_weight += (dy * normal).sum(dim=0)
            scaled = dy.to(torch.float32) * weight_E
            dx.copy_(scaled.sub_(normal.mul_((scaled * normal).mean(-1, keepdim=True))).mul_(inverse))
        return grad_NE.view(gradient.shape), grad_weight.to(weight_E.dtype), None


class _SwiGlu(torch.autograd.Function):
    """y = silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        output = torch.empty_like(up)
        size = _rows(up)
        for g, u, y in zip(
            *(tensor.flatten(0, -2).split(size) for tensor in (gate, up, output)), strict=True
        ):
            torch.mul(silu(g), u, out=y)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """d up = silu(gate) dy, d gate = silu'(gate) up dy."""
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        size = _rows(up)
        tensors = (gate, up, gradient.contiguous(), grad_gate, grad_up)
        for g, u, dy, dg, du in zip(*(tensor.flatten(0, -2).split(size) for tensor in tensors), strict=True):
            torch.mul(silu(g), dy, out=du)
            dg.copy_(torch.ops.aten.silu_backward(dy * u, g))
        return grad_gate, grad_up


# The forward pass of Llama and Qwen models for a few rows on CPU, without autograd: what a decoding step
# runs.
#
# With a few dozen rows the modules' own small operations cost as much as the products. Here the projections
# that read one input are one product, their weights lie in the layout that the CPU's matrix kernels read, and
# queries and keys are rotated in one operation.
#
# Shape letters: N rows, E hidden size, F intermediate size, H query heads, K key-value heads, D head size.


MAX_ROWS = 256  # above, the products dominate

Norm = Callable[[Tensor], Tensor]


class _Linear:
    """One or several linear layers of one input, side by side, with packed weights."""

    def __init__(self, *linears: nn.Linear) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._packed = pack(weight)

    def __call__(self, rows: Tensor) -> Tensor:
        return packed_linear(rows, self._packed, self._bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    attention: Any
    before_attention: Norm
    query_key_value: _Linear
    head_norms: tuple[Norm, Norm] | None
    output: _Linear
    before_mlp: Norm
    gate_up: _Linear
    down: _Linear


class FewRows:
    """Runs up to ``MAX_ROWS`` tokens through a supported model; :meth:`drop` forgets the packed weights when
    they have moved.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._layers: list[_Layer] | None = None
        self._head: _Linear | None = None

    @property
    def is_supported(self) -> bool:
        """Whether the model as it is now can be run here; its modules may be replaced at any time
        (adapters).
        """
        return _is_supported(self._model)

    def drop(self) -> None:
        """Forget the copies: the weights moved, or their memory is needed."""
        self._layers = self._head = None

    @torch.no_grad()
    def logits(self, ids_BN: Tensor, positions_BN: Tensor, plan: Plan) -> Tensor:
        """[B, N, V] for ids and positions; attention follows ``plan``. The packed copies are made at the
        first call.
        """
        backbone = self._model.base_model
        if self._layers is None:
            self._layers = [_packed(layer) for layer in backbone.layers]
            self._head = _Linear(self._model.get_output_embeddings())
        states = backbone.embed_tokens(ids_BN)
        cos, sin = backbone.rotary_emb(states, positions_BN)
        # The embedding repeats its angles for the second half of a head.
        half = cos.shape[-1] // 2
        rotation = cos[:, :, None, :half], sin[:, :, None, :half]
        for layer in self._layers:
            states = states + _attention(layer, layer.before_attention(states), rotation, plan)
            gate, up = layer.gate_up(layer.before_mlp(states)).chunk(2, dim=-1)
            states = states + layer.down(silu(gate).mul_(up))
        assert self._head is not None
        return self._head(_norm_rows(backbone.norm)(states))


def _attention(layer: _Layer, rows: Tensor, rotation: tuple[Tensor, Tensor], plan: Plan) -> Tensor:
    module = layer.attention
    heads, key_heads = module.config.num_attention_heads, module.config.num_key_value_heads
    mixed = layer.query_key_value(rows).view(*rows.shape[:-1], heads + 2 * key_heads, module.head_dim)
    turned, value = mixed.split((heads + key_heads, key_heads), dim=2)
    if layer.head_norms is not None:  # Qwen3
        query, key = turned.split((heads, key_heads), dim=2)
        turned = torch.cat([layer.head_norms[0](query), layer.head_norms[1](key)], dim=2)
    query, key = _rotate_rows(turned, *rotation).split((heads, key_heads), dim=2)
    seen = plan.attend(
        module, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), module.scaling
    )
    return layer.output(seen.reshape(*rows.shape[:-1], -1))


def _rotate_rows(x_BNHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a cos - b sin, b cos + a sin) for the two halves of every head."""
    first, second = x_BNHD.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _norm_rows(module: Any) -> Norm:
    weight, epsilon = module.weight.detach(), module.variance_epsilon

    def normalised(x: Tensor) -> Tensor:
        # In float32, and rounded before the weight, as the modules do.
        exact = x.to(torch.float32)
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True).add_(epsilon))
        return (exact * scale).to(x.dtype).mul_(weight)

    return normalised


def _packed(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = (
        (_norm_rows(attention.q_norm), _norm_rows(attention.k_norm))
        if type(attention).__name__ == "Qwen3Attention"
        else None
    )
    return _Layer(
        attention=attention,
        before_attention=_norm_rows(layer.input_layernorm),
        query_key_value=_Linear(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=head_norms,
        output=_Linear(attention.o_proj),
        before_mlp=_norm_rows(layer.post_attention_layernorm),
        gate_up=_Linear(mlp.gate_proj, mlp.up_proj),
        down=_Linear(mlp.down_proj),
    )


def _is_supported(model: PreTrainedModel) -> bool:
    """Exactly the fused modules of these families, plain linear layers (no adapters), on a CPU that has the
    kernels.
    """
    backbone: Any = model.base_model
    head = model.get_output_embeddings()
    if type(backbone).__name__ not in ("LlamaModel", "Qwen2Model", "Qwen3Model"):
        return False
    every = [module for layer in backbone.layers for module in layer.modules()]
    norms = [backbone.norm, *(module for module in every if type(module).__name__ in NORMS)]
    # The projections themselves and not their leaves: an adapter wraps a plain layer and lends its weight.
    projections = [getattr(layer.self_attn, f"{name}_proj") for layer in backbone.layers for name in "qkvo"]
    projections += [
        getattr(layer.mlp, f"{name}_proj") for layer in backbone.layers for name in ("gate", "up", "down")
    ]
    linears = [head, *projections]
    return (
        all(
            type(linear) is nn.Linear
            and linear.weight.device.type == "cpu"
            and linear.weight.dtype in _DTYPES
            for linear in linears
        )
        and all(can_pack(dtype) for dtype in {linear.weight.dtype for linear in linears})
        and all(
            type(layer.mlp).__name__ in MLPS and "forward" in vars(layer.mlp) for layer in backbone.layers
        )
        and all(type(layer.self_attn).__name__ in ATTENTIONS for layer in backbone.layers)
        and all("forward" in vars(norm) for norm in norms)
        and 2 * len(backbone.rotary_emb.inv_freq) == backbone.layers[0].self_attn.head_dim
    )


_DTYPES = (torch.float32, torch.bfloat16)
