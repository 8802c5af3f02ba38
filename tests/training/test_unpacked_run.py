"""A run with a model that the packed path does not take, from end to end."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from docsite.models import ARCHITECTURES
from safetensors.torch import load_file

from outrider.config import load_settings
from outrider.errors import ConfigError
from outrider.training.settings import RunSettings
from tests.training.short_runs import assert_same, begin, interrupted, resume
from tests.training.tool_run import teach, write_tool_run


@pytest.fixture(
    scope="module", params=["LFM2", pytest.param("Gemma 3 behind its window", marks=pytest.mark.slow)]
)
def recipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of the other runs, with a model of this architecture in the place of its Llama."""
    root = tmp_path_factory.mktemp("unpacked")
    found = write_tool_run(root)
    [one] = [one for one in ARCHITECTURES if one.title == request.param]
    longer = replace(one, settings={**one.settings, "max_position_embeddings": 512})
    longer.save(root / "other")
    teach(root / "other")
    text = found.read_text().replace(f"{root}/model", f"{root}/other")
    found.write_text(text.replace("[environment]", f'forward = "{one.forward}"\n\n[environment]', 1))
    return found


@pytest.mark.long
def test_two_steps_move_the_weights_and_a_killed_run_ends_in_the_same_bits(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(recipe, recipe.parent / "run")
    one, two = (
        load_file(run / "checkpoints" / f"step-00000{step}" / "masters.safetensors") for step in (1, 2)
    )
    assert any(not torch.equal(one[name], two[name]) for name in one)
    killed = interrupted(run)
    capsys.readouterr()
    resume(killed, progress="plain")
    assert_same(run, killed)
    output = capsys.readouterr()
    assert "runs unpacked (transformers' own forward pass" in output.out + output.err


def test_several_trainer_ranks_are_one_line(recipe: Path) -> None:
    pytest.importorskip("ray")
    from outrider.distributed.learner import ShardedLearner

    settings = load_settings(RunSettings, file=recipe, overrides=["cluster.num_trainers=2"])
    with pytest.raises(ConfigError, match=r"^cluster\.num_trainers = 2 needs a model that runs packed; "):
        ShardedLearner(settings, initial=True)
