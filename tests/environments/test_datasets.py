"""Data sets as task lists: what is read, and what each kind of bad input says."""

import json
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from outrider.environments.tool_qa.datasets import DatasetConfig, hash_tasks, hub_rows, load_tasks
from outrider.errors import DataError, ToolUnavailable
from outrider.evaluation.tasks import load_benchmark
from outrider.records import read_rows
from outrider.types import Task


def write(tmp_path: Path, text: str) -> DatasetConfig:
    path = tmp_path / "qa.jsonl"
    path.write_text(text, encoding="utf-8")
    return DatasetConfig(path=path)


def test_jsonl_rows_become_tasks_in_file_order(tmp_path: Path) -> None:
    rows = [
        {"question": " Who? ", "answer": ["A", "B"]},
        {"question": "How many?", "answer": 12},
        {"question": "\u2028", "answer": "x"},
    ]
    text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows[:2])
    assert load_tasks(write(tmp_path, text)) == [
        Task(key="qa-0", question="Who?", answers=("A", "B")),
        Task(key="qa-1", question="How many?", answers=("12",)),
    ]


def test_nested_parquet_columns_and_keys(tmp_path: Path) -> None:
    rows = [
        {"extra_info": {"question": f"q{i}", "index": i}, "reward_model": {"ground_truth": str(i)}}
        for i in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    config = DatasetConfig(
        path=tmp_path / "t.parquet", question="extra_info.question", answer="reward_model.ground_truth",
        key="extra_info.index", limit=2,
    )  # fmt: skip
    assert load_tasks(config) == [
        Task(key="0", question="q0", answers=("0",)),
        Task(key="1", question="q1", answers=("1",)),
    ]


def test_an_answer_after_a_mark(tmp_path: Path) -> None:
    config = write(tmp_path, '{"question": "q", "answer": "3 #### no\\n#### 1,200"}\n')
    assert load_tasks(config.model_copy(update={"answer_after": "####"}))[0].answers == ("1,200",)
    with pytest.raises(DataError, match=r"qa\.jsonl:1: .* lacks the mark '@@'"):
        load_tasks(config.model_copy(update={"answer_after": "@@"}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the data set is empty"),
        ("\n \n", "the data set is empty"),
        ('{"question": "q", "answer": "a"}\n{"question": \n', r"qa\.jsonl:2: malformed JSON"),
        ("[1]\n", r"qa\.jsonl:1: malformed JSON: expected an object, got list"),
        ('\n{"question": "q"}\n', r"qa\.jsonl:2: no column 'answer'; the row has question"),
        ('{"question": "", "answer": "a"}\n', r"qa\.jsonl:1: column 'question' must hold a string"),
        ('{"question": 3, "answer": "a"}\n', r"qa\.jsonl:1: column 'question' must hold a string"),
        ('{"question": "q", "answer": []}\n', r"qa\.jsonl:1: column 'answer' contains no answer"),
        ('{"question": "q", "answer": " "}\n', r"qa\.jsonl:1: column 'answer' contains a blank answer"),
        ('{"question": "q", "answer": null}\n', r"qa\.jsonl:1: column 'answer' must contain text or numbers"),
        ('{"question": "q", "answer": true}\n', r"qa\.jsonl:1: column 'answer' must contain text or numbers"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_tasks(write(tmp_path, text))


def test_rows_with_a_blank_answer_can_be_left_out_and_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = write(
        tmp_path,
        (
            '{"question": "q", "answer": ""}\n{"question": "r", "answer": "b"}\n'
            '{"question": "s", "answer": ["c", " "]}\n'
        ),
    )
    config = config.model_copy(update={"blank_answers": "drop"})
    assert load_tasks(config) == [Task(key="qa-1", question="r", answers=("b",))]
    assert "2 rows with a blank answer left out" in caplog.text and "qa.jsonl:1" in caplog.text
    with pytest.raises(DataError, match=r"qa\.jsonl: the data set is empty"):
        load_tasks(config.model_copy(update={"limit": 1}))
    nothing = write(tmp_path, '{"question": "q", "answer": null}\n{"question": "r", "answer": "b"}\n')
    with pytest.raises(DataError, match='must contain text or numbers, got None; blank_answers = "drop"'):
        load_tasks(nothing)
    assert len(load_tasks(nothing.model_copy(update={"blank_answers": "drop"}))) == 1


@pytest.mark.parametrize("key", ["null", "1.5", "true", '{"a": 1}', '""'])
def test_a_key_is_text_or_an_integer(key: str, tmp_path: Path) -> None:
    config = write(tmp_path, f'{{"question": "q", "answer": "a", "id": {key}}}\n').model_copy(
        update={"key": "id"}
    )
    with pytest.raises(DataError, match=r"qa\.jsonl:1: the key in column 'id' must be text or an integer"):
        load_tasks(config)


@pytest.mark.parametrize(("key", "name"), [("7", "7"), ("7.0", "7"), ('"a b"', "a b")])
def test_keys_of_integers_and_texts(key: str, name: str, tmp_path: Path) -> None:
    config = write(tmp_path, f'{{"question": "q", "answer": "a", "id": {key}}}\n').model_copy(
        update={"key": "id"}
    )
    assert [task.key for task in load_tasks(config)] == [name]


def test_bytes_that_are_no_utf8_name_the_line(tmp_path: Path) -> None:
    (tmp_path / "qa.jsonl").write_bytes(b'{"question": "q", "answer": "a"}\n{"question": "\xff"}\n')
    with pytest.raises(DataError, match=r"qa\.jsonl:2: malformed JSON"):
        load_tasks(DatasetConfig(path=tmp_path / "qa.jsonl"))


def test_repeated_questions_and_contradicting_answers_are_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [("a?", "1"), ("b?", "2"), ("a?", "1"), ("a? ", "3"), ("b?", "2")]
    text = "\n".join(json.dumps({"question": question, "answer": answer}) for question, answer in rows)
    assert len(load_tasks(write(tmp_path, text))) == 5
    [line] = [record.getMessage() for record in caplog.records]
    path = tmp_path / "qa.jsonl"
    assert line == (
        f"{path}: 3 of 5 rows repeat an earlier question, the first at {path}:3; "
        f"1 of them with other answers, the first at {path}:4"
    )
    caplog.clear()
    load_tasks(write(tmp_path, text).model_copy(update={"limit": 3}))
    [line] = [record.getMessage() for record in caplog.records]
    assert line.endswith(f"1 of 3 rows repeat an earlier question, the first at {path}:3")
    caplog.clear()
    load_tasks(write(tmp_path, text).model_copy(update={"limit": 2}))
    assert not caplog.records


def test_duplicate_keys_are_refused(tmp_path: Path) -> None:
    config = write(
        tmp_path, '{"id": 1, "question": "q", "answer": "a"}\n{"id": 1, "question": "r", "answer": "b"}\n'
    )
    assert len(load_tasks(config)) == 2
    with pytest.raises(DataError, match=r"qa\.jsonl:2: duplicate key '1'"):
        load_tasks(config.model_copy(update={"key": "id"}))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        load_tasks(DatasetConfig(path=tmp_path / "gone.jsonl"))
    with pytest.raises(DataError, match=r"qa\.csv: unknown kind of file"):
        load_tasks(DatasetConfig(path=tmp_path / "qa.csv"))
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"bad\.parquet: malformed Parquet"):
        load_tasks(DatasetConfig(path=tmp_path / "bad.parquet"))


def test_exactly_one_source_must_be_set() -> None:
    for kwargs in ({}, {"path": Path("a.jsonl"), "hub": "a/b"}):
        with pytest.raises(ValidationError, match=r"exactly one of path and hub"):
            DatasetConfig.model_validate(kwargs)


def test_a_hub_data_set_without_the_library_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ToolUnavailable,
        match=r"^openai/gsm8k: the hub needs the package datasets \(pip install 'outrider\[hub\]'\)$",
    ):
        load_tasks(DatasetConfig(hub="openai/gsm8k"))


def test_a_hub_data_set_is_read_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    def load_dataset(name: str, config: str | None, *, split: str) -> list[dict[str, str]]:
        calls.append((name, config, split))
        if split == "gone":
            raise ValueError("no split gone\nand more")
        return [{"question": "q", "answer": "a"}] if split == "test" else []

    library = types.ModuleType("datasets")
    monkeypatch.setattr(library, "load_dataset", load_dataset, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", library)
    config = DatasetConfig(hub="openai/gsm8k", hub_config="main", hub_split="test")
    assert load_tasks(config) == [Task(key="openai/gsm8k-test-0", question="q", answers=("a",))]
    assert calls == [("openai/gsm8k", "main", "test")]
    with pytest.raises(DataError, match="openai/gsm8k: the data set is empty"):
        load_tasks(DatasetConfig(hub="openai/gsm8k"))
    with pytest.raises(DataError, match=r"cannot load: no split gone$"):
        load_tasks(DatasetConfig(hub="openai/gsm8k", hub_split="gone"))


def test_float32_numbers_of_a_hub_data_set_are_those_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    number = datasets.Value("float32")
    features = datasets.Features(
        question=datasets.Value("string"),
        answer=number,
        more={"scores": datasets.List(number), "mixed": datasets.Json()},
        table=datasets.Array2D((None, 2), "float32"),
    )
    more = {"scores": [0.1, None], "mixed": {"a": [1, "5.1"]}}
    rows = [{"question": "q", "answer": 5.1, "more": more, "table": [[5.1, 2.0]]}]
    data = datasets.Dataset.from_list(rows, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data)
    assert [row.values for row in hub_rows("own/data", None, "train")] == rows
    assert load_tasks(DatasetConfig(hub="own/data"))[0].answers == ("5.1",)
    data.to_parquet(tmp_path / "t.parquet")
    assert [row.values["table"] for row in read_rows(tmp_path / "t.parquet")] == [[[5.1, 2.0]]]


def test_the_panel_hash_sees_order_and_every_field() -> None:
    base = [
        Task(key="a", question="q", answers=("x",), metadata={"m": 1, "n": 2}),
        Task(key="b", question="r"),
    ]
    variants = [
        base[::-1],
        base[:1],
        [Task(key="a2", question="q", answers=("x",), metadata={"m": 1, "n": 2}), base[1]],
        [Task(key="a", question="q2", answers=("x",), metadata={"m": 1, "n": 2}), base[1]],
        [Task(key="a", question="q", answers=("y",), metadata={"m": 1, "n": 2}), base[1]],
        [Task(key="a", question="q", answers=("x",), metadata={"m": 1, "n": 3}), base[1]],
    ]
    assert len({hash_tasks(tasks) for tasks in [base, *variants]}) == 7
    same = [Task(key="a", question="q", answers=("x",), metadata={"n": 2, "m": 1}), base[1]]
    assert hash_tasks(same) == hash_tasks(base)


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"answers": ["A", "B"]}, ("A", "B")),
        ({"answers": "A"}, ("A",)),
        ({"answer": None, "answers": ["A", 2]}, ("A", "2")),
        ({"answer": "A", "answers": ["B"]}, ("A",)),
    ],
)
def test_a_column_answers_replaces_answer(
    tmp_path: Path, row: dict[str, object], answers: tuple[str, ...]
) -> None:
    config = write(tmp_path, json.dumps({"question": "Who?", **row}))
    assert config.path is not None
    assert load_tasks(config)[0].answers == answers
    if row.get("answer") or "answer" not in row:
        assert load_benchmark(str(config.path)).tasks[0].answers == answers


