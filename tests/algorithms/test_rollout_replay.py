"""RolloutReplay's buffer: upstream's selection, what is stored and restored, and how tasks are drawn."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from outrider.algorithms.advantages import difficulty_scores
from outrider.algorithms.losses import replay_centred_per_token
from outrider.algorithms.rollout_replay import (
    RolloutReplay,
    RolloutReplaySettings,
    StoredGroup,
    ToolBonusSettings,
    cosine_rise,
    restore_groups,
    snapshot_groups,
    stored_copy,
)
from outrider.config import validate
from outrider.errors import CheckpointError, ConfigError
from outrider.metrics import declared_metric
from outrider.trace import Trace
from outrider.training.settings import RunSettings
from outrider.training.update import rollout_paths
from outrider.types import Origin, Task
from tests.algorithms.builders import add_node, finish, new_trace
from tests.vectors import load_vectors

CASES = load_vectors("advantages")


def group(key: str, returns: Sequence[float | None], *, salt: int = 0) -> Trace:
    """Return rollouts of two turns around an observation. None is a fault, whose node remains in the tree."""
    trace = new_trace(key, modes=("on_policy",) * len(returns))
    root = add_node(trace, None, Origin.PROMPT, token_ids=(5, 6))
    for rollout, value in enumerate(returns):
        turn: dict[str, Any] = {"logprobs": (-0.1 - rollout, -1 / 3), "entropies": (0.5, 0.25)}
        node = add_node(trace, root, Origin.POLICY, token_ids=(7 + rollout, 8 + salt), **turn)
        if value is not None:
            node = add_node(trace, node, Origin.ENVIRONMENT, token_ids=(9,))
            node = add_node(trace, node, Origin.POLICY, token_ids=(10, 11), **turn)
        finish(trace, node, value, success=value == 1.0)
    return trace


def replay(*, groups_per_step: int = 4, seed: int = 0, **options: Any) -> RolloutReplay:
    return RolloutReplay(validate(RolloutReplaySettings, options), groups_per_step=groups_per_step, seed=seed)


def keys(algorithm: RolloutReplay) -> list[str]:
    return [one.trace.task.key for one in algorithm.stored]


def test_upstream_selection_through_the_buffer() -> None:
    """Seven groups are stored, one per step; then a step of two replays eligible ones."""
    case = CASES["rollout_replay.select_buffer"]
    inputs, expected = case["inputs"], case["expected"]
    algorithm = replay(buffer_size=inputs["buffer_size"], num_fresh_steps=0)
    algorithm.stored = [
        StoredGroup(trace=stored_copy(group(str(key), [1.0] * won + [0.0] * (8 - won))), step=step)
        for step, (key, won) in enumerate(
            zip(inputs["group_ids_oldest_first"], inputs["successes_of_8"], strict=True)
        )
    ]
    replayed, metrics = algorithm.replay([group("x", [1.0, 0.0]), group("y", [0.0, 0.0])], step=9)
    eligible = [str(key) for key in expected["eligible_after_dedup_and_filter"]]
    chosen = [trace.task.key for trace in replayed]
    assert len(chosen) == expected["replay_prompts_per_step"] == metrics["replay/num_groups"]
    assert set(chosen) <= set(eligible) and metrics["replay/num_eligible"] == len(eligible)
    # fresh ones whatever they are worth
    assert keys(algorithm) == [str(key) for key in expected["buffer_after"]] + ["x", "y"]
    assert metrics["replay/num_stored"] == 5 and metrics["replay/age_max"] <= 9
    drawn = set()
    for step in range(60):
        again = replay(num_fresh_steps=0)
        again.stored = [StoredGroup(trace=stored_copy(group(key, [1.0, 0.0])), step=0) for key in eligible]
        drawn.add(tuple(trace.task.key for trace in again.replay([group("x", [1.0, 0.0])] * 2, step=step)[0]))
    assert len(drawn) == 6  # every pair of four


def test_a_stored_group_has_no_faults_advantages_and_texts() -> None:
    trace = group("t", [1.0, None, 0.25])
    for node in trace.nodes:
        node.metadata["rollout"] = 3
    stored = stored_copy(trace)
    again = stored_copy(stored)
    assert again.is_replayed and sorted(again.leaves) == [0, 2] and again.task.key == "t"
    kept = [(leaf, path) for leaf, path in trace.rollouts() if path]
    for (leaf, path), (twin, copied) in zip(kept, again.rollouts(), strict=True):
        for name in ("rollout", "episode_return", "success"):
            assert getattr(leaf, name) == getattr(twin, name)
        one, other = ([(n.origin, n.token_ids, n.logprobs) for n in nodes] for nodes in (path, copied))
        assert one == other
    assert len(again.nodes) == 7  # the prompt once, and nothing of the fault
    algorithm = replay()
    algorithm.assign_advantages(again)
    values = algorithm.assign_advantages(stored_copy(stored)).advantages.values
    assert values.tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)


def test_a_buffer_is_restored_bit_for_bit_from_plain_data_and_arrays() -> None:
    algorithm = replay(selection="difficulty", num_fresh_steps=0)
    for step in range(3):
        algorithm.replay(
            [group(f"t{step}", [1.0, None, 0.1 + 0.2], salt=step), group("u", [0.0, 1.0])], step=step
        )
    state, arrays = algorithm.state()
    other = replay(selection="difficulty", num_fresh_steps=0)
    other.restore(json.loads(json.dumps(state)), arrays)
    again, arrays_again = other.state()
    assert again == state and all(np.array_equal(arrays_again[name], arrays[name]) for name in arrays)
    following = [group("v", [1.0, 0.0])]
    first, second = algorithm.replay(following, step=3), other.replay(following, step=3)
    assert first[1] == second[1] and [t.task.key for t in first[0]] == [t.task.key for t in second[0]]
    assert restore_groups(*snapshot_groups([])) == []
    with pytest.raises(CheckpointError, match="log-probs"):
        restore_groups(state["groups"][:-1], arrays)


def test_groups_are_eligible_by_success_or_by_return() -> None:
    graded = [group("t", [0.2, 0.6])]
    for reward, num in (("success", 0.0), ("return", 1.0)):
        algorithm = replay(reward=reward, num_fresh_steps=0)
        algorithm.replay(graded, step=0)
        assert algorithm.replay([], step=1)[1]["replay/num_eligible"] == num


def test_returns_that_differ_by_rounding_are_no_spread() -> None:
    """Such a group would replace one that has a signal."""
    algorithm = replay(reward="return", num_fresh_steps=0)
    algorithm.replay([group("noise", [0.3, 0.1 + 0.2]), group("t", [0.3, 0.4])], step=0)
    replayed, metrics = algorithm.replay([], step=1)
    assert metrics["replay/num_eligible"] == 1.0 and [trace.task.key for trace in replayed] == ["t"]


def test_shares_of_a_step() -> None:
    algorithm = replay(groups_per_step=5, fresh_share=0.5, num_fresh_steps=2)
    assert [algorithm.num_fresh(step) for step in range(4)] == [5, 5, 2, 2]
    assert replay(groups_per_step=2, fresh_share=0.1).num_fresh(7) == 1
    whole = replay(fresh_share=1.0, num_fresh_steps=0)
    assert whole.num_fresh(0) == 4
    whole.replay([group("t", [1.0, 0.0])], step=0)
    assert whole.replay([group("t", [1.0, 0.0])], step=1)[0] == []


def test_a_group_of_faults_is_not_stored() -> None:
    algorithm = replay(num_fresh_steps=0)
    algorithm.replay([group("t", [None, None])], step=0)
    assert algorithm.stored == [] and algorithm.estimates == {}


def test_tasks_are_drawn_with_the_probabilities_of_the_released_rule() -> None:
    """First draws, against the probabilities of the released rule; and the released temperature does not
    break.
    """
    predicted = [0.0, 0.2, 0.45, 0.5, 0.8]
    known = {f"t{i}": value for i, value in enumerate(predicted)}
    known_tasks = [Task(key=key, question="") for key in known]
    algorithm = replay(
        groups_per_step=3, selection="difficulty", temperature=0.2, num_fresh_steps=0, fresh_share=1.0
    )
    algorithm.estimates = dict(known)
    draws = [algorithm.choose(known_tasks, step=step) for step in range(4000)]
    assert all(chosen is not None and len({task.key for task in chosen}) == 3 for chosen in draws)
    firsts = np.bincount([int(chosen[0].key[1:]) for chosen in draws if chosen], minlength=5) / 4000
    weights = np.exp(difficulty_scores(predicted, temperature=0.2))
    np.testing.assert_allclose(firsts, weights / weights.sum(), atol=0.03)
    sharp = replay(groups_per_step=3, selection="difficulty", num_fresh_steps=0, fresh_share=1.0)
    sharp.estimates = dict(known)
    nearest = sharp.choose([*known_tasks, Task(key="new", question="")], step=0)
    # never played: at the target
    assert nearest is not None and {task.key for task in nearest} == {"t3", "t2", "new"}
    assert replay().choose(known_tasks, step=0) is None


def test_the_estimate_is_a_running_mean() -> None:
    algorithm = replay(selection="difficulty", estimate_rate=0.25, num_fresh_steps=0)
    _, metrics = algorithm.replay([group("t", [1.0, 1.0])], step=0)
    assert algorithm.estimates == {"t": 0.625} and metrics["replay/estimate_mean"] == 0.625
    algorithm.replay([group("t", [0.0, 0.0])], step=1)
    assert algorithm.estimates == {"t": 0.75 * 0.625}


# SPEAR: which stored rollouts are replayed, their advantages, and the weight of their loss

SPEAR: list[dict[str, Any]] = load_vectors("spear")["cases"]  # type: ignore[assignment]


def replayed_values(algorithm: RolloutReplay, *, step: int) -> dict[str, list[float | None]]:
    """The advantages of the groups that a step without fresh groups replays; None: left out."""
    groups, _ = algorithm.replay([], step=step)
    for trace in groups:
        for leaf, path in trace.scored_rollouts():
            is_pruned = leaf.rollout in trace.pruned
            assert is_pruned == (leaf.advantage is None) == all(node.credit is None for node in path)
    return {trace.task.key: [leaf.advantage for leaf, _ in trace.rollouts()] for trace in groups}


@pytest.mark.parametrize("case", [case for case in SPEAR if "weight" in case], ids=str)
def test_spear_vectors_of_the_weight(case: dict[str, Any]) -> None:
    assert cosine_rise(case["step"], case["max_steps"]) == pytest.approx(case["weight"], abs=1e-12)


@pytest.mark.parametrize("case", [case for case in SPEAR if "added_to_return" in case], ids=str)
def test_spear_vectors_of_the_bonus(case: dict[str, Any]) -> None:
    """With the defaults; a turn is a call."""
    bonus = ToolBonusSettings(fall_steps=case["max_steps"])
    assert bonus.value(case["turns"], step=case["step"]) == pytest.approx(case["added_to_return"], abs=1e-12)
    assert bonus == ToolBonusSettings(per_call=0.1, maximum=1.0, fall_steps=200)


def turns(num_calls: Sequence[Sequence[int]]) -> Trace:
    """Rollouts with these numbers of tool calls in their turns; -1 is an invalid turn."""
    trace = new_trace("t", modes=("on_policy",) * len(num_calls))
    root = add_node(trace, None, Origin.PROMPT, token_ids=(5, 6))
    for rollout, calls in enumerate(num_calls):
        node = root
        for num in calls:
            node = add_node(trace, node, Origin.POLICY, token_ids=(7,), logprobs=(-1.0,), entropies=(1.0,))
            node.metadata |= {"num_tool_calls": abs(num), "invalid": num < 0}
            node = add_node(trace, node, Origin.ENVIRONMENT, token_ids=(9,))
        finish(trace, node, 0.5, success=rollout == 0)
    return trace


@pytest.mark.parametrize(("counts_actions", "counts"), [(False, (3, 0, 12)), (True, (2, 1, 6))])
def test_the_bonus_changes_advantages_and_no_return(counts_actions: bool, counts: tuple[int, ...]) -> None:
    calls = [[1, 2, -1], [0, -3], [2] * 6]
    for step, factor in ((0, 1.0), (2, 0.5), (4, 0.0), (9, 0.0)):
        settings = validate(
            RolloutReplaySettings,
            {"advantage": "group_centered", "bonus": {"fall_steps": 4}, "group_size": 3},
        )
        algorithm = RolloutReplay(settings, groups_per_step=2, seed=0, counts_actions=counts_actions)
        trace = turns(calls)
        added = algorithm.augment([trace], step=step, play=None)  # type: ignore[arg-type]
        bonuses = [min(1.0, 0.1 * num) * factor for num in counts]
        assert [leaf.intrinsic for leaf, _ in trace.rollouts()] == pytest.approx(bonuses, abs=1e-12)
        assert added.metrics["replay/tool_bonus_mean"] == pytest.approx(sum(bonuses) / 3)
        assert declared_metric("replay/tool_bonus_mean")
        assert {leaf.episode_return for leaf, _ in trace.rollouts()} == {0.5}
        advantages = algorithm.assign_advantages(trace).advantages.values
        assert advantages == pytest.approx(np.array(bonuses) - np.mean(bonuses), abs=1e-12)
        # Stored groups keep the bonus with which they were compared, also in a checkpoint.
        plain, arrays = snapshot_groups(algorithm.stored)
        [stored] = restore_groups(json.loads(json.dumps(plain)), arrays)
        assert [leaf.intrinsic for leaf, _ in stored.trace.rollouts()] == pytest.approx(bonuses, abs=1e-12)
        assert len(plain[0]["leaves"][1]) == (6 if bonuses[1] else 5)


def test_without_a_bonus_nothing_is_added() -> None:
    trace, algorithm = turns([[1], [2]]), replay()
    assert "replay/tool_bonus_mean" not in algorithm.augment([trace], step=0, play=None).metrics  # type: ignore[arg-type]
    assert [leaf.intrinsic for leaf, _ in trace.rollouts()] == [0.0, 0.0]
    with pytest.raises(ConfigError, match=r"remove \[algorithm.bonus\]"):
        replay(bonus={}, advantage="pass_at_k", pass_k=2)


def test_a_bonus_needs_calls_or_actions() -> None:
    def run(environment: dict[str, Any]) -> RunSettings:
        algorithm = {"type": "rollout_replay", "bonus": {}}
        return validate(RunSettings, {"environment": environment, "algorithm": algorithm})

    puzzles = {"type": "reasoning_gym"}
    with pytest.raises(ConfigError, match=r"environment.tools is empty"):
        run(puzzles)
    for environment in ({"type": "house"}, puzzles | {"tools": ["python"]}):
        assert run(environment).environment.type == environment["type"]


def test_spear_vectors_of_the_advantages() -> None:
    [case] = [case for case in SPEAR if "stored" in case]
    algorithm = replay(
        num_fresh_steps=0, fresh_share=0.1, reward="return", replay_baseline="median", max_age=case["max_age"]
    )
    algorithm.group_means = case["group_means"]
    # Every stored return with a rollout that is below the median.
    algorithm.stored = [
        StoredGroup(trace=stored_copy(group(str(i), [one["return"], 0.0])), step=one["step"])
        for i, one in enumerate(case["stored"])
    ]
    expected = {
        str(i): [pytest.approx(one["advantage"]), None]
        for i, stored in enumerate(case["stored"])
        for one in case["replayed"]
        if one["return"] == stored["return"]
    }
    assert replayed_values(algorithm, step=case["newest_step"]) == expected


def test_positive_rollouts_are_replayed_with_their_own_advantage_or_over_the_median() -> None:
    returns = [1.0, 0.5, 0.0, 0.0]
    plain = replay(reward="return", num_fresh_steps=0)
    plain.replay([group("t", returns)], step=0)
    [own] = replayed_values(plain, step=1).values()
    positive = replay(reward="return", num_fresh_steps=0, replayed_rollouts="positive")
    positive.replay([group("t", returns)], step=0)
    assert replayed_values(positive, step=1) == {"t": [*own[:2], None, None]}
    # The median of the means 0.375, 0.7 and 0.6 is 0.6, and the means of step 1 are not in it.
    both = replay(
        reward="return", num_fresh_steps=0, replayed_rollouts="positive", replay_baseline="median",
        buffer_size=3, replay_rise_steps=4,
    )  # fmt: skip
    both.replay([group("t", returns), group("u", [0.7, 0.7]), group("v", [0.6, 0.6])], step=0)
    [trace], metrics = both.replay([group("w", [0.0, 0.0])] * 2, step=2)
    assert [leaf.advantage for leaf, _ in trace.rollouts()] == [pytest.approx(0.5 * 0.4), None, None, None]
    assert metrics["replay/num_rollouts"] == 1 and metrics["replay/loss_weight"] == pytest.approx(0.5)
    assert both.group_means == [0.6, 0.0, 0.0]
    assert [path.rollout for path in rollout_paths([trace])] == [0]
    again = replay(replay_baseline="median")
    again.restore(*both.state())
    assert again.group_means == both.group_means and "group_means" not in plain.state()[0]


def test_old_groups_are_neither_replayed_nor_stored_again() -> None:
    algorithm = replay(num_fresh_steps=0, max_age=2)
    algorithm.replay([group("t", [1.0, 0.0])], step=3)
    assert list(replayed_values(algorithm, step=5)) == ["t"]
    assert replayed_values(algorithm, step=6) == {} and algorithm.stored == []


def test_the_weight_of_the_replayed_loss_is_that_of_its_advantages() -> None:
    """The loss is proportional to the advantage, whatever the clip does."""
    dice = np.random.default_rng(0)
    values = {
        name: torch.from_numpy(dice.normal(size=64))
        for name in ("logprobs", "old_logprobs", "behaviour_logprobs", "advantages")
    }
    clip = {"clip_low": 0.2, "clip_high": 0.3, "weight_cap": 2.0}
    whole = replay_centred_per_token(**values, **clip).losses  # type: ignore[arg-type]
    scaled = values | {"advantages": 0.25 * values["advantages"]}
    weighted = replay_centred_per_token(**scaled, **clip).losses  # type: ignore[arg-type]
    torch.testing.assert_close(weighted, 0.25 * whole)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"replay_baseline": "median", "advantage": "pass_at_k", "pass_k": 2}, "set replay_baseline = group"),
        ({"fresh_share": 1.0, "max_age": 5, "replay_rise_steps": 9},
         "replays no group: remove max_age, replay_rise_steps"),
        ({"max_age": 0}, "max_age"),
        ({"replay_rise_steps": 0}, "replay_rise_steps"),
    ],
)  # fmt: skip
def test_settings_of_the_replay_that_mean_nothing_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        validate(RolloutReplaySettings, options)
