"""Requests of agent programs to ``/v1/chat/completions`` and ``/v1/responses``.

``python -m outrider.environments.agent.requests`` prints the table of the documentation, which lists what
happens to every field of a request.
"""

import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from outrider.environments.conversations import Conversation
from outrider.tokens.call_formats import sanitize_call
from outrider.tokens.tool_calls import call_from_arguments, is_name_list
from outrider.types import Message, Role, ToolCall, ToolSchema, is_text

RequestPath: TypeAlias = Literal["chat/completions", "responses"]
CHAT: Final[RequestPath] = "chat/completions"
RESPONSES: Final[RequestPath] = "responses"
MAX_ANSWERS: Final = 16
_MAX_TEMPERATURE: Final = 100.0
_MAX_DEPTH: Final = 64  # of a tool's schema; templates and readers are recursive


class RequestError(Exception):
    """A request that is not answered. The program gets the text.

    Attributes:
        status: HTTP status.
        code: the error code in OpenAI's terms.
        param: the field that is wrong.
    """

    def __init__(
        self, text: str, *, param: str | None = None, code: str = "invalid_request_error", status: int = 400
    ) -> None:
        super().__init__(text)
        self.param = param
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRequest:
    """A parsed request.

    Attributes:
        conversation: what the policy answers.
        num_answers: number of turns to sample.
        streams: whether the answer is sent as server-sent events.
        include_logprobs: whether the answer contains log-probs.
        include_usage: whether a stream ends with the number of tokens.
        tool_choice: the field of this name.
        ignores_format: whether the program requested JSON, which is not enforced.
        ignored: names of the fields that have no effect.
        temperature: the requested temperature; None for the server's own, and while the policy is trained.
        seed: the requested seed; None as above.
    """

    conversation: Conversation
    num_answers: int = 1
    streams: bool = False
    include_logprobs: bool = False
    include_usage: bool = False
    tool_choice: Any = "auto"
    ignores_format: bool = False
    ignored: tuple[str, ...] = ()
    temperature: float | None = None
    seed: int | None = None


def read_request(
    path: RequestPath,
    body: Any,
    *,
    takes_tools: bool,
    ignores_formats: bool = False,
    ignored_fields: Collection[str] = (),
    is_training: bool = True,
) -> PolicyRequest:
    """Parse the JSON body of a request.

    Args:
        path: the path below ``/v1/``.
        body: the parsed JSON.
        takes_tools: whether requests may have tools.
        ignores_formats: whether a requested output format is ignored instead of refused.
        ignored_fields: fields that are ignored instead of refused.
        is_training: whether the request is part of a rollout. Otherwise it may set ``temperature`` and
            ``seed``, and end with a message of the assistant, which the policy continues.

    Raises RequestError.
    """
    fields = _object(body, "the body")
    ignored = _find_ignored(fields, path, accepted=ignored_fields, is_training=is_training)
    tools, choice = _read_tools(fields, ignored, takes_tools=takes_tools, is_training=is_training)
    is_parallel = fields.get("parallel_tool_calls") is None or _flag(fields, "parallel_tool_calls")
    options = _object(fields.get("stream_options") or {}, "stream_options", param="stream_options")
    known_options = ("include_usage",) if path == CHAT else ()
    ignored += [f"stream_options.{name}" for name in options if options[name] and name not in known_options]
    if path == CHAT:
        format_name, output_format = "response_format", fields.get("response_format")
        messages = _read_messages(fields, ignored)
        max_tokens = _count(fields, "max_completion_tokens") or _count(fields, "max_tokens")
        num_answers = _count(fields, "n") or 1
        if num_answers > MAX_ANSWERS:
            raise RequestError(f"n is at most {MAX_ANSWERS}", param="n")
    else:
        text = _object(fields.get("text") or {}, "text", param="text")
        ignored += [f"text.{name}" for name, value in text.items() if value and name != "format"]
        ignored += _read_include(fields.get("include"))
        format_name, output_format = "text.format", text.get("format")
        messages = _read_items(fields)
        max_tokens = _count(fields, "max_output_tokens")
        num_answers = 1
    is_json = _is_json(output_format, format_name, ignores=ignores_formats, is_training=is_training)
    if messages[-1].role == "assistant" and (is_training or messages[-1].tool_calls):
        raise RequestError(
            "the last message is the assistant's: a turn cannot be begun for the policy",
            param="messages" if path == CHAT else "input",
        )
    conversation = Conversation(
        messages=_with_tool_names(messages),
        tools=tools,
        single_call=not is_parallel,
        max_tokens=max_tokens,
        stop=_stop(fields.get("stop")) if path == CHAT else (),
    )
    return PolicyRequest(
        conversation=conversation,
        num_answers=num_answers,
        streams=_flag(fields, "stream"),
        include_logprobs=path == CHAT and _flag(fields, "logprobs"),
        include_usage=path == CHAT and _flag(options, "include_usage"),
        tool_choice=choice,
        ignores_format=is_json,
        ignored=tuple(sorted({*ignored, *([format_name] if is_json else [])})),
        temperature=None if is_training else _temperature(fields),
        seed=None if is_training else _seed(fields),
    )


