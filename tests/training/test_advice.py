"""Alarms about steps without a learning signal or without retrieval, with reasons from what was counted."""

from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.rollout.faults import count_cut, failure_reasons, limiting_setting, require_room
from outrider.rollout.hooks import HYBRID
from outrider.rollout.settings import Limits
from outrider.trace import Leaf, Trace
from outrider.training.settings import RunSettings
from outrider.training.step_metrics import Advice
from outrider.types import Message, Origin, Outcome, Task

LIMITS = Limits(max_turns=2, max_turn_tokens=4, max_response_tokens=8)
NO_SIGNAL = {"group/fraction_without_signal": 1.0, "rollout/num": 4.0, "rollout/num_masked": 0.0}
RETRIEVED_NOTHING = {"retrieval/num_inserted": 0.0, "rollout/num": 4.0, "rollout/num_masked": 0.0}


def trace_of(
    *turns: int,
    outcome: Outcome = Outcome.FINISHED,
    finish: str = "stop",
    success: bool = False,
    text: str = "a</answer>",
    prompt: int = 3,
    mode: str = "on_policy",
    num: int = 4,
) -> Trace:
    """A group of equal rollouts with turns of so many tokens."""
    trace = Trace(task=Task(key="task", question="?"), modes=(mode,) * num)
    root = trace.append(
        parent=None, origin=Origin.PROMPT, token_ids=(1,) * prompt, message=Message(role="user", content="?")
    )
    for rollout in range(num):
        last = root
        for size in turns:
            last = trace.append(
                parent=last.node_id, origin=Origin.POLICY, token_ids=(5,) * size, logprobs=(-1.0,) * size,
                entropies=(1.0,) * size, message=Message(role="assistant", content=text),
                metadata={"finish": finish},
            )  # fmt: skip
        leaf = Leaf(
            node_id=last.node_id, rollout=rollout, outcome=outcome, episode_return=0.0, success=success
        )
        trace.finish(leaf)
    return trace


def reason(trace: Trace, **changed: Any) -> str | None:
    [(leaf, path), *_] = trace.scored_rollouts()
    return limiting_setting(leaf, path, LIMITS, **{"context_length": 100, **changed})


def test_the_setting_that_cut_a_rollout_is_named() -> None:
    cut = Outcome.TRUNCATED_TOKENS
    assert reason(trace_of(4, finish="length")) == "rollout.max_turn_tokens = 4"
    assert reason(trace_of(4, finish="length", outcome=cut)) == "rollout.max_turn_tokens = 4"
    assert reason(trace_of(1, 1, outcome=Outcome.TRUNCATED_TURNS)) == "rollout.max_turns = 2"
    assert reason(trace_of(1, outcome=Outcome.TRUNCATED_TURNS)) == "the environment's own limit of moves"
    assert reason(trace_of(3, 3, 2, outcome=cut)) == "rollout.max_response_tokens = 8"
    assert (
        reason(trace_of(3, outcome=cut), context_length=6) == "the context of 6 tokens (model.context_length)"
    )
    assert reason(trace_of(3)) is None
    assert reason(trace_of(2, finish="length")) is None  # a program asked for so few tokens


def test_reasons_are_counted() -> None:
    traces = [trace_of(4, finish="length", num=3), trace_of(1, num=1), trace_of(1, success=True)]
    assert failure_reasons(traces, LIMITS, context_length=100) == {
        "cut by rollout.max_turn_tokens = 4": 3, "ended without success": 1,
    }  # fmt: skip
    assert count_cut(traces, LIMITS, context_length=100) == {"rollout.max_turn_tokens = 4": 3}


def test_prompts_without_room() -> None:
    full = trace_of(outcome=Outcome.TRUNCATED_TOKENS, prompt=9)
    assert require_room([trace_of(1)], context_length=9) == []
    [line] = require_room([trace_of(1), full], context_length=9)
    assert "4 of 8 rollouts" in line and "model.context_length" in line
    with pytest.raises(ConfigError, match=r"model\.context_length.* 9 tokens.*\(task\) has 9"):
        require_room([full], context_length=9)


