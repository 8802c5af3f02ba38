"""Generated conversations for chat templates: messages of episodes in any order, with unusual text."""

from collections.abc import Sequence

import numpy as np

from outrider.types import Json, Message, Role, ToolCall, ToolSchema

TOOLS: tuple[ToolSchema, ...] = (
    {
        "name": "lookup",
        "description": "Find a thing.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "what"}},
            "required": ["key"],
        },
    },
    {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "one"},
                "b": {"type": "integer", "description": "another"},
            },
            "required": ["a", "b"],
        },
    },
)
_PIECES = ("Paris", "a , b", "42", "é", "日本", "{x}", "\n", "\n\n", "  ", "<b>", "&", '"q"', "[1]",
           "🙂", "it's", "</s", "<|im_", "%d", "\\n")  # fmt: skip


class Generator:
    """Draws conversations; ``observations`` are the roles that answer turns."""

    def __init__(self, random: np.random.Generator, observations: Sequence[Role]) -> None:
        self._random = random
        self._observations = observations

    def conversation(self) -> list[Message]:
        """A prompt and one to four turns, each answered."""
        messages = [Message(role="user", content=self._text())]
        if self._chance(0.6):
            messages.insert(0, Message(role="system", content=self._text()))
        for _ in range(int(self._random.integers(1, 5))):
            messages += self._turn()
        return messages

    def _turn(self) -> list[Message]:
        role = self._observations[int(self._random.integers(len(self._observations)))]
        thought = self._text() if self._chance(0.4) else ""
        if role == "user":
            observed = [Message(role="user", content=self._text()) for _ in range(1 + self._chance(0.2))]
            return [
                Message(role="assistant", content=self._answer(), reasoning=thought),
                *observed,
            ]
        calls = tuple(self._call(number) for number in range(1 + self._chance(0.3)))
        turn = Message(
            role="assistant",
            content=self._text() if self._chance(0.3) else "",
            reasoning=thought,
            tool_calls=calls,
        )
        return [
            turn,
            *(
                Message(role="tool", content=self._text(), tool_call_id=call.call_id, tool_name=call.name)
                for call in calls
            ),
        ]

    def _call(self, number: int) -> ToolCall:
        arguments: dict[str, Json] = {"key": self._text()}
        if self._chance(0.5):
            arguments = {name: int(self._random.integers(-9, 100)) for name in ("a", "b")}
        name = "lookup" if "key" in arguments else "add"
        return ToolCall(name=name, arguments=arguments, call_id=f"call{number:05d}")

    def _answer(self) -> str:
        text = self._text()
        return f" {text}\n" if self._chance(0.1) else text

    def _text(self) -> str:
        """Pieces without blanks at the ends, which some templates trim."""
        count = int(self._random.integers(1, 6))
        chosen = "".join(_PIECES[int(i)] for i in self._random.integers(len(_PIECES), size=count))
        return chosen.strip() or "x"

    def _chance(self, share: float) -> int:
        return int(self._random.random() < share)
