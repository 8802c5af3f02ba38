"""The HTML report of a run, and the Jinja templates of the HTML pages."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from outrider.errors import DataError
from outrider.files import replace_file
from outrider.metrics import DECLARED, WRITTEN_TOKENS, declared_metric
from outrider.printing import plural, score
from outrider.protocols import Difference, run_difference
from outrider.rollout.evaluate import describe_conditions
from outrider.viewer.records import TraceReader
from outrider.viewer.report_parts import (
    ENTROPY_EDGES,
    Chart,
    Point,
    Sample,
    Series,
    Tree,
    number,
    pick_samples,
    pick_trees,
    samples_from_rows,
    svg_chart,
)
from outrider.viewer.run_reader import Evaluation, RunData, read_run


@cache  # compiling a template takes longer than rendering it
def page_template(path: Path) -> Template:
    """The template at ``path``, which escapes all values and raises an error for undefined names."""
    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(path.parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(path.name)


# One held-out task before and after reinforcement learning: two policies with the same random draws.


def pick_before_after(
    directory: Path, evaluations: Sequence[Evaluation], notes: list[str]
) -> tuple[Sample, ...]:
    """(before, after) rollouts of the first task that the initial policy failed and the final one solved, or
    an empty tuple if there is none.

    The initial policy is that of the last evaluation at step 0 (after the cold start, if the run has one),
    the final policy that of the last evaluation. The result is also empty if the two evaluations used
    different tasks, or if their rollouts are not stored (runs of earlier versions).
    """
    main = [number for number, item in enumerate(evaluations) if item.panel == evaluations[0].panel]
    starts = [number for number in main if evaluations[number].step == 0]
    if not starts or evaluations[main[-1]].step == 0:
        return ()
    first, last = evaluations[starts[-1]], evaluations[main[-1]]
    if (first.panel_hash, first.split) != (last.panel_hash, last.split):
        return ()
    gained = (
        key for key, score in last.task_scores.items() if score == 1.0 and first.task_scores.get(key) == 0.0
    )
    key = next(gained, None)
    reader = TraceReader(directory)
    if key is None or not reader.has_evaluation(starts[-1]):
        return ()
    try:
        sides = [reader.read_evaluation(number) for number in (starts[-1], main[-1])]
    except DataError as error:
        notes.append(f"traces: {error}")
        return ()
    samples = [
        next((s for s in samples_from_rows(rows, notes) if s.leaf.task_key == key), None) for rows in sides
    ]
    return tuple(sample for sample in samples if sample is not None) if None not in samples else ()


# Evaluations of a run in its report: a table per split, and charts of the score over training steps.


_MAX_SERIES: Final = 4  # the number of line styles of the page
SHARES: Final = frozenset({"score", "success"})  # shares of solved tasks; other metrics are plain numbers
_MAX_NAME: Final = 18  # characters that fit under the axis
_WITHOUT: Final = "Played on held-out tasks without retrieval, tips or any other help of training."
_WITH_MEMORY: Final = (
    "Trials with the memory that the labels name: played with what it holds by then, without training."
)


def evaluation_charts(run: RunData) -> list[tuple[Chart, str]]:
    """Charts of each split's first metric over training steps, with captions. A chart has one line for each
    set of tasks that was evaluated at least twice.

    The last evaluation at step 0 is the policy at the start of training. Earlier evaluations, such as that of
    the policy before a cold start, have no training step: they are drawn at a labelled position left of step
    0 and are not joined by a line.
    """
    is_trial = _has_trials(run)
    charts: list[tuple[Chart, str]] = []
    for name_of_set, group in _evaluation_sets(run):
        evaluations = [evaluation for evaluation in group if evaluation.metrics]
        name = next((metric for evaluation in evaluations for metric in evaluation.metrics), "")
        scored = [evaluation for evaluation in evaluations if name in evaluation.metrics]
        positions = {} if is_trial else _early_positions(scored)
        lines = [
            _line(
                tasks_hash,
                name,
                [evaluation for evaluation in scored if evaluation.panel_hash == tasks_hash],
                positions,
                is_trial=is_trial,
            )
            for tasks_hash in dict.fromkeys(evaluation.panel_hash for evaluation in scored)
        ]
        series = tuple(line for line in lines if len(line.values) > 1)[:_MAX_SERIES]
        if not series:
            continue
        is_share = name in SHARES
        axis = {
            position: label if len(label) <= _MAX_NAME else "before" for label, position in positions.items()
        }
        x_label = "trial" if is_trial else "step"
        unit = "solved, %" if is_share else f"{name} (no share)"
        title = f"Evaluation on {name_of_set}"
        chart = Chart(
            title=title, x_label=x_label, y_label=unit, series=series, is_share=is_share, x_tick_labels=axis
        )
        before = " Left of step 0: before the cold start, which is no training step." if axis else ""
        charts.append(
            (chart, f"Points with 95 % intervals. {_describe_conditions(run, evaluations)}{before}")
        )
    return charts


def _early_positions(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """Positions on the x axis, by label, of evaluations before the start of training: left of step 0, each a
    fifth of the axis length further."""
    before = list(dict.fromkeys(evaluation.label for evaluation in evaluations if evaluation.step == 0))[:-1]
    spacing = max(1.0, max((evaluation.step for evaluation in evaluations), default=0) / 5)
    return {label: spacing * (index - len(before)) for index, label in enumerate(before)}


def _line(
    tasks_hash: str,
    name: str,
    evaluations: Sequence[Evaluation],
    positions: Mapping[str, float],
    *,
    is_trial: bool,
) -> Series:
    """The line of one set of tasks. If a position or step was evaluated several times, the last one
    counts."""
    latest: dict[float, Evaluation] = {}
    for trial, evaluation in enumerate(evaluations, start=1):
        position = positions.get(evaluation.label, 0.0) if evaluation.step == 0 else evaluation.step
        latest[trial if is_trial else position] = evaluation
    points: list[Point] = []
    for x, evaluation in sorted(latest.items()):
        value = evaluation.metrics[name]
        label = evaluation.label if is_trial or x < 0 else f"{evaluation.label}, step {evaluation.step}"
        points.append(Point(x=x, value=value.value, low=value.ci_low, high=value.ci_high, name=label))
        if x < 0:
            points.append(Point(x=x, value=None))  # break the line: no training happened in between
    return Series(label=f"panel {tasks_hash[:12]}", points=tuple(points))


def _has_trials(run: RunData) -> bool:
    return run.config.get("evaluation.num_trials", "0") != "0"


def _describe_conditions(run: RunData, columns: Sequence[Evaluation]) -> str:
    if _has_trials(run):
        return _WITH_MEMORY
    num = max((evaluation.num_training_tasks for evaluation in columns), default=0)
    if not num:
        return _WITHOUT
    is_all_training = all(evaluation.num_training_tasks >= evaluation.num_tasks for evaluation in columns)
    task_kind = "training tasks" if is_all_training else f"tasks of which {num} are training tasks"
    return _WITHOUT.replace("held-out tasks", task_kind)


def score_mark(config: Mapping[str, str]) -> str:
    """A sentence for scores of a run whose success rule is another one than the benchmark's."""
    marks = {
        ("environment.success_at", "positive"): "Every final score above 0 counts as a success",
        ("environment.option_scoring", "released"): "Some goals cannot reach the full score",
    }
    return " ".join(
        f"{text} ({key} = {value})." for (key, value), text in marks.items() if config.get(key) == value
    )


