"""vLLM in its own processes behind one asyncio loop: each request starts at once, and no turn waits for
another one.

New weights are loaded by four calls of vLLM 0.32: start, update, finish, version. Meanwhile no request runs;
the prefix cache is dropped, and its blocks are salted with the version.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

from outrider.engines.base import Generation, Request, VllmSettings
from outrider.engines.vllm.engine import Requests, format_error, loading, options, prompt, require_interface
from outrider.engines.vllm.startup import ENDS_WITH_PARENT, register
from outrider.errors import EngineFault


class AsyncVllm:
    """``model`` is a Hugging Face folder or id, split over ``num_gpus`` (tensor parallelism).

    With ``sleeps``, :meth:`sleep` frees the GPU's memory; weights and cache are then gone until :meth:`load`.
    Create it inside the event loop that uses it; vLLM's processes end with this one. Raises ModelError if
    vLLM is missing or cannot load the model.
    """

    def __init__(
        self,
        *,
        model: str,
        requests: Requests,
        precision: str,
        device: str,
        settings: VllmSettings,
        num_gpus: int = 1,
        backend: str = "outrider",
        sleeps: bool = False,
        on_tokens: Callable[[int], None] = lambda num: None,
    ) -> None:
        self._requests, self._on_tokens = requests, on_tokens
        self._numbers = count()
        self._is_asleep = False
        arguments = options(
            settings,
            model=model,
            context_length=requests.context_length,
            precision=precision,
            device=device,
        )
        with loading():
            require_interface()
            from vllm.config import WeightTransferConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            register()
            os.environ[ENDS_WITH_PARENT] = "1"
            self.llm: Any = AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    **arguments,
                    tensor_parallel_size=num_gpus,
                    distributed_executor_backend="mp" if num_gpus > 1 else None,
                    weight_transfer_config=WeightTransferConfig(backend=backend),
                    enable_sleep_mode=sleeps,
                )
            )

    @property
    def is_dead(self) -> bool:
        """Whether a process of vLLM has ended; no request succeeds any more."""
        return bool(self.llm.errored)

    async def stream(self, request: Request, version: int) -> Generation:
        """Sample one continuation with the weights of ``version``. Raises EngineFault."""
        self._requests.require_room(request)
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # not only the final output, because progress shows that a process is no hanging one
        params = SamplingParams(**self._requests.sampling(request), output_kind=RequestOutputKind.CUMULATIVE)
        name = str(next(self._numbers))  # never reused
        latest: Any = None
        try:
            async for output in self.llm.generate(prompt(request, version=version), params, name):
                latest = output
                self._on_tokens(1)
        except Exception as error:  # vLLM raises any exception of its executor
            raise EngineFault(f"vLLM: {format_error(error)}") from error
        if latest is None or not latest.finished:
            raise EngineFault(f"vLLM returned nothing for {request.request_id}")
        versions = {span.version for span in latest.outputs[0].weight_versions or ()}
        if versions - {str(version)}:
            raise EngineFault(f"vLLM sampled tokens of version {sorted(versions)} instead of {version}")
        return self._requests.generation(request, latest.outputs[0], version=version)

    async def load(self, version: int, path: str, checksum: int) -> None:
        """Load all weights from a file of safetensors with Hugging Face names, whose CRC-32 is ``checksum``.

        After an EngineFault the engine is unusable.
        """
        await self.begin_update()
        await self.take({"path": path, "checksum": checksum})
        await self.end_update(version)

    async def meet(self, info: Mapping[str, Any]) -> None:
        """Connect to the sender of weights from a GPU; ``info`` is defined by the backend."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        with _faults("could not connect to the trainer"):
            await self.llm.shutdown_weight_transfer_engine()
            await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(info)))

    async def begin_update(self) -> None:
        """Finish running requests and start no other; a sleeping engine allocates memory for weights."""
        with _faults("did not load new weights"):
            await self.llm.pause_generation(mode="wait", clear_cache=True)
            if self._is_asleep:
                await self.llm.wake_up(tags=["weights"])
            await self.llm.start_weight_update()

    async def take(self, info: Mapping[str, Any]) -> None:
        """Load weights of the current update; ``info`` is defined by the backend."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with _faults("did not load new weights"):
            await self.llm.update_weights(WeightTransferUpdateRequest(update_info=dict(info)))

    async def end_update(self, version: int) -> None:
        """Finish an update, allocate the cache of a sleeping engine and drop everything cached before."""
        with _faults("did not load new weights"):
            await self.llm.finish_weight_update(weight_version=str(version))
            if self._is_asleep:
                await self.llm.wake_up(tags=["kv_cache"])
                self._is_asleep = False
            if not await self.llm.reset_prefix_cache():
                raise EngineFault("vLLM did not reset its prefix cache after new weights")
            await self.llm.resume_generation()
            loaded_version = await self.llm.get_weight_version()
        if loaded_version != str(version):
            raise EngineFault(f"vLLM has weights of version {loaded_version} instead of {version}")

    async def sleep(self) -> None:
        """Free the GPU's memory, including the weights, which the next update replaces (level 2)."""
        if not self._is_asleep:
            with _faults("did not sleep"):
                await self.llm.sleep(level=2)
            self._is_asleep = True

    def close(self) -> None:
        """End vLLM's processes."""
        self.llm.shutdown()


@contextmanager
def _faults(problem: str) -> Iterator[None]:
    """Convert exceptions of vLLM to an EngineFault."""
    try:
        yield
    except EngineFault:
        raise
    except Exception as error:
        raise EngineFault(f"vLLM {problem}: {format_error(error)}") from error


async def stream_all(engine: AsyncVllm, requests: Iterable[Request], version: int) -> list[Generation]:
    """Sample all requests concurrently. Raises the first fault and cancels the others."""
    tasks = [asyncio.ensure_future(engine.stream(request, version)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
