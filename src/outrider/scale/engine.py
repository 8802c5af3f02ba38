"""An engine in a process of its own, and the engine that stands for all of them where rollouts are played."""

import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from outrider.engines.base import Engine, EngineContext, Generation, Request
from outrider.engines.local.model import LanguageModel, load_model, resolve_precision
from outrider.errors import ClusterFault
from outrider.plugins import registry as plugins
from outrider.scale.recipe import Recipe
from outrider.scale.waiting import AGAIN, convert_error, results, timeout_error
from outrider.scale.weights import Carrier, Parcel, unpack
from outrider.tokens import Tokenizer
from outrider.train.update.adapters import choose_trained, plain_names
from outrider.train.update.policy import export, set_threads


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
        """See :class:`outrider.engines.base.Engine`."""
        self._engine(client).release(cache_keys)

    def free_cache(self) -> None:
        """See :class:`outrider.engines.base.Engine`."""
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
        """See :class:`outrider.rollout.stream_batcher.StreamingEngine`."""
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
