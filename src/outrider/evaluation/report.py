"""Report of an evaluation as a table and as JSON: every score with its interval, and faults separately."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from rich.text import Text

from outrider.evaluation.grading import RETURN, Scorer, Variant, find_variant
from outrider.evaluation.results import EvalTasksSummary, SampleResult, summarise
from outrider.evaluation.tasks import EvalTasks, EvalTasksSettings
from outrider.printing import FittedTable, one_line, plural, score
from outrider.rollout.evaluate import interval
from outrider.types import Json

_NAMES: Final[Mapping[Scorer | None, str]] = {
    "em": "exact match", "f1": "token F1", "math": "mathematically equal", "judge": "correct by the judge",
    None: "success",
}  # fmt: skip
_SAMPLING: Final = ("temperature", "top_p", "top_k")
# 0 is a failure, 1 a success
_SHARES: Final = frozenset({"em", "f1", "math_equal", "answer_contained", "format_ok"})
# the metric that the score is
_SAME: Final[Mapping[Scorer | None, str]] = {"em": "em", "f1": "f1", "math": "math_equal"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A mean over tasks with its 95 % interval: Wilson's if every task has 0 or 1, otherwise a bootstrap over
    tasks.

    ``is_share``: written in per cent; otherwise it is a return or another number.
    """

    name: str
    value: float
    low: float
    high: float
    num_tasks: int
    is_share: bool

    @property
    def text(self) -> str:
        """Value and interval. A bootstrap of equal values has no interval."""
        if self.low < self.high:
            return score(self.value, self.low, self.high, is_share=self.is_share)
        return f"{score(self.value, is_share=self.is_share)} (all equal)"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTasksReport:
    """``summary`` with the settings and identity of the evaluation. ``num_requested`` is the number of
    requested samples. ``num_unjudged`` counts the faults of the judge alone, whose answers are stored.
    ``score_mark`` states what success means, if that is weaker than the benchmark's rule. ``split`` is that
    of an environment's tasks. ``first_faults`` are examples of faults for display.
    """

    name: str
    panel_hash: str
    num_tasks: int
    num_left_out: int
    num_samples: int
    num_requested: int
    num_unjudged: int
    scorer: Scorer | None
    has_tools: bool
    identity: Mapping[str, Json]
    deviations: tuple[str, ...]
    summary: EvalTasksSummary
    first_faults: tuple[SampleResult, ...] = ()
    score_mark: str = ""
    split: str = ""

    @property
    def num_faults(self) -> int:
        """Samples without a score."""
        return sum(self.summary.faults.values())

    @property
    def scores(self) -> list[Score]:
        """The main score first, then the others; counts are in :attr:`counts`."""
        return task_set_scores(self.scorer, self.summary, num_samples=self.num_samples)

    @property
    def counts(self) -> dict[str, float]:
        """Metrics that are counts, as means over tasks."""
        return {name: value for name, value in self.summary.metrics.items() if name.startswith("num_")}

    def as_json(self) -> dict[str, Json]:
        """Plain data with null for undefined values. Repeating an evaluation gives the same data."""
        summary = self.summary
        numbers = {
            "num_tool_calls": summary.num_tool_calls, "num_tokens": summary.num_tokens,
            "tool_usage_rate": summary.tool_usage_rate, "tool_productivity": summary.tool_productivity,
        }  # fmt: skip
        return {
            "tasks": self.name, "panel_hash": self.panel_hash, "num_tasks": self.num_tasks,
            "num_left_out": self.num_left_out, "num_samples": self.num_samples,
            "num_owed": self.num_requested,
            "num_scored": summary.num_scored, "num_unjudged": self.num_unjudged,
            "num_uncounted": summary.num_uncounted, "outcomes": dict(summary.outcomes),
            "faults": dict(summary.faults),
            "scores": {
                entry.name: {"value": entry.value, "ci_low": entry.low, "ci_high": entry.high,
                             "num_tasks": entry.num_tasks}
                for entry in self.scores
            },
            "counts": {name: _finite(value) for name, value in self.counts.items()},
            **{name: _finite(value) for name, value in numbers.items()},
            "identity": dict(self.identity), "deviations": list(self.deviations),
            "task_scores": dict(summary.task_scores),
            **({"score_mark": self.score_mark} if self.score_mark else {}),
        }  # fmt: skip

    def table(self) -> FittedTable:
        """The scores."""
        title = f"{self.name}, {plural(self.num_tasks, 'task')}"
        table = FittedTable("score", "value [95 % interval]", "tasks", title=title, caption=self.score_mark)
        for entry in self.scores:
            name = entry.name if entry.is_share else f"{entry.name} (no share)"
            table.add_row(Text(name), Text(entry.text), str(entry.num_tasks))
        return table

    def lines(self) -> Sequence[str]:
        """Lines with the information that is not in the table."""
        summary = self.summary
        scored = f"{summary.num_scored} of {plural(self.num_requested, 'sample')} scored"
        lines = [
            f"{scored}: {', '.join(f'{count} {name}' for name, count in summary.outcomes.items()) or 'none'}"
        ]
        if self.num_faults:
            kinds = ", ".join(f"{count} {name}" for name, count in summary.faults.items())
            lines.append(
                f"FAULTS, in no score: {kinds} ({self.num_unjudged} of the judge). "
                "The same command tries them again"
            )
            lines += [
                one_line(f"  {result.task_key}, sample {result.sample}: {result.detail}")
                for result in self.first_faults
            ]
        if summary.num_scored:
            uncounted = summary.num_uncounted
            tokens = f"{summary.num_tokens:.1f} tokens"
            if uncounted == summary.num_scored:
                tokens = "tokens that the server did not count"
            elif uncounted:
                tokens += f" ({plural(uncounted, 'answer')} came without a count)"
            lines.append(f"an answer: {tokens}, {summary.num_tool_calls:.2f} tool calls")
        if summary.num_scored and self.has_tools:
            used = f"{score(summary.tool_usage_rate)} of the answers used a tool"
            lines.append(f"{used}; tool productivity {summary.tool_productivity:.2f}")
        lines += [f"{name}: {value:.2f}" for name, value in self.counts.items() if value]
        lines += [f"rules: {deviation}" for deviation in self.deviations]
        if self.num_left_out:
            lines.append(f"{plural(self.num_left_out, 'task')} left out: an attachment is needed")
        split = f"split {self.split}, " if self.split else ""
        settings = [f"{key} {self.identity[key]}" for key in _SAMPLING if key in self.identity]
        return [
            *lines, f"{split}panel {self.panel_hash}, {', '.join([*settings, f'n = {self.num_samples}'])}"
        ]  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def task_set_scores(scorer: Scorer | None, summary: EvalTasksSummary, *, num_samples: int) -> list[Score]:
    """Scores of a summary with their intervals, the main one first."""
    # name, values by task, and whether 0 is a failure and 1 a success: returns have no such meaning
    suffix = f", avg@{num_samples}" if num_samples > 1 else ""
    named: list[tuple[str, Mapping[str, float], bool]] = [
        (f"{_NAMES[scorer]}{suffix}", summary.task_scores, True)
    ]
    if num_samples > 1:
        named += [(f"pass@{k}", tasks, True) for k, tasks in sorted(summary.task_passes.items())]
        if scorer is not None:
            named.append((f"majority@{num_samples}", summary.task_majorities, True))
    for name, tasks in summary.task_metrics.items():
        if not name.startswith("num_") and name != _SAME.get(scorer):
            is_share = scorer is not None or name in _SHARES
            named.append(("return" if name == RETURN else name, tasks, is_share))
    scores: list[Score] = []
    for name, tasks, is_share in named:
        if values := [tasks[key] for key in sorted(tasks)]:
            low, high = interval(values, binary=is_share and all(value in (0.0, 1.0) for value in values))
            scores.append(
                Score(name=name, value=fmean(values), low=low, high=high, num_tasks=len(values),
                      is_share=is_share)
            )  # fmt: skip
    return scores


