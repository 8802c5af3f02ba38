"""Twin Q and V networks on text vectors, stored in a file. Shape letters: B turns, D vector dimensions."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from outrider.algorithms.retrospex import CriticSettings, Situation, Turns
from outrider.config import validate
from outrider.errors import DataError
from outrider.files import replace_file
from outrider.memory.embedders import Embedder
from outrider.seeding import stream

FORMAT: Final = "outrider-critic-1"
_NUM_TEXTS = 3  # texts of a situation: prompt, observation and previous action


class Networks(nn.Module):
    """Map ``[B, 3 D]`` states and ``[B, D]`` actions to ``[B]`` values. Weights are initialised as torch's
    linear layers, from a separate random stream of the seed.
    """

    def __init__(self, dim: int, hidden: int, *, seed: int) -> None:
        super().__init__()
        self.value = _layers(_NUM_TEXTS * dim, hidden)
        self.first, self.second = (_layers((_NUM_TEXTS + 1) * dim, hidden) for _ in range(2))
        draws = stream(seed, "critic")
        with torch.no_grad():
            for layer in self.modules():
                if isinstance(layer, nn.Linear):
                    bound = layer.in_features**-0.5
                    for part in (layer.weight, layer.bias):
                        part.copy_(torch.from_numpy(draws.uniform(-bound, bound, tuple(part.shape))))

    def values(self, states_B: Tensor) -> Tensor:
        """Compute V(s)."""
        values: Tensor = self.value(states_B)[:, 0]
        return values

    def qualities(self, states_B: Tensor, actions_B: Tensor) -> tuple[Tensor, Tensor]:
        """Compute both Q(s, a)."""
        both = torch.cat([states_B, actions_B], dim=1)
        return self.first(both)[:, 0], self.second(both)[:, 0]


def _layers(num_inputs: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(num_inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
    )


class Critic:
    """A trained critic with a text interface."""

    def __init__(self, networks: Networks, embedder: Embedder, settings: CriticSettings) -> None:
        self.networks, self.embedder, self.settings = networks, embedder, settings

    @torch.no_grad()
    def advantages(self, situation: Situation, actions: Sequence[str]) -> list[float]:
        """Return min(Q1, Q2) - V for each action."""
        state = torch.from_numpy(self.embedder.embed(situation.texts).reshape(1, -1))
        states, done = state.repeat(len(actions), 1), torch.from_numpy(self.embedder.embed(actions))
        better = torch.minimum(*self.networks.qualities(states, done)) - self.networks.values(states)
        return [float(value) for value in better]

    def save(self, path: Path) -> None:
        """Write networks, settings and the embedder's identity to one file, atomically."""
        metadata = {"embedder": self.embedder.name, "dim": self.embedder.dim}
        metadata["settings"] = self.settings.model_dump(mode="json")
        # A single key, because the order of several keys in the file changes between runs.
        replace_file(path, save(self.networks.state_dict(), metadata={FORMAT: json.dumps(metadata)}))


def load_critic(path: Path, load_embedder: Callable[[str], Embedder]) -> Critic:
    """Load a critic; ``load_embedder`` loads the embedder of a name. Raises DataError if the file is missing,
    damaged, or was trained with a different embedder of the same name.
    """
    try:
        with safe_open(path, framework="pt") as file:
            file_metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} is no critic: {' '.join(str(error).split())}") from error
    if FORMAT not in file_metadata:
        raise DataError(f"{path} is no critic: train one with `outrider critic`")
    try:
        description = json.loads(file_metadata[FORMAT])
        name, dim, table = (
            str(description["embedder"]),
            int(description["dim"]),
            dict(description["settings"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} does not record what it was trained on") from error
    settings = validate(CriticSettings, table)
    embedder: Embedder = load_embedder(settings.embedder)
    if embedder.name != name:
        raise DataError(f"{path} was trained on vectors of {name}, here is {embedder.name}")
    networks = Networks(dim, settings.hidden, seed=0)
    try:
        networks.load_state_dict(weights)
    except RuntimeError as error:
        raise DataError(f"{path} contains networks of other sizes than it records") from error
    if not all(weight.isfinite().all() for weight in weights.values()):
        raise DataError(
            f"{path} contains weights that are not finite"
        )  # argmax of NaN would be the first turn
    return Critic(networks, embedder, settings)


def rows(vectors: NDArray[Any], indices: NDArray[Any]) -> Tensor:
    """Gather rows: ``[B, K D]`` for indices ``[B, K]``, or ``[B, D]`` for indices ``[B]``."""
    return torch.from_numpy(vectors[indices].reshape(len(indices), -1))


# Implicit Q-learning (arXiv 2110.06169): Q is only evaluated for recorded actions.
#
# V is an expectile of Q over recorded actions (Eq. 5); the target of Q is the reward plus the discounted V of
# the next state (Eq. 6).


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B turns: ``[B, 3 D]`` states, ``[B, D]`` actions, ``[B]`` rewards and ends."""

    states: Tensor
    actions: Tensor
    rewards: Tensor
    next_states: Tensor
    is_last: Tensor


def expectile_loss(differences: Tensor, expectile: float) -> Tensor:
    """Compute the mean of ``|τ - 1(u < 0)| u²``."""
    weights = (expectile - (differences < 0).to(differences.dtype)).abs()
    return (weights * differences**2).mean()


def value_loss(networks: Networks, target: Networks, batch: Batch, *, expectile: float) -> Tensor:
    """Compute the loss of V, whose target is the smaller target Q of the recorded action."""
    with torch.no_grad():
        done = torch.minimum(*target.qualities(batch.states, batch.actions))
    return expectile_loss(done - networks.values(batch.states), expectile)


def quality_loss(networks: Networks, batch: Batch, *, discount: float) -> Tensor:
    """Compute the loss of both Q, whose target is the reward plus the discounted V of the next state (0 after
    the last turn).
    """
    with torch.no_grad():
        goal = batch.rewards + discount * torch.where(batch.is_last, 0.0, networks.values(batch.next_states))
    first, second = networks.qualities(batch.states, batch.actions)
    return ((first - goal) ** 2).mean() + ((second - goal) ** 2).mean()


@torch.no_grad()
def update_target(target: Networks, networks: Networks, *, rate: float) -> None:
    """Move the target network towards the trained one by ``rate``."""
    for target_weight, learned_weight in zip(target.parameters(), networks.parameters(), strict=True):
        target_weight.lerp_(learned_weight, rate)


def train(
    turns: Turns, settings: CriticSettings, *, on_update: Callable[[int, float, float], None] | None = None
) -> Networks:
    """Train the networks; ``on_update`` gets the number of updates and both losses.

    The result is bit-identical for the same turns and seed. Raises DataError if a loss is not finite.
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
        # One step for both losses: they share no weights, and each detaches its target.
        total_loss = v_loss + q_loss
        if not total_loss.isfinite():
            raise DataError(f"the critic diverged in update {number}: set a smaller learning_rate")
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
