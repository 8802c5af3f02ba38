"""Agent programs whose policy is a model behind another endpoint are told what it says of its answers."""

import importlib.util
import json
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra agent")

from outrider.engines.chat import ChatEndpoint, EndpointSettings  # noqa: E402
from outrider.rollout.endpoint import Collected, Collector  # noqa: E402
from outrider.rollout.settings import Limits  # noqa: E402
from outrider.tokens.call_formats import CallFormatName  # noqa: E402
from outrider.types import Outcome, Task  # noqa: E402
from tests.chat_server import Answer, ChatServer, chat_server, completion  # noqa: E402
from tests.environments.agents.shared import shared_factory  # noqa: E402

AGENTS = "tests.environments.agents"
TASK = Task(key="t", question="How is Paris?", answers=("sunny",))
COUNTS = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
LOOK = {"id": "x", "type": "function", "function": {"name": "look", "arguments": "{}"}}
WRITTEN = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def play(
    program: str, *answers: Answer, task: Task = TASK, form: CallFormatName | None = "hermes"
) -> tuple[Collected, ChatServer]:
    with chat_server(list(answers)) as server:
        chosen = EndpointSettings(base_url=server.url, model="agent", max_retries=0)
        collector = Collector(
            endpoint=ChatEndpoint(chosen, sleep=lambda seconds: None),
            factory=shared_factory(function=f"{AGENTS}.{program}", tool_calls=form),
            limits=Limits(step_timeout_s=60), stop=(), run_seed=0,
        )  # fmt: skip
        [played] = collector.collect([task], num_rollouts=1).collected
    return played, server


def given(text: str | None, finish: object, usage: object = None, **message: Any) -> Answer:
    said = {"role": "assistant", "content": text, **message}
    return Answer({"choices": [{"index": 0, "message": said, "finish_reason": finish}], "usage": usage})


@pytest.mark.parametrize(
    ("answer", "finish", "usage"),
    [
        (given("b", "stop", COUNTS), "stop", COUNTS),
        (given("b", "length", COUNTS), "length", COUNTS),
        (given(None, "tool_calls", COUNTS, tool_calls=[LOOK]), "tool_calls", COUNTS),
        (given("", "length", COUNTS, tool_calls=[LOOK]), "length", COUNTS),
        (given(WRITTEN, "stop", COUNTS), "tool_calls", COUNTS),  # a server that reads no calls
        (given("b", None), None, None),
        (given("b", "eos_token", {"completion_tokens": 3}), None, None),  # half of the counts are none
    ],
)
def test_a_program_is_told_how_the_answer_ended_and_what_it_cost(
    answer: Answer, finish: str | None, usage: object
) -> None:
    played, server = play("programs:telling", answer, completion("c"))
    assert played.outcome is Outcome.FINISHED, played.detail
    told = server.asked[1].body
    assert told is not None and json.loads(told["messages"][-1]["content"]) == [finish, usage]


def test_a_program_s_stop_string_is_not_in_what_it_is_told() -> None:
    task = Task(key="t", question="", answers=("END",))
    played, server = play("programs:halting", given("b END", "stop"), completion("c"), task=task)
    assert played.outcome is Outcome.FINISHED, played.detail
    told = server.asked[1].body
    assert told is not None and json.loads(told["messages"][-1]["content"]) == ["b ", None]


@pytest.mark.parametrize("form", ["hermes", None])
@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_thinking_that_a_server_gives_apart_reaches_a_program_without_tools(
    form: CallFormatName | None, key: str
) -> None:
    played, server = play("programs:thinking", given("b", "stop", **{key: "Hm."}), completion("c"), form=form)
    assert played.outcome is Outcome.FINISHED, played.detail
    told = server.asked[1].body
    assert told is not None and json.loads(told["messages"][-1]["content"]) == ["b", "Hm."]


@pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs the package openai")
def test_openai_s_client_takes_answers_of_which_nothing_is_known() -> None:
    played, _ = play("clients:sdk_untold", given("It is sunny.", None))
    assert played.success, played.detail
