"""Who plays a panel: a model in this process through the rollout loop, or an agent behind a chat endpoint.

Both play what the store says is owed and hand over rollouts as they end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.engines.base import Engine
from outrider.engines.chat.engine import ChatEndpoint, EndpointSettings
from outrider.engines.local.choice import engine_for, path_of
from outrider.engines.local.model import resolve_precision
from outrider.engines.local.positions import check_positions
from outrider.evals.benchmark.grades import Played, from_collected, from_trace
from outrider.evals.benchmark.model import load_language_model, resolve, template_hash, weights_hash
from outrider.evals.benchmark.settings import PanelSettings
from outrider.evals.benchmark.store import PanelStore
from outrider.evals.benchmark.tasks import PlayedPanel
from outrider.rollout.collect import Collector
from outrider.rollout.episode import Sampling
from outrider.rollout.faults import require_results
from outrider.rollout.outcome_reasons import require_room
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.whereabouts import Whereabouts
from outrider.train.rendering import make_renderer
from outrider.train.settings import ModelSettings
from outrider.train.update.policy import set_threads
from outrider.types import Json, Task

Record = Callable[[Sequence[Played]], None]
_MODE = "evaluation"


class Player(Protocol):
    """``identity``: what results depend on; ``whereabouts`` of its rollouts are for the one who watches."""

    identity: Mapping[str, Json]
    whereabouts: Whereabouts

    def play(self, panel: PlayedPanel, store: PanelStore, record: Record) -> None:
        """Play what is owed; ``record`` may be called from several threads and must have stored when it
        returns.
        """
        ...

    def notes(self) -> list[str]:
        """Notes on the play beside its results."""
        ...


def make_player(
    settings: PanelSettings,
    *,
    on_tokens: Callable[[int], None] = lambda num_tokens: None,
    note: Callable[[str], None] = lambda text: None,
) -> Player:
    """Load the model, or ask the endpoint what it serves. Raises ModelError, CheckpointError and EngineFault.

    ``on_tokens`` gets the number of tokens of every decoding step of a model in this process, ``note`` what
    its settings are told of it. How many positions a model behind an endpoint has, nobody knows here.
    """
    if settings.endpoint is not None:
        return EndpointPlayer.found(settings.endpoint, settings)
    assert settings.model is not None  # the settings see to it
    return LocalPlayer.loaded(settings.model, settings, on_tokens=on_tokens, note=note)


@dataclass(slots=True, kw_only=True)
class LocalPlayer:
    """A model in this process.

    A batch holds the same rollouts whatever was played before: sample i of the panel's next ``batch_size``
    tasks. So an evaluation that was stopped ends with the same bits as one that was not, for which a batch
    that a kill tore apart is played as a whole again. Only after a fault rollouts are played in a batch of
    their own.
    """

    engine: Engine
    identity: Mapping[str, Json]
    settings: PanelSettings
    num_retries: int = 0
    whereabouts: Whereabouts = field(default_factory=Whereabouts)

    @classmethod
    def loaded(
        cls,
        chosen: ModelSettings,
        settings: PanelSettings,
        *,
        on_tokens: Callable[[int], None],
        note: Callable[[str], None] = lambda text: None,
    ) -> "LocalPlayer":
        """Load the model and hash its weights."""
        resolved = resolve(chosen)
        set_threads(settings.num_threads, device=resolved.device)
        loaded = load_language_model(resolved)
        if loaded.unpacked is not None:  # slower than what was planned for
            note(path_of(loaded, resolved.name))
        check_positions(settings, model=chosen.name, longest=loaded.context_length, note=note)
        precision = resolve_precision(resolved.precision, resolved.device)
        engine = engine_for(
            loaded, context_length=resolved.context_length, max_rows=settings.batch_size, on_tokens=on_tokens
        )
        identity: dict[str, Json] = {
            "weights": weights_hash(loaded), "chat_template": template_hash(loaded), "precision": precision,
            "device": resolved.device, "context_length": engine.context_length,
            "batch_size": settings.batch_size, "num_threads": settings.num_threads,
        }  # fmt: skip
        if resolved.template_kwargs:
            identity["template_kwargs"] = resolved.template_kwargs
        if resolved.history_thinking != "keep":
            identity["history_thinking"] = resolved.history_thinking
        return cls(engine=engine, identity=identity, settings=settings)

    def play(self, panel: PlayedPanel, store: PanelStore, record: Record) -> None:
        """One batch after the other; its results are recorded when it is over."""
        assert self.settings.model is not None  # what makes it local
        renderer = make_renderer(self.engine.tokenizer, self.settings.model, self.settings.environment)
        scheduler = Scheduler(
            engine=self.engine,
            renderer=renderer,
            factory=panel.factory,
            limits=panel.limits,
            sampling=Sampling(temperature=self.settings.temperature, stop=panel.stop),
            run_seed=self.settings.seed,
            max_concurrent=self.settings.num_concurrent,
            max_retries=self.settings.max_retries,
            whereabouts=self.whereabouts,
        )
        owed = {
            (task.key, sample)
            for task, sample in store.owed(panel.tasks, num_samples=self.settings.num_samples)
        }
        size = self.settings.batch_size
        for sample in range(self.settings.num_samples):
            for start in range(0, len(panel.tasks), size):
                batch = panel.tasks[start : start + size]
                chosen = _to_play(batch, sample, owed, store)
                if chosen:
                    # nothing of an earlier batch: a resumed evaluation has none either
                    self.engine.free_cache()
                    report = scheduler.run(chosen, modes=(_MODE,), training_step=-1 - sample)
                    self.num_retries += report.num_retries
                    require_results(report.traces, report.faults)
                    require_room(report.traces, context_length=self.engine.context_length)
                    played = [from_trace(trace, sample) for trace in report.traces]
                    record([one for one in played if (one.task.key, sample) in owed])

    def notes(self) -> list[str]:
        """How many tries were repeated."""
        return _repeated(self.num_retries)


def _to_play(
    batch: Sequence[Task], sample: int, owed: set[tuple[str, int]], store: PanelStore
) -> Sequence[Task]:
    """All of a batch of which something never ended, else only what a fault ended."""
    if all(store.has(task.key, sample) for task in batch):
        return [task for task in batch if (task.key, sample) in owed]
    return batch


@dataclass(slots=True, kw_only=True)
class EndpointPlayer:
    """An agent behind a chat endpoint. Every rollout is recorded as soon as it has ended."""

    endpoint: ChatEndpoint
    identity: Mapping[str, Json]
    settings: PanelSettings
    num_retries: int = 0
    whereabouts: Whereabouts = field(default_factory=Whereabouts)

    @classmethod
    def found(cls, chosen: EndpointSettings, settings: PanelSettings) -> "EndpointPlayer":
        """Ask once what is served: a wrong address or key shows before anything is played."""
        found = ChatEndpoint(chosen).discovered()
        identity: dict[str, Json] = {
            "endpoint_model": found.model,
            "continues_messages": found.continues_messages,
        }
        if found.template_kwargs:
            identity["template_kwargs"] = found.template_kwargs
        if found.history_thinking != "keep":
            identity["history_thinking"] = found.history_thinking
        return cls(endpoint=ChatEndpoint(found), identity=identity, settings=settings)

    def play(self, panel: PlayedPanel, store: PanelStore, record: Record) -> None:
        """Raises EngineFault after ``max_faults_in_a_row`` and ModelError when the server will never
        answer.
        """
        collector = Collector(
            endpoint=self.endpoint,
            factory=panel.factory,
            limits=panel.limits,
            stop=panel.stop,
            run_seed=self.settings.seed,
            temperature=self.settings.temperature,
            num_concurrent=self.settings.num_concurrent,
            max_retries=self.settings.max_retries,
            max_faults_in_a_row=self.settings.max_faults_in_a_row,
            whereabouts=self.whereabouts,
        )
        played = collector.play(
            store.owed(panel.tasks, num_samples=self.settings.num_samples),
            on_played=lambda task, sample, collected: record([from_collected(task, sample, collected)]),
        )
        self.num_retries += sum(one.num_retries for one in played)

    def notes(self) -> list[str]:
        """Requests that were sent again, by their reason, and how many tries were repeated."""
        retries = sorted(self.endpoint.retries.items())
        sent = (
            [f"requests sent again: {', '.join(f'{count} after {reason}' for reason, count in retries)}"]
            if retries
            else []
        )
        return [*sent, *_repeated(self.num_retries)]


def _repeated(num_retries: int) -> list[str]:
    return [f"tries repeated after a fault: {num_retries}"] if num_retries else []
