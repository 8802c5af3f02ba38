"""Adapters merged into the weights: what the folder of a run holds is the model that trains, under the names
of a model without adapters.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outrider.config import validate
from outrider.engines.base import VllmSettings
from outrider.engines.local.attention import Segment, TreePlan
from outrider.errors import ConfigError
from outrider.train.learning_settings import LoraSettings, OptimizerSettings
from outrider.train.settings import RunSettings
from outrider.train.update.adapters import merged
from outrider.train.update.policy import Policy
from tests.tiny import tiny_model


def moved(dtype: torch.dtype = torch.float32) -> Policy:
    """A policy whose adapters are far from where they began."""
    policy = Policy(tiny_model(dtype=dtype), OptimizerSettings(), lora=LoraSettings(rank=2, alpha=6))
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in policy.masters.values():
            master.add_(0.2 * torch.randn(master.shape, generator=dice))
    policy.round_masters()
    return policy


def test_the_folder_of_a_run_with_adapters_is_the_model_that_trains(tmp_path: Path) -> None:
    policy, plain = moved(), tiny_model()
    policy.export(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == dict(plain.model.named_parameters()).keys()
    ids, positions = torch.arange(5, 25), torch.arange(20)
    plan = TreePlan(segments=(Segment(length=20),))
    with torch.no_grad():
        ours = policy.language_model.logits(ids, positions, plan)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)(ids[None]).logits[0]
        before = plain.logits(ids, positions, plan)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    assert (ours - before).abs().max() > 0.1


def test_a_merged_weight_is_the_sum_in_float64_rounded_once() -> None:
    policy = moved(torch.bfloat16)
    found = merged(policy.model)
    layer = policy.model.model.layers[0].mlp.down_proj
    up, down = layer.lora_B["default"].weight.double(), layer.lora_A["default"].weight.double()
    wanted = layer.base_layer.weight.double() + 6 / 2 * up @ down
    name = "model.layers.0.mlp.down_proj.weight"
    assert found[name].dtype is torch.bfloat16
    apart = (found[name].double() - wanted).abs()
    assert bool((apart <= wanted.abs() * 2**-8).all())
    assert found["model.norm.weight"].data_ptr() == policy.model.model.norm.weight.data_ptr()


def test_an_engine_that_does_not_say_so_gets_no_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {
        "environment": {"type": "factbook"}, "algorithm": {"type": "grpo"}, "model": {"lora": {"rank": 2}},
        "engine": {"type": "vllm"},
    }  # fmt: skip
    validate(RunSettings, recipe)
    monkeypatch.setattr(VllmSettings, "takes_adapters", False)
    with pytest.raises(ConfigError, match=r"engine.type = vllm needs full fine-tuning"):
        validate(RunSettings, recipe)


@pytest.mark.parametrize("trained_layers", [None, 1])
def test_without_adapters_the_weights_are_the_model_s_own(trained_layers: int | None) -> None:
    policy = Policy(tiny_model(), OptimizerSettings(), trained_layers=trained_layers)
    own = dict(policy.model.named_parameters())
    assert {name: one.data_ptr() for name, one in merged(policy.model).items()} == {
        name: one.data_ptr() for name, one in own.items()
    }