def evaluation_tables(run: RunData) -> list[dict[str, Any]]:
    """A table per split for the template: ``rows`` are (metric, one cell per column), ``columns`` the labels
    with their details. If a label was evaluated several times, the table has the last result.
    """
    tables: list[dict[str, Any]] = []
    for name_of_set, group in _evaluation_sets(run):
        last = {evaluation.label: evaluation for evaluation in group}  # the chart has all evaluations
        columns = list(last.values())
        names = dict.fromkeys(name for evaluation in columns for name in evaluation.metrics)
        rows: list[tuple[str, list[str]]] = []
        for name in names:
            is_share = name in SHARES
            cells = [
                "not measured"
                if (metric := evaluation.metrics.get(name)) is None
                else score(metric.value, metric.ci_low, metric.ci_high, is_share=is_share)
                for evaluation in columns
            ]
            kind = "share of tasks solved" if is_share else "a number, no share"
            rows.append((f"{name} ({kind})", cells))
        if any(evaluation.graded_return is not None for evaluation in columns):
            returns = [evaluation.mean_return for evaluation in columns]
            cells = ["not measured" if mean is None else score(mean, is_share=False) for mean in returns]
            rows.append(("mean return (a number, no share)", cells))
        differs = len({evaluation.panel_hash for evaluation in columns}) > 1
        tables.append(
            {
                "split": name_of_set,
                "played": f"{_describe_conditions(run, columns)} {score_mark(run.config)}".rstrip(),
                "columns": [(evaluation.label, _head(run, evaluation)) for evaluation in columns],
                "rows": rows,
                "warning": "The panels differ: these columns were not measured on the same tasks."
                if differs
                else "",
            }
        )
    return tables


