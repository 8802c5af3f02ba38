"""Lists of test files outside of the tests: a renamed file would silently drop out of them."""

import re
from pathlib import Path

from tests.conftest import LONGEST

ROOT = Path(__file__).parents[1]


def test_the_files_that_start_first_exist() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


def test_the_files_of_make_test_lesser_exist() -> None:
    lists = re.findall(r"patsubst %,(tests/\w+/test_)%\.py,([\w ]+)\)", (ROOT / "Makefile").read_text())
    files = [f"{prefix}{name}.py" for prefix, names in lists for name in names.split()]
    assert len(files) > 9 and [name for name in files if not (ROOT / name).is_file()] == []


def test_the_slowest_tests_of_the_page_exist() -> None:
    page = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([\w/]+\.py)::(\w+)` \|", page, re.MULTILINE)
    files = {file: (ROOT / "tests" / file).read_text(encoding="utf-8") for file, _ in named}
    assert len(named) >= 30 and [name for file, name in named if f"def {name}(" not in files[file]] == []
