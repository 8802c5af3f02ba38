"""F3: an evaluation keeps the replies, and they are graded again without the model that wrote them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from outrider.cli import main
from outrider.evaluation.results import read_results
from tests.chat_server import Answer, Asked, chat_server, completion
from tests.evaluation.panel_files import (
    IMPATIENT,
    MODELS,
    evaluate,
    question_in,
    results,
    summary,
    write_rows,
)
from tests.training.tool_run import write_tool_run

REPLIES = {
    "q0?": "So \\boxed{Paris.}",
    "q1?": "So \\boxed{Rome}",
    "q2?": "<think>hm</think> \\boxed{the Oslo}",
    "q3?": "I pass",
    "q4?": "\\boxed{Graz in Austria}",
}
ANSWERS = ("Paris", "Rome", "Oslo", "Bern", "Graz")


def agent(asked: Asked) -> Answer:
    return MODELS if asked.path.endswith("/models") else completion(REPLIES[question_in(asked)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five questions to an endpoint that is gone by now, with a key in its address."""
    rows = [{"question": f"q{n}?", "answer": answer} for n, answer in enumerate(ANSWERS)]
    file = write_rows(tmp_path / "q.jsonl", rows)
    with chat_server(agent) as server:
        address = server.url.replace("http://", "http://me:secret@")
        asked = (
            "--tasks",
            str(file),
            "--endpoint",
            address,
            "--endpoint-model",
            "agent",
            "metric=em",
            *IMPATIENT,
        )
        assert evaluate(tmp_path / "run", *asked) == 0
    return tmp_path / "run"


def regrade(run: Path, *more: str) -> int:
    return main(["eval", "--regrade", str(run), *more])


def content(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.iterdir()}


def found(run: Path, number: int = 1) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run / f"regraded-{number}.json").read_text())
    return read


def test_f3_the_reply_is_in_the_results_and_no_secret_in_the_folder(run: Path) -> None:
    assert {line["task_key"]: line["turns"] for line in results(run)} == {
        f"q-{number}": [reply] for number, reply in enumerate(REPLIES.values())
    }
    assert all(line["token_ids"] is None for line in results(run))  # a server has none
    assert all(b"secret" not in data for data in content(run).values())
    _, read = read_results(run / "results.jsonl")
    assert read[0].turns == (REPLIES["q0?"],) and summary(run)["scores"]["exact match"]["value"] == 0.6


def test_f3_present_graders_change_no_verdict_that_they_made(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run)
    assert regrade(run) == 0
    assert "0 of 5 verdicts changed" in capsys.readouterr().out
    assert found(run)["changed"] == [] and found(run)["summary"] == found(run)["before"] == summary(run)
    assert {name: data for name, data in content(run).items() if name != "regraded-1.json"} == before


def test_f3_other_rules_are_told_with_task_old_and_new_and_the_old_summary_stays(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run)
    capsys.readouterr()
    assert regrade(run, "rules=arpo-eval") == 0
    told = capsys.readouterr().out
    assert "1 of 5 verdicts changed\n  q-0, sample 0: was right, 'Paris.'; is wrong, 'Paris.'" in told
    (row,) = [line for line in told.splitlines() if "exact match" in line]
    assert "rules: punctuation stays" in told
    # F10: in per cent, as in the table of the evaluation itself
    assert re.search(r"60\.0 % \[\d+\.\d, \d+\.\d\].*40\.0 % \[\d+\.\d, \d+\.\d\]", row)
    (changed,) = found(run)["changed"]
    assert (changed["task_key"], changed["old"]["success"], changed["new"]["success"]) == ("q-0", True, False)
    assert regrade(run, "--rules", "squad") == 0
    assert (
        found(run)["summary"]["identity"]["rules"] == "arpo-eval"
        and found(run, 2)["summary"]["identity"]["rules"] == "squad"
    )
    assert {name: data for name, data in content(run).items() if not name.startswith("regraded")} == before


