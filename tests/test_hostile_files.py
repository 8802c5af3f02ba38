"""Whatever a file holds, its reader answers with its own error, or with a note, in bounded work."""

import contextlib
import json
import math
import sqlite3
import struct
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.config import load_settings
from outrider.engines.local.model import load_model
from outrider.environments.tool_qa.datasets import DatasetConfig, load_tasks
from outrider.errors import ConfigError, DataError, ModelError, OutriderError
from outrider.evaluation.tasks import load_benchmark
from outrider.memory.chat_files import import_trajectories
from outrider.memory.embedders import HashEmbedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.records import read_rows
from outrider.training.settings import RunSettings
from outrider.types import Message, Origin, Outcome, Step, Trajectory
from outrider.viewer.records import SCHEMA, StepFiles, TraceRow, step_file
from outrider.viewer.report import write_report

DEEP = "[" * 100_000
HUGE = "9" * 400
ENDLESS = "9" * 5000
GOOD = {"question": "q", "messages": [{"role": "assistant", "content": "a"}], "reward": 1.0}

few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def parquet(path: Path, **columns: pa.Array) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def no_utf8(num: int = 1) -> pa.Array:
    return pa.Array.from_buffers(
        pa.string(),
        num,
        [None, pa.py_buffer(np.arange(0, 2 * num + 1, 2, np.int32)), pa.py_buffer(b"\xff\xfe" * num)],
    )


def no_date(num: int = 1) -> pa.Array:
    return pa.array([2**40] * num, pa.int64()).cast(pa.timestamp("s"))


@pytest.mark.parametrize("column", [no_utf8, no_date], ids=["invalid UTF-8", "a date out of range"])
def test_malformed_parquet_is_a_data_error(tmp_path: Path, column: Callable[[], pa.Array]) -> None:
    path = parquet(tmp_path / "a.parquet", question=column(), answer=pa.array(["a"]))
    with pytest.raises(DataError, match="malformed Parquet"):
        read_rows(path)
    with pytest.raises(DataError):
        load_tasks(DatasetConfig(path=path))


@pytest.mark.parametrize("column", [no_utf8, no_date], ids=["invalid UTF-8", "a date out of range"])
def test_only_the_bad_row_of_trajectories_is_skipped(
    tmp_path: Path, column: Callable[[int], pa.Array]
) -> None:
    """Row 2 of 3 cannot be read."""
    odd = pa.concat_arrays([pa.nulls(1, column(1).type), column(1), pa.nulls(1, column(1).type)])
    whole = {key: pa.array([value] * 3) for key, value in GOOD.items()}
    path = parquet(tmp_path / "a.parquet", note=odd, trajectory_id=pa.array(["a", "b", "c"]), **whole)
    with pytest.raises(DataError, match=r"a\.parquet:2: "):
        import_trajectories(path)
    found = import_trajectories(path, on_malformed="skip")
    assert [one.trajectory_id for one in found.trajectories] == ["a", "c"] and len(found.problems) == 1


LINES = (
    '{"question": "\\ud800", "answer": "a"}', f'{{"question": "q", "answer": {DEEP}}}',
    f'{{"question": {ENDLESS}, "answer": 1}}', '{"question": "q", "answer": {"a": 1}}', "[]", "nul", "\xff",
    '{"question": "q", "answer": "a", "answer": NaN}',
)  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_errors_of_hostile_lines_name_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"question": "q", "answer": "a"}\n' + line.encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        load_tasks(DatasetConfig(path=path))


