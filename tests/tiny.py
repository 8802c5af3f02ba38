"""A tiny random model with a real chat template: real code paths in milliseconds, without any download."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.engines.local.attention import IMPLEMENTATION, register
from outrider.engines.local.model import LanguageModel

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHARACTERS = [chr(c) for c in range(32, 127)] + ["\n"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and the chat markers."""
    special = ["<|im_start|>", "<|im_end|>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    return fast


def tiny_config(*, num_layers: int = 2, hidden_size: int = 32, context: int = 512) -> LlamaConfig:
    """Grouped-query attention and tied embeddings, as SmolLM2 has them."""
    return LlamaConfig(
        vocab_size=3 + len(CHARACTERS), hidden_size=hidden_size, intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=context, tie_word_embeddings=True, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip


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
