"""``outrider eval --adapt K``: K trials on unseen tasks with a memory and without any change of weights
(EMPO², Fig. 8).

``tips`` are written and shown as in training. ``reflexion`` tries again only what failed; its score counts
what any trial has solved. Every trial leaves a line in ``evaluations.jsonl`` and its rollouts in ``traces``;
``outrider compare --by-task`` draws the curve over them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from rich.table import Table
from rich.text import Text

from outrider.algorithms.reflexion import ReflexionHook
from outrider.algorithms.tips import TIPS_ON, MemorySettings, TipHook
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import EnvironmentFault
from outrider.memory.embedders import load_embedder
from outrider.printing import Terminal, score
from outrider.rollout.base import RolloutStatus
from outrider.rollout.episode import Sampling
from outrider.rollout.evaluate import Evaluation, evaluate, interval
from outrider.rollout.faults import fault_line, lost_reasons, require_room
from outrider.rollout.scheduler import Scheduler
from outrider.trace import Leaf, Trace
from outrider.training.components import Components
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import build
from outrider.training.step_metrics import evaluation_metrics
from outrider.training.step_records import RecordFiles
from outrider.types import Task
from outrider.viewer.progress import SET_UP, Progress, TokenMeter, WatchedProgress, make_progress
from outrider.viewer.trackers import make_trackers


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a trial (``number`` from 0) leaves: the record, ``cumulative`` with the best try of every task
    where solved tasks are not played again, that of the trial ``own``, and its rollouts.
    """

    number: int
    cumulative: Evaluation
    own: Evaluation
    traces: Sequence[Trace]


@dataclass(slots=True, kw_only=True)
class Adaptation:
    """One model, one panel, one memory that starts empty. ``display`` shows how far a trial is, and why
    rollouts were lost.
    """

    parts: Components
    hook: TipHook | ReflexionHook
    display: Progress
    num_done: int = 0

    def run(self, *, on_trial: Callable[["Trial"], None]) -> list[Evaluation]:
        """The first trial has nothing to read: it is the model alone. Raises EnvironmentFault where no
        rollout has a result.
        """
        tasks = list(self.parts.test_tasks)
        best: dict[str, Leaf] = {}
        trials = []
        for trial in range(self.parts.settings.evaluation.num_trials):
            evaluation, traces = self._trial(tasks, trial)
            own = evaluation
            if self.hook.retries_failures:
                _update_best(best, traces)
                evaluation = _cumulative_evaluation(evaluation, best)
                tasks = [task for task in tasks if task.key not in best or not best[task.key].success]
            if not evaluation.num_tasks:  # of Reflexion's later trials the best so far stand
                reasons = fault_line(lost_reasons(traces))
                raise EnvironmentFault(
                    f"{evaluation.label!r} has no result, every rollout was lost to a fault: {reasons}"
                )
            on_trial(Trial(number=trial, cumulative=evaluation, own=own, traces=traces))
            trials.append(evaluation)
            if not tasks:
                break
        return trials

    def _trial(self, tasks: Sequence[Task], trial: int) -> tuple[Evaluation, list[Trace]]:
        settings = self.parts.settings
        label = f"{settings.evaluation.memory}, trial {trial + 1}"
        self.num_done = 0
        self.display.stage(
            label, len(tasks) * settings.evaluation.num_samples, num_parallel=settings.num_concurrent
        )
        scheduler = Scheduler(
            engine=self.parts.engine,
            renderer=self.parts.renderer,
            factory=self.parts.factory,
            limits=settings.limits,
            sampling=Sampling(temperature=settings.evaluation.temperature, stop=self.parts.task_set.stop),
            run_seed=settings.seed,
            hooks=(self.hook,),
            max_concurrent=settings.num_concurrent,
            max_retries=settings.train.max_retries,
            on_finished=self._advance,
            rollout_status=self.parts.rollout_status,
        )
        evaluation, traces = evaluate(
            scheduler,
            tasks,
            num_samples=settings.evaluation.num_samples,
            label=label,
            step=0,
            mode=TIPS_ON,
            stream_step=-1 - trial,
        )
        for line in require_room(traces, context_length=self.parts.engine.context_length):
            self.display.note(f"{label}: {line}")
        if evaluation.num_retries:
            self.display.note(f"{label}: {evaluation.num_retries} tries were repeated after a fault")
        if lost := lost_reasons(traces):
            self.display.note(f"{label}: {len(lost)} rollouts were lost to faults: {fault_line(lost)}")
        return evaluation, traces

    def _advance(self, done: int, total: int) -> None:
        self.num_done = done
        self.display.advance(done)


