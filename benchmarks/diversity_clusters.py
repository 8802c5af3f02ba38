"""Clusters of step embeddings at equal numbers of steps: PCA on both kinds together, then DBSCAN on each.

Pure functions over texts and vectors; :mod:`benchmarks.diversity` reads the runs.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError
from outrider.seeding import stream
from outrider.types import Origin

Points: TypeAlias = NDArray[np.float64]
HybridBy: TypeAlias = Literal["retrieved", "mode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Texts of the steps of a task in one training step, sorted, so that the order of rollouts does not
    matter.
    """

    hybrid: tuple[str, ...]
    on_policy: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Means over draws, hybrid first: number of clusters, and share of steps in no cluster."""

    clusters: tuple[float, float]
    noise: tuple[float, float]
    variance_kept: float

    @property
    def difference(self) -> float:
        """Number of clusters of hybrid minus on-policy rollouts."""
        return self.clusters[0] - self.clusters[1]


def steps_by_task(
    rows: Iterable[Mapping[str, Any]], *, hybrid_by: HybridBy = "retrieved", with_retrieved: bool = False
) -> dict[str, Steps]:
    """The policy's turns by task. A turn that rollouts share counts once, for the first of them.

    A rollout is hybrid when a step was retrieved in it, or with ``hybrid_by="mode"`` when it was to retrieve,
    whether or not it did. ``with_retrieved`` counts the retrieved steps themselves too.
    """
    kept = list(rows)
    is_hybrid = {
        (row["trace_id"], row["rollout"]): (
            row["hybrid"] if hybrid_by == "retrieved" else json.loads(row["metadata"]).get("mode") == "hybrid"
        )
        for row in kept
        if row["outcome"] is not None
    }
    origins = {Origin.POLICY.value} | ({Origin.BUFFER.value} if with_retrieved else set())
    texts: dict[str, dict[bool, list[str]]] = {}
    for row in kept:
        if row["origin"] in origins:
            kind = bool(is_hybrid[row["trace_id"], row["rollout"]])
            texts.setdefault(row["task_key"], {True: [], False: []})[kind].append(row["text"])
    return {
        task: Steps(hybrid=tuple(sorted(found[True])), on_policy=tuple(sorted(found[False])))
        for task, found in texts.items()
    }


def num_clusters(points: Points, *, eps: float, min_samples: int) -> tuple[int, float]:
    """DBSCAN's clusters (Euclidean), and the share of points that it calls noise, which are no cluster."""
    labels = _sklearn("cluster").DBSCAN(eps=eps, min_samples=min_samples).fit(points).labels_
    return len(set(labels.tolist()) - {-1}), float((labels == -1).mean())


def projected(points: Points, num_components: int) -> tuple[Points, float]:
    """Return the first principal components and their share of the variance (1 for equal points)."""
    if not np.ptp(points, axis=0).any():
        return np.zeros((len(points), 1)), 1.0
    number = min(num_components, *points.shape)
    pca = _sklearn("decomposition").PCA(n_components=number, svd_solver="full")
    return pca.fit_transform(points), float(pca.explained_variance_ratio_.sum())


def count(
    hybrid: Points,
    on_policy: Points,
    *,
    settings: Sequence[tuple[float, int]],
    num_components: int,
    num_draws: int,
    key: Sequence[str | int],
    seed: int = 0,
) -> list[Count]:
    """Return one :class:`Count` for each pair of eps and min_samples.

    Each draw has as many steps of each group as the smaller one, without replacement, and fits the PCA on
    them, so that both groups have equal weight.
    """
    size = min(len(hybrid), len(on_policy))
    draws = stream(seed, "diversity", *key)
    found: list[list[tuple[tuple[int, float], tuple[int, float]]]] = [[] for _ in settings]
    kept = []
    for _ in range(num_draws):
        drawn = [one[np.sort(draws.choice(len(one), size, replace=False))] for one in (hybrid, on_policy)]
        points, variance = projected(np.concatenate(drawn), num_components)
        kept.append(variance)
        for (eps, least), pairs in zip(settings, found, strict=True):
            first, second = (
                num_clusters(part, eps=eps, min_samples=least) for part in (points[:size], points[size:])
            )
            pairs.append((first, second))
    return [
        Count(
            clusters=(fmean(one[0] for one, _ in pairs), fmean(other[0] for _, other in pairs)),
            noise=(fmean(one[1] for one, _ in pairs), fmean(other[1] for _, other in pairs)),
            variance_kept=fmean(kept),
        )
        for pairs in found
    ]


def _sklearn(module: str) -> Any:
    """Import scikit-learn, which is an extra because only this benchmark uses it."""
    from importlib import import_module

    try:
        return import_module(f"sklearn.{module}")
    except ImportError as error:
        raise ConfigError(
            f"DBSCAN needs the extra 'diversity': pip install 'outrider[diversity]' ({error})"
        ) from error
