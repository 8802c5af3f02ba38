"""The shape of a model from its config.json: a folder, a file that Hugging Face has in its cache, or the
shapes of known models in ``known_models.toml``. Nothing is asked for on the network.
"""

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from outrider.engines.model_names import PACKAGED, cache_folder, require_known_model
from outrider.errors import ModelError
from outrider.planning.shape import ModelShape

_GEMMA: Final = {
    "num_norms": 4, "has_head_norms": True, "tie_word_embeddings": True, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
}  # fmt: skip
# What a family has beside what its config.json says; keys of config.json are defaults that it may leave out.
_FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"has_qkv_bias": True},
    "qwen3": {"has_head_norms": True},
    "gemma3_text": _GEMMA,
    "gemma3": _GEMMA,
}


def find_shape(name: str) -> ModelShape:
    """The shape of ``model.name``. Raises ModelError, which names what to do, for a model whose
    configuration is not here or whose parts are not counted.
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
        f"the shape of {name!r} is not here: fetch its config.json (`hf download {name} config.json`), "
        f"or name a folder with one; known without: {', '.join(known_models())}"
    )


def shape_from_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """The shape that a config.json describes; of a model with pictures, its text part's. Raises ModelError.

    Names of keys are those of Hugging Face.
    """
    text: dict[str, Any] = dict(config.get("text_config") or config)
    family = str(text.get("model_type", config.get("model_type", "")))
    if family not in _FAMILIES:
        raise ModelError(
            f"model {name!r} is of the family {family!r}, whose parameters plan does not count "
            f"(it counts {', '.join(_FAMILIES)})"
        )
    # null stands for what is left out
    values = {**_FAMILIES[family], **{key: value for key, value in text.items() if value is not None}}
    try:
        return _shape(values, name=name, family=family)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"config.json of {name!r} lacks or misspells {error}") from error


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
    """Parts of config.json of the models that the documents name, by their name."""
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
        raise ModelError(f"{file} holds no table of settings")
    return content
