"""Answers of ``/v1/chat/completions``: whole, or as a stream of events."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from outrider.environments.agent.requests import (
    MODEL,
    RESPONSES,
    Answer,
    BadRequest,
    PolicyRequest,
    checked,
    content_text,
    count,
    flag,
    ignored_fields,
    mapping,
    read_call,
    read_format,
    read_tools,
    with_tool_names,
    written_calls,
)
from outrider.environments.conversations import Conversation, token_text
from outrider.tokens.tool_calls import THINKING_END
from outrider.types import Message, Role


def completion(request: PolicyRequest, answers: Sequence[Answer], name: str) -> dict[str, Any]:
    """The whole answer; ``name`` is its id."""
    return {
        **_head(name, "chat.completion"),
        "choices": [
            {
                "index": number,
                "message": _message(answer),
                "finish_reason": answer.finish,
                "logprobs": _logprobs(answer) if request.include_logprobs else None,
            }
            for number, answer in enumerate(answers)
        ],
        "usage": usage(answers),
    }


def events(request: PolicyRequest, answers: Sequence[Answer], name: str) -> Iterator[str]:
    """The same as server-sent events. A turn is known as a whole only, so its words come at once."""
    head = _head(name, "chat.completion.chunk")
    for number, answer in enumerate(answers):
        message = _message(answer)
        calls = [{"index": index, **call} for index, call in enumerate(message.pop("tool_calls", ()))]
        yield _event(head, number, {key: value for key, value in message.items() if value is not None}, None,
                     _logprobs(answer) if request.include_logprobs else None)  # fmt: skip
        for call in calls:
            yield _event(head, number, {"tool_calls": [call]}, None, None)
        yield _event(head, number, {}, answer.finish, None)
    if request.include_usage and usage(answers) is not None:
        yield _line({**head, "choices": [], "usage": usage(answers)})
    yield "data: [DONE]\n\n"


def usage(answers: Sequence[Answer]) -> dict[str, int] | None:
    """Tokens of the context, which all answers share, and of the answers; None where nobody has told."""
    num_prompt_tokens = num_completion_tokens = 0
    for answer in answers:
        turn = answer.turn
        if turn is None or turn.num_tokens is None or turn.num_context_tokens is None:
            return None
        num_prompt_tokens = max(num_prompt_tokens, turn.num_context_tokens)
        num_completion_tokens += turn.num_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def _head(name: str, kind: str) -> dict[str, Any]:
    # no clock: a program that looks at it would do something else the next time
    return {"id": name, "object": kind, "created": 0, "model": MODEL}


def _message(answer: Answer) -> dict[str, Any]:
    policy_message = answer.message
    message: dict[str, Any] = {"role": "assistant", "content": policy_message.content or None}
    if not policy_message.tool_calls:
        message["content"] = policy_message.content
    if policy_message.reasoning:
        message["reasoning_content"] = policy_message.reasoning
    if policy_message.tool_calls:
        message["tool_calls"] = written_calls(policy_message.tool_calls)
    return message


def _logprobs(answer: Answer) -> dict[str, Any]:
    if answer.turn is None or answer.turn.kind != "drawn":
        return {"content": []}
    pairs = zip(answer.turn.token_bytes, answer.turn.logprobs, strict=True)
    return {
        "content": [
            {"token": token_text(piece), "logprob": value, "bytes": list(piece), "top_logprobs": []}
            for piece, value in pairs
        ],
        "refusal": None,
    }


def _event(
    head: dict[str, Any], number: int, delta: dict[str, Any], finish: str | None, logprobs: Any
) -> str:
    choice = {"index": number, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    return _line({**head, "choices": [choice]})


def _line(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


# ``/v1/responses``, the other form of the same questions: items in place of messages.
#
# Nothing is kept between requests: each has its whole input, as clients send it that store nothing.


_ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


def read_response(
    body: Any, *, takes_tools: bool, ignores_formats: bool = False, ignores: Collection[str] = ()
) -> PolicyRequest:
    """A body of ``/v1/responses``; ``ignores`` as for
    :func:`~outrider.environments.agent.requests.read_chat`. Raises BadRequest.
    """
    fields = mapping(body, "the body")
    ignored = [*ignored_fields(fields, RESPONSES, accepted=ignores), *_included(fields.get("include"))]
    text = mapping(fields.get("text") or {}, "text", param="text")
    is_json = read_format(text.get("format"), "text.format", ignores=ignores_formats)
    ignored += [f"text.{name}" for name, value in text.items() if value and name != "format"]
    ignored += ["text.format"] if is_json else []
    options = mapping(fields.get("stream_options") or {}, "stream_options", param="stream_options")
    ignored += [f"stream_options.{name}" for name, value in options.items() if value]
    tool_request = read_tools(fields, takes_tools=takes_tools)
    turns = _Turns()
    if fields.get("instructions"):
        turns.add_message(Message(role="system", content=content_text(fields["instructions"])))
    items = fields.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise BadRequest("input is a text, or a list with at least one item", param="input")
    for item in items:
        turns.add(mapping(item, "an item of the input", param="input"))
    if not turns.messages:
        raise BadRequest("the input holds no message", param="input")
    conversation = Conversation(
        messages=checked(with_tool_names(turns.messages), "input"),
        tools=tool_request.tools,
        single_call=tool_request.single_call,
        max_tokens=count(fields, "max_output_tokens"),
    )
    return PolicyRequest(
        conversation=conversation,
        streams=flag(fields, "stream"),
        tool_choice=tool_request.choice,
        ignores_format=is_json,
        ignored=tuple(sorted({*ignored, *tool_request.ignored})),
    )


def _included(value: Any) -> list[str]:
    """What of ``include`` is ignored. Raises BadRequest for log-probs, which would be missing."""
    if not isinstance(value or [], list):
        raise BadRequest("include must be a list", param="include")
    for item in value or []:
        if "logprobs" in str(item):
            raise BadRequest(
                f"include {item!r}: /v1/chat/completions gives log-probs", param="include",
                code="unsupported_parameter",
            )  # fmt: skip
    return [f"include.{item}" for item in value or []]


class _Turns:
    """The messages that items stand for: the thinking, the words and the calls of one turn come as items of
    their own.

    Items that this endpoint has written say by their ids which turn they are of. Of others, a turn is its
    thinking, at most one message, and calls, in this order; while its calls have no results it goes on.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn = ""  # of the newest message, if it is the policy's and its items say so
        self._has_words = False

    def add(self, item: dict[str, Any]) -> None:
        """Add one item. Raises BadRequest."""
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "reasoning":
            if thoughts := _thoughts(item):  # else they are for its maker's servers to read
                self._add_part(item, Message(role="assistant", content="", reasoning=thoughts))
        elif kind == "function_call":
            call = read_call(item.get("call_id"), item.get("name"), item.get("arguments"))
            self._add_part(item, Message(role="assistant", content="", tool_calls=(call,)))
        elif kind == "function_call_output":
            output = content_text(item.get("output"))
            self.add_message(
                Message(role="tool", content=output, tool_call_id=str(item.get("call_id") or ""))
            )
        elif kind == "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise BadRequest(
                    f"a message of the role {item.get('role')!r}: known are {', '.join(_ROLES)}",
                    param="input",
                )
            message = Message(role=role, content=content_text(item.get("content")))
            if role == "assistant":
                self._add_part(item, message, is_words=True)
            else:
                self.add_message(message)
        else:
            raise BadRequest(
                f"an item of the type {kind!r}: known are message, reasoning, function_call and its output",
                param="input",
            )

    def add_message(self, message: Message) -> None:
        """Add a message that is a whole one."""
        self.messages.append(message)
        self._turn, self._has_words = "", False

    def _add_part(self, item: dict[str, Any], part: Message, *, is_words: bool = False) -> None:
        """Add an item of a turn."""
        turn = _turn_id(item)
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or self._starts_turn(part, last, turn, is_words=is_words):
            self.add_message(part)
            self._turn, self._has_words = turn, is_words
            return
        self.messages[-1] = Message(
            role="assistant",
            content=last.content + part.content,
            reasoning="\n".join(text for text in (last.reasoning, part.reasoning) if text),
            tool_calls=(*last.tool_calls, *part.tool_calls),
        )
        self._turn = self._turn or turn
        self._has_words = self._has_words or is_words

    def _starts_turn(self, part: Message, last: Message, turn: str, *, is_words: bool) -> bool:
        """Whether an item behind the message ``last`` begins another turn."""
        if is_words and self._has_words:
            return True
        if turn and self._turn:
            return turn != self._turn
        if last.tool_calls:
            return False
        return bool(part.reasoning) and self._has_words


