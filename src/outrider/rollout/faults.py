"""Faults of infrastructure during rollouts: counted by kind, with the reasons for the person who has to
repair them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.errors import EngineFault, EnvironmentFault, ToolFault
from outrider.trace import Leaf, Trace
from outrider.types import Outcome

_MAX_CHARS = 300

Fault = ToolFault | EnvironmentFault | EngineFault


def outcome_of_fault(fault: Fault) -> Outcome:
    """How a rollout ends that this fault has broken for good."""
    if isinstance(fault, ToolFault):
        return Outcome.TOOL_FAULT
    return Outcome.ENVIRONMENT_FAULT if isinstance(fault, EnvironmentFault) else Outcome.ENGINE_FAULT


def lost(rollout: int, outcome: Outcome, detail: str) -> Leaf:
    """A rollout without a return: it is masked and never a reward."""
    return Leaf(node_id=None, rollout=rollout, outcome=outcome, episode_return=None, detail=detail)


def given_up(rollout: int) -> Leaf:
    """A rollout of a group that takes too long."""
    return lost(rollout, Outcome.CANCELLED, "its group took longer than train.group_timeout_s")


@dataclass(slots=True)
class FaultLog:
    """``counts`` holds every fault by its outcome, ``retries``, and ``close``: environments that broke while
    they were closed.
    """

    counts: Counter[str] = field(default_factory=Counter)
    _reasons: dict[tuple[int, int, int], str] = field(default_factory=dict)

    def add(self, fault: Fault, *, group: int, rollout: int, attempt: int, task_key: str) -> Outcome:
        """Count a fault of one try of a rollout; its outcome."""
        outcome = outcome_of_fault(fault)
        self.counts[outcome.value] += 1
        self._reasons[group, rollout, attempt] = f"{outcome.value} in {task_key}, rollout {rollout}: {fault}"
        return outcome

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
