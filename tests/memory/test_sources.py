"""Importing chats: what becomes prompt, step and observation; how a bad line is named."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from outrider.errors import DataError
from outrider.memory.chat_files import import_trajectories
from outrider.memory.embedders import HashEmbedder
from outrider.memory.step_buffer import StepTraceBuffer

CHAT = [
    {"role": "system", "content": "rules"},
    {"role": "user", "content": "Solve it: 2+2?"},
    {"role": "assistant", "content": "let me compute <python>2+2</python>"},
    {"role": "tool", "content": "4"},
    {"role": "user", "content": "go on"},
    {"role": "assistant", "content": "<answer>4</answer>"},
]
RECORD = {"task_key": "sum", "question": "2+2?", "messages": CHAT, "reward": 1, "agent": "teacher"}


def write(path: Path, *lines: object) -> Path:
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def test_chat_becomes_prompt_steps_and_observations(tmp_path: Path) -> None:
    imported = import_trajectories(write(tmp_path / "a.jsonl", RECORD))
    (trajectory,) = imported.trajectories
    assert [m.content for m in trajectory.prompt] == ["rules", "Solve it: 2+2?"]
    assert [(s.text, s.observation, s.is_terminal) for s in trajectory.steps] == [
        ("let me compute <python>2+2</python>", "4\ngo on", False),
        ("<answer>4</answer>", "", True),
    ]
    assert (trajectory.task_key, trajectory.agent, trajectory.reward) == ("sum", "teacher", 1.0)
    assert imported.questions == {"sum": "2+2?"} and imported.problems == ()


def test_parquet_and_jsonl_give_the_same(tmp_path: Path) -> None:
    bare = {"question": "why?", "messages": [{"role": "assistant", "content": "because"}], "reward": 0.25}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([RECORD, bare]), tmp_path / "a.parquet")
    from_table = import_trajectories(tmp_path / "a.parquet")
    assert from_table == import_trajectories(write(tmp_path / "a.jsonl", RECORD, b"", bare))
    assert from_table.trajectories[1].prompt[0].content == "why?"
    assert from_table.trajectories[1].agent == "imported"


def test_missing_ids_are_digests_of_the_content(tmp_path: Path) -> None:
    bare = {key: value for key, value in RECORD.items() if key not in ("task_key", "agent")}
    first = import_trajectories(write(tmp_path / "a.jsonl", bare, {**bare, "reward": 0.5}))
    second = import_trajectories(write(tmp_path / "b.jsonl", {**bare, "reward": 0.5}, bare))
    assert [t.trajectory_id for t in first.trajectories] == [
        t.trajectory_id for t in reversed(second.trajectories)
    ]
    assert len({t.trajectory_id for t in first.trajectories}) == 2
    assert len({t.task_key for t in first.trajectories}) == 1


def test_terminal_steps(tmp_path: Path) -> None:
    said = [("user", "sure?"), ("assistant", "yes"), ("user", "ok")]
    chat = [*CHAT, *({"role": role, "content": content} for role, content in said)]
    (trajectory,) = import_trajectories(
        write(tmp_path / "a.jsonl", {**RECORD, "messages": chat})
    ).trajectories
    assert [step.is_terminal for step in trajectory.steps] == [False, True, True]
    (trajectory,) = import_trajectories(tmp_path / "a.jsonl", answer_marks=()).trajectories
    assert [step.is_terminal for step in trajectory.steps] == [False, False, True]


def test_tool_calls_are_part_of_the_step(tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]
    chat = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "4"}]
    (trajectory,) = import_trajectories(
        write(tmp_path / "a.jsonl", {**RECORD, "messages": chat})
    ).trajectories
    assert trajectory.steps[0].text == '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


BAD = [
    (b"{broken", "not JSON"),
    (b'{"question": "caf\xe9"}', "not UTF-8"),
    (b"[1, 2]", "a record is an object, not list"),
    (b"[" * 100_000, "recursion"),
    ({**RECORD, "question": 3}, "'question' must be text, not int"),
    ({**RECORD, "question": " "}, "'question' is empty"),
    ({**RECORD, "question": "other"}, "another question"),
    ({**RECORD, "reward": "high"}, "'reward' must be a finite number, not 'high'"),
    ({**RECORD, "reward": [1]}, "'reward' must be a finite number"),
    ({**RECORD, "reward": float("nan")}, "'reward' must be a finite number"),
    ({**RECORD, "reward": 10**400}, "too large"),
    ({**RECORD, "num_tokens": -1}, "'num_tokens' must be a count"),
    ({**RECORD, "messages": "hello"}, "'messages' must be a list as JSON text"),
    ({**RECORD, "messages": ["hello"]}, "message 0 must be an object"),
    ({**RECORD, "messages": [{"role": "robot", "content": ""}]}, "message 0 has unknown role 'robot'"),
    ({**RECORD, "messages": [{"role": ["user"], "content": ""}]}, "message 0 has unknown role"),
    ({**RECORD, "messages": [{"role": "assistant"}]}, "message 0: 'content' must be text, not NoneType"),
    (
        {**RECORD, "messages": [{"role": "assistant", "tool_calls": "x"}]},
        "message 0: 'tool_calls' must be a list",
    ),
    ({**RECORD, "messages": CHAT[:2]}, "no message of the assistant"),
    ({**RECORD, "messages": [*CHAT, CHAT[0]]}, "a system message after"),
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=[reason[:30] for _, reason in BAD])
def test_malformed_line_is_named_or_counted(tmp_path: Path, line: object, reason: str) -> None:
    path = write(tmp_path / "a.jsonl", RECORD, line, {**RECORD, "reward": 0.5})
    with pytest.raises(DataError) as caught:
        import_trajectories(path)
    assert (
        str(caught.value).startswith(f"{path}:2: ")
        and reason in str(caught.value)
        and "\n" not in str(caught.value)
    )
    imported = import_trajectories(path, on_malformed="skip")
    assert len(imported.trajectories) == 2 and len(imported.problems) == 1 and reason in imported.problems[0]


def test_unusable_files(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    for path, reason in [
        (tmp_path / "missing.jsonl", "cannot be read"),
        (tmp_path / "broken.parquet", "cannot be read"),
        (write(tmp_path / "a.txt"), "must end in"),
        (write(tmp_path / "empty.jsonl"), r"no usable trajectory \(0 malformed\)"),
    ]:
        with pytest.raises(DataError, match=reason):
            import_trajectories(path, on_malformed="skip")


def test_import_fills_a_buffer_and_again_adds_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", RECORD, {**RECORD, "reward": 0.5, "num_tokens": 7})
    with StepTraceBuffer(tmp_path / "b.sqlite", HashEmbedder(), mode="write") as buffer:
        for expected in (2, 0):
            imported = import_trajectories(path)
            assert (
                buffer.add_trajectories(imported.trajectories, questions=imported.questions).num_inserted
                == expected
            )
        assert buffer.query("2+2?")[0].record.text.startswith("let me compute")
        assert buffer.query("2+2?")[0].similarity == pytest.approx(1.0)