def read_json(data: str | bytes) -> Any:
    """Parse JSON. Lone surrogates, which no tokenizer accepts, become question marks. Raises ValueError or
    RecursionError.
    """
    value = json.loads(data)
    text = json.dumps(value, ensure_ascii=False)
    return value if is_text(text) else json.loads(text.encode("utf-8", "replace"))


def _object(value: Any, label: str, *, param: str | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{label} must be a JSON object", param=param)
    return value


def _count(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"{name} must be a whole number of at least 1", param=name)
    return value


def _temperature(fields: Mapping[str, Any]) -> float | None:
    value = fields.get("temperature")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_TEMPERATURE:
        raise RequestError(
            f"temperature must be a number from 0 to {_MAX_TEMPERATURE:g}", param="temperature"
        )
    return float(value)


def _seed(fields: Mapping[str, Any]) -> int | None:
    value = fields.get("seed")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise RequestError("seed must be a whole number", param="seed")
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise RequestError(f"{name} must be true or false", param=name)
    return bool(value)


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError("stop must be a text or a list of texts", param="stop")
    return tuple(stop for stop in stops if stop)


def _is_json(value: Any, name: str, *, ignores: bool, is_training: bool) -> bool:
    """Whether a JSON answer is requested. Raises RequestError if ``ignores`` is false then."""
    kind = _object(value or {"type": "text"}, name, param=name).get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise RequestError(f"{name} {kind!r}: known are text, json_object and json_schema", param=name)
    if kind != "text" and not ignores:
        hint = (
            "; with environment.response_format = ignore the request is answered, and the policy has to "
            "learn the format"
        )
        raise RequestError(
            f"{name} {kind!r}: the policy's output is not constrained{hint if is_training else ''}",
            param=name,
            code="unsupported_parameter",
        )
    return bool(kind != "text")


# Tools.


def _read_tools(
    fields: Mapping[str, Any], ignored: list[str], *, takes_tools: bool, is_training: bool
) -> tuple[tuple[ToolSchema, ...], Any]:
    """The tools of a request, in the nested form or the flat one of ``/v1/responses``, and its tool_choice.
    Adds fields without effect to ``ignored``.
    """
    values = fields.get("tools") or []
    if not isinstance(values, list):
        raise RequestError("tools must be a list", param="tools")
    if values and not takes_tools:
        raise RequestError(
            "tools: set the format of the policy's tool calls in the recipe (for example, "
            "environment.tool_calls = hermes)"
            if is_training
            else "tools: the policy was trained without native tool calls",
            param="tools",
        )
    tools = tuple(_read_tool(value, ignored) for value in values)
    choice = fields.get("tool_choice") or "auto"
    _check_choice(choice, [str(tool["name"]) for tool in tools])
    if choice not in ("auto", "none"):
        ignored.append("tool_choice")
    return () if choice == "none" else tools, choice


def _check_choice(choice: Any, names: list[str]) -> None:
    if choice in ("auto", "none") or (choice == "required" and names):
        return
    if not isinstance(choice, dict):
        words = "no tools are sent" if choice == "required" else "known are auto, none, required, a function"
        raise RequestError(f"tool_choice {choice!r}: {words}", param="tool_choice")
    if choice.get("type") != "function":
        raise RequestError(
            f"a tool_choice of the type {choice.get('type')!r}: only a function can be named",
            param="tool_choice",
        )
    name = _object(choice.get("function", choice), "tool_choice's function", param="tool_choice").get("name")
    if name not in names:
        raise RequestError(
            f"tool_choice names {name!r}; the tools are {', '.join(names) or 'none'}", param="tool_choice"
        )


def _read_tool(value: Any, ignored: list[str]) -> ToolSchema:
    tool = _object(value, "a tool", param="tools")
    if tool.get("type") != "function":
        raise RequestError(
            f"a tool of type {tool.get('type')!r}: only functions can be called", param="tools"
        )
    function = _object(tool.get("function", tool), "a tool's function", param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError("a tool's function has no name", param="tools")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    _check_schema(_object(parameters, f"the parameters of {name}", param="tools"), name)
    known = ("type", "function", "name", "description", "parameters")
    ignored += [f"tools.{key}" for key, value in (tool | function).items() if value and key not in known]
    return {"name": name, "description": str(function.get("description") or ""), "parameters": parameters}


def _check_schema(schema: Mapping[str, Any], name: str) -> None:
    """Check the parts of a schema that templates and the parser of tool calls read."""
    location = f"the schema of {name}'s parameters"
    pending: list[tuple[Any, int]] = [(schema, 0)]  # no recursion: the program decides how deep it is
    while pending:
        node, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise RequestError(f"{location} has more than {_MAX_DEPTH} levels", param="tools")
        if isinstance(node, bool):
            continue  # anything, or nothing
        if not isinstance(node, dict):
            raise RequestError(f"{location} contains {node!r:.40}, which is no schema", param="tools")
        for key, is_right in _SCHEMA_CHECKS.items():
            if node.get(key) is not None and not is_right(node[key]):
                raise RequestError(f"{location}: {key} cannot be {node[key]!r:.40}", param="tools")
        pending += [(inner, depth + 1) for inner in _inner_schemas(node)]


_SCHEMA_CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "type": lambda value: isinstance(value, str) or is_name_list(value),
    "required": is_name_list,
    "enum": lambda value: isinstance(value, list),
    "properties": lambda value: isinstance(value, dict),
    "description": lambda value: isinstance(value, str),
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), lambda value: isinstance(value, list)),
}


