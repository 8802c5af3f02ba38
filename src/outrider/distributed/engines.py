"""A few tokens of every engine that nothing trains on: whether its weights are the trainer's, where the
tokens that are trained on are of older ones and cannot say.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from outrider.training.settings import RunSettings
from outrider.types import Message, Origin, Outcome

if TYPE_CHECKING:
    from outrider.distributed.learner import ShardedLearner


_NUM_TOKENS: Final = 16


def probes(engine: Engine, trace: Trace, *, num: int) -> list[Trace]:
    """``num`` continuations of the prompt of a played group, one an engine: groups take the engines in turn.
    Empty where none of its rollouts has a prompt that leaves room. Raises what the engine raises.
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
            max_tokens=min(_NUM_TOKENS, engine.context_length - len(prompt.token_ids)),
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


# An engine in a process of its own, and the engine that stands for all of them where rollouts are played.


class EngineActor:
    """Full weights, and an engine over them; it serves nobody before :meth:`load`.

    An engine that generates with the model that it is given (``is_exact``) is made once per client: what one
    client asks cannot depend on when another one did, so the same bits come whoever is faster. The model is
    there once, keys and values once per client.
    """

    def __init__(self, recipe: Recipe, number: int, folder: str, carrier: Carrier) -> None:
        self._recipe, self._number, self._carrier = recipe, number, carrier
        self._folder = Path(folder) / f"engine-{number}"
        self._version: int | None = None
        self._engines: dict[str, Engine] = {}
        self._model: LanguageModel | None = None
        self._busy_s = 0.0

    def build(self) -> tuple[int, int]:
        """Load the model; the process id, and the longest context."""
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
        """Take new weights, and forget what was computed with the old ones; version and checksum for the
        sender. Raises ClusterFault for weights that are older than those that are here.
        """
        assert self._model is not None
        require_newer(self._number, self._version, parcel.version)
        self._version = None  # half of them are served to nobody
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
        """See :class:`outrider.engines.base.Engine`. Raises ClusterFault where the weights are not those of
        ``version``, ``or_newer`` ones.
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
            raise ClusterFault(f"engine {self._number} wrote tokens of version {wrong.pop()} under {version}")
        return generations

    def clear(self, client: str) -> None:
        """All that is kept for a client: what it asks again is computed as it was the first time."""
        if self._settings.engine.is_exact:
            self._engines.pop(client, None)

    def busy_s(self) -> float:
        """Seconds of :meth:`generate` so far."""
        return self._busy_s

    def release(self, client: str, cache_keys: Sequence[str]) -> None:
        self._engine(client).release(cache_keys)

    def free_cache(self) -> None:
        for engine in self._engines.values():
            engine.free_cache()

    def _engine(self, client: str) -> Engine:
        name = client if self._settings.engine.is_exact else ""
        if name not in self._engines:
            engine = self._build_engine()
            if self._version is not None:
                engine.load(self._version)
            self._engines[name] = engine
        return self._engines[name]

    def _build_engine(self) -> Engine:
        settings, model = self._settings, self._model
        assert model is not None
        context = EngineContext(
            language_model=model,
            export=self._export,
            folder=self._folder,
            context_length=settings.model.context_length,
            precision=resolve_precision(settings.model.precision, settings.model.device),
            device=settings.model.device,
            seed=settings.seed,
            on_tokens=lambda num_tokens: None,
        )
        return cast(Engine, plugins.build("engines", settings.engine, context))

    def _export(self, folder: Path) -> None:
        assert self._model is not None
        export(self._model, folder, check=False)


class RemoteEngine:
    """All engine processes as one, for one client. A group's rollouts stay with one engine, and so with their
    keys and values; groups take the engines in turn, in the order in which they first ask.

    Raises EngineFault where a batch could not be served, as any engine does, and ClusterFault where an engine
    is gone, silent, or has other weights than those of ``weight_version``, ``or_newer`` ones.
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
        self._first = self._next = first  # clients begin at different engines
        self._homes: dict[str, int] = {}  # group -> engine
        self._known_busy_s = [0.0] * len(actors)  # of each engine, as it was told last
        self._before_s = [0.0] * len(actors)  # of those in whose place it is

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Sample all requests, each engine its groups' at the same time."""
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
        action, setting = "generate", "cluster.turn_timeout_s"
        try:
            generation: Generation = await asyncio.wait_for(
                asyncio.wrap_future(call.future()), self._timeout_s
            )
        except TimeoutError as error:
            raise timeout_error(_engine_name(number), action, self._timeout_s, setting) from error
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
        """Told to the engines that have them; nobody waits for that."""
        homes: dict[int, list[str]] = {}
        for key in cache_keys:
            if (number := self._homes.get(key.rpartition("/")[0])) is not None:
                homes.setdefault(number, []).append(key)
        for number, keys in homes.items():
            self._actors[number].release.remote(self._client, keys)

    def free_cache(self) -> None:
        """Of all engines. Waited for: an engine that did it between two turns would compute the second one's
        context another way, to other last bits.
        """
        self._wait(
            {_engine_name(number): actor.free_cache.remote() for number, actor in self._each()}, "free_cache"
        )

    def put(self, number: int, actor: Any) -> None:
        """Another process is engine ``number`` from now on. What the one before did since it was last asked
        for its seconds is lost, and so are they.
        """
        self._actors[number] = actor
        self._before_s[number] += self._known_busy_s[number]
        self._known_busy_s[number] = 0.0

    def clear(self) -> None:
        """All that is kept for this client: after a batch that broke."""
        self._wait(
            {_engine_name(number): actor.clear.remote(self._client) for number, actor in self._each()},
            "forget",
        )

    def busy_s(self) -> float:
        """Seconds in which an engine generated so far: mean over engines."""
        seconds = self._wait(
            {_engine_name(number): item.busy_s.remote() for number, item in self._each()}, "busy_s"
        )
        self._known_busy_s = [float(item) for item in seconds]
        return sum(self._known_busy_s + self._before_s) / len(seconds)

    def load(self, version: int) -> None:
        """The engines have weights of this version now: ask for no other. Groups take engines from the first
        again, so that no batch depends on those before it.
        """
        self.weight_version = version
        self._next, self._homes = self._first, {}

    def _each(self) -> Iterator[tuple[int, Any]]:
        return enumerate(self._actors)

    def _wait(self, calls: Mapping[str, Any], action: str) -> list[Any]:
        return results(
            self._ray, calls, action=action, limit_s=self._timeout_s, setting="cluster.turn_timeout_s"
        )


