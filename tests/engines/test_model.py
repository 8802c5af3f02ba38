"""Loading: what would be computed wrongly is refused, what cannot be found is one clear line."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma2Config,
    GraniteConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from outrider.engines.attention import Segment, TreePlan
from outrider.engines.model import Precision, load_model, resolve_precision
from outrider.errors import ModelError
from tests.tiny import save_tiny_model, tiny_tokenizer

SIZES = {
    "vocab_size": 98, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip


def saved(folder: Path, config: PreTrainedConfig, *, scale: float = 1.0) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(scale if parameter.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_a_soft_cap_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="soft cap"):
        load_model(saved(tmp_path, Gemma2Config(**SIZES)), precision="float32")


def test_logits_that_are_scaled_behind_the_head_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="changes its logits"):
        load_model(saved(tmp_path, GraniteConfig(**SIZES, logits_scaling=8.0)), precision="float32")


def test_contexts_stay_within_a_sliding_window_and_are_exact_there(tmp_path: Path) -> None:
    folder = saved(tmp_path, MistralConfig(**SIZES, sliding_window=24))
    loaded = load_model(folder, precision="float32")
    assert loaded.context_length == 24
    ids = torch.arange(3, 27)[None]
    ours = loaded.head(loaded.hidden(ids, torch.arange(24)[None], TreePlan(segments=(Segment(length=24),))))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


RECURRENT = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
LAYERS = ["linear_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    "config",
    [
        Qwen3_5TextConfig(**SIZES, **RECURRENT, layer_types=LAYERS),
        Qwen3NextConfig(**SIZES, **RECURRENT, **EXPERTS, shared_expert_intermediate_size=24, layer_types=LAYERS),
        Lfm2Config(**{**SIZES, "pad_token_id": 0}, layer_types=["conv", "full_attention"]),
        FalconH1Config(**SIZES, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_state=8, mamba_d_head=8),  # both in every layer
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_layers_that_carry_state_past_the_plan_are_refused(
    config: PreTrainedConfig, precision: Precision, tmp_path: Path
) -> None:
    """They take any argument and ignore the plan: one sequence's state would flow into the next."""
    with pytest.raises(ModelError, match="recurrent or convolution"):
        load_model(saved(tmp_path, config, scale=5.0), precision=precision)  # fresh weights would hardly use their context


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SIZES), Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=1)],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_attention_alone_is_accepted_in_every_precision(config: PreTrainedConfig, precision: Precision, tmp_path: Path) -> None:
    assert load_model(saved(tmp_path, config), precision=precision).context_length == 64


def test_contexts_stay_within_one_chunk_of_chunked_attention(tmp_path: Path) -> None:
    assert load_model(saved(tmp_path, LlamaConfig(**SIZES, attention_chunk_size=24)), precision="float32").context_length == 24


def test_a_model_whose_backbone_cannot_be_had_is_refused(tmp_path: Path) -> None:
    sizes = SIZES | {"intermediate_size_mlp": 48, "num_local_experts": 2}
    with pytest.raises(ModelError, match="no backbone"):
        load_model(saved(tmp_path, Llama4TextConfig(**sizes)), precision="float32")


@pytest.mark.parametrize("name", ["no/such-model-at-all", "/nowhere"])
def test_a_missing_model_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable is read once, at import
    with pytest.raises(ModelError) as caught:
        load_model(name, precision="float32")
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("tiles", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_precision_is_bfloat16_only_with_a_matrix_unit_for_it(
    tiles: bool, expected: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    assert load_model(str(save_tiny_model(tmp_path)), precision="auto").dtype is expected


def test_auto_precision_without_the_gpu_that_was_asked_for_names_one() -> None:
    if not torch.cuda.is_available():
        assert resolve_precision("auto", "cuda") == "float32"


def test_a_tiny_llama_loads(tmp_path: Path) -> None:
    assert load_model(str(save_tiny_model(tmp_path)), precision="float32").context_length == 512
