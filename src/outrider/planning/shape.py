"""The shape of a decoder-only model and how many parameters it has."""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from outrider.engines.base import PACKAGED, cache_folder, require_known_model
from outrider.errors import ConfigError, ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Gated delta networks (Qwen3.5), which replace attention in ``layers`` (their indices): ``num_heads``
    heads of values; ``key_width`` and ``value_width`` are those of all heads.
    """

    layers: tuple[int, ...]
    num_heads: int
    key_width: int
    value_width: int
    key_head_size: int
    value_head_size: int
    kernel_size: int

    @property
    def conv_width(self) -> int:
        """Channels of the convolution over queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def matrix_outputs(self) -> dict[str, int]:
        """Outputs of the matrices that read the layer's input, by name."""
        heads = self.num_heads
        values = self.value_width
        return {"in_proj_qkv": self.conv_width, "in_proj_z": values, "in_proj_a": heads, "in_proj_b": heads}

    def parameters(self, width: int) -> int:
        """Parameters of one of these layers in place of attention."""
        matrices = width * (sum(self.matrix_outputs.values()) + self.value_width)
        return matrices + self.kernel_size * self.conv_width + 2 * self.num_heads + self.value_head_size

    @property
    def state_size(self) -> int:
        """Numbers of the recurrent state of one layer and sequence."""
        return self.value_width * self.key_head_size + (self.kernel_size - 1) * self.conv_width


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Numbers of a model's config.json. d is ``width``, f ``mlp_width``, H ``num_heads``, K ``num_kv_heads``,
    D ``head_size``, V ``vocabulary``, L ``num_layers``.

    ``num_norms``: RMS norms per layer over d; ``has_head_norms``: one over D for queries and one for keys
    (Qwen3). Biases: of queries, keys and values; of the output projection; of the MLP's three matrices.
    ``has_query_gate``: the query matrix also computes a gate of the same width (Qwen3.5). ``has_sinks``: one
    number per head (gpt-oss). ``num_experts`` MLPs per layer, of which a token uses ``experts_per_token`` (0:
    one MLP). ``is_unpacked``: the model is computed one sequence at a time (docs/models.md).
    ``longest``: maximum number of positions of the model (None if its configuration has none).
    """

    name: str
    family: str
    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocabulary: int
    is_tied: bool
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_head_norms: bool = False
    has_query_gate: bool = False
    has_sinks: bool = False
    num_norms: int = 2
    num_experts: int = 0
    experts_per_token: int = 0
    linear_attention: LinearAttention | None = None
    is_unpacked: bool = False
    longest: int | None = None

    @property
    def query_width(self) -> int:
        """Outputs of the query matrix: H D, or 2 H D with a gate."""
        return self.attention_width * (1 + self.has_query_gate)

    @property
    def attention_width(self) -> int:
        """H D: queries of all heads."""
        return self.num_heads * self.head_size

    @property
    def kv_width(self) -> int:
        """K D: keys of all key-value heads."""
        return self.num_kv_heads * self.head_size

    @property
    def active_mlp_width(self) -> int:
        """f of all MLPs that a token uses."""
        return self.mlp_width * max(1, self.experts_per_token)

    @property
    def num_attention_layers(self) -> int:
        """Layers with keys and values."""
        return self.num_layers - (len(self.linear_attention.layers) if self.linear_attention else 0)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one gated MLP."""
        return 3 * self.width * self.mlp_width + (2 * self.mlp_width + self.width) * self.has_mlp_bias

    @property
    def _mlp_and_norms(self) -> int:
        router = self.num_experts * (self.width + self.has_mlp_bias)
        return max(1, self.num_experts) * self.expert_parameters + router + self.num_norms * self.width

    @property
    def layer_parameters(self) -> int:
        """P_layer: attention, gated MLP, norms and biases of one layer."""
        d, q, a, k = self.width, self.query_width, self.attention_width, self.kv_width
        matrices = d * q + 2 * d * k + a * d
        biases = (q + 2 * k) * self.has_qkv_bias + d * self.has_output_bias + self.num_heads * self.has_sinks
        return matrices + biases + 2 * self.head_size * self.has_head_norms + self._mlp_and_norms

    def last_layers_parameters(self, num_layers: int) -> int:
        """Parameters of the last ``num_layers`` layers."""
        linear = self.linear_attention
        num_linear = sum(index >= self.num_layers - num_layers for index in linear.layers) if linear else 0
        total = (num_layers - num_linear) * self.layer_parameters
        if linear:
            total += num_linear * (linear.parameters(self.width) + self._mlp_and_norms)
        return total

    def adapter_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Parameters of LoRA adapters: ``r (inputs + outputs)`` of each targeted matrix of each layer.

        Raises ConfigError for a name that is not a matrix of the supported model families.
        """
        d, f = self.width, self.mlp_width
        sizes = {name: num * (inputs + outputs) for name, (num, inputs, outputs) in self._linear().items()}
        is_all_linear = targets == ("all-linear",)
        names = tuple(sizes) if is_all_linear else targets
        if self.num_experts and not is_all_linear:  # fused experts are parameters, no linear layers
            num_experts = self.num_experts * self.num_layers
            sizes |= {"gate_up_proj": num_experts * (d + 2 * f), "down_proj": num_experts * (f + d)}
        if unknown := [name for name in names if name not in sizes and name != "lm_head"]:
            raise ConfigError(
                f"plan cannot count adapters of {', '.join(unknown)} (model.lora.target_modules); "
                f"it counts {', '.join(sizes)}, lm_head and all-linear"
            )
        layer_adapters = rank * sum(sizes[name] for name in names if name in sizes)
        return layer_adapters + rank * (d + self.vocabulary) * ("lm_head" in names)

    def _linear(self) -> dict[str, tuple[int, int, int]]:
        """Number, inputs and outputs of the linear layers by name, without the vocabulary projection."""
        d, f, a, k = self.width, self.mlp_width, self.attention_width, self.kv_width
        full, num_mlps = self.num_attention_layers, 0 if self.num_experts else self.num_layers
        layers = {
            "q_proj": (full, d, self.query_width), "k_proj": (full, d, k), "v_proj": (full, d, k),
            "o_proj": (full, a, d), "gate_proj": (num_mlps, d, f), "up_proj": (num_mlps, d, f),
            "down_proj": (num_mlps, f, d),
        }  # fmt: skip
        if linear := self.linear_attention:
            outputs = {**linear.matrix_outputs, "out_proj": linear.value_width}
            layers |= {name: (len(linear.layers), d, num) for name, num in outputs.items()}
        return layers

    def adapted_weights(self, targets: tuple[str, ...]) -> tuple[int, int]:
        """Return the weights of the linear layers with adapters, and of the largest of them."""
        layers = self._linear()
        names = layers if targets == ("all-linear",) else set(targets) & layers.keys()
        matrices = [layers[name] for name in names if layers[name][0]]
        total = sum(num * inputs * outputs for num, inputs, outputs in matrices)
        return total, max((inputs * outputs for _, inputs, outputs in matrices), default=0)

    @property
    def embedding_parameters(self) -> int:
        """V d: the embedding, plus V d for a vocabulary projection that is not tied to it."""
        return self.vocabulary * self.width

    @property
    def root_parameters(self) -> int:
        """P_root: embedding, vocabulary projection and last norm, which FSDP2 gathers as one group."""
        return self.embedding_parameters * (1 if self.is_tied else 2) + self.width

    @property
    def num_parameters(self) -> int:
        """P: all of them; a tied matrix counts once."""
        return self.root_parameters + self.last_layers_parameters(self.num_layers)

    @property
    def active_parameters(self) -> int:
        """P without the experts that a token does not use."""
        num_unused = self.num_experts - self.experts_per_token
        return self.num_parameters - self.num_layers * num_unused * self.expert_parameters


# The shape of a model from its config.json: a folder, a file that Hugging Face has in its cache, or the
# shapes of known models in ``known_models.toml``. Nothing is downloaded.


_GEMMA: Final = {
    "num_norms": 4, "has_head_norms": True, "tie_word_embeddings": True, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
}  # fmt: skip
_QWEN3_5: Final = {
    "has_head_norms": True, "has_query_gate": True, "is_unpacked": True, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
# Properties of a family that config.json does not state; keys of config.json are defaults that it may omit.
_FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"has_qkv_bias": True},
    "qwen3": {"has_head_norms": True},
    "gemma3_text": _GEMMA,
    "gemma3": _GEMMA,
    "smollm3": {"tie_word_embeddings": True},
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5": _QWEN3_5,
    "gpt_oss": {
        "is_unpacked": True, "has_sinks": True, "attention_bias": True, "mlp_bias": True, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088,
        "num_local_experts": 128, "num_experts_per_tok": 4,
    },
}  # fmt: skip


def find_shape(name: str) -> ModelShape:
    """Return the shape of ``model.name``. Raises ModelError, with a suggestion, for a model whose
    configuration is not available locally or whose architecture is not supported.
    """
    require_known_model(name)
    folder = cache_folder() / "models" / name if name in PACKAGED else Path(name)
    if (file := folder / "config.json").is_file():
        return shape_from_config(_read(file), name=name)
    if folder.is_dir() and name not in PACKAGED:
        raise ModelError(f"model {name!r}: the folder has no config.json")
    if (cached := _find_in_hub_cache(name)) is not None:
        return shape_from_config(_read(cached), name=name)
    if name in known_models():
        return shape_from_config(known_models()[name], name=name)
    raise ModelError(
        f"the config.json of {name!r} was not found: download it (`hf download {name} config.json`), "
        f"or set model.name to a folder that has one; models with a known shape: {', '.join(known_models())}"
    )


def shape_from_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """Return the shape in a config.json; for a vision model that of its text part. Raises ModelError.

    Keys are named as in Hugging Face's files.
    """
    text: dict[str, Any] = dict(config.get("text_config") or config)
    text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings"))
    family = str(text.get("model_type", config.get("model_type", "")))
    if family not in _FAMILIES:
        raise ModelError(
            f"model {name!r} has the architecture {family!r}, whose parameters plan cannot count "
            f"(supported: {', '.join(_FAMILIES)})"
        )
    # null means that the value is missing
    values = {**_FAMILIES[family], **{key: value for key, value in text.items() if value is not None}}
    try:
        return _shape(values, name=name, family=family)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"config.json of {name!r} has no valid value for {error}") from error


def _shape(values: Mapping[str, Any], *, name: str, family: str) -> ModelShape:
    width, heads = int(values["hidden_size"]), int(values["num_attention_heads"])
    attention_bias = bool(values.get("attention_bias", False))
    return ModelShape(
        name=name,
        family=family,
        num_layers=int(values["num_hidden_layers"]),
        width=width,
        mlp_width=int(values["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(values.get("num_key_value_heads", heads)),
        head_size=int(values.get("head_dim", width // heads)),
        vocabulary=int(values["vocab_size"]),
        is_tied=bool(values.get("tie_word_embeddings", False)),
        has_qkv_bias=bool(values.get("has_qkv_bias", attention_bias)),
        has_output_bias=attention_bias,
        has_mlp_bias=bool(values.get("mlp_bias", False)),
        has_head_norms=bool(values.get("has_head_norms", False)),
        has_query_gate=bool(values.get("has_query_gate", False)),
        has_sinks=bool(values.get("has_sinks", False)),
        num_norms=int(values.get("num_norms", 2)),
        num_experts=int(values.get("num_local_experts", 0)),
        experts_per_token=int(values.get("num_experts_per_tok", 0)),
        linear_attention=_linear_attention(values) if "linear_num_key_heads" in values else None,
        is_unpacked=bool(values.get("is_unpacked", False)),
        longest=values.get("max_position_embeddings"),
    )


def _linear_attention(values: Mapping[str, Any]) -> LinearAttention:
    num_layers, interval = int(values["num_hidden_layers"]), int(values.get("full_attention_interval", 4))
    kinds = values.get("layer_types") or [
        "linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)
    ]
    key_size, value_size = int(values["linear_key_head_dim"]), int(values["linear_value_head_dim"])
    return LinearAttention(
        layers=tuple(index for index, kind in enumerate(kinds) if kind == "linear_attention"),
        num_heads=int(values["linear_num_value_heads"]),
        key_width=key_size * int(values["linear_num_key_heads"]),
        value_width=value_size * int(values["linear_num_value_heads"]),
        key_head_size=key_size,
        value_head_size=value_size,
        kernel_size=int(values["linear_conv_kernel_dim"]),
    )


@cache
def known_models() -> Mapping[str, Mapping[str, Any]]:
    """Return parts of config.json by model name, for the models that the documentation uses."""
    text = Path(__file__).with_name("known_models.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _find_in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    if "/" not in name:
        return None
    path = try_to_load_from_cache(name, "config.json")
    return Path(path) if isinstance(path, str) else None


def _read(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a JSON object")
    return content


# Devices by name: memory and peak rate of dense bfloat16 matrix products, and the CPU of this machine.
#
# From NVIDIA's data sheets of the SXM modules: A100 80GB (312 TFLOP/s), H100 and H200 (1,979 TFLOP/s with
# sparsity, so 989 without; 80 GB and 141 GB).


GB: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """``memory`` in bytes, ``peak`` in floating-point operations per second (0: unknown). The processes of a
    run on a CPU share ``memory``; every GPU has its own.
    """

    name: str
    memory: float
    peak: float
    is_cpu: bool = False


DEVICES: Final[Mapping[str, Device]] = {
    "A100": Device(name="A100", memory=80 * GB, peak=312e12),
    "H100": Device(name="H100", memory=80 * GB, peak=989e12),
    "H200": Device(name="H200", memory=141 * GB, peak=989e12),
}


def this_cpu() -> Device:
    """Return this machine's CPU with its memory; its rate is unknown until it is measured."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(name="CPU", memory=float(memory), peak=0.0, is_cpu=True)
