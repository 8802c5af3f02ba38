"""Engines in their own processes: actors, the engine that represents all of them, and probes of their
weights.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, cast

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from outrider.distributed.ray_session import AGAIN, Recipe, convert_error, results, timeout_error
from outrider.distributed.weights import Carrier, Parcel, drop, engine_weights, pack, unpack
from outrider.engines.base import Engine, EngineContext, EngineSettings, Generation, Request, VllmSettings
from outrider.engines.local.model import (
    LanguageModel,
    load_model,
    longest_context,
    resolve_model,
    resolve_precision,
    turn_ends,
)
from outrider.engines.vllm.async_engine import AsyncVllm, stream_all
from outrider.engines.vllm.engine import Requests
from outrider.errors import ClusterFault, EngineFault, ProcessLost
from outrider.plugins import registry as plugins
from outrider.tokens import Tokenizer
from outrider.trace import Leaf, Trace
from outrider.training.adapters import choose_trained, plain_names
from outrider.training.learner import Learner
from outrider.training.policy import export, set_threads
from outrider.types import Message, Origin, Outcome

if TYPE_CHECKING:
    from outrider.distributed.learner import ShardedLearner


_NUM_PROBE_TOKENS: Final = 16
_ALL_CLIENTS: Final = ""
_SHARE_ALONE: Final = 0.9  # of a GPU that only the engine uses

ResultT = TypeVar("ResultT")


def probes(engine: Engine, trace: Trace, *, num: int) -> list[Trace]:
    """Sample ``num`` continuations of a group's prompt, one per engine, which are never trained on.

    They show whether the engines have the trainer's weights if the tokens of a step are of older ones. Empty
    if no prompt leaves room.
    """
    longest = engine.context_length - 1
    prompt = next(
        (path[0] for _, path in trace.rollouts() if path and 0 < len(path[0].token_ids) <= longest), None
    )
    if prompt is None:
        return []
    requests = [
        Request(
            request_id=f"probe-{number}/0",
            cache_key=f"probe-{number}/0",
            token_ids=prompt.token_ids,
            max_tokens=min(_NUM_PROBE_TOKENS, engine.context_length - len(prompt.token_ids)),
            seed=number,
        )
        for number in range(num)
    ]
    generations = engine.generate(requests)
    engine.release([request.request_id for request in requests])
    traces = []
    for generation in generations:
        probe = Trace(task=trace.task, modes=("probe",))
        root = probe.append(
            parent=None, origin=Origin.PROMPT, token_ids=prompt.token_ids, message=prompt.message
        )
        node = probe.append(
            parent=root.node_id,
            origin=Origin.POLICY,
            token_ids=generation.token_ids,
            message=Message(role="assistant", content=""),
            logprobs=generation.logprobs,
            entropies=generation.entropies,
            weight_version=generation.weight_version,
            credit=(0.0,) * len(generation.token_ids),
        )
        probe.finish(Leaf(node_id=node.node_id, rollout=0, outcome=Outcome.FINISHED, episode_return=0.0))
        traces.append(probe)
    return traces


class EngineActor:
    """A process with all weights and engines over them; no request is accepted before :meth:`load`.

    An exact engine (``is_exact``) is built once per client, with its own keys and values, so that results do
    not depend on the timing of other clients' requests. The model is shared.
    """

    def __init__(self, recipe: Recipe, number: int, folder: str, carrier: Carrier) -> None:
        self._recipe, self._number, self._carrier = recipe, number, carrier
        self._folder = Path(folder) / f"engine-{number}"
        self._version: int | None = None
        self._engines: dict[str, Engine] = {}
        self._model: LanguageModel | None = None
        self._busy_s = 0.0

    def build(self) -> tuple[int, int]:
        """Load the model; returns the process id and the context length."""
        settings = self._settings = self._recipe.settings()
        set_threads(settings.num_threads, device=settings.model.device)
        chosen = settings.model
        self._model = load_model(
            chosen.name, precision=chosen.precision, device=chosen.device, forward=chosen.forward
        )
        if settings.engine.is_exact:
            choose_trained(self._model.model, lora=settings.model.lora, trained_layers=None)
        self._model.model.requires_grad_(False)
        return os.getpid(), self._engine("").context_length

    def load(self, parcel: Parcel) -> tuple[int, int]:
        """Load new weights and clear all caches; returns version and checksum. Raises ClusterFault for
        weights older than the current ones.
        """
        assert self._model is not None
        require_newer(self._number, self._version, parcel.version)
        self._version = None  # no request is accepted while they are incomplete
        model = self._model.model
        own = plain_names(model) | dict(model.named_parameters())
        checksum = unpack(parcel, own, carrier=self._carrier)
        for engine in self._engines.values():
            engine.load(parcel.version)
        self._version = parcel.version
        return parcel.version, checksum

    def generate(
        self, client: str, requests: Sequence[Request], version: int, or_newer: bool = False
    ) -> list[Generation]:
        """Sample for a client. Raises ClusterFault unless the weights are of ``version``, or newer with
        ``or_newer``.
        """
        if or_newer and self._version is not None:
            version = max(version, self._version)
        require_version(self._number, self._version, version)
        began = time.perf_counter()
        try:
            generations = self._engine(client).generate(requests)
        finally:
            self._busy_s += time.perf_counter() - began
        if wrong := {generation.weight_version for generation in generations} - {version}:
            raise ClusterFault(
                f"engine {self._number} sampled tokens of version {wrong.pop()} instead of {version}"
            )
        return generations

    def clear(self, client: str) -> None:
        """Clear the caches of a client, so that a repeated request gives the same bits as the first one."""
        if self._settings.engine.is_exact:
            self._engines.pop(client, None)

    def busy_s(self) -> float:
        """Return the total seconds in :meth:`generate`."""
        return self._busy_s

    def release(self, client: str, cache_keys: Sequence[str]) -> None:
        self._engine(client).release(cache_keys)

    def free_cache(self) -> None:
        for engine in self._engines.values():
            engine.free_cache()

    def _engine(self, client: str) -> Engine:
        name = client if self._settings.engine.is_exact else ""
        if name in self._engines:
            return self._engines[name]
        settings, model = self._settings, self._model
        assert model is not None
        context = EngineContext(
            language_model=model,
            export=lambda folder: export(model, folder, check=False),
            folder=self._folder,
            context_length=settings.model.context_length,
            precision=resolve_precision(settings.model.precision, settings.model.device),
            device=settings.model.device,
            seed=settings.seed,
            on_tokens=lambda num_tokens: None,
        )
        engine = cast(Engine, plugins.build("engines", settings.engine, context))
        if self._version is not None:
            engine.load(self._version)
        self._engines[name] = engine  # only now: an engine whose load failed must not serve requests
        return engine


class RemoteEngine:
    """All engine processes as one engine, for one client.

    A group's rollouts stay with one engine, because of their keys and values; groups are assigned in turn, in
    the order of their first requests. Raises EngineFault like any engine, and ClusterFault if an engine is
    lost or has other weights than ``weight_version`` (or newer ones with ``or_newer``).
    """

    or_newer: ClassVar[bool] = False

    def __init__(
        self,
        ray: Any,
        actors: Sequence[Any],
        *,
        client: str,
        tokenizer: Tokenizer,
        context_length: int,
        timeout_s: float,
        first: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.weight_version = 0
        self._ray, self._actors, self._client, self._timeout_s = ray, list(actors), client, timeout_s
        self._first = self._next = first  # clients start at different engines
        self._homes: dict[str, int] = {}  # group -> engine
        self._known_busy_s = [0.0] * len(actors)  # by engine, at the last request
        self._before_s = [0.0] * len(actors)  # by engine, of its predecessors

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Sample all requests on the engines concurrently."""
        parts: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            parts.setdefault(self._engine_index(request), []).append(index)
        calls = {
            _engine_name(number): self._actors[number].generate.remote(
                self._client, [requests[index] for index in indices], self.weight_version
            )
            for number, indices in parts.items()
        }
        generations: dict[int, Generation] = {}
        for indices, answers in zip(parts.values(), self._wait(calls, "generate"), strict=True):
            generations |= zip(indices, answers, strict=True)
        return [generations[index] for index in range(len(requests))]

    async def stream(self, request: Request) -> Generation:
        number = self._engine_index(request)
        call = self._actors[number].stream.remote(request, self.weight_version, self.or_newer)
        action = "generate"
        try:
            generation: Generation = await asyncio.wait_for(
                asyncio.wrap_future(call.future()), self._timeout_s
            )
        except TimeoutError as error:
            name, setting = _engine_name(number), "cluster.turn_timeout_s"
            raise timeout_error(name, action, self._timeout_s, setting) from error
        except Exception as error:
            raise convert_error(self._ray, error, _engine_name(number), action) from error
        return generation

    def _engine_index(self, request: Request) -> int:
        group = (request.cache_key or request.request_id).rpartition("/")[0]
        if group not in self._homes:
            self._homes[group] = self._next % len(self._actors)
            self._next += 1
        return self._homes[group]

    def release(self, cache_keys: Sequence[str]) -> None:
        # without waiting for the engines
        homes: dict[int, list[str]] = {}
        for key in cache_keys:
            if (number := self._homes.get(key.rpartition("/")[0])) is not None:
                homes.setdefault(number, []).append(key)
        for number, keys in homes.items():
            self._actors[number].release.remote(self._client, keys)

    def free_cache(self) -> None:
        # Waits for the engines: one that did it between two turns would compute the second turn's context
        # differently, with different last bits.
        self._call_all("free_cache")

    def put(self, number: int, actor: Any) -> None:
        """Replace engine ``number``. Its busy seconds since the last request are lost."""
        self._actors[number] = actor
        self._before_s[number] += self._known_busy_s[number]
        self._known_busy_s[number] = 0.0

    def clear(self) -> None:
        """Clear the caches of this client, after a failed batch."""
        self._call_all("clear", self._client)

    def busy_s(self) -> float:
        """Return the total seconds of generation: mean over engines."""
        self._known_busy_s = [float(seconds) for seconds in self._call_all("busy_s")]
        return sum(self._known_busy_s + self._before_s) / len(self._actors)

    def load(self, version: int) -> None:
        """Request only this version from now on. The assignment of groups to engines starts anew, so that no
        batch depends on earlier ones.
        """
        self.weight_version = version
        self._next, self._homes = self._first, {}

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        calls = {
            _engine_name(number): getattr(actor, method).remote(*arguments)
            for number, actor in enumerate(self._actors)
        }
        return self._wait(calls, method)

    def _wait(self, calls: Mapping[str, Any], action: str) -> list[Any]:
        return results(
            self._ray, calls, action=action, limit_s=self._timeout_s, setting="cluster.turn_timeout_s"
        )