@pytest.mark.parametrize("field", ["task_key", "agent", "trajectory_id"])
def test_names_with_invalid_unicode_are_malformed_records(tmp_path: Path, field: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps(GOOD | {field: "\ud800"})
        + "\n"
        + json.dumps(GOOD | {"reward": 10**400})
        + "\n"
        + json.dumps(GOOD)
    )
    found = import_trajectories(path, on_malformed="skip")
    assert len(found.trajectories) == 1 and len(found.problems) == 2


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["\ud800", "", "policy"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@few
@given(st.dictionaries(st.sampled_from([*GOOD, "task_key", "num_tokens", "answer"]), values), st.booleans())
def test_any_record_is_read_or_refused(record: dict[str, object], skip: bool) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_text(json.dumps(GOOD | record))
        for read in (
            lambda: import_trajectories(path, on_malformed="skip" if skip else "error"),
            lambda: load_tasks(DatasetConfig(path=path)),
        ):
            try:
                read()
            except DataError as error:
                assert str(path) in str(error)


@few
@given(st.binary(max_size=200), st.integers(0, 10**6), st.sampled_from(["a.parquet", "a.jsonl"]))
def test_damaged_files_are_data_errors(junk: bytes, place: int, name: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        pq.write_table(pa.table({"question": ["q"] * 5, "answer": ["a"] * 5}), path)
        content = path.read_bytes()
        place %= len(content)
        path.write_bytes(content[:place] + junk + content[place + len(junk) :])
        for read in (read_rows, import_trajectories):
            with contextlib.suppress(DataError):
                read(path)


CONFIGS = (
    "a = " + "[" * 5000 + "]" * 5000, ".".join(["a"] * 3000) + " = 1",
    "[" + ".".join(["a"] * 3000) + "]\nx = 1", "a = " + "{a = " * 3000 + "1" + "}" * 3000,
    f"seed = {ENDLESS}", f"seed = {HUGE}", "d = 9999-99-99", "a = [" * 400 + "]" * 400,
    f"train.learning_rate = {HUGE}.0", f"train.learning_rate = {HUGE}",
)  # fmt: skip


@pytest.mark.parametrize("content", CONFIGS, ids=range(len(CONFIGS)))
def test_hostile_recipes_are_config_errors(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.toml").write_text(content)
    with pytest.raises(ConfigError):
        load_settings(RunSettings, file=tmp_path / "config.toml")
    with pytest.raises(ConfigError):
        load_settings(RunSettings, file=None, overrides=[f"seed={content.partition('=')[2]}"])
    assert write_report(tmp_path).stat().st_size < 2**20


def line(kind: str, step: object, value: object) -> str:
    if kind == "metrics":
        return f'{{"step": {step}, "kind": "train", "reward/mean": {value}}}'
    score = f'{{"value": {value}, "ci_low": {value}, "ci_high": 1}}'
    return (
        f'{{"label": "a", "split": "s", "num_tasks": 1, "step": {step}, "temperature": 1, "panel_hash": "p", '
        f'"metric": {{"score": {score}}}}}'
    )


@pytest.mark.parametrize("kind", ["metrics", "evaluations"])
@pytest.mark.parametrize("step", ["1", HUGE, "-5", "1000000000000", DEEP])
@pytest.mark.parametrize("value", ["1", HUGE, "1.7e308", "-1.7e308", ENDLESS, "1e999", "NaN"])
def test_numbers_that_cannot_be_drawn_are_left_out(tmp_path: Path, kind: str, step: str, value: str) -> None:
    lines = [line(kind, step, value), line(kind, 1, "1.7e308"), line(kind, 2, "-1.7e308"), line(kind, 3, 0.5)]
    (tmp_path / f"{kind}.jsonl").write_text("\n".join(lines) + "\n")
    assert b"</svg>" in write_report(tmp_path).read_bytes() or kind == "evaluations"


def node(number: int, parent: int, metadata: str = "{}", *, leaf: bool = False) -> TraceRow:
    ended = {"outcome": Outcome.FINISHED, "episode_return": 1.0} if leaf else {}
    return TraceRow(
        step=1, task_key="k", trace_id="t", node_id=number, parent_id=parent, rollout=0, origin=Origin.POLICY,
        text="x", metadata=metadata, **ended,
    )  # fmt: skip


FORKED = '{"num_forks": 1}'
TREES = {
    "comb": [
        node(0, -1, FORKED),
        *(one for i in range(299) for parent in [max(2 * i - 1, 0)]
          for one in (node(2 * i + 1, parent), node(2 * i + 2, parent, leaf=True))),
    ],
    "leaf on leaf": [node(0, -1, FORKED), *(node(i, i - 1, leaf=True) for i in range(1, 599))],
    "cycle": [node(0, -1, FORKED), node(1, 0), node(1, 1), node(0, 1), node(2, 1, leaf=True)],
    "own parent": [node(1, 1, FORKED, leaf=True)],
    **{f"metadata {i}": [node(0, -1, text), node(1, 0, text, leaf=True)] for i, text in enumerate((
        "[1]", DEEP, '{"num_forks": "many"}', '{"num_forks": Infinity}', '{"num_forks": null}',
        '{"num_forks": -1e300}', '{"num_forks": 1, "entropy_change": "x"}', f'{{"num_forks": {HUGE}}}',
        f'{{"num_forks": {ENDLESS}}}', '{"num_forks": 1, "entropy_change": NaN}', '{"num_forks": [[]]}',
    ))},
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_no_trace_breaks_the_report(tmp_path: Path, name: str) -> None:
    StepFiles(tmp_path / "traces").write_rows(step_file(1), TREES[name], SCHEMA)
    page = write_report(tmp_path).read_text()
    assert "left out" in page or name not in ("comb", "leaf on leaf", "cycle")


class Embedder:
    name, dim = "test", 4

    def embed(self, texts: list[str]) -> np.ndarray:
        return np.full((len(texts), 4), 0.5, np.float32)


def buffer_file(folder: Path) -> Path:
    path = folder / "a.db"
    step = Step(text="t", observation="o", is_terminal=False)
    prompt = (Message(role="user", content="q"),)
    made = Trajectory(
        trajectory_id="i",
        task_key="k",
        agent="a",
        prompt=prompt,
        steps=(step, step),
        reward=1.0,
        num_tokens=4,
    )
    with StepTraceBuffer(path, Embedder(), mode="write") as buffer:
        buffer.add_trajectories([made])
    return path


COLUMNS = [
    "meta.value", "trajectories.reward", "trajectories.num_tokens", "trajectories.added",
    "trajectories.removed", "trajectories.task_key", "trajectories.first_step_id", "trajectories.num_steps",
    "trajectories.checksum", "steps.trajectory_row", "steps.num_tokens", "steps.is_terminal", "steps.text",
    "steps.checksum", "vectors.vector", "vectors.checksum",
]  # fmt: skip
TAMPERED = st.sampled_from([2**42, -1, 0, 2**63 - 1, "many", b"\xff", 1.5, "", None, 10**18])


@few
@given(
    st.sampled_from(COLUMNS),
    TAMPERED,
    st.sampled_from(["num_steps", "num_trajectories", "revision", "dim", "generation", "oldest_revision"]),
)  # fmt: skip
def test_a_tampered_buffer_is_an_error(where: str, value: object, entry: str) -> None:
    table, column = where.split(".")
    with TemporaryDirectory() as folder:
        path = buffer_file(Path(folder))
        with sqlite3.connect(path) as db:
            try:
                only = f" WHERE key = '{entry}'" if table == "meta" else ""
                db.execute(f"UPDATE {table} SET {column} = ?{only}", (value,))
            except sqlite3.Error:
                return  # the schema itself refuses it
        db.close()
        try:
            with StepTraceBuffer(path, Embedder(), mode="write") as buffer:
                buffer.stats()
                buffer.query("q", k=2)
                buffer.trajectory("i")
        except OutriderError as error:
            assert "\n" not in str(error)


def test_a_wrong_count_is_found_before_allocation(tmp_path: Path) -> None:
    path = buffer_file(tmp_path)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'num_steps'", (2**42,))
    db.close()
    with pytest.raises(OutriderError, match=r"number of steps differs|counters fail their checksum"):
        StepTraceBuffer(path, Embedder(), mode="write")


@pytest.mark.parametrize(
    "weights",
    [b"\x80\x04cos\nsystem\n(S'true'\ntR.", b"", b"PK\x03\x04" + bytes(50), struct.pack("<Q", 2**60) + b"{}"],
    ids=range(4),
)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_hostile_weights_are_a_model_error(tmp_path: Path, weights: bytes, name: str) -> None:
    shape = {
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shape})
    )
    (tmp_path / name).write_bytes(weights)
    with pytest.raises(ModelError) as error:
        load_model(str(tmp_path), precision="float32")
    assert "\n" not in str(error.value)


UNKNOWN_ZONE = pa.timestamp("s", tz="No/Where")
EXOTIC: dict[str, pa.Array] = {
    "an unknown time zone": pa.array([1], UNKNOWN_ZONE),
    "an unknown time zone inside": pa.array([[{"a": 1}]], pa.list_(pa.struct([("a", UNKNOWN_ZONE)]))),
    "a time zone that is no offset": pa.array([1], pa.timestamp("s", tz="+25:99")),
    "nanoseconds": pa.array([1], pa.timestamp("ns")),
    "a decimal": pa.array([Decimal("1.5")]),
    "a duration": pa.array([1], pa.duration("ns")),
    "a time": pa.array([1], pa.time64("ns")),
    "a dictionary": pa.array(["a"]).dictionary_encode(),
    "large text": pa.array(["a"], pa.large_string()),
    "a view of text": pa.array(["a"], pa.string_view()),
    "a view of bytes": pa.array([b"a"], pa.binary_view()),
    "null": pa.nulls(1),
    "half a float": pa.array([1.5], pa.float16()),
    "a map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
    "an extension": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int64(), [2]), pa.FixedSizeListArray.from_arrays(pa.array([1, 2]), 2)
    ),
}
WHOLE = {**{key: pa.array([value]) for key, value in GOOD.items()}, "answer": pa.array(["a"])}


