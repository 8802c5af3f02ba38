"""The demo beside its recorded seeds: what is read, the paired gains, and the page."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.demo_beside import charts, heads, read_pairs, read_training, rows

from outrider.errors import DataError
from outrider.rollout.evaluate import interval as wilson
from outrider.viewer.report_parts import svg_chart

TASKS = [f"task {number}" for number in range(40)]


def evaluation(step: int, solved: int) -> dict[str, Any]:
    scores = {task: float(number < solved) for number, task in enumerate(TASKS)}
    interval = wilson(list(scores.values()), binary=True)
    return {
        "step": step, "label": f"after {step}", "split": "test", "panel_hash": "p", "temperature": 1.0,
        "num_tasks": len(TASKS),
        "metric": {"score": dict(zip(("value", "ci_low", "ci_high"), (solved / len(TASKS), *interval),
                                     strict=True))},
        "task_scores": scores,
    }  # fmt: skip


def write(run: Path, *, start: int | None, end: int | None, rewards: tuple[float, ...] = (0.1, 0.5)) -> None:
    run.mkdir(parents=True)
    steps = [
        {"kind": "train", "reward/mean": one, "tokens/policy_total": 100.0 * (n + 1)}
        for n, one in enumerate(rewards)
    ]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [{"kind": "cold_start"}, *steps])
    )
    told = [evaluation(step, solved) for step, solved in ((0, start), (2, end)) if solved is not None]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))


def test_gains_are_paired_with_the_cold_start_of_the_seed(tmp_path: Path) -> None:
    for seed, end in ((0, 20), (1, 4)):
        write(tmp_path / f"rapo-{seed}", start=4, end=end)
        write(tmp_path / f"grpo-{seed}", start=None, end=8)
    pairs = read_pairs(tmp_path)
    table = rows(pairs)
    assert (
        heads(pairs)[2] == "RAPO [95 %]"
        and heads(pairs)[4] == "GRPO [95 %]"
        and len(heads(pairs)) == len(table[0])
    )
    assert (
        table[0][:3] == ("0", "10.0 % [4.0, 23.1]", "50.0 % [35.2, 64.8]")
        and table[0][3].startswith("+40.0 points [+2")
        and table[0][5].startswith("+10.0 points [")
    )
    assert table[1][3].startswith("+0.0 points [-")  # nothing changed, and still the interval has a width
    page = "".join(svg_chart(chart) for chart in charts(pairs, read_training(tmp_path / "rapo-0")))
    assert page.count("<svg") == 2 and "this run" in page and "GRPO" in page
    assert "RAPO: first 10.0 %, last 30.0 %" in page  # means over the seeds, written as everywhere


def test_a_method_without_all_seeds_has_no_column(tmp_path: Path) -> None:
    write(tmp_path / "rapo-0", start=0, end=4)
    write(tmp_path / "rapo-1", start=0, end=4)
    write(tmp_path / "grpo-0", start=None, end=4)
    assert len(rows(read_pairs(tmp_path))[0]) == 4


def test_a_stopped_run_is_named(tmp_path: Path) -> None:
    write(tmp_path / "rapo-0", start=1, end=None)
    with pytest.raises(DataError, match="no evaluation after training"):
        read_pairs(tmp_path)


def test_a_run_from_a_checkpoint_starts_at_its_score(tmp_path: Path) -> None:
    write(tmp_path / "sft-0", start=4, end=None, rewards=())
    write(tmp_path / "rapo-0", start=None, end=20)
    assert [cell.partition(" [")[0] for cell in rows(read_pairs(tmp_path))[0][1:3]] == ["10.0 %", "50.0 %"]