def require_version(number: int, current: int | None, requested: int) -> None:
    """Raise ClusterFault if an engine has other weights than requested."""
    if current != requested:
        description = "no weights yet" if current is None else f"weights of version {current}"
        raise ClusterFault(
            f"engine {number} has {description}, and version {requested} was requested; {AGAIN}"
        )


def require_newer(number: int, current: int | None, sent: int) -> None:
    """Raise ClusterFault if an engine receives older weights than it has."""
    if current is not None and sent < current:
        raise ClusterFault(f"engine {number} has weights of version {current}, and was sent {sent}")


def _engine_name(number: int) -> str:
    return f"engine {number}"


class StreamEngineActor:
    """An :class:`EngineActor` that accepts single requests: those that arrive while it generates are its next
    batch. Its methods run in a thread, one at a time; all workers are one client.
    """

    def __init__(self, recipe: Recipe, number: int, folder: str | Path, carrier: Carrier) -> None:
        self._inner = EngineActor(recipe, number, str(folder), carrier)
        self._lock = asyncio.Lock()
        self._waiting: list[tuple[Request, int, bool, asyncio.Future[Generation]]] = []
        self._serving: asyncio.Task[None] | None = None

    async def stream(self, request: Request, version: int, or_newer: bool = False) -> Generation:
        """Sample one request. Raises the exceptions of :meth:`EngineActor.generate`."""
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, version, or_newer, future))
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        return await future

    async def _serve(self) -> None:
        while self._waiting:
            entries, self._waiting = self._waiting, []
            newest = max(entry[1] for entry in entries)
            for version, or_newer in sorted(
                {(newest if entry[2] else entry[1], entry[2]) for entry in entries}
            ):
                batch = [
                    (request, future)
                    for request, own, newer, future in entries
                    if newer == or_newer and (newer or own == version)
                ]
                try:
                    generations = await self._call(
                        self._inner.generate,
                        _ALL_CLIENTS,
                        [request for request, _ in batch],
                        version,
                        or_newer,
                    )
                except Exception as error:  # raised in every waiting request
                    for _, future in batch:
                        future.set_exception(error)
                else:
                    for (_, future), generation in zip(batch, generations, strict=True):
                        future.set_result(generation)
        self._serving = None

    async def _call(self, method: Any, *arguments: Any) -> Any:
        async with self._lock:
            return await asyncio.to_thread(method, *arguments)

    async def build(self) -> tuple[int, int]:
        result: tuple[int, int] = await self._call(self._inner.build)
        return result

    async def load(self, parcel: Parcel) -> tuple[int, int]:
        result: tuple[int, int] = await self._call(self._inner.load, parcel)
        return result

    async def generate(self, client: str, requests: Sequence[Request], version: int) -> list[Generation]:
        generations: list[Generation] = await self._call(
            self._inner.generate, _ALL_CLIENTS, requests, version
        )
        return generations

    async def release(self, client: str, cache_keys: Sequence[str]) -> None:
        await self._call(self._inner.release, _ALL_CLIENTS, cache_keys)

    async def free_cache(self) -> None:
        await self._call(self._inner.free_cache)

    async def clear(self, client: str) -> None:
        """Do nothing: the caches are shared, and the same bits are not guaranteed."""

    async def busy_s(self) -> float:
        return self._inner.busy_s()


