"""A killed run with an averaged teacher ends in the same bits."""

from pathlib import Path

from tests.training.short_runs import assert_same, begin, interrupted, records, resume
from tests.training.tool_run import write_tool_run


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
