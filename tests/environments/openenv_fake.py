"""A server in a thread that speaks OpenEnv's messages, and answers whatever a test wants."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

SCHEMA = {
    "action": {"properties": {"text": {"type": "string"}, "metadata": {}}, "required": ["text"]},
    "observation": {"properties": {"text": {"type": "string"}, "done": {}, "reward": {}, "metadata": {}}},
}
Answer = Callable[[str, Any], str | bytes | None]
"""Given a message's type and data, what is sent back; None closes the connection."""


def observed(text: str, reward: float | None = None, done: bool = False) -> str:
    data = {"observation": {"text": text}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


@dataclass
class Fake:
    """``pages`` are what HTTP answers by path. ``num_open`` are the sessions that are open."""

    answer: Answer
    pages: dict[str, str]
    url: str = ""
    num_open: int = 0
    asked: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def num_left(self, patience_s: float = 10.0) -> int:
        """Sessions that stay open: the server hears of the end of one a moment later."""
        until = time.monotonic() + patience_s
        while self.num_open and time.monotonic() < until:
            time.sleep(0.01)
        return self.num_open

    def serve(self, connection: ServerConnection) -> None:
        with self.lock:
            self.num_open += 1
        try:
            for raw in connection:
                message = json.loads(raw)
                with self.lock:
                    self.asked.append(message["type"])
                    answer = None if message["type"] == "close" else self._answered(message)
                if answer is None:
                    return
                connection.send(answer)
        except ConnectionClosed:
            pass
        finally:
            with self.lock:
                self.num_open -= 1

    def page(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws":
            return None
        found = self.pages.get(request.path)
        status = HTTPStatus.NOT_FOUND if found is None else HTTPStatus.OK
        return connection.respond(status, found or "nothing")

    def _answered(self, message: Any) -> str | bytes | None:
        if message["type"] == "state":
            return json.dumps({"type": "state", "data": {}})
        return self.answer(message["type"], message.get("data"))


@contextmanager
def fake_server(answer: Answer, **pages: str) -> Iterator[Fake]:
    told = {
        "metadata": json.dumps({"name": "fake", "version": "1"}),
        "schema": json.dumps(SCHEMA),
        "health": "{}",
    }
    fake = Fake(answer, {f"/{path}": text for path, text in {**told, **pages}.items()})
    with serve(fake.serve, "127.0.0.1", 0, process_request=fake.page) as server:
        fake.url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield fake
        server.shutdown()
        thread.join()
