"""An evaluation as a log needs it, whatever kind it was."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from outrider.types import Json, Outcome, ToolCall

MessageRole = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedMessage:
    """A message. Of a turn of the policy ``calls`` are its native ones (ids are the turn's own), ``problems``
    say what of it could not be read as one, and ``thinking`` stands apart from ``text``; else ``tools`` names
    the tools that ran for it, whose calls are in the text. ``call_id`` is the call that a tool's message
    answers, where that is on record.
    """

    role: MessageRole
    text: str
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRollout:
    """One rollout. ``epoch`` counts those of its task, from 1. ``scores`` is empty after a fault, which
    ``detail`` tells. ``num_tokens`` are the policy's own; None where nobody counted them.
    """

    task_key: str
    epoch: int
    prompt: tuple[LoggedMessage, ...]
    messages: tuple[LoggedMessage, ...]
    target: tuple[str, ...] = ()
    outcome: Outcome
    detail: str = ""
    answer: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    num_tokens: int | None = None
    metadata: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvaluation:
    """All rollouts of one evaluation. ``created`` is when its record was last written, ``summary`` its own
    score with the interval's bounds. One that has not ended has ``num_requested`` rollouts in the end, 0 where
    nobody knows.
    """

    task: str
    model: str
    created: datetime
    panel_hash: str
    rollouts: tuple[LoggedRollout, ...]
    summary: Mapping[str, float]
    metadata: Mapping[str, Json]
    notes: tuple[str, ...] = ()
    is_complete: bool = True
    num_requested: int = 0


def modified_time(path: Path) -> datetime:
    """When a file was last written, in UTC to the second."""
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).replace(microsecond=0)
