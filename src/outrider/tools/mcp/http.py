"""A server over streamable HTTP, as the transport of a session."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client


class _Bounded(httpx2.AsyncByteStream):
    """A body that breaks off where it is longer than a message may be."""

    def __init__(self, inside: Any, max_bytes: int) -> None:
        self._inside, self._max_bytes = inside, max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num = 0
        async for chunk in self._inside:
            num += len(chunk)
            if num > self._max_bytes:
                raise httpx2.ReadError(f"an answer of more than {self._max_bytes:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        """Close the connection's own stream."""
        await self._inside.aclose()


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """Bounds every answer but streams of events, whose events have a bound of their own."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """One request."""
        response = await super().handle_async_request(request)
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = _Bounded(response.stream, self._max_bytes)
        return response


@asynccontextmanager
async def http_server(
    url: str, *, headers: Mapping[str, str], timeout_s: float, max_bytes: int
) -> AsyncIterator[Any]:
    """The streams of a session. Proxies of the environment are not used: a server is named by its url."""
    limits = httpx2.Timeout(timeout_s, read=None)  # how long an answer may take, the call itself bounds
    transport = _BoundedTransport(max_bytes)
    async with (
        httpx2.AsyncClient(headers=dict(headers), timeout=limits, transport=transport) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=max_bytes) as streams,
    ):
        yield streams
