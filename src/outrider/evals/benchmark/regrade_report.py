"""Report of grading again: both tables side by side, the verdicts that changed, and the same as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table
from rich.text import Text

from outrider import __version__
from outrider.evals.benchmark.scores import SampleResult
from outrider.evals.benchmark.table import EvalTasksReport, Score
from outrider.printing import one_line, score
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
    """How many verdicts changed, and which."""
    changed = regraded.changed
    lines = [f"{len(changed)} of {regraded.num_graded} verdicts changed"]
    lines += [
        one_line(
            f"  {old.task_key}, sample {old.sample}: was {_describe_verdict(old)}; is {_describe_verdict(new)}"
        )
        for old, new in changed[:_NUM_SHOWN]
    ]
    more = [f"  and {len(changed) - _NUM_SHOWN} more, in the file"] if len(changed) > _NUM_SHOWN else []
    num_unjudged = regraded.after.num_unjudged
    faults = [f"FAULTS: the judge gave no verdict on {num_unjudged} of them"] if num_unjudged else []
    return [*lines, *more, *faults, *(f"rules: {deviation}" for deviation in regraded.after.deviations)]


def side_by_side(regraded: RegradeReport) -> Table:
    """A row a score, the old value beside the new one."""
    before, after = (
        {entry.name: entry for entry in report.scores} for report in (regraded.before, regraded.after)
    )
    title = Text(one_line(f"{regraded.after.name}, {regraded.after.num_tasks} tasks"))
    table = Table("score", "before [95 %]", "now [95 %]", "tasks", title=title)
    for name in {**after, **before}:
        old, new = before.get(name), after.get(name)
        table.add_row(Text(name), _cell(old), _cell(new), str((new or old or after[name]).num_tasks))
    return table


def _cell(entry: Score | None) -> Text:
    return Text("-" if entry is None else entry.text)


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
