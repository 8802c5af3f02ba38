"""Loading: what would be computed wrongly is refused, what cannot be found is one clear line."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig, MistralConfig, PreTrainedConfig

from outrider.engines.attention import Segment, TreePlan
from outrider.engines.model import load_model, resolve_precision
from outrider.errors import ModelError
from tests.tiny import save_tiny_model, tiny_tokenizer

SIZES = {
    "vocab_size": 98, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip


def saved(folder: Path, config: PreTrainedConfig) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
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
