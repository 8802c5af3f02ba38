"""The help of every command is complete, fits 80 columns, and its examples are accepted; typing errors get
the nearest name.
"""

import argparse
import re
import shlex

import pytest

from outrider.cli import COMMANDS, GROUPS, main, make_parser
from outrider.commands import all_parsers

PARSERS = {parser.prog: parser for parser in all_parsers(make_parser())}


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("prog", PARSERS)
def test_every_parser_has_a_description_and_examples_and_every_argument_a_help(prog: str) -> None:
    parser = PARSERS[prog]
    assert parser.description and parser.description.endswith(".")
    examples = re.findall(r"^  (outrider .*?)(?:\s+#.*)?$", parser.epilog or "", re.MULTILINE)
    assert examples and all(example.startswith(f"{prog} ") or example == prog for example in examples)
    for example in examples:
        parsed, rest = make_parser().parse_known_args(shlex.split(example)[1:])
        assert callable(parsed.command) and all("=" in item for item in rest), example
    for action in parser._actions:
        choices = action._get_subactions() if isinstance(action, argparse._SubParsersAction) else [action]
        assert all(choice.help for choice in choices), action.dest
    assert max(map(len, parser.format_help().splitlines())) <= 80


def test_the_help_lists_all_commands_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == ["options", *GROUPS, "examples"]
    for name, (_, group, meaning) in COMMANDS.items():
        section = text.partition(f"\n{group}:\n")[2].partition("\n\n")[0]
        assert re.search(rf"^  {name} +{re.escape(meaning)}$", section, re.MULTILINE), name


def test_smoke_is_among_the_first_options_and_examples_of_train() -> None:
    text = PARSERS["outrider train"].format_help()
    options, examples = text.partition("options:")[2].split("\nexamples:\n")
    assert re.findall(r"^  (--\w+)", options, re.MULTILINE)[:2] == ["--run", "--smoke"]
    assert "--smoke" in examples.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian', did you mean train? outrider --help lists the commands"),
        (["zzz"], "unknown command 'zzz'. outrider --help lists the commands"),
        (["buffer", "biuld"], "unknown command 'biuld', did you mean build? outrider buffer --help"),
        (["train", "--rseume", "x"], "--rseume, did you mean --resume?"),
        (["train", "--smoek"], "--smoek, did you mean --smoke?"),
        (["buffer", "query", "f", "h", "--embeder=hash"], "--embeder=hash, did you mean --embedder?"),
        (["train", "--progress", "plane"], "did you mean plain?"),
        (["list", "algoritms"], "did you mean algorithms?"),
    ],
)
def test_typing_errors_get_the_nearest_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err
