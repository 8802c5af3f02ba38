"""An evaluation of ``outrider eval --tasks``, from its results: the turns without what tools said."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from outrider.config import load_settings
from outrider.environments.families import make_family
from outrider.errors import ConfigError, OutriderError
from outrider.evals.benchmark.grades import RETURN
from outrider.evals.benchmark.report import wanted
from outrider.evals.benchmark.scores import SampleResult, summarise
from outrider.evals.benchmark.settings import PanelSettings
from outrider.evals.benchmark.store import RESULTS, SETTINGS, SUMMARY, read_results
from outrider.evals.benchmark.tasks import load_tasks
from outrider.evals.inspect_log.logged import LoggedEvaluation, LoggedRollout, Said, written_at
from outrider.evals.inspect_log.turns import turn
from outrider.rollout.evaluate import interval
from outrider.types import Json, Task


def evaluation_of_tasks(folder: Path) -> LoggedEvaluation:
    """Every sample that its report counts. Raises ConfigError where the folder is not whole, DataError for
    damaged results.
    """
    if not (folder / SETTINGS).is_file():
        raise ConfigError(f"{folder} cannot be exported: its {SETTINGS} is missing")
    identity, found = read_results(folder / RESULTS)
    settings = load_settings(PanelSettings, file=folder / SETTINGS)
    results = wanted(found, settings.num_samples)
    tasks, notes = _tasks(settings, str(identity.get("panel_hash")))
    owed = len(tasks) * settings.num_samples
    # without its tasks the report tells, which is written at the end
    has_ended = len(results) >= owed if tasks else (folder / SUMMARY).is_file()
    if not has_ended:
        told = f"{len(results)} of {owed} samples are on file" if tasks else f"there is no {SUMMARY}"
        notes.append(f"{told}: the evaluation has not ended")
    form = None if settings.environment is None else settings.environment.call_format
    return LoggedEvaluation(
        task=str(identity.get("tasks") or settings.tasks),
        model=str(identity.get("endpoint_model") or (settings.model and settings.model.name)),
        created=written_at(folder / RESULTS),
        panel_hash=str(identity.get("panel_hash")),
        rollouts=tuple(_rollout(one, tasks.get(one.task_key), form) for one in results),
        summary=_summary(results),
        metadata={"identity": identity, "recipe": (folder / SETTINGS).read_text(encoding="utf-8")},
        notes=tuple(notes),
        has_ended=has_ended,
        num_owed=owed,
    )


def _summary(results: Sequence[SampleResult]) -> dict[str, float]:
    """The score of the evaluation's report: a mean over tasks, whose samples a fault may have left fewer."""
    tasks = summarise(results).task_scores
    scores = [tasks[key] for key in sorted(tasks)]
    if not scores:
        return {}
    low, high = interval(scores, binary=all(score in (0.0, 1.0) for score in scores))
    return {"mean": fmean(scores), "ci_low": low, "ci_high": high}


def _tasks(settings: PanelSettings, panel_hash: str) -> tuple[Mapping[str, Task], list[str]]:
    try:
        family = None if settings.environment is None else make_family(settings.environment)
        try:
            panel = load_tasks(settings, family)
        finally:
            if family is not None:  # it may have started a server to ask
                family.close()
    except (OutriderError, OSError) as error:
        return {}, [f"without questions and targets: {error}"]
    if panel.panel_hash != panel_hash:
        return {}, ["without questions and targets: the tasks of this machine are others than were played"]
    return {task.key: task for task in panel.tasks}, []


def _rollout(result: SampleResult, task: Task | None, form: str | None) -> LoggedRollout:
    prompt = () if task is None else (Said(role="user", text=task.question),)
    turns = tuple(turn(text, form) for text in result.turns or ())
    named = {("return" if name == RETURN else name): value for name, value in result.metrics.items()}
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
        scores={**named, **scores} if scores else {},
        num_tokens=result.num_tokens,
        metadata=metadata,
    )
