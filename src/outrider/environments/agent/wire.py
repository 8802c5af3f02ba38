"""Chat completions as OpenAI's clients write and read them: requests to conversations, turns to answers.

:mod:`outrider.environments.agent.request_fields` says what becomes of every field. Sampling is the run's, so
``temperature`` and its like are ignored and counted. What else would change the text that the program gets,
and cannot be done, is refused in words.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from outrider.environments.agent.asked_tools import read_tools
from outrider.environments.agent.fields import BadRequest, count, flag, mapping
from outrider.environments.agent.request_fields import CHAT, ignored_fields
from outrider.environments.conversing import Conversation, SampledTurn, ServedTurn
from outrider.tokens.calls.format import call_from_arguments
from outrider.tokens.calls.reading import sanitize_call
from outrider.types import Message, Role, ToolCall, is_text

MODEL: Final = "policy"
"""The name of the one model that is served; requests may name any."""
MAX_ANSWERS: Final = 16
_ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRequest:
    """A request read: the conversation, how many answers, and how they are wanted. ``ignored`` are the fields
    that change nothing; ``ignores_format``: it wanted JSON, which nobody holds the policy to.
    """

    conversation: Conversation
    num_answers: int = 1
    streams: bool = False
    include_logprobs: bool = False
    include_usage: bool = False
    tool_choice: Any = "auto"
    ignores_format: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One turn of the policy as the program gets it, with what is known of it; of an expert's nothing is."""

    message: Message
    turn: SampledTurn | ServedTurn | None

    @property
    def finish(self) -> str | None:
        """OpenAI's word for why it ended; None where the endpoint that plays the policy does not say."""
        if self.turn is not None and self.turn.kind == "served":
            return self._served(self.turn.finish)
        if self.message.tool_calls:
            return "tool_calls"
        return "length" if self.turn is not None and self.turn.finish == "length" else "stop"

    def _served(self, finish: str | None) -> str | None:
        """The server's word. Whether a turn calls may have been found out here."""
        if finish == "length":
            return finish
        if self.message.tool_calls:
            return "tool_calls"
        return "stop" if finish in ("stop", "tool_calls") else None


def read_chat(
    body: Any, *, takes_tools: bool, ignores_formats: bool = False, ignores: Collection[str] = ()
) -> PolicyRequest:
    """A body of ``/v1/chat/completions``; ``ignores`` are fields that the recipe wants ignored. Raises
    BadRequest.
    """
    fields = mapping(body, "the body")
    ignored = [*ignored_fields(fields, CHAT, accepted=ignores)]
    tool_request = read_tools(fields, takes_tools=takes_tools)
    is_json = read_format(fields.get("response_format"), "response_format", ignores=ignores_formats)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", param="messages")
    conversation = Conversation(
        messages=checked(with_tool_names([_message(message, ignored) for message in messages]), "messages"),
        tools=tool_request.tools,
        single_call=tool_request.single_call,
        max_tokens=count(fields, "max_completion_tokens") or count(fields, "max_tokens"),
        stop=_stop(fields.get("stop")),
    )
    num_answers = count(fields, "n") or 1
    if num_answers > MAX_ANSWERS:
        raise BadRequest(f"n is at most {MAX_ANSWERS}", param="n")
    options = mapping(fields.get("stream_options") or {}, "stream_options", param="stream_options")
    ignored += [
        f"stream_options.{name}" for name, value in options.items() if value and name != "include_usage"
    ]
    ignored += ["response_format"] if is_json else []
    return PolicyRequest(
        conversation=conversation,
        num_answers=num_answers,
        streams=flag(fields, "stream"),
        include_logprobs=flag(fields, "logprobs"),
        include_usage=flag(options, "include_usage"),
        tool_choice=tool_request.choice,
        ignores_format=is_json,
        ignored=tuple(sorted({*ignored, *tool_request.ignored})),
    )


def read_format(value: Any, name: str, *, ignores: bool) -> bool:
    """Whether the answer should be JSON, which nothing enforces. Raises BadRequest, also where that is not
    to be ignored.
    """
    kind = mapping(value or {"type": "text"}, name, param=name).get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise BadRequest(f"{name} {kind!r}: known are text, json_object and json_schema", param=name)
    if kind != "text" and not ignores:
        raise BadRequest(
            f"{name} {kind!r}: a policy in training writes freely; with environment.response_format = ignore "
            "the request is answered, and the policy has to learn it",
            param=name,
            code="unsupported_parameter",
        )
    return bool(kind != "text")


