"""The viewer's web server, its access control, and the static bundle.

Protection against pages of other origins: the Host header must be one of the server's (DNS rebinding), no
response is readable across origins, requests that a browser makes for a page of another origin are rejected,
and the only request that changes something requires the server's own Origin and a token known only to the
viewer's page. Model output is untrusted: the content security policy of the page allows only scripts and
addresses of the server itself.
"""

import asyncio
import hmac
import ipaddress
import json
import secrets
import shutil
import socket
import webbrowser
from collections.abc import AsyncIterator, Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.errors import ConfigError, OutriderError
from outrider.files import replacing_folder
from outrider.printing import plural
from outrider.viewer.answers import LONGEST_TEXT, REQUESTS, Catalogue, ViewedRun, Viewer, fingerprint, stop
from outrider.viewer.records import SCHEMA, StepFiles
from outrider.viewer.search import rows_of_table

# The viewer as a folder of static files for any file server: the response to every request of the page,
# computed in advance.


PAGE: Final = Path(__file__).with_name("page")
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
"""Content security policy of the page: only the viewer's own scripts, styles and addresses. A plain file
server sends no such header, so the page of a bundle has it in a ``meta`` element."""
_META: Final = (
    f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
    '<meta name="outrider-bundle" content="1">'
)
_FIRST: Final = '<meta charset="utf-8">'  # a policy applies only to the elements after it
_TEXTS: Final = ["task_key", "trace_id", "node_id", "rollout", "origin", "text"]


def write_bundle(
    catalogue: Catalogue,
    folder: Path,
    *,
    compare: Callable[[Sequence[Path]], str],
    note: Callable[[str], None],
) -> None:
    """Write all data of all runs into a new ``folder``. Raises ConfigError if ``folder`` is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: --bundle writes a new folder")
    viewer = Viewer(catalogue)
    runs = catalogue.all()
    with replacing_folder(folder) as new:
        shutil.copytree(PAGE, new, dirs_exist_ok=True)
        page = (PAGE / "index.html").read_text(encoding="utf-8")
        (new / "index.html").write_text(page.replace(_FIRST, f"{_FIRST}\n{_META}"), encoding="utf-8")
        entries = zip(catalogue.overview(), runs, strict=True)
        _write(
            new / "data" / "runs.json",
            [_without_paths(entry | {"live": None}, run.path) for entry, run in entries],
        )
        for run in runs:
            note(f"{run.path.name}: {plural(len(run.index.stems()), 'file')}")
            _write_run(viewer, run, new / "data" / run.id)
        if len(runs) > 1:
            try:
                page = compare([run.path for run in runs])
            except OutriderError as error:  # the bundle is useful without the comparison
                note(f"not compared: {error}")
                page = _not_compared(error, "index.html")
            (new / "compare.html").write_text(page, encoding="utf-8")


def _not_compared(error: Exception, link: str) -> str:
    """A page with the reason why runs cannot be compared, and a link back."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Not compared · Outrider</title>'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        '<main style="font: 15px system-ui; overflow-wrap: anywhere"><h1>Not compared</h1>'
        f'<p>{escape(str(error))}</p><p><a href="{link}">Back to the runs</a></p></main>'
    )


def _without_paths(value: Any, run: Path) -> Any:
    """Replace the path of the run in all strings, because a bundle is read on other machines."""
    if isinstance(value, dict):
        return {name: _without_paths(item, run) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item, run) for item in value]
    if isinstance(value, str):
        return value.replace(str(run.resolve()), "RUN").replace(str(run.absolute()), "RUN")
    return value