def require_version(number: int, current: int | None, requested: int) -> None:
    """Raises ClusterFault where an engine has other weights than a request names."""
    if current != requested:
        description = "no weights yet" if current is None else f"weights of version {current}"
        raise ClusterFault(
            f"engine {number} has {description}, and version {requested} was asked for; {AGAIN}"
        )


def require_newer(number: int, current: int | None, sent: int) -> None:
    """Raises ClusterFault where an engine was sent older weights than it has."""
    if current is not None and sent < current:
        raise ClusterFault(f"engine {number} has weights of version {current}, and was sent {sent}")


def _engine_name(number: int) -> str:
    return f"engine {number}"


# An engine process that takes requests one by one, from all workers: what has come while it generated is its
# next batch.


_EVERYBODY = ""


class StreamEngineActor:
    """See :class:`outrider.distributed.engines.EngineActor`, whose methods run in a thread here, one at a
    time; all workers are one client.
    """

    def __init__(self, recipe: Recipe, number: int, folder: str | Path, carrier: Carrier) -> None:
        self._inner = EngineActor(recipe, number, str(folder), carrier)
        self._lock = asyncio.Lock()
        self._waiting: list[tuple[Request, int, bool, asyncio.Future[Generation]]] = []
        self._serving: asyncio.Task[None] | None = None

    async def stream(self, request: Request, version: int, or_newer: bool = False) -> Generation:
        """One request. Raises what :meth:`outrider.distributed.engines.EngineActor.generate` raises."""
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
                        self._inner.generate, _EVERYBODY, [request for request, _ in batch], version, or_newer
                    )
                except Exception as error:  # each request's own: whoever waits for it decides
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
        generations: list[Generation] = await self._call(self._inner.generate, _EVERYBODY, requests, version)
        return generations

    async def release(self, client: str, cache_keys: Sequence[str]) -> None:
        await self._call(self._inner.release, _EVERYBODY, cache_keys)

    async def free_cache(self) -> None:
        await self._call(self._inner.free_cache)

    async def clear(self, client: str) -> None:
        """Nothing: what is kept is everybody's, and no bits are promised."""

    async def busy_s(self) -> float:
        return self._inner.busy_s()


