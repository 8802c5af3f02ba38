"""Flex attention of a tree: its forward pass is that of the reference, for any tree that is packed depth
first; it has no backward pass on a CPU. Runs on one H200 trained with it (docs/gpu.md).
"""

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from outrider.engines.local import attention as flex
from outrider.engines.local.attention import BLOCK, LEAST_POSITIONS, FlexPlan, Segment, TreePlan, bucket
from outrider.errors import ModelError
from outrider.training.packing import pack
from outrider.training.update import rollout_paths
from tests.distributed.groups import groups

SCALE = 0.3
CPU = torch.device("cpu")
GAP = 1e-5


@st.composite
def plans(draw: st.DrawFn) -> TreePlan:
    """Depth first: the parent of a segment is the one before, or one of its ancestors."""
    segments: list[Segment] = []
    for index in range(draw(st.integers(1, 5))):
        line = (*segments[-1].ancestors, index - 1) if segments else ()
        depth = draw(st.integers(0, len(line)))
        length = draw(st.sampled_from((1, 3, 60, BLOCK, BLOCK + 1, 200)))
        segments.append(Segment(length=length, ancestors=line[:depth]))
    return TreePlan(segments=tuple(segments))


def inputs(num_tokens: int, num_heads: int = 4) -> list[Tensor]:
    dice = torch.Generator().manual_seed(num_tokens)
    shapes = ((1, num_heads, num_tokens, 16), *[(1, 2, num_tokens, 16)] * 2)
    return [torch.randn(shape, generator=dice) for shape in shapes]


@given(plan=plans(), num_heads=st.sampled_from((2, 4)))
def test_the_forward_pass_is_the_reference_s(plan: TreePlan, num_heads: int) -> None:
    given_ = inputs(sum(segment.length for segment in plan.segments), num_heads)
    wanted = plan.attend(nn.Identity(), *given_, SCALE)
    found = FlexPlan.from_plan(plan, device=CPU).attend(nn.Identity(), *given_, SCALE)
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= GAP


