"""``outrider eval --tasks``: run the tasks, grade the answers, store each result, and print the scores.

The policy is a model in this process, which uses the rollout loop, or an agent behind a chat endpoint. A
folder has one evaluation: ``results.jsonl`` (:class:`~outrider.evaluation.results.EvalTasksStore`) and
``summary.json``. The same command resumes a stopped evaluation and retries faulted samples.
"""

import hashlib
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import torch

from outrider.engines.base import Engine
from outrider.engines.chat import ChatEndpoint, EndpointSettings
from outrider.engines.local.engine import describe_path, make_engine
from outrider.engines.local.model import LanguageModel, check_positions, resolve_precision
from outrider.environments.tool_qa.rewards import discover_judge
from outrider.errors import CheckpointError, ConfigError, EngineFault
from outrider.evaluation.grading import FinishedRollout, Grader, find_variant, from_collected, from_trace
from outrider.evaluation.report import EvalTasksReport, build_report, requested_samples
from outrider.evaluation.results import RESULTS, SUMMARY, EvalTasksStore, SampleResult
from outrider.evaluation.tasks import (
    EvalSetup,
    EvalTasksSettings,
    differences,
    open_eval_tasks,
    write_settings,
)
from outrider.files import replace_file
from outrider.printing import Terminal, plural, print_lines
from outrider.rollout.endpoint import Collector
from outrider.rollout.episode import Sampling
from outrider.rollout.faults import fault_line, require_results, require_room
from outrider.rollout.hooks import RolloutStatus
from outrider.rollout.scheduler import Scheduler
from outrider.training.checkpoint import STATE, checkpoints_newest_first
from outrider.training.policy import MASTERS, SHARDS, set_threads
from outrider.training.resume import note_start, weights_differences
from outrider.training.run_dir import recorded_settings
from outrider.training.settings import ModelSettings
from outrider.training.setup import load_frozen, make_renderer
from outrider.types import Json, Task
from outrider.viewer.progress import (
    SET_UP,
    Progress,
    ProgressMode,
    TokenMeter,
    WatchedProgress,
    make_progress,
)

Record = Callable[[Sequence[FinishedRollout]], None]
_MODE = "evaluation"
_NOT_IN_LOG = ("identity", "task_scores")


def resolve_settings(settings: ModelSettings) -> ModelSettings:
    """The settings to load. For a run directory or a checkpoint in one, these are the settings of the run,
    overridden by explicitly set values except the name.

    Raises CheckpointError for a run without a checkpoint and a checkpoint outside of its run.
    """
    folder = Path(settings.name)
    if any((folder / name).exists() for name in (MASTERS, SHARDS, STATE)):
        run, checkpoint = folder.resolve().parent.parent, folder
        if not (run / "config.toml").exists():
            raise CheckpointError(
                f"{folder} is not in a run directory: set the model's name, and this folder as "
                "model.initial_checkpoint (--checkpoint)"
            )
    elif (folder / "config.toml").exists():
        checkpoints = checkpoints_newest_first(folder / "checkpoints")
        if not checkpoints:
            raise CheckpointError(f"{folder} has no checkpoint")
        run, checkpoint = folder, checkpoints[0]
    else:
        return settings
    trained = recorded_settings(run / "config.toml").model
    overrides = {name: value for name, value in settings if name in settings.model_fields_set - {"name"}}
    return trained.model_copy(update={"initial_checkpoint": str(checkpoint), **overrides})


