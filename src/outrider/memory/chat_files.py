"""Readers of chat files in common formats, and their import as trajectories.

Supported are OpenAI's chat completions (``tool_calls``, the older ``function_call``, ``reasoning_content``),
items of OpenAI's Responses, blocks of Anthropic's messages, ShareGPT's ``conversations`` (``from`` and
``value``), messages of LangChain, parts of Vercel's AI SDK, and TRL's columns ``prompt`` and ``completion``.
Calls and thinking become part of the assistant's text, in the Hermes form and between ``<think>`` tags; the
reader counts everything that it has to drop.
"""

import csv
import importlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import pyarrow
import pyarrow.parquet

from outrider.errors import DataError, ToolUnavailable
from outrider.memory.step_store import question_key, text_digest
from outrider.records import UNREADABLE, decode_arrow, unique_keys
from outrider.suggestions import closest_match
from outrider.tokens.call_formats import CALL_FORMATS
from outrider.tokens.tool_calls import call_id, read_calls, split_thinking
from outrider.types import Message, Role, Step, ToolCall, Trajectory

_ROLES: Final[Mapping[str, Role]] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant",
    "ai": "assistant", "bot": "assistant", "function_call": "assistant", "tool_call": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool", "tool_result": "tool",
    "function_response": "tool", "ipython": "tool",
}  # fmt: skip
_LANGCHAIN: Final = ("human", "ai", "system", "tool")  # types of its messages, in place of roles
_RESULTS: Final = ("tool_result", "function_call_output", "tool-result")
_CALLERS: Final = ("function_call", "tool_call")  # ShareGPT's roles whose text is a call
_CHATS: Final = ("messages", "conversations", "conversation", "chat", "items")
_THOUGHTS: Final = ("reasoning_content", "reasoning", "thinking", "reasoning_text")
_DETAILS: Final = ("reasoning_details", "thinking_blocks")
_TEXTS: Final = ("text", "input_text", "output_text", "refusal")
_FILES: Final = ("file", "files", "document", "pdf")  # their columns may be text
_MEDIA: Final = ("image", "images", "audio", "audios", "video", "videos", *_FILES)
_CONTENTS: Final = (
    "data", "image_url", "input_audio", "video_url", "file_id", "file_data", "file_url", "base64", *_MEDIA
)  # fmt: skip
"""Keys with the content of a part that is not text; Anthropic's ``source`` is an object."""
_READ: Final = frozenset(
    {"role", "from", "content", "value", "type", "id", "status", "object", "index", "phase", "tool_calls",
     "function_call", "tool_call_id", "call_id", "refusal", *_THOUGHTS, *_DETAILS}
)  # fmt: skip
_CALLS: Final = ("tool_calls", "function_call")
_UNREAD: Final = ("parts", "toolInvocations", "additional_kwargs", "kwargs", "contents")
"""Keys of exports whose messages have no ``content``: Gemini, Vercel's UI and LangChain's dumps."""
QUESTIONS: Final = ("question", "prompt", "problem", "query")
COLUMNS: Final = frozenset({*QUESTIONS, *_CHATS, "completion", "input", "output", "system", "instructions"})
"""Columns that the reader uses."""


