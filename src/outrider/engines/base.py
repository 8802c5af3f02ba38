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

    ``is_exact``: the trainer's own weights generate, so that its log-probs are compared with the engine's
    once and not in every step.
    ``takes_adapters``: ``model.lora`` is possible, because it generates with the model that it is given, or
    with what ``export`` writes, where adapters are merged.
    ``has_own_processes``: under ``[cluster]`` it is processes of its own, which take requests one by one, can
    have several GPUs, and weights from a GPU to another.
    ``reads_contexts``: it takes the messages out of the ids of its requests, so these must only grow and hold
    plain messages as the chat template writes them by itself.
    """

    is_exact: ClassVar[bool] = False
    takes_adapters: ClassVar[bool] = False
    has_own_processes: ClassVar[bool] = False
    reads_contexts: ClassVar[bool] = False
    if TYPE_CHECKING:
        type: str = ""  # the plug-in's name; a class that does not declare it gets it when it is named

    def no_training(self) -> str:
        """Why a run may not train on what this engine gives, in one line; empty where it may."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """Facts of a run for its engine: ``build(settings, context)`` of the class takes what it needs.

    ``language_model`` is the policy's :class:`outrider.engines.local.model.LanguageModel`, whose weights
    move; ``export(folder)`` writes them as a Hugging Face folder. ``folder`` is the engine's own.
    ``context_length`` (None: the model's) and ``precision`` are resolved settings. ``on_tokens`` is told how
    many tokens came with each decoding step.
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
    """The model that is trained generates itself, in process. ``max_rows`` bounds the batch: more requests
    wait their turn (a model that runs unpacked takes them one by one).
    """

    is_exact: ClassVar[bool] = True
    takes_adapters: ClassVar[bool] = True

    type: Literal["local"] = "local"
    max_rows: int = Field(256, ge=1)


class VllmSettings(EngineSettings):
    """``memory``: on a CPU GiB of keys and values (None: 2), on a GPU the share that vLLM may take beside the
    trainer (None: 0.3; 0.9 under ``[cluster]`` where the GPU is the engine's alone). ``eager`` skips vLLM's
    compiler.
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
    # the turn was closed, by an EOS id or as the chat template closes one; the closing is part of the ids
    EOS = "eos"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One continuation to sample.

    ``token_ids`` is the whole context. ``seed`` starts this request's own random stream, so that a result
    does not depend on which requests share its batch (up to the engine's documented numerical level).
    ``temperature`` 0 is greedy. ``cache_key`` names the rollout, so that its keys and values can be kept
    between turns.
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
    """A batch in, a batch out, in the order asked. Raises EngineFault when the batch could not be served.

    As a plug-in, a class with ``Settings`` (a subclass of :class:`EngineSettings`), made by ``build(settings,
    context)`` with :class:`EngineContext`, or of its settings alone.
    """

    tokenizer: Tokenizer
    context_length: int
    weight_version: int

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Sample all requests. Every context must leave room for at least one token."""
        ...

    def release(self, cache_keys: Sequence[str]) -> None:
        """Forget what is kept for these rollouts."""
        ...

    def free_cache(self) -> None:
        """Give back what memory the engine can spare until its next batch."""
        ...

    def load(self, version: int) -> None:
        """The policy's weights moved, and are of this ``version`` now: drop every cached key and value.

        The caller counts versions; ``weight_version`` is the one that :meth:`generate` answers with.
        """
        ...