def weights_hash(loaded: LanguageModel) -> str:
    """BLAKE2b (hex) over names, types and bytes of all weights; equal if and only if the models are."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(loaded.model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def template_hash(loaded: LanguageModel) -> str:
    """BLAKE2b (hex) over the chat template, which affects prompts and is not part of the weights."""
    template = json.dumps(loaded.tokenizer.chat_template, sort_keys=True)
    return hashlib.blake2b(template.encode(), digest_size=16).hexdigest()


@dataclass(slots=True, kw_only=True)
class LocalPlayer:
    """A model in this process. ``identity`` is everything that results depend on, and ``rollout_status`` the
    live status of the rollouts, for progress display.

    The composition of a batch does not depend on earlier results: it is sample i of the next ``batch_size``
    tasks. A batch that was interrupted is repeated as a whole, so a resumed evaluation has bit-identical
    results. Only faulted rollouts are retried in a batch of their own.
    """

    engine: Engine
    identity: Mapping[str, Json]
    settings: EvalTasksSettings
    num_retries: int = 0
    fault_reasons: list[str] = field(default_factory=list)
    rollout_status: RolloutStatus = field(default_factory=RolloutStatus)

    @classmethod
    def load(
        cls,
        model_settings: ModelSettings,
        settings: EvalTasksSettings,
        *,
        rollout_status: RolloutStatus,
        on_tokens: Callable[[int], None],
        note: Callable[[str], None],
    ) -> "LocalPlayer":
        """Load the model and hash its weights. ``on_tokens`` is called with the number of tokens of every
        decoding step, and ``note`` with messages about the settings. Raises ModelError and CheckpointError.
        """
        resolved = resolve_settings(model_settings)
        set_threads(settings.num_threads, device=resolved.device)
        loaded = load_frozen(resolved)
        if resolved.initial_checkpoint is not None:
            for line in weights_differences(Path(resolved.initial_checkpoint)):
                note(line)
        if loaded.unpacked is not None:  # slower than planned
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
        return cls(engine=engine, identity=identity, settings=settings, rollout_status=rollout_status)

    def play(self, setup: EvalSetup, store: EvalTasksStore, record: Record) -> None:
        """Run the pending samples, one batch after the other, and record the results of each at its end."""
        assert self.settings.model is not None  # a local player always has a model
        renderer = make_renderer(self.engine.tokenizer, self.settings.model, self.settings.environment)
        scheduler = Scheduler(
            engine=self.engine,
            renderer=renderer,
            factory=setup.factory,
            limits=setup.limits,
            sampling=Sampling(
                temperature=self.settings.temperature, stop=setup.stop, **self.settings.truncation
            ),
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
                batch: Sequence[Task] = setup.tasks[start : start + size]
                # The whole batch if any of its samples has no result, otherwise only the faulted samples.
                if all(store.has(task.key, sample) for task in batch):
                    batch = [task for task in batch if (task.key, sample) in pending]
                if batch:
                    # no cached prefixes of earlier batches, because a resumed evaluation has none either
                    self.engine.free_cache()
                    report = scheduler.run(batch, modes=(_MODE,), training_step=-1 - sample)
                    self.num_retries += report.num_retries
                    self.fault_reasons += report.fault_reasons
                    require_results(report.traces, report.faults)
                    require_room(report.traces, context_length=self.engine.context_length)
                    rollouts = [from_trace(trace, sample) for trace in report.traces]
                    record([rollout for rollout in rollouts if (rollout.task.key, sample) in pending])

    def notes(self) -> list[str]:
        """Notes to print in addition to the results."""
        notes = _retry_notes(self.num_retries)
        if self.fault_reasons:
            notes.append(f"all faults, also of repeated tries: {fault_line(self.fault_reasons)}")
        return notes


@dataclass(slots=True, kw_only=True)
class EndpointPlayer:
    """An agent behind a chat endpoint. Every rollout is recorded as soon as it has ended."""

    endpoint: ChatEndpoint
    identity: Mapping[str, Json]
    settings: EvalTasksSettings
    num_retries: int = 0
    rollout_status: RolloutStatus = field(default_factory=RolloutStatus)

    @classmethod
    def connect(
        cls,
        endpoint_settings: EndpointSettings,
        settings: EvalTasksSettings,
        *,
        rollout_status: RolloutStatus,
    ) -> "EndpointPlayer":
        """Query the served models once, so that a wrong address or key is an error before the first
        rollout. Raises EngineFault and ModelError.
        """
        discovered = ChatEndpoint(endpoint_settings).discovered()
        identity: dict[str, Json] = {
            "endpoint_model": discovered.model,
            "continues_messages": discovered.continues_messages,
        }
        if discovered.template_kwargs:
            identity["template_kwargs"] = discovered.template_kwargs
        if discovered.history_thinking != "keep":
            identity["history_thinking"] = discovered.history_thinking
        return cls(
            endpoint=ChatEndpoint(discovered), identity=identity, settings=settings,
            rollout_status=rollout_status,
        )  # fmt: skip

    def play(self, setup: EvalSetup, store: EvalTasksStore, record: Record) -> None:
        """Run the pending samples; ``record`` is called from several threads.

        Raises EngineFault after ``max_faults_in_a_row`` consecutive faults, and ModelError if the server can
        never respond.
        """
        collector = Collector(
            endpoint=self.endpoint,
            factory=setup.factory,
            limits=setup.limits,
            stop=setup.stop,
            run_seed=self.settings.seed,
            temperature=self.settings.temperature,
            truncation=self.settings.truncation,
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
        """Repeated requests by reason, and the number of retried rollouts."""
        retries = ", ".join(
            f"{count} after {reason}" for reason, count in sorted(self.endpoint.retries.items())
        )
        return [*([f"requests sent again: {retries}"] if retries else []), *_retry_notes(self.num_retries)]


def _retry_notes(num_retries: int) -> list[str]:
    return [f"tries repeated after a fault: {num_retries}"] if num_retries else []


_MAX_JUDGES = 8  # concurrent judge requests for one batch of answers


def evaluate_tasks(settings: EvalTasksSettings, folder: Path, *, progress: ProgressMode = "auto") -> int:
    """Run the pending samples, write ``summary.json`` and print it.

    Returns the exit status: 0 even if faults remain, which are reported, and 1 if no sample could be scored.

    Raises ConfigError, DataError, ToolUnavailable, ModelError and CheckpointError before anything is written,
    and EngineFault or ModelError if an endpoint or a judge fails permanently; results up to then are stored.
    """
    if folder.exists() and (
        not folder.is_dir() or (any(folder.iterdir()) and not (folder / RESULTS).exists())
    ):
        raise ConfigError(f"{folder} is not empty and has no evaluation of tasks")
    start_time = time.monotonic()
    rollout_status = RolloutStatus()
    display = WatchedProgress(
        make_progress(progress), rollout_status=rollout_status, after_s=settings.watchdog_s
    )
    try:
        note_start(
            display,
            run=folder,
            source=f"tasks {settings.tasks}",
            num_threads=settings.num_threads,
            device="cpu" if settings.model is None else settings.model.device,
        )
        display.stage(SET_UP, None)
        if settings.model is not None:
            tools = settings.environment if settings.tools != "off" else None
            environment = None if tools is None else tools.model_dump(mode="json")
            for line in differences(
                settings.model.name, environment, settings.rollout.model_dump(mode="json")
            ):
                display.note(line)
        report, notes = run_evaluation(settings, folder, display=display, rollout_status=rollout_status)
        scored = report.scores[0].num_tasks if report.scores else report.num_tasks
        only = "" if scored == report.num_tasks else f"{scored} of "
        display.note(
            f"{report.name}: "
            + ", ".join(f"{entry.name} {entry.text}" for entry in report.scores[:1])
            + f" on {only}{plural(report.num_tasks, 'task')}, {plural(report.num_faults, 'fault')}",
            event="evaluation",
            **{name: value for name, value in report.as_json().items() if name not in _NOT_IN_LOG},
            summary=str(folder / SUMMARY),
        )
        if progress == "json":  # otherwise they are printed below the table
            for note in notes:
                display.note(note)
    finally:
        display.close()
    if progress != "json":
        Terminal().print(report.table())
        seconds = f"{time.monotonic() - start_time:.1f} s"
        print_lines(*report.lines(), *notes, f"{seconds}; {shlex.quote(str(folder / SUMMARY))}")
    if not report.summary.num_scored:
        print_lines(
            "outrider: no sample could be scored; once the cause is gone, the same command tries again",
            to_stderr=True,
        )
        return 1
    return 0


def run_evaluation(
    settings: EvalTasksSettings,
    folder: Path,
    *,
    display: Progress,
    rollout_status: RolloutStatus | None = None,
) -> tuple[EvalTasksReport, list[str]]:
    """Run the evaluation. Returns its report, and notes that are not part of the results. Raises the same
    errors as :func:`evaluate_tasks`.

    ``rollout_status`` receives the live status of the rollouts.
    """
    judge = None if settings.judge is None else discover_judge(settings.judge)
    if settings.judge is not None and judge is not None:
        settings = settings.model_copy(update={"judge": judge.settings})
    setup = open_eval_tasks(settings)
    meter = TokenMeter(display)
    with closing(setup.factory):
        status = rollout_status or RolloutStatus()
        player: LocalPlayer | EndpointPlayer
        if settings.endpoint is not None:
            player = EndpointPlayer.connect(settings.endpoint, settings, rollout_status=status)
        else:
            assert settings.model is not None  # guaranteed by the validation of the settings
            player = LocalPlayer.load(
                settings.model, settings, rollout_status=status, on_tokens=meter, note=display.note
            )
        grader = Grader(
            rules=find_variant(settings.rules), kind=setup.kind, scorer=setup.scorer, tools=setup.tools,
            judge=judge, max_faults_in_a_row=settings.max_faults_in_a_row,
        )  # fmt: skip
        store = EvalTasksStore.open(folder / RESULTS, identity={**setup.identity, **player.identity})
        try:
            line = write_settings(settings, folder)
            if line and store.results:
                display.note(line)
            play_eval_tasks(
                setup, player, grader, store, num_samples=settings.num_samples, display=display, meter=meter,
                num_parallel=settings.num_concurrent,
            )  # fmt: skip
            report = build_report(
                settings,
                setup.eval_tasks,
                scorer=setup.scorer,
                identity={**setup.identity, **player.identity},
                results=store.results,
            )
        except EngineFault as fault:
            raise EngineFault(f"{fault}. The results are stored, and the same command continues") from fault
        finally:
            store.close()
    text = json.dumps(report.as_json(), indent=1, sort_keys=True, allow_nan=False) + "\n"
    replace_file(folder / SUMMARY, text.encode())
    return report, player.notes()


def play_eval_tasks(
    setup: EvalSetup,
    player: LocalPlayer | EndpointPlayer,
    grader: Grader,
    store: EvalTasksStore,
    *,
    num_samples: int,
    display: Progress,
    meter: TokenMeter | None = None,
    num_parallel: int = 1,
) -> None:
    """Judge the answers with a pending verdict, then run missing and faulted samples, ``num_parallel`` at a
    time.

    ``meter`` displays the player's generated tokens.
    """
    recorder = _Recorder(setup=setup, grader=grader, store=store, display=display, num_samples=num_samples)
    results = requested_samples(store.results, num_samples)
    recorder.num_done = sum(not result.outcome.is_fault for result in results)
    total = len(setup.tasks) * num_samples
    display.stage("evaluate", total, done=recorder.num_done, num_parallel=num_parallel)
    display.advance(recorder.num_done)
    if meter is not None:
        meter.num_done = lambda: recorder.num_done
    recorder.judge_again()
    player.play(setup, store, recorder.record)


@dataclass(slots=True, kw_only=True)
class _Recorder:
    """Grades rollouts, stores their results and reports progress; thread-safe."""

    setup: EvalSetup
    grader: Grader
    store: EvalTasksStore
    display: Progress
    num_samples: int
    num_done: int = 0
    _num_faults: int = 0
    _lock: Lock = field(default_factory=Lock)

    def judge_again(self) -> None:
        """Judge the answers with a pending verdict, and store each verdict when it arrives."""
        tasks = {task.key: task for task in self.setup.tasks}
        waiting = requested_samples(self.store.unjudged, self.num_samples)
        with ThreadPoolExecutor(max_workers=_MAX_JUDGES) as pool:
            for judged in pool.map(
                lambda answer: self.grader.judge_answer(tasks[answer.task_key], answer), waiting
            ):
                self._add([judged])
        self.grader.check()

    def record(self, rollouts: Sequence[FinishedRollout]) -> None:
        """Grade and store. Raises EngineFault if the judge failed permanently, after storing all grades."""
        if self.setup.scorer == "judge":
            with ThreadPoolExecutor(max_workers=_MAX_JUDGES) as pool:
                self._add(list(pool.map(self.grader.grade, rollouts)))
        else:
            self._add([self.grader.grade(rollout) for rollout in rollouts])
        self.grader.check()

    def _add(self, results: Sequence[SampleResult]) -> None:
        with self._lock:
            for result in results:
                self.store.add(result)
                self.num_done += not result.outcome.is_fault
                self._num_faults += result.outcome.is_fault
            faults = {"faults": self._num_faults} if self._num_faults else {}
            self.display.advance(self.num_done, **faults)
