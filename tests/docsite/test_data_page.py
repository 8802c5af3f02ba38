"""docs/run/data.md: the table has every data set as the package knows it, and every command exists."""

import re
import shlex
from pathlib import Path

import pytest
from rich.filesize import decimal

from outrider.cli import main, make_parser
from outrider.downloads import data_sets

PAGE = (Path(__file__).parents[2] / "docs" / "run" / "data.md").read_text(encoding="utf-8")
COMMANDS = set(re.findall(r"\b(outrider data (?:list|get [a-z0-9-]+|check [\w/]+))", PAGE))


def test_the_table_has_every_data_set() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", PAGE, re.MULTILINE))
    assert {name for name in rows if name in data_sets()} == set(data_sets())
    for name, data_set in data_sets().items():
        title, download, licence = rows[name].split(" | ")
        assert title == data_set.title and licence == data_set.licence
        assert download.startswith(decimal(data_set.num_bytes) if data_set.files else "nothing")


@pytest.mark.parametrize("line", sorted(COMMANDS))
def test_the_commands_exist(line: str) -> None:
    assert callable(make_parser(["data"]).parse_args(shlex.split(line)[1:]).command)


def test_the_printed_commands_are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list"]) == 0
    assert set(re.findall(r"^([a-z0-9-]+)$", capsys.readouterr().out, re.MULTILINE)) == set(data_sets())
    for line in data_sets()["webshop-small"].after:
        assert "  " + line.replace("{dir}", "data/webshop-small") in PAGE.splitlines()
