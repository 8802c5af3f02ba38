"""The report of a run: one HTML file that needs no network, no script and nothing beside it.

Model output and retrieved text are untrusted: everything passes through Jinja2's autoescape, and the page
forbids scripts and loads by its content security policy as a second wall.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from markupsafe import Markup

from outrider.atomic_io import replace_file
from outrider.metrics import DECLARED, WRITTEN_TOKENS, declared_metric
from outrider.watch.before_after import pick_before_after
from outrider.watch.curves import Chart, Point, Series, number, svg_chart
from outrider.watch.report_evaluations import evaluation_charts, evaluation_tables
from outrider.watch.run_directory import RunData, read_run
from outrider.watch.samples import ENTROPY_EDGES, Budget, Sample, pick_samples
from outrider.watch.templates import page_template
from outrider.watch.trees import Tree, pick_trees

MAX_BYTES: Final = 1_000_000
_BUDGETS: Final = tuple(Budget(num_tokens=n, num_chars=4 * n) for n in (600, 300, 120, 40, 10))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawn chart and the words under it."""

    svg: Markup
    caption: str


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into the run directory, atomically, and return its path.

    Whatever of the inputs is missing or damaged is said at the top of the page. Raises ``OSError`` when it
    cannot be written.
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


def _figures(run: RunData) -> tuple[list[Figure], list[str]]:
    figures = [_figure(chart, caption) for chart, caption in evaluation_charts(run)]
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
        figures.append(_figure(chart, f"{caption}. Healthy: {metric.healthy}.{reward}"))
    return figures, missing


def _reward_lines(run: RunData) -> tuple[tuple[str, str], ...]:
    """On-policy and hybrid rollouts apart; their mixture only where a run has no such split."""
    lines = tuple(
        line
        for line in _SPLIT_REWARD_LINES
        if any(value is not None for _, value in run.curve("train", line[1]))
    )
    return lines if len(lines) > 1 else _MIXED_REWARD_LINES


def _figure(chart: Chart, caption: str) -> Figure:
    return Figure(svg=svg_chart(chart), caption=caption)


def _counts(run: RunData) -> list[tuple[str, str, str]]:
    """(name, sum over the run, meaning) of the counts of events that are above zero."""
    counts = [metric for metric in DECLARED if "/num_" in metric.name and metric.group in _COUNTED_GROUPS]
    totals = [(metric, run.total("train", metric.name) + run.total("sft", metric.name)) for metric in counts]
    return [(metric.name, number(total), metric.meaning) for metric, total in totals if total]
