"""The contract between messages and ids: what a model family needs to be played, trained and served."""

from collections.abc import Sequence
from typing import Protocol

from outrider.tokens.parsed import ParsedTurn
from outrider.types import Message, ToolSchema


class Renderer(Protocol):
    """Messages to ids and back. Ids are only ever appended: what the policy wrote is never made into ids a
    second time.
    """

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Ids of the first messages with the assistant's turn opened; ``tools`` are told to the model."""
        ...

    def bridge(self, previous_ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids that follow ``previous_ids`` (an assistant turn, closed or not) so that ``messages`` are said
        next.
        """
        ...

    def parse(
        self, token_ids: Sequence[int], *, context: Sequence[int] = (), tools: Sequence[ToolSchema] = ()
    ) -> ParsedTurn:
        """Read a turn of the policy. ``context`` are the ids before it: what the template opened there
        belongs to the turn. Calls of tools that ``tools`` lack are problems. Never raises for what was
        written.
        """
        ...
