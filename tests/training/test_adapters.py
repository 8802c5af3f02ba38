"""Adapters merged into the weights: the exported folder is the model that trains, with the names of a
model without adapters.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from docsite.models import ARCHITECTURES
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import Linear
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FalconConfig, FalconForCausalLM

from outrider.config import validate
from outrider.engines.base import VllmSettings
from outrider.engines.local.attention import Segment, TreePlan
from outrider.engines.local.model import load_model
from outrider.errors import ConfigError, ModelError
from outrider.files import replacing_folder
from outrider.training.adapters import choose_trained, coverage, merge_adapters
from outrider.training.policy import Policy
from outrider.training.settings import LoraSettings, OptimizerSettings, RunSettings
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
    found = merge_adapters(policy.model)
    layer = policy.model.model.layers[0].mlp.down_proj
    up, down = layer.lora_B["default"].weight.double(), layer.lora_A["default"].weight.double()
    wanted = layer.base_layer.weight.double() + 6 / 2 * up @ down
    name = "model.layers.0.mlp.down_proj.weight"
    assert found[name].dtype is torch.bfloat16
    apart = (found[name].double() - wanted).abs()
    base = layer.base_layer.weight.double()
    assert bool((apart <= (wanted.abs() + base.abs()) * 2**-8).all())  # half an interval of each
    assert found["model.norm.weight"].data_ptr() == policy.model.model.norm.weight.data_ptr()


def test_an_engine_without_support_for_adapters_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert {name: one.data_ptr() for name, one in merge_adapters(policy.model).items()} == {
        name: one.data_ptr() for name, one in own.items()
    }


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("q_proj", "v_porj"), r"the model has no v_porj, did you mean v_proj\?"),
        (("query_key_value",), r"the model has no query_key_value; it has self_attn\.q_proj"),
        (("mlp.q_proj",), r"the model has no mlp\.q_proj"),
        (("model",), r"model\.lora\.target_modules: "),  # what peft cannot adapt
        (("norm",), r"model\.lora\.target_modules: "),
    ],
)
def test_names_that_fit_nothing_are_an_error_of_one_line(targets: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ModelError, match=expected) as caught:
        Policy(tiny_model(), OptimizerSettings(), lora=LoraSettings(target_modules=targets))
    assert "\n" not in str(caught.value)


def test_many_names_one_of_which_fits_nothing() -> None:
    """peft shortens long lists, after which the wrong one is no longer there."""
    names = tuple(
        f"layers.{layer}.{part}"
        for layer in (0, 1)
        for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
    )
    wrong = (*names, *(f"layers.{number}.mlp.up_proj" for number in range(7, 25)))
    with pytest.raises(ModelError, match=r"the model has no layers\.7\.mlp\.up_proj"):
        Policy(tiny_model(), OptimizerSettings(), lora=LoraSettings(target_modules=wrong))
    assert (
        len(Policy(tiny_model(), OptimizerSettings(), lora=LoraSettings(target_modules=names)).masters) == 16
    )


def test_the_shorthand_is_a_name_or_a_list_of_it_alone() -> None:
    read = [
        LoraSettings.model_validate({"target_modules": given}) for given in ("all-linear", ["all-linear"])
    ]
    assert all(one.is_all_linear for one in read)
    assert LoraSettings.model_validate({"target_modules": "q_proj"}).target_modules == ("q_proj",)
    for wrong in (["all-linear", "lm_head"], [], [""], ""):
        with pytest.raises(ValueError, match="target_modules"):
            LoraSettings.model_validate({"target_modules": wrong})


def test_all_linear_layers_of_falcon_have_adapters_that_merge() -> None:
    """Its layers are a class of its own with a product and a sum."""
    config = FalconConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=64)
    model = FalconForCausalLM(config).eval()
    choose_trained(model, lora=LoraSettings(rank=2, target_modules=("all-linear",)), trained_layers=None)
    adapters = [parameter for name, parameter in model.named_parameters() if ".lora_" in name]
    assert len(adapters) == 2 * 2 * 4
    with torch.no_grad():
        for parameter in adapters:
            parameter.normal_(std=0.2)
        plain = FalconForCausalLM(config).eval()
        plain.load_state_dict(merge_adapters(model), strict=False)
        ids = torch.arange(8)[None]
        torch.testing.assert_close(plain(ids).logits, model(ids).logits)


def test_coverage_is_reported_for_the_default_names_only() -> None:
    policy = moved()
    assert coverage(policy.model, LoraSettings()) == ""
    chosen = LoraSettings(rank=2, target_modules=("q_proj",))
    assert coverage(Policy(tiny_model(), OptimizerSettings(), lora=chosen).model, chosen) == ""


def test_half_of_a_fused_projection_is_an_error_of_one_line(tmp_path: Path) -> None:
    next(one for one in ARCHITECTURES if one.model_type == "qwen3_moe").save(tmp_path)
    lora = LoraSettings(target_modules=("gate_proj", "q_proj"))
    with pytest.raises(ModelError, match=r"gate_proj without also targeting up_proj"):
        Policy(load_model(str(tmp_path), precision="float32"), OptimizerSettings(), lora=lora)


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 20}},
        {"layers_to_transform": [1]},
        {"init_lora_weights": "olora"},
    ],
)
def test_whatever_peft_injects_is_merged_as_peft_does(options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model()
    targets = ["q_proj", "v_proj", "down_proj"]
    bias = options.get("lora_bias", False)
    if bias:
        for layer in model.model.model.layers:
            layer.self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(32))
        targets = ["q_proj"]
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=4, target_modules=targets, **options), model.model)
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=dice))
    ids, positions = torch.arange(5, 25), torch.arange(20)
    plan = TreePlan(segments=(Segment(length=20),))
    plain = tiny_model()
    with torch.no_grad():
        ours = model.logits(ids, positions, plan)
        weights = merge_adapters(model.model)
        if bias:
            for layer in plain.model.model.layers:
                layer.self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(32))
        plain.model.load_state_dict(weights, strict=False)
        theirs = plain.logits(ids, positions, plan)
        assert (ours - tiny_model().logits(ids, positions, plan)).abs().max() > 0.1
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


def test_an_adapter_that_is_not_merged_is_named() -> None:
    policy = moved()
    policy.model.model.layers[1].mlp.up_proj.set_adapter([])
    with pytest.raises(ModelError, match=r"'default' of model\.layers\.1\.mlp\.up_proj was not merged"):
        merge_adapters(policy.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_merge_or_a_lost_weight_is_found_before_the_folder_is_there(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = moved(dtype)
    with replacing_folder(tmp_path / "right") as folder:
        policy.export(folder)
    before = {name: one.clone() for name, one in policy.model.state_dict().items()}
    right = Linear.get_delta_weight
    wrong: list[Callable[[Any, str], torch.Tensor]] = [
        lambda layer, adapter: torch.zeros_like(right(layer, adapter)),
        lambda layer, adapter: -right(layer, adapter),
        lambda layer, adapter: right(layer, adapter) / layer.scaling[adapter],
    ]
    for number, delta in enumerate(wrong):
        monkeypatch.setattr(Linear, "get_delta_weight", delta)
        target = tmp_path / str(number)
        with pytest.raises(ModelError, match="does not compute"), replacing_folder(target) as folder:
            policy.export(folder)
        assert not target.exists()
    monkeypatch.undo()
    save = type(policy.model).save_pretrained

    def lossy(model: Any, folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
        save(
            model,
            folder,
            state_dict={name: one for name, one in state_dict.items() if "1.mlp.up" not in name},
        )

    monkeypatch.setattr(type(policy.model), "save_pretrained", lossy)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        policy.export(tmp_path / "lossy")
    assert all(one.equal(before[name]) for name, one in policy.model.state_dict().items())
