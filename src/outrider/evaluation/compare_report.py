"""Report of a comparison: tables, verdicts, notes and figures, as text, Markdown or one HTML file.

Names and settings are untrusted: the terminal and Markdown get escaped text, and HTML passes through Jinja2's
autoescape.
"""

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from outrider.config import NONE
from outrider.evaluation.compare import AXES, SCORE, ComparedRun, Comparison, Curves, Group, Pair, compare
from outrider.evaluation.statistics import ALPHA, COVERAGE, MIN_SEEDS, Band, Estimate, Scores
from outrider.files import replace_file
from outrider.printing import FittedTable, is_graded, one_line, plural, points, score
from outrider.protocols import COMPARABLE, all_points
from outrider.viewer.configuration import is_trained
from outrider.viewer.evaluations import score_mark
from outrider.viewer.report_parts import Chart, Point, Series, number, page_template, svg_chart, ticks

MAX_SERIES: Final = 8  # as many as the page has line styles for
_COST_RATIO: Final = 1.1  # from this ratio of mean costs on, a note reports unequal costs
CONDITIONS: Final = ("environment.", "rollout.")  # settings that training and the test have in common


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table of plain text that every output draws in its own way. A page folds one that is
    ``is_detail``.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str
    is_detail: bool = False


def verdicts(comparison: Comparison) -> list[str]:
    """One sentence per pair of groups, without p values."""
    return [_verdict(pair) for pair in comparison.pairs] or ["No two groups have scores to compare."]


def _verdict(pair: Pair) -> str:
    first, second, difference = pair.first, pair.second, pair.difference
    # The sign of the sentence is that of the group that it names first.
    if pair.verdict.winner == second or (pair.verdict.winner is None and difference.value < 0):
        first, second = second, first
        difference = Estimate(value=-difference.value, low=-difference.high, high=-difference.low)
    gain = f"{_signed(difference.value)} points"
    if difference.has_interval:
        gain += f", between {_signed(difference.low)} and {_signed(difference.high)}"
    if pair.verdict.winner is not None:
        return f"{first} scores higher than {second}: {gain}."
    parts = [f"{gain} ({first} - {second})", *pair.verdict.missing]
    includes_0 = difference.has_interval and difference.low <= 0 <= difference.high
    conclusion = "No difference shown" if includes_0 else "No difference established"
    return f"{conclusion} between {first} and {second}: {'; '.join(parts)}."


def _signed(share: float) -> str:
    """A difference of shares in points, with one digit behind the point only below 10."""
    value = 100 * share
    return f"{value:+.0f}" if abs(value) >= 9.95 else f"{value:+.1f}"


def notes(comparison: Comparison) -> list[str]:
    """Notes that a reader must know beside the numbers."""
    runs = [run for group in comparison.groups for run in group.runs]
    messages = [
        *comparison.notes,
        *(f"{run.name} has no evaluation: its group has no score" for run in runs if not run.evaluations),
    ]
    messages += [f"{run.name}: {mark}" for run in runs if (mark := score_mark(run.config))]
    if len(comparison.groups) == 1:
        messages.append("all runs have one configuration: there is nothing to compare but their seeds")
    scored = [run for run in runs if run.evaluations]
    messages += [
        f"{run.name}: {plural(num, 'rollout')} of the last evaluation ended in a fault, without a score"
        for run in scored
        if (num := run.evaluations[-1].num_faults)
    ]
    if scored and comparison.num_tasks is None:
        missing = ", ".join(run.name for run in scored if not run.evaluations[-1].task_scores)
        messages.append(f"no scores of single tasks: {missing or 'the runs have no scored task in common'}")
    elif comparison.num_left_out:
        messages.append(
            f"{plural(comparison.num_left_out, 'task is', 'tasks are')} left out: a fault kept them "
            "from being scored in some run"
        )
    if few := sorted({len(group.runs) for group in comparison.groups if group.score} & COVERAGE.keys()):
        shares = ", ".join(f"with {plural(num, 'seed')} about {COVERAGE[num]} %" for num in few)
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
    runs = [run for group in comparison.groups for run in group.runs]
    has_protocol = _differing_play(comparison) or any(
        run.record.get("protocol", NONE) != NONE for run in runs
    )
    points = TextTable(
        title="Points of the protocol that differ", columns=("point", *labels),
        rows=tuple((name, *values) for name, values in comparison.points.items() if has_protocol),
        caption="What outrider protocol diff compares. Scores under different points are not of one test.",
    )  # fmt: skip
    every = [
        _group_table(comparison),
        _pair_table(comparison),
        TextTable(
            title="Why no winner",
            columns=("groups", "reason"),
            rows=tuple(
                (f"{pair.first} - {pair.second}", reason)
                for pair in comparison.pairs
                for reason in pair.verdict.reasons
            ),
            caption="Each reason is enough.",
            is_detail=True,
        ),
        _cost_table(comparison),
        _run_table(comparison),
        points,
        settings,
    ]
    return [table for table in every if table.rows]


