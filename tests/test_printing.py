"""One way of writing scores, and one way to the terminal, which no text of others steers."""

import ast
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import outrider
from outrider.cli import main
from outrider.config import Settings, load_settings, to_toml
from outrider.printing import FittedTable, Terminal, plural, points, print_lines, score, shell_command

ESCAPES = "a\x1b[2Jb\x1b]0;owned\x07c\x9b31md\u202ee\x00\x7ff"


@pytest.mark.parametrize(
    ("values", "is_share", "message"),
    [
        ((0.35, 0.255, 0.459), True, "35.0 % [25.5, 45.9]"),
        ((0.0, 0.0, 0.0188), True, "0.0 % [0.0, 1.9]"),
        ((1.0,), True, "100.0 %"),
        ((0.5, math.nan, math.nan), True, "50.0 %"),
        ((math.nan, math.nan, math.nan), True, "not measured"),
        ((1.25, -0.5, 2.0), False, "1.25 [-0.5, 2]"),
        ((0.1934,), False, "0.1934"),
    ],
)
def test_a_score_is_per_cent_with_its_interval_and_a_return_is_a_number(
    values: tuple[float, ...], is_share: bool, message: str
) -> None:
    assert score(*values, is_share=is_share) == message


def test_differences_are_points_with_their_sign() -> None:
    assert points(0.287, 0.16, 0.401) == "+28.7 points [+16.0, +40.1]"
    assert points(-0.05) == "-5.0 points" and points(math.nan) == "not measured"


def is_calm(text: str) -> bool:
    """Nothing but characters that show and line breaks."""
    return text.replace("\n", "").isprintable()


def test_any_text_is_printed_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines(f"first\n{ESCAPES}\r", "second \ud800")
    print_lines("third\u2028", to_stderr=True)
    message = capsys.readouterr()
    assert (
        is_calm(message.out)
        and message.out.splitlines()[1:] == ["second  "]
        and message.out.startswith("first a")
    )
    assert message.err == "third \n"


def shown(*cells: str, styled: bool = False) -> str:
    """A table in a frame, as text."""
    stream = io.StringIO()
    table = Table("what", "said", title=Text(cells[0]))
    table.add_row(*(Text(cell, style="bold red") for cell in cells))
    Terminal(file=stream, width=60, force_terminal=styled).print(Panel(table))
    return stream.getvalue()


@given(st.text(max_size=20), st.text(max_size=20))
def test_no_text_in_a_table_controls_the_terminal(one: str, other: str) -> None:
    assert is_calm(shown(one, other)) and is_calm(shown(ESCAPES, f"{one}\n{other}"))


def test_the_styles_of_a_table_are_its_own_and_its_columns_stay() -> None:
    styled = shown(ESCAPES, "two\nlines", styled=True)
    assert "\x1b[1;31m" in styled and "\x1b[2J" not in styled and not {"\x07", "\x9b"} & set(styled)
    lines = shown(ESCAPES, "two\nlines").splitlines()
    assert len({len(line) for line in lines}) == 1 and any("lines" in line for line in lines)


