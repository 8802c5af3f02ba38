"""Visit counts of states by embedding: the intrinsic reward of EMPO² (arXiv 2602.23008, section 4.2).

A state is identified with the nearest stored state if their cosine reaches the threshold; otherwise it is
new. The paper's literal ``1 / n`` over distinct states is nearly always 1, so n counts visits. Shape letters:
N states of a task, D dimensions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from outrider.config import Settings
from outrider.memory.step_buffer import GrowingMatrix
from outrider.memory.tips import SIMILARITY_DIGITS
from outrider.seeding import stream

Key: TypeAlias = NDArray[np.float32]


@dataclass(slots=True)
class _States:
    units: GrowingMatrix
    keys: list[Key] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


class NoveltyStore:
    """Visit counts per task key. A state is new if its cosine with every stored one is below ``threshold``.

    Keys are rounded to single precision, in which they are saved, so that a resumed run computes the same
    cosines. Cosines that agree to ``SIMILARITY_DIGITS`` digits are equal; among equally near states the
    oldest is visited.
    """

    metric: ClassVar[str] = "tips/state_visits"

    def __init__(self, *, threshold: float = 0.9) -> None:
        if not -1.0 <= threshold <= 1.0:
            raise ValueError(f"a cosine threshold must lie in [-1, 1], got {threshold}")
        self.threshold = threshold
        self._tasks: dict[str, _States] = {}

    def num_states(self, task_key: str) -> int:
        """Return the number of distinct states of a task."""
        return len(self._tasks[task_key].counts) if task_key in self._tasks else 0

    def visit(self, task_key: str, keys: Sequence[Key]) -> tuple[list[float], list[float]]:
        """Count simultaneous visits. Returns for each visit the bonus ``1 / n`` and n, the number of visits
        of its state after all of them.

        Rollouts of a group that reach the same state get the same reward. With sequential counting, the first
        would get ``c`` and the eighth ``c / 8``, and a group with equal returns would be trained on the order
        of its rollouts.
        """
        if not len(keys):
            return [], []
        rows = [np.asarray(key, np.float32) for key in keys]
        units = [_unit(row) for row in rows]
        empty = GrowingMatrix(np.empty((0, len(units[0]))))
        states = self._tasks.setdefault(task_key, _States(units=empty))
        # Add all new states first: a later one may be the nearest state of an earlier visit.
        for key, unit in zip(rows, units, strict=True):
            if not states.counts or self._nearest(states, unit)[1] < self.threshold - 10**-SIMILARITY_DIGITS:
                states.units.append(unit[np.newaxis])
                states.keys.append(key)
                states.counts.append(0)
        nearest = [self._nearest(states, unit)[0] for unit in units]
        for state in nearest:
            states.counts[state] += 1
        counts = [float(states.counts[state]) for state in nearest]
        return [1.0 / count for count in counts], counts

    def _nearest(self, states: _States, unit: NDArray[np.float64]) -> tuple[int, float]:
        # no BLAS product, so that results are bit-identical on all machines
        similarities = (states.units.view() * unit).sum(axis=1)
        nearest = int(similarities.round(SIMILARITY_DIGITS).argmax())
        return nearest, float(similarities[nearest])

    def snapshot(self) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
        """Return plain data and arrays for :meth:`restore`; for checkpoints."""
        order = [key for key, states in self._tasks.items() if states.keys]
        arrays = {f"novelty/{number}": np.stack(self._tasks[key].keys) for number, key in enumerate(order)}
        return {"order": order, "counts": {key: self._tasks[key].counts for key in order}}, arrays

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Restore a snapshot."""
        self._tasks = {}
        for number, task_key in enumerate(state["order"]):
            keys = [np.asarray(row, np.float32) for row in arrays[f"novelty/{number}"]]
            units = np.stack([_unit(key) for key in keys])
            counts = [int(count) for count in state["counts"][task_key]]
            self._tasks[task_key] = _States(units=GrowingMatrix(units), keys=keys, counts=counts)


def _unit(key: Key) -> NDArray[np.float64]:
    values = np.asarray(key, np.float64)
    norm = float(np.sqrt((values * values).sum()))
    if not np.isfinite(norm) or norm == 0.0:
        raise ValueError("a state needs a finite key that is not all zeros")
    unit: NDArray[np.float64] = values / norm
    return unit


