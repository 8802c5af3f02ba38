"""Weights of bfloat16 models that start at random places of their rounding intervals."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from outrider.distributed.fsdp import first_row, local
from outrider.training.adapters import merge_adapters
from outrider.training.policy import Policy
from outrider.training.rounding import dither
from outrider.training.settings import LoraSettings, OptimizerSettings
from tests.tiny import tiny_model


def dithered(weights: torch.Tensor, seed: int = 0, name: str = "weight", first_row: int = 0) -> torch.Tensor:
    masters = weights.float().clone()
    dither(masters, name, seed=seed, first_row=first_row)
    return masters


@given(st.integers(0, 2**16 - 1), st.integers(0, 2**31))
def test_masters_start_where_they_round_to_the_weights(pattern: int, seed: int) -> None:
    """Any value of bfloat16, also next to powers of two and to zero; other values stay where they are."""
    weights = torch.tensor([pattern], dtype=torch.int32).to(torch.int16).view(torch.bfloat16).expand(64)
    masters = dithered(weights, seed)
    assert torch.equal(masters.bfloat16().view(torch.int16), weights.view(torch.int16)) or weights[0].isnan()
    stays = weights[0] == 0 or not weights[0].isfinite()
    assert len(masters.view(torch.int32).unique()) == 1 if stays else len(masters.unique()) > 32
    between = masters[masters != weights.float()]
    assert dithered(between, seed + 1).view(torch.int32).equal(between.view(torch.int32))
    assert stays or not dithered(weights, seed, "other").equal(masters)


def test_places_are_spread_evenly_and_are_independent() -> None:
    weights = torch.full((512, 512), -1.5)
    offsets = [
        (dithered(weights, seed, name).view(torch.int32) - weights.view(torch.int32)).double() / 2**16
        for seed, name in ((0, "a"), (0, "b"), (1, "a"))
    ]
    for one in offsets:
        assert float(one.abs().max()) < 0.5
        counts = torch.histc(one, bins=16, min=-0.5, max=0.5)
        assert float((counts - 2**14).abs().max()) < 5 * 2**7
        for other in (one.roll(1, 0), one.roll(1, 1), one.T, *(o for o in offsets if o is not one)):
            assert abs(float((one * other).mean())) < 5 / 12 / 2**9  # standard deviations


def test_a_part_has_the_places_of_the_whole() -> None:
    weights = torch.randn(7, 3, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = dithered(weights)
    for first in range(7):
        assert dithered(weights[first:], first_row=first).equal(whole[first:])
    transposed = weights.float().transpose(0, 2).clone(memory_format=torch.preserve_format)
    dither(transposed, "weight", seed=0)  # by positions, whatever the order in memory
    assert transposed.equal(dithered(weights.transpose(0, 2).contiguous()))
    assert dithered(torch.tensor(1.5)).item() == dithered(torch.tensor([1.5])).item()


@pytest.mark.parametrize("rank", range(3))
def test_shards_of_fsdp2_have_the_places_of_the_whole(rank: int) -> None:
    """Also with fewer rows than ranks, and with an uneven last shard."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    try:
        mesh = init_device_mesh("cpu", (3,))
        for num_rows in (7, 5, 3, 2, 1):
            dice = torch.Generator().manual_seed(num_rows)
            weights = torch.randn(num_rows, 4, generator=dice).bfloat16().float()
            shard = distribute_tensor(weights.clone(), mesh, [Shard(0)], src_data_rank=None)
            dither(local(shard), "weight", seed=0, first_row=first_row(shard))
            chunks = dithered(weights).chunk(3)
            wanted = chunks[rank] if rank < len(chunks) else weights[:0]
            assert local(shard).equal(wanted)
    finally:
        dist.destroy_process_group()


def test_a_small_change_by_an_adapter_reaches_the_merged_weights() -> None:
    """Engines in other processes and exported folders have them."""
    lora = LoraSettings(rank=2, alpha=2)
    policy = Policy(tiny_model(dtype=torch.bfloat16), OptimizerSettings(), lora=lora)
    layers = {
        f"{name}.weight": layer for name, layer in policy.model.named_modules() if hasattr(layer, "lora_A")
    }
    bases = {name: layer.base_layer.weight.detach().clone() for name, layer in layers.items()}
    merged = merge_adapters(policy.model)
    assert layers and all(merged[name].equal(base) for name, base in bases.items())  # B is zero
    changes = {}
    with torch.no_grad():
        for name, layer in layers.items():
            layer.lora_B["default"].weight.fill_(1e-4)
            changes[name] = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    merged = merge_adapters(policy.model)

    def share(rounded: dict[str, torch.Tensor]) -> tuple[float, float]:
        """The share of the change that arrives, and its standard error."""
        moved = {name: rounded[name].double() - base.double() for name, base in bases.items()}
        products = torch.cat([(moved[name] * change).flatten() for name, change in changes.items()])
        squares = sum(float((change * change).sum()) for change in changes.values())
        return float(products.sum()) / squares, float(products.std()) * len(products) ** 0.5 / squares

    arrived, error = share(merged)
    assert error < 0.1 and arrived == pytest.approx(1.0, abs=4 * error)
    nearest, _ = share({name: (bases[name].double() + changes[name]).bfloat16() for name in layers})
    assert nearest < 0.5
