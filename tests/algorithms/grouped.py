"""Groups as the rollout loop leaves them, from returns and masks: 1 is a policy token, 0 one that the policy
did not write.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from outrider.trace import Leaf, Trace
from outrider.types import Message, Origin, Outcome, Task

TEXT = Message(role="user", content="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One rollout: ``value`` None is a fault, whose ``mask`` is left behind in the tree; ``kl`` has a value a
    policy token.
    """

    value: float | None
    mask: Sequence[int] = (1,)
    kl: Sequence[float] = ()
    success: bool = False
    first_token: int = 5


def trace_of(rollouts: Sequence[Played], *, key: str = "t") -> Trace:
    """A prompt, and under it every rollout with nodes of its own."""
    trace = Trace(task=Task(key=key, question=""))
    root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=(3, 4), message=TEXT)
    for number, rollout in enumerate(rollouts):
        tip, token, kl = root, rollout.first_token, iter(rollout.kl)
        for wrote, run in groupby(rollout.mask):
            ids = tuple(token + offset for offset, _ in enumerate(run))
            token += len(ids)
            scores = tuple(-1.0 for _ in ids) if wrote else ()
            origin = Origin.POLICY if wrote else Origin.ENVIRONMENT
            entropies = tuple(-score for score in scores)
            tip = trace.append(
                parent=tip.node_id,
                origin=origin,
                token_ids=ids,
                message=TEXT,
                logprobs=scores,
                entropies=entropies,
            )
            if wrote and rollout.kl:
                tip.kl = tuple(next(kl) for _ in ids)
        lost = rollout.value is None
        trace.finish(
            Leaf(
                node_id=None if lost else tip.node_id,
                rollout=number,
                outcome=Outcome.TOOL_FAULT if lost else Outcome.FINISHED,
                episode_return=rollout.value,
                success=rollout.success,
            )
        )
    return trace


def token_credit(traces: Sequence[Trace]) -> np.ndarray:
    """Credit of every policy token of the rollouts with a return, in order."""
    return np.array(
        [
            value
            for trace in traces
            for _, path in trace.rollouts()
            for node in path
            for value in node.credit or ()
        ],
        dtype=float,
    )


def grouped(
    rewards: Sequence[float | None], groups: Sequence[object], masks: Sequence[Sequence[int]] | None = None
) -> list[Trace]:
    """One trace a group, in first-seen order; the rollouts of a group must follow one another."""
    rows = [masks[row] if masks is not None else (1,) for row in range(len(rewards))]
    return [
        trace_of([Played(value=rewards[row], mask=rows[row]) for row in members], key=str(name))
        for name in dict.fromkeys(groups)
        if (members := [row for row, group in enumerate(groups) if group == name])
    ]
