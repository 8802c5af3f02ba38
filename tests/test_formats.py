"""docs/formats.md, every example of it through the reader that a run uses."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.config import load_settings
from outrider.environments.tool_qa.datasets import DatasetConfig, load_tasks
from outrider.environments.webshop.catalogue import load_catalogue
from outrider.evaluation.tasks import load_benchmark
from outrider.memory.chat_files import import_trajectories
from outrider.tools.browser.pages import PageCollection
from outrider.tools.search import SearchTool, load_passages
from outrider.training.experts import read_demonstrations
from outrider.training.settings import RunSettings, require_experts

PAGE = Path(__file__).parents[1] / "docs" / "formats.md"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A folder with every file of the page."""
    for name, text in _files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def _files() -> dict[str, str]:
    found = re.findall(
        r"^`([\w.]+)`\n```\w+\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    names = [name for name, _ in found]
    assert len(set(names)) == len(names)
    return dict(found)


def _questions(page: Path) -> None:
    tasks = load_tasks(DatasetConfig(path=page / "questions.jsonl"))
    assert [task.key for task in tasks] == ["questions-0", "questions-1", "questions-2"]
    assert [task.answers for task in tasks] == [
        ("the Danube",),
        ("6",),
        ("Goethe", "Johann Wolfgang von Goethe"),
    ]
    assert len(load_benchmark(str(page / "questions.jsonl")).tasks) == 3


def _columns(page: Path) -> None:
    table = (page / "recipe.toml").read_text().replace("problems.jsonl", str(page / "problems.jsonl"))
    (page / "whole.toml").write_text(
        'algorithm = { type = "grpo" }\n[environment]\ntype = "tools"\ntools = ["python"]\n' + table
    )
    environment = load_settings(RunSettings, file=page / "whole.toml").environment
    assert environment.type == "tools" and environment.train is not None
    tasks = load_tasks(environment.train)
    assert [(task.key, task.answers) for task in tasks] == [
        ("sum", ("4",)),
        ("product", ("15",)),
        ("half", ("4.5",)),
    ]


def _task_set(page: Path) -> None:
    tasks = load_benchmark(f"gsm8k={page / 'gsm8k.jsonl'}").tasks
    assert [task.answers for task in tasks] == [("7",), ("7",), ("36",)]


def _passages(page: Path) -> None:
    found = SearchTool(load_passages(page / "passages.jsonl")).run("polygon").passages
    assert [passage.title for passage in found] == ["Hexagon"]


def _pages(page: Path) -> None:
    pages = PageCollection.load(page / "pages.jsonl")
    vienna, hexagon = pages.find("en.wikipedia.org/wiki/Vienna"), pages.find("2")
    assert len(pages) == 2 and vienna is not None and hexagon is not None
    assert vienna == pages.find("Vienna") and vienna.text.endswith("Danube.\nIt is the capital of Austria.")
    assert hexagon.title == "Hexagon"


def _trajectories(page: Path) -> None:
    found = import_trajectories(page / "trajectories.jsonl").trajectories
    assert [len(one.steps) for one in found] == [2, 1, 1]
    assert (found[1].agent, found[2].trajectory_id) == ("teacher", "a-failure")
    tasks = load_tasks(DatasetConfig(path=page / "questions.jsonl"))
    shown = read_demonstrations(str(page / "trajectories.jsonl"), tasks)  # by question, by key, by question
    assert set(shown) == {task.key for task in tasks}
    assert [len(shown[task.key] or ()) for task in tasks] == [2, 1, 1]


def _recipe(page: Path) -> None:
    settings = load_settings(RunSettings, file=page / "own.toml")
    require_experts(settings)
    named = [
        settings.cold_start.demonstrations,
        str(settings.environment.corpus),
        str(settings.environment.train.path),
    ]  # type: ignore[union-attr]
    assert {Path(one).name for one in named} <= set(_files())  # the page's own files


def _webshop(page: Path) -> None:
    files = page / "products.json", page / "attributes.json"
    assert load_catalogue(*files).instructions["B01"][0].attributes == ("wool", "warm")
    human = load_catalogue(*files, page / "human_goals.json").instructions["B01"][0]
    assert human.options == (("color", "blue"),)


READERS: dict[str, Callable[[Path], None]] = {
    "questions.jsonl": _questions, "recipe.toml": _columns, "problems.jsonl": _columns,
    "gsm8k.jsonl": _task_set, "passages.jsonl": _passages, "pages.jsonl": _pages,
    "trajectories.jsonl": _trajectories,
    "own.toml": _recipe, "products.json": _webshop, "attributes.json": _webshop, "human_goals.json": _webshop,
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_every_example_of_the_page_is_read(name: str, page: Path) -> None:
    READERS[name](page)


def test_every_example_has_a_reader() -> None:
    assert set(_files()) == set(READERS)
    assert PAGE.read_text(encoding="utf-8").count("\n```") == 2 * len(READERS)
