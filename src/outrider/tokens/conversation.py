"""Messages as a template takes them: roles that it lacks, thinking and calls of earlier turns, tools."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from outrider.errors import ModelError
from outrider.tokens.abilities import Abilities
from outrider.tokens.calls import CallFormat
from outrider.tokens.template import Chat, Template
from outrider.types import Message, ToolSchema


class ChatWriter:
    """Writes the conversations of one template. ``keeps_thinking``: of templates that have no place for it,
    thinking stands in the text; else it is left out there.
    """

    def __init__(
        self,
        template: Template,
        abilities: Abilities,
        call_format: CallFormat | None,
        *,
        keeps_thinking: bool,
    ) -> None:
        self._template = template
        self._abilities = abilities
        self._call_format = call_format
        self._keeps_thinking = keeps_thinking

    def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[Chat, Sequence[ToolSchema]]:
        """The messages but the inline ones, and the tools that the template itself has to show."""
        if tools and not self._abilities.shows_tools:
            messages, tools = self._with_tool_descriptions(messages, tools), ()
        chat: Chat = []
        joins = False
        for message in messages:
            if message.role == "inline":
                continue
            is_system = message.role == "system" and not self._abilities.supports_system
            entry = self._to_dict(message, "user" if is_system else message.role)
            if self._joins(chat, entry, is_forced=joins):
                chat[-1]["content"] += f"\n\n{entry['content']}"
            else:
                chat.append(entry)
            joins = is_system
        return chat, [self._plain(tool) for tool in tools]

    def _joins(self, chat: Chat, entry: Mapping[str, Any], *, is_forced: bool) -> bool:
        if not chat or chat[-1]["role"] != entry["role"] or entry["role"] == "tool":
            return False
        return is_forced or not self._abilities.supports_repeats

    def _to_dict(self, message: Message, role: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"role": role, "content": self._template.plain(message.content)}
        if role == "tool":
            ids = {"tool_call_id": message.tool_call_id, "name": message.tool_name}
            return entry | {key: value for key, value in ids.items() if value}
        if role == "assistant":
            return self._assistant(message, entry)
        return entry

    def _assistant(self, message: Message, entry: dict[str, Any]) -> dict[str, Any]:
        calls = [
            replace(call, arguments=self._plain(call.arguments), raw=self._template.plain(call.raw))
            for call in message.tool_calls
        ]
        shape = self._abilities.call_shape if calls else None
        if shape is not None:
            entry = shape.message(calls, entry["content"])
        elif calls:
            if self._call_format is None:
                raise ModelError("the chat template has no place for tool calls: name their form")
            written = self._call_format.write(calls)
            entry["content"] = f"{entry['content']}\n{written}" if entry["content"] else written
        if message.reasoning:
            thinking = self._template.plain(message.reasoning)
            key = self._abilities.reasoning_key
            if key is not None:
                entry[key] = thinking
            elif self._keeps_thinking:
                entry["content"] = f"<think>\n{thinking}\n</think>\n\n{entry['content'] or ''}"
        return entry

    def _with_tool_descriptions(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> Sequence[Message]:
        """The tools in the words of the form of calls, behind the system message's own."""
        if self._call_format is None:
            raise ModelError("the chat template does not show tools to the model: name the form of calls")
        words = self._call_format.describe(tools)
        if messages and messages[0].role == "system":
            first = replace(messages[0], content=f"{messages[0].content}\n\n{words}")
            return [first, *messages[1:]]
        return [Message(role="system", content=words), *messages]

    def _plain(self, value: Any) -> Any:
        """A JSON value with nothing in it that reads as a marker."""
        if isinstance(value, str):
            return self._template.plain(value)
        if isinstance(value, Mapping):
            return {self._plain(key): self._plain(item) for key, item in value.items()}
        return [self._plain(item) for item in value] if isinstance(value, list | tuple) else value
