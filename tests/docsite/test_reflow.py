"""Lines of the documents: none over 110 columns, and breaking them anew changes nothing that a reader
sees.
"""

from pathlib import Path

import pytest
from docsite.reflow import WIDTH, documents, long_lines, main, reflowed

ROOT = Path(__file__).parents[2]
LONG = "word " * 40


@pytest.mark.parametrize("path", documents(ROOT), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_line_of_a_document_is_too_long(path: Path) -> None:
    assert long_lines(path.read_text(encoding="utf-8")) == [], "run: python -m docsite.reflow"


@pytest.mark.parametrize("path", documents(ROOT), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_documents_stay_as_they_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert reflowed(text) == text


def test_a_paragraph_and_an_item_are_broken_at_blanks() -> None:
    text = f"# Title\n\n{LONG.strip()}\nend\n\n- {LONG.strip()}\n- short\n"
    new = reflowed(text).split("\n")
    assert max(map(len, new)) <= WIDTH and new[-2] == "- short"
    assert [line[:6] for line in new if line.startswith((" ", "-"))] == ["- word", "  word", "- shor"]


@pytest.mark.parametrize(
    "text",
    [f"```bash\n{LONG}\n```\n", f"    {LONG}\n", f"| {LONG} |\n", f"# {LONG}\n", f"{LONG}  \nmeant\n",
     f"<!-- figures: x -->\n\n| {LONG} |\n", f"a\n\n`{LONG}`\n"],
)  # fmt: skip
def test_what_is_no_paragraph_stays(text: str) -> None:
    assert reflowed(text) == text


@pytest.mark.parametrize("word", ["-", "1.", "#", "|", "<!-- figure: a -->1<!-- /figure -->", ">"])
def test_no_line_begins_with_what_opens_a_block(word: str) -> None:
    new = reflowed(f"{'x' * (WIDTH - 2)} {word} more {LONG}")
    assert [line for line in new.split("\n") if line.startswith(word)] == []


def test_a_code_span_is_one_word() -> None:
    assert "`outrider train recipes/demo.toml`" in reflowed(
        "word " * 20 + "`outrider train recipes/demo.toml` " + LONG
    )


def test_lines_that_are_too_long_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        f"a\n```bash\n{LONG}\n```\n```json\n{LONG}\n```\n| {LONG} |\n[{'x' * 60}](https://{'y' * 80})\n"
    )
    assert main(["--check", str(page)]) == 1
    assert capsys.readouterr().out == f"{page}:3: over {WIDTH} columns\n"
    page.write_text(f"{LONG}\n")
    assert main(["--check", str(page)]) == 1 and main([str(page)]) == 0 and main(["--check", str(page)]) == 0
