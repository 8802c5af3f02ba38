"""A chat server on 127.0.0.1 for tests: answers from a script, and remembers what it was asked."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """``body``: bytes as they are, or an object for JSON. The answer is held back while ``hold`` is not
    set.
    """

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hold: threading.Event | None = None
    drop: bool = False
    trickle: bool = False
    trickle_headers: bool = False


def completion(text: str | None, *, finish: str = "stop", num_tokens: int = 7, **choice: Any) -> Answer:
    message = {"role": "assistant", "content": text}
    usage = {"completion_tokens": num_tokens}
    return Answer(
        {"choices": [{"index": 0, "message": message, "finish_reason": finish, **choice}], "usage": usage}
    )


@dataclass
class Asked:
    path: str
    body: dict[str, Any] | None
    authorization: str | None


class ChatServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: Callable[[Asked], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.asked: list[Asked] = []
        self.lock = threading.Lock()
        self.release = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that hung up is part of the tests
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        asked = Asked(self.path, body, self.headers.get("Authorization"))
        with self.server.lock:
            self.server.asked.append(asked)
            answer = self.server.script(asked)
        if answer.hold is not None:
            answer.hold.wait(20)
        if answer.drop:
            self.connection.close()
            return
        raw = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        if answer.trickle_headers:
            self._trickle(b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 1000)
            return
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if answer.trickle:
            self._trickle(raw)
        else:
            self.wfile.write(raw)

    def _trickle(self, raw: bytes) -> None:
        for byte in raw:
            self.wfile.write(bytes([byte]))
            if self.server.release.wait(0.05):
                return

    do_GET = do_POST = _serve

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def chat_server(script: Callable[[Asked], Answer] | list[Answer]) -> Iterator[ChatServer]:
    """A list is answered in order, the last entry for ever."""
    if isinstance(script, list):
        answers = list(script)
        server = ChatServer(lambda asked: answers.pop(0) if len(answers) > 1 else answers[0])
    else:
        server = ChatServer(script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()
        thread.join()
