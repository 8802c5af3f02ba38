"""Adapters of every architecture of docs/models.md: the exported model computes what the policy computes,
for any layers with adapters, and has the names of the original folder.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from docsite.models import ARCHITECTURES, Architecture, load
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.engines.local.model import LanguageModel
from outrider.errors import ModelError
from outrider.training import policy as export_check
from outrider.training.adapters import broken_ties, coverage, merge_adapters, merged_names, to_folder_format
from outrider.training.policy import Policy
from outrider.training.settings import LoraSettings, OptimizerSettings

FAMILIES = [
    *(one for one in ARCHITECTURES if one.forward == "auto" and one.model_type != "mamba2"),
    Architecture(
        title="OLMoE", model_type="olmoe", settings={"num_experts": 4, "num_experts_per_tok": 2},
        without=("head_dim",),
    ),
    Architecture(
        title="Granite MoE", model_type="granitemoe",
        settings={"num_local_experts": 4, "num_experts_per_tok": 2}, without=("head_dim",),
    ),
    Architecture(title="GPT-NeoX", model_type="gpt_neox", without=("head_dim", "num_key_value_heads")),
    Architecture(
        title="GPT-2", model_type="gpt2",
        settings={"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        without=("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
                 "num_key_value_heads", "head_dim", "intermediate_size"),
    ),
]  # fmt: skip
EXPERTS = {
    "mixtral": ("w1", "w2", "w3"),
    "gpt_oss": ("gate_up_proj", "down_proj", "self_attn.o_proj"),
    "granitemoe": ("gate_up_proj", "down_proj"),
}


def family(model_type: str) -> Architecture:
    return next(one for one in FAMILIES if one.model_type == model_type)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Architecture], Path]:
    found: dict[str, Path] = {}

    def folder_of(architecture: Architecture) -> Path:
        if not architecture.is_known:
            pytest.skip("the installed transformers does not have it")
        if architecture.title not in found:
            found[architecture.title] = tmp_path_factory.mktemp("model")
            architecture.save(found[architecture.title])
        return found[architecture.title]

    return folder_of


def loaded(architecture: Architecture, folder: Path) -> LanguageModel:
    found = load(architecture, folder)
    if isinstance(found, ModelError):
        pytest.skip(f"refused: {found}")
    return found


def moved(model: LanguageModel, lora: LoraSettings) -> Policy:
    """A policy whose adapters are far from where they began, and so are the buffers of routers."""
    policy = Policy(model, OptimizerSettings(), lora=lora)
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in policy.masters.values():
            master.add_(0.1 * torch.randn(master.shape, generator=dice))
        for name, buffer in policy.model.named_buffers():
            if "bias" in name:
                buffer.add_(torch.randn(buffer.shape, generator=dice))
    policy.round_masters()
    return policy


def state(model: Any) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in model.state_dict().items()}


def keys_of(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        found: Tensor = model(torch.arange(5, 15)[None], use_cache=False).logits[0]
    return found


def require_exported(policy: Policy, base: Path, folder: Path) -> None:
    before = state(policy.model)
    policy.export(folder)
    after = state(policy.model)
    assert all(one.equal(after[name]) for name, one in before.items())  # the policy itself stays as it is
    with torch.no_grad():
        ours = export_check._logits(policy.language_model, torch.arange(5, 15))
    theirs = logits(folder)
    moved_by = (ours - logits(base)).abs().max()
    assert moved_by > 0.05
    assert (ours - theirs).abs().max() < 1e-3 * max(1.0, float(moved_by))
    if not broken_ties(policy.model):
        assert keys_of(folder) == keys_of(base)
    # what vLLM gets is what the folder has, and what is announced is what comes
    sent = dict(to_folder_format(policy.model, merge_adapters(policy.model).items()))
    assert set(sent) == keys_of(folder)
    announced = {
        name: tuple(one.shape)
        for name, one in to_folder_format(policy.model, merged_names(policy.model).items())
    }
    assert list(announced.items()) == [(name, tuple(one.shape)) for name, one in sent.items()]


# A few layouts of layers; the others are slow.
FEW = ("qwen3", "gemma3_text", "phi3", "falcon_h1", "deepseek_v3", "qwen3_5_moe_text", "granitemoe")
CHOSEN = [
    one if one.model_type in FEW else pytest.param(one, marks=pytest.mark.slow, id=one.title)
    for one in FAMILIES
]


@pytest.mark.parametrize("architecture", CHOSEN, ids=lambda one: one.title)
def test_every_linear_layer_with_an_adapter(
    architecture: Architecture, saved: Callable[[Architecture], Path], tmp_path: Path
) -> None:
    base = saved(architecture)
    lora = LoraSettings(rank=2, alpha=4, target_modules=("all-linear",))
    policy = moved(loaded(architecture, base), lora)
    require_exported(policy, base, tmp_path / "out")
    head = policy.model.get_output_embeddings()
    left = [
        name
        for name, module in policy.model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
        and not name.endswith(".base_layer") and ".lora_" not in name
    ]  # fmt: skip
    # a router that is more than a product, and a layer whose weights a kernel of Mamba reads
    fixed = {"llama4_text": {"router"}, "falcon_h1": {"out_proj"}}.get(architecture.model_type, set())
    assert {name.rpartition(".")[2] for name in left} == fixed
    reason = coverage(policy.model, lora)
    assert all(name in reason for name in fixed)


@pytest.mark.parametrize("architecture", CHOSEN, ids=lambda one: one.title)
def test_the_default_names_or_the_reason_in_one_line(
    architecture: Architecture, saved: Callable[[Architecture], Path], tmp_path: Path
) -> None:
    base = saved(architecture)
    model, lora = loaded(architecture, base), LoraSettings(rank=2, alpha=4)
    try:
        policy = moved(model, lora)
    except ModelError as error:
        assert "model.lora.target_modules: the model has no q_proj" in str(error) and "\n" not in str(error)
        assert architecture.model_type in ("gpt_neox", "gpt2")
        return
    require_exported(policy, base, tmp_path / "out")
    reason = coverage(policy.model, lora)
    assert "\n" not in reason
    expected = {
        "phi3": "none on self_attn.qkv_proj, mlp.gate_up_proj", "mixtral": "mlp.experts.gate_up_proj",
        "gpt_oss": "mlp.experts.gate_up_proj", "llama": "", "qwen3": "", "qwen3_moe": "",
        "qwen3_next": "linear_attn.in_proj_qkvz", "deepseek_v3": "self_attn.q_a_proj",
        "granitemoe": "block_sparse_moe.experts.gate_up_proj",
    }  # fmt: skip
    wanted = expected.get(architecture.model_type)
    if wanted is not None:
        assert (wanted in reason) if wanted else reason == ""


@pytest.mark.parametrize("model_type", EXPERTS)
def test_fused_experts_by_name(
    model_type: str, saved: Callable[[Architecture], Path], tmp_path: Path
) -> None:
    architecture = family(model_type)
    base = saved(architecture)
    lora = LoraSettings(rank=2, alpha=4, target_modules=EXPERTS[model_type])
    policy = moved(loaded(architecture, base), lora)
    assert sum(hasattr(one, "parameter_name") for one in policy.model.modules()) == 4
    require_exported(policy, base, tmp_path / "out")


@pytest.mark.parametrize(
    ("model_type", "is_tied", "targets"),
    [
        ("llama", True, ("lm_head",)), ("llama", True, ("embed_tokens", "q_proj")),
        ("llama", True, ("embed_tokens", "lm_head")), ("llama", False, ("embed_tokens", "lm_head")),
        ("qwen3_moe", True, ("lm_head", "gate_proj", "up_proj", "down_proj")),
        ("gemma3_text", True, ("lm_head", "q_proj")), ("gemma3_text", True, ("embed_tokens", "q_proj")),
        ("gpt2", True, ("lm_head", "c_fc")), ("gpt2", True, ("wte", "wpe", "c_attn")),
    ],
)  # fmt: skip
def test_embeddings_and_vocabulary_projections(
    model_type: str, is_tied: bool, targets: tuple[str, ...], tmp_path: Path
) -> None:
    known = family(model_type)
    architecture = Architecture(
        title=known.title, model_type=model_type, without=known.without,
        settings={**known.settings, "tie_word_embeddings": is_tied},
    )  # fmt: skip
    architecture.save(tmp_path / "base")
    lora = LoraSettings(rank=2, alpha=4, target_modules=targets)
    policy = moved(loaded(architecture, tmp_path / "base"), lora)
    assert bool(broken_ties(policy.model)) == is_tied
    require_exported(policy, tmp_path / "base", tmp_path / "out")
    assert policy.model.config.tie_word_embeddings == is_tied
