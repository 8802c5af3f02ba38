"""The contract of a tool: a name, text in, text out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from outrider.config import Settings
from outrider.types import Json, ToolSchema


class ToolSettings(Settings):
    """Base of the settings of tools that have more to say than their keys."""

    def waiting_s(self, num_concurrent: int) -> float:
        """Seconds that a call may wait for those of so many other episodes."""
        return 0.0


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
    prompt what to write. For native calls it may say what it does (``description``) and name its one
    argument (``argument``). A Python function is a plug-in too (:mod:`outrider.tools.functions`).
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


@runtime_checkable
class SchemaTool(Tool, Protocol):
    """A tool with named arguments."""

    @property
    def schema(self) -> ToolSchema:
        """Name, description and the JSON schema of its arguments."""
        ...

    def run_call(self, arguments: Mapping[str, Json]) -> ToolOutput:
        """Execute one native call, whose arguments fit the schema at the top level. Raises as
        :meth:`run_text`.
        """
        ...


class ToolGroup(ABC):
    """A plug-in that brings several tools, known only from its settings: those of an MCP server, say."""

    @classmethod
    @abstractmethod
    def lines(cls, settings: Any) -> Mapping[str, str]:
        """The line of the system prompt of every tool by its tag name, in order. May ask a server.

        Raises ToolUnavailable where that cannot be told.
        """

    @classmethod
    def names(cls, settings: Any) -> tuple[str, ...]:
        """The tag names alone, for which a recipe may be enough."""
        return tuple(cls.lines(settings))

    @property
    @abstractmethod
    def tools(self) -> Sequence[Tool]:
        """The tools, in that order. Each is closed by whoever has it."""
