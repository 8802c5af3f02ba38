"""What a new run writes down."""

import tomllib
from pathlib import Path

from outrider.config import load_settings
from outrider.train.run_directory import RunDirectory
from outrider.train.settings import RunSettings

RECIPE = Path(__file__).parents[2] / "recipes" / "demo.toml"


def test_the_precision_that_auto_meant_is_written_down_and_survives_another_machine(tmp_path: Path) -> None:
    settings = load_settings(RunSettings, file=RECIPE, overrides=["model.precision=auto"])
    RunDirectory.create(tmp_path / "run", settings)
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert written["model"]["precision"] in ("bfloat16", "float32")


def test_a_named_precision_stays(tmp_path: Path) -> None:
    settings = load_settings(RunSettings, file=RECIPE, overrides=["model.precision=bfloat16"])
    RunDirectory.create(tmp_path / "run", settings)
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["model"]["precision"] == "bfloat16"
