"""Implicit Q-learning (arXiv 2110.06169): Q is never asked about an action that nobody took.

V is an expectile of Q over recorded actions (Eq. 5), Q learns what was paid and V of what came then (Eq. 6).
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.algorithms.retrospex.critic import Networks, rows
from outrider.algorithms.retrospex.settings import CriticSettings
from outrider.algorithms.retrospex.situations import Turns
from outrider.errors import DataError
from outrider.seeding import stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B turns: ``[B, 3 D]`` states, ``[B, D]`` actions, ``[B]`` rewards and ends."""

    states: Tensor
    actions: Tensor
    rewards: Tensor
    next_states: Tensor
    is_last: Tensor


def expectile_loss(differences: Tensor, expectile: float) -> Tensor:
    """Mean of ``|τ - 1(u < 0)| u²``."""
    weights = (expectile - (differences < 0).to(differences.dtype)).abs()
    return (weights * differences**2).mean()


def value_loss(networks: Networks, target: Networks, batch: Batch, *, expectile: float) -> Tensor:
    """V towards the lesser target Q of what was done."""
    with torch.no_grad():
        done = torch.minimum(*target.qualities(batch.states, batch.actions))
    return expectile_loss(done - networks.values(batch.states), expectile)


def quality_loss(networks: Networks, batch: Batch, *, discount: float) -> Tensor:
    """Both Q towards the reward and the discounted V of what came then, which is 0 after an end."""
    with torch.no_grad():
        goal = batch.rewards + discount * torch.where(batch.is_last, 0.0, networks.values(batch.next_states))
    first, second = networks.qualities(batch.states, batch.actions)
    return ((first - goal) ** 2).mean() + ((second - goal) ** 2).mean()


@torch.no_grad()
def update_target(target: Networks, networks: Networks, *, rate: float) -> None:
    """The target network moves towards the learned one."""
    for target_weight, learned_weight in zip(target.parameters(), networks.parameters(), strict=True):
        target_weight.lerp_(learned_weight, rate)


def train(
    turns: Turns, settings: CriticSettings, *, on_update: Callable[[int, float, float], None] | None = None
) -> Networks:
    """``on_update`` is told the number of updates and both losses. The same turns and seed give the same
    bits. Raises DataError where the losses leave the finite numbers.
    """
    networks = Networks(turns.vectors_UD.shape[1], settings.hidden, seed=settings.seed)
    target = deepcopy(networks).requires_grad_(False)
    adam = torch.optim.Adam(networks.parameters(), lr=settings.learning_rate)
    draws = stream(settings.seed, "critic batches")
    for number in range(1, settings.num_updates + 1):
        batch = _batch(turns, draws.integers(len(turns.rewards_N), size=settings.batch_size))
        v_loss = value_loss(networks, target, batch, expectile=settings.expectile)
        q_loss = quality_loss(networks, batch, discount=settings.discount)
        adam.zero_grad()
        # one step for both: they share no weight, and each holds what the other one learns fixed
        total_loss = v_loss + q_loss
        if not total_loss.isfinite():
            raise DataError(f"the critic diverged in update {number}: give it a smaller learning_rate")
        total_loss.backward()
        adam.step()
        update_target(target, networks, rate=settings.target_rate)
        if on_update is not None:
            on_update(number, v_loss.item(), q_loss.item())
    return networks.requires_grad_(False)


def _batch(turns: Turns, indices: NDArray[np.int64]) -> Batch:
    vectors = turns.vectors_UD
    return Batch(
        states=rows(vectors, turns.states_N3[indices]),
        actions=rows(vectors, turns.actions_N[indices]),
        rewards=torch.from_numpy(turns.rewards_N[indices]),
        next_states=rows(vectors, turns.next_states_N3[indices]),
        is_last=torch.from_numpy(turns.is_last_N[indices]),
    )
