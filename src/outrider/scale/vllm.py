"""An engine process whose engine is vLLM, with processes of its own: it takes requests one by one, from all
workers.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from outrider.engines.base import Generation, Request, VllmSettings
from outrider.engines.local.model import longest_context, resolve_model, resolve_precision, turn_ends
from outrider.engines.vllm_async import AsyncVllm, stream_all
from outrider.engines.vllm_requests import Requests
from outrider.errors import ClusterFault, EngineFault
from outrider.scale.engine import require_newer, require_version
from outrider.scale.recipe import Recipe
from outrider.scale.waiting import AGAIN
from outrider.scale.weights import Carrier, Parcel
from outrider.train.settings import RunSettings

_ALONE: Final = 0.9  # share of a GPU


class VllmEngineActor:
    """See :class:`outrider.scale.engine.EngineActor`; all workers are one client here."""

    def __init__(self, recipe: Recipe, number: int, folder: str | Path, carrier: Carrier) -> None:
        self._recipe, self._number, self._carrier = recipe, number, carrier
        self._version: int | None = None
        self._may_begin = asyncio.Event()  # not while weights come
        self._may_begin.set()
        self._num_running = 0
        self._since = self._busy_s = 0.0

    async def build(self) -> tuple[int, int]:
        """See :class:`outrider.scale.engine.EngineActor`."""
        settings = self._recipe.settings()
        model, cluster = settings.model, settings.cluster
        engine = cast(VllmSettings, settings.engine)
        self._sleeps = cluster.placement == "colocate"
        folder = resolve_model(model.name)
        longest = longest_context(AutoConfig.from_pretrained(folder), model.name)
        ends, texts = turn_ends(model.name, AutoTokenizer.from_pretrained(folder), _configured(folder))
        requests = Requests(
            eos_token_ids=ends,
            eos_texts=texts,
            context_length=min(model.context_length or longest, longest),
            top_k=engine.top_k,
        )
        self._engine = AsyncVllm(
            model=folder,
            requests=requests,
            precision=resolve_precision(model.precision, model.device),
            device=model.device,
            settings=_with_memory(settings),
            backend=f"outrider-{cluster.weights}" if cluster.sends_directly else "outrider",
            num_gpus=cluster.tensor_parallel,
            sleeps=self._sleeps and model.device != "cpu",
        )
        return os.getpid(), requests.context_length

    async def load(self, parcel: Parcel) -> tuple[int, int]:
        """See :class:`outrider.scale.engine.EngineActor`."""
        require_newer(self._number, self._version, parcel.version)
        with self._renewing():
            checksum = await self._engine.load(parcel.version, self._pieces(parcel))
            if checksum != parcel.checksum:
                raise ClusterFault(
                    f"the weights of version {parcel.version} did not arrive as they were sent"
                )
            self._version = parcel.version
        return parcel.version, checksum

    @contextmanager
    def _renewing(self) -> Iterator[None]:
        """Half of the weights are served to nobody; whoever asks meanwhile waits."""
        self._version = None
        self._may_begin.clear()
        try:
            with self._as_cluster_fault():
                yield
        finally:
            self._may_begin.set()

    @contextmanager
    def _as_cluster_fault(self) -> Iterator[None]:
        """A fault of vLLM's that is of no request is the run's."""
        try:
            with self._ending():
                yield
        except EngineFault as fault:
            raise ClusterFault(f"engine {self._number}: {fault}; {AGAIN}") from fault

    async def meet(self, info: Mapping[str, Any]) -> None:
        """The rank that sends: this and the next three are the calls of
        :class:`outrider.scale.direct.EngineClient`.
        """
        with self._as_cluster_fault():
            await self._engine.meet(info)

    async def begin_update(self) -> None:
        """Weights will come."""
        self._version = None
        self._may_begin.clear()
        with self._as_cluster_fault():
            await self._engine.begin_update()

    async def take(self, info: Mapping[str, Any]) -> None:
        """They come."""
        with self._as_cluster_fault():
            await self._engine.take(info)

    async def end_update(self, version: int) -> int:
        """All are here; the version that they have now."""
        with self._as_cluster_fault():
            await self._engine.end_update(version)
        self._version = version
        self._may_begin.set()
        return version

    async def _pieces(self, parcel: Parcel) -> AsyncIterator[bytes]:
        for handle in parcel.pieces:
            yield await asyncio.to_thread(self._carrier.get, handle)

    async def generate(
        self, client: str, requests: Sequence[Request], version: int, or_newer: bool = False
    ) -> list[Generation]:
        """See :class:`outrider.scale.engine.EngineActor`."""
        version = await self._await_version(version, or_newer)
        with self._busy():
            return await stream_all(self._engine, requests, version)

    async def _await_version(self, version: int, or_newer: bool) -> int:
        """The version that answers, once nothing is half loaded. Raises ClusterFault for another one."""
        await self._may_begin.wait()
        if or_newer and self._version is not None:
            version = max(version, self._version)
        require_version(self._number, self._version, version)
        return version

    async def stream(self, request: Request, version: int, or_newer: bool = False) -> Generation:
        """One request, beside all others. Raises what :meth:`generate` raises."""
        version = await self._await_version(version, or_newer)
        with self._busy():
            return await self._engine.stream(request, version)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        if not self._num_running:
            self._since = time.perf_counter()
        self._num_running += 1
        try:
            with self._ending():
                yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._busy_s += time.perf_counter() - self._since

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Whoever asks hears of vLLM's end as of this process's own: another one takes its place."""
        try:
            yield
        except EngineFault:
            if self._engine.is_dead:
                os._exit(1)
            raise

    async def free_cache(self) -> None:
        """The trainers' turn: where they are on the same GPUs the engine sleeps until the next weights."""
        if self._sleeps:
            self._version = None
            with self._as_cluster_fault():
                await self._engine.sleep()

    async def release(self, client: str, cache_keys: Sequence[str]) -> None:
        """Nothing to do: vLLM evicts blocks when it needs them."""

    async def clear(self, client: str) -> None:
        """Nothing: what is kept is everybody's, and no bits are promised."""

    async def busy_s(self) -> float:
        """Seconds in which at least one request was under way."""
        running = time.perf_counter() - self._since if self._num_running else 0.0
        return self._busy_s + running

    async def close(self) -> None:
        """End vLLM's processes."""
        self._engine.close()


def _with_memory(settings: RunSettings) -> VllmSettings:
    """The most of a GPU that is the engine's alone; vLLM's default here is for one beside a trainer."""
    engine = cast(VllmSettings, settings.engine)
    is_alone = settings.model.device != "cpu" and settings.cluster.placement == "disaggregate"
    if not is_alone or engine.memory is not None:
        return engine
    return engine.model_copy(update={"memory": _ALONE})


def _configured(folder: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:  # many a folder has none
        return None
