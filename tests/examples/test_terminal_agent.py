"""examples/terminal_agent.py plays tasks in Harbor's layout: with a stand-in for the container engine, whose
machines are folders, and with a real one where there is one.
"""

import importlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("openai", reason="needs the package openai")

from outrider.types import Outcome, Task  # noqa: E402
from tests.environments.agents.harness import (  # noqa: E402
    by_turn,
    closing,
    family_renderer,
    own_factory,
    scheduler,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
ENGINE = """#!/bin/sh
# run --detach --rm --name NAME ... | exec NAME WORD... | cp FROM NAME:/TO | kill NAME
what=$1; shift
echo "$what" >> "$MACHINES/asked"
case $what in
run) mkdir "$MACHINES/$4" ;;
exec) name=$1; shift; cd "$MACHINES/$name" || exit 125
  for word; do shift; case $word in /tests*|/logs*) word=$PWD$word ;; esac; set -- "$@" "$word"; done; "$@" ;;
cp) cp -r "$1" "$MACHINES/${2%:*}${2#*:}" ;;
inspect) test -d "$MACHINES/$3" && echo true ;;
kill) rm -r "$MACHINES/$1" ;;
esac
"""
TEST = """#!/bin/sh
if [ "$(cat colour.txt)" = blue ]; then echo 1; else echo 0; fi > logs/verifier/reward.txt
"""


def named(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Task, ...]]:
    """One task, and the engine on PATH."""
    folder = tmp_path / "tasks" / "colour"
    (folder / "tests").mkdir(parents=True)
    (folder / "instruction.md").write_text("Write blue into colour.txt.\n")
    (folder / "tests" / "test.sh").write_text(TEST)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(ENGINE)
    (tmp_path / "bin" / "docker").chmod(0o755)
    (tmp_path / "machines").mkdir()
    monkeypatch.setenv("MACHINES", str(tmp_path / "machines"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(EXAMPLES)
    [row] = named("terminal_agent").rows([folder])
    yield (Task(key=row["id"], question=row["question"], answers=(row["answer"],)),)


def call(command: str) -> str:
    arguments = {"name": "shell", "arguments": {"command": command}}
    return f"<tool_call>\n{json.dumps(arguments)}\n</tool_call>"


def played(
    tasks: tuple[Task, ...], *said: str
) -> tuple[list[str], list[tuple[Outcome | None, float | None]]]:
    """What the model was shown for its turns, and how the two rollouts ended."""
    seen: list[tuple[str, str]] = []
    with closing(own_factory(tool_calls="hermes", function="terminal_agent:run")) as factory:
        made = scheduler(factory, renderer=family_renderer(), script=by_turn(*said), seen=seen)
        report = made.run(tasks, modes=("m",) * 2, training_step=0)
    ends = [(leaf.outcome, leaf.episode_return) for leaf, _ in report.traces[0].rollouts()]
    return [text for _, text in seen], ends


def machines() -> list[str]:
    return [one.name for one in Path(os.environ["MACHINES"]).glob("outrider-*")]


@pytest.mark.parametrize(
    ("command", "shown", "value"),
    [
        ("printf blue > colour.txt; ls", "colour.txt", 1.0),
        pytest.param("printf red > colour.txt; ls nowhere", "(status ", 0.0, marks=pytest.mark.slow),
        pytest.param("ls /tests; exit 3", "(status 3)", 0.0, marks=pytest.mark.slow),
        # there is no place for its reward
        pytest.param("printf blue > colour.txt; touch logs", "", 0.0, marks=pytest.mark.slow),
    ],
)
def test_the_reward_depends_on_the_files_of_the_commands(
    command: str, shown: str, value: float, tasks: tuple[Task, ...]
) -> None:
    seen, ends = played(tasks, call(command), "done")
    assert ends == [(Outcome.FINISHED, value)] * 2
    assert "Write blue into colour.txt." in seen[0] and shown in seen[-1]
    assert machines() == []


@pytest.mark.slow
def test_a_lost_machine_is_a_fault(tasks: tuple[Task, ...]) -> None:
    _, ends = played(tasks, call('rm -r "$PWD"'), "done")
    assert ends == [(Outcome.ENVIRONMENT_FAULT, None)] * 2


@pytest.mark.slow
def test_the_same_in_containers(tasks: tuple[Task, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where podman or Docker may start one of an image that holds busybox alone."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("needs busybox (static) for an image")
    image = image_of_busybox(Path(busybox))
    limits = "--network=none --ulimit=nofile=1024:1024 --ulimit=nproc=4096:4096"
    for command in ("podman", "podman --runtime runc", "docker"):
        if works(command.split(), limits.split(), image):
            break
    else:
        pytest.skip("no container engine starts a container here")
    monkeypatch.setenv("CONTAINER_COMMAND", command)
    monkeypatch.setenv("CONTAINER_OPTIONS", limits)
    seen, ends = played(tasks, call("cd /; printf blue > colour.txt; ls; cat /etc/passwd"), "done")
    assert ends == [(Outcome.FINISHED, 1.0)] * 2
    assert "colour.txt" in seen[-1] and "No such file" in seen[-1]  # its own files and not this machine's
    told = subprocess.run(
        [*command.split(), "ps", "--all", "--format", "{{.Names}}"], capture_output=True, text=True
    )
    assert "outrider-" not in told.stdout


def image_of_busybox(busybox: Path) -> bytes:
    """An archive of a file system with busybox and a link for every program in it."""
    names = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(busybox.resolve(), "bin/busybox")
        for name in names:
            if name != "busybox":
                link = tarfile.TarInfo(f"bin/{name}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                archive.addfile(link)
    return buffer.getvalue()


def works(command: list[str], options: list[str], image: bytes) -> bool:
    """Whether this engine takes the image, named as the task's, and runs something in it."""
    if shutil.which(command[0]) is None:
        return False
    made = subprocess.run([*command, "import", "-", "task-colour"], input=image, capture_output=True)
    told = subprocess.run([*command, "run", "--rm", *options, "task-colour", "true"], capture_output=True)
    return made.returncode == 0 and told.returncode == 0