# An engine process whose engine is vLLM, with processes of its own: it takes requests one by one, from all
# workers.


_ALONE: Final = 0.9  # share of a GPU


class VllmEngineActor:
    """See :class:`outrider.distributed.engines.EngineActor`; all workers are one client here."""

    def __init__(self, recipe: Recipe, number: int, folder: str | Path, carrier: Carrier) -> None:
        self._recipe, self._number, self._carrier = recipe, number, carrier
        self._version: int | None = None
        self._may_begin = asyncio.Event()  # not while weights come
        self._may_begin.set()
        self._num_running = 0
        self._since = self._busy_s = 0.0

    async def build(self) -> tuple[int, int]:
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
        :class:`outrider.distributed.weights.EngineClient`.
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


# All engines of a run for the process that trains: they get the learner's weights, by a carrier or from the
# ranks' GPUs, and whoever takes an engine's place gets them too.


_AnswerT = TypeVar("_AnswerT")


class EnginePool(RemoteEngine):
    """The engine of the process that trains: :meth:`load` sends the learner's weights to all engines, and
    keeps what was sent for engines that take the place of others.
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
        self.sent: dict[str, float] = {}  # metrics of the newest transfer

    def load(self, version: int) -> None:
        """Raises ClusterFault where not every engine says within the limit that it has these weights, and no
        other one may take its place.
        """
        began = time.perf_counter()
        self.drop_parcel()
        weights = engine_weights(self._learner, self._settings)
        parcel = self._parcel = pack(weights, version=version, carrier=self._carrier)
        while True:
            try:
                self._send(parcel, dict(enumerate(self._actors)))
                break
            except ProcessLost as error:
                self._anew(error, True)  # which sends it too
        super().load(version)
        self.sent = {
            "weights/bytes": float(parcel.num_bytes * len(self._actors)),
            "weights/rpcs": float(len(self._actors)),
            "time/weights": time.perf_counter() - began,
        }

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """See :class:`RemoteEngine`: of an engine that is gone, another one is asked."""
        return self._retrying(partial(super().generate, requests))

    def free_cache(self) -> None:
        self._retrying(super().free_cache)

    def busy_s(self) -> float:
        return self._retrying(super().busy_s)

    def _retrying(self, call: Callable[[], _AnswerT]) -> _AnswerT:
        """An engine that died between two batches is noticed here first. Raises ClusterFault where no other
        one may take its place.
        """
        while True:
            try:
                return call()
            except ProcessLost as error:
                self._anew(error, False)

    def put(self, number: int, actor: Any) -> None:
        """Another process is engine ``number`` from now on, with the weights that were sent last."""
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
        """Nobody needs the weights that were sent last any more."""
        if self._parcel is not None:
            drop(self._parcel.pieces, self._carrier)
            self._parcel = None


class DirectPool(EnginePool):
    """The ranks send from their GPUs (:mod:`outrider.distributed.weights`): nothing is kept here."""

    def __init__(self, ranks: "ShardedLearner", *args: Any, **kwargs: Any) -> None:
        super().__init__(ranks, *args, **kwargs)
        self._ranks = ranks

    def load(self, version: int) -> None:
        """Raises ClusterFault where not every engine says within the limit that it has these weights: the
        ranks have ended then, and all begin anew.
        """
        self._load(version, is_again=False)

    def _load(self, version: int, *, is_again: bool) -> None:
        began = time.perf_counter()
        try:
            num_bytes, num_calls = self._ranks.send(version, self._actors, is_again=is_again)
        except ProcessLost as error:  # nobody is to take its place
            raise ClusterFault(str(error)) from error
        RemoteEngine.load(self, version)
        self.sent = {
            "weights/bytes": float(num_bytes * len(self._actors)),
            "weights/rpcs": float(num_calls * len(self._actors)),
            "time/weights": time.perf_counter() - began,
        }

    def put(self, number: int, actor: Any) -> None:
        """Another process is engine ``number`` from now on; all engines meet the ranks anew. Raises
        ClusterFault where the ranks' weights have moved since.
        """
        super().put(number, actor)
        self._load(self.weight_version, is_again=True)


def make_pool(
    learner: Learner, ranks: "ShardedLearner | None", carrier: Carrier, **options: Any
) -> EnginePool:
    """``ranks``: those that send by themselves."""
    return EnginePool(learner, carrier, **options) if ranks is None else DirectPool(ranks, carrier, **options)
