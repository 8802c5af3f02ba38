"""ARPO and AEPO end to end with a tiny real model: whole groups, shared calls, equal bits, a report."""

import json
from pathlib import Path

import pytest

from outrider.config import load_settings
from outrider.errors import ConfigError
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import run_training
from outrider.viewer.records import TraceReader
from tests.training.tool_run import write_tool_run

BRANCHING = 'type = "arpo"\ngroup_size = 8\nfirst_wave = 5\nbase_probability = 0.8\nwindow = 4'


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tool_run(tmp_path_factory.mktemp("branching"))
    path.write_text(path.read_text().replace('type = "rapo"\ngroup_size = 4\nnum_hybrid = 2', BRANCHING))
    return path


def train(recipe: Path, name: str, *overrides: str) -> Path:
    settings = load_settings(
        RunSettings,
        file=recipe,
        overrides=["evaluation.every=0", "train.num_steps=2", "train.tasks_per_step=6", *overrides],
    )
    run = recipe.parent / name
    run_training((RunDirectory.create(run, settings), settings), progress="none", on_start=lambda stop: None)
    return run


def steps(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def assert_forks_share_rows(run: Path) -> None:
    rows = TraceReader(run / "traces").read(1)
    children: dict[tuple[str, int], int] = {}
    for row in rows:
        children[row.trace_id, row.parent_id] = children.get((row.trace_id, row.parent_id), 0) + (
            row.origin == "policy"
        )
    prompts = {(row.trace_id, row.node_id) for row in rows if row.origin == "prompt"}
    assert any(count > 1 for place, count in children.items() if place not in prompts)


@pytest.mark.parametrize(
    "preset",
    [
        "arpo",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("aepo-released", "arpo-released", "aepo")),
    ],
)
def test_a_preset_trains_whole_groups_that_share_calls(recipe: Path, preset: str) -> None:
    base = 0.0 if preset == "aepo-released" else 1.0  # its rule forks above the base, the others below it
    run = train(recipe, preset, f"algorithm.preset={preset}", f"algorithm.base_probability={base}")
    records = steps(run)
    assert len(records) == 2
    assert all(record["rollout/num"] == 48 and record["rollout/num_masked"] == 0 for record in records)
    assert sum(record.get("branch/num_forks", 0) for record in records) > 0
    for record in records:
        on_paths = record["rollout/tool_calls_per_leaf"] * 48
        assert record["rollout/num_tool_calls"] + record["rollout/num_tool_calls_shared"] == pytest.approx(
            on_paths
        )
    assert sum(record["rollout/num_tool_calls_shared"] for record in records) > 0
    if preset == "arpo":
        assert_forks_share_rows(run)
    page = (run / "report.html").read_text()
    assert "Branching groups" in page and "left in front of it" in page and "advantage" in page


def test_branching_and_retrieval_in_one_run(tmp_path: Path) -> None:
    """The tree holds retrieved steps and forks; leaves of one token have ratio scales of their own."""
    recipe = write_tool_run(tmp_path / "both")
    branch = [
        "algorithm.branch.first_wave=5",
        "algorithm.branch.base_probability=1.0",
        "algorithm.group_size=8",
    ]
    run = train(recipe, "run", "algorithm.num_hybrid=4", *branch)
    records = steps(run)
    assert sum(record["branch/num_forks"] for record in records) > 0
    assert sum(record["retrieval/num_inserted"] for record in records) > 0
    assert all(record["grad/num_skipped"] == 0 for record in records)
    with pytest.raises(ConfigError, match="ratio_weight = 0"):
        load_settings(RunSettings, file=recipe, overrides=[*branch, "algorithm.branch.attribution=hard"])


def test_branching_is_refused_where_a_fork_would_not_be_exact() -> None:
    branching = ["environment.type=scienceworld", "algorithm.type=arpo"]
    load_settings(RunSettings, file=None, overrides=branching)
    with pytest.raises(ConfigError, match="replay differently: find-animal"):
        load_settings(RunSettings, file=None, overrides=[*branching, "environment.deterministic=false"])
