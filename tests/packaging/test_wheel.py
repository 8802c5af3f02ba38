"""The content of the distributions, and (marker ``wheel``) that it works where there is no repository."""

import configparser
import email.message
import email.parser
import json
import re
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.packaging.wheels import (
    ROOT,
    Installed,
    build_sdist,
    build_wheel,
    build_wheel_from_sdist,
    install_wheel,
)
from tests.training.tool_run import write_tool_run

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_contains_exactly_the_files_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        scripts = configparser.ConfigParser()
        scripts.read_string(_read_info(archive, "entry_points.txt"))
    package = {
        str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "outrider").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }  # fmt: skip
    assert held == package
    assert {Path(name).suffix for name in held} == {
        ".py", ".j2", ".json", ".toml", ".txt", ".typed", ".html", ".js", ".css", ".LICENSE"
    }  # fmt: skip
    assert scripts["console_scripts"]["outrider"] == "outrider.__main__:program"


def _read_info(archive: zipfile.ZipFile, file: str) -> str:
    return archive.read(
        next(name for name in archive.namelist() if name.endswith(f".dist-info/{file}"))
    ).decode()


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        return email.parser.Parser().parsestr(_read_info(archive, "METADATA"))


def test_the_metadata_is_ready_for_an_index(metadata: email.message.Message) -> None:
    assert metadata["Requires-Python"] == ">=3.11" and metadata["License-Expression"] == "Apache-2.0"
    classifiers = metadata.get_all("Classifier", [])
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(classifiers)
    groups = {classifier.partition(" :: ")[0] for classifier in classifiers}
    assert {"Development Status", "Intended Audience", "Operating System", "Topic", "Typing"} <= groups
    assert "License" not in groups  # an index refuses it beside an SPDX expression
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    for name in (metadata["Author"], metadata["Version"], metadata["License-Expression"]):
        assert re.search(rf": {re.escape(name)}$", citation, re.MULTILINE)
    assert f"keywords: [{metadata['Keywords'].replace(',', ', ')}]" in citation


def test_the_description_is_readable_on_an_index(metadata: email.message.Message) -> None:
    """An index renders the page outside of the repository: relative links and pictures would be broken."""
    page = str(metadata.get_payload())
    assert metadata["Description-Content-Type"] == "text/markdown" and page.startswith("# Outrider\n")
    assert [
        target for target in re.findall(r"\]\(([^)]*)\)", page) if not target.startswith("https://")
    ] == []
    assert "<img" not in page
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for shared in (r"^Outrider trains LLM agents.*?\n\n", r"^```python\n.*?^```$"):
        [text] = re.findall(shared, page, re.MULTILINE | re.DOTALL)
        assert text in readme


@pytest.mark.long
def test_the_source_distribution_is_small_and_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build_sdist(tmp_path)
    assert sdist.stat().st_size < 4_000_000
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
        names = {member.name.partition("/")[2] for member in members}
    assert all(member.isfile() or member.isdir() for member in members)  # the demo's recipe is no link
    assert {name.partition("/")[0] for name in names} == {
        "", "CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md",
        "README.pypi.md", "constraints.txt", "pyproject.toml", "recipes", "setup.cfg", "src",
    }  # fmt: skip
    rebuilt = build_wheel_from_sdist(sdist, tmp_path)
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(rebuilt) as second:
        assert {info.filename: info.CRC for info in first.infolist()} == {
            info.filename: info.CRC for info in second.infolist()
        }


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
    done = installed.run(
        "python", "-c", COMMANDS, json.dumps([[*map(str, command)] for command in commands]), timeout=300
    )
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
def test_the_demo_needs_no_repository(installed: Installed) -> None:
    """The commands of the page on the index, with the run shortened."""
    printed = run_all(
        installed, ["init", "demo.toml", "--demo"],
        ["train", "demo.toml", "--smoke", "--run", "runs/demo-smoke", "--progress", "plain"],
        ["view", "runs/demo-smoke", "--bundle", "page"],
    )  # fmt: skip
    assert "demo.toml --run runs/demo" in printed
    assert (installed.empty / "demo.toml").read_bytes() == (ROOT / "recipes" / "demo.toml").read_bytes()
    assert (installed.empty / "runs" / "demo-smoke" / "report.html").exists()
    assert (installed.empty / "page" / "index.html").exists()


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
