"""A run with a model that the packed path does not take, from end to end."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from docsite.models import ARCHITECTURES

from outrider.config import validate
from outrider.errors import ConfigError
from outrider.training.settings import RunSettings
from tests.training.short_runs import assert_same, begin, interrupted, resume, same_weights
from tests.training.tool_run import teach, write_tool_run

ARCHITECTURE = {one.title: one for one in ARCHITECTURES}


@pytest.mark.long
@pytest.mark.parametrize("title", ["LFM2", pytest.param("Gemma 3 behind its window", marks=pytest.mark.slow)])
def test_two_steps_move_the_weights_and_a_killed_run_ends_in_the_same_bits(
    title: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe of the other runs with a model of this architecture."""
    recipe, known = write_tool_run(tmp_path), ARCHITECTURE[title]
    replace(known, settings={**known.settings, "max_position_embeddings": 512}).save(tmp_path / "other")
    teach(tmp_path / "other")
    text = recipe.read_text().replace(f"{tmp_path}/model", f"{tmp_path}/other")
    recipe.write_text(text.replace("[environment]", f'forward = "{known.forward}"\n\n[environment]', 1))
    run = begin(recipe, tmp_path / "run")
    assert not same_weights(run, run, 1, 2)
    killed = interrupted(run)
    capsys.readouterr()
    resume(killed, progress="plain")
    assert_same(run, killed)
    captured = capsys.readouterr()
    assert "runs unpacked (transformers' own forward pass" in captured.out + captured.err


def test_several_trainer_ranks_are_one_line(tmp_path: Path) -> None:
    from outrider.distributed.learner import ShardedLearner

    cluster: Any = None  # no process is started
    ARCHITECTURE["LFM2"].save(tmp_path)
    tree = {
        "model": {"name": str(tmp_path), "precision": "float32", "forward": ARCHITECTURE["LFM2"].forward},
        "environment": {"type": "factbook"}, "algorithm": {"type": "grpo"}, "cluster": {"num_trainers": 2},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"^cluster\.num_trainers = 2 needs a model that runs packed; "):
        ShardedLearner(validate(RunSettings, tree), cluster, initial=True)
