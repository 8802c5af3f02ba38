"""What stands in for files and servers that a recipe names and this machine does not have: four questions,
their passages, chats that answer them, a buffer of these, and a server that always says the same.
"""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from outrider import __version__
from outrider.atomic_io import first_folder
from outrider.engines.model_names import cache_folder
from outrider.memory.steps.format import check_file

REPLY: Final = "<think>two and two</think><answer>\\boxed{4}</answer>\n<judgment>Correct</judgment>"
NO_SERVER: Final = "http://127.0.0.1:1/v1"  # what --dry-run shows, which starts none
_NUMBERS: Final = ("two and two", "one and three", "three and one", "four and zero")
_EMBEDDER: Final = "hash"


@dataclass(frozen=True, slots=True)
class SmokeAssets:
    """Names below one folder, which :func:`write` fills."""

    folder: Path

    @property
    def model(self) -> Path:
        """A tiny random model."""
        return self.folder / "model"

    @property
    def questions(self) -> Path:
        """A data set of sums."""
        return self.folder / "questions.jsonl"

    @property
    def passages(self) -> Path:
        """What a search in a corpus finds."""
        return self.folder / "passages.jsonl"

    @property
    def trajectories(self) -> Path:
        """Chats that answer the questions."""
        return self.folder / "trajectories.jsonl"

    @property
    def buffer(self) -> Path:
        """A step-trace buffer of these chats."""
        return self.folder / "steps.sqlite"


def smoke_assets() -> SmokeAssets:
    """Those of this version, which need not be there yet."""
    return SmokeAssets(cache_folder() / f"smoke-{__version__}")


def write(names: SmokeAssets) -> None:
    """Makes what is named, once on a machine."""
    if names.folder.is_dir():
        return
    from outrider.memory.embedder import load_embedder
    from outrider.memory.steps.buffer import StepTraceBuffer
    from outrider.memory.steps.sources import import_trajectories
    from outrider.smoke.model import save_model

    with first_folder(names.folder) as folder:
        made = SmokeAssets(folder)
        save_model(made.model)
        questions = [f"How much is {phrase}?" for phrase in _NUMBERS]
        _write_lines(made.questions, [{"question": phrase, "answer": "4"} for phrase in questions])
        _write_lines(
            made.passages,
            [{"id": phrase, "title": phrase, "text": f"{phrase} is four."} for phrase in _NUMBERS],
        )
        _write_lines(made.trajectories, [_chat(number, phrase) for number, phrase in enumerate(questions)])
        read = import_trajectories(made.trajectories)
        with StepTraceBuffer(made.buffer, load_embedder(_EMBEDDER), mode="write") as buffer:
            buffer.add_trajectories(read.trajectories, questions=read.questions)


def _chat(number: int, question: str) -> dict[str, Any]:
    """One search and the answer; returns differ, so that a critic has something to learn."""
    turns = ("user", question), ("assistant", "<search>two</search>"), ("tool", "is four."), (
        "assistant", "<answer>\\boxed{4}</answer>"
    )  # fmt: skip
    messages = [{"role": role, "content": text} for role, text in turns]
    return {"question": question, "reward": float(number % 2), "messages": messages}


def _write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def buffer_embedder(buffer: Path, default: str) -> str:
    """The one that a buffer which is there was built with, as far as it is the hash or ``default``."""
    from outrider.memory.embedder import load_embedder

    hashed = load_embedder(_EMBEDDER)
    try:
        check_file(buffer, embedder=hashed.name, dim=hashed.dim)
    except Exception:  # whatever is wrong with it, the run tells
        return default
    return _EMBEDDER


@contextmanager
def server() -> Iterator[str]:
    """The URL of an OpenAI-compatible chat server that always gives the same reply."""
    serving = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{serving.server_address[1]}/v1"
    finally:
        serving.shutdown()
        serving.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Which models are served: none is named, so that any name is right."""
        self._answer({"data": []})

    def do_POST(self) -> None:
        """One reply for all."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        message = {"role": "assistant", "content": REPLY}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self._answer({"choices": [choice], "usage": {"completion_tokens": 9}})

    def _answer(self, body: Mapping[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""
