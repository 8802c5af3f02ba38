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
from outrider.train.update.ranks import packed, passes


class ActingLogprobs:
    """Log-probs in the context with tips, for every rollout that has another rendering; computed by the
    trainer before any step.
    """

    def __init__(self, by_rollout: Mapping[int, Sequence[float]]) -> None:
        """``by_rollout``: rollout index to one value for each of its trained tokens, in their order."""
        self._by_rollout = by_rollout

    def of(self, batch: PackedBatch) -> Tensor:
        """[T], NaN where the entry's rollout had no tips to lose."""
        entries = zip(batch.rollout_index_T.tolist(), batch.ordinal_T.tolist(), strict=True)
        values = [
            # NaN, where a 0 would pass for a log-prob: nobody can divide by it unnoticed.
            self._by_rollout[rollout][ordinal] if rollout in self._by_rollout else math.nan
            for rollout, ordinal in entries
        ]
        return torch.tensor(values, dtype=torch.float64).to(batch.credit_T)


@torch.no_grad()
def acting_logprobs(
    policy: Policy, paths: Sequence[RolloutPath], *, max_tokens: int
) -> ActingLogprobs | None:
    """Score the rollouts among ``paths`` that have another rendering, in the one that they were acted in;
    None where this rank has none.
    """
    # Whose rollout it is, the rendering that is trained decides: the same rank needs both.
    own = policy.ranks.share(paths)
    acted = [replace(path, nodes=path.acted, acted=None) for path in own if path.acted is not None]
    found: dict[int, dict[int, float]] = {}
    for batch in passes(packed(acted, policy.ranks, max_tokens=max_tokens), policy.ranks):
        if batch is None:
            policy.idle()
            continue
        entries = zip(batch.rollout_index_T.tolist(), batch.ordinal_T.tolist(), strict=True)
        for (rollout, ordinal), value in zip(entries, policy.score(batch).logprobs_T.tolist(), strict=True):
            found.setdefault(rollout, {})[ordinal] = value
    by_rollout = {rollout: [values[i] for i in range(len(values))] for rollout, values in found.items()}
    return ActingLogprobs(by_rollout) if by_rollout else None