# Random network distillation (Burda et al., arXiv 1810.12894) on text embeddings.
#
# A predictor learns the outputs of a fixed random network on visited states; its error is large on states
# unlike them. This is the other novelty reward of EMPO² (arXiv 2602.23008, appendix F). Shape letters: N
# states, D dimensions of a key, H hidden units, F features.


Floats: TypeAlias = NDArray[np.float64]
PREFIX = "distillation/"
_CLIP = 5.0  # bound of whitened inputs (section 2.4 of the paper)
_ADAM = (0.9, 0.999, 1e-8)


class DistillationSettings(Settings):
    """``hidden`` units per layer and number of predicted ``features``. After each group, the predictor is
    trained with ``passes`` Adam steps with ``learning_rate`` on the group's states.

    The paper uses convolutions, 512 features, 4 passes and 1e-4 over millions of frames. Our sizes and rate
    are chosen for a few hundred states per group that are already vectors.
    """

    hidden: int = Field(64, ge=1)
    features: int = Field(32, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    passes: int = Field(4, ge=1)


class RandomDistillation:
    """One predictor for all tasks, on keys of ``dim`` numbers. All state is float64 on the CPU and part of
    :meth:`snapshot`, so that a resumed run is bit-identical.

    Keys are whitened by their running mean and variance and clipped. Initially the mean is 0 and the variance
    is that of the components of a unit vector, with the weight of one key.
    """

    metric: ClassVar[str] = "tips/novelty_error"

    def __init__(self, dim: int, settings: DistillationSettings | None = None, *, seed: int) -> None:
        self.settings = settings or DistillationSettings()
        draws = stream(seed, "distillation")
        hidden, features = self.settings.hidden, self.settings.features
        shapes = {"1": (dim, hidden), "2": (hidden, features)}
        self._target = {f"target_{name}": _weights(shape, draws) for name, shape in shapes.items()}
        shapes = {"1": (dim, hidden), "2": (hidden, hidden), "3": (hidden, features)}  # one layer more
        self._learned = {f"weight_{name}": _weights(shape, draws) for name, shape in shapes.items()}
        self._learned |= {f"bias_{name}": np.zeros(shape[1]) for name, shape in shapes.items()}
        self._adam = {f"{kind}_{name}": np.zeros_like(value) for name, value in self._learned.items()
                      for kind in ("mean", "square")}  # fmt: skip
        self._keys = {"key_mean": np.zeros(dim), "key_variance": np.full(dim, 1.0 / dim)}
        self._num_keys, self._num_updates = 1, 0
        self._num_errors, self._squared_errors = 0, 0.0

    def errors(self, keys: Sequence[NDArray[Any]]) -> list[float]:
        """Return the mean squared feature error of each key, without training the predictor."""
        inputs_ND = self._whitened(_rows(keys))
        predicted_NF = self._predict(inputs_ND)[-1]
        return [float(error) for error in ((predicted_NF - self._features(inputs_ND)) ** 2).mean(axis=1)]

    def visit(self, task_key: str, keys: Sequence[Key]) -> tuple[list[float], list[float]]:
        """Return bonus and error of each of the simultaneously visited states; then train on them.

        The bonus is the error divided by the root mean square of all errors so far, including these, so that
        an average state of the run has a bonus of about 1. All errors are computed before the update, so that
        rollouts of a group that visit the same states get the same reward.
        """
        if not len(keys):
            return [], []
        errors = self.errors(keys)
        self._num_errors += len(errors)
        self._squared_errors += sum(error * error for error in errors)
        scale = (self._squared_errors / self._num_errors) ** 0.5 or 1.0
        rows_ND = _rows(keys)
        self._count(rows_ND)
        inputs_ND = self._whitened(rows_ND)
        target_NF = self._features(inputs_ND)
        for _ in range(self.settings.passes):
            self._update(self._gradients(inputs_ND, target_NF))
        return [error / scale for error in errors], errors

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Floats]]:
        """Return plain data and arrays for :meth:`restore`; for checkpoints."""
        arrays = {PREFIX + name: value.copy() for part in self._parts() for name, value in part.items()}
        plain = {"num_keys": self._num_keys, "num_updates": self._num_updates,
                 "num_errors": self._num_errors, "squared_errors": self._squared_errors}  # fmt: skip
        return plain, arrays

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore a snapshot, including the fixed network."""
        for part in self._parts():
            part.update({name: np.array(arrays[PREFIX + name], np.float64) for name in part})
        self._num_keys, self._num_updates = int(state["num_keys"]), int(state["num_updates"])
        self._num_errors = int(state["num_errors"])
        self._squared_errors = float(state["squared_errors"])

    def _parts(self) -> tuple[dict[str, Floats], ...]:
        return self._target, self._learned, self._adam, self._keys

    def _count(self, rows_ND: Floats) -> None:
        """Update the running mean and variance with these keys (Chan et al., 1979)."""
        num, more = self._num_keys, len(rows_ND)
        mean, off = self._keys["key_mean"], rows_ND.mean(axis=0) - self._keys["key_mean"]
        spread = self._keys["key_variance"] * num + rows_ND.var(axis=0) * more
        self._num_keys = num + more
        self._keys["key_mean"] = mean + off * more / self._num_keys
        self._keys["key_variance"] = (spread + off**2 * num * more / self._num_keys) / self._num_keys

    def _whitened(self, rows_ND: Floats) -> Floats:
        scale = np.sqrt(self._keys["key_variance"])
        whitened: Floats = np.clip((rows_ND - self._keys["key_mean"]) / scale, -_CLIP, _CLIP)
        return whitened

    def _features(self, inputs_ND: Floats) -> Floats:
        return _product(
            np.maximum(_product(inputs_ND, self._target["target_1"]), 0), self._target["target_2"]
        )

    def _predict(self, inputs_ND: Floats) -> tuple[Floats, Floats, Floats]:
        """Return both hidden layers, and the features."""
        own = self._learned
        first_NH = np.maximum(_product(inputs_ND, own["weight_1"]) + own["bias_1"], 0)
        second_NH = np.maximum(_product(first_NH, own["weight_2"]) + own["bias_2"], 0)
        return first_NH, second_NH, _product(second_NH, own["weight_3"]) + own["bias_3"]

    def _gradients(self, inputs_ND: Floats, target_NF: Floats) -> dict[str, Floats]:
        """Compute the gradients of the mean squared error over all features of all states."""
        first_NH, second_NH, predicted_NF = self._predict(inputs_ND)
        slope = 2 * (predicted_NF - target_NF) / target_NF.size
        gradients: dict[str, Floats] = {}
        for layer, below in (("3", second_NH), ("2", first_NH), ("1", inputs_ND)):
            gradients[f"weight_{layer}"] = _product(below.T, slope)
            gradients[f"bias_{layer}"] = slope.sum(axis=0)
            if layer != "1":
                slope = _product(slope, self._learned[f"weight_{layer}"].T) * (below > 0)
        return gradients

    def _update(self, gradients: Mapping[str, Floats]) -> None:
        """One step of Adam (arXiv 1412.6980)."""
        slow, fast, tiny = _ADAM
        self._num_updates += 1
        for name, gradient in gradients.items():
            mean = slow * self._adam[f"mean_{name}"] + (1 - slow) * gradient
            square = fast * self._adam[f"square_{name}"] + (1 - fast) * gradient**2
            self._adam |= {f"mean_{name}": mean, f"square_{name}": square}
            step = mean / (1 - slow**self._num_updates)
            size = np.sqrt(square / (1 - fast**self._num_updates)) + tiny
            self._learned[name] = self._learned[name] - self.settings.learning_rate * step / size


def _rows(keys: Sequence[NDArray[Any]]) -> Floats:
    rows_ND = np.stack([np.asarray(key, np.float32) for key in keys]).astype(np.float64)
    if not np.isfinite(rows_ND).all():
        raise ValueError("a state needs a finite key")
    return rows_ND


def _weights(shape: tuple[int, int], draws: np.random.Generator) -> Floats:
    """Draw weights with He et al.'s scale for rectified layers (arXiv 1502.01852)."""
    weights: Floats = draws.normal(0.0, (2.0 / shape[0]) ** 0.5, shape)
    return weights


def _product(left: Floats, right: Floats) -> Floats:
    """Multiply without BLAS, whose bits depend on the number of threads."""
    product: Floats = np.einsum("ij,jk->ik", np.ascontiguousarray(left), np.ascontiguousarray(right))
    return product