def _inner_schemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    yield from (schema.get("properties") or {}).values()
    for key in ("anyOf", "oneOf", "allOf"):
        yield from schema.get(key) or []
    for key in ("items", "additionalProperties"):
        inner = schema.get(key)
        if key == "items" and isinstance(inner, list):  # of a tuple, up to draft 7
            yield from inner
        elif inner is not None:
            yield inner


# Messages of chat completions.

_ROLES: Final[Mapping[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_MESSAGE_FIELDS: Final[Mapping[Role, frozenset[str]]] = {
    "system": frozenset({"role", "content"}),
    "user": frozenset({"role", "content"}),
    "assistant": frozenset({"role", "content", "tool_calls", "reasoning_content", "reasoning"}),
    "tool": frozenset({"role", "content", "tool_call_id", "name"}),
}
_REFUSED_MESSAGE_FIELDS: Final[Mapping[str, str]] = {
    "function_call": "send tool_calls, which have taken its place",
    "audio": "the policy reads text",
    "prefix": "a turn cannot be begun for the policy",
    "partial": "a turn cannot be begun for the policy",
}


def _read_messages(fields: Mapping[str, Any], ignored: list[str]) -> list[Message]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", param="messages")
    return [_read_message(message, ignored) for message in messages]


def _read_message(value: Any, ignored: list[str]) -> Message:
    """Parse one message; fields without effect are added to ``ignored``."""
    fields = _object(value, "a message", param="messages")
    role = _read_role(fields, _ROLES, param="messages")
    for name, reason in _REFUSED_MESSAGE_FIELDS.items():
        if fields.get(name):
            raise RequestError(f"{name} of a message: {reason}", param=f"messages.{name}")
    content = _content_text(fields.get("content"))
    known = _MESSAGE_FIELDS[role]
    if role == "assistant" and not content and isinstance(fields.get("refusal"), str):
        content, known = fields["refusal"], known | {"refusal"}
    ignored += [f"messages.{name}" for name, value in fields.items() if value and name not in known]
    if role == "assistant":
        calls = fields.get("tool_calls") or []
        if not isinstance(calls, list):
            raise RequestError("tool_calls must be a list", param="messages.tool_calls")
        reasoning = str(fields.get("reasoning_content") or fields.get("reasoning") or "")
        return Message(
            role=role, content=content, reasoning=reasoning, tool_calls=tuple(map(_read_chat_call, calls))
        )
    if role == "tool":
        call_id, name = str(fields.get("tool_call_id") or ""), str(fields.get("name") or "")
        return Message(role=role, content=content, tool_call_id=call_id, tool_name=name)
    return Message(role=role, content=content)


def _read_role(fields: Mapping[str, Any], roles: Mapping[str, Role], *, param: str) -> Role:
    role = roles.get(str(fields.get("role")))
    if role is None:
        raise RequestError(
            f"a message of the role {fields.get('role')!r}: known are {', '.join(roles)}", param=param
        )
    return role


def _read_chat_call(value: Any) -> ToolCall:
    call = _object(value, "a tool call", param="messages.tool_calls")
    function = _object(call.get("function"), "a call's function", param="messages.tool_calls")
    return _read_call(call.get("id"), function.get("name"), function.get("arguments"))


def _read_call(call_id: Any, name: Any, arguments: Any) -> ToolCall:
    """A call of the history. ``arguments`` is JSON text, or other text that the policy wrote instead."""
    try:
        call = sanitize_call(call_from_arguments(str(name or ""), arguments, str(call_id or "")))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the arguments of a call are no JSON: {error}") from error
    if isinstance(call, str):
        raise RequestError(call)
    return call


def _content_text(content: Any) -> str:
    """The text of a message, given whole or in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError("a message's content must be text or a list of parts", param="content")
    return "".join(_part_text(_object(part, "a part of a message", param="content")) for part in content)


def _part_text(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "refusal":
        return str(part.get("refusal") or "")
    raise RequestError(f"a part of the type {kind!r}: the policy reads text", param="content")


def _with_tool_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages; tool messages get the names of their calls, which some templates write."""
    names: dict[str, str] = {}
    results: list[Message] = []
    for message in messages:
        names |= {call.call_id: call.name for call in message.tool_calls}
        name = names.get(message.tool_call_id, "") if message.role == "tool" else ""
        results.append(replace(message, tool_name=name) if name else message)
    return tuple(results)


# Items of ``/v1/responses``. Nothing is stored between requests: each contains the whole input.

_ITEM_ROLES: Final = {name: role for name, role in _ROLES.items() if name != "tool"}
_OWN_ID: Final = re.compile(r"(?:rs|msg|fc)-(turn-\d+)(?:-.*)?")


def _read_include(value: Any) -> list[str]:
    """The ignored parts of ``include``. Raises RequestError for log-probs, which would be missing."""
    if not isinstance(value or [], list):
        raise RequestError("include must be a list", param="include")
    for item in value or []:
        if "logprobs" in str(item):
            raise RequestError(
                f"include {item!r}: /v1/chat/completions gives log-probs", param="include",
                code="unsupported_parameter",
            )  # fmt: skip
    return [f"include.{item}" for item in value or []]


def _read_items(fields: Mapping[str, Any]) -> list[Message]:
    items = fields.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise RequestError("input must be a text or a list with at least one item", param="input")
    builder = _TurnBuilder()
    if fields.get("instructions"):
        builder.add_message(Message(role="system", content=_content_text(fields["instructions"])))
    for item in items:
        builder.add(_object(item, "an item of the input", param="input"))
    if not builder.messages:
        raise RequestError("the input contains no message", param="input")
    return builder.messages


@dataclass(slots=True)
class _TurnBuilder:
    """Joins items to messages: the reasoning, text and calls of one turn are separate items.

    Ids of items that this endpoint wrote contain their turn. Other items belong to one turn if they are
    reasoning, at most one message, and calls, in this order. The turn goes on while its calls have no
    results.

    Attributes:
        messages: the messages so far.
        turn: the turn of the last message, if it is the policy's and its items' ids contain it.
        has_text: whether the last message has text of a message item.
    """

    messages: list[Message] = field(default_factory=list)
    turn: str = ""
    has_text: bool = False

    def add(self, item: dict[str, Any]) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "reasoning":
            if reasoning := _reasoning_text(item):  # encrypted reasoning is only for its provider
                self._add_part(item, Message(role="assistant", content="", reasoning=reasoning))
        elif kind == "function_call":
            call = _read_call(item.get("call_id"), item.get("name"), item.get("arguments"))
            self._add_part(item, Message(role="assistant", content="", tool_calls=(call,)))
        elif kind == "function_call_output":
            output, call_id = _content_text(item.get("output")), str(item.get("call_id") or "")
            self.add_message(Message(role="tool", content=output, tool_call_id=call_id))
        elif kind == "message":
            role = _read_role(item, _ITEM_ROLES, param="input")
            message = Message(role=role, content=_content_text(item.get("content")))
            if role == "assistant":
                self._add_part(item, message, is_text=True)
            else:
                self.add_message(message)
        else:
            raise RequestError(
                f"an item of the type {kind!r}: known are message, reasoning, function_call and its output",
                param="input",
            )

    def add_message(self, message: Message) -> None:
        """Add a complete message."""
        self.messages.append(message)
        self.turn, self.has_text = "", False

    def _add_part(self, item: dict[str, Any], part: Message, *, is_text: bool = False) -> None:
        match = _OWN_ID.fullmatch(str(item.get("id") or ""))
        turn = match[1] if match else ""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or self._starts_turn(part, last, turn, is_text=is_text):
            self.add_message(part)
            self.turn, self.has_text = turn, is_text
            return
        self.messages[-1] = Message(
            role="assistant",
            content=last.content + part.content,
            reasoning="\n".join(text for text in (last.reasoning, part.reasoning) if text),
            tool_calls=(*last.tool_calls, *part.tool_calls),
        )
        self.turn = self.turn or turn
        self.has_text = self.has_text or is_text

    def _starts_turn(self, part: Message, last: Message, turn: str, *, is_text: bool) -> bool:
        if is_text and self.has_text:
            return True
        if turn and self.turn:
            return turn != self.turn
        return not last.tool_calls and bool(part.reasoning) and self.has_text


def _reasoning_text(item: dict[str, Any]) -> str:
    """The reasoning of an item, or its summary if there is nothing else."""
    texts: list[list[str]] = []
    for name in ("content", "summary"):
        if not isinstance(parts := item.get(name) or [], list):
            raise RequestError(f"the {name} of a reasoning item must be a list")
        found = [_object(part, "a part of a reasoning item").get("text") for part in parts]
        texts.append([text for text in found if isinstance(text, str) and text])
    return "\n".join(texts[0] or texts[1])


# What happens to every field of a request. Fields that are in no row are ignored and counted.

FieldUse: TypeAlias = Literal["done", "ignored", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestField:
    """One field.

    Attributes:
        use: whether it has its effect, is ignored and counted, or refused with status 400.
        only: the only path that has it; the other one refuses it.
        defaults: values without effect, in addition to null.
        reason: why it is not done, or how it is.
        is_ignorable: whether ``environment.ignored_fields`` may contain it.
    """

    name: str
    use: FieldUse
    only: RequestPath | None = None
    defaults: tuple[Any, ...] = ()
    reason: str = ""
    is_ignorable: bool = False

    def is_default(self, value: Any) -> bool:
        """Whether the value is the default of OpenAI's or vLLM's servers."""
        return value is None or any(
            value == default and isinstance(value, bool) == isinstance(default, bool)
            for default in self.defaults
        )


def _fields(
    use: FieldUse, reason: str, *, is_ignorable: bool = False, **defaults: tuple[Any, ...]
) -> list[RequestField]:
    return [
        RequestField(name=name, use=use, defaults=values, reason=reason, is_ignorable=is_ignorable)
        for name, values in defaults.items()
    ]


def _done(*names: str, only: RequestPath | None = None, reason: str = "") -> list[RequestField]:
    empty: tuple[Any, ...] = ([], {}, "", False)
    return [
        RequestField(name=name, use="done", only=only, reason=reason, defaults=(1,) if name == "n" else empty)
        for name in names
    ]


_ignored: Final = partial(_fields, "ignored")
_refused: Final = partial(_fields, "refused", is_ignorable=True)
_SAMPLING: Final = "the run's settings determine sampling (algorithm and evaluation)"
_HINT: Final = "a hint to OpenAI's models without effect on a policy"
_FREE: Final = "the policy's output is not constrained"
_PROMPT: Final = "the prompt is rendered by the run's own template and variables (model.template_kwargs)"

FIELDS: Final[tuple[RequestField, ...]] = (
    *_done("model", reason="any name is the policy"),
    *_done("messages", only=CHAT),
    *_done("input", "instructions", only=RESPONSES),
    *_done("tools", reason="functions; `strict` is ignored, other types are refused"),
    *_done("tool_choice", reason="`required` and a named function are ignored: a call cannot be forced"),
    *_done("parallel_tool_calls"),
    *_done("max_tokens", "max_completion_tokens", "stop", "n", "logprobs", only=CHAT),
    *_done("response_format", only=CHAT, reason="JSON only with `environment.response_format`"),
    *_done("text", only=RESPONSES, reason="like `response_format`; `verbosity` is ignored"),
    *_done("max_output_tokens", only=RESPONSES),
    *_done("include", only=RESPONSES, reason="log-probs are refused here, everything else is ignored"),
    *_done("stream"),
    *_done("stream_options", reason="`include_usage` in chat completions; everything else is ignored"),
    *_ignored(
        _SAMPLING,
        temperature=(1,), top_p=(1,), top_k=(-1, 0), min_p=(0,), typical_p=(1,), top_a=(0,), seed=(),
        presence_penalty=(0,), frequency_penalty=(0,), repetition_penalty=(1,), length_penalty=(1,),
    ),
    *_ignored(_HINT, reasoning_effort=(), reasoning=({},), verbosity=("medium",), prediction=()),
    *_ignored("a limit of OpenAI's own tools, which do not exist here", max_tool_calls=()),
    *_ignored("conversations that are too long are refused, not truncated", truncation=("disabled",)),
    *_ignored(
        "accounting of a hosted service",
        user=("",), safety_identifier=("",), metadata=({},), store=(False,), request_id=(),
        service_tier=("auto", "default"), prompt_cache_key=("",), prompt_cache_retention=(),
        prompt_cache_options=(), cache_salt=(), priority=(0,), moderation=(),
        access_programs=(), background_options=(),
    ),
    *_ignored(
        "no effect here", spaces_between_special_tokens=(True,), guided_decoding_backend=(),
        guided_whitespace_pattern=(), mm_processor_kwargs=({},), media_io_kwargs=({},), image=({},),
        add_special_tokens=(False,), kv_transfer_params=({},),
    ),
    *_refused(
        "only the log-probs of the sampled tokens are known", top_logprobs=(0,), prompt_logprobs=(False,),
    ),
    *_refused(
        _FREE,
        logit_bias=({},), bad_words=([],), allowed_token_ids=(), logits_processors=([],), custom_params=({},),
        vllm_xargs=({},), no_repeat_ngram_size=(0,),
    ),
    *_refused(
        "the policy's end token, `stop` and the token limits end its turns",
        min_tokens=(0,), stop_token_ids=([],), ignore_eos=(False,), include_stop_str_in_output=(False,),
        no_stop_trim=(False,), stop_regex=([], ""),
    ),
    *_refused("one turn is sampled for each answer", best_of=(1,), use_beam_search=(False,)),
    *_refused(
        _FREE,
        structured_outputs=({},), guided_json=(), guided_regex=(), guided_choice=(), guided_grammar=(),
        structural_tag=(), json_schema=(), regex=(), ebnf=(), grammar=(),
    ),
    *_refused(
        _PROMPT,
        chat_template=(), chat_template_kwargs=({},), documents=([],), add_generation_prompt=(True,),
        continue_final_message=(False,), echo=(False,), truncate_prompt_tokens=(),
        enable_thinking=(), thinking=(), thinking_budget=(), thinking_token_budget=(),
    ),
    *_refused(
        "special tokens are removed, and reasoning is a separate field",
        skip_special_tokens=(True,), include_reasoning=(True,), separate_reasoning=(True,),
    ),
    *_refused(
        "requests and responses are text",
        return_token_ids=(False,), return_tokens_as_token_ids=(False,), return_hidden_states=(False,),
    ),
    *_refused("the policy writes text", modalities=(["text"], []), audio=()),
    *_refused("the only tools are those in the request", web_search_options=()),
    *_refused("send `tools` and `tool_choice` instead", is_ignorable=False,
              functions=([],), function_call=()),
    *_refused(
        "nothing is stored between requests: send the whole input each time", is_ignorable=False,
        previous_response_id=("",), conversation=(), context_management=([],), previous_input_messages=([],),
    ),
    *_refused("no prompts are stored here", is_ignorable=False, prompt=()),
    *_refused("the response always follows its request directly", is_ignorable=False, background=(False,)),
)  # fmt: skip

_SERVED: Final = ("temperature", "seed")  # fields that have an effect outside of rollouts
_FIELDS_BY_NAME: Final[Mapping[str, RequestField]] = {field.name: field for field in FIELDS}
IGNORABLE: Final = frozenset(field.name for field in FIELDS if field.is_ignorable)


def _find_ignored(
    body: Mapping[str, Any], path: RequestPath, *, accepted: Collection[str], is_training: bool
) -> list[str]:
    """The fields of a request without effect. Raises RequestError for a field that is refused, unless it is
    in ``accepted``.
    """
    ignored: list[str] = []
    for name, value in sorted(body.items()):
        known = _FIELDS_BY_NAME.get(name)
        if known is None:
            ignored += [name] if value is not None else []
        elif known.is_default(value) or (not is_training and name in _SERVED):
            continue
        elif known.only not in (None, path):
            raise RequestError(f"{name}: /v1/{path} has no such field", param=name)
        elif known.use == "refused" and name not in accepted:
            hint = f'; with environment.ignored_fields = ["{name}"] the request is answered without it'
            raise RequestError(
                f"{name}: {known.reason}{hint if known.is_ignorable and is_training else ''}",
                param=name,
                code="unsupported_parameter",
            )
        elif known.use != "done":
            ignored.append(name)
    return ignored


def fields_table() -> str:
    """The table of the documentation."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for known in FIELDS:
        uses = ["refused" if known.only not in (None, path) else known.use for path in (CHAT, RESPONSES)]
        is_final = known.use == "refused" and not known.is_ignorable
        reason = f"{known.reason} (always refused)" if is_final else known.reason
        rows.setdefault((uses[0], uses[1], reason), []).append(f"`{known.name}`")
    lines = ["| fields | chat completions | responses | |", "| --- | --- | --- | --- |"]
    lines += [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()]
    lines.append("| all others | ignored | ignored | |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(fields_table())
