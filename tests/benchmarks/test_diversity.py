"""Clusters of hybrid and on-policy rollouts, on points and runs made by hand."""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from benchmarks.diversity import main
from benchmarks.diversity_clusters import Points, count, num_clusters, projected, steps_by_task

from outrider.types import Origin, Outcome
from outrider.viewer.records import SCHEMA, StepFiles, TraceRow, step_file

needs_sklearn = pytest.mark.skipif(
    find_spec("sklearn") is None, reason="the extra 'diversity' is not installed"
)
ONE = {"settings": [(0.3, 2)], "num_components": 2, "num_draws": 3, "key": ("here",)}


def blobs(*centres: tuple[float, float], size: int = 4) -> Points:
    offsets = np.array([(0, 0), (0.1, 0), (0, 0.1), (0.1, 0.1)])[:size]
    return np.concatenate([np.asarray(centre) + offsets for centre in centres])


def rollout(number: int, texts: list[str], *, retrieved: str | None = None, mode: str) -> list[TraceRow]:
    """The policy's turns, each answered; a retrieved step behind the first answer."""
    said: list[tuple[Origin, str]] = []
    for text in texts:
        said += [(Origin.POLICY, text), (Origin.ENVIRONMENT, "an answer")]
    if retrieved is not None:
        said.insert(2, (Origin.BUFFER, retrieved))
    rows = [
        TraceRow(
            step=1, task_key="task", trace_id="1/0", node_id=100 * number + place,
            parent_id=100 * number + place - 1, rollout=number, origin=origin, text=text,
        )
        for place, (origin, text) in enumerate(said[:-1])
    ]  # fmt: skip
    rows[-1] = replace(
        rows[-1], outcome=Outcome.FINISHED, episode_return=0.0, hybrid=retrieved is not None,
        metadata=json.dumps({"mode": mode}),
    )  # fmt: skip
    return rows


def mapped(rows: list[TraceRow]) -> list[dict[str, object]]:
    """As a table of a run gives them."""
    names = ("task_key", "trace_id", "rollout", "origin", "text", "outcome", "hybrid", "metadata")
    return [{name: getattr(row, name) for name in names} for row in rows]


def made_run(folder: Path, *rollouts: list[TraceRow]) -> str:
    StepFiles(folder / "traces").write_rows(step_file(1), [row for rows in rollouts for row in rows], SCHEMA)
    (folder / "config.toml").write_text("seed = 0\n")
    return str(folder)


@needs_sklearn
def test_two_blobs_are_two_clusters_and_noise_is_none() -> None:
    assert num_clusters(blobs((0, 0), (5, 5)), eps=0.3, min_samples=2) == (2, 0.0)
    far = np.concatenate([blobs((0, 0), (5, 5)), [(9.0, 0.0), (0.0, 9.0)]])
    assert num_clusters(far, eps=0.3, min_samples=2) == (2, 0.2)
    assert num_clusters(far, eps=0.3, min_samples=1) == (4, 0.0)
    assert num_clusters(far, eps=20.0, min_samples=2) == (1, 0.0)
    assert num_clusters(far, eps=0.3, min_samples=5) == (0, 1.0)


@needs_sklearn
def test_components_keep_the_distances_of_a_plane_and_equal_points_are_one() -> None:
    flat = np.pad(blobs((0, 0), (5, 5)), ((0, 0), (0, 30)))
    points, held = projected(flat, 2)
    assert points.shape == (8, 2) and held == pytest.approx(1.0)
    distances = [np.linalg.norm(each[:, None] - each[None], axis=2) for each in (points, flat)]
    np.testing.assert_allclose(*distances, atol=1e-12)
    points, held = projected(np.ones((6, 30)), 2)
    assert num_clusters(points, eps=0.3, min_samples=2) == (1, 0.0) and held == 1.0


