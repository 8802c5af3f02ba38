"""Inputs and outputs of a token loss: one micro-batch of the update, in the packed layout of T trained
tokens.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.algorithms.common.losses import TokenLoss

__all__ = ["Measures", "OldLogprobs", "TokenLoss", "TokenLossInputs"]


class Measures(Protocol):
    """Collects an update's metrics over its micro-batches, however it was split."""

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """A weighted mean."""

    def add_sum(self, name: str, value: float) -> None:
        """A total."""

    def add_max(self, name: str, value: float) -> None:
        """A maximum."""

    def add_min(self, name: str, value: float) -> None:
        """A minimum."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OldLogprobs:
    """``old_T`` divides the ratio; ``trainer_T`` is the trainer's value in the context that the engine
    sampled in.

    ``is_without_tips_T`` marks the tokens whose tips were left out; None: none.
    """

    old_T: Tensor
    trainer_T: Tensor
    is_without_tips_T: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLossInputs:
    """One micro-batch, one value a trained token; only ``logprobs_T`` carries gradient. Log-probs are natural
    logs.

    ``logprobs_T``: the policy's. ``old_logprobs``: those of the ratio. ``advantages_T`` and
    ``ratio_scale_T``: what the algorithm wrote on the trace. ``engine_logprobs_T``: the sampler's, 0 where
    nobody sampled. ``is_off_policy_T``: the policy did not write the token in this step (a demonstration, a
    replayed rollout). ``rollout_T`` and ``turn_T``: numbers of the token's rollout and turn. ``measures``
    takes metrics of the loss's own.
    """

    logprobs_T: Tensor
    old_logprobs: OldLogprobs
    advantages_T: Tensor
    ratio_scale_T: Tensor
    engine_logprobs_T: Tensor
    is_off_policy_T: Tensor
    rollout_T: Tensor
    turn_T: Tensor
    measures: Measures

    @property
    def old_T(self) -> Tensor:
        """The denominator of the ratio."""
        return self.old_logprobs.old_T
