"""GiGPO through traces built by hand: anchors, step rewards, faults, shared nodes, what it reports, and its
settings.
"""

import tomllib

import pytest

from outrider.algorithms.gigpo import Gigpo, GigpoSettings, reward_without_step, step_returns
from outrider.config import to_toml, validate
from outrider.errors import ConfigError
from outrider.trace import Trace, policy_turns
from outrider.types import Origin, Task
from tests.algorithms.gigpo_groups import SMALL, SMALL_EXPECTED, Episode, add, credited, finish, flat, play


def test_the_anchor_is_the_newest_text_of_the_world() -> None:
    trace = Trace(task=Task(key="t", question=""))
    tip = add(trace, None, Origin.PROMPT, "question")
    script = [
        (Origin.MEMORY, "tip"), (Origin.POLICY, "one"), (Origin.ENVIRONMENT, "door"), (Origin.MEMORY, "tip"),
        (Origin.POLICY, "two"), (Origin.ENVIRONMENT, ""), (Origin.POLICY, "three"), (Origin.BUFFER, "shown"),
        (Origin.POLICY, "four"), (Origin.BUFFER, "done"), (Origin.POLICY, "five"),
    ]  # fmt: skip
    for origin, text in script:
        tip = add(trace, tip.node_id, origin, text)
        if text == "done":  # a retrieved step whose calls were carried out: its words are this world's
            tip.metadata["num_tool_calls"] = 1
    found = [(turn.node.message.content, turn.observation) for turn in policy_turns(trace.path(tip.node_id))]
    expected = ["question", "door", "door", "door", "done"]
    assert found == list(zip(["one", "two", "three", "four", "five"], expected, strict=True))


def test_a_retrieved_step_takes_one_step_of_time_and_its_reward_belongs_to_earlier_turns() -> None:
    trace = Trace(task=Task(key="t", question=""))
    tip = add(trace, None, Origin.PROMPT, "question")
    steps = [(Origin.POLICY, 0.0), (Origin.BUFFER, 0.5), (Origin.POLICY, 1.0), (Origin.BUFFER, 0.25)]
    for origin, reward in steps:
        tip = add(trace, tip.node_id, origin, "text", reward=reward)
    path = trace.path(tip.node_id)
    # 0.25 + 0.25 + 0.03125 and 1 + 0.125
    assert step_returns(path, episode_return=1.75, gamma=0.5) == [0.53125, 1.125]
    # 2 more on the last policy turn
    assert step_returns(path, episode_return=3.75, gamma=0.5) == [1.03125, 3.125]
    assert step_returns(path[:1], episode_return=1.0, gamma=0.5) == []


def test_what_the_step_rewards_lack_is_put_on_the_last_turn_and_measured() -> None:
    paid_at_the_end = [
        Episode(states=("s", "x"), rewards=(0.0, 0.0), extra=1.0),
        Episode(states=("s", "y"), rewards=(0.5, 0.0), extra=-0.5),
    ]  # fmt: skip
    trace, turns = play(paid_at_the_end)
    (_, first), (_, second) = trace.rollouts()
    assert step_returns(first, episode_return=1.0, gamma=0.5) == [0.5, 1.0]
    assert step_returns(second, episode_return=0.0, gamma=0.5) == [0.25, -0.5]
    assert reward_without_step(second, episode_return=0.0) == -0.5
    credit = Gigpo(validate(GigpoSettings, {"gamma": 0.5})).assign_advantages(trace)
    assert credit.measurements["gigpo/reward_without_step_abs"] == [1.0, 0.5]
    assert turns[0][0].credit == pytest.approx((0.5 + 0.125,) * 2)
    assert turns[1][1].credit == pytest.approx((-0.5,) * 2)


def test_the_measurements_of_a_small_group() -> None:
    _, credit = credited(SMALL)
    assert credit.measurements["gigpo/anchor_group_size"] == [3.0, 3.0, 2.0, 1.0]
    assert credit.measurements["gigpo/share_alone"] == [0.0] * 6 + [1.0] + [0.0] * 2
    episode, step = (
        credit.measurements["gigpo/episode_advantage_abs"],
        credit.measurements["gigpo/step_advantage_abs"],
    )
    # one return a rollout
    assert episode == pytest.approx([10.0 / 3.0] * 3 + [20.0 / 3.0] * 4 + [10.0 / 3.0] * 2)
    assert step == pytest.approx([abs(value) for value in SMALL_EXPECTED["none"]["step"]], abs=1e-6)
    assert credit.advantages.values.tolist() == pytest.approx([10.0 / 3.0, -20.0 / 3.0, 10.0 / 3.0])


