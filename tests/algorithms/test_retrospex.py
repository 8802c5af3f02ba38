"""Retrospex: the vector of the rescoring, both losses against NumPy, and what is learned of a walk."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.algorithms.retrospex import (
    PRESETS,
    CriticSettings,
    RetrospexSettings,
    Situation,
    encode_turns,
    policy_weight,
    probability,
    rescore,
    to_transitions,
)
from outrider.algorithms.retrospex_critic import (
    Batch,
    Critic,
    Networks,
    expectile_loss,
    quality_loss,
    train,
    update_target,
    value_loss,
)
from outrider.config import validate
from outrider.errors import DataError
from outrider.memory.embedders import HashEmbedder
from outrider.types import Message, Step, Trajectory
from tests.vectors import load_vector

DIM, SIZE = 5, 7
Floats = NDArray[np.float64]


@pytest.mark.parametrize("preset", ["scienceworld", "webshop"])
def test_the_released_scores(preset: str) -> None:
    inputs, expected = load_vector("empo2", "retrospex_rescore")
    chosen = PRESETS[preset]
    names = [name for name in expected if name.endswith({"scienceworld": "sciworld"}.get(preset, preset))]
    assert len(names) >= 2
    for name in names:
        turn = int(name.split("_")[1])
        weight = policy_weight(turn, decay=chosen["decay"], floor=chosen["floor"])
        assert weight == pytest.approx(expected[name]["lambda"], abs=1e-6)
        scores = rescore(inputs["llm_prob"], inputs["q_minus_v"], weight=weight)
        np.testing.assert_allclose(scores, expected[name]["scores"], atol=1e-6)
        assert int(scores.argmax()) == expected[name]["choice"]


def test_a_component_without_spread_has_no_effect() -> None:
    assert rescore([0.5, 0.5], [2.0, 1.0], weight=0.6).tolist() == pytest.approx([0.4, 0.0])
    assert rescore([0.2, 0.5], [2.0, 2.0], weight=0.6).tolist() == pytest.approx([0.0, 0.6])
    assert rescore([0.5], [2.0], weight=0.6).tolist() == [0.0]


def test_a_turn_is_as_likely_as_its_mean_token() -> None:
    assert probability([np.log(0.5), np.log(0.125)]) == pytest.approx(0.25)


def test_the_presets_are_the_scripts_values() -> None:
    chosen = validate(RetrospexSettings, {"critic": "c", "preset": "webshop", "decay": 0.8})
    assert (chosen.num_candidates, chosen.decay, chosen.floor) == (4, 0.8, 0.5)
    plain = validate(RetrospexSettings, {"critic": "c"})
    assert (plain.num_candidates, plain.decay, plain.floor) == (6, 0.97, 0.6)
    iql = CriticSettings()
    assert (iql.expectile, iql.discount, iql.target_rate) == (0.7, 0.99, 0.005)
    assert (iql.learning_rate, iql.batch_size, iql.num_updates) == (1e-4, 128, 200_000)


def batch(seed: int) -> Batch:
    draws = np.random.default_rng(seed)
    return Batch(
        states=torch.tensor(draws.normal(size=(SIZE, 3 * DIM))),
        actions=torch.tensor(draws.normal(size=(SIZE, DIM))),
        rewards=torch.tensor(draws.normal(size=SIZE)),
        next_states=torch.tensor(draws.normal(size=(SIZE, 3 * DIM))),
        is_last=torch.tensor(draws.random(SIZE) < 0.4),
    )


def layers(networks: Networks, name: str, inputs: Floats) -> Floats:
    """A forward pass written out."""
    found = {key: value.numpy() for key, value in networks.state_dict().items()}
    for number in (0, 2, 4):
        inputs = inputs @ found[f"{name}.{number}.weight"].T + found[f"{name}.{number}.bias"]
        inputs = np.maximum(inputs, 0) if number < 4 else inputs
    return inputs[:, 0]


def networks_of(seed: int) -> Networks:
    return Networks(DIM, 6, seed=seed).double()


def test_both_losses_are_those_of_the_paper() -> None:
    networks, target, one = networks_of(1), networks_of(2), batch(3)
    states, actions, following = one.states.numpy(), one.actions.numpy(), one.next_states.numpy()
    both = np.concatenate([states, actions], axis=1)
    lesser = np.minimum(layers(target, "first", both), layers(target, "second", both))
    differences = lesser - layers(networks, "value", states)
    assert (differences < 0).any() and (differences > 0).any()
    expected = np.mean(np.abs(0.7 - (differences < 0)) * differences**2)
    found = value_loss(networks, target, one, expectile=0.7)
    assert found.item() == pytest.approx(expected, rel=1e-12)
    goal = one.rewards.numpy() + 0.9 * ~one.is_last.numpy() * layers(networks, "value", following)
    expected = sum(np.mean((layers(networks, name, both) - goal) ** 2) for name in ("first", "second"))
    assert quality_loss(networks, one, discount=0.9).item() == pytest.approx(expected, rel=1e-12)


def test_each_loss_moves_its_own_networks_only() -> None:
    for loss, moved in (
        (lambda n, t: value_loss(n, t, batch(3), expectile=0.7), {"value"}),
        (lambda n, t: quality_loss(n, batch(3), discount=0.9), {"first", "second"}),
    ):
        networks, target = networks_of(1), networks_of(2)
        loss(networks, target).backward()
        found = {name.split(".")[0] for name, p in networks.named_parameters() if p.grad is not None}
        assert found == moved and all(p.grad is None for p in target.parameters())


def test_the_gradient_of_the_expectile_loss() -> None:
    values = torch.tensor([-2.0, -0.5, 0.0, 0.25, 3.0], dtype=torch.float64, requires_grad=True)
    expectile_loss(values, 0.7).backward()
    expected = [
        2 * weight * u / 5 for weight, u in zip((0.3, 0.3, 0.7, 0.7, 0.7), values.tolist(), strict=True)
    ]
    assert values.grad is not None and values.grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("expectile", [0.5, 0.7, 0.95])
def test_its_minimum_is_the_expectile(expectile: float) -> None:
    """Where above and below weigh the same: τ E[(X - m)+] = (1 - τ) E[(m - X)+], found by halves."""
    samples = np.random.default_rng(0).normal(size=200)
    low, high = samples.min(), samples.max()
    for _ in range(60):
        middle = (low + high) / 2
        up, down = np.maximum(samples - middle, 0).sum(), np.maximum(middle - samples, 0).sum()
        low, high = (middle, high) if expectile * up > (1 - expectile) * down else (low, middle)
    m = torch.tensor(low, dtype=torch.float64, requires_grad=True)
    expectile_loss(torch.tensor(samples) - m, expectile).backward()
    assert m.grad is not None and abs(float(m.grad)) < 1e-9
    assert expectile != 0.5 or low == pytest.approx(samples.mean())


def test_the_target_follows() -> None:
    networks, target = networks_of(1), networks_of(2)
    before = deepcopy(target.state_dict())
    update_target(target, networks, rate=0.25)
    for name, value in target.state_dict().items():
        expected = 0.75 * before[name] + 0.25 * networks.state_dict()[name]
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


def walk(moves: str, *, reward: float) -> Trajectory:
    """Four rooms in a row: ``r`` and ``l`` go right and left, ``g`` gives up."""
    names, place, steps = {"r": "go right", "l": "go left", "g": "give up"}, 0, []
    for move in moves:
        place = max(0, place + {"r": 1, "l": -1, "g": 0}[move])
        text = f"<think>hm</think><action>{names[move]}</action>"
        steps.append(Step(text=text, observation=f"room{place} here"))
    prompt = (Message(role="system", content="rules"), Message(role="user", content="find the lamp"))
    return Trajectory(
        trajectory_id=moves, task_key="t", agent="a", prompt=prompt, steps=tuple(steps), reward=reward
    )


def walks() -> list[Trajectory]:
    draws, found = np.random.default_rng(0), []
    for _ in range(150):
        place, moves = 0, ""
        while place < 3 and len(moves) < 12 and not moves.endswith("g"):
            moves += str(draws.choice(list("rrlg")))
            place = max(0, place + {"r": 1, "l": -1, "g": 0}[moves[-1]])
        found.append(walk(moves, reward=float(place == 3)))
    return found


SHORT = CriticSettings(
    embedder="hash", hidden=32, learning_rate=1e-3, batch_size=64, num_updates=300, target_rate=0.05
)


def test_transitions_have_observations_actions_and_rewards() -> None:
    found = to_transitions(walk("rlg", reward=0.5))
    assert [one.action for one in found] == ["go right", "go left", "give up"]
    assert [one.reward for one in found] == [0.0, 0.0, 0.5]
    assert found[0].situation == Situation(prompt="rules\nfind the lamp")
    assert found[2].situation == Situation(
        prompt="rules\nfind the lamp", observation="room0 here", previous="go left"
    )
    assert [one.next_situation for one in found] == [found[1].situation, found[2].situation, None]
    turns = encode_turns([walk("rlg", reward=0.5), walk("r", reward=1.0)], HashEmbedder())
    assert turns.is_last_N.tolist() == [False, False, True, True]
    embedded = HashEmbedder().embed(["room0 here", "give up"])
    np.testing.assert_array_equal(turns.vectors_UD[[turns.states_N3[2, 1], turns.actions_N[2]]], embedded)
    with pytest.raises(DataError, match="no turn"):
        encode_turns([], HashEmbedder())


def test_the_critic_of_random_walks_prefers_the_shortest_way() -> None:
    embedder = HashEmbedder()
    networks = train(encode_turns(walks(), embedder), SHORT)
    critic = Critic(networks, embedder, SHORT)
    for place, previous in ((1, "go right"), (2, "go right"), (1, "go left")):
        situation = Situation(
            prompt="rules\nfind the lamp", observation=f"room{place} here", previous=previous
        )
        right, left, give_up = critic.advantages(situation, ["go right", "go left", "give up"])
        assert right > left > give_up, (place, previous)
    near, far = (
        float(networks.values(torch.from_numpy(embedder.embed(("rules\nfind the lamp", f"room{place} here",
        "go right")).reshape(1, -1)))) for place in (2, 1))  # fmt: skip
    assert near > far  # a discount a turn


def test_one_seed_gives_one_critic() -> None:
    turns, short = encode_turns(walks()[:20], HashEmbedder()), SHORT.model_copy(update={"num_updates": 20})
    one, same = train(turns, short).state_dict(), train(turns, short).state_dict()
    other = train(turns, short.model_copy(update={"seed": 1})).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
