"""The engine contract: token ids in; ids, log-probs, entropies, finish reason and weight version out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import Field

from outrider.config import Settings
from outrider.tokens import Tokenizer


class EngineSettings(Settings):
    """Base of the settings of every engine.

    ``is_exact``: it generates with the trainer's own weights, so its log-probs are compared once instead of
    in every step. ``takes_adapters``: it supports ``model.lora``, because it generates with the given model
    or with what ``export`` writes (merged adapters). ``has_own_processes``: under ``[cluster]`` it has its
    own processes, which accept single requests, can use several GPUs, and load weights from another GPU.
    ``reads_contexts``: it parses messages from the ids of its requests, so these must only grow and contain
    plain messages as the chat template writes them.
    """

    is_exact: ClassVar[bool] = False
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
    """The trained model generates, in process. ``max_rows`` limits the batch; further requests wait (a model
    that runs unpacked takes them one by one).
    """

    is_exact: ClassVar[bool] = True
    takes_adapters: ClassVar[bool] = True

    type: Literal["local"] = "local"
    max_rows: int = Field(256, ge=1)


class VllmSettings(EngineSettings):
    """vLLM. ``memory``: on a CPU the GiB of keys and values (None: 2), on a GPU the share that vLLM may use
    beside the trainer (None: 0.3; 0.9 under ``[cluster]`` if the engine has the GPU alone). ``eager`` skips
    vLLM's compiler.
    """

    takes_adapters: ClassVar[bool] = True
    has_own_processes: ClassVar[bool] = True

    type: Literal["vllm"] = "vllm"
    top_k: int = Field(20, ge=1)
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
    is greedy. ``cache_key`` names the rollout, whose keys and values can be reused between turns.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    cache_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A sampled continuation.

    ``logprobs``: natural log of the probability at the sampling temperature (at 1 when greedy).
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
        ...

    def release(self, cache_keys: Sequence[str]) -> None:
        """Drop the caches of these rollouts."""
        ...

    def free_cache(self) -> None:
        """Free the memory that the engine does not need until its next batch."""
        ...

    def load(self, version: int) -> None:
        """Use the policy's new weights and drop all cached keys and values.

        The caller counts versions; generations have ``version`` as their ``weight_version``.
        """
        ...
