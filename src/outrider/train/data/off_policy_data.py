"""Off-policy data that joins a step before the update: rollouts that the algorithm adds or plays beside the
policy's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.algorithms.algorithm import ExpertPaths
from outrider.rollout.faults import fault_line
from outrider.rollout.outcome_reasons import count_cut, cut_line
from outrider.trace import Trace
from outrider.train.components import Components
from outrider.train.data.experts import request_expert_paths
from outrider.train.data.imitation import expert_rollouts
from outrider.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExperts:
    """The experts of a training step, for an algorithm that plays them
    (:class:`~outrider.algorithms.algorithm.StepPlay`).
    """

    parts: Components
    step: int
    rollouts: list[Trace] = field(default_factory=list)

    def request_expert_paths(self, tasks: Sequence[Task]) -> tuple[ExpertPaths, list[str]]:
        """Steps by task key, and why experts could not be asked."""
        return request_expert_paths(self.parts.task_set, tasks, self.parts.settings, training_step=self.step)

    def play_experts(self, tasks: Sequence[Task], paths: ExpertPaths) -> list[Trace]:
        """One rollout per task, in the state that its group began in."""
        traces = expert_rollouts(self.parts, tasks, lambda task: paths[task.key], training_step=self.step)
        self.rollouts.extend(traces)
        return traces


def add_off_policy_groups(
    parts: Components, traces: Sequence[Trace], *, step: int, note: Callable[[str], None]
) -> tuple[list[Trace], dict[str, float]]:
    """Groups with credit to train on beside ``traces``, and the metrics of what was mixed in.

    What joins ``traces`` themselves gets its credit later. ``note`` is told why rollouts were lost.
    """
    experts = StepExperts(parts=parts, step=step)
    added = parts.algorithm.augment(traces, step=step, play=experts)
    if added.lost:
        note(
            f"step {step + 1}: {len(added.lost)} demonstrations were lost to faults: {fault_line(added.lost)}"
        )
    cut = count_cut(experts.rollouts, parts.settings.limits, context_length=parts.engine.context_length)
    if not cut:
        return added.groups, added.metrics
    note(
        f"step {step + 1}: limits cut {cut.total()} of {len(experts.rollouts)} demonstrations: {cut_line(cut)}"
    )
    return added.groups, added.metrics | {"rollout/num_demonstrations_cut": float(cut.total())}


def interleave(fresh: Sequence[Trace], replayed: Sequence[Trace]) -> list[Trace]:
    """Both in their own order and evenly spread, so that every mini-batch holds its share of either."""
    placed = [
        ((i + 0.5) / len(source), number, trace)
        for number, source in enumerate((fresh, replayed))
        for i, trace in enumerate(source)
    ]
    return [trace for _, _, trace in sorted(placed, key=lambda entry: entry[:2])]
