"""Questions of a user have no expert: settings that need one are refused at set-up, and a file of
trajectories replaces it.
"""

import json
import shutil
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.config import load_settings
from outrider.environments.tool_qa.datasets import DatasetConfig, load_tasks
from outrider.environments.tool_qa.environment import ToolsConfig
from outrider.errors import CheckpointError, ConfigError, DataError
from outrider.memory.chat_files import import_trajectories
from outrider.memory.embedders import HashEmbedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.training.experts import check_buffer_calls, read_demonstrations
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings, require_experts
from outrider.training.setup import run_training
from outrider.types import Task
from tests.training.tool_run import write_demonstrations, write_tool_run


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tool_run(tmp_path_factory.mktemp("own"))
    write_demonstrations(path.parent / "shown.jsonl")
    return path


@pytest.mark.parametrize(
    ("overrides", "ways_out"),
    [
        (["cold_start.num_examples=4"], ["cold_start.demonstrations", "cold_start.num_examples=0"]),
        (
            ["buffer.path=none"],
            [
                "outrider buffer import FILE",
                "buffer build RECIPE --endpoint",
                "buffer.path=",
                "algorithm.num_hybrid=0",
            ],
        ),
    ],
)
def test_what_needs_an_expert_is_refused_with_the_way_out(
    overrides: list[str],
    ways_out: list[str],
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", str(recipe), "--run", str(tmp_path / "run"), *overrides]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "have no expert" in line and all(way in line for way in ways_out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["buffer.path=none", "algorithm.num_hybrid=0"],
        ["buffer.path=none", "train.num_steps=0"],
        ["buffer.path=none", 'algorithm={type="grpo"}'],
        ["cold_start.num_examples=4", "cold_start.demonstrations=any.jsonl"],
        ["cold_start.demonstrations=any.jsonl"],
        ["buffer.path=none", "cold_start.num_examples=4", 'environment={type="factbook"}'],
    ],
)
def test_what_needs_no_expert_is_not_refused(overrides: list[str], recipe: Path) -> None:
    require_experts(load_settings(RunSettings, file=recipe, overrides=overrides))


def test_a_run_built_without_the_command_line_is_refused_too(recipe: Path, tmp_path: Path) -> None:
    settings = load_settings(RunSettings, file=recipe, overrides=["cold_start.num_examples=4"])
    with pytest.raises(ConfigError, match="have no expert"):
        run_training(
            (RunDirectory.create(tmp_path / "run", settings), settings),
            progress="none",
            on_start=lambda stop: None,
        )
    assert list(tmp_path.iterdir()) == []


