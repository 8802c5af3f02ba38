"""``outrider eval --regrade RUN``: grade the stored replies of an evaluation with the current graders.

This needs no model and does not change the evaluation. The result is written to its folder as
``regraded-1.json``, ``regraded-2.json`` and so on.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.text import Text

from outrider import __version__
from outrider.config import load_settings
from outrider.environments.base import make_task_set
from outrider.environments.tool_qa.rewards import Judge, discover_judge
from outrider.errors import ConfigError, DataError
from outrider.evaluation.grading import JUDGE_METRICS, FinishedRollout, Grader, find_variant
from outrider.evaluation.report import EvalTasksReport, build_report, requested_samples
from outrider.evaluation.results import RESULTS, SETTINGS, SUMMARY, SampleResult, read_results
from outrider.evaluation.tasks import EvalTasks, EvalTasksSettings, choose_scorer, judge_identity, load_tasks
from outrider.files import replace_file
from outrider.printing import FittedTable, Terminal, one_line, plural, print_lines, score
from outrider.types import Json

FORMAT: Final = "outrider regrade 1"
_NUM_SHOWN: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RegradeReport:
    """Two reports on the same replies, and the pairs of results whose verdicts differ."""

    before: EvalTasksReport
    after: EvalTasksReport
    changed: Sequence[tuple[SampleResult, SampleResult]]
    num_graded: int


def _describe_verdict(result: SampleResult) -> str:
    if result.score is None:
        return "not scored"
    partly = f" ({score(result.score)})" if result.score not in (0.0, 1.0) else ""
    return f"{'right' if result.success else 'wrong'}{partly}, {result.prediction!r}"


def describe_changes(regraded: RegradeReport) -> list[str]:
    """Report the number of changed verdicts, and list them."""
    changed = regraded.changed
    lines = [f"{len(changed)} of {plural(regraded.num_graded, 'verdict')} changed"]
    lines += [
        one_line(
            f"  {old.task_key}, sample {old.sample}: was {_describe_verdict(old)}; is "
            f"{_describe_verdict(new)}"
        )
        for old, new in changed[:_NUM_SHOWN]
    ]
    more = [f"  and {len(changed) - _NUM_SHOWN} more, in the file"] if len(changed) > _NUM_SHOWN else []
    num_unjudged = regraded.after.num_unjudged
    faults = [f"FAULTS: the judge gave no verdict on {num_unjudged} of them"] if num_unjudged else []
    return [*lines, *more, *faults, *(f"rules: {deviation}" for deviation in regraded.after.deviations)]


def side_by_side(regraded: RegradeReport) -> FittedTable:
    """A table with one row per score, and columns for the old and the new value."""
    before, after = (
        {entry.name: entry for entry in report.scores} for report in (regraded.before, regraded.after)
    )
    title = f"{regraded.after.name}, {plural(regraded.after.num_tasks, 'task')}"
    table = FittedTable("score", "before [95 %]", "now [95 %]", "tasks", title=title)
    for name in {**after, **before}:
        old, new = before.get(name), after.get(name)
        cells = (Text("-" if entry is None else entry.text) for entry in (old, new))
        table.add_row(Text(name), *cells, str((new or old or after[name]).num_tasks))
    return table


def as_json(regraded: RegradeReport) -> dict[str, Json]:
    """Plain data; both summaries are as of ``summary.json``."""
    changed: list[Json] = [
        {"task_key": old.task_key, "sample": old.sample, "old": _plain(old), "new": _plain(new)}
        for old, new in regraded.changed
    ]
    return {
        "format": FORMAT, "outrider": __version__, "num_graded": regraded.num_graded, "changed": changed,
        "before": regraded.before.as_json(), "summary": regraded.after.as_json(),
    }  # fmt: skip


def _plain(result: SampleResult) -> dict[str, Json]:
    return {"score": result.score, "success": result.success, "prediction": result.prediction}


_GRADING_KEYS: Final = {"rules", "metric", "judge", "tasks", "panel", "max_faults_in_a_row", "watchdog_s"}
_MAX_JUDGES: Final = 8  # judges at a time


def regrade_replies(folder: Path, overrides: Sequence[str] = ()) -> int:
    """Grade, print the tables and the changes, and write them to the folder of the evaluation.

    Raises ConfigError for results without replies, for scores that an environment recorded, and for overrides
    that do not affect grading; DataError for damaged results or tasks; EngineFault and ModelError if a judge
    fails (nothing is written then).
    """
    regraded = regrade(folder, overrides)
    number = 1
    while (path := folder / f"regraded-{number}.json").exists():  # an earlier result is never replaced
        number += 1
    replace_file(
        path, (json.dumps(as_json(regraded), indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
    )
    Terminal().print(side_by_side(regraded))
    print_lines(*describe_changes(regraded), f"{path}; {folder / SUMMARY} is as it was")
    return 0


def regrade(folder: Path, overrides: Sequence[str] = ()) -> RegradeReport:
    """:func:`regrade_replies` without printing and writing. Raises the same errors."""
    if not (folder / RESULTS).is_file():
        raise ConfigError(f"{folder} has no evaluation of tasks")
    identity, stored_results = read_results(folder / RESULTS)
    original, settings = (_settings(folder, stored_results, more) for more in ((), overrides))
    for key in EvalTasksSettings.model_fields:
        if key not in _GRADING_KEYS and getattr(original, key) != getattr(settings, key):
            allowed = ", ".join(sorted(_GRADING_KEYS - {"watchdog_s"}))
            raise ConfigError(f"{key} affects the rollouts; grading again accepts: {allowed}")
    judge = None if settings.judge is None else discover_judge(settings.judge)
    if judge is not None:
        settings = settings.model_copy(update={"judge": judge.settings})
    eval_tasks = _tasks(settings, identity, folder)
    before, scorer = (
        choose_scorer(eval_tasks.benchmark, original),
        choose_scorer(eval_tasks.benchmark, settings),
    )
    results = requested_samples(stored_results, settings.num_samples)
    graded = _grade(settings, eval_tasks, results, judge)
    judge_id = None if judge is None else judge_identity(judge.settings)
    new_identity: dict[str, Json] = {**identity, "rules": settings.rules, "metric": scorer, "judge": judge_id}
    pairs = [
        (result, regraded)
        for result, regraded in zip(results, graded, strict=True)
        if (result.score, result.success) != (regraded.score, regraded.success)
    ]
    return RegradeReport(
        before=build_report(original, eval_tasks, scorer=before, identity=identity, results=results),
        after=build_report(settings, eval_tasks, scorer=scorer, identity=new_identity, results=graded),
        changed=pairs,
        num_graded=sum(result.turns is not None for result in results),
    )


def _settings(folder: Path, results: Sequence[SampleResult], overrides: Sequence[str]) -> EvalTasksSettings:
    """The settings of the evaluation with ``overrides``. Raises ConfigError if its replies cannot be graded
    again.
    """
    answered = [result for result in results if not result.outcome.is_fault or result.answered is not None]
    if num_without_turns := sum(result.turns is None for result in answered):
        raise ConfigError(
            f"{folder} cannot be graded again: {num_without_turns} of its {len(answered)} answers were "
            "kept without "
            "the reply, by an earlier version or in a pack; evaluate again, with --tasks and a new --run"
        )
    if not (folder / SETTINGS).is_file():
        raise ConfigError(f"{folder} cannot be graded again: its {SETTINGS} is missing")
    settings = load_settings(EvalTasksSettings, file=folder / SETTINGS, overrides=overrides)
    if settings.runs_episodes:
        raise ConfigError(f"{settings.tasks} was scored by its environment: there are no replies to grade")
    return settings


def _tasks(settings: EvalTasksSettings, identity: Mapping[str, Json], folder: Path) -> EvalTasks:
    task_set = None if settings.environment is None else make_task_set(settings.environment)
    eval_tasks = load_tasks(settings, task_set)
    if eval_tasks.panel_hash != identity.get("panel_hash"):
        raise ConfigError(
            f"these {len(eval_tasks.tasks)} tasks ({eval_tasks.panel_hash}) are not those that {folder} "
            "answered "
            f"({identity.get('panel_hash')}): give them as --tasks NAME=FILE"
        )
    return eval_tasks


def _grade(
    settings: EvalTasksSettings, eval_tasks: EvalTasks, results: Sequence[SampleResult], judge: Judge | None
) -> list[SampleResult]:
    """Grade in the order of the results; faults of the rollout are unchanged."""
    environment = settings.environment
    grader = Grader(
        rules=find_variant(settings.rules),
        kind=eval_tasks.benchmark.kind,
        scorer=choose_scorer(eval_tasks.benchmark, settings),
        tools=environment.tool_names() if environment is not None and settings.tools != "off" else (),
        judge=judge,
        max_faults_in_a_row=settings.max_faults_in_a_row,
    )
    tasks = {task.key: task for task in eval_tasks.tasks}

    def grade(result: SampleResult) -> SampleResult:
        if result.turns is None:
            return result
        if result.task_key not in tasks:
            raise DataError(
                f"the results have an answer to {result.task_key!r}, which is no task of the panel"
            )
        metrics = {name: value for name, value in result.metrics.items() if name not in JUDGE_METRICS}
        return grader.grade(
            FinishedRollout(
                task=tasks[result.task_key], sample=result.sample, outcome=result.answered or result.outcome,
                turns=result.turns, token_ids=result.token_ids, metrics=metrics,
                num_tool_calls=result.num_tool_calls,
                num_tokens=result.num_tokens,
            )
        )  # fmt: skip

    with ThreadPoolExecutor(max_workers=_MAX_JUDGES if judge is not None else 1) as pool:
        graded = list(pool.map(grade, results))
    grader.check()
    return graded
