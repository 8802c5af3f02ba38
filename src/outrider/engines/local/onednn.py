"""Linear layers on weights in oneDNN's own layout: the only private operators of torch that are called.

Not every processor can run them, nor does every build of torch have them: whoever calls asks :func:`can_pack`
first and has a plain way beside. Tests replace :func:`can_pack`, so that each machine takes both.
"""

from functools import cache

import torch
from torch import Tensor

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
