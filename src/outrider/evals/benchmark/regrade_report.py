"""Report of grading again: both tables side by side, the verdicts that changed, and the same as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table
from rich.text import Text

from outrider import __version__
from outrider.evals.benchmark.scores import SampleResult
from outrider.evals.benchmark.table import PanelReport, Score
from outrider.printing import one_line, score
from outrider.types import Json

FORMAT: Final = "outrider regrade 1"
_NUM_SHOWN: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Regraded:
    """Two reports on the same replies, and the pairs of results whose verdicts differ."""

    before: PanelReport
    now: PanelReport
    changed: Sequence[tuple[SampleResult, SampleResult]]
    num_graded: int


def _said(one: SampleResult) -> str:
    if one.score is None:
        return "not scored"
    partly = f" ({score(one.score)})" if one.score not in (0.0, 1.0) else ""
    return f"{'right' if one.success else 'wrong'}{partly}, {one.prediction!r}"


def told(regraded: Regraded) -> list[str]:
    """How many verdicts changed, and which."""
    changed = regraded.changed
    lines = [f"{len(changed)} of {regraded.num_graded} verdicts changed"]
    lines += [
        one_line(f"  {old.task_key}, sample {old.sample}: was {_said(old)}; is {_said(new)}")
        for old, new in changed[:_NUM_SHOWN]
    ]
    more = [f"  and {len(changed) - _NUM_SHOWN} more, in the file"] if len(changed) > _NUM_SHOWN else []
    waiting = regraded.now.num_unjudged
    faults = [f"FAULTS: the judge gave no verdict on {waiting} of them"] if waiting else []
    return [*lines, *more, *faults, *(f"rules: {deviation}" for deviation in regraded.now.deviations)]


def side_by_side(regraded: Regraded) -> Table:
    """A row a score, the old value beside the new one."""
    before, now = ({one.name: one for one in report.scores} for report in (regraded.before, regraded.now))
    title = Text(one_line(f"{regraded.now.name}, {regraded.now.num_tasks} tasks"))
    table = Table("score", "before [95 %]", "now [95 %]", "tasks", title=title)
    for name in {**now, **before}:
        old, new = before.get(name), now.get(name)
        table.add_row(Text(name), _cell(old), _cell(new), str((new or old or now[name]).num_tasks))
    return table


def _cell(one: Score | None) -> Text:
    return Text("-" if one is None else one.text)


def as_json(regraded: Regraded) -> dict[str, Json]:
    """Plain data; both summaries are as of ``summary.json``."""
    changed: list[Json] = [
        {"task_key": old.task_key, "sample": old.sample, "old": _plain(old), "new": _plain(new)}
        for old, new in regraded.changed
    ]
    return {
        "format": FORMAT, "outrider": __version__, "num_graded": regraded.num_graded, "changed": changed,
        "before": regraded.before.as_json(), "summary": regraded.now.as_json(),
    }  # fmt: skip


def _plain(one: SampleResult) -> dict[str, Json]:
    return {"score": one.score, "success": one.success, "prediction": one.prediction}
