"""An endpoint's agent in an environment: the environment's return, faults counted and left out, nothing
raised by output.
"""

import re
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.engines.chat import ChatEndpoint, ChatReply, EndpointSettings
from outrider.errors import EngineFault, EnvironmentFault, ModelError
from outrider.rollout.endpoint import Collected, Collector
from outrider.rollout.settings import Limits
from outrider.types import Message, Outcome, Task
from tests.chat_server import Answer, Asked, chat_server, completion
from tests.toy import ToyTaskSet


def collector(url: str, family: ToyTaskSet, *, continues: bool = False, **options: Any) -> Collector:
    chosen = EndpointSettings(
        base_url=url, model="agent", timeout_s=5.0, max_retries=1, continues_messages=continues
    )
    chat = ChatEndpoint(chosen, sleep=lambda seconds: None)
    return Collector(
        endpoint=chat, factory=family.make(), stop=family.stop, run_seed=0, **{"limits": Limits(), **options}
    )


def solver(asked: Asked) -> Answer:
    """Asks first, then reads the number out of the result; leaves the stop strings out, as servers do."""
    found = re.search(r"it is (\d+)", str((asked.body or {})["messages"]))
    return completion("<ask>?" if found is None else f"<answer>{found[1]}")


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("role", ["inline", "user"])
def test_trajectories_have_the_return_of_the_environment(role: str, continues: bool) -> None:
    family = ToyTaskSet(2, role=role)
    with chat_server(solver) as server:
        report = collector(server.url, family, continues=continues).collect(
            family.tasks("train"), num_rollouts=3
        )
        last = (server.asked[-1].body or {})["messages"]
    assert [one.trajectory_id for one in report.collected] == [
        f"agent/toy/{t}/{r}" for t in range(2) for r in range(3)
    ]
    for trajectory in report.trajectories:
        ask, answer = trajectory.steps
        assert (ask.text, ask.is_terminal, answer.is_terminal) == ("<ask>?</ask>", False, True)
        number = re.search(r"it is (\d+)", ask.observation)
        assert number is not None and answer.text == f"<answer>{number[1]}</answer>"
        assert (trajectory.reward, trajectory.agent, trajectory.num_tokens) == (2.0, "agent", 14)
        assert trajectory.prompt[0] == Message(role="system", content="rules")
    assert report.outcomes == {Outcome.FINISHED: 6} and family.num_closed == 6
    roles = [message["role"] for message in last]
    merged = continues and role == "inline"
    assert roles == (["system", "user", "assistant"] if merged else ["system", "user", "assistant", "user"])


def test_rollouts_of_a_task_share_the_reset_seed_and_differ_in_the_sampling_seed() -> None:
    family = ToyTaskSet(2)
    with chat_server(solver) as server:
        report = collector(server.url, family).collect(family.tasks("train"), num_rollouts=2)
        seeds = [(asked.body or {})["seed"] for asked in server.asked]
    first = [one.steps[0].observation for one in report.trajectories]
    assert first[0] == first[1] and first[2] == first[3] and first[0] != first[2]
    assert len(set(seeds)) == len(seeds) == 8


def test_finished_rollouts_are_skipped_and_counted() -> None:
    family = ToyTaskSet(2)
    with chat_server(solver) as server:
        report = collector(server.url, family).collect(
            family.tasks("train"), num_rollouts=2, done={"agent/toy/1/0", "other"}
        )
    assert [one.trajectory_id for one in report.collected] == [
        "agent/toy/0/0",
        "agent/toy/0/1",
        "agent/toy/1/1",
    ]
    assert report.num_skipped == 1


@pytest.mark.parametrize(
    ("text", "outcome"), [("<crash>", Outcome.ENVIRONMENT_FAULT), ("<break>", Outcome.TOOL_FAULT)]
)
def test_a_fault_is_retried_and_leaves_no_trajectory(text: str, outcome: Outcome) -> None:
    family = ToyTaskSet(1)
    with chat_server([completion(text)]) as server:
        report = collector(server.url, family, max_retries=2).collect(family.tasks("train"), num_rollouts=1)
    (one,) = report.collected
    assert (one.outcome, one.trajectory, one.num_retries) == (outcome, None, 2)
    assert one.detail and family.num_closed == 3 and report.trajectories == []


