"""How often a state was visited, by embeddings: the intrinsic reward of EMPO² (arXiv 2602.23008, section
4.2).

A state is the nearest stored one when their cosine reaches the threshold, and else a new one. The paper's
literal ``1 / n`` over distinct states is nearly always 1, so n counts visits. Shape letters: N states of a
task, D dimensions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.memory.tips import SIMILARITY_DIGITS

Key: TypeAlias = NDArray[np.float32]


@dataclass(slots=True)
class _States:
    keys: list[Key] = field(default_factory=list)
    units_ND: NDArray[np.float64] | None = None  # grows by doubling; rows behind len(keys) are free
    counts: list[int] = field(default_factory=list)


class NoveltyStore:
    """Visit counts per task key; new states are those whose cosine with every stored one is below
    ``threshold``.

    Keys count in single precision, in which they are saved; cosines that agree to ``SIMILARITY_DIGITS``
    digits are equal, and of equally near states the older one is visited.
    """

    def __init__(self, *, threshold: float = 0.9) -> None:
        if not -1.0 <= threshold <= 1.0:
            raise ValueError(f"a cosine threshold of {threshold} is impossible")
        self.threshold = threshold
        self._tasks: dict[str, _States] = {}

    def num_states(self, task_key: str) -> int:
        """Distinct states of a task."""
        return len(self._tasks[task_key].counts) if task_key in self._tasks else 0

    def visit_together(self, task_key: str, keys: Sequence[Key]) -> list[int]:
        """Count visits that happened at the same time; for each, the visits n of its state after all of
        them. The reward is ``c / n``.

        Rollouts of one group that reach one state get one reward: counted one after the other, the first
        would get ``c``, the eighth ``c / 8``, and a group whose returns tie would be taught by the order of
        its rollouts.
        """
        states = self._tasks.setdefault(task_key, _States())
        rows = [np.asarray(key, np.float32) for key in keys]
        units = [_unit(row) for row in rows]
        # first all new ones: a late one may be the nearest of an early visit
        for key, unit in zip(rows, units, strict=True):
            if not states.counts or self._nearest(states, unit)[1] < self.threshold - 10**-SIMILARITY_DIGITS:
                _add(states, key, unit)
        nearest = [self._nearest(states, unit)[0] for unit in units]
        for state in nearest:
            states.counts[state] += 1
        return [states.counts[state] for state in nearest]

    def _nearest(self, states: _States, unit: NDArray[np.float64]) -> tuple[int, float]:
        assert states.units_ND is not None
        # not a BLAS product: the same bits everywhere
        similarities = (states.units_ND[: len(states.counts)] * unit).sum(axis=1)
        nearest = int(similarities.round(SIMILARITY_DIGITS).argmax())
        return nearest, float(similarities[nearest])

    def snapshot(self) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
        """Plain data and arrays that :meth:`restore` takes; for checkpoints."""
        order = [key for key, states in self._tasks.items() if states.keys]
        arrays = {f"novelty/{number}": np.stack(self._tasks[key].keys) for number, key in enumerate(order)}
        return {"order": order, "counts": {key: self._tasks[key].counts for key in order}}, arrays

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Become what was saved."""
        self._tasks = {}
        for number, task_key in enumerate(state["order"]):
            keys = [np.asarray(row, np.float32) for row in arrays[f"novelty/{number}"]]
            units = np.stack([_unit(key) for key in keys])
            counts = [int(count) for count in state["counts"][task_key]]
            self._tasks[task_key] = _States(keys=keys, units_ND=units, counts=counts)


def _unit(key: Key) -> NDArray[np.float64]:
    values = np.asarray(key, np.float64)
    norm = float(np.sqrt((values * values).sum()))
    if not np.isfinite(norm) or norm == 0.0:
        raise ValueError("a state needs a finite key that is not all zeros")
    unit: NDArray[np.float64] = values / norm
    return unit


def _add(states: _States, key: Key, unit: NDArray[np.float64]) -> None:
    """A new state, without a visit."""
    num = len(states.counts)
    if states.units_ND is None or num == len(states.units_ND):
        # Doubled, so that a run's states are copied a constant number of times in the mean.
        grown = np.zeros((max(16, 2 * num), len(unit)))
        grown[:num] = states.units_ND[:num] if states.units_ND is not None else grown[:num]
        states.units_ND = grown
    states.units_ND[num] = unit
    states.keys.append(key)
    states.counts.append(0)
