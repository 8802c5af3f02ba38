"""The log of a whole run in a file: every line has a time and is there once, and JSON lines can be parsed."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import _QUIET, main
from tests.log_lines import texts
from tests.training.forked import ForkedOutrider
from tests.training.tool_run import write_tool_run

SHORT = ("train.num_steps=2", "evaluation.every=1", "evaluation.num_tasks=2", "rollout.max_turn_tokens=4")


def speak(folder: Path) -> None:
    """A library and a program that write to stdout."""
    from outrider.training import trainer

    assign = trainer.assign_step_advantages

    def assign_and_print(*arguments: Any) -> Any:
        print("a library's message")
        os.system("echo from a program")
        return assign(*arguments)

    setattr(trainer, "assign_step_advantages", assign_and_print)  # noqa: B010


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_run(tmp_path_factory.mktemp("log")).parent


def outputs(*arguments: str | Path, prepare: Any = None) -> tuple[str, str]:
    process = ForkedOutrider(*arguments, prepare=prepare)
    output = process.communicate()
    assert process.returncode == 0, output
    return output


def test_a_plain_log_has_a_line_per_event(folder: Path) -> None:
    run = folder / "a run"
    output, errors = outputs("train", folder / "recipe.toml", "--run", run, *SHORT)
    lines = texts(output)
    assert len(set(lines)) == len(lines)
    assert lines[0].startswith("outrider ") and f"recipe {folder / 'recipe.toml'}" in lines[0]
    for part in ("torch ", "host ", "1 thread on ", f"run {shlex.quote(str(run))}"):
        assert part in lines[0]
    steps = [line for line in lines if line.startswith("step ") and "reward" in line]
    assert [line.split()[1] for line in steps] == ["1/2", "2/2"]
    assert "(mean " in steps[1] and " of 2)" in steps[1]
    truncated = [line.partition("  truncated ")[2] for line in steps]
    assert all("by rollout.max_turn_tokens = 4" in line for line in truncated), steps
    assert sum(line.startswith("checkpoint: ") for line in lines) == 3
    assert [line.partition(":")[0] for line in lines if " on 2 " in line and "faults" in line] == [
        "before training", "step 1", "after RAPO",
    ]  # fmt: skip
    alarms = [line for line in lines if line.startswith("ALARM")]
    assert alarms and [line for line in texts(errors) if line.startswith("ALARM")] == alarms
    assert lines[-1] == f"report: {shlex.quote(str(run / 'report.html'))}"
    assert f"outrider view {shlex.quote(str(run))}" in lines[-2]
    notes = [json.loads(line)["text"] for line in (run / "notes.jsonl").read_text().splitlines()]
    assert set(alarms) <= set(notes) <= set(lines)


@pytest.mark.parametrize("command", ["train", "eval", "adapt"])
def test_json_is_all_that_stdout_has(command: str, folder: Path) -> None:
    run, options = folder / f"json-{command}", list(SHORT)
    if command != "train":
        options = ["evaluation.num_tasks=2", "algorithm.num_hybrid=0"]
    if command == "adapt":
        options += ["--adapt", "2", "--method", "reflexion"]
    output, errors = outputs(
        "eval" if command == "adapt" else command, folder / "recipe.toml", "--run", run, "--progress", "json",
        *options, prepare=speak,
    )  # fmt: skip
    records = [json.loads(line) for line in output.splitlines()]
    assert all(isinstance(record["time"], float) and record["event"] for record in records)
    assert records[0]["event"] == "start" and records[0]["run"] == str(run)
    evaluations = [record for record in records if record["event"] == "evaluation"]
    assert evaluations and all(0 <= record["score"] <= 1 for record in evaluations)
    if command == "train":
        steps = [record for record in records if record["event"] == "step"]
        assert [(record["step"], record["total"]) for record in steps] == [(1, 2), (2, 2)]
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rewards = [record["reward/mean"] for record in metrics if record["kind"] == "train"]
        assert [record["reward"] for record in steps] == rewards
        assert Path(records[-1]["report"]).is_file() and records[-1]["event"] == "end"
        alarms = [record["text"] for record in records if record["event"] == "alarm"]
        assert alarms and all(text in errors for text in alarms)
        for message in ("a library's message", "from a program"):
            assert errors.count(message) == 2 and message not in output


def one_file(folder: Path) -> None:
    os.dup2(1, 2)


def test_alarms_are_there_once_if_both_streams_are_one_file(folder: Path) -> None:
    output, errors = outputs(
        "train", folder / "recipe.toml", "--run", folder / "one", *SHORT, "train.num_steps=1",
        prepare=one_file,
    )  # fmt: skip
    alarms = [line for line in (output + errors).splitlines() if " ALARM: " in line[:30]]
    assert alarms and len(set(alarms)) == len(alarms)


def test_other_libraries_are_quiet_in_a_log_unless_the_user_sets_their_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in _QUIET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert main(["train", "no-such-recipe.toml", "--run", "r", "--progress", "plain"]) == 2
    assert {name: os.environ.get(name) for name in _QUIET} == {**_QUIET, "VLLM_LOGGING_LEVEL": "DEBUG"}
    for name in _QUIET:
        monkeypatch.delenv(name, raising=False)


def test_the_line_of_a_step_names_the_turn_limit_of_that_step(folder: Path) -> None:
    limits = ("rollout.max_turns=[1,3]", "rollout.steps_per_limit=1", "train.num_steps=2")
    output, _ = outputs("train", folder / "recipe.toml", "--run", folder / "limits", *limits)
    first, second = (line for line in texts(output) if line.startswith("step ") and "reward" in line)
    assert "by rollout.max_turns = 1" in first and "rollout.max_turns = 1" not in second
