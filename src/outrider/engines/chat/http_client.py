"""Requests with one deadline for the whole answer: connection, headers and body. By httpx2, whose own limits
are those of one read.

The requests run on an event loop in a thread of their own, where a deadline can end them wherever they wait:
a server that sends a byte now and then stalls too. Redirects are not followed, since they would carry a key
to another host.
"""

import asyncio
import os
import ssl
import threading
import weakref
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar

import anyio
import h11  # noqa: F401
import httpcore2  # noqa: F401
import httpx2

_MAX_BYTES = 16 << 20
_MAX_ERROR_BYTES = 1 << 14
# shorter than servers keep an idle connection (uvicorn: 5 s), so that none is found closed
_KEEPALIVE_S = 2.0

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """``reason`` is the server's own word for its status. ``content`` is raw: no encoding was asked for. Of
    an error it is what came in time, at most 16 KiB.
    """

    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes

    @property
    def is_error(self) -> bool:
        """Anything but success; a redirect too."""
        return not 200 <= self.status < 300


class AnswerTooLarge(httpx2.RemoteProtocolError):
    """A successful answer of more bytes than were asked for."""


class HttpClient:
    """Safe to use from several threads, and in a forked child. ``transport`` takes the place of the network
    in tests. ``is_bare``: no answer changes what a later request says (cookies), and no variable of the
    environment where it goes (proxies).
    """

    def __init__(self, transport: httpx2.AsyncBaseTransport | None = None, *, is_bare: bool = False) -> None:
        self._transport = transport
        self._is_bare = is_bare
        self._lock = threading.Lock()
        self._loops: dict[int, _Loop] = {}  # by process: threads do not outlive a fork

    def request(
        self,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        max_bytes: int = _MAX_BYTES,
        server_name: str | None = None,
    ) -> HttpAnswer:
        """POST with a body, GET without one. ``server_name``: whose certificate is asked for where the url
        holds a number in place of the name.

        Raises TimeoutError at the deadline, httpx2.HTTPError for a broken connection or an answer that is no
        HTTP, and httpx2.InvalidURL or ValueError for an address that cannot be.
        """
        with self._lock:
            loop = self._loops.get(os.getpid())
            if loop is None:
                loop = self._loops[os.getpid()] = _Loop(self._transport, self._is_bare)
                weakref.finalize(self, loop.stop)
        extensions = {} if server_name is None else {"sni_hostname": server_name}
        work = _exchange(loop.client, url, body, headers, timeout_s, max_bytes, extensions)
        return loop.run(work)


class _Loop:
    """An event loop in a thread, and its client."""

    def __init__(self, transport: httpx2.AsyncBaseTransport | None, is_bare: bool = False) -> None:
        policy = DefaultCookiePolicy(allowed_domains=() if is_bare else None)
        limits = httpx2.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S)
        self.client = httpx2.AsyncClient(
            transport=transport,
            verify=ssl.create_default_context(),
            timeout=None,
            limits=limits,
            follow_redirects=False,
            cookies=CookieJar(policy),
            trust_env=not is_bare,
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, name="outrider-http", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run on the loop and wait. An interrupted wait ends the work."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the thread; not waited for."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _serve(self) -> None:
        try:
            # httpx2 imports its network (those above, and what anyio needs of asyncio) at its first request,
            # within its deadline.
            self._loop.run_until_complete(anyio.sleep(0))
            self._loop.run_forever()
            self._loop.run_until_complete(self.client.aclose())
        finally:
            self._loop.close()


async def _exchange(
    client: httpx2.AsyncClient,
    url: str,
    body: bytes | None,
    headers: Mapping[str, str],
    timeout_s: float,
    max_bytes: int = _MAX_BYTES,
    extensions: Mapping[str, Any] | None = None,
) -> HttpAnswer:
    content = bytearray()
    response: httpx2.Response | None = None
    method = "GET" if body is None else "POST"
    request_headers = {**headers, "Accept-Encoding": "identity"}  # a few bytes could unpack to gigabytes
    try:
        async with (
            asyncio.timeout(timeout_s) as deadline,
            client.stream(
                method, url, content=body, headers=request_headers, extensions=dict(extensions or {})
            ) as response,
        ):
            async for chunk in response.aiter_raw():
                content += chunk
                if _is_past(deadline):  # chunks that have come already are read without waiting
                    raise TimeoutError
                if not response.is_success and len(content) > _MAX_ERROR_BYTES:
                    break
                if len(content) > max_bytes:
                    raise AnswerTooLarge(f"an answer of more than {max_bytes} bytes")
    except (TimeoutError, httpx2.HTTPError):
        if response is None or response.is_success:
            raise
    assert response is not None
    return HttpAnswer(
        status=response.status_code,
        reason=response.reason_phrase,
        headers=response.headers,
        content=bytes(content[: max_bytes if response.is_success else _MAX_ERROR_BYTES]),
    )


def _is_past(deadline: asyncio.Timeout) -> bool:
    when = deadline.when()
    return when is not None and asyncio.get_running_loop().time() >= when
