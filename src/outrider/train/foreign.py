"""Losses and measures of updates that hold tokens which the policy did not write in this step: LUFFY's demonstrations, replayed groups.

Shape letters: T entries of a :class:`~outrider.train.pack.PackedBatch`; ``is_foreign_T`` says which of them are meant.
"""

import math

import torch
from torch import Tensor

from outrider.algorithms.base import ObjectiveSettings
from outrider.algorithms.losses import SurrogateLoss
from outrider.algorithms.luffy import LuffySettings
from outrider.algorithms.objectives import luffy_per_token, replay_centred_per_token
from outrider.algorithms.ratios import log_ratio
from outrider.algorithms.rollout_replay import RolloutReplaySettings
from outrider.train.pack import PackedBatch
from outrider.train.tally import Tally


def mixed_surrogate(logprobs_T: Tensor, old_T: Tensor, batch: PackedBatch, objective: ObjectiveSettings) -> SurrogateLoss | None:
    """The token loss of an algorithm that mixes, for own and foreign tokens; None for every other algorithm."""
    if isinstance(objective, LuffySettings):
        return luffy_per_token(
            logprobs=logprobs_T,
            old_logprobs=old_T,
            advantages=batch.credit_T,
            is_demonstration=batch.is_foreign_T,
            shaping=objective.shaping,
            clip_low=objective.clip_low if objective.clip_own else 1.0,
            clip_high=objective.clip_high if objective.clip_own else math.inf,
        )
    if isinstance(objective, RolloutReplaySettings):
        return replay_centred_per_token(
            logprobs=logprobs_T,
            old_logprobs=old_T,
            # Of its own tokens the policy at the start is the author; where the engine differs, the sampler correction says so.
            behaviour_logprobs=torch.where(batch.is_foreign_T, batch.engine_logprobs_T, old_T),
            advantages=batch.credit_T,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
            weight_cap=objective.weight_cap,
        )
    return None


def measure_foreign(tally: Tally, batch: PackedBatch, objective: ObjectiveSettings, *, logprobs_T: Tensor, old_T: Tensor) -> None:
    """What the foreign tokens of a micro-batch look like to the policy; they are in no other measure of the update."""
    foreign_T = batch.is_foreign_T
    num = int(foreign_T.sum())
    if not num:
        return
    if isinstance(objective, LuffySettings):
        tally.add("luffy/probability_mean", float(logprobs_T[foreign_T].exp().mean()), num)
        tally.add_sum("luffy/num_tokens", float(num))
    if isinstance(objective, RolloutReplaySettings):
        weights = log_ratio(logprobs=old_T, reference_logprobs=batch.engine_logprobs_T)[foreign_T].exp()
        tally.add("replay/weight_mean", float(weights.mean()), num)
        tally.add_max("replay/weight_max", float(weights.max()))
        tally.add_sum("replay/num_capped", float((weights > (objective.weight_cap or math.inf)).sum()))
        tally.add_sum("replay/num_tokens", float(num))
