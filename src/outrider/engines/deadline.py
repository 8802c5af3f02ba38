"""HTTP requests with one deadline for the whole answer: headers, body, and the body of an error.

The time-out of a socket starts again with every byte, so that a server which sends one now and then would never stall.
"""

import http.client
import socket
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any


class Watch:
    """Shuts the connections of one request when its time is over; whatever the reader then sees is a time-out."""

    def __init__(self, timeout_s: float) -> None:
        self.is_over = False
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True

    @contextmanager
    def running(self) -> Iterator["Watch"]:
        """Raises TimeoutError at the end of the block when the time was over before, in place of what it raised itself."""
        self._timer.start()
        try:
            yield self
        except (OSError, http.client.HTTPException, ValueError) as error:
            if self.is_over:
                raise TimeoutError from error
            raise
        finally:
            self._timer.cancel()
        if self.is_over:  # a body without a length ends where the connection does
            raise TimeoutError

    def add(self, connection: socket.socket) -> None:
        """A connection of this request. Raises TimeoutError when it comes too late."""
        with self._lock:
            if self.is_over:
                raise TimeoutError
            self._sockets.append(connection)

    def _end(self) -> None:
        with self._lock:
            self.is_over = True
            for one in self._sockets:
                with suppress(OSError):  # it was closed
                    socket.socket.shutdown(one, socket.SHUT_RDWR)  # an SSLSocket's own would unwrap it under its reader


class WatchedRequest(urllib.request.Request):
    """A request that knows its watch."""

    def __init__(self, url: str, data: bytes | None, headers: dict[str, str], *, watch: Watch) -> None:
        super().__init__(url, data, headers)
        self.watch = watch


class _Connection(http.client.HTTPConnection):
    def __init__(self, *arguments: Any, watch: Watch, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._watch = watch

    def connect(self) -> None:
        super().connect()
        self._watch.add(self.sock)


class _SecureConnection(_Connection, http.client.HTTPSConnection):
    """The same over TLS: the base class's ``connect`` watches what this one has wrapped."""


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        assert isinstance(req, WatchedRequest)
        return self.do_open(partial(_Connection, watch=req.watch), req)


class _SecureHandler(urllib.request.HTTPSHandler):
    def __init__(self) -> None:
        super().__init__()
        self._certificates = ssl.create_default_context()

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        assert isinstance(req, WatchedRequest)
        return self.do_open(partial(_SecureConnection, watch=req.watch), req, context=self._certificates)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: object, **options: object) -> None:
        """Follow nothing: the redirect becomes a refusal."""


def watched_opener() -> urllib.request.OpenerDirector:
    """Opens :class:`WatchedRequest`; follows no redirect, which would carry a key to another host."""
    return urllib.request.build_opener(_NoRedirects, _Handler, _SecureHandler)
