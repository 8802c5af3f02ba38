"""``/v1/responses``, the other form of the same questions: items in place of messages.

Nothing is kept between requests: each has its whole input, as clients send it that store nothing.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from outrider.environments.agent.asked_tools import read_tools
from outrider.environments.agent.completions import usage
from outrider.environments.agent.fields import BadRequest, count, mapping
from outrider.environments.agent.wire import (
    MODEL,
    Answer,
    Ask,
    checked,
    named_results,
    read_call,
    read_format,
    text_of_content,
)
from outrider.environments.conversing import Conversation
from outrider.tokens.parsed import THINKING_END
from outrider.types import Message, Role

_ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


def read_response(body: Any, *, takes_tools: bool, ignores_formats: bool = False) -> Ask:
    """A body of ``/v1/responses``. Raises BadRequest."""
    fields = mapping(body, "the body")
    if fields.get("previous_response_id") or fields.get("conversation"):
        raise BadRequest("previous_response_id: nothing is kept here, send the whole input each time")
    text = mapping(fields.get("text") or {}, "text")
    wants_json = read_format(text.get("format"), "text.format", ignores=ignores_formats)
    asked = read_tools(fields, takes_tools=takes_tools)
    messages: list[Message] = []
    if fields.get("instructions"):
        messages.append(Message(role="system", content=text_of_content(fields["instructions"])))
    items = fields.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise BadRequest("input is a text, or a list with at least one item")
    for item in items:
        _add(messages, mapping(item, "an item of the input"))
    if not messages:
        raise BadRequest("the input holds no message")
    conversation = Conversation(
        messages=checked(named_results(messages)),
        tools=asked.tools,
        one_call=asked.one_call,
        max_tokens=count(fields, "max_output_tokens"),
    )
    return Ask(
        conversation=conversation,
        streams=bool(fields.get("stream")),
        tool_choice=asked.choice,
        ignores_format=wants_json,
    )


def _add(messages: list[Message], item: dict[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "reasoning":
        if thoughts := _thoughts(item):  # else they are for its maker's servers to read
            _say(messages, Message(role="assistant", content="", reasoning=thoughts))
    elif kind == "function_call":
        call = read_call(item.get("call_id"), item.get("name"), item.get("arguments"))
        _say(messages, Message(role="assistant", content="", tool_calls=(call,)))
    elif kind == "function_call_output":
        output = item.get("output")
        messages.append(
            Message(role="tool", content=text_of_content(output), tool_call_id=str(item.get("call_id") or ""))
        )
    elif kind == "message":
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise BadRequest(f"a message of the role {item.get('role')!r}: known are {', '.join(_ROLES)}")
        message = Message(role=role, content=text_of_content(item.get("content")))
        if role == "assistant":
            _say(messages, message)
        else:
            messages.append(message)
    else:
        raise BadRequest(f"an item of the type {kind!r}: known are message, function_call and its output")


def _thoughts(item: dict[str, Any]) -> str:
    """The thinking that an item tells of; where it has only a summary, that."""
    found: list[str] = []
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise BadRequest(f"the {name} of a reasoning item must be a list")
        texts = [mapping(one, "a part of a reasoning item").get("text") for one in parts]
        found = found or [one for one in texts if isinstance(one, str) and one]
    return "\n".join(found)


def _say(messages: list[Message], said: Message) -> None:
    """The thinking, the words and the calls of one turn come as items of their own, in this order."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or _begins(said, last):
        messages.append(said)
        return
    messages[-1] = Message(
        role="assistant",
        content=last.content + said.content,
        reasoning="\n".join(one for one in (last.reasoning, said.reasoning) if one),
        tool_calls=(*last.tool_calls, *said.tool_calls),
    )


def _begins(said: Message, last: Message) -> bool:
    """Whether what is said behind ``last`` is of another turn."""
    if said.reasoning:
        return bool(last.content or last.tool_calls)
    return bool(said.content and last.tool_calls)


