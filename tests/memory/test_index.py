"""Exact search against brute force in float64, ties, masks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.memory.step_buffer import GrowingMatrix, search


def brute_force(vectors: np.ndarray, query: np.ndarray, mask: np.ndarray, k: int) -> list[tuple[int, float]]:
    scored = []
    for row in range(len(vectors)):
        if mask[row]:
            scored.append((-float(np.sum(vectors[row].astype(np.float64) * query.astype(np.float64))), row))
    return [(row, -score) for score, row in sorted(scored)[:k]]


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(1, 120),
    num_queries=st.integers(1, 5),
    k=st.integers(1, 12),
    kind=st.sampled_from(["spread", "ties", "near"]),
    share=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_search_equals_brute_force(
    seed: int, num_rows: int, num_queries: int, k: int, kind: str, share: float
) -> None:
    """``ties`` repeats few directions; ``near`` puts rows within float32 rounding of each other."""
    random = np.random.Generator(np.random.PCG64(seed))
    dim = 48
    if kind == "ties":
        vectors = unit(random.integers(-1, 2, (4, dim)) + 0.01)[random.integers(0, 4, num_rows)]
    elif kind == "near":
        vectors = unit(np.ones((num_rows, dim)) + 1e-7 * random.standard_normal((num_rows, dim)))
    else:
        vectors = unit(random.standard_normal((num_rows, dim)))
    queries = np.concatenate([unit(random.standard_normal((num_queries, dim))), vectors[:1]])
    masks = [random.random(num_rows) < share for _ in queries]
    found = search(vectors, queries, masks, k=k)
    for query, mask, match in zip(queries, masks, found, strict=True):
        rows, cosines = (values.tolist() for values in match)
        assert list(zip(rows, cosines, strict=True)) == brute_force(vectors, query, mask, k)


def test_result_does_not_depend_on_the_batch() -> None:
    random = np.random.Generator(np.random.PCG64(3))
    vectors, queries = unit(random.standard_normal((3000, 64))), unit(random.standard_normal((70, 64)))
    together = search(vectors, queries, [None] * 70, k=3)
    for query, match in zip(queries, together, strict=True):
        [alone] = search(vectors, query[None], [None], k=3)
        assert all(np.array_equal(one, other) for one, other in zip(alone, match, strict=True))


def test_empty_index_and_empty_mask_give_nothing() -> None:
    query = np.ones((1, 4), np.float32) / 2
    assert len(search(np.empty((0, 4), np.float32), query, [None])[0][0]) == 0
    assert len(search(query, query, [np.zeros(1, bool)])[0][0]) == 0


def test_arguments_are_checked() -> None:
    query = np.ones((1, 4), np.float32) / 2
    with pytest.raises(ValueError, match="masks"):
        search(query, query, [])
    with pytest.raises(ValueError, match="k is 0"):
        search(query, query, [None], k=0)


def test_growing_matrix_leaves_earlier_views_alone() -> None:
    matrix = GrowingMatrix(np.empty((0, 2), np.float32))
    matrix.append(np.array([[1, 2]], np.float32))
    early = matrix.view()
    for value in range(50):
        matrix.append(np.full((3, 2), value, np.float32))
    assert early.tolist() == [[1, 2]]
    assert (
        matrix.view().shape == (151, 2)
        and matrix.view()[-1].tolist() == [49, 49]
        and matrix.view()[1].tolist() == [0, 0]
    )
