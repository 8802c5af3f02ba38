"""The report of a run: one HTML file that needs no network, no script and nothing beside it.

Model output and retrieved text are untrusted: everything passes through Jinja2's autoescape, and the page forbids scripts and
loads by its content security policy as a second wall.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from markupsafe import Markup

from outrider.durable import replace_file
from outrider.metrics import DECLARED, WRITTEN_TOKENS, declared_metric
from outrider.watch.before_after import pick_before_after
from outrider.watch.curves import Chart, Point, Series, number, svg_chart
from outrider.watch.run_directory import Evaluation, RunData, read_run
from outrider.watch.samples import ENTROPY_EDGES, Budget, Sample, pick_samples
from outrider.watch.templates import page_template
from outrider.watch.trees import Tree, pick_trees

MAX_BYTES: Final = 1_000_000
_BUDGETS: Final = tuple(Budget(num_tokens=n, num_chars=4 * n) for n in (600, 300, 120, 40, 10))
_NUM_NOTES: Final = 20
_MAX_SERIES: Final = 4  # as many as the page has line styles for
_COUNTED_GROUPS: Final = ("rollout", "retrieval", "group", "ratio", "grad", "record", "sft")
_TEMPLATE: Final = Path(__file__).with_name("report_template.html.j2")

_CURVES: Final[tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...]] = (
    ("Reward", "train", (("all rollouts", "reward/mean"),)),
    ("Reward by kind of rollout", "train", (("on-policy", "retrieval/reward_on_policy"), ("hybrid", "retrieval/reward_hybrid"))),
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
    ("Tool calls", "train", (("executed", "rollout/num_tool_calls"), ("saved by retrieval", "rollout/num_tool_calls_saved"))),
    ("Mean trainer-engine log-prob gap", "train", (("mean", "gap/logprob_mean"),)),
    ("Largest trainer-engine log-prob gap", "train", (("largest", "gap/logprob_max"),)),
    ("Gradient norm", "train", (("before clipping", "grad/norm"),)),
    ("Rollout speed", "train", (("policy tokens sampled", "speed/rollout_tokens"),)),
    ("Update speed", "train", (("tokens trained", "speed/update_tokens"),)),
    ("Groups without signal", "train", (("share of groups", "group/fraction_without_signal"),)),
    ("Cold start loss", "sft", (("loss", "sft/loss"),)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawn chart and the words under it."""

    svg: Markup
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTable:
    """One split: ``rows`` are (metric, one cell a column); ``columns`` are the labels with their facts."""

    split: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    warning: str


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into the run directory, atomically, and return its path.

    Whatever of the inputs is missing or damaged is said at the top of the page. Raises ``OSError`` when it cannot be written.
    """
    run = read_run(run_dir)
    notes = list(run.notes)
    samples = pick_samples(run_dir / "traces", notes)
    trees = pick_trees(run_dir / "traces", notes)
    pair = pick_before_after(run_dir / "traces", run.evaluations, notes)
    pages = (render(run, samples, notes, budget, trees, pair) for budget in _BUDGETS)
    page = next((page for page in pages if len(page) <= MAX_BYTES), None)
    if page is None:
        notes.append("the sample rollouts were left out to keep this page small")
        page = render(run, (), notes, _BUDGETS[-1])
    path = run_dir / "report.html"
    replace_file(path, page)
    return path


def render(
    run: RunData,
    samples: Sequence[Sample],
    notes: Sequence[str],
    budget: Budget,
    trees: Sequence[Tree] = (),
    before_after: Sequence[Sample] = (),
) -> bytes:
    """The page as UTF-8; pure."""
    figures, missing = _figures(run)
    shown = list(dict.fromkeys(notes))
    if len(shown) > _NUM_NOTES:
        shown = [*shown[:_NUM_NOTES], f"and {len(shown) - _NUM_NOTES} more"]
    page = page_template(_TEMPLATE).render(
        facts=_facts(run),
        config=run.config,
        notes=shown,
        tables=_evaluation_tables(run.evaluations),
        figures=figures,
        missing=missing,
        counts=_counts(run),
        samples=[(sample, sample.nodes(budget)) for sample in samples],
        trees=trees,
        before_after=[(sample, sample.nodes(budget)) for sample in before_after],
        edges=ENTROPY_EDGES,
        number=number,
    )
    return page.encode("utf-8", "replace")


def _facts(run: RunData) -> dict[str, str]:
    steps = [record["step"] for record in run.records if record["kind"] == "train"]
    seconds = run.total("train", "time/step")
    tokens = sum(run.total("train", name) for name in WRITTEN_TOKENS)
    return {
        "algorithm": _first(run.config, "algorithm.type", "algorithm.name", "algorithm"),
        "model": _first(run.config, "model.name", "model.path", "model"),
        "task family": _first(run.config, "environment.type", "environment.name", "environment", "task.family"),
        "seed": _first(run.config, "seed", "run.seed"),
        "training steps": str(len(steps)),
        "seconds in training steps": number(seconds) if seconds else "not measured",
        "policy tokens": number(tokens) if run.curve("train", "tokens/policy") else "not measured",
    }


def _first(config: Mapping[str, str], *keys: str) -> str:
    return next((config[key] for key in keys if key in config), "not stated")


def _figures(run: RunData) -> tuple[list[Figure], list[str]]:
    figures = [_figure(chart, "Points with 95 % intervals.") for chart in _evaluation_charts(run.evaluations)]
    missing: list[str] = []
    for title, kind, lines in _CURVES:
        metric = declared_metric(lines[0][1])
        series = [
            Series(label=label, points=tuple(Point(x=step, value=value) for step, value in run.curve(kind, name)))
            for label, name in lines
        ]
        drawn = tuple(one for one in series if one.values)
        if not drawn:
            missing.append(title)
            continue
        unit = "share, 0 to 1" if metric.unit == "1" and "share" in metric.meaning else metric.unit
        chart = Chart(title=title, x_label="step", y_label=unit if unit != "1" else "no unit", series=drawn)
        caption = "; ".join(f"{name}: {declared_metric(name).meaning}" for _, name in lines)
        figures.append(_figure(chart, f"{caption}. Healthy: {metric.healthy}."))
    return figures, missing


def _figure(chart: Chart, caption: str) -> Figure:
    return Figure(svg=svg_chart(chart), caption=caption)


def _evaluation_charts(evaluations: Sequence[Evaluation]) -> list[Chart]:
    """Score over step of each split's first metric, one line for each panel that was evaluated at two steps or more.

    The last evaluation of a step stands for it: after the cold start, the one after and not the one before.
    """
    charts: list[Chart] = []
    for split in dict.fromkeys(one.split for one in evaluations):
        ours = [one for one in evaluations if one.split == split and one.metrics]
        name = next((metric for one in ours for metric in one.metrics), "")
        lines = [_scores(panel, name, ours) for panel in dict.fromkeys(one.panel_hash for one in ours)]
        series = tuple(line for line in lines if len(line.points) > 1)[:_MAX_SERIES]
        if series:
            charts.append(Chart(title=f"Evaluation on {split}", x_label="step", y_label=name, series=series))
    return charts


def _scores(panel: str, name: str, evaluations: Sequence[Evaluation]) -> Series:
    by_step = {one.step: one.metrics[name] for one in evaluations if one.panel_hash == panel and name in one.metrics}
    points = (Point(x=step, value=score.value, low=score.ci_low, high=score.ci_high) for step, score in sorted(by_step.items()))
    return Series(label=f"panel {panel[:12]}", points=tuple(points))


def _evaluation_tables(evaluations: Sequence[Evaluation]) -> list[EvaluationTable]:
    tables: list[EvaluationTable] = []
    for split in dict.fromkeys(one.split for one in evaluations):
        last = {one.label: one for one in evaluations if one.split == split}  # the last of a label; the curve has them all
        columns = list(last.values())
        names = dict.fromkeys(name for one in columns for name in one.metrics)
        rows = tuple((name, tuple(_cell(one, name) for one in columns)) for name in names)
        heads = tuple((one.label, _head(one)) for one in columns)
        differs = len({one.panel_hash for one in columns}) > 1
        warning = "The panels differ: these columns were not measured on the same tasks." if differs else ""
        tables.append(EvaluationTable(split=split, columns=heads, rows=rows, warning=warning))
    return tables


def _head(one: Evaluation) -> str:
    """What an evaluation was made on; faults are rollouts that are in none of its numbers."""
    faults = f", {one.num_faults} FAULTS in no score" if one.num_faults else ""
    return f"step {one.step}, {one.num_tasks} tasks{faults}, temperature {one.temperature:g}, panel {one.panel_hash[:12]}"


def _cell(evaluation: Evaluation, name: str) -> str:
    score = evaluation.metrics.get(name)
    return "not measured" if score is None else f"{number(score.value)} [{number(score.ci_low)}, {number(score.ci_high)}]"


def _counts(run: RunData) -> list[tuple[str, str, str]]:
    """(name, sum over the run, meaning) of the counts of events that are above zero."""
    counts = [metric for metric in DECLARED if "/num_" in metric.name and metric.group in _COUNTED_GROUPS]
    totals = [(metric, run.total("train", metric.name) + run.total("sft", metric.name)) for metric in counts]
    return [(metric.name, number(total), metric.meaning) for metric, total in totals if total]
