"""The viewer's server: the page's files, and what is on disk as JSON. Read-only but for the stop button."""

import asyncio
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from outrider.errors import OutriderError
from outrider.watch.viewer.answers import ANSWERS, Viewer
from outrider.watch.viewer.catalogue import Catalogue
from outrider.watch.viewer.guard import STILL_PAGE, Guard
from outrider.watch.viewer.live import fingerprint, stop

PAGE: Final = Path(__file__).with_name("page")
MOST_ANSWERS: Final = 4  # made at a time: each may hold a whole file in memory
MOST_FOLLOWERS: Final = 64  # pages that follow a run
_REFUSED: Final = (OutriderError, ValueError, OSError)
Compare = Callable[[Sequence[Path]], str]
"""Run folders to the page of ``outrider compare``, as HTML without scripts."""


def make_app(
    catalogue: Catalogue,
    *,
    compare: Compare,
    hosts: Sequence[str] | None,
    token: str | None = None,
    every_s: float = 1.0,
    is_ending: Callable[[], bool] = lambda: False,
) -> Guard:
    """The application. ``every_s``: how often a page that follows a run looks for news, until the server
    ``is_ending``.
    """
    server = _Server(Viewer(catalogue), compare, every_s, is_ending)
    routes = [
        Route("/", server.page),
        Route("/data/{name:path}", server.data),
        Route("/events", server.events),
        Route("/compare", server.compare),
        Route("/stop", server.stop, methods=["POST"]),
        Mount("/", StaticFiles(directory=PAGE)),
    ]
    return Guard(Starlette(routes=routes), hosts=hosts, token=token)


class _Server:
    """The routes. What reads files does so in a thread."""

    def __init__(
        self, viewer: Viewer, compare: Compare, every_s: float, is_ending: Callable[[], bool]
    ) -> None:
        self._viewer = viewer
        self._compare = compare
        self._every_s = every_s
        self._is_ending = is_ending
        self._answering = asyncio.Semaphore(MOST_ANSWERS)
        self._num_followers = 0
        self._stop_token = secrets.token_urlsafe(24)  # only our page can read it

    async def page(self, request: Request) -> Response:
        """The one page; with it goes what the stop button has to show."""
        text = (PAGE / "index.html").read_text(encoding="utf-8")
        return HTMLResponse(text.replace("STOP_TOKEN", self._stop_token))

    async def data(self, request: Request) -> Response:
        """What :data:`~outrider.watch.viewer.answers.ANSWERS` has under this name."""
        name = request.path_params["name"]
        kind = name.rpartition("/")[2].removesuffix(".json")
        answer = ANSWERS.get(kind)
        if answer is None:
            return JSONResponse({"error": "no such page"}, status_code=404)
        try:
            async with self._answering:
                body = await run_in_threadpool(
                    lambda: _as_json(answer(self._viewer, dict(request.query_params)))
                )
        except KeyError as error:
            return JSONResponse({"error": f"no run or value {error}"}, status_code=404)
        except _REFUSED as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        return Response(body, media_type="application/json")

    async def events(self, request: Request) -> Response:
        """Server-sent events: one whenever something of a run has changed."""
        try:
            run = self._viewer.catalogue.get(request.query_params.get("run", ""))
        except KeyError:
            return JSONResponse({"error": "no such run"}, status_code=404)
        if self._num_followers >= MOST_FOLLOWERS:
            return JSONResponse({"error": "too many pages follow runs: close some"}, status_code=503)
        return StreamingResponse(self._news(request, run.path), media_type="text/event-stream")

    async def _news(self, request: Request, run: Path) -> AsyncIterator[str]:
        """Sent when the one before was taken: of a page that does not read nothing piles up."""
        before = ""
        self._num_followers += 1
        try:
            while not (self._is_ending() or await request.is_disconnected()):
                now = _as_json(await run_in_threadpool(fingerprint, run)).decode()
                if now != before:
                    before = now
                    yield f"data: {now}\n\n"
                await asyncio.sleep(self._every_s)
        finally:
            self._num_followers -= 1

    async def compare(self, request: Request) -> Response:
        """The page of ``outrider compare`` over the chosen runs."""
        try:
            names = dict.fromkeys(request.query_params.getlist("run"))
            runs = [self._viewer.catalogue.get(name).path for name in names]
            async with self._answering:
                page = await run_in_threadpool(self._compare, runs)
            return HTMLResponse(page, headers={"content-security-policy": STILL_PAGE})
        except KeyError:
            return JSONResponse({"error": "no such run"}, status_code=404)
        except _REFUSED as error:
            return JSONResponse({"error": str(error)}, status_code=400)

    async def stop(self, request: Request) -> Response:
        """SIGTERM, which a run answers with a checkpoint."""
        token = request.headers.get("x-outrider-stop", "")
        if not hmac.compare_digest(token.encode(), self._stop_token.encode()):
            return JSONResponse({"error": "reload the page: its token is of another server"}, status_code=403)
        try:
            await run_in_threadpool(
                stop, self._viewer.catalogue.get(request.query_params.get("run", "")).path
            )
        except KeyError:
            return JSONResponse({"error": "no such run"}, status_code=404)
        except OutriderError as error:
            return JSONResponse({"error": str(error)}, status_code=409)
        return JSONResponse({"asked": True})


def _as_json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
