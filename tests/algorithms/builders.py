"""Groups of rollouts as the rollout loop leaves them, built by hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from outrider.algorithms.exploration import Empo2, Empo2Settings
from outrider.algorithms.tips import MemorySettings, TipHook
from outrider.config import validate
from outrider.memory.embedders import HashEmbedder
from outrider.trace import Leaf, Node, Trace
from outrider.types import Message, Origin, Outcome, Task


def new_trace(key: str = "t", **fields: Any) -> Trace:
    return Trace(task=Task(key=key, question="q"), **fields)


def add_node(
    trace: Trace,
    parent: Node | int | None,
    origin: Origin,
    text: str = "",
    *,
    num_tokens: int = 1,
    entropies: Sequence[float] | None = None,
    **fields: Any,
) -> Node:
    """Append a node. The tokens of a policy node have a log-prob of -1 and an entropy of 0.5 by default."""
    if origin is Origin.POLICY:
        fields.setdefault("logprobs", (-1.0,) * num_tokens)
        fields["entropies"] = tuple(entropies) if entropies is not None else (0.5,) * num_tokens
    role = "assistant" if origin is Origin.POLICY else "user"
    parent_id = parent.node_id if isinstance(parent, Node) else parent
    message = Message(role=role, content=text)  # type: ignore[arg-type]
    fields.setdefault("token_ids", (3,) * num_tokens)
    return trace.append(parent=parent_id, origin=origin, message=message, **fields)


def finish(trace: Trace, node: Node | None, episode_return: float | None, **fields: Any) -> Leaf:
    """End the next rollout at ``node``; a return of None is a fault."""
    leaf = Leaf(
        node_id=None if node is None or episode_return is None else node.node_id,
        rollout=len(trace.leaves),
        outcome=Outcome.TOOL_FAULT if episode_return is None else Outcome.FINISHED,
        episode_return=episode_return,
        **fields,
    )
    trace.finish(leaf)
    return leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One rollout: 1 in ``mask`` is a policy token, 0 an observation token; ``kl`` has a value per policy
    token. ``value`` None is a fault, whose nodes remain in the tree.
    """

    value: float | None
    mask: Sequence[int] = (1,)
    kl: Sequence[float] = ()
    success: bool = False
    first_token: int = 5


def build_trace(rollouts: Sequence[Rollout], *, key: str = "t") -> Trace:
    """Return a prompt, and below it the separate nodes of each rollout."""
    trace = new_trace(key)
    root = add_node(trace, None, Origin.PROMPT, token_ids=(3, 4))
    for rollout in rollouts:
        node, token, kl = root, rollout.first_token, iter(rollout.kl)
        for is_policy, run in groupby(rollout.mask):
            ids = tuple(range(token, token + len(list(run))))
            token += len(ids)
            origin = Origin.POLICY if is_policy else Origin.ENVIRONMENT
            entropies = (1.0,) * len(ids)
            node = add_node(trace, node, origin, num_tokens=len(ids), token_ids=ids, entropies=entropies)
            if is_policy and rollout.kl:
                node.kl = tuple(next(kl) for _ in ids)
        finish(trace, node, rollout.value, success=rollout.success)
    return trace


def build_traces(
    returns: Sequence[float | None], groups: Sequence[object], masks: Sequence[Sequence[int]] | None = None
) -> list[Trace]:
    """Return one trace per group, in first-seen order."""
    members: dict[object, list[Rollout]] = {}
    for row, group in enumerate(groups):
        mask = masks[row] if masks is not None else (1,)
        members.setdefault(group, []).append(Rollout(value=returns[row], mask=mask))
    return [build_trace(rollouts, key=str(group)) for group, rollouts in members.items()]


def token_advantages(traces: Sequence[Trace]) -> np.ndarray:
    """Return the advantage of every policy token of the rollouts with a return, in order."""
    paths = [path for trace in traces for _, path in trace.rollouts()]
    return np.array([value for path in paths for node in path for value in node.credit or ()], dtype=float)


def build_episodes(
    returns: Sequence[float],
    observations: Sequence[Sequence[str]],
    *,
    mode: str = "plain",
    reflections: Sequence[str] = (),
    actions: Sequence[str] = (),
) -> Trace:
    """Return a group of episodes from the observations of each turn. The policy's texts are ``actions``, or
    "act 0", "act 1" and so on.
    """
    trace = new_trace(modes=(mode,) * len(returns))
    for rollout, (value, seen) in enumerate(zip(returns, observations, strict=True)):
        node = None
        for turn, text in enumerate(seen):
            node = add_node(trace, node, Origin.ENVIRONMENT if turn else Origin.PROMPT, text)
            node = add_node(trace, node, Origin.POLICY, actions[turn] if actions else f"act {turn}")
        finish(trace, node, value, reflection=reflections[rollout] if reflections else "")
    return trace


def empo2(**options: Any) -> Empo2:
    """EMPO² with groups of four and the hash embedder."""
    settings = validate(Empo2Settings, {"group_size": 4, **options})
    return Empo2(settings, embedder=HashEmbedder(), count_tokens=len, groups_per_step=2)


def tip_hook(**options: Any) -> TipHook:
    """A tip hook with the hash embedder that counts characters as tokens."""
    settings = validate(MemorySettings, options)
    return TipHook(settings, embedder=HashEmbedder(), count_tokens=len, seed=0)
