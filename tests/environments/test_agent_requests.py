"""Requests to the endpoint: what happens to every field, tools, and the two forms of a conversation."""

import json
import logging
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra agent")

from pydantic import ValidationError  # noqa: E402

from outrider.environments.agent.environment import AgentConfig  # noqa: E402
from outrider.environments.agent.requests import (
    CHAT,
    FIELDS,
    IGNORABLE,
    RESPONSES,
    PolicyRequest,
    RequestError,
    RequestField,
    RequestPath,
    fields_table,
    read_request,
)
from outrider.environments.agent.responses import Answer, write_response  # noqa: E402
from outrider.training.step_metrics import rollout_metrics  # noqa: E402
from outrider.types import Message, ToolCall  # noqa: E402
from tests.environments.agents.harness import (  # noqa: E402
    PROGRAMS,
    closing,
    finished,
    own_factory,
    play_one,
    scheduler,
    task,
)

VALUE: Any = {"some": "value"}  # the default of no field
PATHS = (CHAT, RESPONSES)
HELLO = [{"role": "user", "content": "a"}]
DOCUMENT = Path(__file__).parents[2] / "docs" / "howto" / "agents.md"


def read(path: RequestPath, ignores: tuple[str, ...] = (), **fields: Any) -> PolicyRequest:
    conversation: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"input": "a"}
    return read_request(path, {**conversation, **fields}, takes_tools=True, ignored_fields=ignores)


def look(**parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "look", "parameters": parameters}}]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_field_is_done_refused_or_counted(field: RequestField, path: RequestPath) -> None:
    use, plain = "refused" if field.only not in (None, path) else field.use, read(path)
    for value in () if use == "done" else (None, *field.defaults):
        assert read(path, **{field.name: value}) == plain
    if use == "ignored":
        assert read(path, **{field.name: VALUE}).ignored == (field.name,)
    elif use == "refused":
        with pytest.raises(RequestError, match=field.name) as refused:
            read(path, **{field.name: VALUE})
        assert refused.value.param == field.name
    if field.is_ignorable:
        assert read(path, (field.name,), **{field.name: VALUE}).ignored == (field.name,)


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (CHAT, {"made_up": 0}, "made_up"),
        (RESPONSES, {"made_up": {"a": 1}}, "made_up"),
        (CHAT, {"temperature": 0}, "temperature"),
        (CHAT, {"temperature": True}, "temperature"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (RESPONSES, {"include": ["reasoning.encrypted_content"]}, "include.reasoning.encrypted_content"),
        (CHAT, {"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        (RESPONSES, {"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        (CHAT, {"tools": look(), "tool_choice": "required"}, "tool_choice"),
        (RESPONSES, {"tools": look(), "tool_choice": {"type": "function", "name": "look"}}, "tool_choice"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools.strict"),
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "strict": True}]}, "tools.strict"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "name": "Ann"}]}, "messages.name"),
    ],
)
def test_parts_without_effect_are_counted(path: RequestPath, fields: dict[str, Any], ignored: str) -> None:
    assert read(path, **fields).ignored == (ignored,)


_TURN_BEGUN = {"role": "assistant", "content": "b", "prefix": True}


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include", None),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format", None),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "environment.response_form"),
        (CHAT, {"response_format": {"type": "grammar"}}, "response_format", "known are text"),
        (CHAT, {"n": 17}, "n", None),
        (CHAT, {"n": 0}, "n", None),
        (CHAT, {"max_tokens": 0}, "max_tokens", None),
        (RESPONSES, {"max_output_tokens": "9"}, "max_output_tokens", None),
        (CHAT, {"stream": "yes"}, "stream", None),
        (CHAT, {"logprobs": 5}, "logprobs", None),
        (CHAT, {"stop": 3}, "stop", None),
        (CHAT, {"messages": []}, "messages", None),
        (RESPONSES, {"input": []}, "input", None),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input", None),
        (RESPONSES, {"input": [{"id": "x"}]}, "input", None),
        (CHAT, {"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages", None),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content", None),
        (CHAT, {"messages": [*HELLO, _TURN_BEGUN]}, "messages.prefix", None),
        (CHAT, {"messages": [{"role": "assistant", "function_call": {"name": "f"}}, *HELLO]},
         "messages.function_call", None),
        (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "b"}]}, "messages", "assistant's"),
        (RESPONSES, {"input": [{"role": "assistant", "content": "b"}]}, "input", "assistant's"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools", None),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", None),
        (CHAT, {"functions": look()}, "functions", "functions"),
        (CHAT, {"function_call": "auto"}, "function_call", "function_call"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "no tools are sent"),
        (CHAT, {"tool_choice": "always", "tools": look()}, "tool_choice", "known are auto"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "leap"}}, "tools": look()},
         "tool_choice", "'leap'"),
        (CHAT, {"tool_choice": {"type": "function", "name": "leap"}, "tools": look()}, "tool_choice",
         "the tools are look"),
        (CHAT, {"tool_choice": {"type": "function", "function": 3}, "tools": look()}, "tool_choice",
         "JSON object"),
        (CHAT, {"tool_choice": {"type": "allowed_tools"}, "tools": look()}, "tool_choice", "allowed_tools"),
        (CHAT, {"tool_choice": 5, "tools": look()}, "tool_choice", "known are auto"),
        (CHAT, {"parallel_tool_calls": 0, "tools": look()}, "parallel_tool_calls", "true or false"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(
    path: RequestPath, fields: dict[str, Any], param: str, words: str | None
) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        read(path, **fields)
    assert refused.value.param == param


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
def test_an_invalid_schema_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="the schema of look's parameters"):
        read(CHAT, tools=look(**parameters))