class VllmEngineActor:
    """An engine process with vLLM, which has its own processes; all workers are one client."""

    def __init__(self, recipe: Recipe, number: int, folder: str | Path, carrier: Carrier) -> None:
        self._recipe, self._number, self._carrier = recipe, number, carrier
        self._version: int | None = None
        self._may_begin = asyncio.Event()  # cleared while weights are loaded
        self._may_begin.set()
        self._num_running = 0
        self._since = self._busy_s = 0.0

    async def build(self) -> tuple[int, int]:
        settings = self._recipe.settings()
        model, cluster = settings.model, settings.cluster
        engine = cast(VllmSettings, settings.engine)
        self._sleeps = cluster.placement == "colocate"
        # vLLM's default share of a GPU is for an engine beside a trainer
        is_alone = model.device != "cpu" and not self._sleeps
        if is_alone and engine.memory is None:
            engine = engine.model_copy(update={"memory": _SHARE_ALONE})
        folder = resolve_model(model.name)
        longest = longest_context(AutoConfig.from_pretrained(folder), model.name)
        configured = None
        with suppress(OSError):  # many folders have none
            configured = GenerationConfig.from_pretrained(folder)
        ends, texts = turn_ends(model.name, AutoTokenizer.from_pretrained(folder), configured)
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
            settings=engine,
            backend=f"outrider-{cluster.weights}" if cluster.sends_directly else "outrider",
            num_gpus=cluster.tensor_parallel,
            sleeps=self._sleeps and model.device != "cpu",
        )
        return os.getpid(), requests.context_length

    async def load(self, parcel: Parcel) -> tuple[int, int]:
        require_newer(self._number, self._version, parcel.version)
        # requests wait until the weights are complete
        self._version = None
        self._may_begin.clear()

        async def pieces() -> AsyncIterator[bytes]:
            for handle in parcel.pieces:
                yield await asyncio.to_thread(self._carrier.get, handle)

        try:
            with self._as_cluster_fault():
                checksum = await self._engine.load(parcel.version, pieces())
            if checksum != parcel.checksum:
                raise ClusterFault(
                    f"the weights of version {parcel.version} did not arrive as they were sent"
                )
            self._version = parcel.version
        finally:
            self._may_begin.set()
        return parcel.version, checksum

    @contextmanager
    def _as_cluster_fault(self) -> Iterator[None]:
        """Convert faults of vLLM outside of requests."""
        try:
            with self._ending():
                yield
        except EngineFault as fault:
            raise ClusterFault(f"engine {self._number}: {fault}; {AGAIN}") from fault

    async def meet(self, info: Mapping[str, Any]) -> None:
        """Connect to the sending rank; called, like the next three methods, by
        :class:`outrider.distributed.weights.EngineClient`.
        """
        with self._as_cluster_fault():
            await self._engine.meet(info)

    async def begin_update(self) -> None:
        self._version = None
        self._may_begin.clear()
        with self._as_cluster_fault():
            await self._engine.begin_update()

    async def take(self, info: Mapping[str, Any]) -> None:
        with self._as_cluster_fault():
            await self._engine.take(info)

    async def end_update(self, version: int) -> int:
        with self._as_cluster_fault():
            await self._engine.end_update(version)
        self._version = version
        self._may_begin.set()
        return version

    async def generate(
        self, client: str, requests: Sequence[Request], version: int, or_newer: bool = False
    ) -> list[Generation]:
        version = await self._await_version(version, or_newer)
        with self._busy():
            return await stream_all(self._engine, requests, version)

    async def _await_version(self, version: int, or_newer: bool) -> int:
        """Wait until weights are complete and return their version. Raises ClusterFault for a wrong one."""
        await self._may_begin.wait()
        if or_newer and self._version is not None:
            version = max(version, self._version)
        require_version(self._number, self._version, version)
        return version

    async def stream(self, request: Request, version: int, or_newer: bool = False) -> Generation:
        """Sample one request. Raises the exceptions of :meth:`generate`."""
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
        """If vLLM has died, exit, so that this process is replaced."""
        try:
            yield
        except EngineFault:
            if self._engine.is_dead:
                os._exit(1)
            raise

    async def free_cache(self) -> None:
        """If the trainers use the same GPUs, sleep until the next weights."""
        if self._sleeps:
            self._version = None
            with self._as_cluster_fault():
                await self._engine.sleep()

    async def release(self, client: str, cache_keys: Sequence[str]) -> None:
        """Do nothing: vLLM evicts blocks when it needs them."""

    async def clear(self, client: str) -> None:
        """Do nothing: the caches are shared, and the same bits are not guaranteed."""

    async def busy_s(self) -> float:
        """Return the total seconds with at least one running request."""
        running = time.perf_counter() - self._since if self._num_running else 0.0
        return self._busy_s + running

    async def close(self) -> None:
        self._engine.close()