def test_a_named_column_is_not_replaced(tmp_path: Path) -> None:
    config = write(tmp_path, json.dumps({"question": "Who?", "answers": ["A"]}))
    with pytest.raises(DataError, match="no column 'gold'; the row has answers, question"):
        load_tasks(config.model_copy(update={"answer": "gold"}))
    with pytest.raises(DataError, match="column 'answers' contains no answer"):
        load_tasks(write(tmp_path, json.dumps({"question": "Who?", "answers": []})))


def test_numbers_are_written_as_a_policy_writes_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = [0.00001, 1e16, 5.0, -2.5e-7, 12, 1e300]
    rows = [{"question": f"q{n}", "answer": number} for n, number in enumerate(numbers)]
    tasks = load_tasks(write(tmp_path, "\n".join(map(json.dumps, rows))))
    assert [task.answers[0] for task in tasks] == [
        "0.00001", "10000000000000000", "5.0", "-0.00000025", "12", "1e+300"
    ]  # fmt: skip
    path = tmp_path / "single.parquet"
    for kind in (pa.float32(), pa.float16()):
        numbers = pa.array(np.array([5.1, 0.1], kind.to_pandas_dtype()), kind)
        pq.write_table(pa.table({"question": ["q", "r"], "a.b": numbers, "x": [1, 2]}), path)
        assert [row.get("a.b") for row in read_rows(path)] == [5.1, 0.1]
    table = pa.table({"question": ["q"], "answer": pa.array([123456792.0], pa.float32())})
    pq.write_table(table, path)
    assert load_tasks(DatasetConfig(path=path))[0].answers == ("123456792.0",)
    large = write(tmp_path, json.dumps({"question": "q", "answer": 10**400}) + "\n")
    assert load_tasks(large)[0].answers == ("1" + "0" * 400,)
    assert not caplog.records
    listed = write(tmp_path, '{"question": "q", "answer": "[\\"a\\", \\"b\\"]"}\n')
    assert load_tasks(listed)[0].answers == ('["a", "b"]',)
    assert caplog.text.count("1 answer is the text of a JSON list") == 1
    assert load_benchmark(str(listed.path)).tasks[0].answers == ('["a", "b"]',)
    assert caplog.text.count("1 answer is the text of a JSON list") == 2