@pytest.mark.parametrize("kind", EXOTIC)
def test_an_unused_column_may_have_any_type(tmp_path: Path, kind: str) -> None:
    path = parquet(tmp_path / "a.parquet", extra=EXOTIC[kind], **WHOLE)
    assert len(import_trajectories(path).trajectories) == len(load_tasks(DatasetConfig(path=path))) == 1


@pytest.mark.parametrize("column", ["question", "reward", "messages", "answer"])
@pytest.mark.parametrize("kind", EXOTIC)
def test_a_column_of_an_unusable_type_is_named(tmp_path: Path, kind: str, column: str) -> None:
    path = parquet(tmp_path / "a.parquet", **{**WHOLE, column: EXOTIC[kind]})
    read = {"answer": [load_tasks], "question": [import_trajectories, load_tasks]}.get(
        column, [import_trajectories]
    )
    for one in read:
        try:
            one(DatasetConfig(path=path) if one is load_tasks else path)  # type: ignore[operator]
        except DataError as error:
            assert column in str(error) or (column == "messages" and "message 0" in str(error)), error
            assert "zone" not in kind or f"column {column!r}" in str(error)


def test_decimals_are_numbers(tmp_path: Path) -> None:
    half = pa.array([Decimal("0.50")])
    path = parquet(tmp_path / "a.parquet", **{**WHOLE, "reward": half, "answer": half})
    assert import_trajectories(path).trajectories[0].reward == 0.5
    assert load_tasks(DatasetConfig(path=path))[0].answers == ("0.50",)
    assert load_benchmark(str(path)).tasks[0].answers == ("0.50",)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("rewards", "quantiles"),
    [
        ([1.7e308, -1.7e308], (-1.7e308, -0.85e308, 0.0, 0.85e308, 1.7e308)),
        ([1.7e308] * 3, (1.7e308,) * 5),
        ([sys.float_info.max, 0.0, -sys.float_info.max], None),
        ([5e-324, 1.0], None),
    ],
)
def test_stats_of_the_largest_rewards_are_numbers(
    tmp_path: Path, rewards: list[float], quantiles: tuple[float, ...] | None
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\n".join(json.dumps(GOOD | {"question": str(n), "reward": r}) for n, r in enumerate(rewards))
    )
    with StepTraceBuffer(tmp_path / "a.sqlite", HashEmbedder(), mode="write") as buffer:
        buffer.add_trajectories(import_trajectories(path).trajectories)
        found = buffer.stats().reward_quantiles
    assert all(map(math.isfinite, found)) and list(found) == sorted(found)
    assert (found[0], found[-1]) == (min(rewards), max(rewards))
    assert quantiles is None or found == pytest.approx(quantiles)
