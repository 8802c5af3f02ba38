"""Faster CPU forms of the modules of Llama and Qwen models, with the same values.

Packed weights are in oneDNN's own layout; they need the only private operators of torch that Outrider calls.
Not every processor and build of torch has them, so callers check :func:`can_pack` and have a plain fallback.
Tests replace :func:`can_pack`, so that both paths run on each machine.

Shape letters: B rows, N tokens of a row or rows, H query heads, K key-value heads, D head size, E hidden
size, F intermediate size.
"""

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.engines.local.attention import IMPLEMENTATION, Plan, prefers_products
from outrider.engines.local.processor import read_processor

ATTENTIONS = ("LlamaAttention", "Qwen2Attention", "Qwen3Attention")
NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
MLPS = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP")
MAX_ROWS = 256  # of packed layers; with more rows the product itself takes most of the time
_MIN_ROWS = 2
_NUM_ROWS_HINT = 32
_NUM_IN, _NUM_OUT = 32, 48  # of the layer that can_pack tries
_DTYPES = (torch.float32, torch.bfloat16)
_MIN_WEIGHT = 2**16  # elements of a weight whose products oneDNN computes: below, calls take most of the time
_MAX_OUTPUTS = 8192  # of one product
_ROW_STEP = 64
_ROTARY_BLOCK = 2**16  # elements of a block per thread: several fit its second-level cache
_FUSED_BLOCK = 2**18  # elements of a block: 1 MiB in float32, several of which fit the second-level cache

Norm = Callable[[Tensor], Tensor]


# --- Products without packed weights ---


@cache
def prefers_onednn() -> bool:
    """Whether float32 products of large weights are computed by oneDNN instead of torch's BLAS, which is half
    as fast on some processors (``python benchmarks/machine.py``). The choice depends on the processor and the
    weight only, so that the same run always uses the same kernels.
    """
    if not read_processor().lacks_blas or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    rows, weight = (
        torch.linspace(-1.0, end, 12, dtype=torch.float32, device="cpu").view(3, 4) for end in (1.0, 2.0)
    )
    try:
        return torch.allclose(_onednn(rows, weight), rows @ weight.T) and torch.allclose(
            _onednn(rows.T, weight.T), rows.T @ weight
        )
    except (AttributeError, RuntimeError, TypeError):
        return False  # this torch has no such operator or another signature


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``rows`` [..., in] @ ``weight`` [out, in] transposed, plus ``bias``; differentiable once."""
    if not is_for_onednn(weight):
        return _at_least_two_rows(partial(nn.functional.linear, weight=weight, bias=bias), rows)
    output: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return output


def _at_least_two_rows(product: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Return ``product(rows)``; a single row of bfloat16 is computed twice.

    oneDNN may add the terms of a single row in another order than those of several, so a token would have
    other bits alone than in a batch and in the update.
    """
    if rows.numel() != rows.shape[-1] or not prefers_products(rows.device, rows.dtype):
        return product(rows)
    output = product(rows.reshape(1, -1).repeat(2, 1))[:1]
    return output.view(*rows.shape[:-1], output.shape[-1])


