"""Which of the papers' models one device can train: ``python benchmarks/paper_memory.py`` prints it, from the
models' shapes alone.

Full fine-tuning in one process on one device, as :class:`outrider.train.update.policy.Policy` does it: a
bfloat16 working copy, float32 masters, two float32 moments of Adam and a float32 gradient. vLLM beside it has
its own copy of the weights and its keys and values. Activations, logits and fragments come on top; nothing
here has been run at this size.
"""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

WORKING_BYTES, MASTER_BYTES, MOMENTS_BYTES, GRADIENT_BYTES = 2, 4, 8, 4
TRAINING_BYTES = WORKING_BYTES + MASTER_BYTES + MOMENTS_BYTES + GRADIENT_BYTES
ENGINE_BYTES = 2
DEVICE_GB = 80

CONFIGS: dict[str, PretrainedConfig] = {
    "Qwen/Qwen2.5-3B-Instruct": Qwen2Config(
        hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True,
    ),
    "Qwen/Qwen2.5-7B-Instruct": Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256,
    ),
    "Qwen/Qwen3-8B": Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936,
    ),
    "Qwen/Qwen3-14B": Qwen3Config(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=8, head_dim=128, vocab_size=151936,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """GB (10^9 bytes) of one model: what training holds, and vLLM's copy of the weights."""

    name: str
    num_parameters: int

    @property
    def training_gb(self) -> float:
        """Weights, masters, moments and gradients."""
        return self.num_parameters * TRAINING_BYTES / 1e9

    @property
    def engine_gb(self) -> float:
        """vLLM's weights, without keys and values."""
        return self.num_parameters * ENGINE_BYTES / 1e9

    @property
    def fits(self) -> bool:
        """Whether both are below one device's memory."""
        return self.training_gb + self.engine_gb < DEVICE_GB


def need_of(name: str) -> Need:
    """Counted on a model without storage."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    return Need(name=name, num_parameters=sum(parameter.numel() for parameter in model.parameters()))


def main() -> None:
    """Print the table of docs/papers.md."""
    print(
        f"| model | parameters | training, {TRAINING_BYTES} bytes each | vLLM's weights | together | "
        f"one device of {DEVICE_GB} GB |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for name in CONFIGS:
        need = need_of(name)
        print(
            f"| `{name}` | {need.num_parameters:,} | {need.training_gb:.1f} GB | {need.engine_gb:.1f} GB "
            f"| {need.training_gb + need.engine_gb:.1f} GB | {'fits' if need.fits else 'too small'} |"
        )


if __name__ == "__main__":
    main()