def test_schemas_of_clients_are_taken_and_deep_ones_refused() -> None:
    properties = {
        "a": {"anyOf": [{"type": "string", "enum": ["x"]}, {"type": "null"}], "default": None, "title": "A"},
        "b": {"type": ["array", "null"], "items": {"$ref": "#/$defs/B"}},
        "c": True,
        "d": {"type": "object", "additionalProperties": {"type": "number"}},
        "e": {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]},
    }
    [tool] = read(CHAT, tools=look(type="object", properties=properties, required=None)).conversation.tools
    assert tool["parameters"]["properties"] == properties
    schema: dict[str, Any] = {}
    for _ in range(200):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="levels"):
        read(CHAT, tools=look(**schema))


def test_settings_of_calls() -> None:
    assert not read(CHAT, tools=look(), tool_choice="none").conversation.tools
    for choice in (None, "auto", "required", {"type": "function", "function": {"name": "look"}}):
        assert not read(CHAT, tools=look(), tool_choice=choice).conversation.single_call
    assert read(CHAT, tools=look(), parallel_tool_calls=False).conversation.single_call
    assert read(CHAT, response_format={"type": "text"}, functions=[], function_call=None).num_answers == 1
    named = {"type": "function", "name": "look"}
    calls = {"tools": look(), "tool_choice": named, "parallel_tool_calls": False}
    answer = Answer(message=Message(role="assistant", content="b"), turn=None)
    for fields, expected in ((calls, (named, False)), ({}, ("auto", True))):
        request = read(RESPONSES, **fields)
        response: Any = write_response(RESPONSES, request, [answer], "r")
        assert (response["tool_choice"], response["parallel_tool_calls"]) == expected
        events = write_response(RESPONSES, replace(request, streams=True), [answer], "r")
        kinds = [event.partition("\n")[0] for event in events]
        assert kinds[:2] == ["event: response.created", "event: response.in_progress"]


def test_the_table_is_in_the_documents_and_has_every_field_of_openais_client() -> None:
    """``python -m outrider.environments.agent.requests`` prints it."""
    assert fields_table() in DOCUMENT.read_text(encoding="utf-8")
    pytest.importorskip("openai", reason="needs the package openai")
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    known = {field.name for field in FIELDS}
    for params in (chat.CompletionCreateParamsStreaming, responses.ResponseCreateParamsStreaming):
        assert not set(typing.get_type_hints(params)) - known


def test_a_recipe_names_fields_that_can_be_ignored() -> None:
    assert AgentConfig(function="a:b", ignored_fields=("logit_bias",)).ignored_fields == ("logit_bias",)
    for name in ("previous_response_id", "temperature", "nope"):
        assert name not in IGNORABLE
        with pytest.raises(ValidationError, match=f"'{name}' cannot be ignored"):
            AgentConfig(function="a:b", ignored_fields=(name,))


def test_an_ignored_field_is_counted_always_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with closing(own_factory(function=f"{PROGRAMS}:run")) as factory, caplog.at_level(logging.WARNING):
        report = scheduler(factory).run([task("cold")], modes=("m",) * 2, training_step=0)
    for leaf in report.traces[0].leaves.values():
        assert leaf.metrics["num_ignored_fields"] == 5 and leaf.metrics["num_refused_requests"] == 1
    lines = [record.message for record in caplog.records if "ignored and counted" in record.message]
    assert [sum(name in line for line in lines) for name in ("temperature", "seed", "made_up")] == [1, 1, 1]
    metrics = rollout_metrics(report.traces)
    assert metrics["endpoint/num_ignored_fields"] == 10 and metrics["endpoint/num_requests"] == 6
    assert metrics["endpoint/num_refused_requests"] == 2 and metrics["endpoint/num_unfit_calls"] == 0
    metrics = play_one(task("cold"), ignored_fields=("min_tokens",)).metrics
    assert metrics["num_ignored_fields"] == 6 and metrics["num_refused_requests"] == 0


def test_json_output_is_refused_or_ignored_and_counted() -> None:
    leaf = play_one(task("json_wanted"), script=lambda *_: "no JSON", response_format="ignore")
    assert finished(leaf, 2.0) and leaf.metrics["num_ignored_formats"] == 2.0
    assert leaf.metrics["num_requests"] == 3 and leaf.metrics["num_refused_requests"] == 0
    leaf = play_one(task("json_wanted"), script=lambda *_: "no JSON")
    assert finished(leaf, 0.0) and leaf.metrics["num_refused_requests"] == 2.0
    assert "num_ignored_formats" not in leaf.metrics