def _write_run(viewer: Viewer, run: ViewedRun, folder: Path) -> None:
    """Write the files of one run below ``folder``."""

    def answer(request: str, **params: str) -> Any:
        return viewer.answer(request, {"run": run.id, **params})

    _write(folder / "curves.json", answer("curves") | {"path": "RUN"})
    _write(folder / "places.json", _without_paths(answer("places"), run.path))
    _write(folder / "overview.json", _without_paths(answer("overview", shared="1"), run.path))
    files = StepFiles(run.path / "traces")
    rows = rows_of_table(run.index.table())
    for stem in run.index.stems():
        stem_rows = [row for row in rows if row["where"] == stem]
        _write(folder / stem / "rollouts.json", stem_rows)
        nodes = files.read_table(f"{stem}.parquet", SCHEMA).select(_TEXTS).to_pylist()
        _write(folder / stem / "texts.json", [node | {"where": stem} for node in nodes])
        for trace in dict.fromkeys(row["trace_id"] for row in stem_rows):
            params = {"where": stem, "trace": trace}
            number = trace.rpartition("/")[2]
            _write(folder / stem / f"group-{number}.json", answer("group", **params))
            for row in (entry for entry in stem_rows if entry["trace_id"] == trace):
                name = f"tokens-{number}-{row['rollout']}.json"
                _write(folder / stem / name, answer("tokens", **params, rollout=str(row["rollout"])))
            for node in nodes:
                if node["trace_id"] == trace and len(node["text"]) > LONGEST_TEXT:
                    name = f"text-{number}-{node['node_id']}.json"
                    _write(folder / stem / name, {"text": node["text"]})
    for step in files.steps():
        _write(folder / f"memory-{step}.json", answer("memory", step=str(step)))
        _write(folder / f"shown-{step}.json", answer("shown", step=str(step)))


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    path.write_bytes(text.encode("utf-8", "backslashreplace"))


COOKIE: Final = "outrider_view"
_POLICY: Final = f"{POLICY}; frame-ancestors 'none'"
STILL_PAGE: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
"""Content security policy of a page without scripts and with inline styles."""
HEADERS: Final = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


def is_loopback(host: str) -> bool:
    """Whether a server bound to ``host`` is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware that checks every request.

    Args:
        app: The application.
        hosts: Accepted values of the Host header. None accepts any, for a server that is not bound to
            loopback and relies on ``token``.
        token: If not None, every request must contain it in the address or in the cookie set earlier.
    """

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str] | None, token: str | None) -> None:
        self._app = app
        self._hosts = hosts
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject the request, or pass it to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        problem = self._problem(request)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                added = [header for header in HEADERS if header[0] not in names]
                message["headers"] = [*message["headers"], *added, *self._cookie(request, problem)]
            await send(message)

        answer = self._app if problem is None else PlainTextResponse(problem[1], status_code=problem[0])
        await answer(scope, receive, guarded)

    def _problem(self, request: Request) -> tuple[int, str] | None:
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
        if self._hosts is not None and name.strip("[]") not in self._hosts:
            return 403, "the Host header is not a name of this server"
        if self._token is not None:
            token = request.query_params.get("token") or request.cookies.get(COOKIE) or ""
            if not hmac.compare_digest(token.encode(), self._token.encode()):
                return 403, "open the address with its token, as `outrider view` printed it"
        if request.method not in ("GET", "HEAD", "POST"):
            return 405, "read-only"
        if _is_for_another_page(request) or (request.method == "POST" and not _is_own(request, host)):
            return 403, "a request of another page"
        return None

    def _cookie(self, request: Request, problem: object) -> list[tuple[bytes, bytes]]:
        if problem is not None or self._token is None or "token" not in request.query_params:
            return []
        cookie = f"{COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/"
        return [(b"set-cookie", cookie.encode())]


def _is_for_another_page(request: Request) -> bool:
    """Whether a page of another origin loads this resource. It could not read the response, but would cost
    the server work. Following a link to the viewer does not count."""
    site = request.headers.get("sec-fetch-site", "none")
    mode = request.headers.get("sec-fetch-mode", "navigate")
    return site not in ("none", "same-origin") and mode != "navigate"


def _is_own(request: Request, host: str) -> bool:
    origin = request.headers.get("origin", "")
    site = request.headers.get("sec-fetch-site", "same-origin")
    return origin in (f"http://{host}", f"https://{host}") and site == "same-origin"


# The viewer's server: the files of the page, and run data as JSON. Read-only except for the stop button.


MOST_ANSWERS: Final = 4  # computed concurrently: each may load a whole file into memory
MOST_FOLLOWERS: Final = 64  # pages that follow a run at the same time
_REFUSED: Final = (OutriderError, ValueError, OSError)
Compare = Callable[[Sequence[Path]], str]
"""Maps run folders to the page of ``outrider compare``, as HTML without scripts."""


