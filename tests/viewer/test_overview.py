"""The overview answers its eight questions from the files of a run: made-up runs with known answers."""

import json
import re
import shutil
from pathlib import Path

import pytest

from outrider.viewer import overview as module
from outrider.viewer.overview import overview
from outrider.viewer.records import SCHEMA, StepFiles, step_file
from outrider.viewer.report import write_report
from outrider.viewer.run_reader import read_run
from outrider.viewer.search import RolloutIndex
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
    ("num_lines", "verdict"),
    [(0, "no evaluation is recorded"), (1, "Not known whether it learned: two evaluations")],
)
def test_runs_without_a_comparison_are_not_judged(
    good_run: Path, tmp_path: Path, num_lines: int, verdict: str
) -> None:
    run = shutil.copytree(good_run, tmp_path / "run")
    lines = (run / "evaluations.jsonl").read_text().splitlines(keepends=True)
    (run / "evaluations.jsonl").write_text("".join(lines[:num_lines]))
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


def test_refused_calls_are_not_a_share_of_executed_ones(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [rollout(1, 0, 0, 0.0, num_calls=1, num_failed_calls=3)])
    StepFiles(tmp_path / "traces").write_rows(step_file(1), [], SCHEMA)
    text = answer(page_of(tmp_path), "Which tool calls failed?")
    assert "of all rollouts: 3 failed or refused, 1 executed." in text


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
