"""EMPO²: the vectors, exact mode proportions, tips inside their budgets, novelty that does not depend on the
rollouts' order.
"""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

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
    MemorySettings,
    ModeSchedule,
    TipHook,
    clean_reflection,
    never_shows_a_tip,
    record_text,
    render_tips,
    visited_states,
)
from outrider.config import load_settings, validate
from outrider.memory.embedders import HashEmbedder
from outrider.memory.novelty import NoveltyStore
from outrider.trace import Trace
from outrider.training.data import TaskOrder
from outrider.training.settings import RunSettings
from outrider.types import Message, Origin, Outcome, Task
from tests.algorithms.tip_groups import algorithm, played, vector


@given(p=st.floats(0, 1), q=st.floats(0, 1), seed=st.integers(0, 5), windows=st.integers(1, 8))
def test_proportions_are_exact_over_whole_windows(p: float, q: float, seed: int, windows: int) -> None:
    schedule = ModeSchedule(memory_probability=p, off_policy_probability=q, seed=seed)
    num = 24 * windows
    counts = Counter(schedule.mode(group) for group in range(num))
    assert abs(num - counts["plain"] - p * num) <= 0.5 + 1e-9
    assert abs(counts["tips_off"] - q * (num - counts["plain"])) <= 0.5 + 1e-9


def test_the_paper_s_proportions_and_their_order() -> None:
    schedule = ModeSchedule(memory_probability=0.25, off_policy_probability=2 / 3, seed=0)
    modes = [schedule.mode(group) for group in range(240)]
    assert Counter(modes) == {"plain": 180, "tips_on": 20, "tips_off": 40}
    assert modes != [
        ModeSchedule(memory_probability=0.25, off_policy_probability=2 / 3, seed=1).mode(g)
        for g in range(240)
    ]
    assert modes[:24] != modes[24:48]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_masked_clipped_loss(sign: float) -> None:
    given_, expected = vector("masked_clipped_loss")
    new = torch.tensor(given_["new_plain"], dtype=torch.float64, requires_grad=True)
    old = torch.tensor(given_["old_tips"], dtype=torch.float64)
    surrogate = clipped_surrogate_per_token(
        logprobs=new, old_logprobs=old, advantages=torch.full((4,), sign, dtype=torch.float64), clip_low=0.2,
        clip_high=0.3, dual_clip=10.0,
    )  # fmt: skip
    wanted = expected["A=+1" if sign > 0 else "A=-1"]
    np.testing.assert_allclose(surrogate.losses.detach().numpy(), wanted["token_loss"], atol=1e-5)
    is_off, turn = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64)
    masks = {
        kind: without_tips_mask(
            OffPolicyObjective(student_mask=kind, min_probability=given_["delta"]), logprobs_T=new,
            with_tips_T=old, is_without_tips_T=is_off, turn_T=turn,
        )
        for kind in ("token", "turn", "none")
    }  # fmt: skip
    assert masks["token"].tolist() == expected["mask_paper_token_level"]
    assert (
        masks["turn"].tolist() == expected["mask_released_code_row_level"]
        and masks["none"].tolist() == [1.0] * 4
    )
    mean = float((surrogate.losses.detach() * masks["token"].detach()).sum() / 4)
    assert mean == pytest.approx(wanted["paper_mean_over_all_T"], abs=1e-5)
    assert mean * 4 / float(masks["token"].sum()) == pytest.approx(wanted["masked_mean_over_kept"], abs=1e-5)
    released = float((surrogate.losses.detach() * masks["turn"].detach()).sum() / 4)
    assert released == pytest.approx(wanted["released_code_seq_mask_mean"], abs=1e-5)
    surrogate.losses.sum().backward()
    slopes = vector("grad_weight_on_logp")[1]["A=+1 table3" if sign > 0 else "A=-1 table3"]
    assert new.grad is not None
    np.testing.assert_allclose(new.grad.numpy(), slopes, atol=1e-5)
    # Algorithm 1 at the first step: ratio 1
    student = torch.tensor(given_["new_plain"], dtype=torch.float64, requires_grad=True)
    clipped_surrogate_per_token(
        logprobs=student, old_logprobs=student.detach(),
        advantages=torch.full((4,), sign, dtype=torch.float64), clip_high=0.3, dual_clip=10.0,
    ).losses.sum().backward()  # fmt: skip
    slopes = vector("grad_weight_on_logp")[1]["A=+1 algorithm1" if sign > 0 else "A=-1 algorithm1"]
    assert student.grad is not None and student.grad.tolist() == slopes