def test_a_cold_start_imitates_a_file_of_trajectories(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = tmp_path / "shown.jsonl"
    lines = (recipe.parent / "shown.jsonl").read_text().splitlines()
    # the first task has none, the second one is shown a wrong answer
    records = [json.loads(line) for line in lines[1:]]
    records[0]["messages"][-1]["content"] = "<answer>nowhere</answer>"
    records[1]["messages"][1]["content"] = "<search> </search>"  # refused, and the next search succeeds
    shown.write_text("".join(json.dumps(record) + "\n" for record in records))
    overrides = [
        "cold_start.num_examples=9", "cold_start.batch_size=2", f"cold_start.demonstrations={shown}",
        "train.num_steps=1", "evaluation.at_start=false", "evaluation.num_tasks=1", "evaluation.every=0",
    ]  # fmt: skip
    run = tmp_path / "run"
    monkeypatch.setenv("HOME", str(tmp_path))  # a shell leaves the ~ in --run=~/run
    assert main(["train", str(recipe), "--run=~/run", "--progress", "plain", *overrides]) == 0
    output = capsys.readouterr().out
    assert "cold start: there are demonstrations for 5 of cold_start.num_examples = 9" in output
    assert "cold start: 4 of 5 expert rollouts solved their task" in output
    assert "in 1 of these rollouts a tool call failed, and they are imitated anyway" in output
    # its record claims the reward of a right answer
    claims = [line for line in output.splitlines() if "replay to another return" in line]
    assert len(claims) == 1 and "cold start: 1 of 5 demonstrations" in claims[0]
    assert "(tasks-1: 1 claimed, 0 replayed)" in claims[0]
    assert "cold start: expert rollouts: start, 5 to do" in output
    assert "cold start: fine-tuned, optimizer steps: 2, loss " in output
    # Not "evaluate after", and not "evaluate of FOLDER"
    assert "evaluation after cold start: start" in output
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [one["sft/num_examples"] for one in written if one["kind"] == "sft"] == [2.0, 2.0]
    shutil.rmtree(run / "checkpoints" / "step-000001")  # what is finished is not looked at
    shown.write_text(shown.read_text() + "\n")
    with pytest.raises(CheckpointError, match=r"not what this run began with: cold_start\.demonstrations"):
        run_training(RunDirectory.open(run), progress="none", on_start=lambda stop: None)


def test_a_file_that_cannot_serve_stops_the_run_at_set_up(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_demonstrations(tmp_path / "other.jsonl", prefix="elsewhere")
    for name, says in (
        ("gone.jsonl", "gone.jsonl"),
        ("other.jsonl", "holds no demonstration of a training task"),
    ):
        given = [f"cold_start.demonstrations={tmp_path / name}", "cold_start.num_examples=4"]
        assert main(["train", str(recipe), "--run", str(tmp_path / "run"), "--progress", "none", *given]) == 1
        assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_record_belongs_to_its_key_or_else_to_its_question(recipe: Path, tmp_path: Path) -> None:
    tasks = load_tasks(DatasetConfig(path=recipe.parent / "tasks.jsonl"))
    by_key = read_demonstrations(str(recipe.parent / "shown.jsonl"), tasks)
    records = [json.loads(line) for line in (recipe.parent / "shown.jsonl").read_text().splitlines()]
    without = [{name: value for name, value in record.items() if name != "task_key"} for record in records]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(record) + "\n" for record in without))
    by_question = read_demonstrations(str(tmp_path / "other.jsonl"), tasks)
    assert {key: by_question[key] for key in by_key} == by_key and set(by_key) == {task.key for task in tasks}
    with pytest.raises(DataError, match="holds no demonstration"):
        read_demonstrations(str(tmp_path / "other.jsonl"), tasks[:0])


def test_a_run_without_training_shows_no_stage_of_it(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "eval",
                str(recipe),
                "--run",
                str(tmp_path / "run"),
                "--progress",
                "plain",
                "evaluation.num_tasks=1",
            ]
        )
        == 0
    )
    output = capsys.readouterr().out
    assert "evaluation before training: start, 1 to do" in output
    assert "train:" not in output and "0 to do" not in output


