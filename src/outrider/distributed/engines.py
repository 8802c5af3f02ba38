"""Engines in their own processes, the engine of a group that calls one of them, the pool that sends new
weights to all of them, and probes of their weights.
"""

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from outrider.distributed.processes import AGAIN, PROGRESS, Process
from outrider.distributed.recipe import Recipe
from outrider.distributed.weights import Parcel, WeightFiles, engine_weights, read
from outrider.engines.base import Engine, EngineContext, Generation, Request, VllmSettings
from outrider.engines.local.model import (
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
    from outrider.distributed.remote import RemoteProcesses


_NUM_PROBE_TOKENS: Final = 16
_PAUSE_S: Final = 0.005
_SHARE_ALONE: Final = 0.9  # of a GPU that only the engine uses


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


class EngineProcess:
    """A process with all weights and an engine over them; no request is accepted before :meth:`load`.

    A request names its group, or no group. Requests of a group are batches of their own, with their own keys
    and values, so that the group's results do not depend on others. Requests without a group that arrive
    while the engine generates are its next batch.
    """

    def __init__(self, recipe: Recipe, number: int, folder: str) -> None:
        self._recipe, self._number = recipe, number
        self._folder = Path(folder) / f"engine-{number}"
        self._version: int | None = None
        self._groups: dict[str, Engine] = {}
        self._ended: set[str] = set()  # groups; a turn of a lost worker may come later
        self._lock = threading.Lock()  # of the model
        self._waiting: list[tuple[Sequence[Request], Future[list[Generation]]]] = []
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
        self._engine = self._new_engine()
        return os.getpid(), self._engine.context_length

    def _new_engine(self) -> Engine:
        settings, model = self._settings, self._model
        context = EngineContext(
            language_model=model,
            export=lambda folder: export(model, folder, check=False),
            folder=self._folder,
            context_length=settings.model.context_length,
            precision=resolve_precision(settings.model.precision, settings.model.device),
            device=settings.model.device,
            seed=settings.seed,
            on_tokens=PROGRESS.advance,
        )
        return cast(Engine, plugins.build("engines", settings.engine, context))

    def load(self, parcel: Parcel) -> int:
        """Load new weights and clear all caches; returns the bytes read. Raises ClusterFault for weights
        older than the current ones.
        """
        with self._lock:
            require_newer(self._number, self._version, parcel.version)
            before, self._version = self._version, None  # no request is accepted while they are incomplete
            model = self._model.model
            own = plain_names(model) | dict(model.named_parameters())
            num_bytes = read(parcel, own, version=before)
            for engine in (self._engine, *self._groups.values()):
                engine.load(parcel.version)
            self._version = parcel.version
        return num_bytes

    def generate(
        self,
        group: str | None,
        requests: Sequence[Request],
        version: int,
        or_newer: bool = False,
        released: Sequence[str] = (),
    ) -> list[Generation]:
        """Sample, after a group's keys and values named ``released`` are dropped. Raises ClusterFault unless
        the weights are of ``version``, or newer with ``or_newer``.
        """
        if group is not None:
            with self._lock:
                if group in self._ended:
                    raise ClusterFault(f"engine {self._number}: {group} has ended")
                engine = self._group_engine(group)
                engine.release(released)
                return self._sample(engine, requests, version, or_newer=or_newer)
        generations: Future[list[Generation]] = Future()
        self._waiting.append((requests, generations))
        with self._lock:
            if not generations.done():  # otherwise a batch before had room for these requests, too
                batch, self._waiting = self._waiting, []
                self._sample_batch(batch, version, or_newer=or_newer)
        result = generations.result()
        if (sampled := result[0].weight_version if result else version) < version:
            raise ClusterFault(f"engine {self._number} sampled with weights {sampled} instead of {version}")
        return result

    def _sample_batch(
        self,
        batch: Sequence[tuple[Sequence[Request], Future[list[Generation]]]],
        version: int,
        *,
        or_newer: bool,
    ) -> None:
        try:
            requests = [request for each, _ in batch for request in each]
            sampled = iter(self._sample(self._engine, requests, version, or_newer=or_newer))
            for each, generations in batch:
                generations.set_result([next(sampled) for _ in each])
        except Exception as error:  # raised by every call of the batch
            for _, generations in batch:
                if not generations.done():
                    generations.set_exception(error)

    def _sample(
        self, engine: Engine, requests: Sequence[Request], version: int, *, or_newer: bool
    ) -> list[Generation]:
        current = require_version(self._number, self._version, version, or_newer=or_newer)
        began = time.perf_counter()
        try:
            generations = engine.generate(requests)
        finally:
            self._busy_s += time.perf_counter() - began
            PROGRESS.advance()
        if wrong := {generation.weight_version for generation in generations} - {current}:
            raise ClusterFault(
                f"engine {self._number} sampled tokens of version {wrong.pop()} instead of {current}"
            )
        return generations

    def _group_engine(self, group: str) -> Engine:
        if group not in self._groups:
            share = getattr(self._engine, "with_own_cache", self._new_engine)
            engine = share()
            if self._version is not None and engine.weight_version != self._version:
                engine.load(self._version)
            self._groups[group] = engine
        return self._groups[group]

    def end_group(self, group: str) -> None:
        """Drop the keys and values of a group; later requests of it are refused."""
        with self._lock:
            self._ended.add(group)
            self._groups.pop(group, None)

    def busy_s(self) -> float:
        """Return the total seconds of generation."""
        return self._busy_s

    def release(self, cache_keys: Sequence[str]) -> None:
        """Drop keys and values of requests without a group."""
        with self._lock:
            self._engine.release(cache_keys)

    def free_cache(self) -> None:
        with self._lock:
            self._groups.clear()
            self._engine.free_cache()

    def close(self) -> None:
        """Do nothing: the engine has no processes of its own."""


class VllmProcess:
    """An engine process with vLLM, which has its own processes and batches all requests."""

    def __init__(self, recipe: Recipe, number: int, folder: str) -> None:
        self._recipe, self._number = recipe, number
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
            backend="outrider-nccl" if settings.uses_nccl else "outrider",
            num_gpus=cluster.tensor_parallel,
            sleeps=self._sleeps and model.device != "cpu",
            on_tokens=PROGRESS.advance,
        )
        return os.getpid(), requests.context_length

    async def load(self, parcel: Parcel) -> int:
        require_newer(self._number, self._version, parcel.version)
        # requests wait until the weights are complete
        await self._pause()
        try:
            with self._as_cluster_fault():
                await self._engine.load(parcel.version, parcel.path, parcel.checksum)
            self._version = parcel.version
        finally:
            self._may_begin.set()
        return Path(parcel.path).stat().st_size

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

    async def _pause(self) -> None:
        """Let no request begin, and wait for those that run: vLLM would take one that has begun meanwhile
        with new weights.
        """
        self._version = None
        self._may_begin.clear()
        while self._num_running:
            await asyncio.sleep(_PAUSE_S)

    async def begin_update(self) -> None:
        await self._pause()
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
        self,
        group: str | None,
        requests: Sequence[Request],
        version: int,
        or_newer: bool = False,
        released: Sequence[str] = (),
    ) -> list[Generation]:
        await self._may_begin.wait()  # until the weights are complete
        version = require_version(self._number, self._version, version, or_newer=or_newer)
        with self._busy():
            generations = await stream_all(self._engine, requests, version)
        PROGRESS.advance(sum(len(generation.token_ids) for generation in generations))
        return generations

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

    async def release(self, cache_keys: Sequence[str]) -> None:
        """Do nothing: vLLM evicts blocks when it needs them."""

    async def end_group(self, group: str) -> None:
        """Do nothing: the caches are shared, and the same bits are not guaranteed."""

    async def busy_s(self) -> float:
        """Return the total seconds with at least one running request."""
        running = time.perf_counter() - self._since if self._num_running else 0.0
        return self._busy_s + running

    async def close(self) -> None:
        self._engine.close()


