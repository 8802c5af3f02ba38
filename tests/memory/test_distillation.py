"""Random network distillation: against torch, on states that were seen and on new ones, and saved."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from outrider.memory.embedders import HashEmbedder
from outrider.memory.novelty import PREFIX, DistillationSettings, RandomDistillation

DIM = 12
Keys = NDArray[np.float32]


def units(num: int, seed: int, dim: int = DIM) -> Keys:
    rows = np.random.default_rng(seed).normal(size=(num, dim))
    keys: Keys = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return keys


def weights(store: RandomDistillation, prefix: str) -> dict[str, torch.Tensor]:
    _, arrays = store.snapshot()
    names = {name.removeprefix(PREFIX): value for name, value in arrays.items()}
    return {name: torch.tensor(value) for name, value in names.items() if name.startswith(prefix)}


def whitened(keys: Keys, seen: Keys) -> torch.Tensor:
    """By the statistics of all keys that were seen and one more, the prior: mean 0, variance 1 / D."""
    every = torch.tensor(seen, dtype=torch.float64)
    num = len(every) + 1
    mean = every.sum(0) / num
    square = (every**2).sum(0) / num + 1 / (DIM * num)
    scaled = (torch.tensor(keys, dtype=torch.float64) - mean) / (square - mean**2).sqrt()
    return scaled.clamp(-5, 5)


def test_it_is_a_network_trained_by_adam_as_torch_does_it() -> None:
    """Two groups: errors before each update, and all weights after both."""
    chosen = DistillationSettings(hidden=7, features=3, learning_rate=0.01, passes=3)
    store = RandomDistillation(DIM, chosen, seed=4)
    target = weights(store, "target")
    own = {name: value.requires_grad_() for kind in ("weight", "bias")
           for name, value in weights(store, kind).items()}  # fmt: skip
    adam = torch.optim.Adam(own.values(), lr=0.01)

    def errors(inputs: torch.Tensor) -> torch.Tensor:
        hidden = (inputs @ own["weight_1"] + own["bias_1"]).relu()
        hidden = (hidden @ own["weight_2"] + own["bias_2"]).relu()
        wanted = (inputs @ target["target_1"]).relu() @ target["target_2"]
        return ((hidden @ own["weight_3"] + own["bias_3"] - wanted) ** 2).mean(1)

    seen, every = np.zeros((0, DIM), np.float32), []
    for group in (units(6, 1), units(9, 2)):
        expected = errors(whitened(group, seen)).detach().numpy()
        every += expected.tolist()
        bonuses, found = store.visit("t", list(group))
        np.testing.assert_allclose(found, expected, rtol=1e-10)
        root = np.sqrt(np.mean(np.square(every)))
        np.testing.assert_allclose(bonuses, expected / root, rtol=1e-10)
        seen = np.concatenate([seen, group])
        for _ in range(3):
            adam.zero_grad()
            errors(whitened(group, seen)).mean().backward()
            adam.step()
    for kind in ("weight", "bias"):
        for name, value in weights(store, kind).items():
            np.testing.assert_allclose(value, own[name].detach(), rtol=1e-7, atol=1e-10, err_msg=name)
    assert all(torch.equal(value, target[name]) for name, value in weights(store, "target").items())


def test_the_error_falls_for_visited_states_only() -> None:
    """Rooms of one house, in words that are mostly the same."""
    rooms = [f"You are in the {room}. There is a door and a {thing}." for room, thing in zip(
        ("hall", "attic", "cellar", "garage", "kitchen", "garden"),
        ("lamp", "trunk", "barrel", "bicycle", "stove", "spade"), strict=True)]  # fmt: skip
    keys = list(HashEmbedder().embed(rooms))
    store = RandomDistillation(256, seed=0)
    first = store.errors(keys)
    bonuses = [store.visit("t", keys[:3] * 8)[0][0] for _ in range(40)]
    last = store.errors(keys)
    assert max(last[:3]) < 0.01 * min(first[:3])
    assert min(last[3:]) > 0.25 * min(first[3:]) and min(last[3:]) > 100 * max(last[:3])
    assert bonuses[0] > bonuses[5] > bonuses[20] > bonuses[39] > 0
    assert bonuses[0] == pytest.approx(1.0, abs=0.5)  # an average state of the run is worth 1


def test_states_that_are_seen_together_are_worth_the_same_in_any_order() -> None:
    keys = units(4, 3)
    there, back = (RandomDistillation(DIM, seed=1) for _ in range(2))
    bonuses, errors = there.visit("t", [*keys, *keys])
    assert bonuses[:4] == bonuses[4:] and errors[:4] == errors[4:]
    assert back.visit("t", [*keys[::-1], *keys[::-1]])[1][:4][::-1] == errors[:4]


def test_computing_errors_learns_nothing_and_no_states_are_no_visit() -> None:
    store = RandomDistillation(DIM, seed=1)
    assert store.errors(list(units(2, 1))) == store.errors(list(units(2, 1)))
    before = store.snapshot()
    assert store.visit("t", []) == ([], [])
    assert store.snapshot()[0] == before[0]
    with pytest.raises(ValueError, match="finite"):
        store.errors([np.full(DIM, np.nan, np.float32)])


def test_a_restored_predictor_continues_bit_for_bit(tmp_path: Path) -> None:
    """Through the files of a checkpoint, into one of another seed: what is saved decides, the target too."""
    whole, first = RandomDistillation(DIM, seed=5), RandomDistillation(DIM, seed=5)
    parts = [list(units(num, num)) for num in (5, 8, 3, 8)]
    for part in parts[:2]:
        whole.visit("t", part)
        first.visit("t", part)
    state, arrays = first.snapshot()
    save_file(arrays, tmp_path / "memory.safetensors")
    second = RandomDistillation(DIM, seed=6)
    second.restore(json.loads(json.dumps(state)), load_file(tmp_path / "memory.safetensors"))
    first.visit("t", parts[0])  # a snapshot is no view of what goes on
    for part in parts[2:]:
        assert whole.visit("t", part) == second.visit("t", part)
    ended, again = whole.snapshot(), second.snapshot()
    assert ended[0] == again[0] and ended[1].keys() == again[1].keys()
    assert all(ended[1][name].tobytes() == again[1][name].tobytes() for name in ended[1])


def test_the_seed_decides_both_networks() -> None:
    keys = list(units(3, 1))
    assert RandomDistillation(DIM, seed=1).errors(keys) == RandomDistillation(DIM, seed=1).errors(keys)
    assert RandomDistillation(DIM, seed=1).errors(keys) != RandomDistillation(DIM, seed=2).errors(keys)
