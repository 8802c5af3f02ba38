"""docs/howto/gpus.md and docs/gpu.md: every command is one that is there, and its recipe and overrides make a
run; nothing runs.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from outrider import api, cli
from outrider.cli import make_parser
from outrider.training.run_dir import RunDirectory

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "howto" / "gpus.md", ROOT / "docs" / "gpu.md"]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
_JOINED = TEXT.replace("\\\n", " ")
SHOWN = [line.strip().split("  #")[0] for line in _JOINED.splitlines() if line.startswith("    ")]
INLINE = re.findall(r"`((?:outrider|python|make) [^`…]+)`", TEXT.replace("\n", " "))
COMMANDS = sorted({*SHOWN, *(one for one in INLINE if one.count(" ") > 2)})


class Parsed(Exception):
    """Raised where a run would begin."""


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.startswith("outrider ")])
def test_outrider_commands_are_valid(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*given: Any, **named: Any) -> Any:
        raise Parsed

    monkeypatch.chdir(ROOT)
    arguments = shlex.split(command)[1:]
    parsed, _ = make_parser().parse_known_args(arguments)  # as the command line: overrides stand anywhere
    if arguments[0] != "train":
        assert parsed.command is not None
        return
    monkeypatch.setattr(RunDirectory, "create", stop)
    monkeypatch.setattr(api, "require_paths", lambda *given, **named: None)  # the page's data is not here
    try:
        status = cli.main(arguments)
    except Parsed:
        status = 0
    assert status == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.startswith("make ")])
def test_make_targets_exist(command: str) -> None:
    subcommand, *settings = shlex.split(command)[1:]
    assert re.search(rf"^{subcommand}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for name, value in (setting.split("=", 1) for setting in settings):
        assert name in ("GPU_PYTHON", "GPU_ARGS")
        if name == "GPU_ARGS":
            gpu._parser().parse_args(shlex.split(value))


def test_the_ray_address_is_a_setting_of_a_new_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["train", "recipes/house-empo2.toml", "--ray-address", "auto", "--dry-run"]) == 0
    assert 'ray_address = "auto"' in capsys.readouterr().out
    assert cli.main(["train", "--resume", "runs/none", "--ray-address", "auto"]) == 2
    assert "has its own model, directory and Ray address" in capsys.readouterr().err


def test_submitted_commands_start_a_run() -> None:
    """The arguments of the scripts are a run directory, a recipe and settings."""
    [submitted] = [one for one in SHOWN if one.startswith("sbatch")]
    _, nodes, script, run, recipe, *overrides = shlex.split(submitted)
    assert nodes == "--nodes=2" and (ROOT / script).is_file() and run.startswith("runs/")
    assert (ROOT / recipe).is_file() and all("=" in one for one in overrides)
    [applied] = [one for one in SHOWN if one.startswith("kubectl")]
    assert (ROOT / applied.split()[-1]).is_file()
