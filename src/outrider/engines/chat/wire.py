"""Requests to a chat server, and the meaning of its answers."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from outrider.engines.chat.http_client import HttpAnswer
from outrider.printing import one_line
from outrider.tokens.abilities import CallShape
from outrider.tokens.parsed import split_thinking
from outrider.types import Message

_MAX_LINE = 300
REASONING: Final = ("reasoning", "reasoning_content")
"""What servers call a turn's thinking: newer vLLMs, and the others."""


class Transient(Exception):
    """A failure worth another try. ``kind`` is counted; ``wait_s`` is what the server asks for, in
    seconds.
    """

    def __init__(self, kind: str, text: str, *, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.kind = kind
        self.wait_s = wait_s


_TOO_LONG = re.compile(
    (
        r"context[ _](?:length|window|size)|maximum context|too many tokens"
        r"|(?:prompt|input)\w* (?:is|are) too long"
    ),
    re.IGNORECASE,
)


class Refusal(Exception):
    """A status that the same request will get again."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status

    @property
    def is_too_long(self) -> bool:
        """Whether the conversation does not fit the server's context: the agent's end, and no fault of the
        server.
        """
        return self.status in (400, 413, 422) and _TOO_LONG.search(str(self)) is not None


def wire_messages(messages: Sequence[Message], *, continues: bool) -> tuple[list[dict[str, Any]], bool]:
    """Messages in the server's form, and whether the last one is an open assistant message to be continued.

    With ``continues``, inline text joins the assistant message that it continues; without, it becomes a user
    message. So does a tool's message that answers no call of the turn before it. Thinking that stands apart
    has both names that servers know.
    """
    wire: list[dict[str, Any]] = []
    called: set[str] = set()
    for message in messages:
        joins = continues and message.role in ("assistant", "inline")
        if joins and wire and wire[-1]["role"] == "assistant":
            wire[-1]["content"] += message.content
        elif message.role == "assistant" or joins:
            wire.append(_assistant(message))
            called = {call.call_id for call in message.tool_calls}
        elif message.role == "tool" and message.tool_call_id in called:
            wire.append({"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content})
        else:
            role = "system" if message.role == "system" else "user"
            wire.append({"role": role, "content": message.content})
    return wire, continues and bool(messages) and messages[-1].role == "inline"


def _assistant(message: Message) -> dict[str, Any]:
    thinking = {key: message.reasoning for key in REASONING if message.reasoning}
    if not message.tool_calls:
        return {"role": "assistant", "content": message.content} | thinking
    return CallShape(arguments_are_text=True).message(message.tool_calls, message.content) | thinking


def without_thinking(messages: Sequence[Message]) -> list[Message]:
    """The messages with the thinking cut from the text of every turn that is over; an open turn keeps its
    own.

    Of a turn that calls tools it stands apart then: as in training, the template says how much of it a chain
    of calls shows.
    """
    next_roles = [*(message.role for message in messages[1:]), None]
    return [
        _cut(message) if message.role == "assistant" and role not in ("inline", None) else message
        for message, role in zip(messages, next_roles, strict=True)
    ]


def _cut(message: Message) -> Message:
    thinking, words, _ = split_thinking(message.content)
    apart = thinking if message.tool_calls and thinking else message.reasoning
    return replace(message, content=words, reasoning=apart)


def reply_text(text: str, stop: Sequence[str], choice: Mapping[str, object]) -> str:
    """A turn's text up to and with the first stop string, as local engines keep it.

    Servers leave the stop string out. vLLM names it in ``stop_reason``. For others, where ``</name>`` is a
    stop string and ``<name>`` was opened last, the turn is taken to have ended there (an end-of-turn inside
    an open tag looks the same).
    """
    ends = [text.index(end) + len(end) for end in stop if end in text]
    if ends:
        return text[: min(ends)]
    if choice.get("finish_reason") == "length":
        return text
    if "stop_reason" in choice:
        reason = choice["stop_reason"]
        return text + reason if isinstance(reason, str) and reason in stop else text
    opened = [(text.rfind(f"<{end[2:]}"), end) for end in stop if end.startswith("</")]
    position, last = max(opened, default=(-1, ""))
    return text + last if position >= 0 else text


def refusal_line(answer: HttpAnswer) -> str:
    """Status and the server's own words. They may be long, and hold anything."""
    raw = answer.content.decode("utf-8", "replace")
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError):
        parsed = None
    match parsed:
        case {"error": {"message": str(text)}} | {"error": str(text)} | {"message": str(text)}:
            raw = text
    words = " ".join(raw.split())
    return f"status {answer.status} {answer.reason}" + (f": {words}" if words else "")


def shown(text: str, key: str) -> str:
    """Words of a server, or about it, as one line for people: without the key, without control characters,
    not too long.
    """
    if key:
        # as a library quotes it
        for secret in (key, repr(key)[1:-1], key.replace("\\", r"\\").replace("'", r"\'")):
            text = text.replace(secret, "***")
    return " ".join(one_line(text).split())[:_MAX_LINE]
