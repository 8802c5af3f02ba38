"""Small task sets on disk, and the command that evaluates on them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.cli import main
from tests.chat_server import Answer, Asked, ChatServer

Script = Callable[[Asked], Answer]

MODELS = Answer({"data": [{"id": "agent", "owned_by": "me"}, {"id": "judge", "owned_by": "me"}]})
IMPATIENT = ("endpoint.backoff_s=0", "endpoint.max_retries=1", "endpoint.timeout_s=5")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluate(run: Path, *arguments: str) -> int:
    return main(["eval", "--run", str(run), "--progress", "none", *arguments])


def with_models(script: Script) -> Script:
    """A server that also lists its models."""
    return lambda asked: MODELS if asked.path.endswith("/models") else script(asked)


def play(server: ChatServer, tasks: str, run: Path, *more: str) -> int:
    """Evaluate the model ``agent`` of the server."""
    return evaluate(
        run, "--endpoint", server.url, "--endpoint-model", "agent", "--tasks", tasks, *IMPATIENT, *more
    )


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def results(run: Path) -> list[dict[str, Any]]:
    """The lines of the results file after the first."""
    return [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()[1:]]


def question_in(asked: Asked) -> str:
    """The text of the first user message."""
    return str(
        next(message["content"] for message in (asked.body or {})["messages"] if message["role"] == "user")
    )
