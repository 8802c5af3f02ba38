"""benchmarks.question: runs of a written question, and a verdict by the rules that were written with it."""

import json
import math
import subprocess
from pathlib import Path

import pytest
from benchmarks.learning_factbook import Plan, factbook_jobs
from benchmarks.question import (
    main,
    make_plan,
    origin,
    outcome,
    paired_difference,
    read_question,
    seconds_table,
    sign_test,
)

from benchmarks import question as question_module
from outrider.errors import ConfigError
from outrider.evaluation.statistics import Estimate
from tests.benchmarks.test_learning_factbook import RECIPE, Runs

ROOT = Path(__file__).parents[2]
ENTRY = """\
[Q]
question = "Is RAPO better?"
expected = "It is."
written = 2026-11-26
code = "abc"
recipe = "{recipe}"
policy_tokens = 1000
num_seeds = {num_seeds}
methods = ["grpo", "{method}", "dr-grpo"]
method = "{method}"
baseline = "grpo"
levels = [0.2]
"""


def write_questions(folder: Path, *, num_seeds: int = 10, method: str = "rapo") -> Path:
    file = folder / "questions.toml"
    file.write_text(ENTRY.format(recipe=RECIPE, num_seeds=num_seeds, method=method))
    return file


def commit(folder: Path) -> str:
    """Commit the questions, and return the name of the commit as runs record it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    if (folder / "questions.toml").exists():
        git("add", "questions.toml")
    git("commit", "-q", "--allow-empty", "-m", "questions")
    return git("rev-parse", "--short=8", "HEAD")


def state_commit(out: Path, name: str) -> None:
    for run in out.glob("*-[0-9]*"):
        text = f'{{"text": "outrider 0.3.0 (commit {name}), torch"}}\n'
        (run / "notes.jsonl").write_text(text)


def play(records: Path, out: Path, runs: Runs) -> None:
    """Write what the jobs of the question would have written."""
    plan = make_plan(read_question(records, "Q"), out)
    for job in factbook_jobs(plan, [method for method in plan.methods() if method.key in ("grpo", "rapo")]):
        runs.launch([word for word in job.command()[4:] if word not in ("--progress", "plain")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A question of ten seeds whose runs of two methods are finished."""
    folder = tmp_path_factory.mktemp("question")
    play(write_questions(folder), folder / "out", Runs())
    state_commit(folder / "out", commit(folder))
    return folder


def result(folder: Path, capsys: pytest.CaptureFixture[str], records: Path | None = None) -> tuple[int, str]:
    records = records or write_questions(folder)
    status = main(["Q", "--out", str(folder / "out"), "--verdict", "--records", str(records)])
    text = capsys.readouterr().out
    assert (folder / "out" / "Q.md").read_text() == text
    return status, text


def test_the_runs_of_e1_are_those_of_the_learning_command(tmp_path: Path) -> None:
    question = read_question(ROOT / "records" / "questions.toml", "E1")
    plan = make_plan(question, tmp_path)
    assert plan == Plan(recipe=Path("recipes/demo.toml"), out=tmp_path, seeds=range(5, 20),
                        policy_tokens=12_000, overrides=("num_threads=1",))  # fmt: skip
    assert (question.methods, question.method, question.baseline) == (
        ("grpo", "arpo-threshold"), "arpo-threshold", "grpo"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("winner", "low", "high", "expected"),
    [("rapo", 0.01, 0.2, "win"), ("grpo", -0.2, -0.01, "loss"), (None, -0.08, 0.08, "tie"),
     (None, -0.081, 0.05, "undecided"), (None, -0.02, 0.3, "undecided"), ("rapo", 0.01, 0.07, "win"),
     (None, float("nan"), float("nan"), "undecided")],
)  # fmt: skip
def test_outcomes(winner: str | None, low: float, high: float, expected: str) -> None:
    assert outcome(winner, Estimate(value=0.0, low=low, high=high), method="rapo") == expected


def test_a_seed_that_never_reaches_a_level_is_later_than_one_that_does() -> None:
    fewer, more, p = sign_test([10, 10, -5, -5, 20], [11, -3, 500, -9, 20])
    assert (fewer, more, p) == (2, 1, 1.0)  # neither reaches it on the fourth seed, and the fifth is equal
    assert sign_test([1.0] * 6, [2.0] * 6) == (6, 0, 2 / 2**6)


