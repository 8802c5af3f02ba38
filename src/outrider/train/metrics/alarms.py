"""Alarms, as lines for the person who watches: nothing of this may happen in silence."""

from collections.abc import Mapping, Sequence

from outrider.rollout.faults import fault_line
from outrider.train.metrics.staleness import staleness_alarms
from outrider.train.settings import RunSettings


def step_alarms(
    settings: RunSettings, *, step: int, values: Mapping[str, float], fault_reasons: Sequence[str]
) -> list[str]:
    """After a training step with the metrics ``values``; ``fault_reasons`` hold every fault of it, also those
    made good.
    """
    lines = []
    num, num_masked = values.get("rollout/num", 0.0), values.get("rollout/num_masked", 0.0)
    if num and num_masked == num:
        lines.append(
            f"ALARM: every rollout of step {step} was lost to a fault; "
            f"nothing was learned: {fault_line(fault_reasons)}"
        )
    elif fault_reasons:
        lines.append(
            f"step {step}: {num_masked:.0f} of {num:.0f} rollouts were lost to faults, "
            f"{values.get('rollout/num_retries', 0.0):.0f} tries were repeated: {fault_line(fault_reasons)}"
        )
    if settings.environment.calls_tools and values.get("rollout/num_tool_calls") == 0.0:
        lines.append(f"ALARM: no rollout of step {step} executed a tool call; look at the sample rollouts")
    if missing := values.get("group/num_missing"):
        lines.append(
            f"step {step}: {missing:.0f} of {settings.train.tasks_per_step} groups are missing after "
            f"{values['group/num_extra_batches']:.0f} extra batches without spread; trained on the others"
        )
    return lines + staleness_alarms(step, values) + skipped_alarms(step, values)


def skipped_alarms(step: int, values: Mapping[str, float]) -> list[str]:
    """After optimiser steps, also those of a cold start."""
    if skipped := values.get("grad/num_skipped"):
        return [
            (
                f"ALARM: {skipped:.0f} optimiser step(s) of step {step} were skipped: "
                "a log-prob or gradient was not finite"
            )
        ]
    return []
