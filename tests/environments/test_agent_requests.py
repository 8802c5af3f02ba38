"""What a program may ask, and what is refused: in words, in OpenAI's form, and counted."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra agent")

from outrider.environments.agent.environment import AgentEnvironment  # noqa: E402
from outrider.environments.agent.requests import Answer, BadRequest, PolicyRequest, read_chat
from outrider.environments.agent.responses import read_response, response_events  # noqa: E402
from outrider.environments.agent.responses import response as written  # noqa: E402
from outrider.environments.agent.server import MAX_BYTES, Gateway  # noqa: E402
from outrider.environments.base import Episode  # noqa: E402
from outrider.errors import EnvironmentFault  # noqa: E402
from outrider.rollout.settings import Limits  # noqa: E402
from outrider.tokens import ChatRenderer  # noqa: E402
from outrider.trace import split_contexts  # noqa: E402
from outrider.types import Message, Outcome, Task, ToolCall  # noqa: E402
from tests.environments.test_agent import ONE, scheduled  # noqa: E402
from tests.tokens.family_templates import FAMILIES, byte_tokenizer  # noqa: E402

ASKING = "tests.environments.agents.asking"
HELLO = [{"role": "user", "content": "a"}]


def look(**parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "look", "parameters": parameters}}]


def of(**fields: Any) -> PolicyRequest:
    return read_chat({"messages": HELLO, **fields}, takes_tools=True)


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": 5},
        {"required": [1]},
        {"properties": {"a": {"type": ["integer", {}]}}},
        {"properties": {"a": {"type": 3}}},
        {"properties": [1]},
        {"properties": {"a": "integer"}},
        {"properties": {"a": {"enum": "xy"}}},
        {"properties": {"a": {"items": {"properties": 1}}}},
        {"properties": {"a": {"anyOf": [{"required": "a"}]}}},
        {"properties": {"a": {"anyOf": {}}}},
        {"additionalProperties": 1},
        {"description": []},
    ],
)
def test_a_schema_that_is_none(parameters: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="the schema of look's parameters"):
        of(tools=look(**parameters))


def test_a_schema_without_end() -> None:
    schema: dict[str, Any] = {}
    for _ in range(200):
        schema = {"properties": {"a": schema}}
    with pytest.raises(BadRequest, match="levels"):
        of(tools=look(**schema))


def test_schemas_that_clients_send() -> None:
    properties = {
        "a": {"anyOf": [{"type": "string", "enum": ["x"]}, {"type": "null"}], "default": None, "title": "A"},
        "b": {"type": ["array", "null"], "items": {"$ref": "#/$defs/B"}},
        "c": True,
        "d": {"type": "object", "additionalProperties": {"type": "number"}},
        "e": {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]},
    }
    [tool] = of(tools=look(type="object", properties=properties, required=None)).conversation.tools
    assert tool["parameters"]["properties"] == properties


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"functions": look()}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"tool_choice": "required"}, "no tools are sent"),
        ({"tool_choice": "always", "tools": look()}, "known are auto"),
        ({"tool_choice": {"type": "function", "function": {"name": "leap"}}, "tools": look()}, "'leap'"),
        ({"tool_choice": {"type": "function", "name": "leap"}, "tools": look()}, "the tools are look"),
        ({"tool_choice": {"type": "function", "function": 3}, "tools": look()}, "JSON object"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": look()}, "allowed_tools"),
        ({"tool_choice": 5, "tools": look()}, "known are auto"),
        ({"parallel_tool_calls": 0, "tools": look()}, "true or false"),
        ({"response_format": {"type": "json_object"}}, "environment.response_format"),
        ({"response_format": {"type": "grammar"}}, "known are text"),
    ],
)
def test_what_cannot_be_done_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        of(**fields)


def test_what_may_be_asked_of_calls() -> None:
    assert not of(tools=look(), tool_choice="none").conversation.tools
    for choice in (None, "auto", "required", {"type": "function", "function": {"name": "look"}}):
        assert not of(tools=look(), tool_choice=choice).conversation.single_call
    assert of(tools=look(), parallel_tool_calls=False).conversation.single_call
    assert of(response_format={"type": "text"}, functions=[], function_call=None).num_answers == 1


def test_a_response_says_what_was_asked() -> None:
    choice = {"type": "function", "name": "look"}
    fields = {"input": "a", "tools": look(), "tool_choice": choice, "parallel_tool_calls": False}
    ask = read_response(fields, takes_tools=True)
    answer = Answer(message=Message(role="assistant", content="b"), turn=None)
    told = written(ask, answer, "r")
    assert told["tool_choice"] == choice and told["parallel_tool_calls"] is False
    kinds = [event.partition("\n")[0] for event in response_events(ask, answer, "r")]
    assert kinds[:2] == ["event: response.created", "event: response.in_progress"]
    told = written(read_response({"input": "a"}, takes_tools=True), answer, "r")
    assert told["tool_choice"] == "auto" and told["parallel_tool_calls"] is True


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    found = Gateway()
    try:
        yield found
    finally:
        found.close()


def sent(gateway: Gateway, key: str, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    head = {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(gateway.url + path, body, head, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_every_refusal_has_words_and_is_counted(gateway: Gateway) -> None:
    session = gateway.open(takes_tools=False)
    refused = [
        ("POST", "/completions", b"{}", 404), ("POST", "/embeddings", b"{}", 404),
        ("GET", "/nope", None, 404),
        ("GET", "/chat/completions", None, 405), ("DELETE", "/models/policy", None, 405),
        ("POST", "/chat/completions", b"x" * (MAX_BYTES + 1), 413),
        ("POST", "/responses", b"{", 400), ("POST", "/reward", b'"much"', 400),
    ]  # fmt: skip
    for number, (method, path, body, status) in enumerate(refused, start=1):
        found, told = sent(gateway, session.key, method, path, body)
        assert found == status and told["error"]["message"] and told["error"]["code"], told
        assert told["error"]["type"] == "invalid_request_error" and session.num_refused == number
    assert sent(gateway, "nobody", "GET", "/nope")[0] == 404 and session.num_refused == len(refused)


def test_a_model_of_any_name_is_there(gateway: Gateway) -> None:
    session = gateway.open(takes_tools=False)
    for name in ("policy", "org/some-model"):
        status, told = sent(gateway, session.key, "GET", f"/models/{name}")
        assert (status, told["id"], told["object"]) == (200, name, "model")
    assert sent(gateway, "nobody", "GET", "/models/policy")[0] == 401 and session.num_refused == 0


def test_too_many_requests_are_counted(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.environments.agent.server.MAX_WAITING", 0)
    session = gateway.open(takes_tools=False)
    body = json.dumps({"messages": HELLO}).encode()
    status, told = sent(gateway, session.key, "POST", "/chat/completions", body)
    assert (status, told["error"]["code"], session.num_refused) == (400, "too_many_requests", 1)


def with_native_calls() -> ChatRenderer:
    family = FAMILIES["qwen3"]
    return ChatRenderer(
        byte_tokenizer(family), template_kwargs=family.variables, call_format="hermes", observations=("tool",)
    )


def with_calls(*turns: Sequence[ToolCall | str]) -> Any:
    """A policy that says these turns."""

    def script(request: Any, text: str) -> str:
        turn = turns[int(request.request_id.rsplit("/", 1)[1])]
        return "\n".join(
            one if isinstance(one, str)
            else f'<tool_call>\n{json.dumps({"name": one.name, "arguments": one.arguments})}\n</tool_call>'
            for one in turn
        )  # fmt: skip

    return script


def test_a_program_that_takes_one_call_a_turn() -> None:
    """Of two it is given none, as words: it saw all that is trained on, and its history keeps the ids."""
    one = ToolCall(name="look", arguments={})
    with scheduled(
        function=f"{ASKING}:one_call", renderer=with_native_calls(), tool_calls="hermes",
        script=with_calls([one, one], [one], ["done"]), limits=Limits(max_turn_tokens=200),
    ) as scheduler:  # fmt: skip
        [(leaf, path)] = scheduler.run(ONE, modes=("m",), training_step=0).traces[0].rollouts()
    assert (leaf.outcome, leaf.episode_return) == (Outcome.FINISHED, 1.0), leaf.detail
    turns = [node for node in path if node.trainable]
    assert [node.metadata["invalid"] for node in turns] == [True, False, False]
    assert len(split_contexts(path)) == 1


def test_also_where_a_server_has_read_them() -> None:
    with scheduled(function=f"{ASKING}:one_call", tool_calls="hermes") as scheduler:
        environment = scheduler.factory(ONE[0])
        try:
            environment.reset(0)
            one = ToolCall(name="look", arguments={})
            result = environment.step(Message(role="assistant", content="so:", tool_calls=(one, one)))
            assert result.invalid and not result.done
        finally:
            environment.close()


def test_answers_that_should_be_json() -> None:
    settings = {"function": f"{ASKING}:json_wanted", "script": lambda request, text: "no JSON"}
    with scheduled(**settings, response_format="ignore") as scheduler:
        [leaf] = scheduler.run(ONE, modes=("m",), training_step=0).traces[0].leaves.values()
    assert (leaf.episode_return, leaf.metrics["num_ignored_formats"]) == (2.0, 2.0)
    assert leaf.metrics["num_requests"] == 3 and leaf.metrics["num_refused_requests"] == 0
    with scheduled(**settings) as scheduler:
        [leaf] = scheduler.run(ONE, modes=("m",), training_step=0).traces[0].leaves.values()
    assert (leaf.episode_return, leaf.metrics["num_refused_requests"]) == (0.0, 2.0)
    assert "num_ignored_formats" not in leaf.metrics


@pytest.mark.slow
def test_agents_with_a_type_for_what_comes_out() -> None:
    pytest.importorskip("agents", reason="needs OpenAI's Agents SDK")
    with scheduled(
        function=f"{ASKING}:typed", response_format="ignore",
        renderer=with_native_calls(), tool_calls="hermes",
        script=with_calls([ToolCall(name="weather", arguments={"city": "Paris"})], ['{"sky": "sunny"}']),
        limits=Limits(max_turn_tokens=200),
    ) as scheduler:  # fmt: skip
        [leaf] = scheduler.run(ONE, modes=("m",), training_step=0).traces[0].leaves.values()
    assert (leaf.outcome, leaf.episode_return) == (Outcome.FINISHED, 1.0), leaf.detail
    assert leaf.metrics["num_ignored_formats"] == leaf.metrics["num_requests"] == 2


class Unreadable(AgentEnvironment):
    def read(self, text: str) -> Message:
        raise TypeError("unhashable")


def test_a_turn_that_an_environment_cannot_read_is_a_fault_of_its_rollout() -> None:
    with scheduled("guess", script=lambda request, text: "7") as scheduler:
        made, plain = [], scheduler.factory

        def factory(task: Task) -> Any:
            made.append(plain(task))
            if len(made) == 1:
                made[0].__class__ = Unreadable
            return made[-1]

        scheduler.factory = factory  # type: ignore[assignment]
        tasks = [Task(key="t", question="", answers=("7",))]
        report = scheduler.run(tasks, modes=("m",) * 3, training_step=0)
        scheduler.factory = plain
    found = sorted(leaf.outcome.value for leaf in report.traces[0].leaves.values())
    assert found == ["environment_fault", "finished", "finished"]
    assert "Unreadable cannot read a turn: TypeError: unhashable" in " ".join(report.fault_reasons)


class BadTools:
    """An environment with native calls whose tools are none."""

    call_format = "hermes"
    tool_schemas = ({"name": "look", "parameters": {"required": 5}},)

    def reset(self, seed: int) -> Any: ...
    def step(self, message: Message) -> Any: ...
    def result(self) -> Any: ...
    def close(self) -> None: ...


def test_or_whose_tools_break_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise SystemExit(3)

    monkeypatch.setattr("outrider.environments.base.read_turn", broken)
    with pytest.raises(EnvironmentFault, match="BadTools cannot read a turn: SystemExit: 3"):
        Episode(BadTools()).read("x")
