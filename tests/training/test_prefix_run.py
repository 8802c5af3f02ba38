"""A tiny run whose groups start behind steps of an expert: what it records, trains on and evaluates."""

from pathlib import Path

import pytest

from outrider import cli
from outrider.training.replay import replay_step
from outrider.types import Origin
from outrider.viewer.records import TraceReader, read_rollouts, step_file
from tests.training.short_runs import records
from tests.training.whole_runs import command, write_inputs

pytestmark = pytest.mark.long


def test_a_run_with_prefixes(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    run = tmp_path / "run"
    # turns that hold an action of the expert: a prefix ends before a longer one
    options = (
        *("train.num_steps=2", "evaluation.every=1", "algorithm.prefix.start=1.0", "seed=4"),
        *("rollout.max_turn_tokens=64", "rollout.max_response_tokens=1200"),
    )
    assert cli.main([*map(str, command(tmp_path, run, "prefix")), *options]) == 0
    steps = records(run)
    assert all(step["prefix/num_groups"] == 2.0 for step in steps)
    assert all(step["prefix/length_mean"] >= 1.0 and "prefix/success_guided" in step for step in steps)
    traces = TraceReader(run / "traces")
    for number in (1, 2):
        rows = traces.read(number)
        prefix = [row for row in rows if row.origin is Origin.DEMONSTRATION]
        groups = {row.trace_id for row in rows}
        # one branch for all siblings, without any value of an update
        assert len(prefix) == sum(
            len({row.text for row in prefix if row.trace_id == name}) for name in groups
        )
        assert all(not (row.advantages or row.ratios or row.trainer_logprobs) for row in prefix)
        assert replay_step(run, number) == 0
        rollouts = read_rollouts(run, step_file(number)).to_pylist()
        assert {row["kind"] for row in rollouts} == {"guided"}
        assert all(row["forked_from"] == row["rollout"] for row in rollouts)
    for number in range(3):
        evaluated = traces.read_evaluation(number)
        assert evaluated and all(row.origin is not Origin.DEMONSTRATION for row in evaluated)
