"""A model at a lower temperature as a model at temperature 1."""

from pathlib import Path

import pytest
import torch
from benchmarks.sharpen import main
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from outrider.errors import ConfigError

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


def test_logits_are_divided_by_the_temperature(tmp_path: Path) -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    model.save_pretrained(tmp_path / "a")
    assert main([str(tmp_path / "a"), "--temperature", "0.5", "--out", str(tmp_path / "b")]) == 0
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    sharp = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    torch.testing.assert_close(sharp(ids).logits, model(ids).logits * 2)


def test_norms_that_add_one_are_refused(tmp_path: Path) -> None:
    Gemma3ForCausalLM(Gemma3TextConfig(**SIZES)).save_pretrained(tmp_path / "a")
    with pytest.raises(ConfigError, match="its last norm does not multiply by its weights"):
        main([str(tmp_path / "a"), "--temperature", "0.5", "--out", str(tmp_path / "b")])
