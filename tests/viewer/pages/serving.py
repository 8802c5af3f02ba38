"""The viewer's server in a thread, and requests with every header in one's own hand."""

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="the extra `view` is not installed")

from outrider.commands.view import _comparison_page  # noqa: E402
from outrider.viewer.answers import Catalogue  # noqa: E402
from outrider.viewer.server import (  # noqa: E402
    bind,
    make_app,
)

OWN = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Served:
    """``ids`` are those of the runs, in order."""

    port: int
    ids: list[str]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def ask(
        self, path: str, *, method: str = "GET", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def data(self, kind: str, /, **given: str) -> Any:
        from urllib.parse import urlencode

        status, _, body = self.ask(f"/data/{kind}.json?{urlencode({'run': self.ids[0], **given})}")
        found = json.loads(body)
        assert status == 200, found
        return found


@contextmanager
def serving(
    roots: Sequence[Path], *, hosts: Sequence[str] | None = OWN, token: str | None = None
) -> Iterator[Served]:
    catalogue = Catalogue(roots)
    app = make_app(catalogue, compare=_comparison_page, hosts=hosts, token=token, every_s=0.05)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    )
    with bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield Served(bound.getsockname()[1], [run.id for run in catalogue.all()])
        finally:
            server.should_exit = True
            thread.join(20)