def _group_table(comparison: Comparison) -> TextTable:
    conditions = comparison.conditions
    intro = (
        f"Split {conditions.split}, panel {conditions.panel_hash[:12]}, temperature "
        f"{conditions.temperature:g}. "
        if conditions
        else ""
    )
    over = "seeds" if comparison.num_tasks is None else f"seeds and {plural(comparison.num_tasks, 'task')}"
    num_tasks = comparison.num_tasks or (conditions.num_tasks if conditions else 0)
    graded = _is_graded(comparison)
    rows = tuple(
        (_described(group), str(len(group.runs)), str(num_tasks),
         *("not measured" if value is None else _percent(value) for value in (group.score, group.best)),
         _gain_of_best(group.runs),
         *((_mean_return(group.runs),) if graded else ()),
         *(number(group.costs[axis]) if axis in group.costs else "not measured" for axis in AXES))
        for group in comparison.groups
    )  # fmt: skip
    mark = _differing_play(comparison)
    return TextTable(
        title=f"Groups, NOT OF ONE PROTOCOL ({mark})" if mark else "Groups",
        columns=(
            "group",
            "seeds",
            "tasks",
            "final score",
            "best score",
            "best by chance",
            *(("mean return",) if graded else ()),
            *AXES,
        ),
        rows=rows,
        caption=f"{intro}Final score: interquartile mean over seeds of the last evaluation [95 % bootstrap "
        f"interval over {over}]; only this score is tested. Best score: the same of each run's best "
        "evaluation. Best by chance: the mean by which the best of that many evaluations exceeds the true "
        "score if the policy does not change. Costs: means over runs, of training steps only: no cold start, "
        "no evaluation, and a step that was taken again after a stop counts once.",
    )


def _described(group: Group) -> str:
    """The label, and whether its algorithm trained nothing: it is also that of an imitation's recipe."""
    imitates = group.runs[0].config.get("train.num_steps") == "0" and is_trained(group.runs[0].config)
    return f"{group.label} (imitation only)" if imitates else group.label


def _differing_play(comparison: Comparison) -> str:
    """The points of play, data and evaluation that differ, with their values; scores are then of several
    tests.
    """
    return "; ".join(
        f"{name} {' | '.join(values)}"
        for name, values in comparison.points.items()
        if all_points()[name].group in COMPARABLE
    )


def _pair_table(comparison: Comparison) -> TextTable:
    rows = tuple(
        (f"{pair.first} - {pair.second}", _gain(pair.difference), _range(pair.improvement, "{:.2f}"),
         "none" if pair.test is None else f"{pair.test.p:.3g} ({pair.test.name})",
         *("none" if p is None else f"{p:.3g}" for p in (pair.p_corrected, pair.p_seeds)),
         pair.verdict.winner or "none")
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
        is_detail=True,
    )