@pytest.mark.skipif(not hasattr(pa, "json_"), reason="pyarrow has no type of JSON text")
def test_values_that_pyarrow_leaves_encoded(tmp_path: Path) -> None:
    """At any depth: JSON text, which ``datasets`` 5 writes for mixed values, and numbers of 32 bits."""
    texts = pa.array(['"Paris"', '["Amsterdam", "The Hague"]', None])
    number = pa.array([5.1, 0.1, None], pa.float32())
    columns = {
        "question": pa.array(["q", "r", "s"]),
        "answer": pa.ExtensionArray.from_storage(pa.json_(), texts),
        "list": pa.array([[5.1, None], [], None], pa.list_(pa.float32())),
        "table": pa.StructArray.from_arrays([number], ["truth"]),
        "map": pa.array([[("a", 5.1)], [], None], pa.map_(pa.string(), pa.float32())),
        "kind": pa.array(["x", "y", None]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    first, second, third = (dict(row.values) for row in read_rows(tmp_path / "t.parquet"))
    assert first == {
        "question": "q", "answer": "Paris", "list": [5.1, None], "table": {"truth": 5.1},
        "map": [("a", 5.1)], "kind": "x",
    }  # fmt: skip
    assert second["answer"] == ["Amsterdam", "The Hague"] and second["table"] == {"truth": 0.1}
    assert [third[name] for name in ("answer", "list", "map", "kind")] == [None] * 4
