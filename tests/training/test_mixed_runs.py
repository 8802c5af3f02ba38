"""LUFFY, RolloutReplay and Tree-GRPO end to end with a tiny real model: presets, equal bits where they are
promised, files on disk.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.config import load_settings
from outrider.errors import ConfigError, DataError
from outrider.training.replay import replay_step
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import run_training
from outrider.types import Origin
from outrider.viewer.records import TraceReader
from tests.training.tool_run import write_demonstrations, write_tool_run


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tool_run(tmp_path_factory.mktemp("mixed"))
    path.write_text(path.read_text().replace("num_hybrid = 2\n", ""))
    write_demonstrations(path.parent / "shown.jsonl")
    return path


def train(recipe: Path, name: str, *overrides: str, num_steps: int = 3) -> Path:
    settings = load_settings(
        RunSettings, file=recipe, overrides=["evaluation.every=0", f"train.num_steps={num_steps}", *overrides]
    )
    run = recipe.parent / name
    run_training((RunDirectory.create(run, settings), settings), progress="none", on_start=lambda stop: None)
    return run


def luffy(recipe: Path) -> tuple[str, str]:
    return "algorithm.type=luffy", f"algorithm.demonstrations={recipe.parent / 'shown.jsonl'}"


def steps(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def same_weights(one: Path, other: Path, *, step: int = 3) -> bool:
    first, second = (
        load_file(run / "checkpoints" / f"step-{step:06d}" / "masters.safetensors") for run in (one, other)
    )
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("preset", ["luffy-paper", pytest.param("luffy-official", marks=pytest.mark.slow)])
def test_luffy_trains_on_demonstrations_that_are_in_no_other_measure(recipe: Path, preset: str) -> None:
    run = train(
        recipe,
        preset,
        *luffy(recipe),
        f"algorithm.preset={preset}",
        "optimizer.learning_rate=3e-3",
        num_steps=6,
    )
    records = steps(run)
    for record in records:
        assert (
            record["rollout/num"] == 6
            and record["luffy/num_groups_without"] == record["luffy/num_faults"] == 0
        )
        assert record["luffy/return_demonstration"] == record["luffy/fraction_solved"] == 1.0
        assert record["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
        assert record.get("gap/logprob_max", 0.0) < 1e-3 and record["grad/num_skipped"] == 0
    trained = [record for record in records if record.get("luffy/num_tokens")]
    assert len(trained) >= 3 and all(0 < record["luffy/probability_mean"] < 1 for record in trained)
    rows = TraceReader(run / "traces").read(1)
    shown = [row for row in rows if row.origin is Origin.DEMONSTRATION]
    # three turns in both groups
    assert len(shown) == 6 and not any(row.tokens or row.logprobs for row in shown)
    written = sum(len(row.tokens) for row in rows if row.origin is Origin.POLICY)
    assert records[0]["tokens/policy"] == written
    assert "demonstration" in (run / "report.html").read_text()
    assert replay_step(run, 1) == 0


def test_the_policys_rollouts_are_those_of_a_group_without_the_demonstration(recipe: Path) -> None:
    shown = train(recipe, "beside", *luffy(recipe), num_steps=1)
    plain = train(recipe, "alone", "algorithm.type=grpo", "algorithm.group_size=3", num_steps=1)

    def said(run: Path) -> list[tuple[str, int, str]]:
        rows = TraceReader(run / "traces").read(1)
        return [(row.task_key, row.rollout, row.text) for row in rows if row.origin is Origin.POLICY]

    assert said(shown) == said(plain) and steps(shown)[0]["reward/mean"] == steps(plain)[0]["reward/mean"]
    assert not same_weights(shown, plain, step=1)


def test_demonstrations_must_be_there_before_the_first_rollout(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.demonstrations"):
        load_settings(RunSettings, file=recipe, overrides=["algorithm.type=luffy"])
    with pytest.raises(DataError, match="cannot be read"):
        train(
            recipe, "lost", "algorithm.type=luffy", f"algorithm.demonstrations={recipe.parent / 'lost.jsonl'}"
        )
    write_demonstrations(recipe.parent / "foreign.jsonl", prefix="other")
    with pytest.raises(DataError, match="no demonstration of a training task"):
        train(
            recipe,
            "foreign",
            "algorithm.type=luffy",
            f"algorithm.demonstrations={recipe.parent / 'foreign.jsonl'}",
        )
    assert not (recipe.parent / "foreign" / "config.toml").exists()


@pytest.mark.parametrize("selection", [pytest.param("order", marks=pytest.mark.slow), "difficulty"])
def test_replay_trains_on_stored_groups_and_plays_fewer(recipe: Path, selection: str) -> None:
    run = train(
        recipe, selection, "algorithm.type=rollout_replay", f"algorithm.selection={selection}",
        "train.tasks_per_step=4", "algorithm.num_fresh_steps=2", "algorithm.group_size=8",
        "update.num_mini_batches=2", "optimizer.learning_rate=3e-3", num_steps=6,
    )  # fmt: skip
    records = steps(run)
    assert [record["rollout/num"] for record in records] == [32, 32, 16, 16, 16, 16]
    assert (
        records[0]["replay/num_groups"] == 0 and sum(record["replay/num_groups"] for record in records) >= 4
    )
    assert all(record["group/num"] == record["rollout/num"] / 8 for record in records)
    for record in records:
        assert record["replay/num_groups"] <= min(4 - record["group/num"], record["replay/num_eligible"])
        if record["replay/num_groups"]:
            assert record["replay/age_max"] >= record["replay/age_mean"] >= 1
            assert (
                record["replay/weight_max"] >= record["replay/weight_mean"] > 0
                and record["replay/num_tokens"] > 0
            )
        assert record.get("gap/logprob_max", 0.0) < 1e-3  # of the fresh tokens alone
    assert ("replay/estimate_mean" in records[-1]) == (selection == "difficulty")
    assert replay_step(run, 6) == 0


@pytest.mark.slow  # tests/golden plays a preset in the fast tests
@pytest.mark.parametrize("preset", ["tree-grpo", "tree-grpo-official"])
def test_trees_share_turns_and_calls(recipe: Path, preset: str) -> None:
    run = train(
        recipe, preset, "algorithm.type=tree_grpo", f"algorithm.preset={preset}", "algorithm.group_size=6"
    )
    records = steps(run)
    for record in records:
        assert record["rollout/num"] == 12 and record["rollout/num_masked"] == 0
        assert 0 <= record["tree/share_at_root"] <= 1 and record["grad/num_skipped"] == 0
    assert sum(record["tree/turns_shared"] for record in records) > 0
    assert sum(record["rollout/num_tool_calls_shared"] for record in records) > 0
    assert replay_step(run, 2) == 0
    assert "Branching groups" in (run / "report.html").read_text()