def _cost_table(comparison: Comparison) -> TextTable:
    rows = tuple(
        (
            curve.quantity,
            f"{number(float(curve.x[-1]))} {curve.axis}",
            *(_end_of_curve(curve, group.label) for group in comparison.groups),
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
         *((score(run.evaluations[-1].score), str(run.evaluations[-1].step), score(run.best.score),
            str(run.best.step)) if run.evaluations else ("not measured", "", "not measured", "")),
         _gain_of_best([run]),
         *((_mean_return([run]),) if graded else ()),
         *(number(run.cost_at_step(axis, run.num_steps)) if axis in run.costs else "not measured"
           for axis in AXES))
        for group in comparison.groups
        for run in group.runs
    )  # fmt: skip
    caption = "Scores: mean success over the tasks that the run's last, or best, evaluation scored."
    columns = (
        "run", "group", "seed", "final score", "at step", "best score", "best at step", "best by chance",
        *(("mean return",) if graded else ()), *AXES,
    )  # fmt: skip
    return TextTable(title="Runs", columns=columns, rows=rows, caption=caption)


def _is_graded(comparison: Comparison) -> bool:
    """Whether the last evaluation of some run has a mean return other than its share of solved tasks."""
    last = [run.evaluations[-1] for group in comparison.groups for run in group.runs if run.evaluations]
    return any(
        evaluation.task_returns and is_graded(evaluation.score, fmean(evaluation.task_returns.values()))
        for evaluation in last
    )


def _mean_return(runs: Sequence[ComparedRun]) -> str:
    """Mean over runs of the mean return over the tasks of the last evaluation."""
    last = [run.evaluations[-1].task_returns for run in runs if run.evaluations]
    means = [fmean(returns.values()) for returns in last if returns]
    return number(fmean(means)) if means else "not measured"


def _gain_of_best(runs: Sequence[ComparedRun]) -> str:
    """Mean over runs of the expected gain of the best of their evaluations by chance."""
    scored = [run for run in runs if run.evaluations]
    if not scored:
        return "not measured"
    nums = sorted({len(run.evaluations) for run in scored})
    numbers = str(nums[0]) if len(nums) == 1 else f"{nums[0]} to {nums[-1]}"
    return f"{points(fmean(run.gain_of_best for run in scored))} of {numbers}"


def _percent(estimate: Estimate) -> str:
    return score(estimate.value, estimate.low, estimate.high) + _one_seed_mark(estimate)


def _gain(difference: Estimate) -> str:
    return points(difference.value, difference.low, difference.high) + _one_seed_mark(difference)


def _one_seed_mark(estimate: Estimate) -> str:
    return "" if estimate.has_interval else " (one seed: no interval)"


def _range(estimate: Estimate, form: str) -> str:
    value, low, high = (form.format(part) for part in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]" if estimate.has_interval else f"{value}{_one_seed_mark(estimate)}"


def _end_of_curve(curves: Curves, label: str) -> str:
    band = curves.bands[label]
    estimate = Estimate(value=float(band.value[-1]), low=float(band.low[-1]), high=float(band.high[-1]))
    if not math.isfinite(estimate.value):
        return "not measured"
    return _percent(estimate) if curves.quantity == SCORE else _range(estimate, "{:.4g}")


