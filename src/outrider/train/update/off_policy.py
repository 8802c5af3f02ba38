"""Log-probs in the context that rollouts acted in, where the update renders another one (EMPO², arXiv
2602.23008, App. C).

The numerator of the ratio is the student, the policy that sees no tips. The denominator is the acting policy
(Table 3) or the student when the update began (Algorithm 1): :mod:`outrider.algorithms.common.loss_kinds`.

Shape letters: T entries of a :class:`~outrider.train.update.pack.PackedBatch`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.train.update.pack import PackedBatch, RolloutPath
from outrider.train.update.policy import Policy
from outrider.train.update.ranks import pack_for_rank, padded_micro_batches


class LogprobsWithTips:
    """Log-probs in the context with tips, for every rollout that has another rendering; computed by the
    trainer before any step.
    """

    def __init__(self, logprobs: Mapping[int, Sequence[float]]) -> None:
        """``logprobs``: rollout index to one value for each of its trained tokens, in their order."""
        self._logprobs = logprobs

    def gather(self, batch: PackedBatch) -> Tensor:
        """[T], NaN where the entry's rollout had no tips to lose."""
        entries = zip(batch.rollout_index_T.tolist(), batch.ordinal_T.tolist(), strict=True)
        values = [
            # NaN, where a 0 would pass for a log-prob: nobody can divide by it unnoticed.
            self._logprobs[rollout][ordinal] if rollout in self._logprobs else math.nan
            for rollout, ordinal in entries
        ]
        return torch.tensor(values, dtype=torch.float64).to(batch.advantages_T)


@torch.no_grad()
def score_with_tips(
    policy: Policy, paths: Sequence[RolloutPath], *, max_tokens: int
) -> LogprobsWithTips | None:
    """Score the rollouts among ``paths`` that have another rendering, in the one that they were acted in;
    None where this rank has none.
    """
    # Whose rollout it is, the rendering that is trained decides: the same rank needs both.
    own = policy.ranks.share(paths)
    paths_with_tips = [
        replace(path, nodes=path.nodes_with_tips, nodes_with_tips=None)
        for path in own
        if path.nodes_with_tips is not None
    ]
    values_by_ordinal: dict[int, dict[int, float]] = {}
    for batch in padded_micro_batches(
        pack_for_rank(paths_with_tips, policy.ranks, max_tokens=max_tokens), policy.ranks
    ):
        if batch is None:
            policy.dummy_forward()
            continue
        entries = zip(batch.rollout_index_T.tolist(), batch.ordinal_T.tolist(), strict=True)
        for (rollout, ordinal), value in zip(entries, policy.score(batch).logprobs_T.tolist(), strict=True):
            values_by_ordinal.setdefault(rollout, {})[ordinal] = value
    logprobs = {
        rollout: [values[i] for i in range(len(values))] for rollout, values in values_by_ordinal.items()
    }
    return LogprobsWithTips(logprobs) if logprobs else None
