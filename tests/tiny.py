"""A tiny random model with a real chat template: real code paths in milliseconds, without any download."""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from outrider.engines.local.attention import IMPLEMENTATION, register
from outrider.engines.local.model import LanguageModel
from outrider.smoke import CHARACTERS, TEMPLATE, tiny_config
from outrider.smoke import character_tokenizer as tiny_tokenizer

__all__ = ["CHARACTERS", "TEMPLATE", "save_tiny_model", "tiny_config", "tiny_model", "tiny_tokenizer"]


def tiny_model(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 5.0, **sizes: int
) -> LanguageModel:
    """Random weights, scaled up so that the distribution over tokens is far from uniform."""
    register()
    config = tiny_config(**sizes)
    config._attn_implementation = IMPLEMENTATION
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(scale)
    return LanguageModel(
        model=model.to(dtype),
        tokenizer=tiny_tokenizer(),
        context_length=config.max_position_embeddings,
        eos_token_ids=frozenset({1}),
    )


def save_tiny_model(folder: Path, *, seed: int = 0, **sizes: int) -> Path:
    """The same as a folder that ``--model`` takes."""
    language_model = tiny_model(seed=seed, **sizes)
    language_model.model.config._attn_implementation = "sdpa"
    language_model.model.generation_config.eos_token_id = 1
    language_model.model.save_pretrained(folder)
    language_model.tokenizer.save_pretrained(folder)
    return folder