_TEMPLATE: Final = Path(__file__).with_name("page.html.j2")
_LEGEND_WIDTH: Final = 400  # units of the drawing
_SCORE_CAPTION: Final = (
    "Straight lines between evaluations, from the policy that training began with; played without retrieval."
)
_REWARD_CAPTION: Final = (
    "Means over bins of equal cost, every rollout counted, those with retrieved steps too, as the "
    "environment pays: no share of solved tasks, and no fair measure between algorithms."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Curves by label over common ``x``, with the texts of their chart."""

    title: str
    x_label: str
    y_label: str
    caption: str
    x: Scores
    bands: Mapping[str, Band]
    is_share: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Contents of a report, independent of its form."""

    title: str
    tables: Sequence[TextTable]
    notes: Sequence[str]
    figures: Sequence[Figure]
    verdicts: Sequence[str] = ()
    groups: Sequence[Group] = ()


def make_report(comparison: Comparison) -> Report:
    """Report of a comparison of groups of runs."""
    figures = [
        Figure(
            title=f"{curves.quantity.capitalize()} over {curves.axis}",
            x_label=curves.axis,
            y_label="score, %" if curves.quantity == SCORE else "reward",
            caption=_SCORE_CAPTION if curves.quantity == SCORE else _REWARD_CAPTION,
            x=curves.x,
            bands=curves.bands,
            is_share=curves.quantity == SCORE,
        )
        for curves in comparison.curves
    ]
    return Report(
        title="Comparison of runs",
        verdicts=verdicts(comparison),
        tables=tables(comparison),
        notes=notes(comparison),
        figures=figures,
        groups=comparison.groups,
    )


def compare_runs(paths: Sequence[Path], *, markdown: Path | None, html: Path | None, console: Console) -> int:
    """The command ``outrider compare``: print the comparison, write the requested files, return the exit
    status.

    Raises the errors of :func:`~outrider.evaluation.compare.compare`, and OSError if a file cannot be
    written.
    """
    return show_report(make_report(compare(paths)), markdown=markdown, html=html, console=console)


def show_report(report: Report, *, markdown: Path | None, html: Path | None, console: Console) -> int:
    """Print a report and write the requested files. Returns 0."""
    for table in report.tables:
        rich_table = FittedTable(*table.columns, title=table.title, caption=table.caption)
        for row in table.rows:
            rich_table.add_row(*(Text(one_line(cell)) for cell in row))
        console.print(rich_table)
    for line in (*report.verdicts, *(f"note: {note}" for note in report.notes)):
        console.print(Text(one_line(line)))
    for path, page in ((markdown, to_markdown), (html, to_html)):
        if path is not None:
            replace_file(path, page(report).encode("utf-8", "replace"))
            console.print(Text(str(path)))
    return 0


def markdown_page(comparison: Comparison) -> str:
    """The tables, verdicts and notes as Markdown."""
    return to_markdown(make_report(comparison))


def html_page(comparison: Comparison) -> str:
    """The tables and the figures of the curves as one self-contained HTML file."""
    return to_html(make_report(comparison))


def to_markdown(report: Report) -> str:
    """A report without its figures as Markdown."""
    parts = [f"# {report.title}"]
    if report.verdicts:
        parts.append(_items(report.verdicts))
    for table in report.tables:
        rows = [table.columns, ("---",) * len(table.columns), *table.rows]
        lines = ["| " + " | ".join(map(_escaped, row)) + " |" for row in rows]
        parts += [f"## {_escaped(table.title)}", "\n".join(lines), _escaped(table.caption)]
    if report.notes:
        parts += ["## Notes", _items(report.notes)]
    return "\n\n".join(parts) + "\n"


def _items(lines: Sequence[str]) -> str:
    return "\n".join(f"- {_escaped(line)}" for line in lines)


def _escaped(text: str) -> str:
    """Text that can neither leave its table cell nor become HTML, a link or a picture."""
    bare = " ".join(one_line(text).split())
    return bare.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("](", "]\\(")


def to_html(report: Report) -> str:
    """A report as one self-contained HTML file."""
    labels = [list(figure.bands)[:MAX_SERIES] for figure in report.figures]
    # A legend without room for the labels has letters, which are the same in all figures.
    has_room = all(sum(44 + 7 * len(label) for label in figure) <= _LEGEND_WIDTH for figure in labels)
    names: dict[str, str] = {}
    for index, label in enumerate(dict.fromkeys(label for figure in labels for label in figure)):
        again, offset = divmod(index, len(string.ascii_uppercase))
        names[label] = label if has_room else string.ascii_uppercase[offset] + (str(again) if again else "")
    figures = []
    for figure in report.figures:
        series = tuple(
            Series(label=name, points=_points(figure.x, figure.bands[label]))
            for label, name in names.items()
            if label in figure.bands
        )[:MAX_SERIES]
        if any(item.values for item in series):  # some curve has a known value
            chart = Chart(
                title=figure.title, x_label=figure.x_label, y_label=figure.y_label, series=series,
                is_share=figure.is_share,
            )  # fmt: skip
            figures.append((svg_chart(chart), figure.caption))
    return page_template(_TEMPLATE).render(
        title=report.title,
        num_styles=MAX_SERIES,
        picture=_seed_dots([group for group in report.groups if group.score is not None]),
        verdicts=report.verdicts,
        tables=report.tables,
        letters=[(name, label) for label, name in names.items() if name != label],
        figures=figures,
        notes=report.notes,
    )


_LEFT, _WIDTH, _ROW = 12, 760, 44  # units of the drawing of seeds


def _seed_dots(groups: Sequence[Group]) -> Markup:
    """The final score of every seed as a dot, and the groups' means with their intervals, as an ``<svg>``
    element; empty without groups.
    """
    if not groups:
        return Markup("")
    ends = [end for group in groups for end in group.seed_scores]
    ends += [end for group in groups if group.score for end in (group.score.low, group.score.high)]
    known = [end for end in ends if math.isfinite(end)]
    scale = ticks(min(known), max(known))
    bottom = _ROW * len(groups) + 8

    def x(value: float) -> float:
        share = (value - scale[0]) / (scale[-1] - scale[0])
        return round(_LEFT + 8 + share * (_WIDTH - 2 * _LEFT - 16), 1)

    parts = [Markup('<path class="axis" d="M{} {}H{}"/>').format(_LEFT, bottom, _WIDTH - _LEFT)]
    for tick in scale:
        parts.append(Markup('<path class="grid" d="M{} 8V{}"/>').format(x(tick), bottom))
        text = Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>')
        parts.append(text.format(x(tick), bottom + 16, number(100 * tick)))
    for index, group in enumerate(groups):
        assert group.score is not None
        style, y = index % MAX_SERIES, _ROW * index + 34
        parts.append(
            Markup('<text class="title" x="{}" y="{}">{}</text>').format(_LEFT, y - 14, _described(group))
        )
        if group.score.has_interval:
            line = Markup('<path class="range s{}" d="M{} {}H{}"/>')
            parts.append(line.format(style, x(group.score.low), y, x(group.score.high)))
        drawn: list[float] = []
        for run, value in zip(group.runs, group.seed_scores, strict=True):
            offset = 5 * min(2, sum(abs(other - x(value)) < 5 for other in drawn))  # dots at one place
            drawn.append(x(value))
            dot = Markup('<circle class="seed s{}" cx="{}" cy="{}" r="5"><title>{}: {}</title></circle>')
            parts.append(dot.format(style, x(value), y + offset, run.name, score(value)))
        mean = Markup('<path class="dot s{}" d="M{} {}l5 8l-5 8l-5 -8z"><title>{}</title></path>')
        parts.append(mean.format(style, x(group.score.value), y - 8, f"mean: {_percent(group.score)}"))
    summary = "; ".join(
        f"{_described(group)}: mean {_percent(group.score)}, seeds {', '.join(map(score, group.seed_scores))}"
        for group in groups
        if group.score is not None
    )
    head = Markup('<svg class="seeds" viewBox="0 0 {} {}" role="img" aria-label="Final scores. {}">')
    return head.format(_WIDTH, bottom + 24, summary) + Markup("").join(parts) + Markup("</svg>")


def _points(x: Scores, band: Band) -> tuple[Point, ...]:
    def known(value: float) -> float | None:
        return float(value) if math.isfinite(value) else None

    return tuple(
        Point(x=float(position), value=known(value), low=known(low), high=known(high))
        for position, value, low, high in zip(x, band.value, band.low, band.high, strict=True)
    )
