"""``python -m docsite.models > docs/models.md``: the execution path of each architecture, tested with tiny
random models.

Every row is loaded as a run would load it; ``tests/engines/test_architectures.py`` compares its log-probs and
gradients with those of transformers, and this page with the loaded models.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from benchmarks.figure_records import render_all
from benchmarks.figures import rewritten
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from outrider.engines.local.model import Forward, LanguageModel, load_model
from outrider.errors import ModelError
from outrider.smoke import character_tokenizer

_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 98, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS: Final[Mapping[str, Any]] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
_SHARED: Final[Mapping[str, Any]] = {**_EXPERTS, "shared_expert_intermediate_size": 24}
_LINEAR: Final[Mapping[str, Any]] = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MIXED: Final[Mapping[str, Any]] = {
    "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
_WINDOW: Final = 16
_LONGROPE: Final[Mapping[str, Any]] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0],
}  # fmt: skip
_LATENT: Final[Mapping[str, Any]] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model family and the additional settings of its tiny configuration."""

    title: str
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    forward: Forward = "auto"

    @property
    def is_known(self) -> bool:
        """Whether the installed transformers has it."""
        return self.model_type in CONFIG_MAPPING

    def config(self) -> PreTrainedConfig:
        """The tiny configuration."""
        sizes = {key: value for key, value in _SIZES.items() if key not in self.without}
        return CONFIG_MAPPING[self.model_type](**sizes | dict(self.settings))

    def save(self, folder: Path, *, scale: float = 5.0) -> None:
        """Save a model with random weights, large enough that its predictions depend on the context."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(self.config())
        for parameter in model.parameters():
            parameter.data.mul_(scale if parameter.dim() > 1 else 1.0)
        model.save_pretrained(folder)
        character_tokenizer().save_pretrained(folder)

    def row(self, found: LanguageModel | ModelError, folder: Path) -> str:
        """Return the table row of this architecture."""
        name = f"{self.title} | `{self.model_type}`"
        if isinstance(found, ModelError):
            return f"| {name} | refused | {str(found).replace(str(folder), 'NAME')} | |"
        if found.unpacked is None:
            return f"| {name} | packed | | {found.context_length} of 64 |"
        return f"| {name} | unpacked | {found.unpacked.why} | {found.context_length} of 64 |"


ARCHITECTURES: Final = (
    Architecture(title="Qwen2, Qwen2.5", model_type="qwen2"),
    Architecture(title="Qwen2 MoE", model_type="qwen2_moe", settings=_SHARED),
    Architecture(title="Qwen3", model_type="qwen3"),
    Architecture(title="Qwen3 MoE", model_type="qwen3_moe", settings=_EXPERTS),
    Architecture(title="Qwen3-Next", model_type="qwen3_next", settings={**_SHARED, **_LINEAR}),
    Architecture(title="Qwen3.5", model_type="qwen3_5_text", settings=_LINEAR),
    Architecture(title="Qwen3.5 MoE", model_type="qwen3_5_moe_text", settings={**_SHARED, **_LINEAR}),
    Architecture(title="Llama 2, 3; SmolLM2", model_type="llama"),
    Architecture(
        title="Llama 4", model_type="llama4_text",
        settings={"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": _WINDOW},
    ),
    Architecture(title="Mistral", model_type="mistral", settings={"sliding_window": None}),
    Architecture(
        title="Mistral with a sliding window", model_type="mistral", settings={"sliding_window": _WINDOW}
    ),
    Architecture(
        title="Mistral behind its window", model_type="mistral", settings={"sliding_window": 6},
        forward="unpacked",
    ),
    Architecture(title="Ministral behind its window", model_type="ministral", settings=_MIXED,
                 forward="unpacked"),
    Architecture(title="Mixtral", model_type="mixtral", settings={"num_local_experts": 4}),
    Architecture(title="Gemma", model_type="gemma"),
    Architecture(title="Gemma 2", model_type="gemma2", settings={**_MIXED, "query_pre_attn_scalar": 8}),
    Architecture(
        title="Gemma 3", model_type="gemma3_text",
        settings={**_MIXED, "sliding_window": _WINDOW, "query_pre_attn_scalar": 8},
    ),
    Architecture(
        title="Gemma 3 behind its window", model_type="gemma3_text",
        settings={**_MIXED, "query_pre_attn_scalar": 8}, forward="unpacked",
    ),
    Architecture(title="Phi-3, Phi-4", model_type="phi3", without=("head_dim",)),
    Architecture(
        title="Phi-3.5 with longrope", model_type="phi3", without=("head_dim",),
        settings={"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16},
    ),
    Architecture(
        title="Phi-3.5 behind its original length", model_type="phi3", without=("head_dim",),
        settings={"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16}, forward="unpacked",
    ),
    Architecture(title="SmolLM3", model_type="smollm3", settings={"no_rope_layers": [1, 0]}),
    Architecture(title="LFM2", model_type="lfm2", settings={"layer_types": ["conv", "full_attention"]}),
    Architecture(
        title="LFM2 MoE", model_type="lfm2_moe",
        settings={**_EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    ),
    Architecture(
        title="gpt-oss", model_type="gpt_oss",
        settings={
            **_MIXED, "num_local_experts": 4, "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    Architecture(
        title="DeepSeek-V3, R1", model_type="deepseek_v3", settings=_LATENT, without=("head_dim",)
    ),
    Architecture(title="GLM-4", model_type="glm4"),
    Architecture(
        title="GLM-4.5 (MoE)", model_type="glm4_moe",
        settings={
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        },
    ),
    Architecture(title="OLMo 2", model_type="olmo2"),
    Architecture(title="Granite", model_type="granite", settings={"logits_scaling": 8.0}),
    Architecture(title="Cohere 2", model_type="cohere2", settings={**_MIXED, "sliding_window": _WINDOW}),
    Architecture(
        title="Cohere 2 behind its window", model_type="cohere2", settings=_MIXED, forward="unpacked"
    ),
    Architecture(
        title="Falcon-H1", model_type="falcon_h1",
        settings={"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 8},
    ),
    Architecture(
        title="Mamba 2", model_type="mamba2", without=tuple(_SIZES.keys() - {"vocab_size", "hidden_size"}),
        settings={"num_heads": 8, "head_dim": 8, "state_size": 8, "num_hidden_layers": 2, "n_groups": 1,
                  "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1},
    ),
)  # fmt: skip


def load(architecture: Architecture, folder: Path) -> LanguageModel | ModelError:
    """Load the model as a run does, and return the error if it is refused."""
    try:
        return load_model(str(folder), precision="float32", forward=architecture.forward)
    except ModelError as error:
        return error


def rows() -> Iterator[str]:
    """Yield one table row per architecture of the installed transformers."""
    for architecture in ARCHITECTURES:
        if architecture.is_known:
            with tempfile.TemporaryDirectory() as name:
                architecture.save(Path(name))
                yield architecture.row(load(architecture, Path(name)), Path(name))


def main() -> None:
    """Print the page: the template ``docsite/models.md`` with the table and the figures."""
    words = Path(__file__).with_name("models.md").read_text(encoding="utf-8")
    page = words.replace("{version}", transformers.__version__).replace("{rows}", "\n".join(rows()))
    figures = render_all(Path(__file__).parents[1] / "records")
    sys.stdout.write(rewritten(page, figures, document="docs/models.md"))


if __name__ == "__main__":
    main()