_OWN_ID: Final = re.compile(r"(?:rs|msg|fc)-(turn-\d+)(?:-.*)?")


def _turn_id(item: Mapping[str, Any]) -> str:
    """The turn that an item of this endpoint is of; empty for items of others."""
    match = _OWN_ID.fullmatch(str(item.get("id") or ""))
    return match[1] if match else ""


def _thoughts(item: dict[str, Any]) -> str:
    """The thinking that an item tells of; where it has only a summary, that."""
    thoughts: list[str] = []
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise BadRequest(f"the {name} of a reasoning item must be a list")
        texts = [mapping(part, "a part of a reasoning item").get("text") for part in parts]
        thoughts = thoughts or [part for part in texts if isinstance(part, str) and part]
    return "\n".join(thoughts)


def response(request: PolicyRequest, answer: Answer, name: str) -> dict[str, Any]:
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
        "parallel_tool_calls": not request.conversation.single_call,
        "temperature": None,
        "top_p": None,
        "tool_choice": request.tool_choice,
        "tools": [{"type": "function", "strict": False, **tool} for tool in request.conversation.tools],
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


def response_events(request: PolicyRequest, answer: Answer, name: str) -> Iterator[str]:
    """The same as server-sent events."""
    whole = response(request, answer, name)
    started = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [
        {"type": f"response.{status}", "response": started} for status in ("created", "in_progress")
    ]
    for number, item in enumerate(whole["output"]):
        events += _item_events(item, number)
    last = "response.incomplete" if whole["incomplete_details"] else "response.completed"
    events.append({"type": last, "response": whole})
    for number, event in enumerate(events):
        text = json.dumps({**event, "sequence_number": number}, ensure_ascii=False)
        yield f"event: {event['type']}\ndata: {text}\n\n"


