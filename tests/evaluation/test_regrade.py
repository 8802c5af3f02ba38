"""Grading stored replies again, without the model that wrote them."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from outrider.cli import main
from outrider.evaluation.results import read_results
from tests.chat_server import Answer, Asked, chat_server, completion
from tests.evaluation.eval_tasks import (
    evaluate,
    play,
    question_in,
    results,
    summary,
    with_models,
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
    return completion(REPLIES[question_in(asked)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five questions to an endpoint that is gone by now, with a key in its address."""
    rows = [{"question": f"q{n}?", "answer": answer} for n, answer in enumerate(ANSWERS)]
    file = write_rows(tmp_path / "q.jsonl", rows)
    with chat_server(with_models(agent)) as server:
        address = server.url.replace("http://", "http://me:secret@")
        assert play(server, str(file), tmp_path / "run", "metric=em", "--endpoint", address) == 0
    return tmp_path / "run"


def regrade(run: Path, *more: str) -> int:
    return main(["eval", "--regrade", str(run), *more])


def content(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.iterdir()}


def found(run: Path, number: int = 1) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run / f"regraded-{number}.json").read_text())
    return read


def test_results_have_the_replies_and_no_secret(run: Path) -> None:
    assert {line["task_key"]: line["turns"] for line in results(run)} == {
        f"q-{number}": [reply] for number, reply in enumerate(REPLIES.values())
    }
    assert all(line["token_ids"] is None for line in results(run))  # a server has none
    assert all(b"secret" not in data for data in content(run).values())
    _, read = read_results(run / "results.jsonl")
    assert read[0].turns == (REPLIES["q0?"],) and summary(run)["scores"]["exact match"]["value"] == 0.6


def test_the_same_graders_change_no_verdict(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(run)
    assert regrade(run) == 0
    assert "0 of 5 verdicts changed" in capsys.readouterr().out
    assert found(run)["changed"] == [] and found(run)["summary"] == found(run)["before"] == summary(run)
    assert {name: data for name, data in content(run).items() if name != "regraded-1.json"} == before


def test_other_rules_print_changes_and_keep_the_old_summary(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run)
    capsys.readouterr()
    assert regrade(run, "rules=arpo-eval") == 0
    printed = capsys.readouterr().out
    assert "1 of 5 verdicts changed\n  q-0, sample 0: was right, 'Paris.'; is wrong, 'Paris.'" in printed
    (row,) = [line for line in printed.splitlines() if "exact match" in line]
    assert "rules: punctuation stays" in printed
    # in per cent, as in the table of the evaluation itself
    assert re.search(r"60\.0 % \[\d+\.\d, \d+\.\d\].*40\.0 % \[\d+\.\d, \d+\.\d\]", row)
    (changed,) = found(run)["changed"]
    assert (changed["task_key"], changed["old"]["success"], changed["new"]["success"]) == ("q-0", True, False)
    assert regrade(run, "--rules", "squad") == 0
    assert (
        found(run)["summary"]["identity"]["rules"] == "arpo-eval"
        and found(run, 2)["summary"]["identity"]["rules"] == "squad"
    )
    assert {name: data for name, data in content(run).items() if not name.startswith("regraded")} == before


def test_changed_graders_are_used(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.evaluation import grading as extraction

    present = replace(
        extraction.VARIANTS["default"], extract=lambda output: "Bern" if output == "I pass" else ""
    )
    monkeypatch.setattr(extraction, "VARIANTS", {**extraction.VARIANTS, "default": present})
    assert regrade(run) == 0
    printed = capsys.readouterr().out
    assert (
        "4 of 5 verdicts changed" in printed and "q-3, sample 0: was wrong, ''; is right, 'Bern'" in printed
    )


def test_a_judge_can_grade_an_evaluation_without_judge(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked_for: list[str] = []

    def judge(asked: Asked) -> Answer:
        asked_for.append(str((asked.body or {})["messages"][-1]["content"]))
        return completion("Fine.\n<judgment>Correct</judgment>")

    options = ("--judge-model", "judge", "metric=judge", "judge.endpoint.backoff_s=0")
    with chat_server(with_models(judge)) as server:
        judged = ("--judge", server.url, *options)
        assert regrade(run, *judged) == 0
    assert found(run)["summary"]["identity"]["judge"]["model"] == "judge" and len(asked_for) > 0
    printed = capsys.readouterr().out
    assert (
        "correct by the judge" in printed
        and "q-4, sample 0: was wrong, 'Graz in Austria'; is right" in printed
    )
    assert regrade(run, *judged, "judge.endpoint.max_retries=0") == 1
    assert not (run / "regraded-2.json").exists()  # the judge is gone: nothing is written


def test_results_without_replies_are_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, *lines = (run / "results.jsonl").read_text().splitlines()
    old = [
        {key: value for key, value in json.loads(line).items() if key not in ("turns", "token_ids")}
        for line in lines
    ]
    (run / "results.jsonl").write_text("".join(f"{line}\n" for line in [head, *map(json.dumps, old)]))
    before = content(run)
    assert regrade(run) == 2
    printed = capsys.readouterr().err
    assert "5 of its 5 answers were kept without the reply" in printed and printed.count("\n") == 1
    assert content(run) == before


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("temperature=1",), "temperature affects the rollouts; grading again accepts: judge, "),
        (("--seed", "3"), "seed affects the rollouts"),
        (("--run", "x"), "--regrade RUN cannot be combined"),
        (("recipe.toml",), "--regrade RUN cannot be combined"),
    ],
)
def test_settings_of_the_rollouts_cannot_change(
    more: tuple[str, ...], says: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert regrade(run, *more) == 2
    assert says in capsys.readouterr().err and not (run / "regraded-1.json").exists()


def test_other_tasks_are_an_error_and_moved_files_can_be_named(
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
    assert "has no evaluation of tasks" in capsys.readouterr().err


def test_replies_of_a_model_have_token_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_tool_run(tmp_path / "data").parent
    corpus = (
        "--tools", "on", f"environment.corpus={root / 'corpus.jsonl'}", 'environment.tools=["search"]',
        "environment.prompt=none",
    )  # fmt: skip
    limits = (
        "--temperature", "1", "--samples", "3", "--seed", "5", "rollout.max_turn_tokens=12",
        "rollout.max_response_tokens=200", "num_threads=1", "model.precision=float32",
    )  # fmt: skip
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


def test_scores_of_an_environment_cannot_be_graded_again(
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
    assert "factbook was scored by its environment" in capsys.readouterr().err
