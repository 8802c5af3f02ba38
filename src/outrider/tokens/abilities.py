"""What a chat template can render, found by trying it: nothing is known by its family's name."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from outrider.errors import ModelError
from outrider.tokens.template import ASSISTANT_MESSAGE, MARK, USER_MESSAGE, Chat, Template
from outrider.types import ToolCall, ToolSchema

# Of letters alone: no template escapes it.
CALL_MARK: Final = "markedargument"
PLACEHOLDER_TOOL: Final[ToolSchema] = {
    "name": "lookup",
    "description": "d",
    "parameters": {
        "type": "object",
        "properties": {"key": {"type": "string", "description": "d"}},
        "required": ["key"],
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """How a template wants the arguments of a call: as an object, or as JSON text."""

    arguments_are_text: bool

    def message(self, calls: Sequence[ToolCall], content: str) -> dict[str, Any]:
        """The message as the template takes it."""
        return {
            "role": "assistant",
            "content": content,
            "tool_calls": [self._call(call) for call in calls],
        }

    def _call(self, call: ToolCall) -> dict[str, Any]:
        # a template that wants an object may refuse the text of what is none, as it does behind a server
        arguments = call.arguments_text if self.arguments_are_text or call.raw else dict(call.arguments)
        return {
            "type": "function",
            "id": call.call_id,
            "function": {"name": call.name, "arguments": arguments},
        }


_SHAPES: Final = (CallShape(arguments_are_text=False), CallShape(arguments_are_text=True))


class Abilities:
    """Answers of one template, each found when it is first asked for."""

    def __init__(self, template: Template) -> None:
        self._template = template

    @cached_property
    def supports_system(self) -> bool:
        """Whether a system message is shown."""
        return self._template.renders_mark([{"role": "system", "content": MARK}, USER_MESSAGE])

    @cached_property
    def supports_repeats(self) -> bool:
        """Whether two user messages may stand in a row."""
        return self._template.renders_mark([USER_MESSAGE, {"role": "user", "content": MARK}])

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the model is told which tools there are."""
        system: Chat = [{"role": "system", "content": "s"}] if self.supports_system else []
        tool = {**PLACEHOLDER_TOOL, "name": CALL_MARK}
        return self._template.renders_mark([*system, USER_MESSAGE], tools=[tool], mark=CALL_MARK)

    @cached_property
    def reasoning_key(self) -> str | None:
        """The key of a message's thinking, where the template knows one."""
        keys = ("reasoning_content", "reasoning", "thinking")
        return next((key for key in keys if self._shows_reasoning(key)), None)

    def _shows_reasoning(self, key: str) -> bool:
        return self._template.renders_mark(
            [USER_MESSAGE, {"role": "assistant", "content": "b", key: MARK}], opened=False
        )

    @cached_property
    def call_shape(self) -> CallShape | None:
        """How calls of an assistant message are shown; None where they are not."""
        call = ToolCall(name="lookup", arguments={"key": CALL_MARK}, call_id="call00000")
        for shape in _SHAPES:
            if self._template.renders_mark(
                [USER_MESSAGE, shape.message([call], "")], opened=False, mark=CALL_MARK
            ):
                return shape
        return None

    def calling_turn(self, results: Chat) -> tuple[dict[str, Any], str]:
        """A turn that these results could answer, and the mark that its text ends with.

        With one call for all where a template takes no more in a turn.
        """
        shape = self.call_shape
        if shape is None:
            return dict(ASSISTANT_MESSAGE), MARK
        calls = [
            ToolCall(
                name=result.get("name") or "lookup",
                arguments={"key": CALL_MARK if result is results[-1] else "b"},
                call_id=result.get("tool_call_id") or f"call{number:05d}",
            )
            for number, result in enumerate(results)
        ]
        whole = shape.message(calls, "")
        if len(calls) > 1 and not self._template.renders_mark(
            [USER_MESSAGE, whole], opened=False, mark=CALL_MARK
        ):
            return shape.message(calls[-1:], ""), CALL_MARK
        return whole, CALL_MARK

    def refuses(self, chat: Chat, *, tools: Sequence[ToolSchema] = ()) -> str:
        """Why the template does not render a conversation; empty where it does."""
        try:
            self._template.render(chat, opened=True, tools=tools)
        except ModelError as error:
            return str(error).partition("it refuses ")[2] or str(error)
        return ""
