"""Tables, verdicts and notes of a comparison, as plain text that every output draws in its own way."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from outrider.evals.compare.compare import Comparison, Pair
from outrider.evals.compare.curves import SCORE, Curves
from outrider.evals.compare.runs import AXES, Run
from outrider.evals.significance import ALPHA, MIN_SEEDS
from outrider.evals.statistics import COVERAGE, Estimate
from outrider.printing import is_graded, points, score
from outrider.watch.curves import number

MAX_SERIES: Final = 8  # as many as the page has line styles for
_COST_RATIO: Final = 1.1  # from this ratio of mean costs on, a note says that the groups did not pay the same
CONDITIONS: Final = ("environment.", "rollout.")  # settings that training and the test have in common


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table of plain text that every output draws in its own way."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str


def verdicts(comparison: Comparison) -> list[str]:
    """One sentence a pair of groups."""
    return [_sentence(pair) for pair in comparison.pairs] or ["No two groups have scores to compare."]


def notes(comparison: Comparison) -> list[str]:
    """Notes that a reader must know beside the numbers."""
    runs = [run for group in comparison.groups for run in group.runs]
    messages = [
        *comparison.notes,
        *(f"{run.name} has no evaluation: its group has no score" for run in runs if not run.evaluations),
    ]
    if len(comparison.groups) == 1:
        messages.append("all runs have one configuration: there is nothing to compare but their seeds")
    messages += _task_notes(comparison, [run for run in runs if run.evaluations])
    if few := sorted({len(group.runs) for group in comparison.groups if group.score} & COVERAGE.keys()):
        shares = ", ".join(f"with {num} seeds about {COVERAGE[num]} %" for num in few)
        messages.append(
            "a bootstrap interval over so few seeds is too narrow: "
            f"{shares} of such intervals hold the true value, not 95 %"
        )
    if conditions := [key for key, _ in comparison.settings if key.startswith(CONDITIONS)]:
        messages.append(
            f"the groups were tested under different conditions ({', '.join(conditions)}): "
            "their scores are not of one test"
        )
    if len(nums := {run.config.get("evaluation.num_samples", "1") for run in runs if run.evaluations}) > 1:
        messages.append(
            "the evaluations drew different numbers of samples a task "
            f"({', '.join(sorted(nums))}): their noise differs"
        )
    if len({run.config.get("num_threads") for run in runs}) > 1:
        messages.append("the runs used different numbers of threads: their seconds do not compare")
    messages += [line for axis in AXES for line in _cost_notes(comparison, axis)]
    if len(comparison.groups) > MAX_SERIES:
        messages.append(f"the figures show the first {MAX_SERIES} of {len(comparison.groups)} groups")
    return messages


def _task_notes(comparison: Comparison, scored: Sequence[Run]) -> list[str]:
    faults = [(run.name, run.evaluations[-1].num_faults) for run in scored]
    messages = [
        f"{name}: {num} rollout(s) of the last evaluation ended in a fault and are in no score"
        for name, num in faults
        if num
    ]
    if scored and comparison.num_tasks is None:
        missing = [run.name for run in scored if not run.evaluations[-1].task_scores]
        messages.append(
            f"no scores of single tasks: {', '.join(missing) or 'the runs have no scored task in common'}"
        )
    elif comparison.num_left_out:
        messages.append(
            f"{comparison.num_left_out} task(s) are left out: a fault kept them from being scored in some run"
        )
    return messages


def _cost_notes(comparison: Comparison, axis: str) -> list[str]:
    spent = {group.label: group.costs[axis] for group in comparison.groups if axis in group.costs}
    if not spent or not max(spent.values()):
        return []
    most, least = max(spent, key=lambda label: spent[label]), min(spent, key=lambda label: spent[label])
    if not spent[least]:
        return [f"final scores are not at equal {axis}: {most} took {number(spent[most])}, {least} none"]
    if spent[most] < _COST_RATIO * spent[least]:
        return []
    return [
        (
            f"final scores are not at equal {axis}: {most} took "
            f"{spent[most] / spent[least]:.2f} times those of {least}"
        )
    ]


def tables(comparison: Comparison) -> list[TextTable]:
    """Groups, pairs, scores at equal cost, runs, and the settings that differ; empty ones are left out."""
    labels = tuple(group.label for group in comparison.groups)
    settings = TextTable(
        title="Settings that differ", columns=("setting", *labels),
        rows=tuple((key, *values) for key, values in comparison.settings),
        caption=("Seeds, starting weights, the size of a token budget and what only changes speed, "
                 "checkpoints or evaluation do not count."),
    )  # fmt: skip
    every = [
        _group_table(comparison),
        _pair_table(comparison),
        _cost_table(comparison),
        _run_table(comparison),
        settings,
    ]
    return [table for table in every if table.rows]


def _group_table(comparison: Comparison) -> TextTable:
    conditions = comparison.conditions
    intro = (
        f"Split {conditions.split}, panel {conditions.panel_hash[:12]}, temperature {conditions.temperature:g}. "
        if conditions
        else ""
    )
    over = "seeds" if comparison.num_tasks is None else f"seeds and {comparison.num_tasks} tasks"
    graded = _is_graded(comparison)
    rows = tuple(
        (group.label, str(len(group.runs)), "not measured" if group.score is None else _percent(group.score),
         *((_mean_return(group.runs),) if graded else ()),
         *(number(group.costs[axis]) if axis in group.costs else "not measured" for axis in AXES))
        for group in comparison.groups
    )  # fmt: skip
    return TextTable(
        title="Groups",
        columns=("group", "seeds", "score", *(("mean return",) if graded else ()), *AXES),
        rows=rows,
        caption=f"{intro}Score: interquartile mean over seeds of the last evaluation [95 % bootstrap "
        f"interval over {over}]. Costs: means over runs, of training steps only: no cold start, "
        "no evaluation, and a step that was taken again after a stop counts once.",
    )


def _pair_table(comparison: Comparison) -> TextTable:
    rows = tuple(
        (f"{pair.first} - {pair.second}", _gain(pair.difference), _range(pair.improvement, "{:.2f}"),
         "none" if pair.test is None else f"{pair.test.p:.3g} ({pair.test.name})",
         _p_value(pair.p_corrected), _p_value(pair.p_seeds), pair.verdict.winner or "none")
        for pair in comparison.pairs
    )  # fmt: skip
    return TextTable(
        title="Differences",
        columns=(
            "groups",
            "difference",
            "chance that the first is higher",
            "p over tasks",
            "p over tasks, Holm",
            "p over seeds, Holm",
            "winner",
        ),
        rows=rows,
        caption=f"A winner needs {MIN_SEEDS} seeds a side, both corrected p below {ALPHA:g} and an interval "
        "of the difference without 0. The test over tasks takes the trained policies as given; the "
        "one over seeds (Welch's) and the interval ask for other seeds. A chance of 1.00 [1.00, "
        "1.00] says that every run of one side is higher, not that every other run would be.",
    )


def _cost_table(comparison: Comparison) -> TextTable:
    rows = tuple(
        (
            curve.quantity,
            f"{number(float(curve.x[-1]))} {curve.axis}",
            *(_last(curve, group.label) for group in comparison.groups),
        )
        for curve in comparison.curves
    )
    return TextTable(
        title="At equal cost",
        columns=("quantity", "at", *(group.label for group in comparison.groups)),
        rows=rows,
        caption="The end of each curve: the largest cost that every run reached, with 95 % intervals over "
        "seeds. A held-out score between two evaluations lies on the straight line between them; "
        "a training reward is the mean of the curve's last bin.",
    )


def _run_table(comparison: Comparison) -> TextTable:
    graded = _is_graded(comparison)
    rows = tuple(
        (run.name, group.label, run.config["seed"],
         *((score(run.evaluations[-1].score), str(run.evaluations[-1].step)) if run.evaluations
           else ("not measured", "")),
         *((_mean_return([run]),) if graded else ()),
         *(number(run.cost_at_step(axis, run.num_steps)) if axis in run.costs else "not measured"
           for axis in AXES))
        for group in comparison.groups
        for run in group.runs
    )  # fmt: skip
    caption = "Score: mean success over the tasks that the run's last evaluation scored."
    columns = ("run", "group", "seed", "score", "at step", *(("mean return",) if graded else ()), *AXES)
    return TextTable(title="Runs", columns=columns, rows=rows, caption=caption)


def _is_graded(comparison: Comparison) -> bool:
    """Whether the last evaluation of some run has a mean return other than its share of solved tasks."""
    last = [run.evaluations[-1] for group in comparison.groups for run in group.runs if run.evaluations]
    return any(
        evaluation.task_returns and is_graded(evaluation.score, fmean(evaluation.task_returns.values()))
        for evaluation in last
    )


def _mean_return(runs: Sequence[Run]) -> str:
    """Mean over runs of the mean return over the tasks of the last evaluation."""
    last = [run.evaluations[-1].task_returns for run in runs if run.evaluations]
    means = [fmean(returns.values()) for returns in last if returns]
    return number(fmean(means)) if means else "not measured"


def _p_value(p: float | None) -> str:
    return "none" if p is None else f"{p:.3g}"


def _sentence(pair: Pair) -> str:
    if pair.verdict.winner is None:
        return f"No winner between {pair.first} and {pair.second}: {'; '.join(pair.verdict.reasons)}."
    loser = pair.second if pair.verdict.winner == pair.first else pair.first
    return (
        f"{pair.verdict.winner} scores higher than {loser}: {_gain(pair.difference)} "
        f"({pair.first} - {pair.second})."
    )


def _percent(estimate: Estimate) -> str:
    return score(estimate.value, estimate.low, estimate.high) + _one_seed_mark(estimate)


def _gain(difference: Estimate) -> str:
    return points(difference.value, difference.low, difference.high) + _one_seed_mark(difference)


def _one_seed_mark(estimate: Estimate) -> str:
    return "" if estimate.has_interval else " (one seed: no interval)"


def _range(estimate: Estimate, form: str) -> str:
    value, low, high = (form.format(part) for part in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]" if estimate.has_interval else f"{value}{_one_seed_mark(estimate)}"


def _last(curves: Curves, label: str) -> str:
    band = curves.bands[label]
    estimate = Estimate(value=float(band.value[-1]), low=float(band.low[-1]), high=float(band.high[-1]))
    if not math.isfinite(estimate.value):
        return "not measured"
    return _percent(estimate) if curves.quantity == SCORE else _range(estimate, "{:.4g}")
