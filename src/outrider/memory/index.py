"""Exact nearest-neighbour search by cosine over unit vectors in memory.

Shape letters: N rows of the index, Q queries, D dimensions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Rows: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

_QUERY_BLOCK = 32  # bounds the score matrix: 32 x 169,489 float32 are 22 MB
_RESCORE_BLOCK = 4096
_SPARSE = 8  # with under one row in eight allowed, gathering them costs less than scoring all


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """Rows for a query, best first: ``rows`` int64 ``[K]``, ``similarities`` float64 ``[K]``; K may be 0."""

    rows: Rows
    similarities: NDArray[np.float64]


class GrowingMatrix:
    """Float32 rows that are only appended to ``rows_ND``, which it owns; earlier views stay as they are."""

    def __init__(self, rows_ND: NDArray[np.float32]) -> None:
        self._rows = rows_ND
        self._length = len(rows_ND)

    def append(self, rows_ND: NDArray[np.float32]) -> None:
        """Add rows at the end; amortised constant time per row."""
        end = self._length + len(rows_ND)
        if end > len(self._rows):
            grown = np.empty((max(end, len(self._rows) * 3 // 2), self._rows.shape[1]), np.float32)
            grown[: self._length] = self._rows[: self._length]
            self._rows = grown
        self._rows[self._length : end] = rows_ND
        self._length = end

    def view(self) -> NDArray[np.float32]:
        """The rows so far, ``[N, D]``, without a copy."""
        return self._rows[: self._length]


def search(
    vectors_ND: NDArray[np.float32],
    queries_QD: NDArray[np.float32],
    allowed: Sequence[Mask | None],
    *,
    k: int = 1,
) -> list[Matches]:
    """The ``k`` rows with the highest cosine for every query, exact, ties to the lower row.

    Rows and queries must be unit vectors. ``allowed`` holds one boolean mask ``[N]`` per query (None: all
    rows). Float32 products only nominate candidates; those within their rounding error of the k-th best are
    scored again in float64, so the answer depends neither on the BLAS library nor on which queries share a
    call.
    """
    if len(allowed) != len(queries_QD):
        raise ValueError(f"{len(queries_QD)} queries but {len(allowed)} masks")
    if k < 1:
        raise ValueError(f"k is {k}, must be at least 1")
    results: dict[int, Matches] = {}
    dense: list[int] = []
    for query, mask in enumerate(allowed):
        if mask is not None and np.count_nonzero(mask) * _SPARSE < len(vectors_ND):
            rows = np.flatnonzero(mask)
            results[query] = _best(
                vectors_ND, queries_QD[query], vectors_ND[rows] @ queries_QD[query], rows, k
            )
        else:
            dense.append(query)
    for start in range(0, len(dense), _QUERY_BLOCK):
        block = dense[start : start + _QUERY_BLOCK]
        for query, scores_N in zip(block, queries_QD[block] @ vectors_ND.T, strict=True):
            mask = allowed[query]
            if mask is not None:
                # Masked after the product: one product serves all queries of a block, whatever each may see.
                scores_N[~mask] = -np.inf
            results[query] = _best(vectors_ND, queries_QD[query], scores_N, None, k)
    return [results[query] for query in range(len(queries_QD))]


def _best(
    vectors_ND: NDArray[np.float32],
    query_D: NDArray[np.float32],
    scores: NDArray[np.float32],
    rows: Rows | None,
    k: int,
) -> Matches:
    """Pick the best ``k`` of approximately scored rows (``rows`` None: score i belongs to row i; -inf: not
    allowed).
    """
    if not len(scores):
        return Matches(rows=np.empty(0, np.int64), similarities=np.empty(0))
    if k == 1:
        threshold = float(scores.max())
    elif k < len(scores):
        threshold = float(np.partition(scores, len(scores) - k)[len(scores) - k])
    else:
        threshold = -np.inf
    # |fl(a.b) - a.b| <= D u |a||b| with u = 2**-24; twice, for the k-th best and for the candidate, and room
    # for norms near 1.
    margin = 2.5 * len(query_D) * 2.0**-24
    candidates = np.flatnonzero((scores >= threshold - margin) & (scores > -np.inf))
    if rows is not None:
        candidates = rows[candidates]
    exact = np.empty(len(candidates), np.float64)
    for start in range(0, len(candidates), _RESCORE_BLOCK):
        block = vectors_ND[candidates[start : start + _RESCORE_BLOCK]].astype(np.float64)
        exact[start : start + _RESCORE_BLOCK] = (block * query_D.astype(np.float64)).sum(axis=1)
    # Ties by row: equal scores have to give the same hits in every run.
    order = np.lexsort((candidates, -exact))[:k]
    return Matches(rows=candidates[order], similarities=exact[order])