# Items of /v1/responses.


def thought(text: str, name: str = "content") -> dict[str, Any]:
    kind = "reasoning_text" if name == "content" else "summary_text"
    return {"type": "reasoning", "id": "rs", "summary": [], name: [{"type": kind, "text": text}]}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def called(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}


def of_turn(number: int, item: dict[str, Any]) -> dict[str, Any]:
    """The item as this endpoint writes it."""
    kind = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[item["type"]]
    suffix = f"-c{number:08d}" if kind == "fc" else ""
    return {**item, "id": f"{kind}-turn-{number}{suffix}"}


def messages_of(items: Any, **fields: Any) -> tuple[Message, ...]:
    return read(RESPONSES, input=items, **fields).conversation.messages


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([thought("a"), said("b")], [("a", "b", 0)]),
        ([thought("a", "summary"), called("c")], [("a", "", 1)]),
        ([thought("a"), said("b"), called("c"), called("d")], [("a", "b", 2)]),
        ([thought("a"), thought("b"), said("c")], [("a\nb", "c", 0)]),
        ([said("a"), thought("b"), said("c")], [("", "a", 0), ("b", "c", 0)]),
        ([{"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"}], []),
        ([said("a"), said("b")], [("", "a", 0), ("", "b", 0)]),
        ([said("a"), called("c")], [("", "a", 1)]),
        ([called("c"), said("a")], [("", "a", 1)]),  # its call has no result: the turn goes on
        ([thought("a"), called("c"), thought("b"), called("d")], [("a\nb", "", 2)]),
        ([of_turn(1, said("a")), of_turn(1, called("c"))], [("", "a", 1)]),
        ([of_turn(1, said("a")), of_turn(2, called("c"))], [("", "a", 0), ("", "", 1)]),
        ([of_turn(1, thought("a")), of_turn(2, thought("b"))], [("a", "", 0), ("b", "", 0)]),
        ([of_turn(1, thought("a")), said("b"), of_turn(1, called("c"))], [("a", "b", 1)]),
    ],
)
def test_the_items_of_a_turn_are_one_message(items: list[Any], turns: list[tuple[str, str, int]]) -> None:
    found = messages_of([*HELLO, *items, *HELLO])
    assert [(one.reasoning, one.content, len(one.tool_calls)) for one in found[1:-1]] == turns


def test_a_history_is_the_same_in_both_forms() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "c", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "b", "reasoning_content": "a", "tool_calls": [call]}
    chat = [*HELLO, turn, {"role": "tool", "tool_call_id": "c", "content": "sunny"}]
    output = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
    expected = read(CHAT, messages=chat).conversation
    items = [*HELLO, thought("a"), said("b"), called("c"), output]
    assert read(RESPONSES, input=items).conversation == expected
    calls = (ToolCall(name="c", call_id="c"),)
    assert expected.messages[1] == Message(role="assistant", content="b", reasoning="a", tool_calls=calls)


def test_the_roles_and_forms_of_an_input() -> None:
    """Instructions come first; developers are the system; results are text, in parts or not."""
    parts = [{"type": "input_text", "text": "sun"}, {"type": "input_text", "text": "ny"}]
    output = {"type": "function_call_output", "call_id": "c", "output": parts}
    items = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}, called("c"), output]
    found = messages_of(items, instructions="i")
    assert [(one.role, one.content) for one in found] == [
        ("system", "i"),
        ("system", "d"),
        ("user", "sunny"),
        ("assistant", ""),
        ("tool", "sunny"),
    ]
    assert (found[-1].tool_call_id, found[-1].tool_name) == ("c", "c")
    assert messages_of("q") == (Message(role="user", content="q"),)


@pytest.mark.parametrize("with_ids", [True, False])
def test_output_that_is_sent_back_is_the_same_turn(with_ids: bool) -> None:
    """Reasoning, text and calls; otherwise the rollout would have one sample more."""
    calls = tuple(ToolCall(name="c", arguments={"a": number}, call_id=f"c{number}") for number in range(2))
    turn = Message(role="assistant", content="b", reasoning="a", tool_calls=calls)
    out: Any = write_response(RESPONSES, read(RESPONSES), [Answer(message=turn, turn=None)], "turn-3")
    items = out["output"] if with_ids else [{**one, "id": None} for one in out["output"]]
    results = [{"type": "function_call_output", "call_id": one.call_id, "output": "x"} for one in calls]
    found = messages_of([*HELLO, *json.loads(json.dumps(items)), *results])
    assert found[1] == turn and len(found) == 4


@pytest.mark.parametrize("field", ["content", "summary"])
@pytest.mark.parametrize("value", ["text", [3], 7])
def test_an_odd_item_is_refused_with_a_reason(field: str, value: object) -> None:
    with pytest.raises(RequestError, match="reasoning item"):
        messages_of([{"type": "reasoning", field: value}, {"role": "user"}])
