"""Alarms of a run: lost rollouts with reasons, skipped steps, and an evaluation without any result."""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from outrider.config import load_settings
from outrider.environments.base import EpisodeResult
from outrider.environments.reasoning_gym.environment import ReasoningGymConfig
from outrider.environments.tool_qa.environment import ToolEnvironment, ToolsConfig
from outrider.errors import EnvironmentFault
from outrider.metrics import declared_metric
from outrider.rollout.faults import fault_line
from outrider.trace import Leaf, Trace
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import run_training
from outrider.training.step_metrics import retrieval_metrics, rollout_metrics, skipped_alarms, step_alarms
from outrider.types import Message, Origin, Outcome, Task
from outrider.viewer.ranges import RangeWatch
from outrider.viewer.run_reader import read_alarms
from tests.log_lines import messages
from tests.training.tool_run import write_tool_run

HYBRID = 'type = "rapo"\ngroup_size = 4\nnum_hybrid = 2'
Reset = Callable[[ToolEnvironment, Task, int], Sequence[Message]]
Record = Callable[[ToolEnvironment], EpisodeResult]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tool_run(tmp_path_factory.mktemp("alarms"))
    path.write_text(path.read_text().replace(HYBRID, 'type = "grpo"\ngroup_size = 4'))
    return path


def train(recipe: Path, name: str, *overrides: str) -> Path:
    settings = load_settings(
        RunSettings, file=recipe, overrides=["evaluation.every=0", "train.num_steps=1", *overrides]
    )
    run = recipe.parent / name
    run_training((RunDirectory.create(run, settings), settings), progress="plain", on_start=lambda stop: None)
    return run


