"""Attention over a packed training row: exact for any tree of segments; neighbours of one shape are one
call.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.engines.local.attention import Segment, TreePlan
from tests.engines.test_fused import written_out

SCALE = 0.3


@st.composite
def plans(draw: st.DrawFn) -> TreePlan:
    """Forks of forks, sequences of one segment, and both; few lengths, so that shapes repeat."""
    segments: list[Segment] = []
    for index in range(draw(st.integers(1, 7))):
        parent = draw(st.integers(-1, index - 1))
        ancestors = (*segments[parent].ancestors, parent) if parent >= 0 else ()
        segments.append(Segment(length=draw(st.integers(1, 3)), ancestors=ancestors))
    return TreePlan(segments=tuple(segments))


def inputs(num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value as a model hands them over: heads moved before tokens."""
    torch.manual_seed(0)
    shapes = ((1, num_tokens, 6, 8), *[(1, num_tokens, 2, 8)] * 2)
    return [torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def segment_by_segment(plan: TreePlan, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    bounds = torch.tensor([0, *(segment.length for segment in plan.segments)]).cumsum(0).tolist()
    tokens = [torch.arange(bounds[i], bounds[i + 1]) for i in range(len(plan.segments))]
    outputs = []
    for index, segment in enumerate(plan.segments):
        seen = torch.cat([tokens[i] for i in (*segment.ancestors, index)])
        outputs.append(written_out(query[:, :, tokens[index]], key[:, :, seen], value[:, :, seen], SCALE))
    return torch.cat(outputs, dim=2).transpose(1, 2)


@given(plan=plans(), dtype=st.sampled_from([torch.float64, torch.bfloat16]))
def test_any_tree_of_segments_equals_a_written_out_softmax(plan: TreePlan, dtype: torch.dtype) -> None:
    """Values and gradients; in bfloat16, whose backward pass is of plain products, within 5 % in the
    norm.
    """
    ours = inputs(sum(segment.length for segment in plan.segments), dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    found, wanted = plan.attend(nn.Identity(), *ours, SCALE), segment_by_segment(plan, *exact)
    outer = torch.randn_like(found)
    found.backward(outer)
    wanted.backward(outer.double())
    limit = 1e-10 if dtype == torch.float64 else 0.05
    pairs = zip(
        [found, *(tensor.grad for tensor in ours)], [wanted, *(tensor.grad for tensor in exact)], strict=True
    )
    for one, other in pairs:
        assert one is not None and other is not None and one.shape == other.shape
        assert float((one.double() - other).detach().norm()) <= limit * max(1.0, float(other.detach().norm()))


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize(
    ("lengths", "ancestors", "wanted"),
    [
        ((5, 5, 5, 5), ((), (), (), ()), 1),  # nothing shared, equal rows
        ((5, 5, 3, 4), ((), (), (), ()), 3),
        ((9, 4, 4, 4, 9, 4), ((), (0,), (0,), (0,), (), (4,)), 4),  # two groups with a prompt each
        ((5, 5, 5), ((), (), (1,)), 3),  # the second has a child
    ],
)
def test_neighbours_of_one_shape_are_one_call(
    lengths: tuple[int, ...], ancestors: tuple[tuple[int, ...], ...], wanted: int
) -> None:
    """Before, every segment of every layer was a call of its own, which also left threads without
    work.
    """
    segments = tuple(
        Segment(length=one, ancestors=before) for one, before in zip(lengths, ancestors, strict=True)
    )
    tensors = inputs(sum(lengths), torch.float32)
    with Calls() as calls:
        TreePlan(segments=segments).attend(nn.Identity(), *tensors, SCALE).sum().backward()
    forward = [name for name in calls.counts if "attention" in name and "backward" not in name]
    assert sum(calls.counts[name] for name in forward) == wanted
    if wanted == 1:
        # rows that are equal lie in the batch's layout already
        assert not {"cat", "copy_", "clone"} & set(calls.counts)
