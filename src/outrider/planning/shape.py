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
class ModelShape:
    """Numbers of a model's config.json. d is ``width``, f ``mlp_width``, H ``num_heads``, K ``num_kv_heads``,
    D ``head_size``, V ``vocabulary``, L ``num_layers``.

    ``num_norms``: RMS norms per layer over d; ``has_head_norms``: one over D for queries and one for keys
    (Qwen3). Biases: of queries, keys and values; of the output projection; of the MLP's three matrices.
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
    num_norms: int = 2
    longest: int | None = None

    @property
    def attention_width(self) -> int:
        """H D: queries of all heads."""
        return self.num_heads * self.head_size

    @property
    def kv_width(self) -> int:
        """K D: keys of all key-value heads."""
        return self.num_kv_heads * self.head_size

    @property
    def layer_parameters(self) -> int:
        """P_layer: attention, gated MLP, norms and biases of one layer."""
        d, f, a, k = self.width, self.mlp_width, self.attention_width, self.kv_width
        matrices = d * a + 2 * d * k + a * d + 3 * d * f
        biases = (a + 2 * k) * self.has_qkv_bias + d * self.has_output_bias + (2 * f + d) * self.has_mlp_bias
        return matrices + biases + self.num_norms * d + 2 * self.head_size * self.has_head_norms

    def adapter_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Parameters of LoRA adapters: ``r (inputs + outputs)`` of each targeted matrix of each layer.

        Raises ConfigError for a name that is not a matrix of the supported model families.
        """
        d, f, a, k = self.width, self.mlp_width, self.attention_width, self.kv_width
        sizes = {
            "q_proj": d + a, "k_proj": d + k, "v_proj": d + k, "o_proj": a + d,
            "gate_proj": d + f, "up_proj": d + f, "down_proj": f + d,
        }  # fmt: skip
        names = tuple(sizes) if targets == ("all-linear",) else targets
        if unknown := [name for name in names if name not in sizes and name != "lm_head"]:
            raise ConfigError(
                f"plan cannot count adapters of {', '.join(unknown)} (model.lora.target_modules); "
                f"it counts {', '.join(sizes)}, lm_head and all-linear"
            )
        layer_adapters = rank * self.num_layers * sum(sizes[name] for name in names if name in sizes)
        return layer_adapters + rank * (d + self.vocabulary) * ("lm_head" in names)

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
        return self.root_parameters + self.num_layers * self.layer_parameters


# The shape of a model from its config.json: a folder, a file that Hugging Face has in its cache, or the
# shapes of known models in ``known_models.toml``. Nothing is downloaded.


_GEMMA: Final = {
    "num_norms": 4, "has_head_norms": True, "tie_word_embeddings": True, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
}  # fmt: skip
# Properties of a family that config.json does not state; keys of config.json are defaults that it may omit.
_FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"has_qkv_bias": True},
    "qwen3": {"has_head_norms": True},
    "gemma3_text": _GEMMA,
    "gemma3": _GEMMA,
}


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
        num_norms=int(values.get("num_norms", 2)),
        longest=values.get("max_position_embeddings"),
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