def test_the_released_mask_takes_whole_turns() -> None:
    given_, expected = vector("released_low_prob_mask")
    old = torch.tensor(given_["old_log_probs"], dtype=torch.float64)
    real = torch.tensor(given_["response_mask"], dtype=torch.bool)
    turn = torch.tensor([[0] * 4, [1] * 4])[real]
    objective = OffPolicyObjective(student_mask="turn", min_probability=math.exp(given_["threshold"]))
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
    given_, expected = vector("intrinsic_in_or_out_of_advantage")
    paper = [sum(given_["extrinsic"][name]) + sum(given_["intrinsic"][name]) for name in ("a", "b")]
    found = group_normalized_advantages_per_rollout(returns=paper)
    np.testing.assert_allclose(found.values, expected["paper_adv"], atol=1e-4)
    told = [["start", "kitchen"], ["start", "kitchen"], ["start", "kitchen"], ["start", "garden"]]
    trace = played([0.0] * 4, told)
    credit = algorithm().assign_advantages(trace)
    assert credit.advantages.has_signal and credit.advantages.values[3] > 0 > credit.advantages.values[0]
    intrinsic = [leaf.intrinsic for leaf, _ in trace.rollouts()]
    assert intrinsic == pytest.approx([0.01 * (1 / 4 + 1 / 3)] * 3 + [0.01 * (1 / 4 + 1)])
    # the environment's record stays what it was
    assert [leaf.episode_return for leaf, _ in trace.rollouts()] == [0.0] * 4
    released = algorithm(preset="empo2-released").assign_advantages(played([0.0] * 4, told))
    assert released.advantages.reason == "no_spread"


@pytest.mark.parametrize("num_turns", [1, 3])
def test_an_episode_has_as_many_states_as_turns_however_it_ended(num_turns: int) -> None:
    """Ended by the environment, with or without a last word, or cut by the loop behind an observation that
    nobody answered.
    """
    told = ["start", "kitchen", "garden"][:num_turns]
    for ending in (None, "", "cellar"):
        trace = played([0.0], [told])
        node_id = trace.leaves[0].node_id
        if ending is not None:
            said = Message(role="user", content=ending)
            node_id = trace.append(
                parent=node_id, origin=Origin.ENVIRONMENT, token_ids=(1,), message=said
            ).node_id
        assert node_id is not None and visited_states(trace.path(node_id)) == told


def test_a_state_is_what_the_turn_acted_on_and_never_a_tip() -> None:
    trace = Trace(task=Task(key="t", question="q"), modes=("tips_on",))
    parent = None
    for origin, text in (
        (Origin.PROMPT, "start"), (Origin.MEMORY, "a tip"), (Origin.PROMPT, ""), (Origin.POLICY, "go"),
        (Origin.ENVIRONMENT, "kitchen"), (Origin.MEMORY, "another"), (Origin.ENVIRONMENT, ""),
        (Origin.POLICY, "take"), (Origin.POLICY, "and go on"), (Origin.ENVIRONMENT, "cut here"),
    ):  # fmt: skip
        values = (0.0,) if origin is Origin.POLICY else ()
        node = trace.append(
            parent=parent, origin=origin, token_ids=(1,), message=Message(role="user", content=text),
            logprobs=values, entropies=values,
        )  # fmt: skip
        parent = node.node_id
    assert parent is not None and visited_states(trace.path(parent)) == ["start", "kitchen", "kitchen"]


@pytest.mark.parametrize("scope", ["task", "all"])
def test_novelty_is_a_task_s_own_whatever_the_tips_scope_is(scope: str) -> None:
    """A state that another task has seen a hundred times may be new here, and the reward is for what is new
    here.
    """
    method = algorithm(memory={"scope": scope})
    assert isinstance(method.novelty, NoveltyStore)
    for task in ("one", "other"):
        trace = played([0.0] * 4, [["start", "kitchen"]] * 4)
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
def test_a_run_knows_whether_a_task_ever_finds_its_own_tips(
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


def test_equal_rollouts_get_equal_intrinsic_rewards_whatever_their_number() -> None:
    """Counted one after the other, the first of eight equal rollouts would win the group."""
    trace = played([0.0] * 4, [["start", "kitchen"]] * 4)
    assert algorithm().assign_advantages(trace).advantages.reason == "no_spread"


def test_the_intrinsic_reward_falls_with_visits_as_the_released_one_with_retrieved_tips() -> None:
    """That code takes for n - 1 the tips that a query returned, at most 10; it logs the reward and does not
    train on it.
    """
    given_, expected = vector("intrinsic_reward_code")
    [key] = HashEmbedder().embed(["a kitchen"])
    found = [
        NoveltyStore().visit("t", [key] * (1 + min(10, number)))[0][-1]
        for number in given_["similar_entries_in_buffer"]
    ]
    np.testing.assert_allclose(found, expected["reward"], atol=1e-6)


def test_every_different_action_of_an_episode_is_a_record() -> None:
    hook = TipHook(MemorySettings(), embedder=HashEmbedder(), count_tokens=len, seed=0)
    trace = played(
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
    hook = TipHook(MemorySettings(), embedder=HashEmbedder(), count_tokens=len, seed=0)
    key = np.ones(256, np.float32)
    for number, length in enumerate(lengths):
        hook.memory.add("t", key, f"{number}:" + "x" * length, float(-number))
    hits = hook.memory.query("t", key, k=10)
    shown, text = hook._within(hits, budget)
    assert len(text) <= budget and (text == "") == (not shown)
    # one long record must not hide all others
    fitting = [hit for hit in hits if len(render_tips([hit.tip])) <= budget]
    kept = {hit.tip.tip_id for hit in shown}
    lost = {hit.tip.tip_id for hit in fitting} - kept
    assert all(one < other for one in lost for other in kept)
    assert shown == [hit for hit in fitting if hit.tip.tip_id in kept] and bool(shown) == bool(fitting)
    if lost:
        again = [hit for hit in fitting if hit.tip.tip_id in kept | {max(lost)}]
        assert len(render_tips([hit.tip for hit in again])) > budget


def test_presets_fill_what_is_not_given() -> None:
    assert validate(Empo2Settings, {"preset": "empo2-alg1"}).old_context == "student"
    released = validate(Empo2Settings, {"preset": "empo2-released", "memory": {"capacity": 7}})
    assert (released.student_mask, released.memory.state_key, released.memory.capacity) == ("turn", "chat", 7)
    assert (
        validate(Empo2Settings, {"preset": "empo2-released", "student_mask": "none"}).student_mask == "none"
    )
    again = validate(Empo2Settings, released.model_dump(mode="json"))
    assert again == released


def test_a_thought_is_no_action_and_no_tip() -> None:
    assert (
        record_text("T", action="<think>long</think><action>go  home</action>", score=1.0)
        == "T Here: go home; final score 1."
    )
    assert record_text("T", action="plain", score=0.5) == "T Here: plain; final score 0.5."
    assert (
        clean_reflection("<think>hm</think>\nTry left.") == "Try left."
        and clean_reflection("<think>cut") == ""
    )


RETURNS = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0]), min_size=2, max_size=8)


