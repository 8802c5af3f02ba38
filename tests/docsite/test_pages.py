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
from docsite.reference import cli_page, settings_page
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
    settings, commands = settings_page(), cli_page()
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
    assert "| `num_threads` | int | `2` | at least 1 |" in settings and "`update.`" not in settings
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


@pytest.mark.parametrize("name", METHODS)
def test_the_pictures_of_methods_are_those_of_the_script(name: str) -> None:
    drawn = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == method_picture(METHODS[name]), "run: python -m docsite.method_pictures"
    ElementTree.fromstring(drawn)


def test_no_two_pages_share_a_title() -> None:
    titles = [page.read_text(encoding="utf-8").partition("\n")[0] for page in (ROOT / "docs").rglob("*.md")]
    assert len(titles) == len(set(titles)) and all(title.startswith("# ") for title in titles)
