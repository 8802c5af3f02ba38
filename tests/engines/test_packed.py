"""Packed weights: the plain layers' values while active, the plain layers themselves afterwards."""

import pytest
import torch
from torch import nn

from outrider.engines.local import cpu_kernels as onednn
from outrider.engines.local.cpu_kernels import PackedLinears


def layers(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 32), nn.SiLU(), nn.Linear(32, 64, bias=False)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
def test_values_are_those_of_the_plain_layers(dtype: torch.dtype, rows: int) -> None:
    model, x = layers(dtype), torch.randn(rows, 48).to(dtype)
    packed = PackedLinears(model)
    with torch.no_grad():
        plain = model(x)
        with packed.active():
            assert all(("forward" in vars(model[i])) == onednn.can_pack(dtype) for i in (0, 2))
            found = model(x)
        assert not any("forward" in vars(model[i]) for i in (0, 2))
        torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_operators_the_plain_layers_run(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor without the operators a bfloat16 model crashed at its first decoding step."""
    monkeypatch.setattr(onednn, "can_pack", lambda dtype: False)
    monkeypatch.setattr(onednn, "pack", None)  # called by nobody
    model, x = layers(dtype), torch.randn(7, 48).to(dtype)
    with torch.no_grad(), PackedLinears(model).active():
        assert not any("forward" in vars(model[i]) for i in (0, 2))
        found = model(x)
    assert torch.equal(found, model(x))


def test_moved_weights_count_once_the_copies_are_dropped() -> None:
    model, x = layers(torch.float32), torch.randn(5, 48)
    packed = PackedLinears(model)
    with torch.no_grad():
        with packed.active():
            before = model(x)
        model[0].weight.mul_(2.0)
        packed.drop()
        with packed.active():
            after = model(x)
        torch.testing.assert_close(after, model(x))
    assert not torch.allclose(before, after)


def test_the_plain_layers_come_back_after_an_error() -> None:
    model = layers(torch.float32)
    with pytest.raises(RuntimeError, match="stop"), PackedLinears(model).active():
        raise RuntimeError("stop")
    assert not any("forward" in vars(module) for module in model.modules())