def test_a_successful_retry_is_counted() -> None:
    family = ToyTaskSet(1, num_early_faults=2)
    with chat_server(solver) as server:
        (one,) = (
            collector(server.url, family, max_retries=2)
            .collect(family.tasks("train"), num_rollouts=1)
            .collected
        )
    assert (one.outcome, one.num_retries) == (Outcome.FINISHED, 2)


def test_limits_of_turns_and_tokens() -> None:
    family = ToyTaskSet(1)
    with chat_server([completion("<ask>?")]) as server:
        turns = collector(server.url, family, limits=Limits(max_turns=3)).collect(
            family.tasks("train"), num_rollouts=1
        )
        tokens = collector(server.url, family, limits=Limits(max_response_tokens=10, max_turn_tokens=8))
        cut = tokens.collect(family.tasks("train"), num_rollouts=1)
        rooms = [(asked.body or {})["max_tokens"] for asked in server.asked]
    assert (turns.collected[0].outcome, len(turns.trajectories[0].steps)) == (Outcome.TRUNCATED_TURNS, 3)
    assert (cut.collected[0].outcome, len(cut.trajectories[0].steps)) == (Outcome.TRUNCATED_TOKENS, 2)
    assert rooms == [256, 256, 256, 8, 3]
    assert turns.trajectories[0].reward == 0.0 and not turns.trajectories[0].steps[-1].is_terminal


def test_num_concurrent_is_the_number_of_running_rollouts() -> None:
    running, most, lock, gate = [0], [0], threading.Lock(), threading.Barrier(3, timeout=30)

    class Counting(ChatEndpoint):
        def complete(self, *arguments: Any, **options: Any) -> ChatReply:
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            gate.wait()  # three do run at once, or this breaks
            with lock:
                running[0] -= 1
            gate.wait()
            return ChatReply(text="<answer>1</answer>")

    family = ToyTaskSet(3)
    chat = Counting(EndpointSettings(base_url="http://127.0.0.1:9/v1"))
    played = Collector(
        endpoint=chat, factory=family.make(), limits=Limits(), stop=family.stop, run_seed=0, num_concurrent=3
    )
    report = played.collect(family.tasks("train"), num_rollouts=2)
    assert most[0] == 3 and report.outcomes == {Outcome.FINISHED: 6}


def test_a_dead_server_stops_the_collection() -> None:
    family = ToyTaskSet(50)
    with chat_server([Answer({}, status=500)]) as server:
        dead = collector(server.url, family, max_faults_in_a_row=3, num_concurrent=2)
        with pytest.raises(EngineFault, match=r"3 rollouts in a row failed; the last: .* status 500"):
            dead.collect(family.tasks("train"), num_rollouts=1)
        assert len(server.asked) < 20  # 50 rollouts of two tries would be 100


def test_single_engine_faults_do_not_stop_the_collection() -> None:
    family = ToyTaskSet(10)
    broken = ("question 3", "question 7")

    def script(asked: Asked) -> Answer:
        return Answer({}, status=400) if any(one in str(asked.body) for one in broken) else solver(asked)

    with chat_server(script) as server:
        chosen = collector(server.url, family, max_faults_in_a_row=2, num_concurrent=1)
        report = chosen.collect(family.tasks("train"), num_rollouts=1)
    assert report.outcomes == {Outcome.FINISHED: 8, Outcome.ENGINE_FAULT: 2} and len(report.trajectories) == 8


