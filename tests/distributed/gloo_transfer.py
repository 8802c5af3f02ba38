"""vLLM's own transfer of weights with NCCL, on CPUs: its communicator broadcasts with gloo, and its streams
do nothing. All else is vLLM's code, in a trainer's process and in the processes of an engine.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.distributed.weights import EngineClient
from outrider.engines.base import VllmSettings
from outrider.engines.vllm.async_engine import AsyncVllm
from outrider.engines.vllm.engine import Requests

LIMIT_S = 300.0


class GlooCommunicator:
    """Stands for vLLM's PyNcclCommunicator."""

    def __init__(self, group: Any, device: Any) -> None:
        store = dist.PrefixStore("gloo", group.store)
        self._group = dist.ProcessGroupGloo(store, group.rank, group.world_size, timedelta(seconds=LIMIT_S))

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        del self._group


def replace_nccl(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace what needs a GPU; ``put`` sets an attribute."""
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None)
    put(pynccl, "PyNcclCommunicator", GlooCommunicator)
    put(packed_tensor, "_get_streams", lambda device, num_buffers: (stream,) * num_buffers)
    put(torch.accelerator, "current_device_index", lambda: 0)
    put(torch.accelerator, "synchronize", lambda: None)


def install(folder: Path) -> None:
    """Add an entry point to ``folder``, by which each process of vLLM replaces NCCL when it starts."""
    metadata = folder / "gloo_transfer-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gloo-transfer\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ngloo = tests.distributed.gloo_transfer:replace_nccl\n"
    )


class LoopClient(EngineClient):
    """Calls of the sender, forwarded to an engine in the event loop of another thread."""

    def __init__(self, engine: AsyncVllm, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__([], tensor_parallel=1)
        self.num_receivers = 1
        self._engine, self._loop = engine, loop

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine; raises what it raises."""
        coroutine = getattr(self._engine, method)(*arguments)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_S)

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        self.ask("meet", dict(init_info))

    def start_weight_update(self) -> None:
        self.num_calls = 1
        self.ask("begin_update")

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self.num_calls += 1
        self.ask("take", dict(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.num_calls += 1
        self.ask("end_update", self.version)


@contextmanager
def engine(folder: Path) -> Iterator[LoopClient]:
    """vLLM for the model in ``folder``, ready to receive weights; it has its own processes."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    requests = Requests(eos_token_ids=frozenset({1}), eos_texts=(), context_length=64, top_k=5)

    async def start() -> AsyncVllm:
        return AsyncVllm(
            model=str(folder), requests=requests, precision="float32", device="cpu",
            settings=VllmSettings(memory=1), backend="outrider-nccl",
        )  # fmt: skip

    started = None
    try:
        started = asyncio.run_coroutine_threadsafe(start(), loop).result(2 * LIMIT_S)
        yield LoopClient(started, loop)
    finally:
        if started is not None:
            started.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
