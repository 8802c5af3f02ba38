"""EMPO²: the vectors, exact proportions of modes, tips within their budgets, and the novelty reward."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.advantages import group_normalized_advantages_per_rollout
from outrider.algorithms.base import OffPolicyObjective
from outrider.algorithms.exploration import Empo2Settings
from outrider.algorithms.losses import clipped_surrogate_per_token, without_tips_mask
from outrider.algorithms.tips import (
    ModeSchedule,
    clean_reflection,
    never_shows_a_tip,
    record_text,
    render_tips,
    visited_states,
)
from outrider.config import load_settings, validate
from outrider.errors import InvalidResult
from outrider.memory.embedders import HashEmbedder
from outrider.memory.novelty import NoveltyStore, RandomDistillation
from outrider.metrics.registry import declared_metric
from outrider.trace import Trace
from outrider.training.data import TaskOrder
from outrider.training.settings import RunSettings
from outrider.types import Origin, Outcome, Task
from tests.algorithms.builders import add_node, build_episodes, empo2, new_trace, tip_hook
from tests.vectors import load_vector


@given(p=st.floats(0, 1), q=st.floats(0, 1), seed=st.integers(0, 5), windows=st.integers(1, 8))
def test_proportions_are_exact_over_whole_windows(p: float, q: float, seed: int, windows: int) -> None:
    schedule = ModeSchedule(memory_probability=p, off_policy_probability=q, seed=seed)
    num = 24 * windows
    counts = Counter(schedule.mode(group) for group in range(num))
    assert abs(num - counts["plain"] - p * num) <= 0.5 + 1e-9
    assert abs(counts["tips_off"] - q * (num - counts["plain"])) <= 0.5 + 1e-9


def test_the_proportions_of_the_paper_and_their_order() -> None:
    schedule = ModeSchedule(memory_probability=0.25, off_policy_probability=2 / 3, seed=0)
    modes = [schedule.mode(group) for group in range(240)]
    assert Counter(modes) == {"plain": 180, "tips_on": 20, "tips_off": 40}
    other = ModeSchedule(memory_probability=0.25, off_policy_probability=2 / 3, seed=1)
    assert modes != [other.mode(group) for group in range(240)] and modes[:24] != modes[24:48]


@pytest.mark.parametrize("sign", ["+", "-"])
def test_masked_clipped_loss(sign: str) -> None:
    inputs, everything = load_vector("empo2", "masked_clipped_loss")
    expected, (_, slopes) = everything[f"A={sign}1"], load_vector("empo2", "grad_weight_on_logp")
    new = torch.tensor(inputs["new_plain"], dtype=torch.float64, requires_grad=True)
    old = torch.tensor(inputs["old_tips"], dtype=torch.float64)
    tokens: dict[str, Any] = {"advantages": torch.full((4,), float(f"{sign}1"), dtype=torch.float64)}
    tokens |= {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 10.0}
    surrogate = clipped_surrogate_per_token(logprobs=new, old_logprobs=old, **tokens)
    losses = surrogate.losses.detach()
    np.testing.assert_allclose(losses, expected["token_loss"], atol=1e-5)
    masks = {
        kind: without_tips_mask(
            OffPolicyObjective(student_mask=kind, min_probability=inputs["delta"]), logprobs_T=new,
            with_tips_T=old, is_without_tips_T=torch.ones(4, dtype=torch.bool),
            turn_T=torch.zeros(4, dtype=torch.int64),
        )
        for kind in ("token", "turn", "none")
    }  # fmt: skip
    assert masks["token"].tolist() == everything["mask_paper_token_level"]
    assert masks["turn"].tolist() == everything["mask_released_code_row_level"]
    assert masks["none"].tolist() == [1.0] * 4
    mean = float((losses * masks["token"].detach()).sum() / 4)
    assert mean == pytest.approx(expected["paper_mean_over_all_T"], abs=1e-5)
    over_kept = mean * 4 / float(masks["token"].sum())
    assert over_kept == pytest.approx(expected["masked_mean_over_kept"], abs=1e-5)
    released = float((losses * masks["turn"].detach()).sum() / 4)
    assert released == pytest.approx(expected["released_code_seq_mask_mean"], abs=1e-5)
    (gradient,) = torch.autograd.grad(surrogate.losses.sum(), new)
    np.testing.assert_allclose(gradient, slopes[f"A={sign}1 table3"], atol=1e-5)
    # Algorithm 1 in the first step has a ratio of 1
    surrogate = clipped_surrogate_per_token(logprobs=new, old_logprobs=new.detach(), **tokens)
    (gradient,) = torch.autograd.grad(surrogate.losses.sum(), new)
    assert gradient.tolist() == slopes[f"A={sign}1 algorithm1"]


def test_the_released_mask_drops_whole_turns() -> None:
    inputs, expected = load_vector("empo2", "released_low_prob_mask")
    old = torch.tensor(inputs["old_log_probs"], dtype=torch.float64)
    real = torch.tensor(inputs["response_mask"], dtype=torch.bool)
    turn = torch.tensor([[0] * 4, [1] * 4])[real]
    objective = OffPolicyObjective(student_mask="turn", min_probability=math.exp(inputs["threshold"]))
    is_off = torch.ones(int(real.sum()), dtype=torch.bool)
    kept = without_tips_mask(
        objective, logprobs_T=old[real], with_tips_T=old[real], is_without_tips_T=is_off, turn_T=turn
    )
    found = torch.zeros(real.shape)
    found[real] = kept.float()
    assert found.tolist() == expected["new_response_mask"]


def test_tokens_of_other_rollouts_are_never_masked() -> None:
    low, is_off = torch.tensor([-9.0, -9.0]), torch.tensor([True, False])
    for kind in ("token", "turn"):
        objective = OffPolicyObjective(student_mask=kind)
        kept = without_tips_mask(
            objective, logprobs_T=low, with_tips_T=low, is_without_tips_T=is_off, turn_T=torch.tensor([0, 1])
        )
        assert kept.tolist() == [0.0, 1.0]


def test_intrinsic_reward_decides_where_returns_tie() -> None:
    inputs, expected = load_vector("empo2", "intrinsic_in_or_out_of_advantage")
    paper = [sum(inputs["extrinsic"][name]) + sum(inputs["intrinsic"][name]) for name in ("a", "b")]
    found = group_normalized_advantages_per_rollout(returns=paper)
    np.testing.assert_allclose(found.values, expected["paper_adv"], atol=1e-4)
    told = [["start", "kitchen"], ["start", "kitchen"], ["start", "kitchen"], ["start", "garden"]]
    trace = build_episodes([0.0] * 4, told)
    credit = empo2().assign_advantages(trace)
    assert credit.advantages.has_signal and credit.advantages.values[3] > 0 > credit.advantages.values[0]
    intrinsic = [leaf.intrinsic for leaf, _ in trace.rollouts()]
    assert intrinsic == pytest.approx([0.01 * (1 / 4 + 1 / 3)] * 3 + [0.01 * (1 / 4 + 1)])
    # the environment's record stays what it was
    assert [leaf.episode_return for leaf, _ in trace.rollouts()] == [0.0] * 4
    released = empo2(preset="empo2-released").assign_advantages(build_episodes([0.0] * 4, told))
    assert released.advantages.reason == "no_spread"


@pytest.mark.parametrize("num_turns", [1, 3])
def test_an_episode_has_as_many_states_as_turns_however_it_ended(num_turns: int) -> None:
    """Ended by the environment, with or without a last message, or cut by the loop after an observation."""
    states = ["start", "kitchen", "garden"][:num_turns]
    for ending in (None, "", "cellar"):
        trace = build_episodes([0.0], [states])
        node_id = trace.leaves[0].node_id
        if ending is not None:
            node_id = add_node(trace, node_id, Origin.ENVIRONMENT, ending).node_id
        assert node_id is not None and visited_states(trace.path(node_id)) == states


def test_a_state_is_the_observation_before_a_turn_and_never_a_tip() -> None:
    trace, node = new_trace(modes=("tips_on",)), None
    for origin, text in (
        (Origin.PROMPT, "start"), (Origin.MEMORY, "a tip"), (Origin.PROMPT, ""), (Origin.POLICY, "go"),
        (Origin.ENVIRONMENT, "kitchen"), (Origin.MEMORY, "another"), (Origin.ENVIRONMENT, ""),
        (Origin.POLICY, "take"), (Origin.POLICY, "and go on"), (Origin.ENVIRONMENT, "cut here"),
    ):  # fmt: skip
        node = add_node(trace, node, origin, text)
    assert node is not None
    assert visited_states(trace.path(node.node_id)) == ["start", "kitchen", "kitchen"]


@pytest.mark.parametrize("scope", ["task", "all"])
def test_novelty_is_counted_per_task_independent_of_the_scope_of_tips(scope: str) -> None:
    """A state that is known from another task is new in this one."""
    method = empo2(memory={"scope": scope})
    assert isinstance(method.novelty, NoveltyStore)
    for task in ("one", "other"):
        trace = build_episodes([0.0] * 4, [["start", "kitchen"]] * 4)
        trace.task = Task(key=task, question="q")
        method.assign_advantages(trace)
        assert [leaf.intrinsic for leaf, _ in trace.rollouts()] == pytest.approx([0.01 * 2 / 4] * 4)
        assert method.novelty.num_states(task) == 2
    assert method.novelty.num_states("all") == 0


@given(
    num_steps=st.integers(0, 9),
    tasks_per_step=st.integers(1, 5),
    num_tasks=st.integers(5, 30),
    scope=st.sampled_from(["task", "all"]),
)
def test_runs_in_which_no_task_repeats_never_show_a_tip(
    num_steps: int, tasks_per_step: int, num_tasks: int, scope: str
) -> None:
    order = TaskOrder(
        tasks=[Task(key=str(n), question="q") for n in range(num_tasks)],
        tasks_per_step=tasks_per_step,
        seed=1,
    )
    played_keys: list[str] = []
    cursor = 0
    for _ in range(num_steps):
        taken, cursor = order.draw(tasks_per_step, cursor=cursor)
        played_keys += [task.key for task in taken]
    repeats = len(set(played_keys)) < len(played_keys)
    for probability in (0.0, 0.3):
        chosen = validate(Empo2Settings, {"memory_probability": probability, "memory": {"scope": scope}})
        found = never_shows_a_tip(chosen, num_groups=num_steps * tasks_per_step, num_tasks=num_tasks)
        assert found == (num_steps > 0 and probability > 0 and scope == "task" and not repeats)


def test_the_shipped_recipes_show_tips() -> None:
    """Of the 1,000-product set, training has 5,401 goals; the shipped catalogue has fewer."""
    sizes = {"webshop-empo2": 5401, "scienceworld-cpu": 36, "scienceworld-empo2": 5}
    for name, num_tasks in sizes.items():
        recipe = load_settings(
            RunSettings, file=Path(__file__).parents[2] / "recipes" / f"{name}.toml", overrides=[]
        )
        assert isinstance(recipe.algorithm, Empo2Settings)
        num_groups = recipe.train.num_steps * recipe.train.tasks_per_step
        assert not never_shows_a_tip(recipe.algorithm, num_groups=num_groups, num_tasks=num_tasks), name


def test_equal_rollouts_get_equal_intrinsic_rewards() -> None:
    """Counted one after the other, the first of eight equal rollouts would win the group."""
    trace = build_episodes([0.0] * 4, [["start", "kitchen"]] * 4)
    assert empo2().assign_advantages(trace).advantages.reason == "no_spread"


def test_the_intrinsic_reward_falls_with_visits_as_the_released_one_with_retrieved_tips() -> None:
    """That code takes for n - 1 the tips that a query returned, at most 10; it logs the reward and does not
    train on it.
    """
    inputs, expected = load_vector("empo2", "intrinsic_reward_code")
    [key] = HashEmbedder().embed(["a kitchen"])
    found = [
        NoveltyStore().visit("t", [key] * (1 + min(10, number)))[0][-1]
        for number in inputs["similar_entries_in_buffer"]
    ]
    np.testing.assert_allclose(found, expected["reward"], atol=1e-6)


def test_every_different_action_of_an_episode_is_a_record() -> None:
    hook = tip_hook()
    trace = build_episodes(
        [7.04, 1.0], [["start", "room"], ["start", "room"]], reflections=["\n Try the door. \nmore", "   "]
    )
    hook.after_group(trace)
    tips = hook.memory.tips("t")
    assert [tip.text for tip in tips] == [
        f"Try the door. Here: act {turn}; final score 7.04." for turn in (0, 1)
    ]
    assert [(tip.score, tip.rollout_id) for tip in tips] == [(7.04, "t/0")] * 2
    assert (hook.counts["written"], hook.counts["empty"], hook.counts["stored"]) == (1, 1, 2)
    assert clean_reflection("") == "" and clean_reflection(" \n\n a \nb") == "a"


@given(lengths=st.lists(st.integers(1, 60), max_size=12), budget=st.integers(0, 400))
def test_tips_fit_their_budget_and_the_oldest_go_first(lengths: list[int], budget: int) -> None:
    hook = tip_hook()
    key = np.ones(256, np.float32)
    for number, length in enumerate(lengths):
        hook.memory.add("t", key, f"{number}:" + "x" * length, float(-number))
    hits = hook.memory.query("t", key, k=10)
    shown, text = hook._within(hits, budget)
    assert len(text) <= budget and (text == "") == (not shown)
    # one long record must not hide all others
    fitting = [hit for hit in hits if len(render_tips([hit.tip.text])) <= budget]
    kept = {hit.tip.tip_id for hit in shown}
    lost = {hit.tip.tip_id for hit in fitting} - kept
    assert all(one < other for one in lost for other in kept)
    assert shown == [hit for hit in fitting if hit.tip.tip_id in kept] and bool(shown) == bool(fitting)
    if lost:
        again = [hit for hit in fitting if hit.tip.tip_id in kept | {max(lost)}]
        assert len(render_tips([hit.tip.text for hit in again])) > budget


def test_presets_set_the_defaults_of_missing_keys() -> None:
    assert validate(Empo2Settings, {"preset": "empo2-alg1"}).old_context == "student"
    released = validate(Empo2Settings, {"preset": "empo2-released", "memory": {"capacity": 7}})
    assert (released.student_mask, released.memory.state_key, released.memory.capacity) == ("turn", "chat", 7)
    assert (
        validate(Empo2Settings, {"preset": "empo2-released", "student_mask": "none"}).student_mask == "none"
    )
    again = validate(Empo2Settings, released.model_dump(mode="json"))
    assert again == released


def test_a_thought_is_no_action_and_no_tip() -> None:
    action = "<think>long</think><action>go  home</action>"
    assert record_text("T", action=action, score=1.0) == "T Here: go home; final score 1."
    assert record_text("T", action="plain", score=0.5) == "T Here: plain; final score 0.5."
    for before in ("Here is a tip for the next attempt:\n\n", "**Tip:**\n", "```\n", "<tip>\n", "# Tip\n"):
        assert clean_reflection(f"{before}Look in the fridge first.\n") == "Look in the fridge first."
    for tip in (
        "Open the door:",
        "Rule of thumb: look around:\nb",
        "1. Check the units:\nb",
        ":" * 50_000 + "a\nb",
    ):
        assert clean_reflection(tip) == tip.partition("\n")[0]
    assert clean_reflection("<think>hm</think>\nTry left.") == "Try left."
    assert clean_reflection("<think>cut") == ""


RETURNS = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0]), min_size=2, max_size=8)


@given(
    returns=RETURNS,
    data=st.data(),
    advantage=st.sampled_from(["group_normalized", "group_centered", "leave_one_out"]),
)
def test_without_a_reward_for_ties_novelty_alone_is_no_signal(
    returns: list[float], data: st.DataObject, advantage: str
) -> None:
    rooms = st.lists(st.sampled_from(["hall", "attic", "cellar", "garage"]), min_size=1, max_size=4)
    seen = [data.draw(rooms) for _ in returns]
    settings_ = {"group_size": len(returns), "advantage": advantage, "intrinsic_coefficient": 0.01}
    paid, unpaid = empo2(**settings_), empo2(**settings_, intrinsic_where_tied=False)
    for _ in range(2):  # the second time states are known: they were counted all the same
        with_pay, without = (one.assign_advantages(build_episodes(returns, seen)) for one in (paid, unpaid))
        assert with_pay.measurements["tips/state_visits"] == without.measurements["tips/state_visits"]
        if len(set(returns)) == 1:
            assert not without.advantages.has_signal and not without.advantages.values.any()
            assert without.measurements["tips/intrinsic_mean"] == [0.0] * len(returns)
        else:
            np.testing.assert_array_equal(with_pay.advantages.values, without.advantages.values)


def test_a_negative_return_names_the_task_also_without_a_reward_for_ties() -> None:
    trace = build_episodes([-1.0, 1.0], [["hall"], ["attic"]])
    algorithm = empo2(advantage="mean_normalized", intrinsic_where_tied=False)
    with pytest.raises(InvalidResult, match=r"a rollout of task .* has -1$"):
        algorithm.assign_advantages(trace)


def test_a_group_with_one_return_gets_no_reward_for_ties() -> None:
    """Faults have no return, so the remaining rollout cannot be compared."""
    trace = build_episodes([0.0, 0.0], [["hall"], ["attic"]])
    trace.leaves[1] = replace(trace.leaves[1], episode_return=None, outcome=Outcome.ENVIRONMENT_FAULT)
    result = empo2(intrinsic_where_tied=False).assign_advantages(trace)
    assert result.measurements["tips/intrinsic_mean"] == [0.0]


def test_the_preset_for_small_models_bounds_what_novelty_adds() -> None:
    """The paper's division by the std makes novelty as large as a success. With this preset it is c per
    state, and 0 if returns tie.
    """
    chosen = validate(Empo2Settings, {"preset": "empo2-centered"})
    assert (chosen.advantage, chosen.intrinsic_where_tied) == ("group_centered", False)
    paper = validate(Empo2Settings, {})
    assert (paper.advantage, paper.intrinsic_where_tied) == ("group_normalized", True)
    tied = [["hall"], ["hall", "attic"], ["hall"], ["hall"]]

    def values(returns: list[float], **options: Any) -> np.ndarray:
        return empo2(**options).assign_advantages(build_episodes(returns, tied)).advantages.values

    assert np.abs(values([0.0] * 4)).max() > 1
    assert not values([0.0] * 4, preset="empo2-centered").any()
    found = values([0.0, 0.0, 0.0, 1.0], preset="empo2-centered")
    np.testing.assert_allclose(found, [-0.25, -0.25, -0.25, 0.75], atol=0.01 * 2)


def test_a_step_that_is_generated_again_counts_no_tip_twice() -> None:
    method = empo2()
    assert method.tips is not None
    method.tips.counts["dropped"] += 3  # rollouts of a step that a stop request ends
    method.discard_step()
    assert "counts" not in method.state()[0] and not method.tips.counts


def test_a_lost_last_row_does_not_change_a_return() -> None:
    inputs, expected = load_vector("empo2", "grpo_lost_tail")
    rewards = [list(map(float, own)) for own in inputs["step_rewards"].values()]
    assert [sum(own) for own in rewards] == expected["true_returns"]
    kept = [rewards[0][:-1], *rewards[1:]]
    used = group_normalized_advantages_per_rollout(returns=[sum(own) for own in kept])
    assert [sum(own) for own in kept] == expected["returns_used"]
    np.testing.assert_allclose(used.values, expected["advantage_used"], atol=1e-4)
    # the tree lacks the last turn, the returns do not
    trace = build_episodes([sum(own) for own in rewards], [["x"] * len(own) for own in kept])
    for (_, path), own in zip(trace.rollouts(), kept, strict=True):
        for node, reward in zip([node for node in path if node.trainable], own, strict=True):
            node.reward = reward
    credit = empo2(intrinsic_coefficient=0.0).assign_advantages(trace)
    np.testing.assert_allclose(credit.advantages.values, expected["true_advantage"], atol=1e-4)
    for (_, path), value in zip(trace.rollouts(), expected["true_advantage"], strict=True):
        for node in (node for node in path if node.trainable):
            assert node.credit == (pytest.approx(value, abs=1e-4),)


def test_an_episode_writes_one_record_for_every_different_action() -> None:
    """With the whole chat as the key; where the state is the key, the same action elsewhere is another
    record.
    """
    inputs, expected = load_vector("empo2", "memory_write_amplification")
    observations = ["hall", "kitchen", "kitchen", "yard"]
    for state_key, same_room, num_records in (
        ("chat", False, 3),
        ("observation", True, 3),
        ("observation", False, 4),
    ):
        hook = tip_hook(state_key=state_key)
        rooms = observations if same_room else ["hall", "kitchen", "cellar", "yard"]
        texts = {"reflections": [inputs["tip"]], "actions": inputs["actions"]}
        hook.after_group(build_episodes([inputs["episode_return"]], [rooms], **texts))
        tips = hook.memory.tips("t")
        assert len(tips) == num_records
        # not rounded: returns may lie in [0, 1]
        assert {tip.score for tip in tips} == {inputs["episode_return"]}
        assert {round(tip.score, 1) for tip in tips} == {expected["stored_score"]}
    assert expected["unique_entries"] == 3


@pytest.mark.parametrize(("num_actions", "name"), [(31, "31_unique_actions"), (2, "2_actions")])
def test_the_number_of_steps_until_a_buffer_is_full(num_actions: int, name: str) -> None:
    inputs, expected = load_vector("empo2", "memory_write_amplification")
    hook = tip_hook(capacity=inputs["capacity"])
    num_episodes = inputs["group"]
    observations = [[f"room {turn}" for turn in range(num_actions)]] * num_episodes
    reflections = [f"tip {number}" for number in range(num_episodes)]
    hook.after_group(build_episodes([0.0] * num_episodes, observations, reflections=reflections))
    episodes_an_iteration = inputs["batch_tasks"] * inputs["group"] / inputs["variations"]
    assert episodes_an_iteration == expected["episodes_per_variation_per_iteration"]
    records_an_iteration = hook.memory.num_added("t") / num_episodes * episodes_an_iteration
    assert hook.memory.capacity / records_an_iteration == pytest.approx(
        expected[f"iterations_to_fill_if_{name}"], abs=1e-4
    )


# Novelty by random network distillation

KNOWN = [["start", "kitchen"]] * 4


def intrinsic(trace: Trace) -> list[float]:
    return [leaf.intrinsic for leaf, _ in trace.rollouts()]


def test_the_default_counts() -> None:
    assert validate(Empo2Settings, {}).novelty == "count"
    assert isinstance(empo2().novelty, NoveltyStore)


def test_the_intrinsic_return_is_the_coefficient_times_the_scaled_errors() -> None:
    method, twin = (empo2(novelty="rnd", intrinsic_coefficient=0.5) for _ in range(2))
    states = [["start", "kitchen"], ["start", "kitchen"], ["start", "kitchen"], ["start", "garden"]]
    trace = build_episodes([0.0] * 4, states)
    result = method.assign_advantages(trace)
    assert isinstance(twin.novelty, RandomDistillation)
    texts = [text for own in states for text in own]
    errors = np.array(twin.novelty.errors(list(HashEmbedder().embed(texts))))
    worth = (errors / np.sqrt((errors**2).mean())).reshape(4, 2).sum(axis=1)
    assert intrinsic(trace) == pytest.approx(list(0.5 * worth))
    assert result.measurements["tips/novelty_error"] == pytest.approx(list(errors))
    assert declared_metric("tips/novelty_error") and "tips/state_visits" not in result.measurements
    assert result.advantages.has_signal and len(set(intrinsic(trace))) == 2


def test_a_new_room_is_worth_more_than_those_where_all_have_been() -> None:
    method = empo2(novelty="rnd")
    first = build_episodes([0.0] * 4, KNOWN)
    method.assign_advantages(first)
    for _ in range(30):
        method.assign_advantages(build_episodes([0.0] * 4, KNOWN))
    trace = build_episodes([0.0] * 4, [["start", "kitchen"]] * 3 + [["start", "garden"]])
    advantages = method.assign_advantages(trace).advantages.values
    assert intrinsic(trace)[0] < 0.05 * intrinsic(first)[0] and intrinsic(trace)[3] > 20 * intrinsic(trace)[0]
    assert advantages[3] > 0 > advantages[0]


def test_equal_rollouts_are_a_tie_and_the_predictor_also_learns_without_a_reward_for_ties() -> None:
    result = empo2(novelty="rnd").assign_advantages(build_episodes([0.0] * 4, KNOWN))
    assert result.advantages.reason == "no_spread"
    states = [["start", "kitchen"]] * 3 + [["start", "garden"]]
    paid, unpaid = empo2(novelty="rnd"), empo2(novelty="rnd", intrinsic_where_tied=False)
    for _ in range(3):
        seen, unseen = (one.assign_advantages(build_episodes([0.0] * 4, states)) for one in (paid, unpaid))
        assert seen.measurements["tips/novelty_error"] == unseen.measurements["tips/novelty_error"]
        assert seen.advantages.has_signal and not unseen.advantages.has_signal


def test_a_restored_algorithm_continues_bit_for_bit() -> None:
    whole, first, second = (empo2(novelty="rnd") for _ in range(3))
    for one in (whole, first):
        one.assign_advantages(build_episodes([0.0] * 4, KNOWN))
    second.restore(*first.state())
    states = [["start", "attic"], ["start"], ["start", "attic"], ["start", "kitchen"]]
    traces = [build_episodes([0.0, 1.0, 0.0, 0.0], states) for _ in range(2)]
    for one, trace in zip((whole, second), traces, strict=True):
        one.assign_advantages(trace)
    assert intrinsic(traces[0]) == intrinsic(traces[1])
