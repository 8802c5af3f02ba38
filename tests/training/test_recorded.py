"""Records of earlier versions are read with today's keys."""

import json
from pathlib import Path

import pytest

from outrider.algorithms.loss_settings import ClipLoss, SamplerCorrection, migrate_keys
from outrider.api import run_settings
from outrider.config import Settings, to_toml
from outrider.errors import ConfigError
from outrider.training.run_dir import _plain, recorded_settings

OLD = """
[environment]
type = "factbook"

[algorithm]
type = "grpo"
loss = "clip"
clip_low = 0.1
clip_high = 0.3
keep_clipped_gradient = false
dual_clip = "none"
ratio_cap = "none"
ratio_floor = 0.0
sampler_correction = 2.0
sampler_level = "token"
sampler_floor = "none"
sampler_outside = "truncate"
sequence_ratio = "token"
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text(OLD)
    return tmp_path / "config.toml"


def test_a_recorded_file_is_read_and_a_recipe_of_the_same_keys_is_refused(old: Path) -> None:
    for found in (recorded_settings(old), run_settings(old)):
        assert found.algorithm.loss == ClipLoss(clip_low=0.1, clip_high=0.3)
        assert found.algorithm.sampler_correction == SamplerCorrection()
    recipe = old.rename(old.with_name("recipe.toml"))
    with pytest.raises(ConfigError, match=r"algorithm: the key clip_low is now loss\.clip_low"):
        run_settings(recipe)


def test_overrides_of_a_record_have_todays_keys(old: Path) -> None:
    assert recorded_settings(old, ["algorithm.loss.clip_low=0.15"]).algorithm.loss.clip_low == 0.15
    with pytest.raises(ConfigError, match=r"loss\.clip_low"):
        recorded_settings(old, ["algorithm.clip_low=0.15"])


def test_todays_spelling_is_left_as_it_is(old: Path) -> None:
    today = recorded_settings(old).model_dump(mode="json")
    assert migrate_keys(today) == today
    old.write_text(to_toml(today))
    assert recorded_settings(old).model_dump(mode="json") == today


def test_old_keys_that_are_no_record_are_refused_and_not_lost(old: Path) -> None:
    """Somebody may have written them into a run's file, or cut the file."""
    for text in (
        OLD.replace('loss = "clip"\n', ""),
        OLD.replace("clip_low = 0.1\n", ""),
        to_toml(recorded_settings(old).model_dump(mode="json")).replace(
            "[algorithm]", "[algorithm]\nclip_high = 0.5"
        ),
    ):
        old.write_text(text)
        with pytest.raises(ConfigError, match="now"):
            recorded_settings(old)


class Reads(Settings):
    """A tool's own settings, in a table within a list."""

    type: str = "reads"
    page: Path = Path("/somewhere/page")
    hosts: tuple[str, ...] = ("one", "two")


class Tools(Settings):
    tools: tuple[Reads, ...] = (Reads(),)


def test_tables_in_a_list_are_plain_too() -> None:
    """A checkpoint holds them as JSON, without paths."""
    found = _plain(Tools().model_dump()["tools"])
    assert found == [{"type": "reads", "page": "(a path)", "hosts": ["one", "two"]}]
    assert json.loads(json.dumps(found)) == found
