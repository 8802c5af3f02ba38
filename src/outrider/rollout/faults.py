"""Faults of infrastructure during rollouts: counted by kind, with the reasons for the person who has to
repair them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from outrider.errors import (
    EngineFault,
    EnvironmentFault,
    InvalidResult,
    NonFiniteResult,
    ToolFault,
    UnusableReward,
)
from outrider.trace import Leaf, Trace
from outrider.types import Outcome

_MAX_CHARS = 300
NON_FINITE: Final = "non_finite"

Fault = ToolFault | EnvironmentFault | EngineFault


def fault_outcome(fault: Fault) -> Outcome:
    """How a rollout ends that this fault has broken for good."""
    if isinstance(fault, ToolFault):
        return Outcome.TOOL_FAULT
    return Outcome.ENVIRONMENT_FAULT if isinstance(fault, EnvironmentFault) else Outcome.ENGINE_FAULT


def locate_invalid_result(environment: object, task_key: str, error: InvalidResult) -> InvalidResult:
    """The error with the environment and the task that it came from."""
    return InvalidResult(f"the environment {_name(environment)}, task {task_key}: {error}")


def fault_detail(fault: Fault, environment: object | None) -> str:
    """Why a rollout was lost; for a result that is not finite with the environment that it came from."""
    if isinstance(fault, NonFiniteResult) and environment is not None:
        return f"the environment {_name(environment)}: {fault}"
    return str(fault)


def _name(environment: object) -> str:
    kind = type(environment)
    return f"{kind.__module__}.{kind.__qualname__}"


def lost_leaf(rollout: int, outcome: Outcome, detail: str) -> Leaf:
    """A rollout without a return: it is masked and never a reward."""
    return Leaf(node_id=None, rollout=rollout, outcome=outcome, episode_return=None, detail=detail)


def cancelled_leaf(rollout: int) -> Leaf:
    """A rollout of a group that takes too long."""
    return lost_leaf(rollout, Outcome.CANCELLED, "its group took longer than train.group_timeout_s")


@dataclass(slots=True)
class FaultLog:
    """``counts`` holds every fault by its outcome, ``retries``, ``close``: environments that broke while they
    were closed, and ``non_finite``: rollouts that were lost because of NaN or infinity.
    """

    counts: Counter[str] = field(default_factory=Counter)
    _reasons: dict[tuple[int, int, int], str] = field(default_factory=dict)

    def add(self, fault: Fault, *, group: int, rollout: int, attempt: int, task_key: str) -> Outcome:
        """Count a fault of one try of a rollout; its outcome."""
        outcome = fault_outcome(fault)
        self.counts[outcome.value] += 1
        self._reasons[group, rollout, attempt] = f"{outcome.value} in {task_key}, rollout {rollout}: {fault}"
        return outcome

    def add_lost(self, fault: Fault) -> None:
        """Count a rollout that no retry mended, if its result was not finite."""
        if isinstance(fault, NonFiniteResult):
            self.counts[NON_FINITE] += 1

    def add_close(self, fault: Fault) -> None:
        """Count an environment that could not be closed, which changes no outcome."""
        self.counts["close"] += 1
        self._reasons.setdefault((-1, -1, self.counts["close"]), f"closing an environment: {fault}")

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons of the faults, in the order of groups, rollouts and tries; those of closing last."""
        ordered = sorted(self._reasons.items(), key=lambda entry: (entry[0][0] < 0, entry[0]))
        return tuple(reason for _, reason in ordered)


def fault_line(reasons: Sequence[str]) -> str:
    """The first of several reasons, and how many more there are; empty without any."""
    if not reasons:
        return ""
    first = reasons[0] if len(reasons[0]) <= _MAX_CHARS else reasons[0][:_MAX_CHARS] + "..."
    return first + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")


def lost_reasons(traces: Sequence[Trace]) -> list[str]:
    """Why rollouts were lost for good, in the order of tasks and rollouts."""
    leaves = [(trace.task.key, leaf) for trace in traces for leaf, _ in trace.rollouts()]
    return [f"{key}: {leaf.detail}" for key, leaf in leaves if leaf.outcome.is_fault]


def require_results(traces: Sequence[Trace], counts: Mapping[str, int]) -> None:
    """Raises InvalidResult if an agent program came back with what is no reward, or if every rollout was lost
    because its result was NaN or infinite: the code that computes rewards is wrong.
    """
    reasons = lost_reasons(traces)
    if unusable := [reason for reason in reasons if UnusableReward.PREFIX in reason]:
        raise InvalidResult(f"task {unusable[0]}")
    num = sum(len(trace.leaves) for trace in traces)
    if num and counts.get(NON_FINITE, 0) == num:
        raise InvalidResult(f"no rollout has a finite result: task {fault_line(reasons)}")
