"""The report: whole on a whole run, a page with notes on any damage, and inert whatever the model wrote."""

import dataclasses
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from outrider.metrics import MetricsWriter
from outrider.types import Origin
from outrider.viewer.records import SCHEMA, StepFiles, step_file
from outrider.viewer.report import MAX_BYTES, write_report
from outrider.viewer.report_parts import ENTROPY_EDGES, pick_samples
from tests.viewer.synthetic_run import HOSTILE, trace, write_config, write_run


class Page(HTMLParser):
    """What a browser would see: elements with attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def report(run_dir: Path) -> Page:
    return Page(write_report(run_dir).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", num_steps=60)


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Page:
    return report(run_dir)


def test_nothing_in_the_page_runs_or_loads(page: Page) -> None:
    assert not {tag for tag, _ in page.elements} & {
        "script",
        "img",
        "iframe",
        "object",
        "embed",
        "link",
        "form",
        "base",
    }
    for tag, attributes in page.elements:
        assert not [
            name for name in attributes if name.startswith("on") or name in ("src", "href", "srcdoc")
        ], tag
    assert (
        "meta",
        {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"},
    ) in page.elements


def test_hostile_text_is_shown_as_text_in_every_kind_of_node(page: Page) -> None:
    assert page.text.count(HOSTILE) >= 3
    assert "gold<i>" in page.text
    assert "arithmetic <b>tools</b>" in page.text


def test_the_header_has_algorithm_model_and_time_but_no_folder(page: Page, run_dir: Path) -> None:
    for part in ("rapo", ".../tiny-agent", "60 steps in 12:00", "240k tokens written"):
        assert part in page.text
    whole = (run_dir / "report.html").read_text()
    assert "/home/someone" not in whole
    assert str(run_dir) not in whole


def test_evaluations_have_intervals_and_a_column_each(page: Page) -> None:
    for part in (
        "before cold start",
        "after cold start",
        "after training",
        "GRPO, after training",
        "58.0 % [54.0, 62.0]",
        "11.0 % [7.0, 15.0]",
        "score (share of tasks solved)",
    ):
        assert part in page.text
    assert (
        "40.0 % [" not in page.text.split("Split test")[1].split("Curves")[0]
    )  # of a label that was evaluated several times the table has the last one
    assert "panels differ" not in page.text


def test_the_page_says_how_it_is_read(page: Page) -> None:
    guide = page.text.split("How to read this page")[1].split("Split test")[0]
    headings = [part.split("\n")[0] for part in ("Evaluation", "Curves", "Counted events", "Sample rollouts")]
    assert all(f"\n{heading} " in guide for heading in headings) and "95 % intervals" in guide


def test_different_panels_get_a_warning(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=4)
    path = run / "evaluations.jsonl"
    path.write_text(path.read_text().replace("9f2c" * 16, "0000", 1))
    assert "panels differ" in report(run).text


def test_a_weaker_success_rule_is_marked(tmp_path: Path, page: Page) -> None:
    run = write_run(tmp_path / "run", num_steps=4)
    config = run / "config.toml"
    config.write_text(config.read_text() + 'success_at = "positive"\n')
    mark = "Every final score above 0 counts as a success (environment.success_at = positive)."
    assert mark in report(run).text and mark not in page.text


def test_curves_carry_units_legends_and_what_was_not_recorded(page: Page) -> None:
    labels = [a["aria-label"] or "" for tag, a in page.elements if tag == "svg"]
    for title, unit in (
        ("Reward", "reward"), ("Policy entropy", "nats"), ("Response length", "tokens"),
        ("Retrieval rate", "share, 0 to 1"), ("Retrieval reward Z", "nats"),
        ("Retrieval quality g", "no unit"), ("Similarity of the retrieved key", "no unit"),
        ("Mean trainer-engine log-prob gap", "nats"), ("Gradient norm", "no unit"),
        ("Rollout speed", "tokens/s"), ("Tool calls", "calls"), ("Cold start loss", "nats"),
        ("Evaluation on test", "solved, %"),
    ):  # fmt: skip
        assert any(label.startswith(f"{title} ({unit}) over step.") for label in labels), title
    assert "Not recorded in this run: Groups without signal." in page.text


def test_counts_are_summed_over_the_run(run_dir: Path, page: Page) -> None:
    whole = (run_dir / "report.html").read_text()
    assert "<code>rollout/num_tool_fault</code></td><td>30</td>" in whole
    assert "<code>record/num_non_finite</code></td><td>1</td>" in whole
    assert "rollout/num_retries" not in page.text  # what never happened has no row


def test_samples_mark_origins_and_shade_policy_tokens_by_entropy(page: Page) -> None:
    assert sum(tag == "details" for tag, _ in page.elements) == 2 + 10  # ten rollouts
    classes = [a.get("class") or "" for tag, a in page.elements if tag == "div"]
    for origin in ("prompt", "policy", "environment", "buffer"):
        assert f"node {origin}" in classes
    assert "retrieved step" in page.text
    tokens = [
        a
        for tag, a in page.elements
        if tag == "span" and re.fullmatch("e[0-7]", a.get("class") or "") and "title" in a
    ]
    assert len(tokens) == 10 * 2 * 60
    for attributes in tokens:
        title = attributes["title"] or ""
        match = re.fullmatch(r"(.*)  log-prob (-?[\d.]+)  entropy ([\d.]+) nats", title, re.DOTALL)
        assert match is not None, title
        entropy = float(match[3])
        if all(abs(entropy - edge) > 1e-3 for edge in ENTROPY_EDGES):  # the tooltip is rounded
            shade = next((i for i, edge in enumerate(ENTROPY_EDGES) if entropy < edge), 7)
            assert attributes["class"] == f"e{shade}"


def test_report_is_the_same_bytes_when_written_again(run_dir: Path, page: Page) -> None:
    first = (run_dir / "report.html").read_bytes()
    assert write_report(run_dir).read_bytes() == first
    assert not list(run_dir.glob("*.tmp"))


def test_the_page_stays_small_with_long_rollouts_and_says_what_is_cut(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=4, num_tokens=4000)
    page = report(run)
    assert (run / "report.html").stat().st_size <= MAX_BYTES
    hidden = [int(n) for n in re.findall(r"… (\d+) tokens not shown …", page.text)]
    shown = [a for tag, a in page.elements if tag == "span" and "title" in a]
    assert sum(hidden) + len(shown) == 10 * 2 * 4000


def torn_metrics(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])


def odd_metrics(run: Path) -> None:
    lines = [
        "null",
        "[1]",
        "17",
        '{"step": "x", "kind": "train"}',
        '{"kind": "train"}',
        '{"step": 70, "kind": "train", "reward/mean": "high"}',
        "\ufffe{",
    ]
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write("\n".join(lines) + "\n")


def lost_evaluations(run: Path) -> None:
    (run / "evaluations.jsonl").unlink()
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "kind": "eval", "eval/score": 0.5}\n')


def odd_evaluations(run: Path) -> None:
    with (run / "evaluations.jsonl").open("a") as stream:
        stream.write(json.dumps({"label": "x"}) + "\n" + json.dumps({"label": "y", "metric": 3}) + "\n")


def orphan_nodes(run: Path) -> None:
    StepFiles(run / "traces").write_rows(
        step_file(60), [row for row in trace(60, 1) if row.origin is not Origin.PROMPT], SCHEMA
    )


def circular_nodes(run: Path) -> None:
    leaf = next(row for row in trace(60, 1) if row.outcome is not None)
    StepFiles(run / "traces").write_rows(
        step_file(60), [dataclasses.replace(leaf, parent_id=leaf.node_id)], SCHEMA
    )


@pytest.mark.parametrize(
    ("damage", "note"),
    [
        (lambda run: (run / "config.toml").unlink(), "config.toml is missing"),
        (lambda run: (run / "config.toml").write_text("a = ["), "config.toml cannot be read"),
        (lambda run: (run / "config.toml").write_bytes(b"\xff\xfe"), "config.toml cannot be read"),
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl is missing"),
        (torn_metrics, "metrics.jsonl: 1 damaged or torn line left out (line 14)"),
        (odd_metrics, "metrics.jsonl: 4 damaged or torn lines"),
        (lost_evaluations, "evaluations.jsonl is missing"),
        (odd_evaluations, "evaluations.jsonl: an evaluation was left out"),
        (lambda run: (run / "traces" / "step-000004.parquet").write_bytes(b"PAR1"),
         "step-000004.parquet cannot be read"),
    ],
)  # fmt: skip
def test_damage_is_a_note_and_the_rest_of_the_page_is_there(
    tmp_path: Path, damage: Callable[[Path], object], note: str
) -> None:
    run = write_run(tmp_path / "run", num_steps=4)
    damage(run)
    page = report(run)
    assert note in page.text
    assert "Sample rollouts" in page.text
    assert str(tmp_path) not in (run / "report.html").read_text()


def test_rollouts_without_a_path_to_a_root_are_noted_and_left_out(tmp_path: Path) -> None:
    for make in (orphan_nodes, circular_nodes):
        make(tmp_path)
        notes: list[str] = []
        assert pick_samples(tmp_path / "traces", notes) == ()
        assert any("has no path to a root" in note for note in notes)


def test_an_empty_directory_gives_a_page(tmp_path: Path) -> None:
    page = report(tmp_path)
    for part in (
        "config.toml is missing",
        "metrics.jsonl is missing",
        "No trace was recorded",
        "No evaluation",
    ):
        assert part in page.text


def test_a_run_before_its_first_evaluation_is_healthy(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=4)
    (run / "evaluations.jsonl").unlink()
    assert "could be read" not in report(run).text


def test_samples_compare_best_and_worst_of_both_kinds(tmp_path: Path) -> None:
    StepFiles(tmp_path).write_rows(
        step_file(1), [row for index in range(4) for row in trace(1, index)], SCHEMA
    )
    samples = pick_samples(tmp_path, [])
    assert [(s.leaf.hybrid, s.leaf.episode_return) for s in samples[:4]] == [
        (True, 0.3),
        (False, 0.3),
        (True, 0.0),
        (False, 0.0),
    ]
    assert len({id(s) for s in samples}) == len(samples) == 8
    hybrid = samples[0].nodes(600)
    assert [node.origin for node in hybrid] == ["prompt", "policy", "environment", "buffer", "policy"]


def with_evaluations(run_dir: Path, scores: list[float], **more: object) -> Page:
    """A run with the evaluations that a trainer writes, NaN where every rollout ended in a fault."""
    write_run(run_dir, num_steps=4)
    with (run_dir / "evaluations.jsonl").open("w") as stream:
        for step, score in enumerate(scores):
            metric = {"score": {"value": score, "ci_low": score, "ci_high": score}}
            line = {
                "label": f"step {step}",
                "split": "test",
                "num_tasks": 5,
                "metric": metric,
                "step": step,
                "temperature": 0.0,
            }
            stream.write(json.dumps({**line, "panel_hash": "9f2c" * 16, **more}) + "\n")
    return report(run_dir)


@pytest.mark.parametrize("scores", [[float("nan"), 0.1, 0.3], [0.1, float("nan"), 0.3], [float("nan")]])
def test_an_evaluation_with_only_faults_is_noted_and_not_drawn(tmp_path: Path, scores: list[float]) -> None:
    page = with_evaluations(tmp_path / "run", scores, num_faults=5)
    assert "evaluations.jsonl: 'step " in page.text and "has no score: 5 faults" in page.text
    assert "nan" not in page.text.split()
    drawn = [
        value
        for _, attributes in page.elements
        for value in attributes.values()
        if value and "nan" in value.lower().split()
    ]
    assert drawn == []


def test_faults_are_shown_with_the_score(tmp_path: Path) -> None:
    assert "5 tasks, 3 FAULTS in no score" in with_evaluations(tmp_path / "a", [0.1, 0.3], num_faults=3).text
    assert "FAULTS" not in with_evaluations(tmp_path / "b", [0.1, 0.3], num_faults=0).text


def test_an_evaluation_with_an_infinite_count_is_noted_and_left_out(tmp_path: Path) -> None:
    page = with_evaluations(tmp_path / "run", [0.1, 0.3], num_tasks=float("inf"))
    assert (
        "an evaluation was left out (OverflowError" in page.text
        and "No evaluation was recorded." in page.text
    )


def test_tips_and_what_a_fault_discarded_are_policy_tokens(tmp_path: Path) -> None:
    """As in ``outrider compare`` and in the token budget of a run."""
    write_config(tmp_path)
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        writer.write(step, "train", {"tokens/policy": 100.0, "tokens/remarks": 11.0, "tokens/discarded": 3.0})
    writer.close()
    assert "228 tokens written" in report(tmp_path).text


def drawn(page: Page, title: str) -> dict[str, str | None]:
    """The attributes of a chart."""
    return next(a for tag, a in page.elements if tag == "svg" and (a["aria-label"] or "").startswith(title))


def test_the_curve_begins_before_training_and_no_cold_start_is_a_step(page: Page, run_dir: Path) -> None:
    label = drawn(page, "Evaluation on test")["aria-label"] or ""
    assert "first 11.0 %, last 49.0 %" in label
    whole = (run_dir / "report.html").read_text()
    chart = whole[whole.index('aria-label="Evaluation on test') :].split("</svg>")[0]
    for label in (
        "before cold start: 11.0 % [7.0, 15.0]",
        "after cold start, step 0: 32.0 % [28.0, 36.0]",
    ):
        assert f"panel 9f2c9f2c9f2c, {label}</title>" in chart
    ticks = re.findall(r'<text x="([\d.]+)" y="122" text-anchor="middle">([^<]+)</text>', chart)
    assert [name for _, name in sorted(ticks, key=lambda tick: float(tick[0]))] == [
        "before cold start",
        "0",
        "20",
        "40",
        "60",
    ]
    line = re.findall(r'<path class="line s0" d="([^"]+)"', chart)[0]
    assert line.count("M") == 2  # nothing joins the two: what is between them is no training
    assert "Left of step 0: before the cold start" in page.text


def test_one_evaluation_at_step_0_stands_at_step_0(tmp_path: Path) -> None:
    page = with_evaluations(tmp_path / "run", [0.1, 0.3])
    assert (
        "Left of step 0" not in page.text
        and "step 0, step 0: 10.0 %" in (tmp_path / "run" / "report.html").read_text()
    )


def test_on_policy_and_hybrid_rewards_are_apart_and_mixed_only_without_a_split(
    page: Page, tmp_path: Path
) -> None:
    label = drawn(page, "Reward (reward)")["aria-label"] or ""
    assert "on-policy: first" in label and "hybrid: first" in label and "all rollouts" not in label
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        writer.write(step, "train", {"reward/mean": 0.5, "retrieval/reward_on_policy": 0.5})
    writer.close()
    label = drawn(report(tmp_path), "Reward (reward)")["aria-label"] or ""
    assert "all rollouts: first 0.5" in label and "on-policy" not in label


def test_the_page_says_how_test_scores_were_played(page: Page, tmp_path: Path) -> None:
    # under the table and under the curve
    assert page.text.count("Played on held-out tasks without retrieval") == 2
    write_run(tmp_path, num_steps=4)
    config = tmp_path / "config.toml"
    config.write_text(config.read_text() + "[evaluation]\nnum_trials = 3\n")
    adapted = report(tmp_path).text
    assert "without retrieval" not in adapted and "Trials with the memory" in adapted
    assert (drawn(report(tmp_path), "Evaluation on test")["aria-label"] or "").count("over trial.") == 1


def test_wide_tables_scroll_and_charts_shrink(run_dir: Path, page: Page) -> None:
    whole = (run_dir / "report.html").read_text()
    assert (
        whole.count("<table>")
        == len(
            re.findall(r'<div class="scroll" tabindex="0" role="region" aria-label="[^"]+"><table>', whole)
        )
        > 2
    )
    assert (
        ".scroll { overflow-x: auto; max-width: 100%;" in whole
        and "svg { width: 100%; height: auto;" in whole
    )
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.elements
    assert "<caption" not in whole  # it would be as wide as its table, and scroll away
