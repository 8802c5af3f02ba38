"""Killed runs with an averaged teacher or retrieved help end in the same bits."""

from pathlib import Path

import pytest

from outrider.errors import CheckpointError
from outrider.viewer.records import TraceReader, parse_metadata
from tests.training.short_runs import assert_same, begin, interrupted, records, resume
from tests.training.tool_run import write_house_model, write_tool_run


def test_a_killed_run_with_an_averaged_teacher_ends_in_the_same_bits(tmp_path: Path) -> None:
    recipe = write_tool_run(tmp_path / "data")
    recipe.write_text(
        recipe.read_text().replace('type = "rapo"\ngroup_size = 4\nnum_hybrid = 2', 'type = "grpo"')
    )
    distill = (
        "algorithm.group_size=2", "algorithm.distill.help=feedback", "algorithm.distill.teacher=ema",
        "algorithm.distill.support=8", "algorithm.distill.teacher_rate=0.5",
    )  # fmt: skip
    whole = begin(recipe, tmp_path / "run", *distill)
    assert all(record["distill/loss"] > 0.0 for record in records(whole))
    killed = interrupted(whole)
    resume(killed)
    assert_same(whole, killed)
    teacher = "checkpoints/step-000002/teacher.safetensors"
    assert (whole / teacher).read_bytes() == (killed / teacher).read_bytes()


def test_a_killed_run_with_retrieved_help_ends_in_the_same_bits(tmp_path: Path) -> None:
    """Two rollouts of a group retrieve; the teacher of the others reads steps before every turn."""
    recipe = write_tool_run(tmp_path / "data")
    whole = begin(
        recipe, tmp_path / "run", "algorithm.distill.help=retrieved", "algorithm.distill.place=turn",
        "algorithm.distill.support=8",
    )  # fmt: skip
    for step, record in enumerate(records(whole), start=1):
        assert record["distill/loss"] > 0.0 and record["distill/share_rollouts"] == 0.5
        for row in TraceReader(whole / "traces").read(step):
            if row.outcome is not None:
                metadata = parse_metadata(row)
                assert ("help" in metadata) == (metadata["mode"] != "hybrid")
                assert all(part["source"] == "retrieved" for part in metadata.get("help", ()))
    killed = interrupted(whole)
    resume(killed)
    assert_same(whole, killed)


def test_the_experts_of_the_environment_fill_the_buffer_of_a_teacher(tmp_path: Path) -> None:
    recipe = write_tool_run(tmp_path / "data")
    write_house_model(recipe.parent / "model-house")
    text = recipe.read_text()
    begin_, end = text.index("[environment]"), text.index("[algorithm]")
    text = text[:begin_] + '[environment]\ntype = "house"\nnum_train = 2\nnum_test = 1\n\n' + text[end:]
    text = text.replace("num_hybrid = 2", "num_hybrid = 0").replace('path = "', 'num_tasks = 2 # "')
    recipe.write_text(text)
    run = begin(
        recipe, tmp_path / "run", f"model.name={recipe.parent}/model-house", "train.num_steps=1",
        "evaluation.at_start=false", "algorithm.distill.help=retrieved", "algorithm.distill.support=8",
        "rollout.max_response_tokens=1200", "rollout.max_turn_tokens=40",
    )  # fmt: skip
    [record] = records(run)
    assert record["distill/share_rollouts"] == 1.0 and record["distill/help_tokens"] > 0


def test_a_changed_file_of_help_is_refused(tmp_path: Path) -> None:
    recipe = write_tool_run(tmp_path / "data")
    recipe.write_text(
        recipe.read_text().replace('type = "rapo"\ngroup_size = 4\nnum_hybrid = 2', 'type = "grpo"')
    )
    file = tmp_path / "help.jsonl"
    lines = [f'{{"task": "tasks-{number}", "text": "the lamp is on the hill"}}\n' for number in range(6)]
    file.write_text("".join(lines))
    help_file = (
        "algorithm.distill.help=file",
        f"algorithm.distill.path={file}",
        "algorithm.distill.support=8",
    )
    killed = interrupted(begin(recipe, tmp_path / "run", "algorithm.group_size=2", *help_file))
    file.write_text("".join(lines).replace("hill", "lake"))
    with pytest.raises(CheckpointError, match=r"not what this run began with: algorithm\.distill\.path"):
        resume(killed)
