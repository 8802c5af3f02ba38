"""The overview answers its eight questions from the files of a run: made-up runs with known answers."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.types import Outcome
from outrider.viewer import overview as module
from outrider.viewer.overview import overview
from outrider.viewer.ranges import OutOfRange
from outrider.viewer.report import write_report
from outrider.viewer.report_parts import Chart, Point, Series, svg_chart
from outrider.viewer.run_reader import read_run
from outrider.viewer.search import RolloutIndex
from outrider.viewer.summary import cost_lines
from tests.viewer.made_up_runs import rollout, write_rollouts
from tests.viewer.planted_run import EFFECT, FINDINGS, write_planted_run
from tests.viewer.synthetic_run import HOSTILE, write_run


def page_of(run: Path, *, address: str = "#/run/x", is_shared: bool = False) -> str:
    index = RolloutIndex(run)
    table, data = index.table(), read_run(run)
    return overview(run, data, table, title="Overview", address=address, is_shared=is_shared)


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def answer(page: str, question: str) -> str:
    return text_of(page.split(f"<h2>{question}</h2>")[1].split("</section>")[0])


def label_of(page: str, title: str) -> str:
    return next(label for label in re.findall(r'aria-label="([^"]*)"', page) if label.startswith(title))


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_planted_run(tmp_path_factory.mktemp("planted") / "good", is_bad=False)


@pytest.fixture(scope="module")
def bad_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_planted_run(tmp_path_factory.mktemp("planted") / "bad", is_bad=True)


@pytest.fixture(scope="module")
def good(good_run: Path) -> str:
    return page_of(good_run)


@pytest.fixture(scope="module")
def bad(bad_run: Path) -> str:
    return page_of(bad_run)


def test_the_verdict_has_start_end_and_paired_gain_with_intervals(good: str, bad: str) -> None:
    assert "It learned: 50.0 % [45.0, 55.0] → after: 93.8 % [88.8, 98.8]" in text_of(good)
    assert "Paired gain +43.8 points [" in text_of(good) and "the same 64 tasks" in text_of(good)
    assert '<p class="verdict bad">It got worse: 50.0 % [45.0, 55.0] → after: 25.0 %' in bad


@pytest.mark.parametrize(
    ("num_lines", "metric", "verdict"),
    [
        (0, "score", "no evaluation is recorded"),
        (1, "score", "Not known whether it learned: two evaluations"),
        (2, "f1_total", "before: 3 [2.5, 3.5]"),
    ],
)
def test_runs_without_a_comparison_are_not_judged_and_every_metric_has_its_number(
    good_run: Path, tmp_path: Path, num_lines: int, metric: str, verdict: str
) -> None:
    run = shutil.copytree(good_run, tmp_path / "run")
    lines = []
    for line in (run / "evaluations.jsonl").read_text().splitlines()[:num_lines]:
        entry = json.loads(line)
        if metric != "score":
            entry |= {"metric": {metric: {"value": 3.0, "ci_low": 2.5, "ci_high": 3.5}}, "label": "before"}
        lines.append(json.dumps(entry) + "\n")
    (run / "evaluations.jsonl").write_text("".join(lines))
    assert verdict in text_of(page_of(run))


def test_the_largest_fall_is_named_with_what_changed_in_it(bad: str) -> None:
    text = answer(bad, "Why did a step fall?")
    assert "Largest fall: 0.5 → 0.25, step 3 to 4, not more than the draw of 4 groups explains" in text
    assert "More of: turn limit 0% → 50%." in text
    assert "on-policy: 0.5 → 0.25 (16 → 16 rollouts)." in text and "tips: 0.5 → 0 (8 → 8 rollouts)." in text
    assert "The same tasks in other steps: 0.5 → 0.5." in text
    assert "turn limit: first 0, last 0, lowest 0, highest 16" in label_of(bad, "Outcomes")


def test_a_run_that_never_falls_says_so(good_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(good_run, tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:5]))
    assert "fell in no step" in answer(page_of(run), "Why did a step fall?")


def test_reward_is_by_kind_and_the_cold_start_has_its_loss(good: str) -> None:
    assert re.match(r"Reward \(reward\) over step\. on-policy: .* hybrid: .* tips:", label_of(good, "Reward"))
    text = answer(good, "Did it learn?")
    assert "Training reward 0.5 → 0.5" in text and "Cold start: loss 2 → 0.5 in 2 updates." in text
    assert "loss: first 2, last 0.5" in label_of(good, "Cold start loss")


def test_positive_advantages_are_counted_with_their_kinds_and_linked(good: str) -> None:
    text = answer(good, "Who got a positive advantage?")
    assert "4 of 4 groups have a signal." in text
    assert "Positive: 16 of 32 rollouts (mean return 1, " in text and "Negative: 16 of 32 rollouts" in text
    assert 'href="#/run/x/step/step-000006?sort=advantage&amp;descending=1"' in good
    assert "positive: first 50.0 %, last 50.0 %" in label_of(good, "Advantage")


def test_the_most_retrieved_items_and_the_effect_are_shown(
    good_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "effects", lambda run: [EFFECT])
    text = answer(page_of(good_run), "What was retrieved?")
    assert "96 insertions in the last 6 steps." in text
    assert "48 × step 7 the retrieved step 24 × tip 1 a tip 24 × tip 2 a tip" in text
    assert EFFECT.text in text


def test_tool_calls_are_counted_by_status_and_old_runs_have_none(bad: str, tmp_path: Path) -> None:
    assert "search: error 96 of 192 calls." in answer(bad, "Which tool calls failed?")
    old = answer(page_of(write_run(tmp_path / "run", num_steps=4)), "Which tool calls failed?")
    assert "Not recorded for single calls. Whole run: " in old


def test_findings_and_alarms_are_in_the_overview_and_in_the_report(
    bad_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_problems", lambda run: list(FINDINGS))
    text = answer(page_of(bad_run), "Is anything wrong?")
    assert "Problem 3" in text and "Problem 4" not in text and "1 more below" in text
    assert "5 alarms , the last: ALARM: step 5" in text
    report = write_report(bad_run).read_text(encoding="utf-8")
    assert all(finding.text in report for finding in FINDINGS)
    assert all(f"ALARM: step {step}: bad is planted" in report for step in range(1, 6))


def test_costs_have_stages_tokens_calls_memory_and_what_made_the_run(good: str) -> None:
    text = answer(good, "What did it cost?")
    for part in (
        "6 steps in 1:00: rollouts 0:36, updates 0:24",
        "6000 tokens",
        "384 tool calls",
        "memory 2 GiB",
    ):
        assert part in text
    assert "evaluation: first 30, last 30" in label_of(good, "Time")
    for part in ("rapo · tiny · seed 3 · 6 of 6", "commit abc", "planted.toml", "2023-11-14 22:13 to"):
        assert part in text_of(good)


def test_only_the_page_on_this_machine_names_host_and_folders(good_run: Path, good: str) -> None:
    assert "planted-host" in good and "/home/someone" in good
    shared = page_of(good_run, address="", is_shared=True)
    assert not [part for part in ("planted-host", "/home/someone", str(good_run), "href") if part in shared]


def test_the_folder_of_a_run_may_be_the_current_one(bad_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bad_run)
    assert "ALARM: step 5: bad is planted" in page_of(Path()) and "outrider 0.3.0" in page_of(Path())


def test_hostile_text_is_text_and_turns_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=4)
    note = {"step": "<b>", "time": "x", "text": f"ALARM: {HOSTILE}\u202e\x1b"}
    (run / "notes.jsonl").write_text(json.dumps(note) + "\n")
    page = page_of(run)
    assert "<script" not in page and "<img" not in page and "⟨U+202E⟩⟨U+001B⟩" in page


def test_a_damaged_file_hides_no_answer(good_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(good_run, tmp_path / "run")
    for folder in ("traces", "rollouts"):
        (run / folder / "step-000005.parquet").write_bytes(b"PAR1")
    text = text_of(page_of(run))
    assert "80 insertions in the last 6 steps; the turns of 1 step cannot be read." in text


def test_an_empty_folder_has_an_overview(tmp_path: Path) -> None:
    text = text_of(page_of(tmp_path))
    assert text.count("?") >= 8 and "Not known: no turns of training are on file." in text


def write_small_run(
    run: Path,
    *,
    records: Sequence[dict[str, Any]] = (),
    evaluations: Sequence[dict[str, Any]] = (),
    num_steps: int = 1,
) -> Path:
    """Metrics and evaluations, completed with what each line must have."""
    run.mkdir()
    (run / "config.toml").write_text(f'[algorithm]\ntype = "grpo"\n[train]\nnum_steps = {num_steps}\n')
    lines = [json.dumps({"step": 1, "kind": "train", **record}) for record in records]
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    common = {"split": "test", "num_tasks": 64, "temperature": 0.0, "panel_hash": "9f2c" * 16}
    lines = []
    for line in evaluations:
        share = line.get("share", 0.0)
        scores = {f"task-{task}": float(task < 64 * share) for task in range(64)}
        metric = {"score": {"value": share, "ci_low": share, "ci_high": share}}
        lines.append(json.dumps({**common, "metric": metric, "task_scores": scores, **line}))
    (run / "evaluations.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return run


LONG = "checkpoint " * 40


@pytest.mark.parametrize(
    ("evaluations", "parts"),
    [
        (
            [{"label": "first", "step": 1, "share": 0.25}, {"label": "last", "step": 2, "share": 0.75}],
            ["no evaluation of the start (step 0) on these tasks exists", "points [+", "over 'first'"],
        ),
        (
            [
                {"label": "before", "step": 0, "mean_return": 0.1},
                {"label": "after", "step": 2, "mean_return": 0.9},
            ],
            ["No change of the solved share is shown", "Mean return 0.1 → 0.9."],
        ),
        (
            [{"label": LONG, "step": 0}, {"label": LONG, "step": 1}],
            [f"→ {LONG[:59]}…: 0.0 %", f"over '{LONG[:59]}…'"],
        ),
    ],
    ids=["no start", "graded rewards", "long labels"],
)
def test_the_verdict_names_what_is_missing_and_what_the_share_hides(
    tmp_path: Path, evaluations: list[dict[str, Any]], parts: list[str]
) -> None:
    verdict = module._verdict(read_run(write_small_run(tmp_path / "run", evaluations=evaluations)))[1]
    assert [part for part in parts if part not in verdict] == [] and LONG not in verdict


@pytest.mark.parametrize(
    ("counts", "rate", "successes", "expected"),
    [
        ({"tool_fault": 4}, None, None, {"fault": 4}),
        ({"tool_fault": 4}, None, [True] * 4, {"fault": 4}),
        ({"truncated_turns": 4}, 0.75, None, {"rewarded": 3, "turn limit": 1}),
        ({"finished": 2, "truncated_turns": 2}, 0.75, None, {"rewarded": 3, "turn limit": 1}),
        (
            {"finished": 2, "truncated_turns": 2},
            0.5,
            [False, False, True, True],
            {"rewarded": 2, "wrong": 2},
        ),
    ],
    ids=["faults", "faults on file", "truncated successes", "excess over finished", "counted by rollout"],
)
def test_every_rollout_has_one_fate(
    tmp_path: Path,
    counts: dict[str, int],
    rate: float | None,
    successes: list[bool] | None,
    expected: dict[str, int],
) -> None:
    record: dict[str, Any] = {"rollout/num": 4} | {f"rollout/num_{name}": num for name, num in counts.items()}
    if rate is not None:
        record["reward/success_rate"] = rate
    run = write_small_run(tmp_path / "run", records=[record])
    outcomes = [Outcome(name) for name, num in counts.items() for _ in range(num)]
    rows = [
        rollout(1, 0, number, None, outcome=outcome, success=success)
        for number, (outcome, success) in enumerate(zip(outcomes, successes or outcomes, strict=True))
    ]
    write_rollouts(run, rows if successes else [])
    (run / "traces").mkdir()
    (run / "traces" / "step-000001.parquet").write_bytes(b"PAR1")
    training = RolloutIndex(run).table()
    fates = module._fates(read_run(run), training)
    assert {fate: num for fate, num in fates[1].items() if num} == expected
    if "fault" in expected:
        assert [*module._fall(read_run(run), training, fates)] == [
            "No step has a reward: every rollout ended in a fault."
        ]


def test_turns_that_cannot_be_read_are_a_note_and_no_missing_retrieval(
    good_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(good_run, tmp_path / "run")
    for path in (run / "traces").iterdir():
        path.write_bytes(b"PAR1")
    page = page_of(run)
    assert "Not known: the turns of 6 steps cannot be read." in answer(page, "What was retrieved?")
    text = answer(page, "Is anything wrong?")
    assert "6 files or lines could not be read" in text and "No problem was found" not in text
    assert "traces/step-000006.parquet cannot be read" in page


def test_a_run_without_training_steps_has_neither_steps_nor_their_costs(tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "run", records=[{"kind": "sft", "sft/loss": 2.0}], num_steps=0)
    with (run / "config.toml").open("a") as config:
        config.write("[cold_start]\nnum_epochs = 1\n")
    data = read_run(run)
    assert module._facts(data)[0] == data.method != "grpo" and "steps" not in " ".join(module._facts(data))
    assert [*cost_lines(data)] == []
    assert module._trend(data, [2.0]) == "Cold start: loss 2 → 2 in 1 update."


def test_counts_of_one_are_in_the_singular_and_few_steps_have_no_thirds(tmp_path: Path) -> None:
    values = {"tokens/policy": 1, "rollout/num_tool_calls": 1, "time/step": 1.0, "reward/mean": 0.0}
    data = read_run(write_small_run(tmp_path / "run", records=[values]))
    assert module._facts(data)[-1] == "1 of 1 training step"
    assert [*cost_lines(data)][-1] == "1 token written, 1 tool call in training"
    again = read_run(write_small_run(tmp_path / "again", records=[values, values | {"step": 2}]))
    assert module._trend(again, []) == "Training reward 0 → 0 (first and last step). "


def test_failed_calls_come_before_calls_that_found_nothing(good_run: Path) -> None:
    calls = Counter({("search", "empty"): 5, ("", "error"): 2, ("find " * 20, "timeout"): 1})
    table = RolloutIndex(good_run).table()
    assert [*module._failures(read_run(good_run), table, calls)][:3] == [
        "unreadable call: error 2 of 2 calls.",
        f"{('find ' * 8)[:39]}…: timeout 1 of 1 call.",
        "search: 5 of 5 found nothing.",
    ]


def test_failed_calls_are_no_part_of_the_executed_ones(tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "run")
    write_rollouts(run, [rollout(1, 0, 0, 0.0, num_failed_calls=3, num_calls=1)])
    (run / "traces").mkdir()
    (run / "traces" / "step-000001.parquet").write_bytes(b"PAR1")
    text = next(module._failures(read_run(run), RolloutIndex(run).table(), Counter()))
    assert text == "3 calls failed, 1 executed, on the paths of all rollouts."


def test_a_value_at_an_exclusive_bound_is_described_as_outside(
    good_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [
        OutOfRange(name="reward/std", value=0.0, low=0.0, high=high, steps=(1,)) for high in (None, 2.0)
    ]
    monkeypatch.setattr(module, "out_of_range", lambda data: entries)
    assert module._outside(read_run(good_run)) == [
        "reward/std 0 (above 0)",
        "reward/std 0 (above 0, to 2)",
    ]
    text = answer(page_of(good_run), "Is anything wrong?")
    assert "No known problem pattern was found." in text and "No problem was found" not in text


def test_a_run_in_its_set_up_misses_no_file(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("seed = 1\n")
    assert read_run(tmp_path).notes == ()
    (tmp_path / "traces").mkdir()
    assert read_run(tmp_path).notes == ("metrics.jsonl is missing",)


def test_rare_values_of_stacked_bars_are_averaged_with_zeros() -> None:
    def points(value: float | None) -> tuple[Point, ...]:
        return tuple(Point(x=x, value=4.0 if x % 10 == 0 else value) for x in range(400))

    chart = Chart(title="", x_label="", y_label="", series=(), is_stacked=True)
    with_gaps, with_zeros = (
        svg_chart(replace(chart, series=(Series(label="", points=points(value)),))) for value in (None, 0.0)
    )
    bars = [re.findall('class="bar s0" d="[^"]*"', svg) for svg in (with_gaps, with_zeros)]
    assert bars[0] == bars[1]
