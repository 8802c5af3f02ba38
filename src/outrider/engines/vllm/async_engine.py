"""vLLM in processes of its own behind one asyncio loop: every request is under way as soon as it is there,
and no turn waits for another one's.

New weights come through vLLM's four calls (0.32): start, update, finish, version. Nothing is served while
they do, the prefix cache is dropped, and its blocks are salted with the version.
"""

import asyncio
import os
import zlib
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

from outrider.engines.base import Generation, Request, VllmSettings
from outrider.engines.vllm.engine import Requests, format_error, loading, options, prompt
from outrider.engines.vllm.startup import ENDS_WITH_PARENT, register
from outrider.errors import EngineFault


class AsyncVllm:
    """``model`` is a Hugging Face folder or id, which ``num_gpus`` hold together (``tensor_parallel``).

    ``sleeps``: :meth:`sleep` gives the GPU's memory back; weights and cache are gone until :meth:`load` then.
    Made inside the loop that asks it; vLLM's processes end with this one. Raises ModelError when vLLM is
    missing or cannot load the model.
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
    ) -> None:
        self._requests = requests
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
        """Whether a process of vLLM has ended: it serves nobody any more."""
        return bool(self.llm.errored)

    async def stream(self, request: Request, version: int) -> Generation:
        """One continuation, by weights of ``version``. Raises EngineFault when the context leaves no room or
        vLLM fails.
        """
        self._requests.require_room(request)
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**self._requests.sampling(request), output_kind=RequestOutputKind.FINAL_ONLY)
        name = str(next(self._numbers))  # never used twice
        latest: Any = None
        try:
            async for output in self.llm.generate(prompt(request, version=version), params, name):
                latest = output
        except Exception as error:  # vLLM raises whatever its executor met
            raise EngineFault(f"vLLM: {format_error(error)}") from error
        if latest is None or not latest.finished:
            raise EngineFault(f"vLLM returned nothing for {request.request_id}")
        versions = {span.version for span in latest.outputs[0].weight_versions or ()}
        if versions - {str(version)}:
            raise EngineFault(f"vLLM wrote tokens of version {sorted(versions)} under {version}")
        return self._requests.generation(request, latest.outputs[0], version=version)

    async def load(self, version: int, pieces: AsyncIterable[bytes]) -> int:
        """Take all weights, as safetensors by Hugging Face names; the CRC-32 of all bytes. Raises EngineFault
        where vLLM does not: it serves nobody any more then.
        """
        checksum = 0
        await self.begin_update()
        async for piece in pieces:
            checksum = zlib.crc32(piece, checksum)
            await self.take({"piece": piece, "checksum": zlib.crc32(piece)})
        await self.end_update(version)
        return checksum

    async def meet(self, info: Mapping[str, Any]) -> None:
        """Whoever sends weights from a GPU, anew; ``info`` is of the backend."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        with _faults("met no trainer"):
            await self.llm.shutdown_weight_transfer_engine()
            await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(info)))

    async def begin_update(self) -> None:
        """Requests under way end and no other one begins; an engine that sleeps gets memory for weights."""
        with _faults("took no weights"):
            await self.llm.pause_generation(mode="wait", clear_cache=True)
            if self._is_asleep:
                await self.llm.wake_up(tags=["weights"])
            await self.llm.start_weight_update()

    async def take(self, info: Mapping[str, Any]) -> None:
        """Weights of an update that has begun; ``info`` is of the backend."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with _faults("took no weights"):
            await self.llm.update_weights(WeightTransferUpdateRequest(update_info=dict(info)))

    async def end_update(self, version: int) -> None:
        """All weights are here. Memory for keys and values comes only now; nothing that was cached is used
        again.
        """
        with _faults("took no weights"):
            await self.llm.finish_weight_update(weight_version=str(version))
            if self._is_asleep:
                await self.llm.wake_up(tags=["kv_cache"])
                self._is_asleep = False
            if not await self.llm.reset_prefix_cache():
                raise EngineFault("vLLM kept its prefix cache after new weights")
            await self.llm.resume_generation()
            loaded_version = await self.llm.get_weight_version()
        if loaded_version != str(version):
            raise EngineFault(f"vLLM has weights of version {loaded_version}, and was sent {version}")

    async def sleep(self) -> None:
        """Give the GPU's memory back: the next weights come whole, so these are not kept either (level 2)."""
        if not self._is_asleep:
            with _faults("did not sleep"):
                await self.llm.sleep(level=2)
            self._is_asleep = True

    def close(self) -> None:
        """End vLLM's processes."""
        self.llm.shutdown()


@contextmanager
def _faults(problem: str) -> Iterator[None]:
    """What vLLM raises, as an EngineFault."""
    try:
        yield
    except EngineFault:
        raise
    except Exception as error:
        raise EngineFault(f"vLLM {problem}: {format_error(error)}") from error


async def stream_all(engine: AsyncVllm, requests: Iterable[Request], version: int) -> list[Generation]:
    """A batch: all requests at once. Raises the first fault; the others are ended then."""
    tasks = [asyncio.ensure_future(engine.stream(request, version)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
