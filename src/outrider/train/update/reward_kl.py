"""The KL to the reference that a reward counts, measured before credit: k1 = log pi_old - log reference of
every policy token.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.trace import Node, Trace
from outrider.train.update.pack import RolloutPath, pack
from outrider.train.update.policy import Scorer


@torch.no_grad()
def measure_kl(policy: Scorer, reference: Scorer, traces: Sequence[Trace], *, max_tokens: int) -> None:
    """Write ``kl`` on the policy nodes of every rollout with a return. ``policy`` is the one that the update
    starts from.

    Raises ValueError for a node that several rollouts share.
    """
    scored = [path for trace in traces for _, path in trace.scored_rollouts()]
    paths = [path for path in scored if any(node.trainable and node.token_ids for node in path)]
    # packing scores what has credit, which is not there yet; shared prompts stay shared
    copies: dict[int, Node] = {}
    for node in (node for path in paths for node in path):
        copies.setdefault(
            id(node), replace(node, credit=(0.0,) * len(node.token_ids)) if node.trainable else node
        )
    found: dict[int, list[tuple[int, float]]] = {}
    rollouts = [
        RolloutPath(nodes=[copies[id(node)] for node in path], rollout_index=i)
        for i, path in enumerate(paths)
    ]
    for batch in pack(rollouts, max_tokens=max_tokens):
        values = (policy.score(batch).logprobs_T - reference.score(batch).logprobs_T).tolist()
        for rollout, ordinal, value in zip(
            batch.rollout_index_T.tolist(), batch.ordinal_T.tolist(), values, strict=True
        ):
            found.setdefault(rollout, []).append((ordinal, value))
    for number, path in enumerate(paths):
        each = iter(value for _, value in sorted(found[number]))
        for node in path:
            if node.trainable:
                node.kl = tuple(next(each) for _ in node.token_ids)
