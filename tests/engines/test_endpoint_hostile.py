"""Servers that dribble, flood, echo the key or steer the terminal; by a mocked transport and by
sockets.
"""

import asyncio
import contextlib
import gzip
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import httpx2
import pytest

from outrider.cli import main
from outrider.engines.chat import ChatEndpoint, EndpointSettings
from outrider.errors import EngineFault, ModelError
from outrider.types import Message
from tests.chat_server import Answer, chat_server

KEY = "sk-a'secret"
OK = b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}'


class Stream(httpx2.AsyncByteStream):
    """A body in the chunks of a generator."""

    def __init__(self, chunks: Callable[[], AsyncIterator[bytes]]) -> None:
        self._chunks = chunks

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks()


def complete(
    answer: Callable[[httpx2.Request], httpx2.Response] | None,
    url: str = "http://server/v1",
    **settings: object,
) -> str:
    transport = None if answer is None else httpx2.MockTransport(answer)
    chosen = EndpointSettings.model_validate(
        {"base_url": url, "model": "m", "max_retries": 0, "timeout_s": 0.3} | settings
    )
    chat = ChatEndpoint(chosen, sleep=lambda seconds: None, transport=transport)
    return chat.complete([Message(role="user", content="q")], max_tokens=5, temperature=0).text


def test_one_byte_chunks_are_read_in_linear_time_and_without_waiting_past_the_limit() -> None:
    async def slow_end() -> AsyncIterator[bytes]:
        for _ in range(60_000):  # quadratic reading takes minutes here
            yield b" "
        yield OK

    async def endless() -> AsyncIterator[bytes]:
        while True:  # never waits, so only a look at the clock can end it
            yield b" "

    assert complete(lambda request: httpx2.Response(200, stream=Stream(slow_end)), timeout_s=300) == "hi"
    with pytest.raises(EngineFault, match=r"no answer within 0\.3 s"):
        complete(lambda request: httpx2.Response(200, stream=Stream(endless)))


@contextlib.contextmanager
def raw_server(head: bytes, then: bytes = b"", *, forever: bool = False) -> Iterator[str]:
    """Answers every connection with these bytes; ``forever`` sends ``then`` again and again until the client
    hangs up.
    """

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            asked = b""
            while b"\r\n\r\n" not in asked and (piece := connection.recv(1 << 16)):
                asked += piece
            connection.sendall(head)
            while forever:
                connection.sendall(then)
            connection.sendall(then)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        server.shutdown(socket.SHUT_RDWR)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "then"),
    [
        (CHUNKED, b"1\r\n \r\n" * 20_000),
        (b"HTTP/1.1 200 OK\r\nX: ", b"a"),
        (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000),
        (b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 20_000),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", b" " * 65536),
    ],
    ids=["chunks", "header", "hints", "error", "long"],
)
def test_a_flood_ends(head: bytes, then: bytes) -> None:
    with raw_server(head, then, forever=True) as url:
        began = time.monotonic()
        with pytest.raises(EngineFault, match="gave up after 1 try"):
            complete(None, url)
        assert time.monotonic() - began < 60


def test_a_held_request_does_not_hold_up_another_one_of_the_same_client() -> None:
    came, release = threading.Event(), threading.Event()

    async def held() -> AsyncIterator[bytes]:
        came.set()
        while not release.is_set():
            await asyncio.sleep(0.001)
        yield OK

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(
            200, stream=Stream(held) if b'"max_tokens": 1,' in request.content else httpx2.ByteStream(OK)
        )

    settings = EndpointSettings(base_url="http://h/v1", model="m", max_retries=0)
    chat = ChatEndpoint(settings, transport=httpx2.MockTransport(answer))
    first = threading.Thread(target=lambda: chat.complete([], max_tokens=1, temperature=0))
    first.start()
    assert came.wait(60)
    assert chat.complete([], max_tokens=2, temperature=0).text == "hi"
    assert first.is_alive()
    release.set()
    first.join(60)
    assert not first.is_alive()


def test_a_compressed_answer_is_not_unpacked() -> None:
    asked: list[str] = []

    def bomb(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.headers["Accept-Encoding"])
        return httpx2.Response(
            200, headers={"Content-Encoding": "gzip"}, stream=httpx2.ByteStream(gzip.compress(bytes(10**7)))
        )

    with pytest.raises(EngineFault, match="is no JSON"):
        complete(bomb, timeout_s=60)
    assert asked == ["identity"]


@pytest.mark.parametrize("status", [200, 400, 401, 500])
def test_no_server_steers_the_terminal(status: int) -> None:
    words = "\x1b[2J\x1b]0;owned\x07\u202e\u2028 \x9b31m no"
    answer = Answer({"error": {"message": words}}, status=status)
    with chat_server([answer]) as server, pytest.raises((EngineFault, ModelError)) as error:
        complete(None, server.url, timeout_s=60)
    assert str(error.value).isprintable()


def test_the_command_line_prints_no_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "/nowhere/\x1b[2J\udcff\n"]) == 1
    said = capsys.readouterr().err
    assert said.endswith("\n") and said[:-1].isprintable()


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 500 no " + KEY.encode() + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 401 no " + KEY.encode() + b"\r\nContent-Length: 0\r\n\r\n",
        KEY.encode() + b"\r\n\r\n",
        b"HTTP/1.1 " + KEY.encode() + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + KEY.encode() + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + KEY.encode() + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + KEY.encode() + b"\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://" + KEY.encode() + b"/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 400 Bad\r\nContent-Length: 320\r\n\r\n" + b"x" * 270 + KEY.encode() + b"y" * 39,
    ],
)
def test_an_echoed_key_is_never_shown(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the status line, in a line that is no HTTP, and across the place where a long text is cut."""
    monkeypatch.setenv("OUTRIDER_API_KEY", KEY)
    with raw_server(reply) as url, pytest.raises((EngineFault, ModelError)) as error:
        complete(None, url, timeout_s=60)
    assert "secret" not in str(error.value) and "sk-a" not in str(error.value)


def test_a_list_of_models_with_unprintable_or_endless_names() -> None:
    models = Answer({"data": [{"id": "\x1b[2J"}, {"id": 5}, {"id": "good" * 1000}, {"id": ["x"]}]})
    with chat_server([models]) as server:
        chat = ChatEndpoint(EndpointSettings(base_url=server.url, model="other"))
        with pytest.raises(ModelError) as error:
            chat.discovered()
    assert str(error.value).isprintable() and len(str(error.value)) < 500
