"""Carriers of the Step-Trace Buffer: records, filters, hits and reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from outrider.errors import ConfigError

Scope = Literal["all", "same_task", "other_tasks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One off-policy step: key (``history_text``, what came before it) and value (``text`` and
    ``observation``).

    ``num_tokens`` counts the tokens of ``text`` and ``observation``; 0 where no counter was given at building
    time. ``step_id`` is unique within a buffer and stable; ``reward`` is the outcome of the whole trajectory.
    """

    step_id: int
    task_key: str
    trajectory_id: str
    step_index: int
    history_text: str
    text: str
    observation: str
    reward: float
    agent: str
    num_tokens: int
    is_terminal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFilter:
    """Which steps a query may return.

    ``scope`` other than ``all`` needs ``task_key``. Terminal steps hold the answer and stay out unless asked
    for. ``exclude`` are the ids of steps that the rollout already contains.
    """

    scope: Scope = "all"
    task_key: str | None = None
    include_terminal: bool = False
    exclude: frozenset[int] = frozenset()
    min_reward: float | None = None

    def __post_init__(self) -> None:
        if self.scope not in ("all", "same_task", "other_tasks"):
            raise ConfigError(f"retrieval scope {self.scope!r} is not one of all, same_task, other_tasks")
        if self.scope != "all" and self.task_key is None:
            raise ConfigError(f"retrieval scope {self.scope!r} needs a task key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A retrieved step and the cosine between its key and the query, in [-1, 1]."""

    record: StepRecord
    similarity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """Counts of one call of ``add_trajectories``.

    ``num_offered`` is the sum of ``num_inserted``, ``num_present`` (id already in the buffer),
    ``num_duplicate`` (id twice in the call), ``num_empty`` (no step), ``num_below_min_reward`` and
    ``num_outranked`` (K better ones exist). ``num_removed`` trajectories left the buffer for better ones.
    ``num_repaired_texts`` had lone surrogates replaced.
    """

    num_offered: int
    num_inserted: int
    num_steps_inserted: int
    num_present: int
    num_duplicate: int
    num_empty: int
    num_below_min_reward: int
    num_outranked: int
    num_removed: int
    num_repaired_texts: int
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenReport:
    """Findings of an opening. ``lost_batch``: the last writer died inside a batch, which is not in the
    buffer; offer it again.
    """

    num_trajectories: int
    num_steps: int
    revision: int
    lost_batch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackReport:
    """Trajectories in a rollback: additions after the revision dropped, removals after it restored."""

    revision: int
    num_dropped: int
    num_restored: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """Contents of a buffer. Quantiles are (minimum, 25 %, 50 %, 75 %, maximum) over trajectories; NaN when it
    is empty.
    """

    num_tasks: int
    num_trajectories: int
    num_steps: int
    num_tokens: int
    num_trajectories_by_agent: Mapping[str, int]
    num_steps_by_agent: Mapping[str, int]
    share_terminal: float
    steps_per_trajectory_quantiles: tuple[float, ...]
    reward_quantiles: tuple[float, ...]
