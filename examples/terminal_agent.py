"""An agent whose shell is a container, for tasks in the layout of Harbor (and of Terminal-Bench 2): an
instruction, an image, and a test script that says what the work was worth. It knows OpenAI's client, a
command line like Docker's, and nothing of Outrider (docs/howto/containers.md).

    python examples/terminal_agent.py FOLDER_OF_TASKS > tasks.jsonl

writes the data set: a row a task. The agent itself is outside of the container, which so needs no network.
"""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI

# "podman --runtime runc" is one as well
ENGINE = os.environ.get("CONTAINER_COMMAND", "docker").split()
OPTIONS = os.environ.get("CONTAINER_OPTIONS", "--network=none").split()
MAX_TURNS = 20
COMMAND_S = 60  # of one command
TESTS_S = 300
LIFE_S = 1800  # a container ends itself where the agent was killed
SHOWN = 2000  # characters of what a command printed
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command in the terminal of the task's machine.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "for sh -c"}},
            "required": ["command"],
        },
    },
}


def run(task: Any) -> dict[str, Any]:
    """An episode. The answer of the task's row is its folder; the return is what its test script writes."""
    folder = Path(task.answers[0])
    with container(image_of(folder)) as name:
        num_commands = work(OpenAI(max_retries=0), task.question, name)
        reward = tested(name, folder)
    return {"reward": reward, "success": reward == 1, "metrics": {"num_commands": num_commands}}


def work(client: OpenAI, instruction: str, name: str) -> int:
    """Let the model run commands until it calls no tool; returns how many it ran."""
    messages: list[Any] = [
        {"role": "system", "content": "You work in a terminal. Use the tool shell. Say done when you are."},
        {"role": "user", "content": instruction},
    ]
    num_commands = 0
    for _ in range(MAX_TURNS):
        said = client.chat.completions.create(model="policy", messages=messages, tools=[SHELL])  # type: ignore[list-item]
        turn = said.choices[0].message
        messages.append(turn.model_dump(exclude_none=True))
        if not turn.tool_calls:
            break
        for call in turn.tool_calls:
            output = shell(name, json.loads(call.function.arguments)["command"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
            num_commands += 1
    return num_commands


def shell(name: str, command: str) -> str:
    """What a command of the model's prints, in the end its status; never raises for what it does."""
    try:
        done = engine("exec", name, "timeout", str(COMMAND_S), "sh", "-c", command, timeout=COMMAND_S + 10)
    except subprocess.TimeoutExpired:
        return f"(no end after {COMMAND_S} s)"
    text = done.stdout[-SHOWN:]
    return text if done.returncode == 0 else f"{text}\n(status {done.returncode})"


def tested(name: str, folder: Path) -> float:
    """Copy the tests in, which the model has not seen, run them, and read the reward. A machine that runs and
    has none was left in such a state by the model: that is worth nothing. One that is gone is a fault.
    """
    checked(engine("cp", str(folder / "tests"), f"{name}:/tests"))
    try:
        checked(engine("exec", name, "mkdir", "-p", "/logs/verifier"))
        checked(engine("exec", name, "chmod", "+x", "/tests/test.sh"))
        engine("exec", name, "/tests/test.sh", timeout=TESTS_S)  # its status says nothing: the file does
        return float(checked(engine("exec", name, "cat", "/logs/verifier/reward.txt")))
    except (RuntimeError, ValueError, subprocess.TimeoutExpired):
        if checked(engine("inspect", "--format", "{{.State.Running}}", name)).strip() != "true":
            raise
        return 0.0


@contextmanager
def container(image: str) -> Iterator[str]:
    """A running container's name. It is gone behind the block, or LIFE_S later."""
    name = f"outrider-{uuid.uuid4().hex}"
    checked(engine("run", "--detach", "--rm", "--name", name, *OPTIONS, image, "sleep", str(LIFE_S)))
    try:
        yield name
    finally:
        engine("kill", name)  # and so removed


def image_of(folder: Path) -> str:
    """Which image to start: built beforehand by ``docker build --tag task-NAME NAME/environment``."""
    return f"task-{folder.name}"


def engine(*words: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """A command of the container engine, with all that it prints."""
    return subprocess.run(
        [*ENGINE, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        encoding="utf-8", errors="replace", timeout=timeout,
    )  # fmt: skip


def checked(done: subprocess.CompletedProcess[str]) -> str:
    """What it printed. A machine that fails is a fault, and no reward of zero."""
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(done.args)} ended with status {done.returncode}: {done.stdout[-500:]}")
    return done.stdout


def rows(folders: Sequence[Path]) -> Iterator[dict[str, str]]:
    """The data set of these tasks."""
    for folder in folders:
        text = (folder / "instruction.md").read_text(encoding="utf-8").strip()
        yield {"question": text, "answer": str(folder.resolve()), "id": folder.name}


if __name__ == "__main__":
    for row in rows(sorted(path.parent for path in Path(sys.argv[1]).glob("*/instruction.md"))):
        print(json.dumps(row))