def test_an_invalid_api_key_stops_the_collection() -> None:
    family = ToyTaskSet(50)
    with chat_server([Answer({}, status=401)]) as server, pytest.raises(ModelError, match="valid key"):
        collector(server.url, family, num_concurrent=2).collect(family.tasks("train"), num_rollouts=1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(
        st.text(max_size=30) | st.sampled_from(["<ask>", "</answer>", "<ask>\ud800</ask>", "\x00"]),
        min_size=1,
    )
)
def test_no_model_output_raises(texts: list[str]) -> None:
    class Saying(ChatEndpoint):
        def complete(self, messages: Any, **options: Any) -> ChatReply:
            return ChatReply(text=texts[len(messages) // 2 % len(texts)], num_tokens=1)

    family = ToyTaskSet(1)
    chat = Saying(EndpointSettings(base_url="http://127.0.0.1:9/v1"))
    played = Collector(
        endpoint=chat, factory=family.make(), limits=Limits(), stop=family.stop, run_seed=0, num_concurrent=1
    )
    (one,) = played.collect(family.tasks("train"), num_rollouts=1).collected
    assert not one.outcome.is_fault and one.trajectory is not None


def test_an_unreadable_truncated_turn_is_truncated_and_not_invalid() -> None:
    family = ToyTaskSet(1)
    outcomes = []
    for finish in ("stop", "length"):
        with chat_server([completion("hm", finish=finish)]) as server:
            outcomes += collector(server.url, family).collect(family.tasks("train"), num_rollouts=1).outcomes
    assert outcomes == [Outcome.INVALID, Outcome.TRUNCATED_TOKENS]


def test_the_callback_receives_every_rollout_when_it_ends() -> None:
    family = ToyTaskSet(2)
    played: list[tuple[str, int, Collected]] = []
    owed = [(family.tasks("train")[1], 4), (family.tasks("train")[0], 2)]
    with chat_server(solver) as server:
        returned = collector(server.url, family, num_concurrent=1).play(
            owed,
            on_rollout_done=lambda task, rollout, collected: played.append((task.key, rollout, collected)),
        )
    assert [(key, rollout) for key, rollout, _ in played] == [("toy/1", 4), ("toy/0", 2)]
    assert tuple(collected for _, _, collected in played) == returned
    assert [one.trajectory_id for one in returned] == ["agent/toy/1/4", "agent/toy/0/2"]
    assert [one.num_tool_calls for one in returned] == [1, 1]


def test_an_error_of_the_callback_stops_the_collection() -> None:
    family = ToyTaskSet(20)

    def full(task: Task, rollout: int, collected: Collected) -> None:
        raise OSError("no space left")

    with chat_server(solver) as server, pytest.raises(OSError, match="no space left"):
        collector(server.url, family, num_concurrent=1).play(
            [(task, 0) for task in family.tasks("train")], on_rollout_done=full
        )
    assert family.num_closed < 20


def test_an_episode_over_the_context_of_the_server_is_truncated_and_scored() -> None:
    """A refusal of the first request is the server's; one of a grown conversation is the agent's end."""
    refusal = Answer({"error": {"message": "This model's maximum context length is 64 tokens"}}, status=400)
    family = ToyTaskSet(1)
    for script, outcome in (
        ([completion("<ask>?</ask>"), refusal], Outcome.TRUNCATED_TOKENS),
        ([refusal], Outcome.ENGINE_FAULT),
    ):
        found: list[Collected] = []
        with chat_server(script) as server:
            collector(server.url, family).play(
                [(family.tasks("train")[0], 0)],
                on_rollout_done=lambda task, sample, one, found=found: found.append(one),
            )
        assert [one.outcome for one in found] == [outcome]
        assert (found[0].trajectory is not None) == (outcome is Outcome.TRUNCATED_TOKENS)


class NoConnection(EnvironmentFault):
    """A fault that an environment tells apart, as that of OpenEnv servers does."""


def test_a_subclass_of_a_fault_has_the_same_outcome() -> None:
    def factory(task: Task) -> Any:
        raise NoConnection("nobody there")

    family = ToyTaskSet(1, role="user")
    with chat_server(solver) as server:
        playing = replace(collector(server.url, family, max_retries=1), factory=factory)
        [one] = playing.collect(family.tasks("train"), num_rollouts=1).collected
    assert (one.outcome, one.num_retries, one.detail) == (Outcome.ENVIRONMENT_FAULT, 1, "nobody there")