def test_a_paired_difference_has_the_interval_and_p_of_student() -> None:
    """Expected values from ``scipy.stats.ttest_1samp``."""
    found, p = paired_difference([0.1, 0.3, -0.2, 0.4, 0.25])
    assert (found.value, found.low, found.high, p) == pytest.approx(
        (0.17, -0.11986937903429354, 0.4598693790342936, 0.17879118170584296), abs=1e-9
    )
    # all equal: the share of the 8 assignments of signs that are as unequal
    assert paired_difference([0.25, 0.25, 0.25])[1] == 0.25 and paired_difference([0.0, 0.0])[1] == 1.0
    assert paired_difference([0.1 + 0.2 - 0.3] * 3)[1] == 1.0
    assert not paired_difference([0.5])[0].has_interval
    five, _ = paired_difference([1.0, 2.0, 3.0, 4.0, 5.0])
    assert five.high - 3.0 == pytest.approx(2.7764 * math.sqrt(2.5 / 5), rel=1e-4)


def test_pairs_of_seeds_decide_if_the_question_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = write_questions(tmp_path)
    play(records, tmp_path / "out", Runs())
    records.write_text(records.read_text() + "pairs_seeds = true\n")
    state_commit(tmp_path / "out", commit(tmp_path))
    status, text = result(tmp_path, capsys, records)
    assert status == 0 and "Verdict: **win** of RAPO against GRPO." in text
    assert (
        "RAPO minus GRPO, means over seeds, paired: +" in text and "t test of the differences by seed" in text
    )
    assert "same winner" not in text and "over tasks" not in text


def test_a_question_about_returns_tests_returns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = write_questions(tmp_path)
    play(records, tmp_path / "out", Runs())
    for run in (tmp_path / "out").glob("*-[0-9]*"):  # the other way round than success
        lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
        for line in lines:
            line["mean_return"] = (5.0 if run.name.startswith("grpo") else 2.0) + int(run.name[-1]) / 10
        (run / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records.write_text(records.read_text() + 'pairs_seeds = true\nmeasure = "return"\n')
    state_commit(tmp_path / "out", commit(tmp_path))
    status, text = result(tmp_path, capsys, records)
    assert status == 0 and "Verdict: **loss** of RAPO against GRPO." in text
    assert "RAPO minus GRPO, mean returns over seeds, paired: -3.000" in text
    assert "| GRPO | 5.450 |" in text and "3: 2.300" in text
    records.write_text(records.read_text().replace("pairs_seeds = true\n", ""))
    assert main(["Q", "--out", str(tmp_path / "out"), "--verdict", "--records", str(records)]) == 2
    assert "pairs_seeds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "base", "verdict"), [(7.0, 9.0, "win"), (-9.0, 9.0, "loss"), (7.0, 7.0, "undecided")]
)
def test_a_question_about_calls_tests_calls(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    own: float,
    base: float,
    verdict: str,
) -> None:
    """The scores of these runs name RAPO as the winner; -9 is a run that never reaches the reward."""
    records = write_questions(tmp_path)
    play(records, tmp_path / "out", Runs())
    monkeypatch.setattr(
        "benchmarks.question.run_calls",
        lambda run, levels: dict.fromkeys(levels, base if run.name.startswith("grpo") else own),
    )
    text = records.read_text()
    records.write_text(f'{text}pairs_seeds = true\nmeasure = "calls"\n')
    state_commit(tmp_path / "out", commit(tmp_path))
    status, text = result(tmp_path, capsys, records)
    assert (
        status == 0
        and f"Verdict: **{verdict}** of RAPO against GRPO in tool calls to a reward of 0.2." in text
    )
    assert "Calls until 0.2: RAPO needs fewer on" in text
    records.write_text(records.read_text().replace("levels = [0.2]", "levels = [0.2, 0.3]"))
    assert main(["Q", "--out", str(tmp_path / "out"), "--verdict", "--records", str(records)]) == 2
    assert "one level" in capsys.readouterr().err


def test_ten_finished_seeds_have_a_verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = result(folder, capsys)
    assert status == 0 and "Verdict: **win** of RAPO against GRPO." in text
    assert "RAPO minus GRPO" in text and "all tests name the same winner" in text
    assert "Dr. GRPO" not in text.partition("Processor seconds")[0]
    assert "Calls until" not in text  # no run has tool calls


def test_fewer_than_ten_seeds_are_a_sketch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = result(folder, capsys, write_questions(folder, num_seeds=3))
    assert status == 1 and "Verdict" not in text
    for conclusion in ("against GRPO |", "same winner", "needs fewer"):
        assert conclusion not in text


def test_a_missing_seed_leaves_no_verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = result(folder, capsys, write_questions(folder, num_seeds=11))
    assert status == 1 and "Verdict" not in text and "same winner" not in text
    assert (
        main(["Q", "--out", str(folder / "new"), "--verdict", "--records", str(write_questions(folder))]) == 1
    )
    assert "no seed of Q is finished" in capsys.readouterr().err