def test_texts_of_a_buffer_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Agents, tasks and steps are as others wrote them: `buffer query` sent their escapes to the terminal."""
    record = {
        "question": ESCAPES, "messages": [{"role": "assistant", "content": f"look {ESCAPES}"},
                                          {"role": "user", "content": ESCAPES},
                                          {"role": "assistant", "content": "done"}],
        "reward": 1.0, "agent": ESCAPES, "task_key": ESCAPES, "trajectory_id": ESCAPES,
    }  # fmt: skip
    file, buffer = tmp_path / "a.jsonl", str(tmp_path / "a.sqlite")
    file.write_text(json.dumps(record) + "\n" + json.dumps(record | {"reward": ESCAPES}) + "\n")
    given = ("--embedder", "hash")
    assert main(["buffer", "import", str(file), "--out", buffer, "--skip-malformed", *given]) == 0
    assert main(["buffer", "stats", buffer]) == 0
    assert main(["buffer", "query", buffer, "look", *given]) == 0
    message = capsys.readouterr()
    assert "owned" in message.out and is_calm(message.out) and is_calm(message.err)


class Named(Settings):
    name: str = ""


@given(st.text(max_size=30))
def test_a_configuration_is_shown_and_read_back_in_printable_text(name: str) -> None:
    if any("\ud800" <= one <= "\udfff" for one in name):
        return  # TOML cannot hold it
    text = to_toml(Named(name=name).model_dump())
    assert is_calm(text)
    assert load_settings(Named, file=None, overrides=[text]).name == name or name == "none"


def test_nothing_else_prints() -> None:
    """All output goes through one module, which removes control characters from the text of others."""
    source = Path(outrider.__file__).parent
    found = set()
    for path in source.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "print(" in text or "Console(" in text else ():
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if called in ("print", "Console"):
                found.add(path.relative_to(source).as_posix())
    without_terminal = {"tools/python/worker.py", "environments/textworld/games.py"}  # a parent reads these
    assert found <= {"printing.py", "viewer/progress.py"} | without_terminal and "printing.py" in found


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_fitted_table_breaks_no_word(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pip install 'outrider[tensorboard]'", "smollm2-135m-instruct in the cache", "not measured"]
    table = FittedTable("part", "what was found here", "advice", title="A table", caption="Of three.")
    for number in range(3):
        table.add_row(*(words[(number + shift) % 3] for shift in range(3)))
    Terminal(width=width).print(table)
    printed = capsys.readouterr().out
    assert all(len(line) <= width for line in printed.splitlines())
    for word in " ".join(words).split():
        assert printed.split().count(word) == 3, word
    assert ("│" in printed) == (width == 200 or width == 80), printed


def test_a_fitted_table_folds_a_word_that_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = FittedTable("name", "path")
    table.add_row("first", "x" * 100 + "\x1b[2J")
    Terminal(width=40).print(table)
    printed = capsys.readouterr().out
    assert printed.count("x") == 100 and max(map(len, printed.splitlines())) <= 40 and "\x1b" not in printed


@pytest.mark.parametrize(
    ("started", "path", "command"),
    [
        ("env/bin/outrider", "", "env/bin/outrider"),
        ("{folder}/env/bin/outrider", "", "env/bin/outrider"),
        ("{folder}/env/bin/outrider", "{folder}/env/bin", "outrider"),  # activated
        ("env/bin/outrider", "{folder}/other", "env/bin/outrider"),  # an older one is found by its name
        ("outrider", "", "./outrider"),
        ("my env/outrider", "", "'my env/outrider'"),
        ("/elsewhere/outrider", "", "/elsewhere/outrider"),
        ("/site/outrider/__main__.py", "", "env/bin/python -m outrider"),
        ("/site/outrider/__main__.py", "{folder}/env/bin", "python -m outrider"),
        ("train.py", "", "outrider"),  # a program that imports outrider
        ("/site/ipykernel_launcher.py", "", "outrider"),
        ("", "", "outrider"),
    ],
)
def test_a_printed_command_starts_the_program_of_the_user(
    started: str, path: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("env/bin/outrider", "env/bin/python", "other/outrider"):
        (tmp_path / program).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [started.format(folder=tmp_path)])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env/bin/python"))
    monkeypatch.setenv("PATH", path.format(folder=tmp_path))
    assert shell_command("view", Path("runs/my run")) == f"{command} view 'runs/my run'"


def test_a_printed_command_can_be_pasted(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(outrider.__file__).parents[1])}
    first = [sys.executable, "-m", "outrider", "new", "tool", "counter"]
    printed = subprocess.run(first, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    command = printed.stdout.splitlines()[-1].strip()
    assert command.endswith("-m outrider train counter/recipe.toml --run runs/counter")
    pasted = subprocess.run(
        ["sh", "-c", f"{command.partition(' train ')[0]} --version"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert pasted.stdout == f"{outrider.__version__}\n"


def test_a_closed_stdout_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python sets stdout to None after ``>&-``."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["data", "list"]) == 0
    assert main(["train", str(tmp_path / "missing.toml"), "--run", str(tmp_path / "run")]) == 2
    monkeypatch.undo()
    assert "missing.toml" in capsys.readouterr().err


def test_the_commands_after_new_quote_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a b"
    assert main(["new", "tool", "counter", "--folder", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"  pip install -e '{folder}'" in lines and f"  pytest '{folder}'" in lines


@pytest.mark.parametrize(
    ("num", "nouns", "text"),
    [
        (1, ("step",), "1 step"), (0, ("step",), "0 steps"), (2.0, ("step",), "2 steps"),
        (1.0, ("rollout was", "rollouts were"), "1 rollout was"), (3, ("try", "tries"), "3 tries"),
        (12345678, ("token",), "12345678 tokens"),
    ],
)  # fmt: skip
def test_a_noun_agrees_with_its_number(num: float, nouns: tuple[str, ...], text: str) -> None:
    assert plural(num, *nouns) == text


def test_no_message_leaves_the_choice_of_number_to_its_reader() -> None:
    """``3 step(s)``."""
    found = [
        f"{file.name}:{node.lineno}"
        for file in Path(outrider.__file__).parent.rglob("*.py")
        if "(s)" in (text := file.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.JoinedStr)
        and any(
            isinstance(part, ast.Constant) and re.search(r"[a-z]\(s\)", part.value) for part in node.values
        )
    ]
    assert found == []
