"""Concept pages are run, generated pages know every algorithm and command, the picture is that of the
script.
"""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from docsite.demo_curve import curves
from docsite.method_pictures import FOLDER, METHODS
from docsite.method_pictures import picture as method_picture
from docsite.picture import picture
from docsite.reference import DOCS, cli_page, settings_pages
from docsite.tiny_trace import play

from outrider.types import Origin

ROOT = Path(__file__).parents[2]
CONCEPTS = sorted((ROOT / "docs" / "concepts").glob("*.md"))


@pytest.mark.parametrize("page", CONCEPTS, ids=lambda page: page.stem)
def test_the_examples_of_a_concept_run(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks, "no example"
    for block in blocks:
        assert "assert " in block
        exec(compile(block, str(page), "exec"), {"__name__": "example"})


def test_the_tiny_trace_branches_and_retrieves() -> None:
    trace = play()
    parents = [node.parent for node in trace.nodes if node.parent is not None]
    assert len(parents) > len(set(parents)) and any(node.origin is Origin.BUFFER for node in trace.nodes)
    assert len({leaf.episode_return for leaf in trace.leaves.values()}) == 2


def test_the_picture_is_that_of_the_script() -> None:
    drawn = (ROOT / "docs" / "images" / "trace.svg").read_text(encoding="utf-8")
    assert drawn == picture(play()), "run: python -m docsite.picture"


def test_the_curves_of_the_demo_are_those_of_the_script() -> None:
    drawn = (ROOT / "docs" / "images" / "demo.svg").read_text(encoding="utf-8")
    assert drawn == curves(), "run: python -m docsite.demo_curve"
    ElementTree.fromstring(drawn)


def test_the_reference_has_all_settings_and_commands() -> None:
    pages, commands = settings_pages(), cli_page()
    settings = pages["reference/settings/algorithm.md"]
    for name in (
        "grpo",
        "rapo",
        "arpo",
        "empo2",
        "gigpo",
        "luffy",
        "rollout_replay",
        "tree_grpo",
        "combined",
    ):
        assert f'`algorithm` with `type = "{name}"`' in settings
    assert "| `num_threads` | integer, at least 1 | `2` | Threads" in pages["reference/settings.md"]
    assert max(len(line) for line in commands.splitlines() if not line.startswith("This page")) <= 72
    for name in (
        "train",
        "eval",
        "buffer build",
        "compare",
        "pack",
        "verify",
        "doctor",
        "init",
        "view",
        "report",
        "replay",
    ):
        assert f"`outrider {name}`" in commands


def test_the_pages_of_settings_are_up_to_date() -> None:
    pages = settings_pages()
    written = {
        "reference/settings.md",
        *(f"reference/settings/{page.name}" for page in DOCS.glob("reference/settings/*")),
    }
    assert written == set(pages)
    for name, text in pages.items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, "run: python -m docsite.reference"


def test_every_heading_of_settings_occurs_once_and_every_key_has_a_sentence() -> None:
    for name, text in settings_pages().items():
        headings = re.findall("^## (.*)$", text, re.MULTILINE)
        assert len(headings) == len(set(headings)), name
        rows = re.findall(r"^\| \[?`.*$", text, re.MULTILINE)
        assert rows and all(re.search(r"\w.*\| \S.*[.)] \|$", row) for row in rows), name


@pytest.mark.parametrize("name", METHODS)
def test_the_pictures_of_methods_are_those_of_the_script(name: str) -> None:
    drawn = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == method_picture(METHODS[name]), "run: python -m docsite.method_pictures"
    ElementTree.fromstring(drawn)


def test_no_two_pages_share_a_title() -> None:
    titles = [page.read_text(encoding="utf-8").partition("\n")[0] for page in (ROOT / "docs").rglob("*.md")]
    assert len(titles) == len(set(titles)) and all(title.startswith("# ") for title in titles)
