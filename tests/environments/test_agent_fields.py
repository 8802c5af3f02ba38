"""What becomes of every field of a request to the endpoint: done, refused with its name, or counted."""

import json
import logging
import typing
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
    BadRequest,
    PolicyRequest,
    RequestField,
    RequestPath,
    fields_table,
    read_chat,
)
from outrider.environments.agent.responses import read_response  # noqa: E402
from outrider.environments.agent.server import Gateway  # noqa: E402
from outrider.training.step_metrics import rollout_metrics  # noqa: E402
from tests.environments.test_agent import play  # noqa: E402
from tests.environments.test_agent_requests import HELLO, gateway, look, sent  # noqa: E402

__all__ = ["gateway"]
VALUE: Any = {"some": "value"}  # the default of no field
PATHS = (CHAT, RESPONSES)
DOCUMENT = Path(__file__).parents[2] / "docs" / "howto" / "agents.md"


def read(path: RequestPath, ignores: tuple[str, ...] = (), **fields: Any) -> PolicyRequest:
    if path == CHAT:
        return read_chat({"messages": HELLO, **fields}, takes_tools=True, ignores=ignores)
    return read_response({"input": "a", **fields}, takes_tools=True, ignores=ignores)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_field_is_done_refused_or_counted(field: RequestField, path: RequestPath) -> None:
    use, plain = field.use(path), read(path)
    for value in () if use == "done" else (None, *field.defaults):
        assert read(path, **{field.name: value}) == plain
    if use == "ignored":
        assert read(path, **{field.name: VALUE}).ignored == (field.name,)
    elif use in ("refused", "elsewhere"):
        with pytest.raises(BadRequest, match=field.name) as refused:
            read(path, **{field.name: VALUE})
        assert refused.value.param == field.name
    if use == "refused" and field.is_ignorable:
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
def test_what_changes_nothing_is_counted(path: RequestPath, fields: dict[str, Any], ignored: str) -> None:
    assert read(path, **fields).ignored == (ignored,)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"n": 17}, "n"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (RESPONSES, {"max_output_tokens": "9"}, "max_output_tokens"),
        (CHAT, {"stream": "yes"}, "stream"),
        (CHAT, {"logprobs": 5}, "logprobs"),
        (CHAT, {"stop": 3}, "stop"),
        (CHAT, {"messages": []}, "messages"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        (RESPONSES, {"input": [{"id": "x"}]}, "input"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
        (CHAT, {"tools": look(), "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (CHAT, {"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}, *HELLO]},
            "messages.function_call",
        ),
        (
            CHAT,
            {"messages": [*HELLO, {"role": "assistant", "content": "b", "prefix": True}]},
            "messages.prefix",
        ),
    ],
)
def test_a_refusal_names_the_field(path: RequestPath, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(path, **fields)
    assert refused.value.param == param


def test_the_table_knows_every_field_of_openai_s_client() -> None:
    pytest.importorskip("openai", reason="needs the package openai")
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    known = {field.name for field in FIELDS}
    for path in (chat.CompletionCreateParamsStreaming, responses.ResponseCreateParamsStreaming):
        assert not set(typing.get_type_hints(path)) - known


def test_the_table_is_in_the_documents() -> None:
    """``python -m outrider.environments.agent.requests`` prints it."""
    assert fields_table() in DOCUMENT.read_text(encoding="utf-8")


def test_a_recipe_names_fields_that_can_be_ignored() -> None:
    assert AgentConfig(function="a:b", ignored_fields=("logit_bias",)).ignored_fields == ("logit_bias",)
    for name in ("previous_response_id", "temperature", "nope"):
        assert name not in IGNORABLE
        with pytest.raises(ValidationError, match=f"'{name}' is no field that can be ignored"):
            AgentConfig(function="a:b", ignored_fields=(name,))


def test_a_refusal_has_openai_s_form(gateway: Gateway) -> None:
    session = gateway.open(takes_tools=False)
    for path, fields, param in (
        ("/chat/completions", {"messages": HELLO, "logit_bias": {"5": 1}}, "logit_bias"),
        ("/responses", {"input": "a", "background": True}, "background"),
    ):
        status, told = sent(gateway, session.key, "POST", path, json.dumps(fields).encode())
        assert status == 400 and set(told["error"]) == {"message", "type", "param", "code"}
        assert told["error"]["param"] == param and param in told["error"]["message"]
        assert told["error"]["code"] == "unsupported_parameter"
    assert (session.num_refused, session.num_requests) == (2, 0)


def test_an_ignored_field_is_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        report = play("cold", group=2)
    for leaf in report.traces[0].leaves.values():
        assert leaf.metrics["num_ignored_fields"] == 5 and leaf.metrics["num_refused_requests"] == 1
    told = [record.message for record in caplog.records if "ignored and counted" in record.message]
    assert [sum(name in line for line in told) for name in ("temperature", "seed", "made_up")] == [1, 1, 1]
    metrics = rollout_metrics(report.traces)
    assert metrics["endpoint/num_ignored_fields"] == 10 and metrics["endpoint/num_requests"] == 6
    assert metrics["endpoint/num_refused_requests"] == 2 and metrics["endpoint/num_unfit_calls"] == 0


def test_a_recipe_answers_what_is_refused_by_default() -> None:
    [leaf] = play("cold", ignored_fields=("min_tokens",)).traces[0].leaves.values()
    assert leaf.metrics["num_ignored_fields"] == 6 and leaf.metrics["num_refused_requests"] == 0
