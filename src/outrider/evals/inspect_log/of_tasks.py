"""An evaluation of ``outrider eval --tasks``, from its results: the turns without what tools said."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from outrider.config import load_settings
from outrider.environments.families import make_task_set
from outrider.errors import ConfigError, OutriderError
from outrider.evals.benchmark.grades import RETURN
from outrider.evals.benchmark.report import requested_samples
from outrider.evals.benchmark.scores import SampleResult, summarise
from outrider.evals.benchmark.settings import EvalTasksSettings
from outrider.evals.benchmark.store import RESULTS, SETTINGS, SUMMARY, read_results
from outrider.evals.benchmark.tasks import load_tasks
from outrider.evals.inspect_log.logged import LoggedEvaluation, LoggedMessage, LoggedRollout, modified_time
from outrider.evals.inspect_log.turns import turn
from outrider.rollout.evaluate import interval
from outrider.types import Json, Task


def load_tasks_evaluation(folder: Path) -> LoggedEvaluation:
    """Every sample that its report counts. Raises ConfigError where the folder is not whole, DataError for
    damaged results.
    """
    if not (folder / SETTINGS).is_file():
        raise ConfigError(f"{folder} cannot be exported: its {SETTINGS} is missing")
    identity, stored_results = read_results(folder / RESULTS)
    settings = load_settings(EvalTasksSettings, file=folder / SETTINGS)
    results = requested_samples(stored_results, settings.num_samples)
    tasks, notes = _tasks(settings, str(identity.get("panel_hash")))
    num_requested = len(tasks) * settings.num_samples
    # without its tasks the report tells, which is written at the end
    is_complete = len(results) >= num_requested if tasks else (folder / SUMMARY).is_file()
    if not is_complete:
        reason = (
            f"{len(results)} of {num_requested} samples are on file" if tasks else f"there is no {SUMMARY}"
        )
        notes.append(f"{reason}: the evaluation has not ended")
    form = None if settings.environment is None else settings.environment.call_format
    return LoggedEvaluation(
        task=str(identity.get("tasks") or settings.tasks),
        model=str(identity.get("endpoint_model") or (settings.model and settings.model.name)),
        created=modified_time(folder / RESULTS),
        panel_hash=str(identity.get("panel_hash")),
        rollouts=tuple(_rollout(result, tasks.get(result.task_key), form) for result in results),
        summary=_summary(results),
        metadata={"identity": identity, "recipe": (folder / SETTINGS).read_text(encoding="utf-8")},
        notes=tuple(notes),
        is_complete=is_complete,
        num_requested=num_requested,
    )


def _summary(results: Sequence[SampleResult]) -> dict[str, float]:
    """The score of the evaluation's report: a mean over tasks, whose samples a fault may have left fewer."""
    tasks = summarise(results).task_scores
    scores = [tasks[key] for key in sorted(tasks)]
    if not scores:
        return {}
    low, high = interval(scores, binary=all(score in (0.0, 1.0) for score in scores))
    return {"mean": fmean(scores), "ci_low": low, "ci_high": high}


def _tasks(settings: EvalTasksSettings, panel_hash: str) -> tuple[Mapping[str, Task], list[str]]:
    try:
        task_set = None if settings.environment is None else make_task_set(settings.environment)
        try:
            eval_tasks = load_tasks(settings, task_set)
        finally:
            if task_set is not None:  # it may have started a server to ask
                task_set.close()
    except (OutriderError, OSError) as error:
        return {}, [f"without questions and targets: {error}"]
    if eval_tasks.panel_hash != panel_hash:
        return {}, ["without questions and targets: the tasks of this machine are others than were played"]
    return {task.key: task for task in eval_tasks.tasks}, []


def _rollout(result: SampleResult, task: Task | None, form: str | None) -> LoggedRollout:
    prompt = () if task is None else (LoggedMessage(role="user", text=task.question),)
    turns = tuple(turn(text, form) for text in result.turns or ())
    metrics = {("return" if name == RETURN else name): value for name, value in result.metrics.items()}
    own = {"score": result.score, "success": result.success}
    scores = {name: float(value) for name, value in own.items() if value is not None}
    metadata: dict[str, Json] = {"num_calls": result.num_tool_calls}
    return LoggedRollout(
        task_key=result.task_key,
        epoch=result.sample + 1,
        prompt=prompt,
        messages=(*prompt, *turns),
        target=() if task is None else task.answers,
        outcome=result.outcome,
        detail=result.detail,
        answer=result.prediction or None,
        scores={**metrics, **scores} if scores else {},
        num_tokens=result.num_tokens,
        metadata=metadata,
    )
