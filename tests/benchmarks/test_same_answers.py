"""Answers that are the same for every task are seen."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import same_answers


def test_the_most_common_answers_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = [
        ("a", "Red it is, not blue."),
        ("a", "up"),
        ("b", "RED"),
        ("b", "up or down"),
        ("c", "blue"),
        ("c", "?"),
    ]
    rows = [{"task_key": key, "origin": "policy", "text": text} for key, text in said]
    rows.insert(1, {"task_key": "a", "origin": "environment", "text": "blue"})
    (tmp_path / "run" / "traces").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "run" / "traces" / "evaluation-000.parquet")
    assert same_answers.main([str(tmp_path / "run"), "--words", "red,blue", "up,down"]) == 0
    assert capsys.readouterr().out == "run: 2 of 3 got red, up\n"