# The report of an evaluation from its results, independent of the player and the time of grading.


_MAX_FAULTS_SHOWN: Final = 3


def build_report(
    settings: EvalTasksSettings,
    eval_tasks: EvalTasks,
    *,
    scorer: Scorer | None,
    identity: Mapping[str, Json],
    results: Sequence[SampleResult],
) -> EvalTasksReport:
    """Build the report. ``scorer`` is None if the environment's own record is the score. Samples beyond
    ``num_samples`` are ignored.
    """
    rules = find_variant(settings.rules)
    requested = requested_samples(results, settings.num_samples)
    faults = [result for result in requested if result.outcome.is_fault]
    return EvalTasksReport(
        name=eval_tasks.benchmark.name,
        panel_hash=eval_tasks.panel_hash,
        num_tasks=len(eval_tasks.tasks),
        num_left_out=eval_tasks.num_left_out,
        num_samples=settings.num_samples,
        num_requested=len(eval_tasks.tasks) * settings.num_samples,
        num_unjudged=sum(result.answered is not None for result in faults),
        scorer=scorer,
        has_tools=settings.tools != "off"
        and settings.environment is not None
        and settings.environment.calls_tools,
        score_mark=""
        if settings.environment is None or scorer is not None
        else settings.environment.score_mark,
        identity=identity,
        deviations=() if scorer is None else rules.deviations,
        summary=summarise_samples(results, settings.num_samples, rules=rules),
        first_faults=tuple(faults[:_MAX_FAULTS_SHOWN]),
        split=settings.split if settings.runs_episodes else "",
    )


def summarise_samples(
    results: Sequence[SampleResult], num_samples: int, *, rules: Variant
) -> EvalTasksSummary:
    """Summary of the first ``num_samples`` samples, with pass@k for the powers of two up to it."""
    powers = {2**power for power in range(num_samples.bit_length())}
    return summarise(
        requested_samples(results, num_samples), ks=sorted({*powers, num_samples}), normalize=rules.normalize
    )


def requested_samples(results: Sequence[SampleResult], num_samples: int) -> list[SampleResult]:
    """Drop samples of an earlier call with a larger ``num_samples``."""
    return [result for result in results if result.sample < num_samples]
