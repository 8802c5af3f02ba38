"""``outrider eval --adapt K``: K trials on unseen tasks with a memory and without any change of weights
(EMPO², Fig. 8).

``tips`` are written and shown as in training. ``reflexion`` tries again only what failed; its score counts
what any trial has solved. Every trial leaves a line in ``evaluations.jsonl`` and its rollouts in ``traces``;
``python -m benchmarks.compare_by_task`` draws the curve over them.
"""

import shlex
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from statistics import fmean

from rich.text import Text

from outrider.algorithms.reflexion import ReflexionHook
from outrider.algorithms.tips import TIPS_ON, MemorySettings, TipHook
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import EnvironmentFault
from outrider.memory.embedders import load_embedder
from outrider.printing import FittedTable, Terminal, plural, score
from outrider.rollout.evaluate import Evaluation, evaluate, interval
from outrider.rollout.faults import fault_line, lost_reasons, require_room
from outrider.rollout.hooks import RolloutStatus
from outrider.trace import Leaf
from outrider.training.components import Components
from outrider.training.resume import note_start
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import build
from outrider.training.step_metrics import evaluation_fields, evaluation_metrics
from outrider.training.step_records import RecordFiles
from outrider.viewer.progress import (
    SET_UP,
    Progress,
    ProgressMode,
    TokenMeter,
    WatchedProgress,
    make_progress,
)
from outrider.viewer.trackers import TrackerSet, make_trackers


def adapt(
    opened: tuple[RunDirectory, RunSettings],
    *,
    progress: ProgressMode = "auto",
    recipe: str | None = None,
) -> int:
    """Run the trials, write ``evaluations.jsonl`` and print the curve; exit status 0. ``recipe`` is the name
    of its file for the log.

    Raises what set-up raises, and EnvironmentFault if a trial has no result; the trials before it are on
    file.
    """
    run, settings = opened
    rollout_status = RolloutStatus()
    display = WatchedProgress(
        make_progress(progress), rollout_status=rollout_status, after_s=settings.train.watchdog_s
    )
    try:
        note_start(
            display,
            run=run.path,
            source=f"recipe {shlex.quote(recipe or str(run.path / 'config.toml'))}",
            num_threads=settings.num_threads,
            device=settings.model.device,
        )
        display.stage(SET_UP, None)
        meter = TokenMeter(display)
        try:
            parts = build(
                settings,
                buffer_path=run.path / "buffer.sqlite",
                resumed=False,
                on_tokens=meter,
                note=display.note,
            )
            parts.rollout_status = rollout_status
            hook = _make_hook(parts)
        except BaseException:  # an interruption too
            run.roll_back()
            raise
        run.retain()
        trackers = make_trackers(
            settings.trackers,
            run_dir=run.path,
            tracking=settings.tracking,
            config=settings.model_dump(mode="json"),
            warn=display.note,
        )
        with closing(parts.factory), closing(trackers):
            table = _run_trials(run, parts, hook, display, meter, trackers)
    finally:
        display.close()
        run.release()
    if progress != "json":
        Terminal().print(table)
    return 0


def _make_hook(parts: Components) -> TipHook | ReflexionHook:
    """The memory that ``evaluation.memory`` names, with the recipe's settings if it has some."""
    if parts.settings.evaluation.memory == "reflexion":
        return ReflexionHook()
    memory = parts.settings.algorithm.tip_memory or MemorySettings()
    return TipHook(
        memory,
        embedder=load_embedder(memory.embedder),
        count_tokens=parts.renderer.count_tokens,
        seed=parts.settings.seed,
    )


def _run_trials(
    run: RunDirectory,
    parts: Components,
    hook: TipHook | ReflexionHook,
    display: Progress,
    meter: TokenMeter,
    trackers: TrackerSet,
) -> FittedTable:
    """The memory starts empty, so the first trial is the model alone. The table has a row per trial."""
    settings, evaluation_settings = parts.settings, parts.settings.evaluation
    num_done = 0

    def on_finished(done: int, total: int) -> None:
        nonlocal num_done
        num_done = done
        display.advance(done)

    meter.num_done = lambda: num_done
    table = FittedTable(
        "trial", "score [95 % interval]", "mean return, no share", "tasks", "faults", title="no weight update"
    )
    tasks, tasks_hash = list(parts.test_tasks), hash_tasks(parts.test_tasks)
    best: dict[str, Leaf] = {}  # by task: a solved try first, then the higher return
    for trial in range(evaluation_settings.num_trials):
        label = f"{evaluation_settings.memory}, trial {trial + 1}"
        num_done = 0
        display.stage(
            label, len(tasks) * evaluation_settings.num_samples, num_parallel=settings.num_concurrent
        )
        own, traces = evaluate(
            parts.scheduler(training=False, hooks=(hook,), on_finished=on_finished),
            tasks,
            num_samples=evaluation_settings.num_samples,
            label=label,
            step=0,
            mode=TIPS_ON,
            stream_step=-1 - trial,
        )
        for line in require_room(traces, context_length=parts.engine.context_length):
            display.note(f"{label}: {line}")
        if own.fault_reasons:
            display.note(
                f"{label}: {plural(len(own.fault_reasons), 'fault')}, "
                f"{plural(own.num_retries, 'try was', 'tries were')} repeated: "
                f"{fault_line(own.fault_reasons)}"
            )
        if lost := lost_reasons(traces):
            display.note(
                f"{label}: {plural(len(lost), 'rollout was', 'rollouts were')} lost to faults: "
                f"{fault_line(lost)}"
            )
        evaluation = own
        if hook.retries_failures:
            for trace in traces:
                for leaf, _ in trace.rollouts():
                    best_leaf = best.get(trace.task.key)
                    if leaf.episode_return is not None and (
                        best_leaf is None or _rank(leaf) > _rank(best_leaf)
                    ):
                        best[trace.task.key] = leaf
            evaluation = _cumulative_evaluation(own, best)
            tasks = [task for task in tasks if task.key not in best or not best[task.key].success]
        if not evaluation.num_tasks:  # later trials of Reflexion count the best tries so far
            raise EnvironmentFault(
                f"{label!r} has no result, every rollout was lost to a fault: {fault_line(lost)}"
            )
        RecordFiles(run.path).write_evaluation(parts, traces, number=trial, step=0)
        run.add_evaluation(
            evaluation,
            split=evaluation_settings.sets[0].split,
            temperature=evaluation_settings.temperature,
            tasks_hash=tasks_hash,
            panel=evaluation_settings.sets[0].name,
            truncation=evaluation_settings.truncation,
            trial=own,
        )
        trackers.log(trial, evaluation_metrics(evaluation))
        display.note(
            f"{label}: {score(evaluation.score, evaluation.ci_low, evaluation.ci_high)} on "
            f"{plural(evaluation.num_tasks, 'task')}, {plural(evaluation.num_faults, 'fault')}",
            event="evaluation",
            **evaluation_fields(evaluation),
        )
        trackers.log_rollouts(trial, traces, label=label)
        table.add_row(
            label,
            Text(score(evaluation.score, evaluation.ci_low, evaluation.ci_high)),
            score(evaluation.mean_return, is_share=False),
            str(evaluation.num_tasks),
            str(evaluation.num_faults),
        )
        if not tasks:
            break
    return table


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
