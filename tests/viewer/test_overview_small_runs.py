"""The overview of small runs: only faults, no evaluation of the start, unreadable turns, one of a kind."""

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
from outrider.viewer.ranges import OutOfRange
from outrider.viewer.report_parts import Chart, Point, Series, svg_chart
from outrider.viewer.run_reader import read_run
from outrider.viewer.search import RolloutIndex
from outrider.viewer.summary import cost_lines
from tests.viewer.made_up_runs import rollout, write_rollouts
from tests.viewer.planted_run import write_planted_run
from tests.viewer.test_overview import answer, page_of


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_planted_run(tmp_path_factory.mktemp("planted") / "good", is_bad=False)


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
