"""Who plays a panel: a model in this process through the rollout loop, or an agent behind a chat endpoint.

Both play what the store says is owed and hand over rollouts as they end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.engines.base import Engine
from outrider.engines.chat.engine import ChatEndpoint, EndpointSettings
from outrider.engines.local.choice import describe_path, make_engine
from outrider.engines.local.model import resolve_precision
from outrider.engines.local.positions import check_positions
from outrider.evals.benchmark.grades import FinishedRollout, from_collected, from_trace
from outrider.evals.benchmark.model import load_language_model, resolve, template_hash, weights_hash
from outrider.evals.benchmark.settings import EvalTasksSettings
from outrider.evals.benchmark.store import EvalTasksStore
from outrider.evals.benchmark.tasks import EvalSetup
from outrider.rollout.collect import Collector
from outrider.rollout.episode import Sampling
from outrider.rollout.faults import require_results
from outrider.rollout.outcome_reasons import require_room
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.whereabouts import RolloutStatus
from outrider.train.rendering import make_renderer
from outrider.train.settings import ModelSettings
from outrider.train.update.policy import set_threads
from outrider.types import Json, Task

Record = Callable[[Sequence[FinishedRollout]], None]
_MODE = "evaluation"


class Player(Protocol):
    """``identity``: what results depend on; ``rollout_status`` of its rollouts are for the one who watches."""

    identity: Mapping[str, Json]
    rollout_status: RolloutStatus

    def play(self, setup: EvalSetup, store: EvalTasksStore, record: Record) -> None:
        """Play what is owed; ``record`` may be called from several threads and must have stored when it
        returns.
        """
        ...

    def notes(self) -> list[str]:
        """Notes on the play beside its results."""
        ...


def make_player(
    settings: EvalTasksSettings,
    *,
    on_tokens: Callable[[int], None] = lambda num_tokens: None,
    note: Callable[[str], None] = lambda text: None,
) -> Player:
    """Load the model, or ask the endpoint what it serves. Raises ModelError, CheckpointError and EngineFault.

    ``on_tokens`` gets the number of tokens of every decoding step of a model in this process, ``note`` what
    its settings are told of it. How many positions a model behind an endpoint has, nobody knows here.
    """
    if settings.endpoint is not None:
        return EndpointPlayer.connect(settings.endpoint, settings)
    assert settings.model is not None  # the settings see to it
    return LocalPlayer.load(settings.model, settings, on_tokens=on_tokens, note=note)


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
    settings: EvalTasksSettings
    num_retries: int = 0
    rollout_status: RolloutStatus = field(default_factory=RolloutStatus)

    @classmethod
    def load(
        cls,
        model_settings: ModelSettings,
        settings: EvalTasksSettings,
        *,
        on_tokens: Callable[[int], None],
        note: Callable[[str], None] = lambda text: None,
    ) -> "LocalPlayer":
        """Load the model and hash its weights."""
        resolved = resolve(model_settings)
        set_threads(settings.num_threads, device=resolved.device)
        loaded = load_language_model(resolved)
        if loaded.unpacked is not None:  # slower than what was planned for
            note(describe_path(loaded, resolved.name))
        check_positions(settings, model=model_settings.name, longest=loaded.context_length, note=note)
        precision = resolve_precision(resolved.precision, resolved.device)
        engine = make_engine(
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

    def play(self, setup: EvalSetup, store: EvalTasksStore, record: Record) -> None:
        """One batch after the other; its results are recorded when it is over."""
        assert self.settings.model is not None  # what makes it local
        renderer = make_renderer(self.engine.tokenizer, self.settings.model, self.settings.environment)
        scheduler = Scheduler(
            engine=self.engine,
            renderer=renderer,
            factory=setup.factory,
            limits=setup.limits,
            sampling=Sampling(temperature=self.settings.temperature, stop=setup.stop),
            run_seed=self.settings.seed,
            max_concurrent=self.settings.num_concurrent,
            max_retries=self.settings.max_retries,
            rollout_status=self.rollout_status,
        )
        pending = {
            (task.key, sample)
            for task, sample in store.pending(setup.tasks, num_samples=self.settings.num_samples)
        }
        size = self.settings.batch_size
        for sample in range(self.settings.num_samples):
            for start in range(0, len(setup.tasks), size):
                batch = setup.tasks[start : start + size]
                tasks = _select_tasks(batch, sample, pending, store)
                if tasks:
                    # nothing of an earlier batch: a resumed evaluation has none either
                    self.engine.free_cache()
                    report = scheduler.run(tasks, modes=(_MODE,), training_step=-1 - sample)
                    self.num_retries += report.num_retries
                    require_results(report.traces, report.faults)
                    require_room(report.traces, context_length=self.engine.context_length)
                    rollouts = [from_trace(trace, sample) for trace in report.traces]
                    record([rollout for rollout in rollouts if (rollout.task.key, sample) in pending])

    def notes(self) -> list[str]:
        """How many tries were repeated."""
        return _retry_notes(self.num_retries)


def _select_tasks(
    batch: Sequence[Task], sample: int, pending: set[tuple[str, int]], store: EvalTasksStore
) -> Sequence[Task]:
    """All of a batch of which something never ended, else only what a fault ended."""
    if all(store.has(task.key, sample) for task in batch):
        return [task for task in batch if (task.key, sample) in pending]
    return batch


@dataclass(slots=True, kw_only=True)
class EndpointPlayer:
    """An agent behind a chat endpoint. Every rollout is recorded as soon as it has ended."""

    endpoint: ChatEndpoint
    identity: Mapping[str, Json]
    settings: EvalTasksSettings
    num_retries: int = 0
    rollout_status: RolloutStatus = field(default_factory=RolloutStatus)

    @classmethod
    def connect(cls, endpoint_settings: EndpointSettings, settings: EvalTasksSettings) -> "EndpointPlayer":
        """Ask once what is served: a wrong address or key shows before anything is played."""
        discovered = ChatEndpoint(endpoint_settings).discovered()
        identity: dict[str, Json] = {
            "endpoint_model": discovered.model,
            "continues_messages": discovered.continues_messages,
        }
        if discovered.template_kwargs:
            identity["template_kwargs"] = discovered.template_kwargs
        if discovered.history_thinking != "keep":
            identity["history_thinking"] = discovered.history_thinking
        return cls(endpoint=ChatEndpoint(discovered), identity=identity, settings=settings)

    def play(self, setup: EvalSetup, store: EvalTasksStore, record: Record) -> None:
        """Raises EngineFault after ``max_faults_in_a_row`` and ModelError when the server will never
        answer.
        """
        collector = Collector(
            endpoint=self.endpoint,
            factory=setup.factory,
            limits=setup.limits,
            stop=setup.stop,
            run_seed=self.settings.seed,
            temperature=self.settings.temperature,
            num_concurrent=self.settings.num_concurrent,
            max_retries=self.settings.max_retries,
            max_faults_in_a_row=self.settings.max_faults_in_a_row,
            rollout_status=self.rollout_status,
        )
        results = collector.play(
            store.pending(setup.tasks, num_samples=self.settings.num_samples),
            on_rollout_done=lambda task, sample, collected: record([from_collected(task, sample, collected)]),
        )
        self.num_retries += sum(result.num_retries for result in results)

    def notes(self) -> list[str]:
        """Requests that were sent again, by their reason, and how many tries were repeated."""
        retries = sorted(self.endpoint.retries.items())
        resend_notes = (
            [f"requests sent again: {', '.join(f'{count} after {reason}' for reason, count in retries)}"]
            if retries
            else []
        )
        return [*resend_notes, *_retry_notes(self.num_retries)]


def _retry_notes(num_retries: int) -> list[str]:
    return [f"tries repeated after a fault: {num_retries}"] if num_retries else []