def response(ask: Ask, answer: Answer, name: str) -> dict[str, Any]:
    """The whole answer; ``name`` is its id."""
    is_cut = answer.finish == "length"
    return {
        "id": name,
        "object": "response",
        "created_at": 0,
        "model": MODEL,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": _items(answer, name),
        "parallel_tool_calls": not ask.conversation.one_call,
        "temperature": None,
        "top_p": None,
        "tool_choice": ask.tool_choice,
        "tools": [{"type": "function", "strict": False, **tool} for tool in ask.conversation.tools],
        "usage": _usage(answer),
    }


def _usage(answer: Answer) -> dict[str, Any] | None:
    tokens = usage([answer])
    if tokens is None:
        return None
    return {
        "input_tokens": tokens["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": tokens["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": _num_thinking(answer)},
        "total_tokens": tokens["total_tokens"],
    }


def _num_thinking(answer: Answer) -> int:
    """Tokens up to the end of the thinking; 0 where there is none, or an endpoint plays the policy, which
    says nothing of them.
    """
    if not answer.message.reasoning or answer.turn is None or answer.turn.kind != "drawn":
        return 0
    end = ""
    for number, token in enumerate(answer.turn.tokens, start=1):
        end = end[-len(THINKING_END) :] + token
        if THINKING_END in end:
            return number
    return answer.turn.num_tokens


def response_events(ask: Ask, answer: Answer, name: str) -> Iterator[str]:
    """The same as server-sent events."""
    whole = response(ask, answer, name)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    told: list[dict[str, Any]] = [
        {"type": f"response.{how}", "response": begun} for how in ("created", "in_progress")
    ]
    for number, item in enumerate(whole["output"]):
        told += _item_events(item, number)
    last = "response.incomplete" if whole["incomplete_details"] else "response.completed"
    told.append({"type": last, "response": whole})
    for number, event in enumerate(told):
        text = json.dumps({**event, "sequence_number": number}, ensure_ascii=False)
        yield f"event: {event['type']}\ndata: {text}\n\n"


def _items(answer: Answer, name: str) -> list[dict[str, Any]]:
    said = answer.message
    items: list[dict[str, Any]] = []
    if said.reasoning:
        items.append({
            "id": f"rs-{name}", "type": "reasoning", "status": "completed", "summary": [],
            "content": [{"type": "reasoning_text", "text": said.reasoning}],
        })  # fmt: skip
    if said.content or not said.tool_calls:
        part = {"type": "output_text", "text": said.content, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"msg-{name}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for call in said.tool_calls:
        items.append({
            "id": f"fc-{name}-{call.call_id}", "type": "function_call", "call_id": call.call_id,
            "name": call.name, "arguments": call.arguments_text,
            "status": "completed",
        })  # fmt: skip
    return items


def _item_events(item: dict[str, Any], number: int) -> list[dict[str, Any]]:
    where = {"item_id": item["id"], "output_index": number}
    added = {"type": "response.output_item.added", "output_index": number}
    done = {"type": "response.output_item.done", "output_index": number, "item": item}
    if item["type"] == "function_call":
        kind = "response.function_call_arguments"
        return [
            {**added, "item": {**item, "arguments": "", "status": "in_progress"}},
            {"type": f"{kind}.delta", **where, "delta": item["arguments"]},
            {"type": f"{kind}.done", **where, "arguments": item["arguments"], "name": item["name"]},
            done,
        ]
    (part,) = item["content"]
    inside = {**where, "content_index": 0}
    kind = f"response.{part['type']}"
    logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
    return [
        {**added, "item": {**item, "content": [], "status": "in_progress"}},
        {"type": "response.content_part.added", **inside, "part": {**part, "text": ""}},
        {"type": f"{kind}.delta", **inside, "delta": part["text"], **logprobs},
        {"type": f"{kind}.done", **inside, "text": part["text"], **logprobs},
        {"type": "response.content_part.done", **inside, "part": part},
        done,
    ]