def linear_into(output_NO: Tensor, rows_NI: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Write :func:`linear` to given memory, without gradient."""
    if not is_for_onednn(weight):
        if len(rows_NI) > 1:
            torch.mm(rows_NI, weight.t(), out=output_NO)
        else:
            output_NO.copy_(_at_least_two_rows(partial(torch.mm, mat2=weight.t()), rows_NI))
        return output_NO if bias is None else output_NO.add_(bias)
    for part in _slices(len(weight)):
        output_NO[:, part] = _product(rows_NI, weight[part], None if bias is None else bias[part])
    return output_NO


def gradient_of_rows(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient [..., in] of the input of :func:`linear` for that of its output."""
    return _product(gradient, weight.t()) if is_for_onednn(weight) else gradient @ weight


def gradient_of_weight(gradient_NO: Tensor, rows_NI: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient [out, in] of the weight of :func:`linear`."""
    if not is_for_onednn(weight):
        return gradient_NO.t() @ rows_NI
    output = weight.new_empty(weight.shape)
    if not len(rows_NI):
        return output.zero_()
    rows_NI = _whole_rows(rows_NI)
    for part in _slices(len(weight)):
        output[part] = _onednn(_whole_rows(gradient_NO[:, part]).t(), rows_NI.t())
    return output


def is_for_onednn(weight: Tensor) -> bool:
    """Whether oneDNN computes the products with this weight."""
    return (
        weight.numel() >= _MIN_WEIGHT
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and prefers_onednn()
    )


def _slices(num_outputs: int) -> Iterator[slice]:
    # of a vocabulary: temporary copies of all logits would be as large as the logits
    return (slice(start, start + _MAX_OUTPUTS) for start in range(0, num_outputs, _MAX_OUTPUTS))


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows_NI = rows.reshape(-1, rows.shape[-1])
    output = _onednn(_whole_rows(rows_NI), weight, bias)[: len(rows_NI)]
    return output.view(*rows.shape[:-1], len(weight))


def _whole_rows(rows: Tensor) -> Tensor:
    """Append rows of zeros, because oneDNN keeps the code that it generates for each number of rows."""
    more = -len(rows) % _ROW_STEP if len(rows) > _ROW_STEP else 0
    return nn.functional.pad(rows, (0, 0, 0, more)) if more else rows


def _onednn(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()
    output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return output


class _Linear(torch.autograd.Function):
    """y = x W^T + b, whose two gradients are products of the same kind."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
        return _product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad_NO = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient_of_rows(gradient, weight) if ctx.needs_input_grad[0] else None,
            gradient_of_weight(grad_NO, rows.reshape(-1, rows.shape[-1]), weight)
            if ctx.needs_input_grad[1]
            else None,
            grad_NO.sum(dim=0) if ctx.needs_input_grad[2] else None,
        )


class _ForwardLinear:
    """The forward of a linear layer, without a reference that would keep its weight alive."""

    def __init__(self, module: nn.Linear) -> None:
        self._module = weakref.ref(module)

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 (the name in nn.Linear)
        module = self._module()
        assert module is not None
        return linear(input, module.weight, module.bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ForwardLinear":
        copied: Any = copy.deepcopy(self._module(), memo)
        return _ForwardLinear(copied)


# --- Packed weights ---


def pack(weight: Tensor) -> Tensor:
    """Copy ``weight`` [out, in] to the layout of :func:`packed_linear`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _NUM_ROWS_HINT)
    return packed


def packed_linear(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return [..., out] for ``rows`` [..., in] and a weight from :func:`pack`."""

    def product(rows: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
        return output

    return _at_least_two_rows(product, rows)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether packed layers of this precision work here, found by running a small one.

    For bfloat16 oneDNN requires AVX-512 (BW, VL, DQ) or AVX-NE-CONVERT, subject to ``ONEDNN_MAX_CPU_ISA``.
    """
    rows = torch.linspace(-1.0, 1.0, 4 * _NUM_IN).view(4, _NUM_IN).to(dtype)
    weight = torch.linspace(-0.5, 1.0, _NUM_OUT * _NUM_IN).view(_NUM_OUT, _NUM_IN).to(dtype)
    try:
        output = packed_linear(rows, pack(weight), None)
    except (AttributeError, RuntimeError, TypeError):
        return False  # this torch has no such operator or another signature, or the processor lacks it
    return torch.allclose(output.float(), rows.float() @ weight.float().T, rtol=0.02, atol=0.02)


class PackedLinears:
    """Lets the plain linear layers of a CPU model use packed weights inside :meth:`active`.

    A decoding step multiplies a few dozen rows with every weight. Converting the weights costs as much as the
    product and is the same work in each step, so copies are kept for a generation. Does nothing if
    :func:`can_pack` is False.
    """

    def __init__(self, model: nn.Module) -> None:
        self._linears = [
            module
            for module in model.modules()
            if type(module) is nn.Linear
            and isinstance(vars(module).get("forward"), _ForwardLinear | None)
            and module.weight.device.type == "cpu"
            and module.weight.dtype in _DTYPES
            and can_pack(module.weight.dtype)
        ]
        self._packed: list[Tensor] | None = None

    def drop(self) -> None:
        """Drop the copies, because the weights changed or the memory is needed."""
        self._packed = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the copies, which are made at the first use after :meth:`drop`."""
        if self._packed is None:
            self._packed = [pack(linear.weight.detach()) for linear in self._linears]
        plain = [vars(module).get("forward") for module in self._linears]
        for module, packed in zip(self._linears, self._packed, strict=True):
            module.forward = partial(_forward_packed, module, packed)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for module, forward in zip(self._linears, plain, strict=True):
                with suppress(AttributeError):
                    del module.forward
                if forward is not None:
                    module.forward = forward  # type: ignore[method-assign]


def _forward_packed(module: nn.Linear, packed: Tensor, rows: Tensor) -> Tensor:
    if not _MIN_ROWS <= rows.numel() // rows.shape[-1] <= MAX_ROWS:
        return linear(rows, module.weight, module.bias)
    return packed_linear(rows, packed, module.bias)


# --- Modules of the Llama and Qwen families in blocks of rows. Elementwise operations on thousands of rows
# would stream every intermediate value through memory; a block stays in the processor's cache, and only
# inputs are stored for the backward pass. The forward passes run the operations of the transformers modules
# in their order and precision, so their values are the same bits. ---


def fuse(model: nn.Module) -> None:
    """Replace the forward of norms, gated MLPs and attention modules of exactly these formulas, and of large
    linear layers where another library multiplies faster.
    """
    for module in model.modules():
        kind = type(module).__name__
        if type(module) is nn.Linear and "forward" not in vars(module) and prefers_onednn():
            module.forward = _ForwardLinear(module)  # type: ignore[method-assign]
        if kind in NORMS:
            module.forward = MethodType(_norm, module)
        elif kind in MLPS and isinstance(module.act_fn, (nn.SiLU, SiLUActivation)):
            module.forward = MethodType(_gated_mlp, module)
        elif kind in ATTENTIONS:
            module.forward = MethodType(_attention, module)


def _attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: object | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The module's forward pass with the rotary embedding as one operation.

    Calls with transformers' caches or attention implementations use the original.
    """
    cos, sin = position_embeddings
    if (
        past_key_values is not None
        or self.config._attn_implementation != IMPLEMENTATION
        or cos.shape[-1] != self.head_dim
    ):
        output: tuple[Tensor, Tensor | None] = type(self).forward(
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
    """(a, b) -> (a cos - b sin, b cos + a sin) for the two halves of every head, with the cos and sin of the
    first half. Written with slices, the backward pass would allocate zeros for every slice.
    """

    @staticmethod
    def forward(ctx: Any, x_BNHD: Tensor, cos_BND: Tensor, sin_BND: Tensor) -> Tensor:
        half = x_BNHD.shape[-1] // 2
        size = (*x_BNHD.shape[:2], half)
        cos, sin = (tensor[..., :half].expand(size).reshape(-1, 1, half) for tensor in (cos_BND, sin_BND))
        ctx.save_for_backward(cos, sin)
        return _apply_rotary(x_BNHD, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # the transpose of a rotation is the inverse rotation
        cos, sin = ctx.saved_tensors
        return _apply_rotary(gradient, cos, -sin), None, None


def _apply_rotary(x_BNHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    output = torch.empty(x_BNHD.shape, dtype=x_BNHD.dtype, device=x_BNHD.device)
    # one block per thread
    rows = max(1, torch.get_num_threads() * _ROTARY_BLOCK // (x_BNHD.shape[2] * x_BNHD.shape[3]))
    tensors = (x_BNHD.flatten(0, 1), output.flatten(0, 1), cos, sin)
    for x, y, c, s in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
        (x_first, x_second), (first, second) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
        torch.mul(x_first, c, out=first).sub_(x_second * s)
        torch.mul(x_second, c, out=second).add_(x_first * s)
    return output


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    output: Tensor = _RmsNorm.apply(  # type: ignore[no-untyped-call]
        hidden_states, self.weight, self.variance_epsilon
    )
    return output


def _gated_mlp(self: Any, x: Tensor) -> Tensor:
    output: Tensor = self.down_proj(
        _SwiGlu.apply(self.gate_proj(x), self.up_proj(x))  # type: ignore[no-untyped-call]
    )
    return output


def _rows(tensor: Tensor) -> int:
    return max(1, _FUSED_BLOCK // tensor.shape[-1])


class _RmsNorm(torch.autograd.Function):
    """y = w * round(x / rms(x)), with the division in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_E: Tensor, epsilon: float) -> Tensor:
        x_NE = x.reshape(-1, x.shape[-1])
        output_NE = torch.empty_like(x_NE)
        # stored for the backward pass, always in float32: one number per row
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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
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
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        output = torch.empty_like(up)
        size = _rows(up)
        for g, u, y in zip(
            *(tensor.flatten(0, -2).split(size) for tensor in (gate, up, output)), strict=True
        ):
            torch.mul(silu(g), u, out=y)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """d up = silu(gate) dy, d gate = silu'(gate) up dy."""
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        size = _rows(up)
        tensors = (gate, up, gradient.contiguous(), grad_gate, grad_up)
        for g, u, dy, dg, du in zip(*(tensor.flatten(0, -2).split(size) for tensor in tensors), strict=True):
            torch.mul(silu(g), dy, out=du)
            dg.copy_(torch.ops.aten.silu_backward(dy * u, g))
        return grad_gate, grad_up


# --- The whole forward pass for a few rows without autograd, as in a decoding step. With a few dozen rows the
# modules' small operations cost as much as the products. Here projections with a common input are one product
# with packed weights, and queries and keys are rotated in one operation. ---


class _Projection:
    """One or several linear layers with a common input as one product with packed weights."""

    def __init__(self, *linears: nn.Linear) -> None:
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._packed = pack(torch.cat([linear.weight.detach() for linear in linears]))

    def __call__(self, rows: Tensor) -> Tensor:
        return packed_linear(rows, self._packed, self._bias)


class _Layer:
    """The packed weights of one layer."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._attention = attention
        self._query_key_value = _Projection(attention.q_proj, attention.k_proj, attention.v_proj)
        self._head_norms: tuple[Norm, Norm] | None = None
        if type(attention).__name__ == "Qwen3Attention":
            self._head_norms = _norm_rows(attention.q_norm), _norm_rows(attention.k_norm)
        self._output = _Projection(attention.o_proj)
        self.before_attention = _norm_rows(layer.input_layernorm)
        self.before_mlp = _norm_rows(layer.post_attention_layernorm)
        self.gate_up = _Projection(mlp.gate_proj, mlp.up_proj)
        self.down = _Projection(mlp.down_proj)

    def attend(self, rows: Tensor, cos: Tensor, sin: Tensor, plan: Plan) -> Tensor:
        module = self._attention
        heads, key_heads = module.config.num_attention_heads, module.config.num_key_value_heads
        mixed = self._query_key_value(rows).view(*rows.shape[:-1], heads + 2 * key_heads, module.head_dim)
        unrotated, value = mixed.split((heads + key_heads, key_heads), dim=2)
        if self._head_norms is not None:
            query, key = unrotated.split((heads, key_heads), dim=2)
            unrotated = torch.cat([self._head_norms[0](query), self._head_norms[1](key)], dim=2)
        first, second = unrotated.chunk(2, dim=-1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        query, key = (tensor.transpose(1, 2) for tensor in rotated.split((heads, key_heads), dim=2))
        seen = plan.attend(module, query, key, value.transpose(1, 2), module.scaling)
        return self._output(seen.reshape(*rows.shape[:-1], -1))


def _norm_rows(module: Any) -> Norm:
    weight, epsilon = module.weight.detach(), module.variance_epsilon

    def normalised(x: Tensor) -> Tensor:
        # in float32, and rounded before the multiplication by the weight, as in the modules
        exact = x.to(torch.float32)
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True).add_(epsilon))
        return (exact * scale).to(x.dtype).mul_(weight)

    return normalised


class FewRows:
    """Runs up to ``MAX_ROWS`` tokens through a supported model, with packed copies of its weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._layers: list[_Layer] | None = None
        self._head: _Projection | None = None

    @property
    def is_supported(self) -> bool:
        """Whether the model can run here in its current state; adapters may replace modules at any time.

        Requires exactly the fused modules of these families and plain linear layers, on a CPU that has the
        kernels.
        """
        backbone: Any = self._model.base_model
        if type(backbone).__name__ not in ("LlamaModel", "Qwen2Model", "Qwen3Model"):
            return False
        layers = backbone.layers
        modules = [module for layer in layers for module in layer.modules()]
        norms = [backbone.norm, *(module for module in modules if type(module).__name__ in NORMS)]
        # the projections themselves: an adapter wraps a plain linear layer and exposes its weight
        linears = [self._model.get_output_embeddings()]
        linears += [getattr(layer.self_attn, f"{name}_proj") for layer in layers for name in "qkvo"]
        linears += [getattr(layer.mlp, f"{name}_proj") for layer in layers for name in ("gate", "up", "down")]
        return (
            all(
                type(linear) is nn.Linear
                and linear.weight.device.type == "cpu"
                and linear.weight.dtype in _DTYPES
                for linear in linears
            )
            and all(can_pack(dtype) for dtype in {linear.weight.dtype for linear in linears})
            and all(type(layer.mlp).__name__ in MLPS and "forward" in vars(layer.mlp) for layer in layers)
            and all(type(layer.self_attn).__name__ in ATTENTIONS for layer in layers)
            and all("forward" in vars(norm) for norm in norms)
            and 2 * len(backbone.rotary_emb.inv_freq) == layers[0].self_attn.head_dim
        )

    def drop(self) -> None:
        """Drop the copies, because the weights changed or the memory is needed."""
        self._layers = self._head = None

    @torch.no_grad()
    def logits(self, ids_BN: Tensor, positions_BN: Tensor, plan: Plan) -> Tensor:
        """Return [B, N, V]; attention follows ``plan``. The copies are made at the first call."""
        backbone = self._model.base_model
        if self._layers is None:
            self._layers = [_Layer(layer) for layer in backbone.layers]
            self._head = _Projection(self._model.get_output_embeddings())
        states = backbone.embed_tokens(ids_BN)
        cos, sin = backbone.rotary_emb(states, positions_BN)
        # the embedding repeats its angles for the second half of a head
        half = cos.shape[-1] // 2
        cos, sin = cos[:, :, None, :half], sin[:, :, None, :half]
        for layer in self._layers:
            states = states + layer.attend(layer.before_attention(states), cos, sin, plan)
            gate, up = layer.gate_up(layer.before_mlp(states)).chunk(2, dim=-1)
            states = states + layer.down(silu(gate).mul_(up))
        assert self._head is not None
        return self._head(_norm_rows(backbone.norm)(states))
