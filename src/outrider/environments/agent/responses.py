"""Responses of ``/v1/chat/completions`` and ``/v1/responses``, whole or as server-sent events.

Ids are counters and times are 0, so that a program that reads them behaves the same when it is replayed.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

from outrider.environments.agent.requests import CHAT, PolicyRequest, RequestPath
from outrider.environments.conversations import (
    Conversation,
    SampledTurn,
    ServedTurn,
    before_stop,
    token_text,
)
from outrider.tokens.call_formats import get_call_format, read_turn_unchecked
from outrider.tokens.tool_calls import split_thinking
from outrider.types import Message, ToolCall

_SINGLE_CALL: Final = "The program takes one tool call a turn (parallel_tool_calls = false)."
MODEL: Final = "policy"
"""Name of the model; requests may contain any name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One turn of the policy as the program receives it. ``turn`` is None for a turn of an expert."""

    message: Message
    turn: SampledTurn | ServedTurn | None

    @property
    def finish(self) -> str | None:
        """The finish reason in OpenAI's terms; None if the endpoint that plays the policy reports none."""
        finish = None if self.turn is None else self.turn.finish
        is_served = self.turn is not None and self.turn.kind == "served"
        if finish == "length" and (is_served or not self.message.tool_calls):
            return "length"
        if self.message.tool_calls:
            return "tool_calls"
        return "stop" if not is_served or finish in ("stop", "tool_calls") else None


def read_answer(
    text: str,
    request: Conversation,
    call_format: str | None,
    turn: SampledTurn | ServedTurn | None,
    *,
    number: int,
    is_inline: bool = False,
) -> Message:
    """Parse the text of a turn into the message that the program will receive.

    Args:
        text: the text of the turn, with the stop string that ended it.
        request: what the turn answers; its stop strings are removed.
        call_format: the format of native tool calls; None without them.
        turn: data about the turn, if there are any.
        number: the number of the turn in the conversation, which the ids of its calls contain.
        is_inline: thinking stays in the text, because the program sends the text back to be continued.
    """
    if turn is None or turn.kind != "drawn":
        text = before_stop(text, request.stop)
    elif turn.finish == "stop":  # otherwise the policy wrote no stop string
        text = before_stop(text, request.stop, opened=len(turn.opened))
    if is_inline:  # the prompt of the continuation ends with the same opening of thinking
        opened = turn.opened if turn is not None and turn.kind == "drawn" else ""
        return Message(role="assistant", content=text.removeprefix(opened))
    form = None if call_format is None else get_call_format(call_format)
    parsed = read_turn_unchecked(text, form, request.tools)
    if problems := parsed.problems or call_problems(parsed.tool_calls, request):
        reasoning, words, _ = split_thinking(text, form)
        return Message(role="assistant", content=words, reasoning=reasoning, problems=problems)
    calls = with_call_ids(parsed.tool_calls, number)
    return Message(role="assistant", content=parsed.content, reasoning=parsed.reasoning, tool_calls=calls)


def with_call_ids(calls: Sequence[ToolCall], turn_number: int) -> tuple[ToolCall, ...]:
    """Add ids that are unique in the conversation, because agents identify results by them."""
    return tuple(
        replace(call, call_id=f"c{turn_number:04d}{number:04d}") for number, call in enumerate(calls)
    )


def call_problems(calls: Sequence[ToolCall], request: Conversation) -> tuple[str, ...]:
    """If the program takes a single call and gets several, it gets none: with only the first one, the
    policy would be trained on calls that the program never saw.
    """
    return (_SINGLE_CALL,) if request.single_call and len(calls) > 1 else ()


def write_response(
    path: RequestPath, request: PolicyRequest, answers: Sequence[Answer], name: str
) -> dict[str, Any] | Iterator[str]:
    """The JSON of a response, or the events of a stream. ``name`` is the response's id."""
    if path == CHAT:
        return (_chat_events if request.streams else _chat)(request, answers, name)
    return (_response_events if request.streams else _response)(request, answers[0], name)


def _chat(request: PolicyRequest, answers: Sequence[Answer], name: str) -> dict[str, Any]:
    return {
        **_head(name, "chat.completion"),
        "choices": [
            {
                "index": number,
                "message": _chat_message(answer),
                "finish_reason": answer.finish,
                "logprobs": _logprobs(answer) if request.include_logprobs else None,
            }
            for number, answer in enumerate(answers)
        ],
        "usage": _usage(answers),
    }


def _chat_events(request: PolicyRequest, answers: Sequence[Answer], name: str) -> Iterator[str]:
    """A turn is sampled before it is sent, so its text is one event."""
    head = _head(name, "chat.completion.chunk")

    def event(number: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": number, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return _line({**head, "choices": [choice]})

    for number, answer in enumerate(answers):
        message = _chat_message(answer)
        calls = message.pop("tool_calls", ())
        delta = {key: value for key, value in message.items() if value is not None}
        yield event(number, delta, logprobs=_logprobs(answer) if request.include_logprobs else None)
        for index, call in enumerate(calls):
            yield event(number, {"tool_calls": [{"index": index, **call}]})
        yield event(number, {}, finish=answer.finish)
    if request.include_usage and _usage(answers) is not None:
        yield _line({**head, "choices": [], "usage": _usage(answers)})
    yield "data: [DONE]\n\n"


def _usage(answers: Sequence[Answer]) -> dict[str, int] | None:
    """Number of tokens of the context, which all answers share, and of the answers; None if not known."""
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
    return {"id": name, "object": kind, "created": 0, "model": MODEL}


def _chat_message(answer: Answer) -> dict[str, Any]:
    calls, content = answer.message.tool_calls, answer.message.content
    message: dict[str, Any] = {"role": "assistant", "content": content or None if calls else content}
    if answer.message.reasoning:
        message["reasoning_content"] = answer.message.reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_text},
            }
            for call in calls
        ]
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


def _line(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _response(request: PolicyRequest, answer: Answer, name: str) -> dict[str, Any]:
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
        "usage": _response_usage(answer),
    }


def _response_usage(answer: Answer) -> dict[str, Any] | None:
    tokens = _usage([answer])
    if tokens is None:
        return None
    return {
        "input_tokens": tokens["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": tokens["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": _num_reasoning_tokens(answer)},
        "total_tokens": tokens["total_tokens"],
    }


def _num_reasoning_tokens(answer: Answer) -> int:
    """Number of tokens up to the end of the reasoning; 0 without reasoning and for turns of a server."""
    if not answer.message.reasoning or answer.turn is None or answer.turn.kind != "drawn":
        return 0
    text = "".join(answer.turn.tokens)
    thoughts = text[: len(text) - len(split_thinking(text)[1])].rstrip("\n")
    for number, length in enumerate(accumulate(map(len, answer.turn.tokens)), start=1):
        if 0 < len(thoughts) <= length:
            return number
    return answer.turn.num_tokens


def _response_events(request: PolicyRequest, answer: Answer, name: str) -> Iterator[str]:
    whole = _response(request, answer, name)
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
