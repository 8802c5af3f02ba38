"""A tiny run whose groups start behind steps of an expert: what it records, trains on and evaluates."""

from pathlib import Path
from typing import Any

import pytest

from outrider import cli
from outrider.environments.base import TaskSet
from outrider.errors import EnvironmentFault
from outrider.training import experts
from outrider.training.replay import replay_step
from outrider.types import Origin, Task
from outrider.viewer.records import TraceReader, read_rollouts, step_file
from tests.training.short_runs import records
from tests.training.whole_runs import command, write_inputs

pytestmark = pytest.mark.long


@pytest.mark.parametrize("help_", [False, True])
def test_experts_that_fail_are_reported_and_asked_again(
    help_: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prefixes, and of demonstrations that are help: they were "no expert" without a note, and a resumed
    run asked those of help again, which an unbroken one did not.
    """
    write_inputs(tmp_path)
    run = tmp_path / "run"
    arguments = [str(one) for one in command(tmp_path, run, "prefix")]
    if help_:
        arguments = [one for one in arguments if not one.startswith("algorithm.prefix")]
        arguments += ["algorithm.distill.help=demonstration", "algorithm.distill.support=8"]
    options = ("train.num_steps=2", "train.max_retries=0", "evaluation.at_start=false", "seed=4")
    working, requests = experts.request_expert_path, list[str]()

    def sometimes(task_set: TaskSet, task: Task, *others: Any, **options: Any) -> Any:
        requests.append(task.key)
        if len(requests) <= 2:
            raise EnvironmentFault("the expert's server is gone")
        return working(task_set, task, *others, **options)

    monkeypatch.setattr(experts, "request_expert_path", sometimes)
    assert cli.main([*arguments, *options, "rollout.max_turn_tokens=64", "train.tasks_per_step=4"]) == 0
    first, second = records(run)
    assert first["rollout/num_expert_faults"] == 2.0 and "rollout/num_expert_faults" not in second
    assert not {*requests[:2]} - {*requests[2:]}  # the same tasks are sampled in the second step
    notes = (run / "notes.jsonl").read_text()
    assert notes.count("2 faults that ended no rollout: the expert of ") == 1
    if help_:
        assert first["distill/num_without_help_no_demonstration"] == 8.0
        assert second["distill/num_without_help_no_demonstration"] == 0.0
    else:
        assert first["prefix/num_missing"] == 2.0 and second["prefix/num_groups"] > first["prefix/num_groups"]


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