def test_f3_graders_that_changed_since_are_the_ones_that_grade(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from outrider.evaluation import grading as extraction

    present = replace(
        extraction.VARIANTS["default"], extract=lambda output: "Bern" if output == "I pass" else ""
    )
    monkeypatch.setattr(extraction, "VARIANTS", {**extraction.VARIANTS, "default": present})
    assert regrade(run) == 0
    told = capsys.readouterr().out
    assert "4 of 5 verdicts changed" in told and "q-3, sample 0: was wrong, ''; is right, 'Bern'" in told


def test_f3_a_judge_grades_the_replies_of_an_evaluation_without_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked_for: list[str] = []

    def judge(asked: Asked) -> Answer:
        if asked.path.endswith("/models"):
            return MODELS
        asked_for.append(str((asked.body or {})["messages"][-1]["content"]))
        return completion("Fine.\n<judgment>Correct</judgment>")

    with chat_server(judge) as server:
        judged = (
            "--judge",
            server.url,
            "--judge-model",
            "judge",
            "metric=judge",
            "judge.endpoint.backoff_s=0",
        )
        assert regrade(run, *judged) == 0
    assert found(run)["summary"]["identity"]["judge"]["model"] == "judge" and len(asked_for) > 0
    told = capsys.readouterr().out
    assert "correct by the judge" in told and "q-4, sample 0: was wrong, 'Graz in Austria'; is right" in told
    assert (
        regrade(
            run,
            *judged[:3],
            "judge",
            "metric=judge",
            "judge.endpoint.max_retries=0",
            "judge.endpoint.backoff_s=0",
        )
        == 1
    )
    assert not (run / "regraded-2.json").exists()  # the judge is gone: nothing is written


def test_f3_old_results_without_replies_are_one_clear_line(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, *lines = (run / "results.jsonl").read_text().splitlines()
    old = [
        {key: value for key, value in json.loads(line).items() if key not in ("turns", "token_ids")}
        for line in lines
    ]
    (run / "results.jsonl").write_text("".join(f"{line}\n" for line in [head, *map(json.dumps, old)]))
    before = content(run)
    assert regrade(run) == 2
    told = capsys.readouterr().err
    assert "5 of its 5 answers were kept without the reply" in told and told.count("\n") == 1
    assert content(run) == before


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("temperature=1",), "temperature decided what was played; grading again takes these: judge, "),
        (("--seed", "3"), "seed decided what was played"),
        (("--run", "x"), "--regrade RUN goes with neither"),
        (("recipe.toml",), "--regrade RUN goes with neither"),
    ],
)
def test_f3_what_decided_the_play_is_refused(
    more: tuple[str, ...], says: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert regrade(run, *more) == 2
    assert says in capsys.readouterr().err and not (run / "regraded-1.json").exists()


def test_f3_other_tasks_are_refused_and_moved_ones_are_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run.parent / "q.jsonl"
    moved = run.parent / "moved" / "q.jsonl"
    moved.parent.mkdir()
    shutil.move(file, moved)
    assert regrade(run) == 1
    assert regrade(run, "--tasks", str(moved)) == 0
    capsys.readouterr()
    moved.write_text(moved.read_text().replace("Paris", "Lyon"))
    assert regrade(run, "--tasks", str(moved)) == 2
    assert "are not those that" in capsys.readouterr().err
    assert regrade(run.parent) == 2
    assert "holds no evaluation of tasks" in capsys.readouterr().err


def test_f3_a_model_s_replies_have_their_ids_and_are_graded_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_tool_run(tmp_path / "data").parent
    corpus = (
        "--tools",
        "on",
        f"environment.corpus={root / 'corpus.jsonl'}",
        'environment.tools=["search"]',
        "environment.prompt=none",
    )
    limits = (
        "--temperature",
        "1",
        "--samples",
        "3",
        "--seed",
        "5",
        "rollout.max_turn_tokens=12",
        "rollout.max_response_tokens=200",
        "num_threads=1",
        "model.precision=float32",
    )
    asked = ("--model", str(root / "model"), "--tasks", f"hotpotqa={root / 'tasks.jsonl'}", *corpus, *limits)
    assert evaluate(tmp_path / "run", *asked) == 0
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    lines = results(tmp_path / "run")
    for line in lines:
        assert (
            len(line["turns"]) == len(line["token_ids"])
            and sum(map(len, line["token_ids"])) == line["num_tokens"]
        )
        for turn, ids in zip(line["turns"], line["token_ids"], strict=True):
            assert turn in tokenizer.decode(ids) and turn
    assert any(len(line["turns"]) > 1 for line in lines)
    shutil.rmtree(root / "model")
    (root / "corpus.jsonl").unlink()
    capsys.readouterr()
    assert regrade(tmp_path / "run") == 0
    assert "0 of 18 verdicts changed" in capsys.readouterr().out
    assert found(tmp_path / "run")["summary"] == summary(tmp_path / "run")


def test_f3_the_record_of_an_environment_is_not_graded_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = run / "evaluation.toml"
    text = settings.read_text()
    assert f'tasks = "{run.parent / "q.jsonl"}"' in text
    text = text.replace(f'tasks = "{run.parent / "q.jsonl"}"', 'tasks = "factbook"').replace(
        'metric = "em"', ""
    )
    settings.write_text(text)
    assert regrade(run) == 2
    assert "factbook was scored by its environment while it was played" in capsys.readouterr().err