@needs_sklearn
def test_both_groups_are_counted_at_equal_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, fitted = [], []
    real_clusters, real_projected = num_clusters, projected
    monkeypatch.setattr(
        "benchmarks.diversity_clusters.num_clusters",
        lambda points, **named: (sizes.append(len(points)), real_clusters(points, **named))[1],
    )  # fmt: skip
    monkeypatch.setattr(
        "benchmarks.diversity_clusters.projected",
        lambda points, number: (fitted.append(len(points)), real_projected(points, number))[1],
    )  # fmt: skip
    [found] = count(blobs((0, 0), (5, 5), (5, 0), (0, 5), (9, 9)), blobs((0, 0), (5, 5), size=2), **ONE)
    assert sizes == [4] * 6 and fitted == [8] * 3  # the PCA sees both kinds, in equal parts
    assert found.clusters[1] == 2 and found.clusters[0] < 5
    [turned] = count(blobs((0, 0), (5, 5), size=2), blobs((0, 0), (5, 5), (5, 0)), **ONE)
    assert turned.clusters[0] == 2 and turned.difference == 2 - turned.clusters[1]


@needs_sklearn
def test_draws_depend_on_the_seed_alone() -> None:
    # a pair and lone points: a cluster only where both of the pair are drawn
    many = np.concatenate([[(0.0, 0.0), (0.1, 0.0)], 3.0 * np.eye(6, 2) + np.arange(1, 7)[:, None] * 4])
    few = blobs((0, 0))[:3]
    given = ONE | {"num_draws": 40}
    [first], [again] = (count(many, few, **given) for _ in range(2))
    [other] = count(many, few, **given, seed=1)
    assert first == again and first.clusters != other.clusters and 0 < first.clusters[0] < 1


def test_groups_are_read_from_the_records() -> None:
    rollouts = [
        rollout(0, ["look", "take"], retrieved="open", mode="hybrid"),
        rollout(1, ["look", "go"], mode="hybrid"),
        rollout(2, ["wait"], mode="on_policy"),
    ]
    rows = mapped([row for each in rollouts for row in each])
    steps = steps_by_task(rows)["task"]
    assert steps.hybrid == ("look", "take") and steps.on_policy == ("go", "look", "wait")
    by_mode = steps_by_task(rows, hybrid_by="mode")["task"]
    assert by_mode.hybrid == ("go", "look", "look", "take") and by_mode.on_policy == ("wait",)
    assert steps_by_task(rows, with_retrieved=True)["task"].hybrid == ("look", "open", "take")


@needs_sklearn
def test_the_table_of_made_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hybrid = [rollout(n, ["a b", "c d", "e f"], retrieved="x y", mode="hybrid") for n in range(2)]
    alike = [rollout(n, ["a b"] * 3, mode="on_policy") for n in range(2, 4)]
    rapo = made_run(tmp_path / "rapo", *hybrid, *alike)
    grpo = made_run(tmp_path / "grpo", *[rollout(n, ["a b", "c d"], mode="on_policy") for n in range(3)])
    given = ["--embedder", "hash", "--eps", "0.1", "--min-samples", "2"]
    assert main([rapo, *given]) == 0
    *_, row, _, summary = capsys.readouterr().out.splitlines()
    assert row == "| 0.1 | 2 | 3.00 | 1.00 | +2.00 [+2.00, +2.00] | +2.00 | 0% | 0% |"
    assert summary.startswith("1 of 1 tasks and steps, 6 to 6 turns of either kind (mean 6.0)")
    assert main([rapo, "--on-policy", grpo, *given]) == 0
    assert "| 3.00 | 2.00 | +1.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        (["--least-turns", "99"], 1, "no task has 99 turns of hybrid and of on-policy rollouts"),
        (["--steps", "7"], 1, "step-000007.parquet cannot be read: the file is missing"),
        (["--eps", "0"], 2, "eps, sizes and numbers of draws must be above 0"),
        (["--on-policy", "a", "b"], 2, "--on-policy: 2 runs beside 1; give one for each"),
        (["--least-turns", "1"], 2, "pip install 'outrider[diversity]'"),
    ],
)
def test_invalid_arguments_are_one_line(
    more: list[str], status: int, said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for module in ("cluster", "decomposition"):
        monkeypatch.setitem(sys.modules, f"sklearn.{module}", None)  # as if it were not installed
    kinds = [rollout(0, ["a"], mode="on_policy"), rollout(1, ["a", "b"], retrieved="x", mode="hybrid")]
    assert main([made_run(tmp_path / "run", *kinds), "--embedder", "hash", *more]) == status
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("benchmarks.diversity: ") and said in line