def _evaluation_sets(run: RunData) -> list[tuple[str, list[Evaluation]]]:
    """The evaluations of each split and evaluation set, with its name."""
    groups: dict[tuple[str, str], list[Evaluation]] = {}
    for evaluation in run.evaluations:
        groups.setdefault((evaluation.panel, evaluation.split), []).append(evaluation)
    return [
        (f"{panel} (split {split})" if panel else split, group) for (panel, split), group in groups.items()
    ]


def _head(run: RunData, evaluation: Evaluation) -> str:
    """Column header: the tasks of an evaluation, and its faulted rollouts, which no metric includes."""
    conditions = describe_conditions(
        split=evaluation.split,
        panel_hash=evaluation.panel_hash,
        temperature=evaluation.temperature,
        num_samples=run.config.get("evaluation.num_samples", "1"),
        truncation=evaluation.truncation,
    )
    faults = f", {evaluation.num_faults} FAULTS in no score" if evaluation.num_faults else ""
    return f"step {evaluation.step}, {plural(evaluation.num_tasks, 'task')}{faults}, {conditions}"


# The report of a run: one self-contained HTML file without scripts and network access.
#
# Model output and retrieved text are untrusted: Jinja2 escapes every value, and as a second defence the
# page's content security policy forbids scripts and external resources.


MAX_BYTES: Final = 1_000_000
_BUDGETS: Final = (600, 300, 120, 40, 10)  # policy tokens of a sample: fewer if the page is too large
_NUM_NOTES: Final = 20
_COUNTED_GROUPS: Final = ("rollout", "retrieval", "group", "ratio", "grad", "record", "sft")
_TEMPLATE: Final = Path(__file__).with_name("report_template.html.j2")

_SPLIT_REWARD_LINES: Final = (
    ("on-policy", "retrieval/reward_on_policy"),
    ("hybrid", "retrieval/reward_hybrid"),
)
_MIXED_REWARD_LINES: Final = (("all rollouts", "reward/mean"),)
_CURVES: Final[tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...]] = (
    ("Policy entropy", "train", (("per token", "entropy/token_mean"),)),
    ("Response length", "train", (("all tokens after the prompt", "rollout/length_tokens_mean"),)),
    ("Retrieval rate", "train", (("inserted / possible", "retrieval/rate"),)),
    ("Retrieval reward Z", "train", (("Z", "retrieval/z_mean"),)),
    ("Retrieval quality g", "train", (("g", "retrieval/g_mean"),)),
    (
        "Entropy around a retrieval",
        "train",
        (("before", "retrieval/entropy_before_mean"), ("after", "retrieval/entropy_after_mean")),
    ),
    ("Similarity of the retrieved key", "train", (("cosine", "retrieval/similarity_mean"),)),
    (
        "Tool calls",
        "train",
        (("executed", "rollout/num_tool_calls"), ("saved by retrieval", "rollout/num_tool_calls_saved")),
    ),
    ("Mean trainer-engine log-prob gap", "train", (("mean", "gap/logprob_mean"),)),
    ("Largest trainer-engine log-prob gap", "train", (("largest", "gap/logprob_max"),)),
    ("Gradient norm", "train", (("before clipping", "grad/norm"),)),
    ("Rollout speed", "train", (("policy tokens sampled", "speed/rollout_tokens"),)),
    ("Update speed", "train", (("tokens trained", "speed/update_tokens"),)),
    ("Groups without signal", "train", (("share of groups", "group/fraction_without_signal"),)),
    ("Cold start loss", "sft", (("loss", "sft/loss"),)),
)


def write_report(run_dir: Path, protocol: str | None = None) -> Path:
    """Write ``report.html`` into the run directory, atomically, and return its path. It compares the run with
    ``protocol`` (None: that of its recipe, if it names one).

    The top of the page lists missing and damaged input files. Raises ``OSError`` if the file cannot be
    written.
    """
    run = read_run(run_dir)
    notes = list(run.notes)
    samples = pick_samples(run_dir / "traces", notes)
    trees = pick_trees(run_dir / "traces", notes)
    pair = pick_before_after(run_dir / "traces", run.evaluations, notes)
    record = run_dir / "config.toml"
    difference = run_difference(record, protocol) if run.config else None
    pages = (render(run, samples, notes, budget, trees, pair, difference) for budget in _BUDGETS)
    page = next((page for page in pages if len(page) <= MAX_BYTES), None)
    if page is None:
        notes.append("the sample rollouts were left out to keep this page small")
        page = render(run, (), notes, _BUDGETS[-1], difference=difference)
    path = run_dir / "report.html"
    replace_file(path, page)
    return path


