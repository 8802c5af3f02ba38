"""Run folders of an earlier version go on where they were, and say what nobody can know of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import outrider
from tests.compat.commands import LAST, LEFT, Said, done, refused


def _states(run: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of step 2 as it was left, and of step 3, which came after it."""
    found = LEFT / run / LAST, Path(run, "checkpoints", "step-000003")
    before, after = (json.loads((folder / "state.json").read_text()) for folder in found)
    return before, after


def _evaluations(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("run", ["rapo", "empo2"])
def test_a_finished_run_is_finished_and_nothing_of_it_changes(run: str, capsys: Said) -> None:
    said = done(capsys, "train", "--resume", run, "--progress", "plain")
    assert "NO CHECKSUM in state.json of step-000002" in said and "after" in said
    kept = [path for path in Path(LEFT, run).rglob("*") if path.is_file() and path.suffix != ".sqlite"]
    assert len(kept) > 10
    for path in kept:
        assert path.read_bytes() == Path(path.relative_to(LEFT)).read_bytes(), path.name


@pytest.mark.parametrize("run", ["rapo", "empo2"])
def test_a_run_goes_on_where_it_was(run: str, capsys: Said) -> None:
    said = done(capsys, "train", "--resume", run, "train.num_steps=3", "--progress", "plain")
    for told in (
        "NO CHECKSUM",
        "NO SETTINGS",
        "OTHER VERSIONS: the checkpoint was written with outrider 0.1.0",
    ):
        assert sum(line.startswith(told) for line in said.splitlines()) == 1, told
    assert "continuing from step 2" in said
    before, after = _states(run)
    (last,) = outrider.load_run(run).metrics().to_pylist()[2:]
    has_trained = last["group/fraction_without_signal"] < 1
    assert after["num_optimizer_steps"] == before["num_optimizer_steps"] + has_trained
    assert after["task_cursor"] == 3 * 2
    assert after["num_policy_tokens"] > before["num_policy_tokens"]
    assert after["tasks"] == before["tasks"]
    lines = Path(LEFT, run, "metrics.jsonl").read_text().splitlines()
    assert Path(run, "metrics.jsonl").read_text().splitlines()[: len(lines)] == lines
    assert [one["label"] for one in _evaluations(run)][1:] == ["step 2", f"after {run.upper()}"]
    assert outrider.load_run(run).steps() == (1, 2, 3)
    # Adam's step is at most about the learning rate: with other moments or weights it would be far away
    old = load_file(LEFT / run / LAST / "masters.safetensors")
    new = load_file(Path(run, "checkpoints", "step-000003", "masters.safetensors"))
    moved = max(float(np.abs(new[name] - old[name]).max()) for name in old)
    assert moved < 2 * 3e-4 and (moved > 0) == has_trained


def test_what_an_algorithm_remembers_is_read(capsys: Said) -> None:
    done(capsys, "train", "--resume", "empo2", "train.num_steps=3", "--progress", "plain")
    before, after = (state["memory"] for state in _states("empo2"))
    for key, known in before["tips"]["buffers"].items():
        assert known["tips"]
        assert after["tips"]["buffers"][key]["tips"][: len(known["tips"])] == known["tips"]
    for key, counts in before["novelty"]["counts"].items():
        now = after["novelty"]["counts"][key]
        assert len(now) >= len(counts) and all(n >= c for n, c in zip(now, counts, strict=False))
    done(capsys, "train", "--resume", "rapo", "train.num_steps=3", "--progress", "plain")
    old, new = (state["hook_counts"][0] for state in _states("rapo"))
    assert new["opportunities"] > old["opportunities"] > 0


def test_damage_to_a_checkpoint_is_found(capsys: Said) -> None:
    for step in (2, 0):
        weights = Path("rapo", "checkpoints", f"step-{step:06d}", "masters.safetensors")
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        if step:
            said = done(capsys, "train", "--resume", "rapo", "train.num_steps=3", "--progress", "plain")
            assert "DAMAGED CHECKPOINT, going back to an older one" in said
            assert "continuing from step 0" in said
            shutil.rmtree("rapo")
            shutil.copytree(LEFT / "rapo", "rapo")
    shutil.rmtree(Path("rapo", LAST))
    Path("rapo", "checkpoints", "step-000000", "masters.safetensors").write_bytes(bytes(content))
    line = refused(capsys, "train", "--resume", "rapo", "--progress", "none")
    assert "step-000000 is damaged: the contents of masters.safetensors are not what was written" in line