def test_a_run_reports_lost_and_retried_rollouts(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reset: Reset = ToolEnvironment.reset
    num_calls = 0

    def flaky(environment: ToolEnvironment, task: Task, seed: int) -> Sequence[Message]:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 3 == 0:
            raise EnvironmentFault("the simulator hung up")
        return reset(environment, task, seed)

    monkeypatch.setattr(ToolEnvironment, "reset", flaky)
    run = train(recipe, "flaky", "train.max_retries=1")
    output = capsys.readouterr().out
    assert "the simulator hung up" in output and re.search("(try was|tries were) repeated", output)
    [before] = [line for line in messages(output) if line.startswith("before training: ")]
    assert re.search(r" faults.*, [1-9]\d* (try|tries) repeated; split", before)
    record = next(
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"train"' in line
    )
    assert record["rollout/num_retries"] >= 1 and record["rollout/num_close_faults"] == 0


def test_the_budget_of_policy_tokens_counts_failed_tries(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_of: Record = ToolEnvironment.result
    calls = itertools.count()

    def flaky(environment: ToolEnvironment) -> EpisodeResult:
        if next(calls) % 3 == 0:
            raise EnvironmentFault("the episode is over and its record is gone")
        return record_of(environment)

    monkeypatch.setattr(ToolEnvironment, "result", flaky)
    run = train(recipe, "discarded", "evaluation.at_start=false", "train.max_retries=9")
    [record] = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"train"' in line
    ]
    assert record["rollout/num_masked"] == 0 and record["tokens/discarded"] > 0
    assert record["tokens/policy_total"] == record["tokens/policy"] + record["tokens/discarded"]


def test_an_evaluation_in_which_every_rollout_was_lost_is_no_result(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded as a score of NaN it would count as done: a resumed run would never play it again."""
    with monkeypatch.context() as broken:
        broken.setattr(ToolEnvironment, "reset", _refuse)
        with pytest.raises(
            EnvironmentFault, match="every rollout was lost to a fault: tasks-0: no simulator today"
        ):
            train(recipe, "broken")
    run = recipe.parent / "broken"
    assert not (run / "evaluations.jsonl").exists() or not (run / "evaluations.jsonl").read_text()


def _refuse(environment: object, task: Task, seed: int) -> None:
    raise EnvironmentFault("no simulator today")


def settings_of(recipe: Path) -> RunSettings:
    return load_settings(RunSettings, file=recipe)


def test_a_step_without_any_rollout_is_an_alarm_with_its_reason(recipe: Path) -> None:
    values = {"rollout/num": 8.0, "rollout/num_masked": 8.0}
    [line] = step_alarms(
        settings_of(recipe), step=3, values=values, fault_reasons=["environment_fault in a: dead", "b"]
    )
    assert (
        line.startswith("ALARM: every rollout of step 3 was lost")
        and "environment_fault in a: dead (and 1 more)" in line
    )


def test_faults_that_end_no_rollout_are_reported(recipe: Path) -> None:
    """Environments that failed to close, reflections, and experts of prefixes and help."""
    values = {"rollout/num": 8.0, "rollout/num_masked": 0.0, "rollout/num_retries": 0.0}
    reasons = ["the expert of a: gone", "closing an environment: stuck"]
    assert step_alarms(settings_of(recipe), step=3, values=values, fault_reasons=reasons) == [
        "step 3: 2 faults that ended no rollout: the expert of a: gone (and 1 more)"
    ]


def test_a_step_without_problems_has_no_alarm(recipe: Path) -> None:
    values = {
        "rollout/num": 8.0,
        "rollout/num_masked": 0.0,
        "rollout/num_tool_calls": 2.0,
        "grad/num_skipped": 0.0,
    }
    assert step_alarms(settings_of(recipe), step=3, values=values, fault_reasons=[]) == []


@pytest.mark.parametrize("tools", [(), ("python",)])
def test_calls_are_missed_where_there_are_tools(recipe: Path, tools: tuple[str, ...]) -> None:
    for environment in (ReasoningGymConfig(tools=tools), ToolsConfig(tools=tools, protocol="hermes")):
        settings = settings_of(recipe).model_copy(update={"environment": environment})
        said = step_alarms(settings, step=3, values={"rollout/num_tool_calls": 0.0}, fault_reasons=[])
        starts = [line.startswith("ALARM: no rollout of step 3 executed") for line in said]
        assert starts == [True] * len(tools)


def test_a_skipped_update_is_an_alarm() -> None:
    assert skipped_alarms(2, {"grad/num_skipped": 0.0}) == []
    [line] = skipped_alarms(2, {"grad/num_skipped": 1.0})
    assert "ALARM: 1 optimiser step of step 2 skipped" in line


def test_a_metric_that_leaves_its_range_is_an_alarm_of_the_run(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The history is made up; the gradient of the one step is clipped."""
    monkeypatch.setattr(
        RangeWatch, "from_run", lambda data: RangeWatch(data.settings, {"grad/clipped_fraction": (6, 0, 4)})
    )
    run = train(recipe, "ranges", "evaluation.num_tasks=1", "optimizer.max_grad_norm=1e-6")
    [alarm] = [alarm for alarm in read_alarms(run) if "grad/clipped" in alarm["text"]]
    assert alarm["step"] == 1 and "(at most 0.5) for 5 steps" in alarm["text"]


def test_a_long_reason_is_cut() -> None:
    assert fault_line([]) == "" and fault_line(["x"]) == "x"
    assert len(fault_line(["x" * 1000])) == 303


def played(*, agent: str = "expert", cut: int = 0) -> Trace:
    """One rollout: prompt, turn, observation, retrieved step, turn."""
    trace = Trace(task=Task(key="t", question="q"), modes=("hybrid",))
    said, seen = Message(role="assistant", content="a"), Message(role="inline", content="o")
    token = {"logprobs": (-0.5,), "entropies": (0.5,)}
    trace.append(parent=None, origin=Origin.PROMPT, token_ids=(1,), message=seen)
    trace.append(parent=0, origin=Origin.POLICY, token_ids=(2,), message=said, **token)
    trace.append(
        parent=1, origin=Origin.ENVIRONMENT, token_ids=(3,), message=seen, metadata={"num_tokens_cut": cut}
    )
    found = {"num_tokens_cut": 0, "agent": agent, "step_ids": [1], "similarity": 1.0}
    trace.append(parent=2, origin=Origin.BUFFER, token_ids=(4,), message=seen, metadata=found)
    trace.append(parent=3, origin=Origin.POLICY, token_ids=(5,), message=said, **token)
    trace.finish(Leaf(node_id=4, rollout=0, outcome=Outcome.FINISHED, episode_return=1.0, success=True))
    return trace


def test_observations_that_were_cut_are_counted() -> None:
    assert rollout_metrics([played(cut=7), played(), played(cut=1)])["rollout/num_observations_cut"] == 2


def test_turns_without_tokens_have_no_entropy() -> None:
    trace = Trace(task=Task(key="t", question="q"), modes=("on_policy",))
    said = Message(role="assistant", content="")
    trace.append(parent=None, origin=Origin.PROMPT, token_ids=(1,), message=said)
    trace.append(parent=0, origin=Origin.POLICY, token_ids=(), message=said)
    trace.finish(Leaf(node_id=1, rollout=0, outcome=Outcome.FINISHED, episode_return=1.0, success=True))
    metrics = rollout_metrics([trace])
    assert (metrics["entropy/token_mean"], metrics["entropy/turn_mean"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("agent", "name"), [("", "unnamed"), ("lab/model-{x}", "lab_model-_x_"), ("expert", "expert")]
)
def test_a_buffer_may_call_its_agents_anything(agent: str, name: str) -> None:
    """The name of the metric has to be a declared one, or the run would end after its update and before its
    record.
    """
    values = retrieval_metrics([played(agent=agent)], [], {})
    assert values[f"retrieval/num_hits/{name}"] == 1.0
    for metric in values:
        declared_metric(metric)