@dataclass(slots=True, kw_only=True)
class GroupEngine:
    """The engine of one group: one of the engine processes, with weights of ``weight_version`` or, with
    ``or_newer``, newer ones.

    ``name`` distinguishes the group from those of the same task in other steps. With ``is_alone``, its
    batches are its own; otherwise they are shared with other groups. Raises EngineFault like any engine, and
    ClusterFault if the process is lost or has other weights.
    """

    process: Process
    name: str
    tokenizer: Tokenizer
    context_length: int
    weight_version: int
    is_alone: bool
    or_newer: bool = False
    _released: list[str] = field(default_factory=list, init=False)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        return cast(list[Generation], self._call(requests).result())

    async def stream(self, request: Request) -> Generation:
        [generation] = await asyncio.wrap_future(self._call([request]))
        return cast(Generation, generation)

    def _call(self, requests: Sequence[Request]) -> "Future[Any]":
        scoped = [
            replace(
                request,
                request_id=self._scoped(request.request_id),
                cache_key=None if request.cache_key is None else self._scoped(request.cache_key),
            )
            for request in requests
        ]
        group, released, self._released = self.name if self.is_alone else None, self._released, []
        return self.process.call("generate", group, scoped, self.weight_version, self.or_newer, released)

    def _scoped(self, key: str) -> str:
        return key if self.is_alone else f"{self.name}/{key}"

    def release(self, cache_keys: Sequence[str]) -> None:
        # without waiting for the engine
        if self.is_alone:  # with the next requests, because calls may overtake each other
            self._released += cache_keys
        elif cache_keys:
            self.process.call("release", [self._scoped(key) for key in cache_keys])

    def free_cache(self) -> None:
        """Do nothing: the group's caches are dropped at its end."""

    def load(self, version: int) -> None:
        self.weight_version = version

    def close(self) -> None:
        """Drop the group's keys and values."""
        if self.is_alone:
            self.process.call("end_group", self.name)


