"""Chat completions as OpenAI's clients write and read them: requests to conversations, turns to answers.

Sampling is the run's, so ``temperature``, ``top_p``, ``seed`` and the penalties of a request change nothing.
What would change the text that the program gets, and cannot be done, is refused in words.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from outrider.environments.conversing import Conversation, SampledTurn, ServedTurn
from outrider.types import Message, Role, ToolCall, ToolSchema, is_text

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


class BadRequest(Exception):
    """A request that cannot be served; the text tells the program why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request read: the conversation, how many answers, and how they are wanted."""

    conversation: Conversation
    num_answers: int = 1
    streams: bool = False
    wants_logprobs: bool = False
    wants_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One turn of the policy as the program gets it, with what is known of it; of an expert's nothing is."""

    message: Message
    turn: SampledTurn | ServedTurn | None

    @property
    def finish(self) -> str | None:
        """OpenAI's word for why it ended; None where the endpoint that plays the policy does not say."""
        if isinstance(self.turn, ServedTurn):
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


def read_chat(body: Any, *, takes_tools: bool) -> Ask:
    """A body of ``/v1/chat/completions``. Raises BadRequest."""
    fields = mapping(body, "the body")
    tools = read_tools(fields, takes_tools=takes_tools)
    kind = mapping(fields.get("response_format") or {"type": "text"}, "response_format").get("type")
    if kind != "text":
        raise BadRequest(f"response_format {kind!r}: a policy in training writes freely")
    if fields.get("top_logprobs"):
        raise BadRequest("top_logprobs: only the log-probs of the drawn tokens are known")
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message")
    conversation = Conversation(
        messages=checked(named_results([_message(one) for one in messages])),
        tools=tools,
        max_tokens=count(fields, "max_completion_tokens") or count(fields, "max_tokens"),
        stop=_stop(fields.get("stop")),
    )
    num_answers = count(fields, "n") or 1
    if num_answers > MAX_ANSWERS:
        raise BadRequest(f"n is at most {MAX_ANSWERS}")
    options = mapping(fields.get("stream_options") or {}, "stream_options")
    return Ask(
        conversation=conversation,
        num_answers=num_answers,
        streams=bool(fields.get("stream")),
        wants_logprobs=bool(fields.get("logprobs")),
        wants_usage=bool(options.get("include_usage")),
    )


def checked(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages, of which the policy can only answer the last. Raises BadRequest."""
    if messages[-1].role == "assistant":
        raise BadRequest("the last message is the assistant's: a turn cannot be begun for the policy")
    return messages


def named_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, those of tools with the names of their calls, which some templates write."""
    names: dict[str, str] = {}
    found: list[Message] = []
    for message in messages:
        names |= {call.call_id: call.name for call in message.tool_calls}
        name = names.get(message.tool_call_id, "") if message.role == "tool" else ""
        found.append(replace(message, tool_name=name) if name else message)
    return tuple(found)


def read_tools(fields: Mapping[str, Any], *, takes_tools: bool) -> tuple[ToolSchema, ...]:
    """The tools of a request, in the nested form or the flat one of ``/v1/responses``. Raises BadRequest."""
    tools = fields.get("tools") or []
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list")
    if tools and not takes_tools:
        raise BadRequest(
            "tools: name the form of the policy's calls in the recipe (environment.tool_calls = hermes, say)"
        )
    if fields.get("tool_choice") == "none":
        return ()
    return tuple(_tool(one) for one in tools)


def _tool(value: Any) -> ToolSchema:
    tool = mapping(value, "a tool")
    if tool.get("type") != "function":
        raise BadRequest(f"a tool of type {tool.get('type')!r}: only functions can be called")
    function = mapping(tool.get("function", tool), "a tool's function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRequest("a tool's function has no name")
    return {
        "name": function["name"],
        "description": str(function.get("description") or ""),
        "parameters": mapping(
            function.get("parameters") or {"type": "object", "properties": {}}, "parameters"
        ),
    }


def _message(value: Any) -> Message:
    fields = mapping(value, "a message")
    role = _ROLES.get(str(fields.get("role")))
    if role is None:
        raise BadRequest(f"a message of the role {fields.get('role')!r}: known are {', '.join(_ROLES)}")
    return Message(
        role=role,
        content=text_of_content(fields.get("content")),
        reasoning=str(fields.get("reasoning_content") or fields.get("reasoning") or "")
        if role == "assistant"
        else "",
        tool_calls=_calls(fields.get("tool_calls")) if role == "assistant" else (),
        tool_call_id=str(fields.get("tool_call_id") or "") if role == "tool" else "",
    )


def _calls(value: Any) -> tuple[ToolCall, ...]:
    if not isinstance(value or [], list):
        raise BadRequest("tool_calls must be a list")
    return tuple(_call(one) for one in value or [])


def _call(value: Any) -> ToolCall:
    call = mapping(value, "a tool call")
    function = mapping(call.get("function"), "a call's function")
    return read_call(call.get("id"), function.get("name"), function.get("arguments"))


def read_call(call_id: Any, name: Any, arguments: Any) -> ToolCall:
    """A call out of a history, whose arguments are JSON text. Raises BadRequest."""
    try:
        found = read_json(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the arguments of a call are no JSON: {error}") from error
    return ToolCall(
        name=str(name or ""), arguments=mapping(found, "a call's arguments"), call_id=str(call_id or "")
    )


def read_json(data: str | bytes) -> Any:
    """JSON whose texts are all characters: no tokenizer takes half of a surrogate pair, so a question mark
    stands for it. Raises ValueError, RecursionError.
    """
    found = json.loads(data)
    text = json.dumps(found, ensure_ascii=False)
    return found if is_text(text) else json.loads(text.encode("utf-8", "replace"))


def text_of_content(content: Any) -> str:
    """The text of a message, whole or in parts. Raises BadRequest for anything but text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest("a message's content is text, or a list of parts")
    return "".join(_part(mapping(one, "a part of a message")) for one in content)


def _part(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "refusal":
        return str(part.get("refusal") or "")
    raise BadRequest(f"a part of the type {kind!r}: the policy reads text")


def _stop(value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise BadRequest("stop is a text, or a list of texts")
    return tuple(one for one in found if one)


def count(fields: Mapping[str, Any], name: str) -> int | None:
    """A number of at least one, where it is given. Raises BadRequest."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadRequest(f"{name} must be a whole number of at least 1")
    return value


def mapping(value: Any, what: str) -> dict[str, Any]:
    """A JSON object. Raises BadRequest."""
    if not isinstance(value, dict):
        raise BadRequest(f"{what} must be a JSON object")
    return value


def written_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Tool calls as an answer has them."""
    return [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    ]