def advice(algorithm: dict[str, Any] | None = None) -> Advice:
    settings = RunSettings.model_validate(
        {"model": {"name": "m"}, "environment": {"type": "factbook"},
         "algorithm": algorithm or {"type": "grpo"}, "rollout": LIMITS.model_dump()}
    )  # fmt: skip
    return Advice(settings=settings, context_length=100, stop=("</search>", "</answer>"))


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        (trace_of(3, text="so I think"), "4 of 4 rollouts ended without a closing tag; a cold start"),
        (trace_of(1, outcome=Outcome.INVALID), "4 ended with a turn that the environment cannot read; a"),
        (trace_of(4, finish="length"), "4 cut by rollout.max_turn_tokens = 4; raise the limit"),
        (trace_of(1, success=True), "all 4 rollouts solved the tasks; train on harder tasks"),
        (trace_of(1), "4 ended without success and all rollouts of a group have the same return"),
    ],
)
def test_a_step_without_signal_is_explained(trace: Trace, reason: str) -> None:
    [line] = advice().lines([trace], step=3, values=NO_SIGNAL)
    assert line.startswith("ALARM: step 3: ") and reason in line


@pytest.mark.parametrize(
    ("counted", "reason"),
    [
        ({}, "from the second turn on, and 4 of them ended in their first turn"),
        (
            {"retrieval/rate": 0.0, "retrieval/num_no_candidate": 5.0},
            "the buffer has no step for 5 retrievals",
        ),
        ({"retrieval/rate": 0.5, "retrieval/num_dropped": 2.0}, "raise rollout.max_response_tokens (now 8)"),
        ({"retrieval/rate": 0.5, "retrieval/num_refused": 2.0}, "refused 2 retrieved actions"),
        ({"retrieval/rate": 0.0}, "no turn drew a retrieval"),
    ],
)
def test_a_step_without_retrieval_is_explained(counted: dict[str, float], reason: str) -> None:
    traces = [trace_of(1, mode=HYBRID)]
    [line] = advice().lines(traces, step=1, values=RETRIEVED_NOTHING | counted)
    assert "none of 4 hybrid rollouts got a retrieved step" in line and reason in line


def test_a_planned_fading_of_retrieval_is_no_alarm() -> None:
    fading = {"schedule": "linear", "final_probability": 0.0}
    algorithm = {"type": "rapo", "group_size": 4, "num_hybrid": 2, "retrieval": fading}
    traces, values = [trace_of(1, mode=HYBRID)], RETRIEVED_NOTHING | {"retrieval/rate": 0.0}
    assert advice(algorithm).lines(traces, step=9, values=values) == []
    assert advice(algorithm).lines(traces, step=9, values=values | {"retrieval/num_dropped": 2.0}) != []


def test_the_same_advice_is_repeated_only_every_few_steps() -> None:
    one = advice()
    reason = [len(one.lines([trace_of(1)], step=step, values=NO_SIGNAL)) for step in range(1, 14)]
    assert reason == [1] + [0] * 9 + [1, 0, 0]
    assert one.lines([trace_of(1)], step=14, values=NO_SIGNAL | {"group/fraction_without_signal": 0.5}) == []
    assert len(one.lines([trace_of(1)], step=15, values=NO_SIGNAL)) == 1
    assert advice().lines([trace_of(1)], step=1, values=NO_SIGNAL | {"distill/num_tokens": 9.0}) == []
    lost = NO_SIGNAL | {"rollout/num_masked": 4.0}  # faults have an alarm of their own
    assert advice().lines([trace_of(1)], step=1, values=lost) == []


@pytest.mark.parametrize(
    ("retrieval", "reason"),
    [
        (
            {"scope": "same_task"},
            "none within algorithm.retrieval.scope = same_task that the rollout had not",
        ),
        (
            {"min_similarity": 0.99},
            "none within algorithm.retrieval.scope = all reaches algorithm.retrieval.min_similarity = 0.99",
        ),
    ],
)
def test_the_filter_that_left_no_step_is_named(retrieval: dict[str, Any], reason: str) -> None:
    algorithm = {"type": "rapo", "group_size": 4, "num_hybrid": 2, "retrieval": retrieval}
    counted = {"retrieval/rate": 0.0, "retrieval/num_no_candidate": 5.0, "buffer/num_steps": 8.0}
    [line] = advice(algorithm).lines([trace_of(1, mode=HYBRID)], step=1, values=RETRIEVED_NOTHING | counted)
    assert f"the buffer (8 steps) has no step for 5 retrievals: {reason}" in line
