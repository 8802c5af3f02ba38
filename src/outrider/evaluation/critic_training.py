"""``outrider critic``: train a critic on recorded trajectories and write it."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch

from outrider.algorithms.retrospex import CriticSettings, encode_turns
from outrider.algorithms.retrospex_critic import Critic, train
from outrider.evaluation.recorded import recorded_trajectories
from outrider.memory.embedders import load_embedder
from outrider.printing import print_lines

_NUM_PROGRESS_LINES = 20  # lines of progress in the whole


class _LossPrinter:
    """Prints the mean losses of each part of the updates."""

    def __init__(self, num_updates: int) -> None:
        self._num_updates, self._every = num_updates, max(1, num_updates // _NUM_PROGRESS_LINES)
        self._losses: list[tuple[float, float]] = []

    def __call__(self, number: int, value_loss: float, quality_loss: float) -> None:
        self._losses.append((value_loss, quality_loss))
        if number % self._every == 0 or number == self._num_updates:
            values, qualities = (fmean(part) for part in zip(*self._losses, strict=True))
            progress = f"{number} of {self._num_updates} updates"
            print_lines(f"critic: {progress}, loss of V {values:.3g}, of Q {qualities:.3g}")
            self._losses.clear()


def train_critic(
    sources: Sequence[Path], *, out: Path, settings: CriticSettings, held_out: bool = False
) -> int:
    """Train a critic and return the exit status 0. ``held_out``: also use evaluations on splits other than
    ``train``. Training uses one thread, because such small layers do not benefit from more and the results
    depend on the number of threads bit by bit.

    Raises DataError and ModelError before training, and DataError for values that are not finite.
    """
    embedder = load_embedder(settings.embedder)
    trajectories = [
        trajectory for source in sources for trajectory in recorded_trajectories(source, held_out=held_out)
    ]
    turns = encode_turns(trajectories, embedder)
    mean = fmean(trajectory.reward for trajectory in trajectories)
    print_lines(
        f"critic: {len(trajectories)} trajectories, {len(turns.rewards_N)} turns, mean return {mean:.3g}"
    )
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        networks = train(turns, settings, on_update=_LossPrinter(settings.num_updates))
    finally:
        torch.set_num_threads(num_threads)
    Critic(networks, embedder, settings).save(out)
    print_lines(f"{out}: use it with engine.type=retrospex engine.critic={out}")
    return 0
