"""``outrider eval --regrade RUN``: the kept replies of an evaluation, graded by the present graders. No model
is needed.

Nothing of the evaluation changes. What comes out goes beside it, as ``regraded-1.json``, ``regraded-2.json``
and so on.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from outrider.atomic_io import replace_file
from outrider.config import load_settings
from outrider.environments.families import make_family
from outrider.environments.tool_qa.judge import Judge, found_judge
from outrider.errors import ConfigError, DataError
from outrider.evals.benchmark.extraction import find_variant
from outrider.evals.benchmark.grades import FROM_JUDGE, Grader, Played
from outrider.evals.benchmark.regrade_report import Regraded, as_json, side_by_side, told
from outrider.evals.benchmark.report import report_of, wanted
from outrider.evals.benchmark.scores import SampleResult
from outrider.evals.benchmark.settings import PanelSettings
from outrider.evals.benchmark.store import RESULTS, SETTINGS, SUMMARY, read_results
from outrider.evals.benchmark.task_sets import Panel
from outrider.evals.benchmark.tasks import judge_identity, load_tasks, scorer_of
from outrider.printing import say
from outrider.terminal import Terminal
from outrider.types import Json

_OF_GRADING: Final = {"rules", "metric", "judge", "tasks", "panel", "max_faults_in_a_row", "watchdog_s"}
_NUM_ASKED: Final = 8  # judges at a time


def regrade_replies(folder: Path, overrides: Sequence[str] = ()) -> int:
    """Grade, print the tables and what changed, and write them beside the evaluation.

    Raises ConfigError for results without replies, for an environment's own record and for overrides that are
    none of grading; DataError for damaged results or tasks; EngineFault and ModelError where a judge stopped
    it (nothing is written then).
    """
    regraded = regrade(folder, overrides)
    path = _free(folder)
    replace_file(
        path, (json.dumps(as_json(regraded), indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
    )
    Terminal().print(side_by_side(regraded))
    say(*told(regraded), f"{path}; {folder / SUMMARY} is as it was")
    return 0


def regrade(folder: Path, overrides: Sequence[str] = ()) -> Regraded:
    """The same without printing or writing. Raises as above."""
    if not (folder / RESULTS).is_file():
        raise ConfigError(f"{folder} holds no evaluation of tasks")
    identity, kept = read_results(folder / RESULTS)
    began, settings = (_settings(folder, kept, more) for more in ((), overrides))
    _require_grading(began, settings)
    judge = None if settings.judge is None else found_judge(settings.judge)
    if judge is not None:
        settings = settings.model_copy(update={"judge": judge.settings})
    panel = _tasks(settings, identity, folder)
    before, scorer = scorer_of(panel.task_set, began), scorer_of(panel.task_set, settings)
    results = wanted(kept, settings.num_samples)
    graded = _graded(settings, panel, results, judge)
    by = None if judge is None else judge_identity(judge.settings)
    present: dict[str, Json] = {**identity, "rules": settings.rules, "metric": scorer, "judge": by}
    pairs = [
        (one, other) for one, other in zip(results, graded, strict=True) if _verdict(one) != _verdict(other)
    ]
    return Regraded(
        before=report_of(began, panel, scorer=before, identity=identity, results=results),
        now=report_of(settings, panel, scorer=scorer, identity=present, results=graded),
        changed=pairs,
        num_graded=sum(one.turns is not None for one in results),
    )


def _settings(folder: Path, kept: Sequence[SampleResult], overrides: Sequence[str]) -> PanelSettings:
    """Those of the evaluation, with what is to be another. Raises ConfigError where its replies cannot be
    graded again.
    """
    answered = [one for one in kept if not one.outcome.is_fault or one.answered is not None]
    if without := sum(one.turns is None for one in answered):
        raise ConfigError(
            f"{folder} cannot be graded again: {without} of its {len(answered)} answers were kept without "
            "the reply, by an earlier version or in a pack; evaluate again, with --tasks and a new --run"
        )
    if not (folder / SETTINGS).is_file():
        raise ConfigError(f"{folder} cannot be graded again: its {SETTINGS} is missing")
    settings = load_settings(PanelSettings, file=folder / SETTINGS, overrides=overrides)
    if settings.is_played:
        raise ConfigError(
            f"{settings.tasks} was scored by its environment while it was played: no reply is to be graded"
        )
    return settings


def _require_grading(began: PanelSettings, settings: PanelSettings) -> None:
    for key in PanelSettings.model_fields:
        if key not in _OF_GRADING and getattr(began, key) != getattr(settings, key):
            named = ", ".join(sorted(_OF_GRADING - {"watchdog_s"}))
            raise ConfigError(f"{key} decided what was played; grading again takes these: {named}")


def _tasks(settings: PanelSettings, identity: Mapping[str, Json], folder: Path) -> Panel:
    family = None if settings.environment is None else make_family(settings.environment)
    panel = load_tasks(settings, family)
    if panel.panel_hash != identity.get("panel_hash"):
        raise ConfigError(
            f"these {len(panel.tasks)} tasks ({panel.panel_hash}) are not those that {folder} answered "
            f"({identity.get('panel_hash')}): give them as --tasks NAME=FILE"
        )
    return panel


def _graded(
    settings: PanelSettings, panel: Panel, results: Sequence[SampleResult], judge: Judge | None
) -> list[SampleResult]:
    """In the order of the results; a fault of the play stays what it is."""
    environment = settings.environment
    grader = Grader(
        rules=find_variant(settings.rules),
        kind=panel.task_set.kind,
        scorer=scorer_of(panel.task_set, settings),
        tools=environment.tool_names() if environment is not None and settings.tools != "off" else (),
        judge=judge,
        max_faults_in_a_row=settings.max_faults_in_a_row,
    )
    tasks = {task.key: task for task in panel.tasks}

    def grade(one: SampleResult) -> SampleResult:
        if one.turns is None:
            return one
        if one.task_key not in tasks:
            raise DataError(f"the results hold an answer to {one.task_key!r}, which is no task of the panel")
        metrics = {name: value for name, value in one.metrics.items() if name not in FROM_JUDGE}
        return grader.grade(
            Played(
                task=tasks[one.task_key], sample=one.sample, outcome=one.answered or one.outcome,
                turns=one.turns, token_ids=one.token_ids, metrics=metrics, num_tool_calls=one.num_tool_calls,
                num_tokens=one.num_tokens,
            )
        )  # fmt: skip

    with ThreadPoolExecutor(max_workers=_NUM_ASKED if judge is not None else 1) as pool:
        graded = list(pool.map(grade, results))
    grader.check()
    return graded


def _verdict(one: SampleResult) -> tuple[float | None, bool | None]:
    return one.score, one.success


def _free(folder: Path) -> Path:
    """The next name: an earlier result is never replaced."""
    number = 1
    while (folder / f"regraded-{number}.json").exists():
        number += 1
    return folder / f"regraded-{number}.json"
