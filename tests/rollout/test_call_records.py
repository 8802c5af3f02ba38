"""The records of tool calls and of the return, from the environment to the files of a run."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from outrider.environments.base import EpisodeResult, StepResult
from outrider.errors import ToolFault
from outrider.rollout.hooks import Attempt, EpisodeState, Hook
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.tools.base import ToolOutput, recorded_call
from outrider.trace import Trace
from outrider.training.async_rollouts import group_to_dict, read_group
from outrider.training.step_records import trace_rows
from outrider.types import CallRecord, Origin, Outcome, Task, ToolSchema
from outrider.viewer.records import (
    ROLLOUT_SCHEMA,
    ROLLOUTS,
    SCHEMA,
    StepFiles,
    TraceReader,
    parse_metadata,
    read_rollouts,
    step_file,
)
from tests.rollout.fakes import END, TOKENIZER, Factory, Fake, say, scheduler, scripted

TASK = Task(key="t", question="q", answers=("Paris", "Paris, France"))
FOUND = CallRecord(name="search", arguments="tower", status="empty", seconds=0.25)
REFUSED = CallRecord(name="search", arguments='{"query": "\ud800"}', status="refused")
BROKEN = CallRecord(name="search", arguments="down", status="timeout", seconds=2.0)


class Explained(Fake):
    def result(self) -> EpisodeResult:
        return EpisodeResult(
            episode_return=0.5,
            success=False,
            answer="Rome",
            reward_parts={"exact": 0.0, "near": 0.5},
            reason="near",
        )


def found_then_refused(number: int, text: str) -> StepResult:
    return replace(
        say(" nothing") if number == 0 else END, tool_calls=(FOUND,) if number == 0 else (REFUSED,)
    )


def broken(number: int, text: str) -> StepResult:
    error = ToolFault("the server is down")
    error.tool_calls = (BROKEN,)
    raise error


@pytest.fixture(scope="module")
def trace() -> Trace:
    steps = (found_then_refused, broken)
    factory = Factory(lambda task, number: Explained(steps[number]))
    player = scheduler(scripted(lambda request, text: "go."), factory, max_concurrent=1, max_retries=0)
    [trace] = player.run([TASK], modes=("plain", "plain"), training_step=0).traces
    return trace


def test_records_are_at_the_observation_and_at_a_turn_that_ended_the_episode_or_failed(trace: Trace) -> None:
    calls = [(node.origin, node.tool_calls) for node in trace.nodes if node.tool_calls]
    policy = Origin.POLICY
    assert calls == [(Origin.ENVIRONMENT, (FOUND,)), (policy, (REFUSED,)), (policy, (BROKEN,))]


def hang(text: str) -> ToolOutput:
    time.sleep(0.6)
    return ToolOutput(text="late")


def crash(text: str) -> ToolOutput:
    raise ValueError("bug")


@dataclass(slots=True)
class Native(Fake):
    """An environment with native calls that runs no tool of ours."""

    call_format: str = "hermes"
    tool_schemas: tuple[ToolSchema, ...] = ({"name": "search", "parameters": {"type": "object"}},)


@pytest.mark.parametrize(("run", "status"), [(hang, "timeout"), (crash, "error")])
@pytest.mark.parametrize("kind", ["tool", "native", "attempt"])
def test_the_calls_of_a_step_that_times_out_or_raises_are_failed(
    run: Callable[[str], ToolOutput], status: str, kind: str
) -> None:
    class Retrieval(Hook):
        def before_turn(self, state: EpisodeState) -> Sequence[Attempt]:
            return [Attempt(action="again", then=lambda result: None)] if state.turn == 1 else []

    def step(number: int, text: str) -> StepResult:
        if kind == "attempt" and number == 0:
            return say(" go on")
        if kind == "native":
            return say(run(text).text)
        output, call = recorded_call(lambda: run(text), "search", "tower")
        return replace(say(output.text), tool_calls=(call,))

    text = '<tool_call>{"name": "search", "arguments": {}}</tool_call>' if kind == "native" else "go."
    player = scheduler(
        scripted(lambda request, turn: text),
        Factory(lambda task, number: (Native if kind == "native" else Fake)(step)),
        limits=Limits(step_timeout_s=0.3 if run is hang else 60),
        hooks=[Retrieval()] if kind == "attempt" else [],
        max_retries=0,
    )
    player.renderer = ChatRenderer(TOKENIZER, call_format="hermes")
    [trace] = player.run([TASK], modes=("plain",), training_step=0).traces
    [row] = trace_rows([trace], step=1, tokenizer=TOKENIZER).rollouts
    assert (row.outcome, row.num_failed_calls) == (Outcome.ENVIRONMENT_FAULT, 1)
    [(origin, [call])] = [(node.origin, node.tool_calls) for node in trace.nodes if node.tool_calls]
    assert origin is (Origin.ENVIRONMENT if kind == "attempt" else Origin.POLICY)
    assert (call.name, call.status) == ("search", status)


def test_the_record_of_a_call_that_fails_in_a_group_of_exceptions() -> None:
    def run() -> ToolOutput:
        raise ExceptionGroup("several", [ValueError("bug"), ToolFault("down")])

    with pytest.raises(ToolFault, match="down") as raised:
        recorded_call(run, "search", "tower")
    assert raised.value.tool_calls == (CallRecord(name="search", arguments="tower", status="error"),)


def test_a_checkpoint_keeps_the_records_of_calls_and_of_the_return(trace: Trace) -> None:
    found = read_group(json.loads(json.dumps(group_to_dict(trace))))
    assert [asdict(node) for node in found.nodes] == [asdict(node) for node in trace.nodes]
    assert found.leaves == trace.leaves and found.leaves[0].grade["reason"] == "near"


def test_rows_explain_the_return_and_count_failed_calls(trace: Trace, tmp_path: Path) -> None:
    rows = trace_rows([trace], step=1, tokenizer=TOKENIZER)
    StepFiles(tmp_path / "traces").write_rows(step_file(1), rows.nodes, SCHEMA)
    StepFiles(tmp_path / ROLLOUTS).write_rows(step_file(1), rows.rollouts, ROLLOUT_SCHEMA)
    ended, lost = read_rollouts(tmp_path, "step-000001.parquet").to_pylist()
    assert (ended["outcome"], lost["outcome"]) == (Outcome.FINISHED, Outcome.TOOL_FAULT)
    explained = {name: ended[name] for name in ("targets", "answer", "reward_parts", "reason")}
    assert explained == {
        "targets": '["Paris", "Paris, France"]', "answer": "Rome",
        "reward_parts": '{"exact": 0.0, "near": 0.5}', "reason": "near",
    }  # fmt: skip
    assert (lost["targets"], lost["answer"], lost["reason"]) == (ended["targets"], None, None)
    assert (ended["num_failed_calls"], lost["num_failed_calls"]) == (1, 1)
    read = TraceReader(tmp_path / "traces").read(1)
    calls = [parse_metadata(row)["tool_calls"] for row in read if row.seconds]
    assert calls == [
        [{"name": "search", "arguments": "tower", "status": "empty"}],
        [{"name": "search", "arguments": '{"query": "\\ud800"}', "status": "refused"}],
        [{"name": "search", "arguments": "down", "status": "timeout"}],
    ]
    seconds = [row.seconds[0] for row in read if row.seconds]
    assert seconds[0] == 0.25 and math.isnan(seconds[1]) and seconds[2] == 2.0


def test_rows_that_differ_only_in_the_clock_are_equal(trace: Trace) -> None:
    row = next(row for row in trace_rows([trace], step=1, tokenizer=TOKENIZER).nodes if row.seconds)
    assert replace(row, seconds=(9.0,)) == row != replace(row, metadata="{}")