def require_version(number: int, current: int | None, requested: int, *, or_newer: bool = False) -> int:
    """Return the current version. Raises ClusterFault if an engine has other weights than requested."""
    if current is None or current < requested or (current != requested and not or_newer):
        description = "no weights yet" if current is None else f"weights of version {current}"
        raise ClusterFault(
            f"engine {number} has {description}, and version {requested} was requested; {AGAIN}"
        )
    return current


def require_newer(number: int, current: int | None, sent: int) -> None:
    """Raise ClusterFault if an engine receives older weights than it has."""
    if current is not None and sent < current:
        raise ClusterFault(f"engine {number} has weights of version {current}, and was sent {sent}")


class EnginePool:
    """All engine processes as the engine of the training process: :meth:`load` sends the newest weights to
    all of them. Rollouts use a :class:`GroupEngine` each.

    A lost engine is replaced and gets the newest weights.
    """

    def __init__(
        self, learner: Learner, processes: "RemoteProcesses", files: WeightFiles, *, context_length: int
    ) -> None:
        self.tokenizer: Tokenizer = learner.language_model.tokenizer
        self.context_length = context_length
        self.weight_version = 0
        self.sent: dict[str, float] = {}  # metrics of the last transfer
        self._learner, self._processes, self._files = learner, processes, files
        self._settings = processes.settings
        self._numbers = count()  # of requests
        self._known_busy_s: dict[Process, float] = {}  # at the last request, also of replaced engines

    def load(self, version: int) -> None:
        """Send the learner's weights. Raises ClusterFault if an engine does not confirm them and cannot be
        replaced.
        """
        began = time.perf_counter()
        if self._settings.uses_nccl:
            num_bytes, num_calls = self._processes.send_directly(version)
            num_bytes *= len(self._processes.engines)
        else:
            parcel = self._files.write(engine_weights(self._learner, self._settings.engine), version)
            num_bytes, num_calls = self._send(parcel), 1
            self._files.drop_older()
        self.weight_version = version
        self.sent = {
            "weights/bytes": float(num_bytes),
            "weights/rpcs": float(num_calls * len(self._processes.engines)),
            "time/weights": time.perf_counter() - began,
        }

    def _send(self, parcel: Parcel) -> int:
        """Let all engines load the parcel; returns the bytes that they read."""
        calls = {name: each.call("load", parcel) for name, each in self._processes.engines.items()}
        answers = self._processes.cluster.wait(calls).values()
        for answer in answers:
            if isinstance(answer, ProcessLost):
                self._processes.repairs.count("weights/num_failed")
                self._processes.replace(answer)  # which also sends the parcel
        return sum(answer for answer in answers if not isinstance(answer, ProcessLost))

    def send_newest(self, process: Process) -> None:
        """Send the newest weights to an engine that replaces another one. Raises ProcessLost."""
        if self._files.newest is not None:
            self._processes.cluster.results({process.name: process.call("load", self._files.newest)})

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Sample the requests, each on another engine in turn. No keys and values are kept."""
        while True:
            engines = list(self._processes.engines.values())
            calls, groups = {}, []
            for number, request in enumerate(requests):
                engine, group = engines[number % len(engines)], None
                if self._settings.has_group_batches:
                    groups.append((engine, group := f"controller {next(self._numbers)}"))
                alone = [replace(request, cache_key=None)]
                calls[f"{number}"] = engine.call("generate", group, alone, self.weight_version)
            answers = list(self._processes.cluster.wait(calls).values())
            for engine, group in groups:
                engine.call("end_group", group)
            lost = {answer.process: answer for answer in answers if isinstance(answer, ProcessLost)}
            if not lost:
                return [generation for answer in answers for generation in answer]
            for fault in lost.values():
                self._processes.replace(fault)

    def release(self, cache_keys: Sequence[str]) -> None:
        """Do nothing: no request stores keys and values here."""

    def free_cache(self) -> None:
        self._call_all("free_cache")

    def busy_s(self) -> float:
        """Return the total seconds of generation: mean over engines, with those that were replaced."""
        for process, seconds in zip(
            list(self._processes.engines.values()), self._call_all("busy_s"), strict=True
        ):
            self._known_busy_s[process] = float(seconds)
        return sum(self._known_busy_s.values()) / len(self._processes.engines)

    def _call_all(self, method: str) -> list[Any]:
        """Call all engines; lost ones are replaced first."""
        while True:
            calls = {name: process.call(method) for name, process in self._processes.engines.items()}
            answers = self._processes.cluster.wait(calls)
            lost = [answer for answer in answers.values() if isinstance(answer, ProcessLost)]
            if not lost:
                return [answers[name] for name in calls]
            for fault in lost:
                self._processes.replace(fault)