def _items(answer: Answer, name: str) -> list[dict[str, Any]]:
    message = answer.message
    items: list[dict[str, Any]] = []
    if message.reasoning:
        items.append({
            "id": f"rs-{name}", "type": "reasoning", "status": "completed", "summary": [],
            "content": [{"type": "reasoning_text", "text": message.reasoning}],
        })  # fmt: skip
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"msg-{name}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for call in message.tool_calls:
        items.append({
            "id": f"fc-{name}-{call.call_id}", "type": "function_call", "call_id": call.call_id,
            "name": call.name, "arguments": call.arguments_text,
            "status": "completed",
        })  # fmt: skip
    return items


def _item_events(item: dict[str, Any], number: int) -> list[dict[str, Any]]:
    location = {"item_id": item["id"], "output_index": number}
    added = {"type": "response.output_item.added", "output_index": number}
    done = {"type": "response.output_item.done", "output_index": number, "item": item}
    if item["type"] == "function_call":
        kind = "response.function_call_arguments"
        return [
            {**added, "item": {**item, "arguments": "", "status": "in_progress"}},
            {"type": f"{kind}.delta", **location, "delta": item["arguments"]},
            {"type": f"{kind}.done", **location, "arguments": item["arguments"], "name": item["name"]},
            done,
        ]
    (part,) = item["content"]
    inside = {**location, "content_index": 0}
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
