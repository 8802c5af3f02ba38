"""Every file that settings name is digested, in any section."""

import os
from pathlib import Path
from typing import ClassVar

import pytest

from outrider.algorithms.retrospex import RetrospexSettings
from outrider.config import Settings, validate
from outrider.environments.agent.environment import AgentConfig
from outrider.environments.tool_qa.environment import ToolsConfig
from outrider.training.resume import check_inputs, settings_files


class Tool(Settings):
    pages: Path | None = None


class Questions(Settings):
    makes_tasks: ClassVar[bool] = True
    path: Path


class House(Settings):
    corpus: Path
    first: Tool
    tools: tuple[str | Tool, ...]
    train: Questions


class Odd(Settings):
    args: tuple[int, ...]
    command: House


def test_files_of_sections_and_of_lists_of_tables_are_named() -> None:
    """A tool's pages in a list were not compared with those that the run began with."""
    tools = ("python", Tool(pages=Path("b")), Tool())
    house = House(
        corpus=Path("c"), first=Tool(pages=Path("a")), tools=tools, train=Questions(path=Path("tasks"))
    )
    found = {"corpus": Path("c"), "first.pages": Path("a"), "tools.1.pages": Path("b")}
    assert dict(settings_files(house)) == found


def test_the_scripts_of_commands_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent program, and servers of tools and environments; not the interpreter or other words."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("print('é')", encoding="utf-8")
    (tmp_path / "python").write_bytes(b"\x7fELF\0\0")
    agent = AgentConfig(command=("./python", "-u", "agent.py", "{question}", "a\0b"), reward="one:two")
    assert dict(settings_files(agent)) == {"command.agent.py": Path("agent.py")}
    tools = ToolsConfig.model_validate(
        {"tools": [{"type": "mcp", "name": "a", "command": "node", "args": ["agent.py"]}]}
    )
    assert dict(settings_files(tools)) == {"tools.0.args.agent.py": Path("agent.py")}
    os.mkfifo("pipe")
    odd = Odd(
        args=(1, 2), command=House(corpus=Path("c"), first=Tool(), tools=(), train=Questions(path=Path()))
    )
    assert dict(settings_files(odd)) == {"command.corpus": Path("c")}
    assert dict(settings_files(agent.model_copy(update={"command": ("cat", "pipe", "")}))) == {}


def test_another_file_of_a_command_is_reported_and_not_refused() -> None:
    """A program may write it: a log, or a memory."""
    name = "environment.command.agent.log"
    lines = check_inputs({name: "ab"}, {name: "cd"}, other_versions=False)
    assert lines == [f"OTHER FILE {name}; the run continues, but may not reproduce the same bits"]


def test_the_critic_of_an_engine_is_named() -> None:
    settings = validate(RetrospexSettings, {"critic": "critic.safetensors", "allow_training": True})
    assert dict(settings_files(settings)) == {"critic": Path("critic.safetensors")}
