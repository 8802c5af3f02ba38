"""Answers of ``/v1/chat/completions``: whole, or as a stream of events."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from outrider.environments.agent.wire import MODEL, Answer, PolicyRequest, written_calls
from outrider.tokens.token_bytes import token_text


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