class EnginePool(RemoteEngine):
    """The engine of the training process: :meth:`load` sends the learner's weights to all engines, and stores
    them for engines that replace others. ``anew`` replaces a lost process.
    """

    def __init__(
        self,
        learner: Learner,
        carrier: Carrier,
        *,
        settings: EngineSettings,
        load_s: float,
        anew: Callable[[ProcessLost, bool], None],
        **options: Any,
    ) -> None:
        super().__init__(client="controller", **options)
        self._learner, self._carrier, self._load_s, self._anew = learner, carrier, load_s, anew
        self._settings = settings
        self._parcel: Parcel | None = None
        self.sent: dict[str, float] = {}  # metrics of the last transfer

    def load(self, version: int) -> None:
        """Raises ClusterFault if an engine does not confirm the weights in time and cannot be replaced."""
        began = time.perf_counter()
        self.drop_parcel()
        weights = engine_weights(self._learner, self._settings)
        parcel = self._parcel = pack(weights, version=version, carrier=self._carrier)
        while True:
            try:
                self._send(parcel, dict(enumerate(self._actors)))
                break
            except ProcessLost as error:
                self._anew(error, True)  # which also sends the parcel
        super().load(version)
        self.sent = {
            "weights/bytes": float(parcel.num_bytes * len(self._actors)),
            "weights/rpcs": float(len(self._actors)),
            "time/weights": time.perf_counter() - began,
        }

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        return self._retrying(partial(super().generate, requests))

    def free_cache(self) -> None:
        self._retrying(super().free_cache)

    def busy_s(self) -> float:
        return self._retrying(super().busy_s)

    def _retrying(self, call: Callable[[], ResultT]) -> ResultT:
        """Repeat a call after replacing a lost engine. Raises ClusterFault if it cannot be replaced."""
        while True:
            try:
                return call()
            except ProcessLost as error:
                self._anew(error, False)

    def put(self, number: int, actor: Any) -> None:
        """Replace engine ``number`` and send the last weights to the new one."""
        if self._parcel is not None:
            self._send(self._parcel, {number: actor})
        super().put(number, actor)

    def _send(self, parcel: Parcel, actors: Mapping[int, Any]) -> None:
        answers = results(
            self._ray,
            {f"engine {number}": actor.load.remote(parcel) for number, actor in actors.items()},
            action=f"loading the weights of version {parcel.version}",
            limit_s=self._load_s,
            setting="cluster.update_timeout_s",
        )
        if wrong := [str(answer) for answer in answers if tuple(answer) != (parcel.version, parcel.checksum)]:
            raise ClusterFault(
                f"engines have other weights than version {parcel.version}: {', '.join(wrong)}"
            )

    def drop_parcel(self) -> None:
        """Delete the last weights."""
        if self._parcel is not None:
            drop(self._parcel.pieces, self._carrier)
            self._parcel = None


class DirectPool(EnginePool):
    """The ranks send weights from their GPUs (:mod:`outrider.distributed.weights`)."""

    def __init__(self, ranks: "ShardedLearner", *args: Any, **kwargs: Any) -> None:
        super().__init__(ranks, *args, **kwargs)
        self._ranks = ranks

    def load(self, version: int, *, is_again: bool = False) -> None:
        """Raises ClusterFault if an engine does not confirm the weights in time; the ranks have
        ended then.
        """
        began = time.perf_counter()
        try:
            num_bytes, num_calls = self._ranks.send(version, self._actors, is_again=is_again)
        except ProcessLost as error:  # not replaced
            raise ClusterFault(str(error)) from error
        RemoteEngine.load(self, version)
        self.sent = {
            "weights/bytes": float(num_bytes * len(self._actors)),
            "weights/rpcs": float(num_calls * len(self._actors)),
            "time/weights": time.perf_counter() - began,
        }

    def put(self, number: int, actor: Any) -> None:
        """Replace engine ``number``; all engines reconnect to the ranks. Raises ClusterFault if the ranks'
        weights have changed since the last transfer.
        """
        super().put(number, actor)
        self.load(self.weight_version, is_again=True)
