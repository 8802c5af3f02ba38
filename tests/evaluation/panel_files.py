"""Small panels on disk, and the command that evaluates on them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.cli import main
from tests.chat_server import Answer, Asked

MODELS = Answer({"data": [{"id": "agent", "owned_by": "me"}, {"id": "judge", "owned_by": "me"}]})
IMPATIENT = ("endpoint.backoff_s=0", "endpoint.max_retries=1", "endpoint.timeout_s=5")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluate(run: Path, *arguments: str) -> int:
    return main(["eval", "--run", str(run), "--progress", "none", *arguments])


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def results(run: Path) -> list[dict[str, Any]]:
    """What is on file, without the first line."""
    return [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()[1:]]


def question_in(asked: Asked) -> str:
    """The text of the first user message."""
    return str(
        next(message["content"] for message in (asked.body or {})["messages"] if message["role"] == "user")
    )
