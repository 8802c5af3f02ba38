"""How old the tokens of a step are: versions of the weights between those that sampled them and those that
the update begins with.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from outrider.errors import EngineFault
from outrider.trace import Trace

_MOST_TRUNCATED: Final = 0.05
_LEAST_EFFECTIVE: Final = 0.5


def staleness_metrics(traces: Sequence[Trace], *, version: int, limit: int) -> dict[str, float]:
    """Of all tokens that the policy wrote in this step; ``version`` is that of the weights at the start of
    the update. Raises EngineFault for a token that is older than ``limit`` versions, or newer than they are.
    """
    ages = [
        (version - node.weight_version, len(node.token_ids))
        for trace in traces
        for node in trace.nodes
        if node.trainable and node.weight_version is not None
    ]
    for age, _ in ages:
        if not 0 <= age <= limit:
            raise EngineFault(
                f"a token of weights {version - age} came to an update of weights {version}, "
                f"which takes none older than {limit} versions (cluster.max_staleness)"
            )
    num = sum(size for _, size in ages)
    if not num:
        return {}
    return {
        "staleness/mean": sum(age * size for age, size in ages) / num,
        "staleness/max": float(max(age for age, _ in ages)),
    }


def staleness_alarms(step: int, values: Mapping[str, float]) -> list[str]:
    """Where the policy moved further since the rollouts than the correction can make good."""
    if not values.get("staleness/max"):
        return []
    truncated = values.get("staleness/truncated_fraction", 0.0)
    effective = values.get("ratio/importance_ess_share", 1.0)
    lines = []
    if truncated > _MOST_TRUNCATED:
        lines.append(
            f"ALARM: {truncated:.0%} of the correction weights of step {step} were cut at their bound: the "
            "policy moves too fast for rollouts that are a step old; lower the learning rate or max_staleness"
        )
    if effective < _LEAST_EFFECTIVE:
        lines.append(
            f"ALARM: the tokens of step {step}, some of them older, count as {effective:.0%} of their number "
            "(ratio/importance_ess_share); lower the learning rate or max_staleness"
        )
    return lines
