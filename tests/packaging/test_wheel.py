"""What the wheel holds, and (marker ``wheel``) that it works where there is no repository."""

import configparser
import email.parser
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.packaging.wheels import ROOT, Installed, build_wheel, install_wheel
from tests.training.tool_run import write_tool_run

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_contains_exactly_the_files_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata_name, scripts_name = (
            next(name for name in archive.namelist() if name.endswith(f".dist-info/{file}"))
            for file in ("METADATA", "entry_points.txt")
        )
        metadata = email.parser.Parser().parsestr(archive.read(metadata_name).decode())
        scripts = configparser.ConfigParser()
        scripts.read_string(archive.read(scripts_name).decode())
    package = {
        str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "outrider").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }  # fmt: skip
    assert held == package
    assert {Path(name).suffix for name in held} == {
        ".py", ".j2", ".json", ".toml", ".typed", ".html", ".js", ".css", ".LICENSE"
    }  # fmt: skip
    assert scripts["console_scripts"]["outrider"] == "outrider.__main__:program"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(
        metadata.get_all("Classifier", [])
    )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install_wheel(wheel, tmp_path_factory.mktemp("installed"))


@pytest.mark.wheel
def test_the_package_is_imported_from_the_wheel(installed: Installed) -> None:
    found = installed.run("python", "-c", "import outrider, sys; print(outrider.__file__); print(sys.path)")
    file, path = found.stdout.splitlines()
    assert Path(file).is_relative_to(installed.folder)
    assert str(ROOT / "src") not in path


# Several commands in one process: an import of torch takes longer than what most of them do.
COMMANDS = """
import json, sys
from outrider.cli import main
sys.exit(max(main(command) for command in json.loads(sys.argv[1])))
"""


def run_all(installed: Installed, *commands: Sequence[str | Path]) -> str:
    """Standard output of commands that all succeed."""
    done = installed.run("python", "-c", COMMANDS, json.dumps([[*map(str, command)] for command in commands]))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.wheel
def test_doctor(installed: Installed) -> None:
    doctor = installed.run("outrider", "doctor")
    assert doctor.returncode == 0 and "torch" in doctor.stdout, doctor.stderr


@pytest.mark.wheel
def test_all_recipes_are_read(installed: Installed) -> None:
    assert len(RECIPES) > 4
    printed = run_all(
        installed, ["init", "mine.toml"],
        # with --smoke, because the recipes' data is not here
        *(["train", recipe, "--dry-run", "--smoke"] for recipe in ["mine.toml", *RECIPES])
    )  # fmt: skip
    assert printed.count("\n[algorithm]\n") == 1 + len(RECIPES)


@pytest.mark.wheel
def test_runs_report_and_comparison(installed: Installed, tmp_path: Path) -> None:
    recipe = write_tool_run(tmp_path)
    tiny = ["train", str(recipe), "--progress", "none", "train.num_steps=2", "evaluation.every=2"]
    done = installed.run("outrider", *tiny, "--run", "runs/0")
    assert (done.returncode, done.stderr) == (0, "")
    run = installed.empty / "runs" / "0"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps if record["kind"] == "train"] == [1, 2]
    (run / "report.html").unlink()
    run_all(
        installed, ["report", "runs/0"], [*tiny, "--run", "runs/1", "seed=1"],
        ["compare", "runs/0", "runs/1", "--html", "compare.html"],
    )  # fmt: skip
    assert (run / "report.html").stat().st_size > 10_000
    assert (installed.empty / "compare.html").stat().st_size > 1_000


@pytest.mark.wheel
def test_the_catalogue_of_the_shop_is_installed(installed: Installed) -> None:
    code = (
        "from outrider.environments.webshop.catalogue import load_catalogue; "
        "print(load_catalogue(None, None))"
    )
    shop = installed.run("python", "-c", code)
    assert shop.returncode == 0 and shop.stdout, shop.stderr