def adapt(
    opened: tuple[RunDirectory, RunSettings], *, progress: Literal["auto", "rich", "plain", "none"] = "auto"
) -> int:
    """Build, play, write ``evaluations.jsonl`` and print the curve. Raises what set-up raises, and
    EnvironmentFault where a trial has no result; the trials before it are on file.
    """
    run, settings = opened
    rollout_status = RolloutStatus()
    display = WatchedProgress(
        make_progress(progress), rollout_status=rollout_status, after_s=settings.train.watchdog_s
    )
    try:
        display.stage(SET_UP, None)
        table = _play(run, settings, display, rollout_status)
    finally:
        display.close()
        run.release()
    Terminal().print(table)
    return 0


def _play(
    run: RunDirectory, settings: RunSettings, display: Progress, rollout_status: RolloutStatus
) -> Table:
    evaluation_settings, meter = settings.evaluation, TokenMeter(display)
    try:
        parts = build(
            settings,
            buffer_path=run.path / "buffer.sqlite",
            resumed=False,
            on_tokens=meter,
            note=display.note,
        )
        parts.rollout_status = rollout_status
        hook = make_hook(parts)
    except BaseException:  # an interruption too
        run.roll_back()
        raise
    run.retain()
    tasks_hash = hash_tasks(parts.test_tasks)
    table = Table(
        "trial", "score [95 % interval]", "mean return, no share", "tasks", "faults", title="no weight update"
    )

    files = RecordFiles(run.path)
    trackers = make_trackers(
        settings.trackers, run_dir=run.path, config=settings.model_dump(mode="json"), warn=display.note
    )

    def record(trial: Trial) -> None:
        evaluation = trial.cumulative
        files.write_evaluation(parts, trial.traces, number=trial.number, step=0)
        run.add_evaluation(
            evaluation,
            split=evaluation_settings.split,
            temperature=evaluation_settings.temperature,
            tasks_hash=tasks_hash,
            trial=trial.own,
        )
        solved = score(evaluation.score, evaluation.ci_low, evaluation.ci_high)
        returned = score(evaluation.mean_return, is_share=False)
        trackers.log(trial.number, evaluation_metrics(evaluation))
        counts = (str(evaluation.num_tasks), str(evaluation.num_faults))
        table.add_row(evaluation.label, Text(solved), returned, *counts)

    adaptation = Adaptation(parts=parts, hook=hook, display=display)
    meter.num_done = lambda: adaptation.num_done
    try:
        adaptation.run(on_trial=record)
    finally:
        trackers.close()
        parts.factory.close()
    return table


def make_hook(parts: Components) -> TipHook | ReflexionHook:
    """The memory that ``evaluation.memory`` names, with the recipe's settings where it has some."""
    if parts.settings.evaluation.memory == "reflexion":
        return ReflexionHook()
    memory = parts.settings.algorithm.tip_memory or MemorySettings()
    return TipHook(
        memory,
        embedder=load_embedder(memory.embedder),
        num_tokens=parts.renderer.count_tokens,
        seed=parts.settings.seed,
    )


def _update_best(best: dict[str, Leaf], traces: Sequence[Trace]) -> None:
    """Every task's best try so far: a solved one first, then the higher return."""
    for trace in traces:
        for leaf, _ in trace.rollouts():
            best_leaf = best.get(trace.task.key)
            if leaf.episode_return is not None and (best_leaf is None or _rank(leaf) > _rank(best_leaf)):
                best[trace.task.key] = leaf


def _rank(leaf: Leaf) -> tuple[bool, float]:
    return leaf.success, leaf.episode_return or 0.0


def _cumulative_evaluation(trial: Evaluation, best: Mapping[str, Leaf]) -> Evaluation:
    """The trial's record with the best try of every task so far."""
    scores = {key: float(leaf.success) for key, leaf in best.items()}
    low, high = interval(list(scores.values()), binary=True)
    return replace(
        trial,
        score=fmean(scores.values()) if scores else float("nan"),
        ci_low=low,
        ci_high=high,
        num_tasks=len(scores),
        mean_return=fmean(leaf.episode_return or 0.0 for leaf in best.values()) if best else float("nan"),
        task_scores=scores,
        task_returns={key: leaf.episode_return or 0.0 for key, leaf in best.items()},
    )
