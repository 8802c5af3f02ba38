"""Agent programs whose policy is a model behind another endpoint get what it reports about its answers."""

import json
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra agent")

from outrider.engines.chat import ChatEndpoint, EndpointSettings  # noqa: E402
from outrider.rollout.endpoint import Collected, Collector  # noqa: E402
from outrider.rollout.settings import Limits  # noqa: E402
from outrider.types import Outcome, Task  # noqa: E402
from tests.chat_server import Answer, ChatServer, chat_server, completion  # noqa: E402
from tests.environments.agents.harness import PROGRAMS, shared_factory, task  # noqa: E402

COUNTS = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
LOOK = {"id": "x", "type": "function", "function": {"name": "look", "arguments": "{}"}}
WRITTEN = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def play(task: Task, *answers: Answer, form: Any = "hermes", module: str = PROGRAMS) -> tuple[Collected, Any]:
    with chat_server(list(answers)) as server:
        chosen = EndpointSettings(base_url=server.url, model="agent", max_retries=0)
        collector = Collector(
            endpoint=ChatEndpoint(chosen, sleep=lambda seconds: None),
            factory=shared_factory(module, tool_calls=form),  # type: ignore[arg-type]
            limits=Limits(step_timeout_s=60), stop=(), run_seed=0,
        )  # fmt: skip
        [played] = collector.collect([task], num_rollouts=1).collected
    return played, server


def second_message(played: Collected, server: ChatServer) -> Any:
    """The last message of the program's second request, which repeats the first answer as JSON."""
    assert played.outcome is Outcome.FINISHED, played.detail
    body = server.asked[1].body
    assert body is not None
    return json.loads(body["messages"][-1]["content"])


def answered(text: str | None, finish: object, usage: object = None, **message: Any) -> Answer:
    said = {"role": "assistant", "content": text, **message}
    return Answer({"choices": [{"index": 0, "message": said, "finish_reason": finish}], "usage": usage})


@pytest.mark.parametrize(
    ("answer", "finish", "usage"),
    [
        (answered("b", "stop", COUNTS), "stop", COUNTS),
        (answered("b", "length", COUNTS), "length", COUNTS),
        (answered(None, "tool_calls", COUNTS, tool_calls=[LOOK]), "tool_calls", COUNTS),
        (answered("", "length", COUNTS, tool_calls=[LOOK]), "length", COUNTS),
        (answered(WRITTEN, "stop", COUNTS), "tool_calls", COUNTS),  # a server that parses no calls
        (answered("b", None), None, None),
        (answered("b", "eos_token", {"completion_tokens": 3}), None, None),  # half of the counts is none
    ],
)
def test_finish_reason_and_usage(answer: Answer, finish: str | None, usage: object) -> None:
    assert second_message(*play(task("telling"), answer, completion("c"))) == [finish, usage]


def test_a_stop_string_is_removed() -> None:
    found = second_message(*play(task("halting", "END"), answered("b END", "stop"), completion("c")))
    assert found == ["b ", None]


@pytest.mark.parametrize(("form", "key"), [("hermes", "reasoning"), (None, "reasoning_content")])
def test_separate_reasoning_reaches_a_program_without_tools(form: Any, key: str) -> None:
    played = play(task("thinking"), answered("b", "stop", **{key: "Hm."}), completion("c"), form=form)
    assert second_message(*played) == ["b", "Hm."]


@pytest.mark.parametrize("arguments", ['{"city": ', '{"town": "Oslo"}', "", "Oslo", "[1]"])
def test_a_call_that_the_server_parsed_is_passed_on_unchanged(arguments: str) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "wether", "arguments": arguments}}
    first = answered(None, "tool_calls", COUNTS, tool_calls=[call])
    one = task("recovering", json.dumps([["wether", arguments or "{}"]]))
    played, server = play(one, first, answered("done", "stop", COUNTS))
    assert (played.outcome, played.metrics["num_unfit_calls"]) == (Outcome.FINISHED, 1.0), played.detail
    body = server.asked[1].body
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == (arguments or "{}")


def test_a_refusal_of_the_endpoint_reaches_the_program_unless_it_is_the_first() -> None:
    bad = Answer({"error": {"message": "System message must be at the beginning."}}, status=400)
    one = task("refused_behind_an_endpoint")
    played, server = play(one, completion("b"), bad, completion("c"))
    assert (played.outcome, played.metrics["num_refused_requests"]) == (Outcome.FINISHED, 1.0), played.detail
    assert played.trajectory is not None and played.trajectory.reward == 1.0 and len(server.asked) == 3
    played, _ = play(one, Answer({"error": {"message": "unknown field seed"}}, status=400))
    assert played.outcome is Outcome.ENGINE_FAULT and "unknown field seed" in played.detail
