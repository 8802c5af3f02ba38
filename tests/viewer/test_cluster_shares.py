"""A run with ``[cluster]`` shows idle shares, staleness, weight transfers and repairs; other runs do not."""

import json
from pathlib import Path

import pytest
from benchmarks.idle_shares import rows

from outrider.viewer.ranges import out_of_range
from outrider.viewer.report import write_report
from outrider.viewer.run_reader import read_run
from outrider.viewer.summary import cluster_lines, read_snapshot, summary_lines
from tests.viewer.synthetic_run import write_run
from tests.viewer.test_overview import answer, label_of, page_of

TITLE = "Which processes waited?"
VALUES = {
    "time/idle_trainers": 0.95, "time/idle_engines": 0.25, "time/weights": 0.5, "weights/bytes": 538e6,
    "weights/num_failed": 0.0, "cluster/worker_deaths": 0.0,
}  # fmt: skip
STEPS: list[dict[str, float]] = [
    VALUES | {"staleness/mean": 0.0, "staleness/max": 0.0},
    VALUES | {"staleness/mean": 1.0, "staleness/max": 1.0, "time/idle_trainers": 0.2},
    VALUES | {"staleness/mean": 0.5, "staleness/max": 2.0, "cluster/engine_hangs": 2.0},
    VALUES | {"staleness/mean": 0.5, "cluster/trainer_restarts": 1.0, "rollout/num_groups_replayed": 3.0},
]  # fmt: skip
LINES = [
    "idle share of the step time (median): trainers 95%, engines 25%",
    "staleness of tokens, in weight versions: mean 0.50, max 2",
    "weights sent per step (mean): 0.500 s, 538MB",
    "repairs: 1 trainer restart, 2 engine replacements, 3 repeated groups",
]


def write_cluster_run(run: Path, steps: list[dict[str, float]]) -> Path:
    """A run whose training steps have these values too."""
    file = write_run(run, num_steps=len(steps)) / "metrics.jsonl"
    records, added = map(json.loads, file.read_text().splitlines()), iter(steps)
    changed = [record | (next(added) if record["kind"] == "train" else {}) for record in records]
    file.write_text("".join(f"{json.dumps(record)}\n" for record in changed))
    return run


@pytest.fixture(scope="module")
def cluster_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cluster_run(tmp_path_factory.mktemp("cluster") / "run", STEPS)


def test_the_summary_and_the_overview_show_who_waited(cluster_run: Path) -> None:
    assert [*cluster_lines(read_run(cluster_run))] == LINES
    assert f"{'cluster':<8} {LINES[0]}" in summary_lines(cluster_run)
    page = page_of(cluster_run)
    assert " ".join(LINES) in answer(page, TITLE) and label_of(page, "Idle")
    assert TITLE in write_report(cluster_run).read_text(encoding="utf-8")


def test_the_progress_lines_of_a_cluster_run_have_its_shares(cluster_run: Path, tmp_path: Path) -> None:
    last = next(line for line in read_snapshot(cluster_run).lines if line.startswith("step 4/"))
    assert (
        "idle trainers 0.950  idle engines 0.250  staleness 0.500  weights s 0.500  weights B  538M" in last
    )
    alone = write_run(tmp_path / "alone", num_steps=1)
    assert not any("idle" in line or "weights" in line for line in read_snapshot(alone).lines)
    assert [*cluster_lines(read_run(alone))] == [] and TITLE not in page_of(alone)
    assert [*cluster_lines(read_run(write_cluster_run(tmp_path / "whole", [VALUES])))][-1] == "no repairs"


def test_processes_that_wait_nearly_always_are_outside_of_their_range(cluster_run: Path) -> None:
    outside = {one.name: one.value for one in out_of_range(read_run(cluster_run))}
    assert outside["time/idle_trainers"] == 0.95 and "time/idle_engines" not in outside


def test_the_table_of_idle_shares_has_a_row_per_step_and_their_medians(cluster_run: Path) -> None:
    table = rows(cluster_run)
    assert [row[0] for row in table] == ["1", "2", "3", "4", "median"]
    assert table[1][4:8] == ["0.20", "0.25", "1.00", "0.50"] and table[-1][4] == "0.95"
    assert table[2][-1] == "–", "the gradient of step 3 is not a number"