@given(plan=plans())
def test_whole_blocks_are_whole_and_nothing_is_left_out(plan: TreePlan) -> None:
    """A kernel asks the mask in partial blocks only, and no block that is not listed."""
    made = FlexPlan.from_plan(plan, device=CPU)
    length = made.num_positions
    place = torch.arange(length)
    seen = made.mask.mask_mod(torch.tensor(0), torch.tensor(0), place[:, None], place[None])
    blocks = seen.view(length // BLOCK, BLOCK, length // BLOCK, BLOCK).permute(0, 2, 1, 3).flatten(2)
    mask = made.mask
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    for query in range(length // BLOCK):
        whole = mask.full_kv_indices[0, 0, query, : mask.full_kv_num_blocks[0, 0, query]].tolist()
        part = mask.kv_indices[0, 0, query, : mask.kv_num_blocks[0, 0, query]].tolist()
        assert not {*whole} & {*part}
        assert all(bool(blocks[query, key].all()) for key in whole)
        listed = {*whole, *part}
        assert {key for key in range(length // BLOCK) if bool(blocks[query, key].any())} <= listed
        assert bool(seen.any(dim=1).all())


def test_the_update_packs_depth_first() -> None:
    for batch in pack(rollout_paths(groups(4, longest=20)), max_tokens=200):
        num_tokens = len(batch.ids_N)
        given_ = inputs(num_tokens)
        wanted = batch.plan.attend(nn.Identity(), *given_, SCALE)
        found = FlexPlan.from_plan(batch.plan, device=CPU).attend(nn.Identity(), *given_, SCALE)
        assert float((found - wanted).abs().max()) <= GAP


def test_another_order_is_refused() -> None:
    fork = Segment(length=2, ancestors=(0,))
    plan = TreePlan(segments=(Segment(length=2), Segment(length=2), fork))
    with pytest.raises(ValueError, match="depth-first"):
        FlexPlan.from_plan(plan, device=CPU)


def test_a_run_compiles_as_often_as_there_are_lengths() -> None:
    lengths = sorted({bucket(num) for num in range(1, 65_537)})
    assert len(lengths) == 7 and lengths[-1] == 65_536
    assert all(2 * one == other for one, other in pairwise(lengths))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel and its backward pass need a GPU")
def test_on_a_gpu_values_and_gradients_are_the_reference_s() -> None:
    root = Segment(length=150)
    forks = [Segment(length=length, ancestors=(0,)) for length in (60, 200, 3)]
    plan = TreePlan(segments=(root, *forks, Segment(length=40)))
    device = torch.device("cuda")
    exact = [one.bfloat16().double().requires_grad_() for one in inputs(453)]
    ours = [one.detach().to(device, torch.bfloat16).requires_grad_() for one in exact]
    wanted = plan.attend(nn.Identity(), *exact, SCALE)
    found = FlexPlan.from_plan(plan, device=device).attend(nn.Identity(), *ours, SCALE)
    outer = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted.backward(outer.double())
    found.backward(outer.to(device))
    for one, other in zip([found, *(q.grad for q in ours)], [wanted, *(q.grad for q in exact)], strict=True):
        assert one is not None and other is not None
        assert float((one.double().cpu() - other).norm()) <= 0.02 * float(other.norm())


def test_other_devices_compile_once_for_fixed_lengths() -> None:
    flex._attention.cache_clear()
    with patch.object(torch, "compile", return_value=len) as compiled:
        assert flex._attention("cuda") is flex._attention("cuda") is len
    compiled.assert_called_once_with(flex.flex_attention, dynamic=False)
    flex._attention.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The compiled call with a compiler that only counts; the sizes of what it compiled."""
    sizes: list[int] = []

    def count(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        sizes.append(max(one.shape[-2] for one in examples if one.dim() == 4))
        return graph.forward

    torch._dynamo.reset()
    program = torch.compile(flex.flex_attention, dynamic=False, backend=count)
    monkeypatch.setattr(flex, "_attention", lambda device: program)
    yield sizes
    torch._dynamo.reset()


def attend(num_tokens: int, *, has_gradient: bool, num_heads: int = 4) -> None:
    plan = FlexPlan.from_plan(TreePlan(segments=(Segment(length=num_tokens),)), device=CPU)
    with torch.set_grad_enabled(has_gradient):
        for _ in range(2):  # as two layers do
            plan.attend(nn.Identity(), *inputs(num_tokens, num_heads), SCALE)


@pytest.mark.long
def test_each_octave_is_compiled_once_with_and_once_without_gradient(compiled: list[int]) -> None:
    """Row lengths up to 4,096, for two kinds of layers: torch's own limit is 8 programs."""
    lengths = [BLOCK * number - 5 for number in (1, 8, 9, 16, 20)]
    for num_tokens, has_gradient, num_heads in product(lengths, (False, True), (2, 4)):
        attend(num_tokens, has_gradient=has_gradient, num_heads=num_heads)
    assert sorted(compiled) == sorted([1024, 2048, 4096] * 4)
    attend(700, has_gradient=True, num_heads=2)
    assert len(compiled) == 12


def test_layers_of_other_sizes_have_programs_of_their_own(compiled: list[int]) -> None:
    for num_heads in range(2, 20, 2):  # torch alone allows 8 programs
        attend(100, has_gradient=False, num_heads=num_heads)
    assert len(compiled) == 9


def test_too_many_programs_are_an_error_and_no_slow_fallback(
    compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "_LIMITS", {**flex._LIMITS, "recompile_limit": 2})
    attend(100, has_gradient=False)
    attend(1100, has_gradient=False)
    with pytest.raises(ModelError, match=r"update\.attention=segments"):
        attend(2100, has_gradient=False)
    assert len(compiled) == 2


@given(num_tokens=st.integers(1, 1 << 20))
def test_a_row_is_padded_to_the_next_power_of_two(num_tokens: int) -> None:
    length = bucket(num_tokens)
    assert num_tokens <= length < max(2 * num_tokens, LEAST_POSITIONS + 1)
    assert length % BLOCK == 0 and length & (length - 1) == 0