def checked(messages: tuple[Message, ...], param: str) -> tuple[Message, ...]:
    """The messages, of which the policy can only answer the last. Raises BadRequest."""
    if messages[-1].role == "assistant":
        raise BadRequest(
            "the last message is the assistant's: a turn cannot be begun for the policy", param=param
        )
    return messages


def with_tool_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, those of tools with the names of their calls, which some templates write."""
    names: dict[str, str] = {}
    results: list[Message] = []
    for message in messages:
        names |= {call.call_id: call.name for call in message.tool_calls}
        name = names.get(message.tool_call_id, "") if message.role == "tool" else ""
        results.append(replace(message, tool_name=name) if name else message)
    return tuple(results)


_KNOWN: Final[Mapping[Role, frozenset[str]]] = {
    "system": frozenset({"role", "content"}),
    "user": frozenset({"role", "content"}),
    "assistant": frozenset({"role", "content", "tool_calls", "reasoning_content", "reasoning"}),
    "tool": frozenset({"role", "content", "tool_call_id", "name"}),
}
_REFUSED: Final[Mapping[str, str]] = {
    "function_call": "send tool_calls, which have taken its place",
    "audio": "the policy reads text",
    "prefix": "a turn cannot be begun for the policy",
    "partial": "a turn cannot be begun for the policy",
}
"""Of a message: what would be lost, or asks for another turn."""


def _message(value: Any, ignored: list[str]) -> Message:
    """One message; what of it changes nothing is added to ``ignored``."""
    fields = mapping(value, "a message", param="messages")
    role = _ROLES.get(str(fields.get("role")))
    if role is None:
        raise BadRequest(
            f"a message of the role {fields.get('role')!r}: known are {', '.join(_ROLES)}", param="messages"
        )
    for name, reason in _REFUSED.items():
        if fields.get(name):
            raise BadRequest(f"{name} of a message: {reason}", param=f"messages.{name}")
    content = content_text(fields.get("content"))
    known = _KNOWN[role]
    if role == "assistant" and not content and isinstance(fields.get("refusal"), str):
        content, known = fields["refusal"], known | {"refusal"}
    ignored += [f"messages.{name}" for name, value in fields.items() if value and name not in known]
    return Message(
        role=role,
        content=content,
        reasoning=str(fields.get("reasoning_content") or fields.get("reasoning") or "")
        if role == "assistant"
        else "",
        tool_calls=_calls(fields.get("tool_calls")) if role == "assistant" else (),
        tool_call_id=str(fields.get("tool_call_id") or "") if role == "tool" else "",
        tool_name=str(fields.get("name") or "") if role == "tool" else "",
    )


def _calls(value: Any) -> tuple[ToolCall, ...]:
    if not isinstance(value or [], list):
        raise BadRequest("tool_calls must be a list", param="messages.tool_calls")
    return tuple(_call(call) for call in value or [])


def _call(value: Any) -> ToolCall:
    call = mapping(value, "a tool call", param="messages.tool_calls")
    function = mapping(call.get("function"), "a call's function", param="messages.tool_calls")
    return read_call(call.get("id"), function.get("name"), function.get("arguments"))


def read_call(call_id: Any, name: Any, arguments: Any) -> ToolCall:
    """A call out of a history, whose arguments are JSON text, or what the policy wrote in the place of it.
    Raises BadRequest.
    """
    try:
        call = sanitize_call(call_from_arguments(str(name or ""), arguments, str(call_id or "")))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the arguments of a call are no JSON: {error}") from error
    if isinstance(call, str):
        raise BadRequest(call)
    return call


def read_json(data: str | bytes) -> Any:
    """JSON whose texts are all characters: no tokenizer takes half of a surrogate pair, so a question mark
    stands for it. Raises ValueError, RecursionError.
    """
    value = json.loads(data)
    text = json.dumps(value, ensure_ascii=False)
    return value if is_text(text) else json.loads(text.encode("utf-8", "replace"))


def content_text(content: Any) -> str:
    """The text of a message, whole or in parts. Raises BadRequest for anything but text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest("a message's content is text, or a list of parts", param="content")
    return "".join(_part(mapping(part, "a part of a message", param="content")) for part in content)


def _part(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "refusal":
        return str(part.get("refusal") or "")
    raise BadRequest(f"a part of the type {kind!r}: the policy reads text", param="content")


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise BadRequest("stop is a text, or a list of texts", param="stop")
    return tuple(stop for stop in stops if stop)


def written_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Tool calls as an answer has them."""
    return [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments_text},
        }
        for call in calls
    ]