_CONFIRMATION: Final = re.compile(r"(ok|okay|understood|got it|i understand)\b.{0,80}", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A chat and the question that it answers. ``dropped`` counts the dropped fields and parts by name. The
    first ``num_given`` messages are a prompt of its own column: turns of the assistant in it are examples.
    """

    question: str
    messages: tuple[Message, ...]
    dropped: Counter[str]
    num_given: int = 0


def read_chat(record: Mapping[str, Any]) -> Chat:
    """Read the chat of a record. Raises ValueError with the reason if it cannot be read."""
    dropped: Counter[str] = Counter()
    if media := [key for key in _MEDIA if _is_media(key, record.get(key))]:
        raise ValueError(f"column {media[0]!r} is not text: Outrider trains on text")
    reader = _Reader(dropped)
    prompt, items = _items(record, dropped)
    for item in prompt:
        reader.add(item)
    num_given = reader.num_given = len(reader.messages)
    for item in items:
        reader.add(item)
    messages = _numbered(reader.messages)
    system = record.get("system") or record.get("instructions")
    if system and not any(message.role == "system" for message in messages):
        messages.insert(
            0, Message(role="system", content=_joined(reader.parts(system, "system").texts, "\n"))
        )
        num_given += bool(num_given)
    question = _question(record, messages, num_given)
    if not num_given and all(record.get(key) is None for key in (*QUESTIONS, "task_key")):
        # AgentInstruct and ETO begin with one instruction for all tasks, which the assistant confirms.
        start = next((n for n, message in enumerate(messages) if message.role == "assistant"), 0)
        said, *others = messages[start:]
        follows = len(others) > 1 and others[0].role == "user" and bool(others[0].content.strip())
        if follows and _CONFIRMATION.fullmatch(turn_text(said)):
            question, num_given = others[0].content, start + 2
    return Chat(question=question, messages=tuple(messages), dropped=dropped, num_given=num_given)


def turn_text(message: Message) -> str:
    """Format the assistant's message as the policy would generate it: thinking, text, calls."""
    calls = CALL_FORMATS["hermes"].write(message.tool_calls) if message.tool_calls else ""
    text = "\n".join(part for part in (message.content, calls) if part)
    return f"<think>\n{message.reasoning}\n</think>\n\n{text}" if message.reasoning else text


def _is_media(key: str, value: Any) -> bool:
    return bool(value) and not (key in _FILES and isinstance(value, str))


def _numbered(messages: Sequence[Message]) -> list[Message]:
    """Replace the ids of the calls by numbers. The results of a turn whose ids are those of its calls are put
    in the order of the calls, because they are paired by their order from here on.
    """
    numbered: list[Message] = []
    order: dict[str, int] = {}
    start = 0
    for message in messages:
        if message.role == "assistant":
            ids = [call.call_id for call in message.tool_calls]
            is_unique = all(ids) and len({*ids}) == len(ids)
            order = {name: rank for rank, name in enumerate(ids)} if is_unique else {}
            start = len(numbered) + 1
            calls = tuple(
                replace(call, call_id=call_id(number)) for number, call in enumerate(message.tool_calls)
            )
            message = replace(message, tool_calls=calls)
        numbered.append(replace(message, tool_call_id=""))
        results = [*messages[start : len(numbered)]]
        if message.role == "tool" and all(result.tool_call_id in order for result in results):
            ranks = sorted(range(len(results)), key=lambda n: order[results[n].tool_call_id])
            numbered[start:] = [replace(results[n], tool_call_id="") for n in ranks]
    return numbered


def _items(record: Mapping[str, Any], dropped: Counter[str]) -> tuple[list[Any], list[Any]]:
    """Return the messages of a record from any of the supported columns: those of a prompt with a completion,
    and the others. Counts chats in other columns.
    """
    chats = [key for key in _CHATS if record.get(key) is not None]
    if chats:
        items = _listed(record[chats[0]], chats[0])
        dropped.update(f"column {key!r}" for key in chats[1:])
        # a log of requests has the answer of the last one in a column of its own
        column = "output" if record.get("completion") is None else "completion"
        value = record.get(column)
        answer = _decoded(value)
        is_chat = isinstance(answer, list) and answer != [] and all(map(_is_item, answer))
        if is_chat and answer[: len(items)] == items:  # the whole conversation
            answer = answer[len(items) :]
        is_text = column == "completion" and isinstance(value, str) and value.strip() != ""
        last = items[-1] if items and isinstance(items[-1], Mapping) else {}
        ends = _role(last) == "assistant" or last.get("type") == "ai"
        if (is_chat or is_text) and not ends:
            items = [*items, *(answer if is_chat else [{"role": "assistant", "content": value}])]
        elif answer not in (None, [], "") and not (is_chat and items[-len(answer) :] == answer):
            dropped[f"column {column!r}"] += answer not in (last.get("content"), last.get("value"))
        return [], items
    if record.get("prompt") is not None and record.get("completion") is not None:
        return (
            _as_messages(record["prompt"], "user", "prompt"),
            _as_messages(record["completion"], "assistant", "completion"),
        )
    if record.get("input") is not None and isinstance(_decoded(record.get("output")), list):
        return [], [*_as_messages(record["input"], "user", "input"), *_listed(record["output"], "output")]
    raise ValueError(
        f"no column 'messages' (or {', '.join(_CHATS[1:])}, or prompt with completion); "
        f"{_columns(record, _CHATS if 'prompt' not in record else (*_CHATS, 'completion'))}"
    )


def _listed(value: Any, key: str) -> list[Any]:
    items = _decoded(value)
    if not isinstance(items, list):
        raise ValueError(f"{key!r} must be a list{' as JSON text' if isinstance(value, str) else ''}")
    return items


def _as_messages(value: Any, role: Role, key: str) -> list[Any]:
    """Convert a column that is a text or a list of messages to messages."""
    messages = _decoded(value)
    if isinstance(messages, list) and (not isinstance(value, str) or all(map(_is_item, messages))):
        return messages
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be text or a list of messages, not {type(value).__name__}")
    return [{"role": role, "content": value}]


def _is_item(value: Any) -> bool:
    """Whether a value of a list looks like a message, also one of an unknown role, which is an error."""
    return isinstance(value, Mapping) and any(
        isinstance(value.get(key), str) for key in ("role", "from", "type")
    )


def _decoded(value: Any) -> Any:
    """Decode JSON in a text column, as in CSV files and some tables."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _role(item: Any) -> Role | None:
    name = (item.get("role") or item.get("from")) if isinstance(item, Mapping) else None
    return _ROLES.get(name.strip().lower()) if isinstance(name, str) else None


def _question(record: Mapping[str, Any], messages: Sequence[Message], num_given: int) -> str:
    key = next((key for key in QUESTIONS if record.get(key) is not None), None)
    if key is not None and (key != "prompt" or isinstance(_decoded(record[key]), str)):
        question = record[key]
        if not isinstance(question, str):
            raise ValueError(f"{key!r} must be text, not {type(question).__name__}")
        if not question.strip():
            raise ValueError(f"{key!r} is empty")
        return question
    first = num_given or next((n for n, m in enumerate(messages) if m.role == "assistant"), len(messages))
    user_texts = [
        message.content for message in messages[:first] if message.role == "user" and message.content.strip()
    ]
    if not user_texts:
        raise ValueError(
            f"no column 'question' (or {', '.join(QUESTIONS[1:])}), and no user message in front of the "
            f"assistant's; {_columns(record, QUESTIONS)}"
        )
    return user_texts[-1]


_OTHER_NAMES: Final[Mapping[str, Sequence[str]]] = {
    "messages": ("trajectory", "traj", "dialog", "dialogue", "turns", "history", "transcript"),
    "completion": ("response", "answer", "generation", "output"),
    "question": ("instruction", "input", "task", "user"),
    "reward": ("score", "return", "success", "correct", "label", "is_correct", "resolved", "value"),
}
"""Names in other data sets of the columns that a record may lack."""


def _columns(record: Mapping[str, Any], wanted: Sequence[str]) -> str:
    """List the columns of a record, and suggest the one to rename to a ``wanted`` name."""
    names = [str(key) for key in record if str(key) not in COLUMNS]
    hint = ""
    for name in wanted:
        others = [key for key in names if key.lower() in _OTHER_NAMES.get(name, ())]
        if (found := closest_match(name, names, cutoff=0.75)) or (found := next(iter(others), None)):
            hint = f"; if {found!r} contains it, rename it to {name!r}"
            break
    return f"the record has the columns {', '.join(map(str, record)) or 'none'}{hint}"


@dataclass(slots=True)
class _Parts:
    """The parts of a message's content by kind."""

    texts: list[str]
    thoughts: list[str]
    calls: list[ToolCall]
    results: list[Message]


class _Reader:
    """Collects the messages of one chat."""

    def __init__(self, dropped: Counter[str]) -> None:
        self.messages: list[Message] = []
        self._dropped = dropped
        self._number = 0
        self.num_given = 0  # messages that are complete

    def add(self, item: Any) -> None:
        """Add one message, or one item of Responses."""
        location = f"message {self._number}"
        if not isinstance(item, Mapping):
            raise ValueError(f"{location} must be an object")
        kind = item.get("type")
        if kind in _LANGCHAIN and "role" not in item and "from" not in item:
            inside = item.get("data")
            self._add_message({"role": kind, **(inside if isinstance(inside, Mapping) else item)}, location)
        elif "role" in item or "from" in item or not isinstance(kind, str):
            self._add_message(item, location)
        else:
            self._add_item(kind, item, location)
        self._number += 1

    def _add_message(self, item: Mapping[str, Any], location: str) -> None:
        role_name = item.get("role") or item.get("from")
        role = _role(item)
        if role is None:
            raise ValueError(f"{location} has unknown role {role_name!r}")
        self._count_dropped(item, role, location)
        content = item["content"] if item.get("content") is not None else item.get("value")
        if role == "assistant":
            channel = item.get("channel")  # other formats have a recipient without a channel
            if channel == "analysis" or (channel and item.get("recipient") not in (None, "", "all")):
                raise ValueError(
                    f"{location} is thinking or a call in OpenAI's Harmony format, which Outrider does not "
                    "read: convert both to 'reasoning' and 'tool_calls' of one message"
                )
            is_call = str(role_name).strip().lower() in _CALLERS
            turn = self._assistant(item, content, is_call=is_call, location=location)
            # ms-swift writes calls behind the text of their turn, each with a role of its own.
            self._append_turn(turn, joins=is_call or item.get("type") == "message")
            return
        if role == "tool":
            if (
                isinstance(content, list)
                and content
                and all(isinstance(part, Mapping) and part.get("type") in _RESULTS for part in content)
            ):
                self.messages += self.parts(content, location).results
                return
            name = item.get("name")
            message = self._tool_message(item, content, location)
            self.messages.append(replace(message, tool_name=name if isinstance(name, str) else ""))
            return
        if content is None:
            raise ValueError(f"{location}: 'content' must be text, not NoneType")
        parts = self.parts(content, location)
        if parts.thoughts or parts.calls:
            raise ValueError(f"{location} of the role {role_name!r} contains thinking or calls")
        self.messages += parts.results
        if parts.texts or not parts.results:
            self.messages.append(Message(role=role, content=_joined(parts.texts, "\n")))

    def _add_item(self, kind: str, item: Mapping[str, Any], location: str) -> None:
        match kind:
            case "reasoning":
                thoughts = _thought(item.get("content"), location) or _thought(item.get("summary"), location)
                if thoughts:
                    self._append_turn(Message(role="assistant", content="", reasoning=thoughts), joins=True)
                else:
                    self._dropped["thinking that is encrypted"] += 1
            case "function_call" | "custom_tool_call" | "mcp_call":
                call = _call(item, location)
                self._append_turn(Message(role="assistant", content="", tool_calls=(call,)), joins=True)
                if kind == "mcp_call" and item.get("output") is not None:
                    self.messages.append(self._tool_message(item, item["output"], location))
            case "function_call_output" | "custom_tool_call_output":
                self.messages.append(self._tool_message(item, item.get("output"), location))
            case _:
                raise ValueError(
                    f"{location} is an item of the type {kind!r}, which no environment here can play"
                )

    def _assistant(self, item: Mapping[str, Any], content: Any, *, is_call: bool, location: str) -> Message:
        if is_call:
            calls = _calls(content, location)
            if not calls:
                raise ValueError(f"{location} of a call has no call")
            return Message(role="assistant", content="", tool_calls=calls)
        parts = self.parts(content, location) if content is not None else _Parts([], [], [], [])
        if parts.results:
            raise ValueError(f"{location} of the assistant contains a tool's result")
        text = "".join(parts.texts)
        refusal = item.get("refusal")
        if isinstance(refusal, str) and refusal.strip():
            text = "\n".join(part for part in (text, refusal) if part)
        calls = self._distinct_calls(item, parts, text, location)
        reasoning = self._thoughts(item, parts, text, location)
        if not (text.strip() or calls or reasoning):
            unread = next((key for key in _UNREAD if item.get(key)), None)
            if unread is not None:
                raise ValueError(f"{location} has {unread!r}, which Outrider does not read")
            if content is None:
                raise ValueError(f"{location}: 'content' must be text, not NoneType")
            raise ValueError(f"{location} of the assistant is empty")
        return Message(role="assistant", content=text, reasoning=reasoning, tool_calls=calls)

    def _distinct_calls(
        self, item: Mapping[str, Any], parts: _Parts, text: str, location: str
    ) -> tuple[ToolCall, ...]:
        """Return the calls that are not in the text. Exports repeat them in several fields, so only one of
        these is used.
        """
        older = item.get("additional_kwargs")  # of LangChain
        sources = (item, older) if isinstance(older, Mapping) else (item,)
        fields = (
            *(_calls(source.get(key), location) for source in sources for key in _CALLS),
            tuple(parts.calls),
        )  # fmt: skip
        # the results are ordered by the ids
        by_ids = sorted(filter(None, fields), key=lambda calls: not all(call.call_id for call in calls))
        used, *others = by_ids or [()]
        if any(call not in map(_without_id, used) for calls in others for call in map(_without_id, calls)):
            self._dropped["calls beside others of the same message"] += 1
        words = split_thinking(text)[1]
        if "<tool_call>" not in words:
            return used
        written = read_calls(words, CALL_FORMATS["hermes"], ())
        if written.problems:
            self._dropped["calls in the text that cannot be read (they stay as they are)"] += 1
        return tuple(call for call in used if _without_id(call) not in map(_without_id, written.calls))

    def _thoughts(self, item: Mapping[str, Any], parts: _Parts, text: str, location: str) -> str:
        """Return the thinking. Servers repeat it under several names, so only one of them is used."""
        written = [
            thinking for key in (*_THOUGHTS, *_DETAILS) if (thinking := _thought(item.get(key), location))
        ]
        thinking = next(iter(written), "") or "\n".join(parts.thoughts).strip()
        if not thinking and any(item.get(key) for key in (*_THOUGHTS, *_DETAILS)):
            self._dropped["thinking that is encrypted"] += 1
        head = text.partition("</think>")[0]  # which a template may have opened
        if thinking and ("<think>" in text or (head != text and thinking in head)):
            if thinking not in text:
                self._dropped["thinking beside <think> in the text"] += 1
            return ""
        return thinking

    def _append_turn(self, turn: Message, *, joins: bool) -> None:
        """Append a turn, or join its thinking, text and calls, which may be separate items."""
        last = self.messages[-1] if joins and len(self.messages) > self.num_given else None
        if last is None or last.role != "assistant" or _begins(turn, last):
            self.messages.append(turn)
            return
        self.messages[-1] = Message(
            role="assistant",
            content=last.content + turn.content,
            reasoning="\n".join(text for text in (last.reasoning, turn.reasoning) if text),
            tool_calls=(*last.tool_calls, *turn.tool_calls),
        )

    def parts(self, content: Any, location: str) -> _Parts:
        """Read content that is a text or a list of parts, in OpenAI's or Anthropic's form."""
        parts = _Parts([], [], [], [])
        if isinstance(content, str):
            parts.texts.append(content)
            return parts
        if not isinstance(content, list | Mapping):
            raise ValueError(f"{location}: 'content' must be text, not {type(content).__name__}")
        for part in [content] if isinstance(content, Mapping) else content:
            self._part(part, parts, location)
        return parts

    def _part(self, part: Any, parts: _Parts, location: str) -> None:
        if isinstance(part, str):
            parts.texts.append(part)
            return
        if not isinstance(part, Mapping):
            raise ValueError(f"{location}: a part of 'content' must be an object, not {type(part).__name__}")
        kind = part.get("type")
        if kind in _TEXTS or (kind is None and isinstance(part.get("text"), str)):
            text = part.get("refusal" if kind == "refusal" else "text")
            if not isinstance(text, str):
                raise ValueError(f"{location}: a part of the type {kind!r} has no text")
            parts.texts.append(text)
        elif kind in ("thinking", "reasoning", "reasoning_text", "summary_text"):
            if thoughts := _thought(part, location):
                parts.thoughts.append(thoughts)
            else:
                self._dropped["thinking that is encrypted"] += 1
        elif kind == "redacted_thinking":
            self._dropped["thinking that is encrypted"] += 1
        elif kind in ("tool_use", "tool_call", "function_call", "tool-call"):
            parts.calls.append(_call(part, location))
        elif kind in _RESULTS:
            keys = ("content", "output", "result")
            output = next((part[key] for key in keys if part.get(key) is not None), None)
            if kind == "tool-result" and isinstance(output, Mapping) and "value" in output:
                output = output["value"]
            if part.get("is_error"):
                self._dropped["'is_error' of results"] += 1
            parts.results.append(self._tool_message(part, output, location))
        elif isinstance(kind, str) and _names_media(kind):
            raise ValueError(f"{location} contains a part of the type {kind!r}: Outrider trains on text")
        else:
            raise ValueError(f"{location} contains a part of the unknown type {kind!r}")

    def _tool_message(self, item: Mapping[str, Any], content: Any, location: str) -> Message:
        """Return a result with the id of its call, if there is one."""
        return Message(role="tool", content=self._result(content, location), tool_call_id=_id(item))

    def _result(self, content: Any, location: str) -> str:
        """Return the result of a tool call: text, parts of text, or JSON, which may have a key ``type``."""
        if content is None:
            return ""
        if isinstance(content, str):
            return content
        parts = content if isinstance(content, list) else []
        has_media = any(isinstance(part, Mapping) and _is_media_part(part) for part in parts)
        is_text = isinstance(content, list) and all(
            isinstance(part, str) or (isinstance(part, Mapping) and part.get("type") in _TEXTS)
            for part in parts
        )
        if has_media or is_text or (isinstance(content, Mapping) and content.get("type") in _TEXTS):
            return _joined(self.parts(content, location).texts, "\n")
        if isinstance(content, list | Mapping | int | float):
            return json.dumps(content, ensure_ascii=False, default=str)
        raise ValueError(f"{location}: 'content' must be text, not {type(content).__name__}")

    def _count_dropped(self, item: Mapping[str, Any], role: Role, location: str) -> None:
        for key, value in item.items():
            if key in _MEDIA and _is_media(key, value):
                raise ValueError(f"{location} contains {key!r}: Outrider trains on text")
            if value is None or value == [] or value == {} or value == "":
                continue
            is_older = role == "assistant" and key == "additional_kwargs" and isinstance(value, Mapping)
            if is_older and {name for name, entry in value.items() if entry} <= {*_CALLS}:
                continue  # read with the calls of the message
            is_thought = key in _THOUGHTS or key in _DETAILS
            belongs = role == "assistant" or (not is_thought and key not in _CALLS)
            if (key in _READ and belongs) or (key == "name" and role == "tool"):
                continue
            self._dropped[f"{key!r} of messages of the role {role}"] += 1


def _names_media(kind: str) -> bool:
    return any(kind.removeprefix("input_").startswith(prefix) for prefix in _MEDIA)


def _without_id(call: ToolCall) -> ToolCall:
    return replace(call, call_id="")


def _is_media_part(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    if not isinstance(kind, str) or not _names_media(kind):
        return False
    keys = _CONTENTS if kind.removeprefix("input_").startswith(_FILES) else (*_CONTENTS, "url", "path")
    return isinstance(part.get("source"), Mapping) or any(part.get(key) for key in keys) or len(part) == 1


def _id(item: Mapping[str, Any]) -> str:
    """The id that links a call and its result. An item of Responses has an ``id`` of its own beside it."""
    keys = ("tool_call_id", "call_id", "tool_use_id", "toolCallId", "id")
    return next((value for key in keys if isinstance(value := item.get(key), str) and value), "")


def _begins(turn: Message, last: Message) -> bool:
    """Return whether an item begins a new turn instead of continuing the last one."""
    if turn.reasoning:
        return bool(last.content or last.tool_calls)
    return bool(turn.content and last.tool_calls)


def _joined(texts: Sequence[str], separator: str) -> str:
    """Join the parts of a user's or tool's message, with a newline unless they are already separated."""
    whole = ""
    for text in texts:
        is_apart = not whole or not text or whole[-1].isspace() or text[0].isspace()
        whole += text if is_apart else separator + text
    return whole


def _thought(value: Any, location: str) -> str:
    """Return the text of thinking, given as text, a part or a list of parts; empty if it is encrypted."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list):
        return "\n".join(text for part in value if (text := _thought(part, location)))
    if isinstance(value, Mapping):
        keys = ("thinking", "text", "reasoning", "content", "summary")
        return next((text for key in keys if (text := _thought(value.get(key), location))), "")
    raise ValueError(f"{location}: thinking must be text, not {type(value).__name__}")


def _calls(value: Any, location: str) -> tuple[ToolCall, ...]:
    calls = _decoded(value)
    if isinstance(calls, Mapping):
        calls = [calls]
    if not calls:
        return ()
    calls = [*map(_decoded, calls)] if isinstance(calls, list) else []  # verifiers saves each as JSON text
    if not calls or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"{location}: 'tool_calls' must be a list of function calls")
    return tuple(_call(call, location) for call in calls)


def _call(value: Mapping[str, Any], location: str) -> ToolCall:
    """Read one call in the form of OpenAI, Anthropic or LangChain, or a bare one."""
    inside = next(
        (nested for key in ("function", "custom") if isinstance(nested := value.get(key), Mapping)), value
    )
    name = inside.get("name") or inside.get("toolName")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{location}: 'tool_calls' must be a list of function calls, each with a name")
    keys = ("arguments", "args", "parameters", "input")
    key = next((key for key in keys if inside.get(key) is not None), None)
    is_text = value.get("type") in ("custom", "custom_tool_call")
    if is_text and isinstance(inside.get("input"), str):
        return ToolCall(name=name, arguments={"input": inside["input"]}, call_id=_id(value))
    # In an object (not JSON text), a table's writer has put the arguments of all other tools, as nulls.
    arguments: Any = None if key is None else _without_nulls(inside[key])
    while isinstance(arguments, str):  # JSON text, which some exporters encode twice
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{location}: the arguments of {name} are not JSON: {error}") from error
    if not isinstance(arguments, Mapping | None):
        raise ValueError(
            f"{location}: the arguments of {name} must be an object, not {type(arguments).__name__}"
        )
    return ToolCall(name=name, arguments=dict(arguments or {}), call_id=_id(value))


# Import of off-policy trajectories, for the Step-Trace Buffer and as demonstrations.
#
# A record is ``{question, messages: [{role, content}], reward, task_key?, agent?, trajectory_id?,
# num_tokens?}``, or one of the formats above. Messages before the first assistant message are the prompt.
# Each assistant message is a step, and the messages up to the next one are its observation.


ANSWER_MARKS = ("<answer>", "\\boxed{")
SUFFIXES: Final = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
_BOM: Final = b"\xef\xbb\xbf"
_OWN_COLUMNS: Final = COLUMNS | {"reward", "task_key", "agent", "trajectory_id", "num_tokens"}
_BOX = re.compile(r"\\boxed\b")  # in any form that the scorer parses


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Trajectories of a file in order, the question of each task key (to build retrieval keys), and what was
    skipped.

    ``problems`` has file, line and reason of every malformed record that was skipped. ``dropped`` counts by
    name the columns and message fields that trajectories cannot represent.
    """

    trajectories: tuple[Trajectory, ...]
    questions: Mapping[str, str]
    problems: tuple[str, ...]
    dropped: Mapping[str, int] = field(default_factory=dict, compare=False)


def import_trajectories(
    path: str | Path,
    *,
    on_malformed: Literal["error", "skip"] = "error",
    agent: str = "imported",
    answer_marks: Sequence[str] = ANSWER_MARKS,
) -> Imported:
    """Read a file of chat trajectories: JSON lines, a JSON array, Parquet, CSV, or a folder saved by
    ``datasets``.

    A missing ``task_key`` is replaced by a digest of the question and a missing ``trajectory_id`` by a digest
    of the content, so that importing a file again produces the same trajectories. The last step of a
    trajectory and every step with an answer mark are terminal.

    Raises :class:`~outrider.errors.DataError` naming file and line (for other formats than JSON lines the
    record, from 1) for a malformed record unless ``on_malformed`` is ``skip``, and for a file that is
    missing, unreadable, empty or without any valid record.
    """
    path = Path(path)
    trajectories: list[Trajectory] = []
    questions: dict[str, str] = {}
    problems: list[str] = []
    dropped: Counter[str] = Counter()
    for number, read in _records(path):
        try:
            question, trajectory, left_out = _trajectory(read(), agent, answer_marks)
            if questions.setdefault(trajectory.task_key, question).strip() != question.strip():
                raise ValueError(f"task {trajectory.task_key!r} has another question than before")
        except (ValueError, OverflowError, RecursionError, TypeError) as error:
            problem = f"{path}:{number}: {' '.join(str(error).split())}"
            if on_malformed == "error":
                raise DataError(problem) from error
            problems.append(problem)
        else:
            trajectories.append(trajectory)
            dropped += left_out
    if not trajectories:
        raise DataError(f"{path}: no usable trajectory ({len(problems)} malformed)")
    return Imported(
        trajectories=tuple(trajectories),
        questions=questions,
        problems=tuple(problems),
        dropped=dict(sorted(dropped.items())),
    )


# A record of a file: its number, and a function that parses it; errors are reported with the number.
_Record: TypeAlias = tuple[int, Callable[[], object]]


def _parsed(data: bytes) -> object:
    try:
        return json.loads(data.decode(), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error


def _read_row(table: pyarrow.RecordBatch, index: int) -> object:
    """Convert one row of a table. Raises ValueError for text that is not UTF-8 and dates out of range.

    A null is treated as a missing value, also in nested columns, because a table has all columns in every
    record.
    """
    row = table.slice(index, 1)
    try:
        (values,) = row.to_pylist()
        values = {field.name: decode_arrow(values[field.name], field.type) for field in row.schema}
    except pyarrow.ArrowNotImplementedError:
        values = _readable_columns(row)
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise ValueError(f"cannot be read: {error}") from error
    except Exception:  # a value without a Python type here, for example an unknown time zone
        values = _readable_columns(row)
    return _without_nulls(values)


def _readable_columns(row: pyarrow.RecordBatch) -> dict[str, object]:
    """Convert the columns that Python can represent. Of an unused column, only the name is returned."""
    values: dict[str, object] = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            (value,) = column.to_pylist()
            values[name] = decode_arrow(value, column.type)
        except Exception as error:
            if name in _OWN_COLUMNS:
                raise ValueError(
                    f"column {name!r} of the type {column.type} cannot be read: {error}"
                ) from error
            values[name] = f"of the type {column.type}"
    return values


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _records(path: Path) -> Iterator[_Record]:
    suffix = path.suffix.lower()
    try:
        if path.is_dir():
            yield from _saved_dataset(path)
        elif suffix in (".jsonl", ".ndjson", ".json"):
            yield from _json_records(path)
        elif suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as table:
                yield from _iter_rows(table.iter_batches(batch_size=256))
        elif suffix == ".csv":
            yield from _csv_records(path)
        else:
            raise DataError(f"{path}: must end in one of {', '.join(SUFFIXES)}")
    except DataError:
        raise
    except (pyarrow.ArrowException, *UNREADABLE) as error:
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error


def _iter_rows(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[_Record]:
    rows = ((batch, index) for batch in batches for index in range(batch.num_rows))
    for number, (batch, index) in enumerate(rows, start=1):
        yield number, partial(_read_row, batch, index)


def _json_records(path: Path) -> Iterator[_Record]:
    """Yield one record per line, the records of an array, or a single object that is the whole file."""
    with path.open("rb") as file:
        begin = file.read(4096).removeprefix(_BOM).lstrip()
        file.seek(0)
        if begin[:1] == b"[" or path.suffix.lower() == ".json":
            data = file.read().removeprefix(_BOM)
            try:
                records = _parsed(data)
            except (ValueError, RecursionError):
                if begin[:1] == b"[":
                    yield 1, partial(_parsed, data)  # raises again, reported for record 1
                    return
                records = None
            if isinstance(records, dict | list):
                records = records if isinstance(records, list) else [records]
                for number, record in enumerate(records, start=1):
                    yield number, partial(_identity, record)
                return
            file.seek(0)
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(_BOM)
            if line.strip():
                yield number, partial(_parsed, line)


def _identity(record: object) -> object:
    return record


def _csv_records(path: Path) -> Iterator[_Record]:
    """Yield rows of text; empty cells are missing values."""
    limit = csv.field_size_limit(2**31 - 1)  # process-wide; chats exceed csv's default limit
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            if not reader.fieldnames:
                raise DataError(
                    f"{path}: the file is empty. A file of trajectories must end in one of "
                    f"{', '.join(SUFFIXES)}; a CSV file begins with the names of its columns"
                )
            for number, row in enumerate(reader, start=1):
                cells = {key: cell for key, cell in row.items() if isinstance(key, str) and cell}
                yield number, partial(_identity, cells)
    except csv.Error as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    finally:
        csv.field_size_limit(limit)


def _saved_dataset(path: Path) -> Iterator[_Record]:
    """Yield the records of a folder from ``Dataset.save_to_disk``."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(folder.name for folder in path.iterdir() if (folder / "state.json").is_file())
        raise DataError(f"{path} contains the splits {', '.join(splits)}: name the folder of one of them")
    if not (path / "state.json").is_file():
        raise DataError(f"{path} is no folder that datasets saved: name a file")
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ToolUnavailable(f"{path}: needs the package datasets (pip install 'outrider[hub]')") from error
    try:
        table = datasets.load_from_disk(str(path)).with_format("arrow")
        batches = (batch for part in table.iter(256) for batch in part.to_batches())
    except Exception as error:  # the library raises many types
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    yield from _iter_rows(batches)


def _trajectory(
    record: object, agent: str, answer_marks: Sequence[str]
) -> tuple[str, Trajectory, Counter[str]]:
    if not isinstance(record, dict):
        raise ValueError(f"a record is an object, not {type(record).__name__}")
    chat = read_chat(record)
    reward = _reward(record)
    num_tokens = _count(record.get("num_tokens"))
    question = chat.question
    prompt, steps, texts = _split(chat.messages, answer_marks, chat.num_given)
    agent = _text(record, "agent", agent)
    task_key = _text(record, "task_key", question_key(question))
    # The digest covers everything that distinguishes trajectories, so a second import produces the same ids.
    content = json.dumps([task_key, agent, reward, texts])
    trajectory = Trajectory(
        trajectory_id=_text(record, "trajectory_id", f"{task_key}-{text_digest(content)}"),
        task_key=task_key,
        agent=agent,
        prompt=prompt
        if any(m.role == "user" for m in prompt)
        else (*prompt, Message(role="user", content=question)),
        steps=steps,
        reward=reward,
        num_tokens=num_tokens,
    )
    unread = Counter(f"column {str(key)!r}" for key in record if key not in _OWN_COLUMNS)
    return question, trajectory, chat.dropped + unread


_WORDS: Final[Mapping[str, float]] = {
    "true": 1.0, "yes": 1.0, "correct": 1.0, "success": 1.0, "pass": 1.0,
    "false": 0.0, "no": 0.0, "incorrect": 0.0, "failure": 0.0, "fail": 0.0,
}  # fmt: skip


def _reward(record: Mapping[str, Any]) -> float:
    """Return the reward: a number or a boolean, or either of them as text."""
    if "reward" not in record:
        raise ValueError(
            "no column 'reward' (the outcome of the trajectory, such as 1.0); "
            f"{_columns(record, ('reward',))}"
        )
    value = record["reward"]
    if isinstance(value, str):
        word = value.strip().lower()
        try:
            reward = _WORDS[word] if word in _WORDS else float(word)
        except ValueError:
            reward = math.nan
    else:
        is_number = isinstance(value, int | float | Decimal)
        if is_number and not math.isfinite(value):  # isfinite raises OverflowError for a large int
            is_number = False
        reward = float(value) if is_number else math.nan
    if not math.isfinite(reward):
        raise ValueError(f"'reward' must be a finite number, not {value!r}")
    return reward


def _count(value: Any) -> int:
    """Return a number of tokens; 0 if it is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return 0
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
        value = int(value)
    if isinstance(value, float | Decimal) and math.isfinite(value) and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"'num_tokens' must be a count, not {value!r}")
    return value


def _text(record: Mapping[str, object], key: str, default: str) -> str:
    value = default if record.get(key) is None else record[key]
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be text, not {type(value).__name__}")
    value.encode()  # names are compared and stored unchanged, so they must be valid; texts are repaired later
    return value


def _split(
    messages: Sequence[Message], answer_marks: Sequence[str], num_given: int
) -> tuple[tuple[Message, ...], tuple[Step, ...], list[tuple[str, str]]]:
    """Return prompt, steps, and all messages as role and text."""
    starts = [n for n, message in enumerate(messages) if message.role == "assistant" and n >= num_given]
    if not starts:
        raise ValueError("no message of the assistant")
    if any(message.role == "system" for message in messages[starts[0] :]):
        raise ValueError("a system message after the first message of the assistant")
    texts = [turn_text(message) if message.role == "assistant" else message.content for message in messages]
    steps = []
    for start, end in zip(starts, [*starts[1:], len(messages)], strict=True):
        text = texts[start]
        is_terminal = (
            start == starts[-1] or any(mark in text for mark in answer_marks) or _BOX.search(text) is not None
        )
        steps.append(Step(text=text, observation="\n".join(texts[start + 1 : end]), is_terminal=is_terminal))
    roles_and_texts: list[tuple[str, str]] = [
        (message.role, text) for message, text in zip(messages, texts, strict=True)
    ]
    return tuple(messages[: starts[0]]), tuple(steps), roles_and_texts
