"""Plan's memory beside what a process holds at its peak (`python -m benchmarks.plan_memory` has all rows)."""

from pathlib import Path

import pytest
from benchmarks.plan_memory import MODELS, Job, measure, save_model

from tests.tiny import save_tiny_model


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_predicted_peak_of_a_trainer_is_within_ten_percent(precision: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **MODELS["42M, tied"])
    row = measure(Job(precision=precision), folder, save_tiny_model(tmp_path / "tiny"))
    assert abs(row.off) < 0.1, row