@given(
    returns=RETURNS,
    data=st.data(),
    advantage=st.sampled_from(["group_normalized", "group_centered", "leave_one_out"]),
)
def test_without_pay_for_ties_novelty_never_makes_a_signal_of_its_own(
    returns: list[float], data: st.DataObject, advantage: str
) -> None:
    rooms = st.lists(st.sampled_from(["hall", "attic", "cellar", "garage"]), min_size=1, max_size=4)
    seen = [data.draw(rooms) for _ in returns]
    settings_ = {"group_size": len(returns), "advantage": advantage, "intrinsic_coefficient": 0.01}
    paid, unpaid = algorithm(**settings_), algorithm(**settings_, intrinsic_where_tied=False)
    for _ in range(2):  # the second time states are known: they were counted all the same
        with_pay, without = (one.assign_advantages(played(returns, seen)) for one in (paid, unpaid))
        assert with_pay.measurements["tips/state_visits"] == without.measurements["tips/state_visits"]
        if len(set(returns)) == 1:
            assert not without.advantages.has_signal and not without.advantages.values.any()
            assert without.measurements["tips/intrinsic_mean"] == [0.0] * len(returns)
        else:
            np.testing.assert_array_equal(with_pay.advantages.values, without.advantages.values)


def test_a_group_with_one_return_is_no_tie_that_pays() -> None:
    """Faults have no return; what is left of such a group cannot be told apart."""
    trace = played([0.0, 0.0], [["hall"], ["attic"]])
    trace.leaves[1] = replace(trace.leaves[1], episode_return=None, outcome=Outcome.ENVIRONMENT_FAULT)
    assert algorithm(intrinsic_where_tied=False).assign_advantages(trace).measurements[
        "tips/intrinsic_mean"
    ] == [0.0]


def test_the_preset_for_small_models_bounds_what_novelty_adds() -> None:
    """The paper's division by the std makes novelty as large as a success; this leaves it c a state, and 0
    where returns tie.
    """
    chosen = validate(Empo2Settings, {"preset": "empo2-centered"})
    assert (chosen.advantage, chosen.intrinsic_where_tied) == ("group_centered", False)
    paper = validate(Empo2Settings, {})
    assert (paper.advantage, paper.intrinsic_where_tied) == ("group_normalized", True)
    tied = [["hall"], ["hall", "attic"], ["hall"], ["hall"]]
    assert np.abs(algorithm().assign_advantages(played([0.0] * 4, tied)).advantages.values).max() > 1
    assert (
        not algorithm(preset="empo2-centered")
        .assign_advantages(played([0.0] * 4, tied))
        .advantages.values.any()
    )
    found = (
        algorithm(preset="empo2-centered")
        .assign_advantages(played([0.0, 0.0, 0.0, 1.0], tied))
        .advantages.values
    )
    np.testing.assert_allclose(found, [-0.25, -0.25, -0.25, 0.75], atol=0.01 * 2)


def test_a_step_that_is_generated_again_counts_no_tip_twice() -> None:
    method = algorithm()
    assert method.tips is not None
    method.tips.counts["dropped"] += 3  # rollouts of a step that a stop request ends
    method.discard_step()
    assert "counts" not in method.state()[0] and not method.tips.counts
