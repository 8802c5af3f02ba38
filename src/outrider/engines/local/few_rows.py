"""The forward pass of Llama and Qwen models for a few rows on CPU, without autograd: what a decoding step
runs.

With a few dozen rows the modules' own small operations cost as much as the products. Here the projections
that read one input are one product, their weights lie in the layout that the CPU's matrix kernels read, and
queries and keys are rotated in one operation.

Shape letters: N rows, E hidden size, F intermediate size, H query heads, K key-value heads, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from outrider.engines.local import onednn
from outrider.engines.local.attention import Plan
from outrider.engines.local.fused import MLPS, NORMS
from outrider.engines.local.rotary import ATTENTIONS

MAX_ROWS = 256  # above, the products dominate

Norm = Callable[[Tensor], Tensor]


class _Linear:
    """One or several linear layers of one input, side by side, with packed weights."""

    def __init__(self, *linears: nn.Linear) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._packed = onednn.pack(weight)

    def __call__(self, rows: Tensor) -> Tensor:
        return onednn.packed_linear(rows, self._packed, self._bias)


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
        return self._head(_norm(backbone.norm)(states))


def _attention(layer: _Layer, rows: Tensor, rotation: tuple[Tensor, Tensor], plan: Plan) -> Tensor:
    module = layer.attention
    heads, key_heads = module.config.num_attention_heads, module.config.num_key_value_heads
    mixed = layer.query_key_value(rows).view(*rows.shape[:-1], heads + 2 * key_heads, module.head_dim)
    turned, value = mixed.split((heads + key_heads, key_heads), dim=2)
    if layer.head_norms is not None:  # Qwen3
        query, key = turned.split((heads, key_heads), dim=2)
        turned = torch.cat([layer.head_norms[0](query), layer.head_norms[1](key)], dim=2)
    query, key = _rotated(turned, *rotation).split((heads, key_heads), dim=2)
    seen = plan.attend(
        module, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), module.scaling
    )
    return layer.output(seen.reshape(*rows.shape[:-1], -1))


def _rotated(x_BNHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a cos - b sin, b cos + a sin) for the two halves of every head."""
    first, second = x_BNHD.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _norm(module: Any) -> Norm:
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
        (_norm(attention.q_norm), _norm(attention.k_norm))
        if type(attention).__name__ == "Qwen3Attention"
        else None
    )
    return _Layer(
        attention=attention,
        before_attention=_norm(layer.input_layernorm),
        query_key_value=_Linear(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=head_norms,
        output=_Linear(attention.o_proj),
        before_mlp=_norm(layer.post_attention_layernorm),
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
        and all(onednn.can_pack(dtype) for dtype in {linear.weight.dtype for linear in linears})
        and all(
            type(layer.mlp).__name__ in MLPS and "forward" in vars(layer.mlp) for layer in backbone.layers
        )
        and all(type(layer.self_attn).__name__ in ATTENTIONS for layer in backbone.layers)
        and all("forward" in vars(norm) for norm in norms)
        and 2 * len(backbone.rotary_emb.inv_freq) == backbone.layers[0].self_attn.head_dim
    )


_DTYPES = (torch.float32, torch.bfloat16)
