"""The HTML report of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from markupsafe import Markup

from outrider.errors import DataError
from outrider.files import replace_file
from outrider.metrics import DECLARED, declared_metric
from outrider.protocols import Difference, run_difference
from outrider.viewer.evaluations import evaluation_tables
from outrider.viewer.overview import STYLE, overview
from outrider.viewer.records import TraceReader
from outrider.viewer.report_parts import (
    ENTROPY_EDGES,
    Chart,
    Point,
    Sample,
    Series,
    Tree,
    number,
    page_template,
    pick_samples,
    pick_trees,
    samples_from_rows,
    svg_chart,
)
from outrider.viewer.run_reader import Evaluation, RunData, read_run
from outrider.viewer.search import RolloutIndex

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


# The report of a run: one self-contained HTML file without scripts and network access.
#
# Model output and retrieved text are untrusted: Jinja2 escapes every value, and as a second defence the
# page's content security policy forbids scripts and external resources.


MAX_BYTES: Final = 1_000_000
_BUDGETS: Final = (600, 300, 120, 40, 10)  # policy tokens of a sample: fewer if the page is too large
_NUM_NOTES: Final = 20
_COUNTED_GROUPS: Final = ("rollout", "retrieval", "group", "ratio", "grad", "record", "sft")
_TEMPLATE: Final = Path(__file__).with_name("report_template.html.j2")

_CURVES: Final[Mapping[str, Mapping[str, str]]] = {
    "Policy entropy": {"per token": "entropy/token_mean"},
    "Response length": {"all tokens after the prompt": "rollout/length_tokens_mean"},
    "Retrieval rate": {"inserted / possible": "retrieval/rate"},
    "Retrieval reward Z": {"Z": "retrieval/z_mean"},
    "Retrieval quality g": {"g": "retrieval/g_mean"},
    "Entropy around a retrieval": {
        "before": "retrieval/entropy_before_mean", "after": "retrieval/entropy_after_mean",
    },
    "Similarity of the retrieved key": {"cosine": "retrieval/similarity_mean"},
    "Tool calls": {
        "executed": "rollout/num_tool_calls", "saved by retrieval": "rollout/num_tool_calls_saved",
    },
    "Mean trainer-engine log-prob gap": {"mean": "gap/logprob_mean"},
    "Largest trainer-engine log-prob gap": {"largest": "gap/logprob_max"},
    "Gradient norm": {"before clipping": "grad/norm"},
    "Rollout speed": {"policy tokens sampled": "speed/rollout_tokens"},
    "Update speed": {"tokens trained": "speed/update_tokens"},
    "Groups without signal": {"share of groups": "group/fraction_without_signal"},
}  # fmt: skip
"""Metrics of the training by the title of their chart and the label of their line."""


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
    index = RolloutIndex(run_dir)
    table = index.table()
    notes += index.notes.values()

    def top() -> Markup:
        shown = list(dict.fromkeys(notes))
        if len(shown) > _NUM_NOTES:
            shown[_NUM_NOTES:] = [f"and {len(shown) - _NUM_NOTES} more"]
        return overview(run_dir, run, table, title="Outrider run report", notes=shown, is_shared=True)

    drawn = top()
    pages = (render(run, samples, drawn, budget, trees, pair, difference) for budget in _BUDGETS)
    page = next((page for page in pages if len(page) <= MAX_BYTES), None)
    if page is None:
        notes.append("the sample rollouts were left out to keep this page small")
        page = render(run, (), top(), _BUDGETS[-1], difference=difference)
    path = run_dir / "report.html"
    replace_file(path, page)
    return path


def render(
    run: RunData,
    samples: Sequence[Sample],
    top: Markup,
    num_tokens: int,
    trees: Sequence[Tree] = (),
    before_after: Sequence[Sample] = (),
    difference: Difference | None = None,
) -> bytes:
    """Render the page with the overview on top as UTF-8, without reading any file of the run."""
    figures, missing = _figures(run)
    page = page_template(_TEMPLATE).render(
        overview=top,
        style=Markup(STYLE.read_text(encoding="utf-8")),
        config=run.config,
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


def _figures(run: RunData) -> tuple[list[tuple[Markup, str]], list[str]]:
    """Charts with their captions, and the titles of charts without values."""
    figures: list[tuple[Markup, str]] = []
    missing: list[str] = []
    for title, lines in _CURVES.items():
        metrics = [declared_metric(name) for name in lines.values()]
        curves = {label: run.curve("train", name) for label, name in lines.items()}
        series = [
            Series(label=label, points=tuple(Point(x=step, value=value) for step, value in curve))
            for label, curve in curves.items()
        ]
        plotted = tuple(line for line in series if line.values)
        if not plotted:
            missing.append(title)
            continue
        unit = metrics[0].unit
        if unit == "1":
            unit = "share, 0 to 1" if "share" in metrics[0].meaning else "no unit"
        chart = Chart(title=title, x_label="step", y_label=unit, series=plotted)
        caption = "; ".join(f"{metric.name}: {metric.meaning}" for metric in metrics)
        figures.append((svg_chart(chart), f"{caption}. Healthy: {metrics[0].healthy_range}."))
    return figures, missing


def _counts(run: RunData) -> list[tuple[str, str, str]]:
    """(name, sum over the run, meaning) of every event counter above zero."""
    counts = [metric for metric in DECLARED if "/num_" in metric.name and metric.group in _COUNTED_GROUPS]
    totals = [(metric, run.total("train", metric.name) + run.total("sft", metric.name)) for metric in counts]
    return [(metric.name, number(total), metric.meaning) for metric, total in totals if total]