def call_of(name: str, arguments: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


NATIVE = [
    {"role": "user", "content": "q?"},
    {"role": "assistant", "content": None, "tool_calls": [call_of("python", {"code": "print(1)"})]},
    {"role": "tool", "content": "1"},
    {"role": "assistant", "content": "\\boxed{1}", "weight": 1},
]
TAGGED = [
    {"role": "user", "content": "q?"},
    {"role": "assistant", "content": "<think>Hm.</think><python>print(1)</python>"},
    {"role": "assistant", "content": "<think>So.</think><answer>\\boxed{1}</answer>"},
]


def tools_config(protocol: str) -> ToolsConfig:
    return ToolsConfig.model_validate({"tools": ["python"], "protocol": protocol})


@pytest.mark.parametrize(
    ("chat", "protocol", "reason"),
    [
        (NATIVE, "tags", r"1 of 1 demonstration calls tools natively, .* <python>\.\.\.</python>: set"),
        (TAGGED, "hermes", r"1 of 1 demonstration calls tools between tags, .* environment\.protocol=tags"),
        (NATIVE, "hermes", ""),
        (NATIVE, "llama3_json", ""),
        (TAGGED, "tags", ""),
    ],
)
def test_demonstrations_with_unreadable_calls_are_an_error(
    tmp_path: Path, chat: list[dict[str, object]], protocol: str, reason: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": chat, "reward": True}))
    environment = tools_config(protocol)
    tasks = [Task(key="t", question="q?", answers=("1",))]
    if reason:
        with pytest.raises(DataError, match=reason):
            read_demonstrations(str(file), tasks, environment)
    else:
        assert len(read_demonstrations(str(file), tasks, environment)["t"] or ()) == 2


def test_what_is_left_out_of_demonstrations_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.jsonl"
    other = [NATIVE[0] | {"content": "r?"}, NATIVE[1] | {"tool_calls": [call_of("sing", {})]}, *NATIVE[2:]]
    plain = [{"role": "user", "content": "s?"}, {"role": "assistant", "content": "<answer>1</answer>"}]
    records = [{"messages": chat, "reward": 1} for chat in (NATIVE, other, plain)]
    file.write_text("\n".join(map(json.dumps, records)))
    tasks = [Task(key=f"t{n}", question=f"{one}?", answers=("1",)) for n, one in enumerate("qrs")]
    read_demonstrations(
        str(file), tasks, ToolsConfig.model_validate({"tools": ["python"], "protocol": "hermes"})
    )
    assert "left out of the chats: 'weight' of messages of the role assistant (2)" in caplog.text
    assert "call tools that the environment lacks: sing (1); it has python" in caplog.text
    caplog.clear()
    read_demonstrations(str(file), tasks, tools_config("tags"))
    assert "2 of 3 demonstrations call tools natively" in caplog.text


def test_steps_of_a_buffer_that_the_environment_cannot_read_are_reported(tmp_path: Path) -> None:
    """A policy would continue them. As demonstrations, the same file is an error."""
    file, path = tmp_path / "a.jsonl", tmp_path / "a.sqlite"
    file.write_text(json.dumps({"messages": NATIVE, "reward": 1}))
    with StepTraceBuffer(path, HashEmbedder(), mode="write") as buffer:
        buffer.add_trajectories(import_trajectories(str(file)).trajectories)
        for config, reason in (
            (
                tools_config("tags"),
                "call tools natively, and environment.protocol = tags reads calls such as",
            ),
            (
                ToolsConfig.model_validate({"tools": ["search"], "corpus": "a.jsonl", "protocol": "hermes"}),
                "lacks: python (",
            ),
            (tools_config("hermes"), ""),
        ):
            notes: list[str] = []
            check_buffer_calls(buffer, config, notes.append)
            assert [reason in note for note in notes] == [True] * bool(reason), notes


def test_demonstrations_of_no_task_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "a.jsonl"
    other = [NATIVE[0] | {"content": "Question: r?"}, *NATIVE[1:]]
    file.write_text("\n".join(json.dumps({"messages": chat, "reward": 1}) for chat in (NATIVE, other)))
    read_demonstrations(str(file), [Task(key="t", question="q?", answers=("1",))], tools_config("hermes"))
    assert "1 demonstration belongs to no training task, for example 'Question: r?'" in caplog.text


def test_a_cold_start_reports_why_it_cannot_imitate(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = json.loads((recipe.parent / "tasks.jsonl").read_text().splitlines()[0])["question"]
    file = tmp_path / "native.jsonl"
    file.write_text(json.dumps({"question": question, "messages": NATIVE, "reward": 1.0}))
    given = [f"cold_start.demonstrations={file}", "cold_start.num_examples=4"]
    assert main(["train", str(recipe), "--run", str(tmp_path / "run"), "--progress", "none", *given]) == 1
    assert "1 of 1 demonstration calls tools natively" in capsys.readouterr().err
