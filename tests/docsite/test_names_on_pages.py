"""The tests that a page names exist, in the files that it names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES: dict[str, str] = {}
for file in (ROOT / "tests").rglob("test_*.py"):  # several folders may have a file of one name
    FILES[file.name] = FILES.get(file.name, "") + file.read_text(encoding="utf-8")
NAMES = {name for text in FILES.values() for name in re.findall(r"def (test_\w+)", text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_tests_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files = set(re.findall(r"\b(test_\w+\.py)\b", text))
    names = set(re.findall(r"\b(test_\w+)\b(?!\.py)", text))
    assert files <= set(FILES) and names <= NAMES, sorted((files - set(FILES)) | (names - NAMES))
    for file, name in re.findall(r"\b(test_\w+\.py)::(test_\w+)", text):
        assert f"def {name}" in FILES[file], f"{file}::{name}"