def make_app(
    catalogue: Catalogue,
    *,
    compare: Compare,
    hosts: Sequence[str] | None,
    token: str | None = None,
    every_s: float = 1.0,
    is_ending: Callable[[], bool] = lambda: False,
) -> Guard:
    """Build the application. A page that follows a run receives updates every ``every_s`` seconds until
    ``is_ending`` returns True.
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
    """The routes. Requests that read files run in a thread."""

    def __init__(
        self, viewer: Viewer, compare: Compare, every_s: float, is_ending: Callable[[], bool]
    ) -> None:
        self._viewer = viewer
        self._compare = compare
        self._every_s = every_s
        self._is_ending = is_ending
        self._answering = asyncio.Semaphore(MOST_ANSWERS)
        self._num_followers = 0
        self._stop_token = secrets.token_urlsafe(24)  # other origins cannot read it from the page

    async def page(self, request: Request) -> Response:
        """The page of the viewer, with the token that the stop button must send."""
        text = (PAGE / "index.html").read_text(encoding="utf-8")
        return HTMLResponse(text.replace("STOP_TOKEN", self._stop_token))

    async def data(self, request: Request) -> Response:
        """The answer to one of :data:`~outrider.viewer.answers.REQUESTS`."""
        name = request.path_params["name"]
        kind = name.rpartition("/")[2].removesuffix(".json")
        if kind not in REQUESTS:
            return JSONResponse({"error": "no such page"}, status_code=404)
        try:
            async with self._answering:
                params = dict(request.query_params)
                body = await run_in_threadpool(lambda: _as_json(self._viewer.answer(kind, params)))
        except KeyError as error:
            return JSONResponse({"error": f"no run or value {error}"}, status_code=404)
        except _REFUSED as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        return Response(body, media_type="application/json")

    async def events(self, request: Request) -> Response:
        """Server-sent events: one for each change of a run."""
        try:
            run = self._viewer.catalogue.get(request.query_params.get("run", ""))
        except KeyError:
            return JSONResponse({"error": "no such run"}, status_code=404)
        if self._num_followers >= MOST_FOLLOWERS:
            return JSONResponse({"error": "too many pages follow runs: close some"}, status_code=503)
        return StreamingResponse(self._news(request, run.path), media_type="text/event-stream")

    async def _news(self, request: Request, run: Path) -> AsyncIterator[str]:
        """Yield an event only after the previous one was consumed, so no events queue up for a slow page."""
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
            status = 200
        except KeyError:
            return JSONResponse({"error": "no such run"}, status_code=404)
        except _REFUSED as error:
            page, status = _not_compared(error, "./"), 400
        return HTMLResponse(page, status_code=status, headers={"content-security-policy": STILL_PAGE})

    async def stop(self, request: Request) -> Response:
        """Send SIGTERM to the run, which writes a checkpoint and exits."""
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


# Starting the server.


MOST_CONNECTIONS = 256
_OWN_NAMES = ("localhost", "127.0.0.1", "::1")


def serve(
    catalogue: Catalogue,
    *,
    compare: Compare,
    host: str,
    port: int,
    opens: bool,
    log: Callable[[str], None],
) -> None:
    """Serve until Ctrl-C. If the server is not bound to loopback, the printed address contains a token that
    every request must have. Raises ConfigError if the address cannot be bound.
    """
    is_own = is_loopback(host)
    token = None if is_own else secrets.token_urlsafe(24)
    bound = bind(host, port)
    name = f"[{host}]" if ":" in host else host
    display_host = name if is_own or host not in ("0.0.0.0", "::") else socket.gethostname()
    address = f"http://{display_host}:{bound.getsockname()[1]}/" + (f"?token={token}" if token else "")
    hosts = (*_OWN_NAMES, host) if is_own else None
    app = make_app(catalogue, compare=compare, hosts=hosts, token=token, is_ending=lambda: server.should_exit)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=3,
            limit_concurrency=MOST_CONNECTIONS,
        )
    )
    log(address)
    if opens:
        webbrowser.open(address)
    with bound:
        server.run(sockets=[bound])


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket. Raises ConfigError if that is not possible."""
    try:
        address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound_socket = socket.socket(address_family, socket.SOCK_STREAM)
        bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound_socket.bind(address)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be bound: {error.strerror or error}"
        ) from error
    return bound_socket