def test_runs_with_other_settings_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = write_questions(folder)
    records.write_text(records.read_text().replace("policy_tokens = 1000", "policy_tokens = 2000"))
    assert main(["Q", "--out", str(folder / "out"), "--verdict", "--records", str(records)]) == 2
    assert "started with other settings (train.max_policy_tokens)" in capsys.readouterr().err


def test_seconds_are_listed_by_run_and_in_all(tmp_path: Path) -> None:
    question = read_question(write_questions(tmp_path, num_seeds=1), "Q")
    plan = make_plan(question, tmp_path)
    by_key = {method.key: method for method in plan.methods()}
    events = [{"job": f"factbook/{run}", "kind": "k", "event": event, "time": 0.0, "seconds": 100.0}
              for run, event in (("sft-0", "done"), ("grpo-0", "stopped"), ("grpo-0", "done"))]  # fmt: skip
    journal = tmp_path / "jobs.jsonl"
    journal.write_text("".join(json.dumps(event | {"cpu_seconds": 90.0}) + "\n" for event in events))
    text = seconds_table(question, plan, by_key)
    assert (
        "Processor seconds, 270 in all" in text
        and "| 0 | 90 | 180 |" in text
        and "| all | 90 | 180 |" in text
    )
    journal.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert "Wall-clock seconds (some have no record of processor time), 300 in all" in seconds_table(
        question, plan, by_key
    )


def test_only_runs_of_one_clean_commit_with_the_question_have_a_verdict(tmp_path: Path) -> None:
    before = commit(tmp_path)
    records = write_questions(tmp_path, num_seeds=1)
    after = commit(tmp_path)
    plan = make_plan(read_question(records, "Q"), tmp_path)
    pair = [method for method in plan.methods() if method.key in ("grpo", "rapo")]
    for key in ("sft", "grpo", "rapo"):
        (tmp_path / f"{key}-0").mkdir()

    def problems(name: str, *, cold_start: str | None = None) -> str:
        state_commit(tmp_path, name)
        if cold_start:
            state = (tmp_path / "sft-0" / "notes.jsonl").read_text().replace(name, cold_start)
            (tmp_path / "sft-0" / "notes.jsonl").write_text(state)
        return "\n".join(origin(plan, [0], pair, name="Q", records=records)[1])

    assert origin(plan, [0], pair, name="Q", records=records)[0] == ["unknown"]
    assert problems(after) == ""
    assert f"of commit {before} does not have this question" in problems(before)
    assert "changes that were not committed" in problems(f"{after}-dirty")
    assert "of 2 commits" in problems(after, cold_start=before)
    assert "does not state its commit" in problems("")
    records.write_text(records.read_text().replace("It is.", "It is not."))
    assert "does not have this question as it is now" in problems(after)


def test_a_run_that_ended_before_its_budget_is_not_finished(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = folder / "out" / "rapo-9" / "metrics.jsonl"
    lines = metrics.read_text()
    try:
        metrics.write_text("\n".join(lines.splitlines()[:-1]) + "\n")  # its last step is not recorded
        status, text = result(folder, capsys)
    finally:
        metrics.write_text(lines)
    assert status == 1 and "So far, 9 of 10 seeds" in text


def test_runs_from_changed_code_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(question_module, "read_commit", lambda root: "abcdef12-dirty")
    arguments = [
        "Q",
        "--out",
        str(tmp_path / "out"),
        "--records",
        str(write_questions(tmp_path, num_seeds=1)),
    ]
    assert main(arguments) == 2
    assert "changes that are not committed" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*-0"))
    assert main([*arguments, "--status"]) == 0 and "waiting" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [("num_seeds", "seeds", "Q.num_seeds: Field required"),
     ("levels", 'overrides = ["seed=3"]\nlevels', "seed=3 is set"),
     ("written", "written =", "cannot be read"),
     ('"rapo"\nb', '"grpo"\nb', "must be two of methods"), ("[Q]", "[R]", "has no question Q; it has R")],
)  # fmt: skip
def test_malformed_questions_are_refused(tmp_path: Path, before: str, after: str, message: str) -> None:
    records = write_questions(tmp_path)
    text = records.read_text()
    assert before in text
    records.write_text(text.replace(before, after))
    with pytest.raises(ConfigError, match=message):
        read_question(records, "Q")


def test_without_a_cold_start_the_methods_start_from_the_model(tmp_path: Path) -> None:
    plan = Plan(recipe=RECIPE, out=tmp_path, seeds=range(1), policy_tokens=100,
                overrides=("num_threads=1", "cold_start.num_examples=0"))  # fmt: skip
    [job] = factbook_jobs(plan, [method for method in plan.methods() if method.key == "grpo"])
    assert job.name == "factbook/grpo-0" and job.after == ()
    assert not any("initial_checkpoint" in word for word in job.command())
    assert "train.max_policy_tokens=100" in job.command()
