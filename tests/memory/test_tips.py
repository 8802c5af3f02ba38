"""The tip memory and the novelty store: the vectors, eviction, ties, and that what is saved comes back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.memory.novelty import NoveltyStore
from outrider.memory.tips import TipMemory

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "empo2.json").read_text())
KEY = np.array([1.0, 0.0], np.float32)


def visit(store: NoveltyStore, key: np.ndarray) -> int:
    """One visit of task ``t``."""
    return int(store.visit("t", [key])[1][0])


def test_similarity_filters_and_score_ranks() -> None:
    inputs, expected = VECTORS["memory_retrieve"]["inputs"], VECTORS["memory_retrieve"]["expected"]
    memory = TipMemory()
    for record in inputs["memory"]:
        memory.add("t", np.array(record["key"], np.float32), record["content"], record["score"])
    query = np.array(inputs["query"], np.float32)
    for k, wanted in ((inputs["top_k"], expected["returned"]), (2, expected["returned_top_k_2"])):
        hits = memory.query("t", query, k=k, min_similarity=inputs["threshold"])
        assert [hit.tip.text for hit in hits] == wanted
    assert memory.query("another task", query) == []
    by_similarity = memory.query("t", query, rank="similarity", min_similarity=0.5)
    assert [hit.tip.text for hit in by_similarity][:2] == ["a", "e_tie_with_c"]  # both 1: the older first


def test_the_oldest_is_evicted_and_an_evicted_text_can_be_added_again() -> None:
    inputs, expected = VECTORS["memory_evict"]["inputs"], VECTORS["memory_evict"]["expected"]
    memory = TipMemory(capacity=inputs["capacity"])
    for text in inputs["adds"]:
        memory.add("t", KEY, text, 0.0)
    assert [tip.text for tip in memory.tips("t")] == expected["final"]
    assert [tip.tip_id for tip in memory.tips("t")] == expected["ids"]
    assert memory.num_added("t") == expected["total_added"]


def test_one_text_may_be_kept_for_different_states() -> None:
    other = np.array([0.0, 1.0], np.float32)
    for by_state, wanted in ((True, [True, True, False]), (False, [True, False, False])):
        memory = TipMemory(per_state=by_state)
        assert [memory.add("t", key, "a", 0.0) for key in (KEY, other, KEY)] == wanted


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_similarity_at_the_bound_is_not_above_it(dtype: Any) -> None:
    """The cosine is 0.6 exactly; a key in single precision has it a little above."""
    memory = TipMemory()
    for text, key in (("at", [0.6, 0.8]), ("at, longer", [6.0, 8.0]), ("above", [0.6001, 0.8])):
        memory.add("t", np.array(key, dtype), text, 0.0)
    hits = memory.query("t", np.array([1.0, 0.0], dtype), min_similarity=0.6)
    assert [hit.tip.text for hit in hits] == ["above"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(order=st.permutations([[3.0, 4.0], [0.3, 0.4], [0.6, 0.8], [30.0, 40.0]]))
def test_equal_directions_tie_and_the_older_comes_first(dtype: Any, order: list[list[float]]) -> None:
    memory = TipMemory()
    for number, key in enumerate(order):
        memory.add("t", np.array(key, dtype), f"{number}", float(number))
    memory.add("t", np.array([0.61, 0.8], dtype), "nearer", 0.0)
    hits = memory.query("t", np.array([1.0, 0.0], dtype), rank="similarity", min_similarity=0.1)
    assert [hit.tip.text for hit in hits] == ["nearer", "0", "1", "2", "3"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_state_at_the_threshold_is_no_new_one(dtype: Any) -> None:
    store = NoveltyStore(threshold=0.8)
    assert [visit(store, np.array(key, dtype)) for key in ([1.0, 0.0], [0.8, 0.6], [0.799, 0.6])] == [
        1,
        2,
        1,
    ]
    store = NoveltyStore(threshold=1.0)
    assert [visit(store, np.array([1.0, 3.0, 7.0], dtype) * size) for size in (1.0, 1.0, 0.3)] == [
        1,
        2,
        3,
    ]


@given(angles=st.lists(st.floats(0, 3), min_size=1, max_size=12), cut=st.integers(0, 12))
def test_a_restored_novelty_store_counts_on_the_same_also_for_keys_in_double_precision(
    angles: list[float], cut: int
) -> None:
    keys = [np.array([np.cos(a), np.sin(a)]) for a in angles]
    whole, first, second = (NoveltyStore(threshold=0.99) for _ in range(3))
    wanted = [visit(whole, key) for key in keys]
    found = [visit(first, key) for key in keys[:cut]]
    second.restore(*first.snapshot())
    assert found + [visit(second, key) for key in keys[cut:]] == wanted
    for name, units in second._tasks.items():
        assert np.array_equal(units.units.view(), whole._tasks[name].units.view())


def test_a_newcomer_below_the_lowest_is_not_kept() -> None:
    memory = TipMemory(capacity=2, eviction="lowest_score")
    kept = [
        memory.add("t", KEY, text, score)
        for text, score in (("a", 5.0), ("b", 6.0), ("c", -100.0), ("d", 5.0))
    ]
    assert kept == [True, True, False, True]  # of equals the oldest goes
    assert [(tip.text, tip.score, tip.tip_id) for tip in memory.tips("t")] == [("b", 6.0, 1), ("d", 5.0, 3)]


def test_the_lowest_score_is_evicted() -> None:
    memory = TipMemory(capacity=2, eviction="lowest_score")
    for text, score in (("a", 1.0), ("b", -1.0), ("c", 0.0), ("d", 0.0)):
        memory.add("t", KEY, text, score)
    assert [tip.text for tip in memory.tips("t")] == ["a", "d"]


def test_a_reservoir_keeps_a_uniform_sample() -> None:
    kept = np.zeros(20)
    for seed in range(400):
        memory = TipMemory(capacity=5, eviction="reservoir", seed=seed)
        for number in range(20):
            memory.add("t", KEY, str(number), 0.0)
        assert len(memory.tips("t")) == 5
        kept[[int(tip.text) for tip in memory.tips("t")]] += 1
    assert np.abs(kept / 400 - 0.25).max() < 0.09  # 4 standard deviations of a share of 0.25 in 400


@pytest.mark.parametrize("key", [np.zeros(3, np.float32), np.array([np.nan, 1, 0], np.float32)])
def test_a_key_without_direction_is_refused(key: np.ndarray) -> None:
    with pytest.raises(ValueError, match="key"):
        TipMemory().add("t", key, "a", 0.0)
    with pytest.raises(ValueError, match="key"):
        visit(NoveltyStore(), key)


adds = st.lists(
    st.tuples(st.sampled_from("xy"), st.integers(0, 6), st.sampled_from("abcdefgh"), st.integers(-3, 3)),
    max_size=40,
)


@given(
    adds=adds,
    capacity=st.integers(1, 6),
    eviction=st.sampled_from(["fifo", "lowest_score", "reservoir"]),
    cut=st.integers(0, 40),
)
def test_restored_memories_continue_the_same(adds: list[Any], capacity: int, eviction: Any, cut: int) -> None:
    def fill(memory: TipMemory, novelty: NoveltyStore, part: list[Any]) -> None:
        for task, angle, text, score in part:
            key = np.array([np.cos(angle), np.sin(angle)], np.float32)
            memory.add(task, key, text, float(score))
            novelty.visit(task, [key])

    whole, counted = TipMemory(capacity=capacity, eviction=eviction, seed=3), NoveltyStore()
    fill(whole, counted, adds)
    first, seen = TipMemory(capacity=capacity, eviction=eviction, seed=3), NoveltyStore()
    fill(first, seen, adds[:cut])
    second, again = TipMemory(capacity=capacity, eviction=eviction, seed=3), NoveltyStore()
    for source, target in ((first, second), (seen, again)):
        state, arrays = source.snapshot()  # type: ignore[attr-defined]
        target.restore(json.loads(json.dumps(state)), arrays)  # type: ignore[attr-defined]
    fill(second, again, adds[cut:])
    assert second.snapshot()[0] == whole.snapshot()[0] and again.snapshot()[0] == counted.snapshot()[0]
    for one, other in ((second, whole), (again, counted)):
        mine, theirs = one.snapshot()[1], other.snapshot()[1]
        assert mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)
    assert all(len(whole.tips(task)) <= capacity for task in "xy")


def test_visits_of_the_nearest_state() -> None:
    inputs = VECTORS["intrinsic_reward_paper_readings"]["inputs"]
    expected = VECTORS["intrinsic_reward_paper_readings"]["expected"]
    store = NoveltyStore(threshold=inputs["cosine_threshold"])
    angles = np.deg2rad(inputs["state_angles_deg"])
    found = [1 / visit(store, np.array([np.cos(a), np.sin(a)], np.float32)) for a in angles]
    np.testing.assert_allclose(found, expected["visit_count_of_matched_state"], atol=1e-5)
    assert store.num_states("t") == expected["stored_states"] and store.num_states("u") == 0


@given(order=st.permutations(range(6)))
def test_visits_at_the_same_time_do_not_depend_on_their_order(order: list[int]) -> None:
    keys = [np.eye(3, dtype=np.float32)[number % 3] for number in range(6)]
    store = NoveltyStore()
    assert store.visit("t", [keys[i] for i in order])[1] == [2] * 6
    assert store.visit("t", [keys[0], keys[0], keys[1]]) == ([1 / 4, 1 / 4, 1 / 3], [4, 4, 3])


def test_equal_states_of_one_call_have_equal_counts_with_a_new_state_between_them() -> None:
    def at(degrees: float) -> np.ndarray:
        return np.array([np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))], np.float32)

    store = NoveltyStore(threshold=0.9)
    visit(store, at(0))
    _, counts = store.visit("t", [at(20), at(30), at(20)])
    assert counts[0] == counts[2]


@given(
    angles=st.lists(st.integers(0, 35), min_size=1, max_size=12),
    before=st.lists(st.integers(0, 35), max_size=5),
)
def test_equal_states_always_get_equal_counts(angles: list[int], before: list[int]) -> None:
    keys = {a: np.array([np.cos(a / 5), np.sin(a / 5)], np.float32) for a in {*angles, *before}}
    store = NoveltyStore(threshold=0.9)
    for angle in before:
        visit(store, keys[angle])
    _, counts = store.visit("t", [keys[a] for a in angles])
    assert all(len({c for a, c in zip(angles, counts, strict=True) if a == angle}) == 1 for angle in angles)
