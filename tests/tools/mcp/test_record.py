"""The record of an MCP server in a run, and that a run with another server is refused with the difference."""

import itertools
import json
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

from outrider.cli import main  # noqa: E402
from outrider.config import load_settings  # noqa: E402
from outrider.errors import CheckpointError, PackError  # noqa: E402
from outrider.evaluation.packs import read_recipe  # noqa: E402
from outrider.plugins.listing import plugin_digests  # noqa: E402
from outrider.tools.base import SingleFlightCache  # noqa: E402
from outrider.tools.mcp import tool as mcp_tool  # noqa: E402
from outrider.tools.mcp.session import Listing, origins  # noqa: E402
from outrider.tools.mcp.tool import McpConfig  # noqa: E402
from outrider.training.run_dir import RunDirectory  # noqa: E402
from outrider.training.settings import RunSettings  # noqa: E402
from outrider.training.setup import run_training  # noqa: E402
from tests.tools.mcp.servers import HERE  # noqa: E402
from tests.training.short_runs import begin, interrupted, resume  # noqa: E402
from tests.training.tool_run import write_tool_run  # noqa: E402

ROOT = Path(__file__).parents[3]
VARIABLES = {"NUMBERS_VERSION": "1.0", "NUMBERS_MORE": "", "NUMBERS_OTHER": ""}


@pytest.fixture(autouse=True)
def clear_listings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(mcp_tool, "_listings", SingleFlightCache(64))
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def mcp_section(folder: Path) -> str:
    """Copy the server and return its section in a recipe of that folder."""
    (folder / "own_numbers.py").write_text((HERE / "fake_server.py").read_text())
    env = ", ".join(f'{name} = "${{{name}}}"' for name in VARIABLES)
    return f'{{type = "mcp", name = "numbers", script = "own_numbers.py", prefix = "n_", env = {{{env}}}}}'


@pytest.fixture
def created(tmp_path: Path) -> Path:
    """A run that has not started."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[model]\nname = "smollm2-135m-instruct"\n[algorithm]\ntype = "grpo"\n[environment]\ntype = "tools"\n'
        f'tools = [{mcp_section(tmp_path)}]\ntrain = {{path = "tasks.jsonl"}}\n'
    )
    settings = load_settings(RunSettings, file=recipe)
    digests = plugin_digests(settings)  # part of the state of a checkpoint
    assert digests["plug-in environment.tools.numbers"] == "numbers 1.0"
    assert len(digests["plug-in environment.tools.numbers.n_add"]) == 64
    return RunDirectory.create(tmp_path / "run", settings).path


def test_the_record_has_the_server_its_script_and_its_tools(created: Path) -> None:
    record = json.loads((created / "plugins.json").read_text())
    server = record["environment.tools.numbers"]
    assert (server["package"], server["version"]) == ("MCP server numbers", "1.0")
    assert record["environment.tools.numbers.tools"]["digest"].startswith("n_add, n_shout, ")
    assert record["environment.tools.numbers.script"]["folder"] == str(created.parent)


@pytest.mark.parametrize("script", ["own.py", "./own.py", "servers/own.py", "{folder}/own.py"])
def test_the_record_has_the_folder_of_the_script(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "servers").mkdir()
    for path in ("own.py", "servers/own.py"):
        (tmp_path / path).touch()
    monkeypatch.chdir(tmp_path)
    settings = McpConfig(name="own", script=script.format(folder=tmp_path))
    origin = origins(settings, Listing(server="own", version="1", tools={}))["own.script"]
    assert origin.folder == str(tmp_path)


@pytest.mark.long
def test_a_run_resumes_with_the_same_server_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write_tool_run(tmp_path)
    tools = f'environment.tools=["search", {mcp_section(tmp_path)}]'
    half = interrupted(begin(recipe, tmp_path / "run", tools))
    for name, value, message in (
        ("NUMBERS_VERSION", "1.1", r"environment\.tools\.numbers \(was: numbers 1\.0; is: numbers 1\.1\)"),
        ("NUMBERS_MORE", "yes", r"environment\.tools\.numbers\.tools \(was: n_add, .*; is: .*n_double"),
        (
            "NUMBERS_OTHER",
            "yes",
            r"not what this run began with: plug-in environment\.tools\.numbers\.n_add;",
        ),
    ):
        monkeypatch.setattr(mcp_tool, "_listings", SingleFlightCache(64))
        with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=message):
            patch.setenv(name, value)
            resume(half)
    monkeypatch.setattr(mcp_tool, "_listings", SingleFlightCache(64))
    with monkeypatch.context() as patch:
        patch.setenv("NUMBERS_VERSION", "1.1")
        directory = RunDirectory.open(half, allow_changed_plugins=True)
        run_training(directory, progress="none", on_start=lambda stop: None)
    assert json.loads((half / "plugins.json").read_text())["environment.tools.numbers"]["version"] == "1.1"


def test_a_pack_starts_no_server(created: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text((created / "config.toml").read_text())
    with pytest.raises(PackError, match="names the MCP server 'numbers': nothing is started"):
        read_recipe(tmp_path, "one")


@pytest.mark.long
def test_the_shipped_recipe_runs_in_its_smoke_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["train", "recipes/mcp-shop.toml", "--smoke", "--run", str(tmp_path / "run")]) == 0
    assert "MCP server" not in capsys.readouterr().err
    record = json.loads((tmp_path / "run" / "plugins.json").read_text())
    assert record["environment.tools.shop.tools"]["digest"] == "find, price, stock, weight"


def test_the_shipped_questions_are_those_of_the_server(tmp_path: Path) -> None:
    import runpy

    shop = runpy.run_path(str(ROOT / "recipes" / "mcp_shop.py"))
    shop["write_questions"](tmp_path)
    for path in sorted(tmp_path.iterdir()):
        assert path.read_text() == (ROOT / "recipes" / "mcp-shop" / path.name).read_text(), path.name
    splits = [(tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("train", "valid", "test")]
    questions = [{json.loads(line)["question"] for line in lines} for lines in splits]
    assert not any(a & b for a, b in itertools.combinations(questions, 2))
