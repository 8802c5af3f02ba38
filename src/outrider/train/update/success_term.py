"""The negative log-likelihood of successful rollouts beside the policy term (GPPO, arXiv 2508.07629, Eq. 13).

Shape letters: T scored tokens of a micro-batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.algorithms.common.losses import weighted_loss
from outrider.train.update.metric_accumulator import MetricAccumulator
from outrider.train.update.pack import PackedBatch, RolloutPath
from outrider.train.update.ranks import Ranks, SingleRank


def success_weights(
    paths: Sequence[RolloutPath], batches: Sequence[PackedBatch], ranks: Ranks | None = None
) -> list[Tensor]:
    """For every micro-batch [T]: one over the trained tokens of all successful rollouts of the mini-batch,
    and 0 for other tokens.

    Tokens that the policy did not write in this step count for nothing: demonstrations and replayed rollouts
    have a term of their own. ``paths`` are numbered as ``rollout_index`` says, and ``batches`` hold every
    successful one, those of all ``ranks`` together (None: there is one).
    """
    succeeded = torch.tensor([path.succeeded for path in paths])
    masks = [succeeded[batch.rollout_index_T] & ~batch.is_off_policy_T for batch in batches]
    num = sum((ranks or SingleRank()).gather(sum(int(mask.sum()) for mask in masks)))
    # The count over all micro-batches of all ranks: the mean must not depend on how they were split.
    return [mask.double() / max(1, num) for mask in masks]


def sft_loss(logprobs_T: Tensor, weights_T: Tensor, accumulator: MetricAccumulator) -> Tensor:
    """The micro-batch's share of the mean; reported before its weight."""
    loss = weighted_loss(losses=-logprobs_T, weights=weights_T.to(logprobs_T))
    accumulator.add_loss("loss/positive_nll", float(loss.detach()))
    return loss
