"""Metrics of an update: weighted means, sums, extremes, and losses, however it was split."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.algorithms.losses import TokenLossInputs
from outrider.algorithms.sampler_correction import ImportanceStats
from outrider.training.packing import PackedBatch


class MetricAccumulator:
    """Collects the measures of one update; :meth:`means` are its metrics."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._totals: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._minima: dict[str, float] = {}
        # of the sampler correction: how many, their sum, the sum of their squares
        self._weights = [0.0, 0.0, 0.0]
        self._losses: dict[str, float] = {}  # of the optimiser step that is being computed

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """A weighted mean."""
        total = self._sums.setdefault(name, [0.0, 0.0])
        total[0] += value * weight
        total[1] += weight

    def add_sum(self, name: str, value: float) -> None:
        """A total."""
        self._totals[name] = self._totals.get(name, 0.0) + value

    def add_max(self, name: str, value: float) -> None:
        """A maximum."""
        self._maxima[name] = max(value, self._maxima.get(name, value))

    def add_min(self, name: str, value: float) -> None:
        """A minimum."""
        self._minima[name] = min(value, self._minima.get(name, value))

    def add_loss(self, name: str, value: float) -> None:
        """A micro-batch's share of a loss of the optimiser step."""
        self._losses[name] = self._losses.get(name, 0.0) + value

    def pop_losses(self) -> dict[str, float]:
        """This rank's share of the losses of the optimiser step, which it gives away."""
        losses, self._losses = self._losses, {}
        return losses

    def merge(self, other: "MetricAccumulator") -> None:
        """Add what another rank has measured, whose optimiser steps have ended."""
        for name, (total, weight) in other._sums.items():
            own = self._sums.setdefault(name, [0.0, 0.0])
            own[0] += total
            own[1] += weight
        for name, value in other._totals.items():
            self.add_sum(name, value)
        for name, value in other._maxima.items():
            self.add_max(name, value)
        for name, value in other._minima.items():
            self.add_min(name, value)
        self._weights = [own + more for own, more in zip(self._weights, other._weights, strict=True)]

    def end_step(self, *, skipped: bool = False) -> None:
        """The optimiser step is over: its losses are whole, and count once in the mean over steps unless it
        was ``skipped``.
        """
        for name, value in self._losses.items():
            if not skipped:
                self.add(name, value)
        self._losses = {}

    def add_importance(self, stats: ImportanceStats) -> None:
        """The weights of the sampler correction of a micro-batch."""
        self.add("ratio/importance_mean", stats.mean, stats.num_tokens)
        totals = (stats.num_tokens, stats.num_tokens * stats.mean, stats.num_tokens * stats.mean_square)
        self._weights = [total + more for total, more in zip(self._weights, totals, strict=True)]
        self.add_max("ratio/importance_max", stats.max)
        self.add_sum("ratio/num_truncated", stats.num_truncated)

    def means(self) -> dict[str, float]:
        """Every measure by its name."""
        averaged = {name: total / weight for name, (total, weight) in self._sums.items() if weight}
        num, total, squares = self._weights
        if num:  # over all tokens: the share of a micro-batch would depend on the split
            averaged["ratio/importance_ess_share"] = total**2 / (num * squares) if squares else 0.0
        if num and "staleness/logprob_shift" in averaged:
            averaged["staleness/truncated_fraction"] = self._totals["ratio/num_truncated"] / num
        return averaged | self._totals | self._maxima | self._minima


Floats = NDArray[np.float32]
Integers = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRecord:
    """The T scored tokens of a micro-batch, for the trace files: trainer log-probs and importance ratios.

    ``rollout_T`` numbers the rollouts of the mini-batch ``number``, ``ordinal_T`` the trained tokens of a
    rollout.
    """

    number: int
    rollout_T: Integers
    ordinal_T: Integers
    trainer_T: Floats
    ratio_T: Floats


def token_record(number: int, batch: PackedBatch, inputs: TokenLossInputs) -> TokenRecord:
    """Of a pass: the trainer's log-probs where the engine sampled, and the ratio with its scale."""
    ratio_T = (inputs.logprobs_T.detach() - inputs.old_T).exp() * inputs.ratio_scale_T
    return TokenRecord(
        number=number,
        rollout_T=batch.rollout_index_T.numpy().astype(np.int32),
        ordinal_T=batch.ordinal_T.numpy().astype(np.int32),
        trainer_T=inputs.old_logprobs.trainer_T.float().cpu().numpy(),
        ratio_T=ratio_T.float().cpu().numpy(),
    )
