"""What a run must not do in silence, as lines for the person who watches."""

from collections.abc import Mapping, Sequence

from outrider.algorithms.empo2 import Empo2Settings, never_shows_a_tip
from outrider.environments.tool_episode import EpisodeConfig
from outrider.trace import Trace
from outrider.train.settings import RunSettings

_MAX_CHARS = 300


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


def step_alarms(settings: RunSettings, *, step: int, values: Mapping[str, float], fault_reasons: Sequence[str]) -> list[str]:
    """After a training step with the metrics ``values``; ``fault_reasons`` hold every fault of it, also those made good."""
    lines = []
    num, num_masked = values.get("rollout/num", 0.0), values.get("rollout/num_masked", 0.0)
    if num and num_masked == num:
        lines.append(f"ALARM: every rollout of step {step} was lost to a fault; nothing was learned: {fault_line(fault_reasons)}")
    elif fault_reasons:
        lines.append(
            f"step {step}: {num_masked:.0f} of {num:.0f} rollouts were lost to faults, "
            f"{values.get('rollout/num_retries', 0.0):.0f} tries were repeated: {fault_line(fault_reasons)}"
        )
    if isinstance(settings.environment, EpisodeConfig) and values.get("rollout/num_tool_calls") == 0.0:
        lines.append(f"ALARM: no rollout of step {step} executed a tool call; look at the sample rollouts")
    if missing := values.get("group/num_missing"):
        lines.append(
            f"step {step}: {missing:.0f} of {settings.train.tasks_per_step} groups are missing after "
            f"{values['group/num_extra_batches']:.0f} extra batches without spread; trained on the others"
        )
    return lines + skipped_alarms(step, values)


def skipped_alarms(step: int, values: Mapping[str, float]) -> list[str]:
    """After optimiser steps, also those of a cold start."""
    if skipped := values.get("grad/num_skipped"):
        return [f"ALARM: {skipped:.0f} optimiser step(s) of step {step} were skipped: a log-prob or gradient was not finite"]
    return []


def no_tips_alarm(settings: RunSettings, *, num_tasks: int) -> list[str]:
    """Before a run that could never show a tip."""
    chosen, num_groups = settings.algorithm, settings.train.num_steps * settings.train.tasks_per_step
    if isinstance(chosen, Empo2Settings) and never_shows_a_tip(chosen, num_groups=num_groups, num_tasks=num_tasks):
        return [
            f"NO TIPS: {num_groups} groups play none of the {num_tasks} tasks twice, and a task is shown its own tips only; "
            "algorithm.memory.scope=all shares them"
        ]
    return []