def render(
    run: RunData,
    samples: Sequence[Sample],
    notes: Sequence[str],
    num_tokens: int,
    trees: Sequence[Tree] = (),
    before_after: Sequence[Sample] = (),
    difference: Difference | None = None,
) -> bytes:
    """Render the page as UTF-8, without reading any file of the run."""
    figures, missing = _figures(run)
    shown_notes = list(dict.fromkeys(notes))
    if len(shown_notes) > _NUM_NOTES:
        shown_notes = [*shown_notes[:_NUM_NOTES], f"and {len(shown_notes) - _NUM_NOTES} more"]
    page = page_template(_TEMPLATE).render(
        facts=_facts(run),
        config=run.config,
        notes=shown_notes,
        tables=evaluation_tables(run),
        on_training_tasks=run.evaluates_training_tasks,
        figures=figures,
        missing=missing,
        counts=_counts(run),
        samples=[(sample, sample.nodes(num_tokens)) for sample in samples],
        trees=trees,
        before_after=[(sample, sample.nodes(num_tokens)) for sample in before_after],
        edges=ENTROPY_EDGES,
        number=number,
        protocol=difference,
        protocol_rows=[] if difference is None else difference.cells(),
    )
    return page.encode("utf-8", "replace")


def _facts(run: RunData) -> dict[str, str]:
    steps = [record["step"] for record in run.records if record["kind"] == "train"]
    seconds = run.total("train", "time/step")
    tokens = sum(run.total("train", name) for name in WRITTEN_TOKENS)
    return {
        "algorithm": _first(run.config, "algorithm.type", "algorithm.name", "algorithm"),
        "model": _first(run.config, "model.name", "model.path", "model"),
        "task family": _first(
            run.config, "environment.type", "environment.name", "environment", "task.family"
        ),
        "seed": _first(run.config, "seed", "run.seed"),
        "training steps": str(len(steps)),
        "seconds in training steps": number(seconds) if seconds else "not measured",
        "policy tokens": number(tokens) if run.curve("train", "tokens/policy") else "not measured",
    }


def _first(config: Mapping[str, str], *keys: str) -> str:
    return next((config[key] for key in keys if key in config), "not stated")


def _figures(run: RunData) -> tuple[list[tuple[Markup, str]], list[str]]:
    """Charts with their captions, and the titles of charts without values."""
    figures = [(svg_chart(chart), caption) for chart, caption in evaluation_charts(run)]
    missing: list[str] = []
    for title, kind, lines in (("Reward", "train", _reward_lines(run)), *_CURVES):
        metric = declared_metric(lines[0][1])
        series = [
            Series(
                label=label, points=tuple(Point(x=step, value=value) for step, value in run.curve(kind, name))
            )
            for label, name in lines
        ]
        plotted = tuple(line for line in series if line.values)
        if not plotted:
            missing.append(title)
            continue
        unit = "share, 0 to 1" if metric.unit == "1" and "share" in metric.meaning else metric.unit
        chart = Chart(title=title, x_label="step", y_label=unit if unit != "1" else "no unit", series=plotted)
        caption = "; ".join(f"{name}: {declared_metric(name).meaning}" for _, name in lines)
        reward = (
            " As the environment pays, on training tasks: no share of solved tasks."
            if title == "Reward"
            else ""
        )
        figures.append((svg_chart(chart), f"{caption}. Healthy: {metric.healthy_range}.{reward}"))
    return figures, missing


def _reward_lines(run: RunData) -> tuple[tuple[str, str], ...]:
    """Separate lines for on-policy and hybrid rollouts; their mean only if the run has no such split."""
    lines = tuple(
        line
        for line in _SPLIT_REWARD_LINES
        if any(value is not None for _, value in run.curve("train", line[1]))
    )
    return lines if len(lines) > 1 else _MIXED_REWARD_LINES


def _counts(run: RunData) -> list[tuple[str, str, str]]:
    """(name, sum over the run, meaning) of every event counter above zero."""
    counts = [metric for metric in DECLARED if "/num_" in metric.name and metric.group in _COUNTED_GROUPS]
    totals = [(metric, run.total("train", metric.name) + run.total("sft", metric.name)) for metric in counts]
    return [(metric.name, number(total), metric.meaning) for metric, total in totals if total]
