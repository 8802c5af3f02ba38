"""Evaluations as logs of inspect-ai: what is on disk, and what the package's own reader finds in the file."""

import importlib.util
import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import outrider
from outrider.cli import main
from outrider.errors import ConfigError, DataError
from outrider.evaluation.inspect_log import (
    LoggedEvaluation,
    LoggedMessage,
    LoggedRollout,
    load_run_evaluation,
    load_tasks_evaluation,
    node_messages,
    to_eval_log,
    write_log,
)
from outrider.evaluation.results import read_results, write_results
from outrider.types import Outcome
from outrider.viewer.records import TraceRow
from tests.chat_server import Answer, Asked, chat_server, completion
from tests.evaluation.eval_tasks import IMPATIENT, MODELS, evaluate, question_in, write_rows
from tests.rollout.test_native_calls import call, play
from tests.training.short_runs import begin
from tests.training.tool_run import write_tool_run

EMPTY = LoggedEvaluation(
    task="t",
    model="m",
    created=datetime(2026, 1, 1, tzinfo=UTC),
    panel_hash="h",
    rollouts=(),
    summary={},
    metadata={},
)
needs_inspect = pytest.mark.skipif(
    importlib.util.find_spec("inspect_ai") is None, reason="needs the extra inspect"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    return begin(write_tool_run(root), root / "run", "evaluation.num_tasks=3", "evaluation.num_samples=2")


@pytest.fixture(scope="module")
def panel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three questions, one of which the server gives up on."""
    folder = tmp_path_factory.mktemp("panel")

    def agent(asked: Asked) -> Answer:
        if asked.path.endswith("/models"):
            return MODELS
        question = question_in(asked)
        return (
            Answer(status=500) if question.startswith("q2?") else completion(f"So \\boxed{{{question[1]}}}")
        )

    rows = [{"question": f"q{n}?", "answer": "0"} for n in range(3)]
    with chat_server(agent) as server:
        asked = ("--tasks", str(write_rows(folder / "q.jsonl", rows)), "--endpoint", server.url)
        more = ("--endpoint-model", "agent", "--samples", "2", "--temperature", "1", "metric=em", *IMPATIENT)
        assert evaluate(folder / "run", *asked, *more) == 0
    return folder / "run"


def test_a_run_s_evaluation_has_every_rollout_with_its_messages_and_scores(run: Path) -> None:
    found = load_run_evaluation(run)
    rows = outrider.load_run(run).evaluation_rollouts(1).to_pylist()
    assert len(found.rollouts) == len(rows) > 0
    for one, row in zip(found.rollouts, rows, strict=True):
        assert (one.task_key, one.outcome.value) == (row["task_key"], row["outcome"])
        assert one.scores == {"return": row["episode_return"], "success": float(row["success"])}
        assert one.num_tokens == row["num_tokens"] and one.target
        assert [said.role for said in one.prompt] == ["user"]
        assert sum(said.role == "assistant" for said in one.messages) == row["num_turns"]
        assert sum(len(said.tools) for said in one.messages) == row["num_calls"]
    assert len({(one.task_key, one.epoch) for one in found.rollouts}) == len(rows)
    config = run / "config.toml"
    text = config.read_text()
    config.write_text(text, encoding="utf-8-sig")
    assert load_run_evaluation(run) == found
    config.write_text("seed = = 1")
    with pytest.raises(DataError, match=r"config\.toml cannot be read"):
        load_run_evaluation(run)
    config.write_text(text)
    line = outrider.load_run(run).evaluations().to_pylist()[1]
    assert found.panel_hash == line["panel_hash"] and found.summary["mean"] == line["score.value"]
    assert found.metadata["recipe"] == (run / "config.toml").read_text()
    assert load_run_evaluation(run, 0).metadata["label"] == "before training"
    with pytest.raises(ConfigError, match="has evaluations 0 to 1, not 2"):
        load_run_evaluation(run, 2)


def test_missing_tasks_leave_targets_empty_with_a_note(run: Path) -> None:
    tasks = run.parent / "tasks.jsonl"
    moved = tasks.rename(tasks.with_suffix(".moved"))
    try:
        found = load_run_evaluation(run)
    finally:
        moved.rename(tasks)
    assert {one.target for one in found.rollouts} == {()} and "without targets: " in found.notes[0]


def test_an_evaluation_of_tasks_has_every_sample_with_named_metrics_and_faults(panel: Path) -> None:
    found = load_tasks_evaluation(panel)
    _, results = read_results(panel / "results.jsonl")
    assert len(found.rollouts) == len(results) == 6
    for one, result in zip(found.rollouts, results, strict=True):
        assert (one.task_key, one.epoch, one.outcome) == (result.task_key, result.sample + 1, result.outcome)
        if result.outcome.is_fault:
            assert not one.scores and one.detail == result.detail
            continue
        assert one.scores == {
            **result.metrics, "score": result.score, "success": float(bool(result.success))
        }  # fmt: skip
        assert [said.text for said in one.messages[1:]] == list(result.turns or ())
        assert one.prompt[0].text.startswith("q") and one.target == ("0",)
    assert sum(one.outcome.is_fault for one in found.rollouts) == 2


def test_the_mean_is_that_of_the_evaluation_s_own_report(panel: Path, tmp_path: Path) -> None:
    """A mean over tasks, also where a fault has left one of them fewer samples, with its interval, and
    without samples of an earlier call that asked for more.
    """
    reported = json.loads((panel / "summary.json").read_text())["scores"]["exact match, avg@2"]
    assert load_tasks_evaluation(panel).summary == {
        "mean": reported["value"], "ci_low": reported["ci_low"], "ci_high": reported["ci_high"]
    }  # fmt: skip
    folder = Path(shutil.copytree(panel, tmp_path / "run"))
    identity, results = read_results(panel / "results.jsonl")
    by_key = {(one.task_key, one.sample): one for one in results}
    lost, *_ = [one for one in results if one.score == 1.0]
    by_key[lost.task_key, lost.sample] = replace(lost, outcome=Outcome.ENGINE_FAULT, score=None, success=None)
    beyond = replace(lost, sample=2)
    (folder / "results.jsonl").unlink()
    write_results(folder / "results.jsonl", identity, [*by_key.values(), beyond])
    found = load_tasks_evaluation(folder)
    assert found.summary["mean"] == 0.5 and len(found.rollouts) == 6 and not found.notes
    (folder / "results.jsonl").unlink()
    write_results(folder / "results.jsonl", identity, results[:4])
    assert "4 of 6 samples are on file" in load_tasks_evaluation(folder).notes[0]


def native_turns() -> list[LoggedMessage]:
    """An episode of native calls: two in a turn of which one has no tool, then an unread one, then words."""
    wrong = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    turns = [
        f"<think>\na\n</think>\n\nI look.{wrong}{call('x')}{call('y')}",
        "<tool_call>{</tool_call>",
        "\\boxed{Paris}",
    ]
    trace, *_ = play("qwen3", turns)
    [(leaf, path)] = trace.rollouts()
    assert leaf.outcome is Outcome.FINISHED
    rows = [
        TraceRow(
            step=0, task_key="t", trace_id="t", node_id=node.node_id, parent_id=-1, rollout=0,
            origin=node.origin, text=node.message.content, role=node.message.role,
            metadata=json.dumps(node.metadata),
        )
        for node in path
    ]  # fmt: skip
    return [said for row in rows for said in node_messages(row, "hermes")]


def test_native_calls_are_matched_with_their_results() -> None:
    _, first, one, two, complaint, second, output, last = native_turns()
    assert (first.text, first.thinking) == ("I look.", "a")
    assert [(each.name, each.arguments) for each in first.calls] == [
        ("find", {}), ("search", {"input": "x"}), ("search", {"input": "y"})
    ]  # fmt: skip
    assert [(each.text, each.call_id) for each in (one, two)] == [
        ("x: Paris", first.calls[1].call_id), ("y: Paris", first.calls[2].call_id)
    ]  # fmt: skip
    assert "There is no tool 'find'" in complaint.text and complaint.role == output.role == "tool"
    assert not second.calls and len(second.problems) == 1 and "JSON" in output.text
    assert (last.role, last.text) == ("assistant", "\\boxed{Paris}")


@needs_inspect
def test_native_calls_are_inspect_s(tmp_path: Path) -> None:
    from inspect_ai.log import read_eval_log

    said = tuple(native_turns())
    one = LoggedRollout(task_key="t", epoch=1, prompt=said[:1], messages=said, outcome=Outcome.FINISHED)
    wanted = replace(EMPTY, rollouts=(one,))
    write_log(wanted, tmp_path / "one.eval")
    log = read_eval_log(str(tmp_path / "one.eval"))
    assert_same(log, wanted)
    [sample] = log.samples or ()
    _, first, *results, second, output, _ = sample.messages
    calls = first.tool_calls
    assert [call.function for call in calls] == ["find", "search", "search"]
    assert [one.tool_call_id for one in results] == [calls[1].id, calls[2].id, calls[0].id]
    assert [one.function for one in results] == ["search", "search", "find"]
    [unread] = second.tool_calls
    assert unread.parse_error and output.tool_call_id == unread.id
    assert [one.type for one in first.content] == ["reasoning", "text"]


@needs_inspect
@pytest.mark.parametrize("knows_tasks", [True, False])
def test_an_evaluation_that_has_not_ended_is_no_success(
    panel: Path, tmp_path: Path, knows_tasks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(panel, tmp_path / "run"))
    identity, results = read_results(folder / "results.jsonl")
    assert to_eval_log(load_tasks_evaluation(folder)).status == "success"
    if not knows_tasks:
        monkeypatch.setattr("outrider.evaluation.inspect_log._tasks", lambda *given: ({}, []))
        assert to_eval_log(load_tasks_evaluation(folder)).status == "success"
    for name in ("results.jsonl", "summary.json"):
        (folder / name).unlink()
    write_results(folder / "results.jsonl", identity, results[:4])
    log = to_eval_log(load_tasks_evaluation(folder))
    assert (log.status, log.stats.completed_at) == ("started", "")
    assert log.results is not None and log.results.total_samples == (6 if knows_tasks else 4)


@needs_inspect
@pytest.mark.parametrize("kind", ["run", "panel"])
def test_inspect_reads_the_same_numbers_back(
    kind: str, run: Path, panel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from inspect_ai.log import read_eval_log

    folder = run if kind == "run" else panel
    wanted = load_run_evaluation(run) if kind == "run" else load_tasks_evaluation(panel)
    assert main(["inspect-log", str(folder), "--out", str(tmp_path / "one.eval")]) == 0
    assert f"one.eval: {len(wanted.rollouts)} rollouts" in capsys.readouterr().out
    assert_same(read_eval_log(str(tmp_path / "one.eval")), wanted)
    assert main(["inspect-log", str(folder), "--out", str(tmp_path / "one.eval")]) == 2
    assert "exists already" in capsys.readouterr().err


def assert_same(log: Any, wanted: LoggedEvaluation) -> None:
    samples = {(one.id, one.epoch): one for one in log.samples or ()}
    assert len(log.samples or ()) == len(samples) == len(wanted.rollouts) == log.results.total_samples
    assert (log.eval.task, log.eval.model) == (wanted.task, wanted.model)
    assert log.eval.metadata["panel_hash"] == wanted.panel_hash
    for one in wanted.rollouts:
        sample = samples[one.task_key, one.epoch]
        assert {name: score.value for name, score in (sample.scores or {}).items()} == one.scores
        assert [message.text for message in sample.messages] == [said.text for said in one.messages]
        assert (sample.error is not None) is one.outcome.is_fault
        assert sample.metadata["outcome"] == one.outcome.value
        usage = sample.model_usage.get(wanted.model)
        assert (None if usage is None else usage.output_tokens) == one.num_tokens
    read = {score.name: score.metrics for score in log.results.scores}
    for name, value in wanted.summary.items():
        assert read["evaluation"][name].value == value


ROLLOUTS = st.lists(
    st.builds(
        dict,
        outcome=st.sampled_from(Outcome),
        value=st.floats(-1e6, 1e6),
        texts=st.lists(st.text(max_size=20), max_size=3),
        num_tokens=st.none() | st.integers(0, 10_000),
    ),
    max_size=6,
)


@needs_inspect
@given(drawn=ROLLOUTS)
def test_any_evaluation_comes_back_as_it_was(drawn: list[dict[str, Any]]) -> None:
    rollouts = tuple(
        LoggedRollout(
            task_key=f"task {number // 2}",
            epoch=number % 2 + 1,
            prompt=(),
            messages=tuple(LoggedMessage(role="assistant", text=text, tools=("a",)) for text in one["texts"]),
            outcome=one["outcome"],
            scores={} if one["outcome"].is_fault else {"return": one["value"]},
            num_tokens=one["num_tokens"],
        )
        for number, one in enumerate(drawn)
    )
    wanted = replace(EMPTY, rollouts=rollouts, summary={"mean": 0.25})
    assert_same(to_eval_log(wanted), wanted)


@needs_inspect
def test_a_name_that_no_reader_knows_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end with \.eval"):
        write_log(load_run_evaluation(run), tmp_path / "one.json")
    with pytest.raises(ConfigError, match="there is no folder"):
        write_log(load_run_evaluation(run), tmp_path / "gone" / "one.eval")


@pytest.mark.skipif(importlib.util.find_spec("inspect_ai") is not None, reason="the package is installed")
def test_a_missing_package_is_one_line_with_the_extra(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect-log", str(run), "--out", str(tmp_path / "one.eval")]) == 1
    assert "pip install 'outrider[inspect]'" in capsys.readouterr().err
