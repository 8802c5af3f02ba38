"""What the step buffer refuses, and that it says of which trajectory."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError, DataError, OutriderError
from outrider.memory.embedders import HashEmbedder
from outrider.memory.step_buffer import StepTraceBuffer
from tests.memory.builders import make_trajectory


@pytest.fixture
def buffer(tmp_path: Path) -> Any:
    with StepTraceBuffer(tmp_path / "buffer.sqlite", HashEmbedder(), mode="write") as opened:
        yield opened


@pytest.mark.parametrize("options", [{"keep_best": 0}, {"keep_best": -1}, {"batch_steps": 0}], ids=str)
def test_counts_below_one_are_refused(buffer: StepTraceBuffer, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        buffer.add_trajectories([make_trajectory("a")], **options)  # type: ignore[arg-type]
    assert len(buffer) == 0 and buffer.revision == 0


def test_the_smallest_counts_are_not(buffer: StepTraceBuffer) -> None:
    """One trajectory of a task, a revision for each task, and without a bound all of them."""
    offered = [make_trajectory(name, task=task) for name, task in (("a", "s"), ("b", "s"), ("c", "t"))]
    report = buffer.add_trajectories(offered, keep_best=1, batch_steps=1)
    assert (report.num_inserted, report.num_outranked, report.revision) == (2, 1, 2)
    assert buffer.add_trajectories(offered, keep_best=None).num_inserted == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"reward": math.nan}, "trajectory 'a': reward is nan"),
        ({"reward": math.inf}, "trajectory 'a': reward is inf"),
        ({"num_tokens": -1}, "trajectory 'a': num_tokens is -1"),
        ({"num_tokens": 2**63}, "trajectory 'a': num_tokens is"),
        ({"agent": "\ud800"}, "trajectory 'a': .* is not valid text"),
        ({"task_key": "\ud800"}, "trajectory 'a': .* is not valid text"),
    ],
    ids=str,
)
def test_a_refusal_names_the_trajectory(buffer: StepTraceBuffer, changes: dict[str, Any], told: str) -> None:
    wrong = replace(make_trajectory("a"), **changes)
    with pytest.raises(DataError, match=told):
        buffer.add_trajectories([make_trajectory("fine"), wrong])
    with pytest.raises(DataError, match=told):
        buffer.check([wrong])
    assert len(buffer) == 0


def test_an_id_of_another_task_is_refused_with_both_names(buffer: StepTraceBuffer) -> None:
    """Within one offer, and against what is stored; the same id twice for its own task only counts."""
    with pytest.raises(DataError, match="trajectory 'a': belongs to task 's' and to task 't'"):
        buffer.add_trajectories([make_trajectory("a", task="s"), make_trajectory("a", task="t")])
    report = buffer.add_trajectories([make_trajectory("a", task="s"), make_trajectory("a", task="s")])
    assert (report.num_offered, report.num_inserted, report.num_duplicate) == (2, 1, 1)
    with pytest.raises(DataError, match="trajectory 'a': belongs to task 's' and to task 't'"):
        buffer.add_trajectories([make_trajectory("a", task="t")])


def test_an_earlier_revision_is_read_only(buffer: StepTraceBuffer) -> None:
    buffer.add_trajectories([make_trajectory("a", num_steps=3)])
    buffer.add_trajectories([make_trajectory("b", num_steps=2)])
    with StepTraceBuffer(buffer.path, HashEmbedder(), mode="read", revision=1) as early:
        assert (len(early), early.revision, len(buffer)) == (3, 1, 5)
        with pytest.raises(OutriderError):
            early.add_trajectories([make_trajectory("c")])
        with pytest.raises(OutriderError):
            early.flush()
    assert len(buffer) == 5


def test_what_comes_behind_an_id_that_came_twice_is_stored(buffer: StepTraceBuffer) -> None:
    """And tasks are counted by their keys, not by anything else of their trajectories."""
    offered = [make_trajectory(name, task="s", agent=name) for name in ("a", "a", "b")]
    report = buffer.add_trajectories(offered)
    assert (report.num_offered, report.num_inserted, report.num_duplicate) == (3, 2, 1)
    assert buffer.stats().num_tasks == 1
