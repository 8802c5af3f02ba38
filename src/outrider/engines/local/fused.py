"""RMSNorm and SwiGLU of the Llama and Qwen families, a block of rows at a time on CPU.

Eager elementwise operations on thousands of rows stream every intermediate value through memory; a block that
stays in the processor's cache does not, and only inputs are kept for the backward pass. The forward pass does
the operations of the transformers modules in their order and precision, so its values are the same bits.

Shape letters: N rows, E hidden size, F intermediate size.
"""

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu
from transformers.activations import SiLUActivation

from outrider.engines.local.rotary import ATTENTIONS, attention

_BLOCK = 2**18  # elements of a block: 1 MiB in float32, several of which fit the second-level cache
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
    return max(1, _BLOCK // tensor.shape[-1])


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
