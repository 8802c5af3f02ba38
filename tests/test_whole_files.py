"""A data file of the user is wholly read or refused: no cut of it is half of the data without an error."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.algorithms.distill_help import read_help_file
from outrider.environments.base import listed_tasks
from outrider.environments.tool_qa.datasets import DatasetConfig, load_tasks
from outrider.environments.webshop.catalogue import load_catalogue
from outrider.errors import DataError
from outrider.memory.chat_files import import_trajectories
from outrider.tools.search import load_passages
from outrider.types import Task

TASKS = [Task(key=f"alfworld/test/{name}", question="?") for name in ("one", "two", "three")]
CHATS = [
    {
        "task_key": f"t{number}", "reward": 1.0,
        "messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}],
    }
    for number in range(3)
]  # fmt: skip
# The records of a file with one a line, and how it is read.
READERS: dict[str, tuple[Sequence[Any], Callable[[Path], Sequence[Any]]]] = {
    "data set": (
        [{"question": f"q{number}", "answer": "a"} for number in range(3)],
        lambda path: load_tasks(DatasetConfig(path=path)),
    ),
    "passages": ([{"id": str(n), "title": "t", "text": "x"} for n in range(3)], load_passages),
    "demonstrations": (CHATS, lambda path: import_trajectories(path).trajectories),
    "texts of help": ([{"task": f"t{n}", "text": "look twice"} for n in range(3)], read_help_file),
    "task list": (
        [task.key for task in TASKS],
        lambda path: listed_tasks(TASKS, path, split="test"),
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_cut_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    """At every byte of the second and third line. A cut between two lines leaves a whole file, which only its
    hash tells from the other one; a cut of the last line break loses nothing.
    """
    records, read = READERS[name]
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path = tmp_path / "file.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    whole = read(path)
    assert len(whole) == len(records)
    for number in (2, 3):
        before = "".join(f"{line}\n" for line in lines[: number - 1])
        for size in range(1, len(lines[number - 1])):
            path.write_text(before + lines[number - 1][:size])
            with pytest.raises(DataError) as caught:
                read(path)
            message = str(caught.value)
            assert path.name in message and (str(number) in message or "last line is cut" in message)


def webshop_files(folder: Path) -> dict[str, Path]:
    details = {
        "Title": "Kettle", "Description": "", "BulletPoints": [], "pricing": [20.0],
        "product_category": "", "query": "kettles", "options": {},
    }  # fmt: skip
    wish = {"instruction": "Find me kettles", "instruction_attributes": ["steel"]}
    contents = {
        "products": [{"id": "A1", "product": details}],
        "attributes": {"A1": {"attributes": ["steel"], **wish}},
        "human_goals": {"A1": [{**wish, "instruction_options": []}]},
    }
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1))
    return {name: folder / f"{name}.json" for name in contents}


@pytest.mark.parametrize("name", ["products", "attributes", "human_goals"])
def test_a_cut_file_of_the_shop_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    files = webshop_files(tmp_path)
    assert len(load_catalogue(**files).instructions) == 1  # type: ignore[arg-type]
    text = files[name].read_text()
    for size in range(1, len(text)):
        files[name].write_text(text[:size])
        with pytest.raises(DataError, match=rf"{name}\.json: Invalid JSON: .* at line \d+ column \d+"):
            load_catalogue(**files)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("data set", {"question": "q", "anwser": "a"}, r"file\.jsonl:4: no column 'answer'"),
        ("passages", {"id": "9", "tetx": "x"}, r"file\.jsonl:4: no column 'text'"),
        ("demonstrations", {"reward": 1.0, "massages": []}, r"file\.jsonl:4: no column .messages.*rename it"),
        ("texts of help", {"task": "t", "text": "x", "txet": "y"}, r"line 4 of file\.jsonl"),
        ("task list", "alfworld/test/tow", r"file\.jsonl:4: 'alfworld/test/tow' is no task"),
    ],
)
def test_a_misspelt_key_is_refused_with_its_line(
    name: str, record: Any, message: str, tmp_path: Path
) -> None:
    records, read = READERS[name]
    lines = [line if isinstance(line, str) else json.dumps(line) for line in (*records, record)]
    path = tmp_path / "file.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(DataError, match=message):
        read(path)
