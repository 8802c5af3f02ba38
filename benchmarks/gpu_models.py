"""Models of random weights in the shapes of known ones, created on the device without downloads or weight
files.

Speed and memory do not depend on the values of the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from benchmarks.gpu_shapes import KNOWN, TINY
from outrider.engines.local.attention import IMPLEMENTATION, register
from outrider.engines.local.cpu_kernels import fuse
from outrider.engines.local.model import LanguageModel
from outrider.planning.shape import ModelShape, known_models, shape_from_config
from outrider.smoke import character_tokenizer

_TINY: Final[Mapping[str, Any]] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 10_000, "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}  # fmt: skip
_CONTEXT: Final = 4096  # of the engine; no workload is longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A model with its shape and the configuration that transformers has of it."""

    language_model: LanguageModel
    shape: ModelShape
    config: PretrainedConfig


def described(name: str) -> Mapping[str, Any]:
    """Return the config.json of one of ``gpu_shapes.SHAPES``."""
    return _TINY if name == TINY else known_models()[KNOWN[name]]


def make_model(name: str, *, device: str, dtype: torch.dtype) -> Made:
    """Random weights on ``device``. No token ends a sequence."""
    register()
    told = dict(described(name))
    config = AutoConfig.for_model(**told, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    if torch.device(device).type == "cpu":
        fuse(model)
    language_model = LanguageModel(
        model=model,
        tokenizer=character_tokenizer(),
        context_length=min(_CONTEXT, config.max_position_embeddings),
        eos_token_ids=frozenset(),
    )
    return Made(language_model=language_model, shape=shape_from_config(told, name=name), config=config)