def test_the_step_part_alone_is_a_signal() -> None:
    """Equal returns: the quicker rollout is preferred, and a rollout that comes back prefers what it did the
    last time.
    """
    values, credit = credited(
        [Episode(states=("s",), rewards=(1.0,)), Episode(states=("s", "x"), rewards=(0.0, 1.0))],
        gamma=0.9,
        step_weight=2.0,
    )
    assert values == [pytest.approx([0.1]), pytest.approx([-0.1, 0.0])]
    assert (
        credit.advantages.values.tolist() == [0.0, 0.0]
        and credit.advantages.has_signal
        and credit.advantages.reason is None
    )
    values, credit = credited([Episode(states=("s", "x", "x"), rewards=(0.0, 0.0, 1.0))])
    assert values == [pytest.approx([0.0, -0.025, 0.025])]
    assert credit.advantages.has_signal and credit.advantages.reason is None


def test_no_signal_has_a_reason() -> None:
    same, silent = Episode(states=("s",), rewards=(1.0,)), Episode(states=(), rewards=(), extra=1.0)
    nothing = Episode(states=(), rewards=())
    for episodes, reason in (
        ([same, same], "no_spread"),
        ([same], "singleton"),
        ([silent, nothing], "no_spread"),
    ):
        values, credit = credited(episodes)
        assert flat(values) == [0.0] * sum(len(episode.states) for episode in episodes)
        assert (credit.advantages.has_signal, credit.advantages.reason) == (False, reason)


def test_a_rollout_without_a_turn_counts_in_the_episode_part_only() -> None:
    values, credit = credited(
        [Episode(states=(), rewards=(), extra=-1.0), Episode(states=("s",), rewards=(1.0,))]
    )
    assert values == [[], [1.0]] and credit.advantages.values.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("statistics", ["rollouts", "turns"])
def test_a_faulty_rollout_leaves_the_others_bit_for_bit_alone(statistics: str) -> None:
    algorithm = Gigpo(validate(GigpoSettings, {"episode_statistics": statistics}))
    base, turns = play(SMALL)
    trace, others = play(SMALL)
    lost = add(trace, 0, Origin.POLICY, "lost", reward=99.0)
    finish(trace, len(SMALL), None, None)
    plain, credit = algorithm.assign_advantages(base), algorithm.assign_advantages(trace)
    assert [[node.credit for node in own] for own in others] == [
        [node.credit for node in own] for own in turns
    ]
    assert lost.credit is None and trace.leaves[3].advantage is None
    assert credit.advantages.values.tolist() == [*plain.advantages.values.tolist(), 0.0]
    assert credit.advantages.assigned.tolist() == [True, True, True, False]
    assert credit.measurements == plain.measurements
    nobody = Trace(task=Task(key="t", question=""))
    finish(nobody, 0, None, None)
    assert algorithm.assign_advantages(nobody).advantages.reason == "unscorable"


def test_shared_and_credited_nodes_are_refused_before_anything_is_written() -> None:
    trace = Trace(task=Task(key="t", question=""))
    root = add(trace, None, Origin.PROMPT, "question")
    shared = add(trace, root.node_id, Origin.POLICY, "shared")
    for rollout in range(2):
        finish(
            trace, rollout, add(trace, shared.node_id, Origin.POLICY, str(rollout)).node_id, float(rollout)
        )
    algorithm = Gigpo(validate(GigpoSettings, {}))
    with pytest.raises(ValueError, match=f"node {shared.node_id} already has credit"):
        algorithm.assign_advantages(trace)
    assert all(node.credit is None for node in trace.nodes)
    played, _ = play(SMALL)
    algorithm.assign_advantages(played)
    with pytest.raises(ValueError, match="already has credit"):
        algorithm.assign_advantages(played)


def test_settings() -> None:
    chosen = validate(GigpoSettings, {})
    assert (chosen.gamma, chosen.step_weight, chosen.normalization, chosen.similarity) == (
        0.95,
        1.0,
        "none",
        "exact",
    )
    assert (chosen.advantage, chosen.episode_statistics, chosen.invalid_penalty) == (
        "group_centered",
        "rollouts",
        0.0,
    )
    with_std = validate(GigpoSettings, {"normalization": "std", "similarity": 0.95})
    assert with_std.advantage == "group_normalized"
    for one in (chosen, with_std):
        # as a run directory saves it
        assert validate(GigpoSettings, tomllib.loads(to_toml(one.model_dump()))) == one
    with pytest.raises(ConfigError, match="contradicts normalization"):
        validate(GigpoSettings, {"advantage": "leave_one_out"})
    for wrong in (
        {"similarity": 0.0},
        {"similarity": "near"},
        {"gamma": 1.1},
        {"normalization": "mean"},
        {"step_weight": -1.0},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            validate(GigpoSettings, wrong)
    assert Gigpo(validate(GigpoSettings, {"group_size": 3})).modes == ("on_policy",) * 3
