"""The KL to the reference that a reward counts, measured before credit: k1 = log pi_old - log reference of
every policy token.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.trace import Node, Trace
from outrider.train.update.pack import RolloutPath
from outrider.train.update.policy import Scorer
from outrider.train.update.ranks import pack_for_rank, padded_micro_batches


@torch.no_grad()
def measure_kl(policy: Scorer, reference: Scorer, traces: Sequence[Trace], *, max_tokens: int) -> None:
    """Write ``kl`` on the policy nodes of every rollout with a return. ``policy`` is the one that the update
    starts from.

    Raises ValueError for a node that several rollouts share.
    """
    scored = [(group, path) for group, trace in enumerate(traces) for _, path in trace.scored_rollouts()]
    scored = [
        (group, path) for group, path in scored if any(node.trainable and node.token_ids for node in path)
    ]
    paths = [path for _, path in scored]
    # packing scores what has credit, which is not there yet; shared prompts stay shared
    copies: dict[int, Node] = {}
    for node in (node for path in paths for node in path):
        copies.setdefault(
            id(node), replace(node, credit=(0.0,) * len(node.token_ids)) if node.trainable else node
        )
    kl_values: dict[int, list[tuple[int, float]]] = {}
    rollouts = [
        RolloutPath(nodes=[copies[id(node)] for node in path], rollout_index=i, group=group)
        for i, (group, path) in enumerate(scored)
    ]
    ranks = policy.ranks
    for batch in padded_micro_batches(
        pack_for_rank(ranks.share(rollouts), ranks, max_tokens=max_tokens), ranks
    ):
        if batch is None:
            policy.dummy_forward()
            reference.dummy_forward()
            continue
        values = (policy.score(batch).logprobs_T - reference.score(batch).logprobs_T).tolist()
        for rollout, ordinal, value in zip(
            batch.rollout_index_T.tolist(), batch.ordinal_T.tolist(), values, strict=True
        ):
            kl_values.setdefault(rollout, []).append((ordinal, value))
    kl_values = {rollout: values for each in ranks.gather(kl_values) for rollout, values in each.items()}
    for number, path in enumerate(paths):
        each = iter(value for _, value in sorted(kl_values[number]))
        for node in path:
            if node.trainable:
                node.kl = tuple(next(each) for _ in node.token_ids)
