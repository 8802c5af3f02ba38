"""The contract of a tool: a name, text in, text out."""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutput:
    """Result of one executed call. ``failed`` marks that the call ran and reported an error of the caller's
    making (a Python exception, say); the text then says which. An error of the infrastructure is a ToolFault
    instead.
    """

    text: str
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """Facts for building a tool beside its own settings: those of the environment that has it."""

    environment: Any


class Tool(Protocol):
    """A tool that the policy calls by writing ``<name>input</name>``. Called from several threads at once.

    As a plug-in, a class with the tag ``name`` and the line ``usage``, which tells the policy in the system
    prompt what to write.
    """

    @property
    def name(self) -> str:
        """The tag name, lower case."""
        ...

    def run_text(self, text: str) -> ToolOutput:
        """Execute one call. Raises ToolFault when the infrastructure broke, never for bad input."""
        ...

    def close(self) -> None:
        """Release what the tool holds; may be called twice."""
        ...
