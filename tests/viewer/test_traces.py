"""Traces on disk: what is written is read back, files are whole or absent, resume removes exactly the later
ones.
"""

import math
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import DataError
from outrider.types import Origin, Outcome
from outrider.viewer.records import SCHEMA, StepFiles, TraceReader, TraceRow, step_file


def row(step: int = 1, node_id: int = 0, **fields: object) -> TraceRow:
    values: dict[str, object] = {
        "parent_id": node_id - 1,
        "rollout": 0,
        "origin": Origin.PROMPT,
        "text": "question",
    }
    where = {"step": step, "task_key": "task", "trace_id": "trace", "node_id": node_id}
    return TraceRow(**{**where, **values, **fields})  # type: ignore[arg-type]


finite = st.floats(allow_nan=False, width=64)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def rows(draw: st.DrawFn) -> TraceRow:
    tokens = draw(st.lists(text, max_size=4))
    values = st.lists(finite, min_size=len(tokens), max_size=len(tokens)).map(tuple)
    return TraceRow(
        step=1, task_key=draw(text), trace_id=draw(text), node_id=draw(st.integers(0, 99)),
        parent_id=draw(st.integers(-1, 99)), rollout=draw(st.integers(0, 9)),
        origin=Origin.POLICY if tokens else draw(st.sampled_from(Origin)), text=draw(text),
        tokens=tuple(tokens), logprobs=draw(values), entropies=draw(values),
        outcome=draw(st.none() | st.sampled_from(Outcome)), episode_return=draw(st.none() | finite),
        advantage=draw(st.none() | finite), hybrid=draw(st.none() | st.booleans()),
    )  # fmt: skip


@given(st.lists(rows(), max_size=5))
def test_round_trip(written: list[TraceRow]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        StepFiles(Path(folder)).write_rows(step_file(1), written, SCHEMA)
        assert TraceReader(Path(folder)).read(1) == tuple(written)


def test_a_lone_surrogate_is_spelled_out_and_nan_survives(tmp_path: Path) -> None:
    StepFiles(tmp_path).write_rows(step_file(1), [row(text="a\ud800b", episode_return=math.nan)], SCHEMA)
    (read,) = TraceReader(tmp_path).read(1)
    assert read.text == "a\\ud800b"
    assert read.episode_return is not None
    assert math.isnan(read.episode_return)


def test_values_must_belong_to_policy_tokens() -> None:
    with pytest.raises(ValueError, match="differ in number"):
        row(origin=Origin.POLICY, tokens=("a",), logprobs=(-0.1,))
    with pytest.raises(ValueError, match="only policy nodes"):
        row(origin=Origin.BUFFER, tokens=("a",), logprobs=(-0.1,), entropies=(0.2,))


def test_resume_removes_later_steps_and_temporary_files_only(tmp_path: Path) -> None:
    writer = StepFiles(tmp_path)
    for step in (1, 2, 10, 1_000_000):
        writer.write_rows(step_file(step), [row(step=step)], SCHEMA)
    (tmp_path / "step-000003.parquet.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    assert writer.resume(2) == 3
    assert TraceReader(tmp_path).steps() == (1, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "step-000001.parquet",
        "step-000002.parquet",
    ]


def test_a_kill_before_the_rename_leaves_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            StepFiles(tmp_path).write_rows(step_file(1), [row()], SCHEMA)
    assert TraceReader(tmp_path).steps() == ()


def test_missing_and_damaged_files_are_data_errors_that_name_the_file(tmp_path: Path) -> None:
    reader = TraceReader(tmp_path)
    with pytest.raises(DataError, match=r"step-000001\.parquet"):
        reader.read(1)
    path = StepFiles(tmp_path).write_rows(step_file(1), [row()], SCHEMA)
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"PAR1 nonsense"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"step-000001\.parquet"):
            reader.read(1)
    assert TraceReader(tmp_path / "absent").steps() == ()
