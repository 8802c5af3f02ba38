"""Who may ask the server, and what the browser may do with its answers.

Against a page of another origin: the Host header must be one of ours (DNS rebinding), nothing is readable
across origins, what a browser loads for a page of another one is refused, and the one request that changes
something needs our own Origin and a token that only our page knows. Model output is hostile: the policy of
the page allows no script but ours, and no address but ours.
"""

import hmac
import ipaddress
from collections.abc import Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.watch.viewer.bundle import POLICY

COOKIE: Final = "outrider_view"
_POLICY: Final = f"{POLICY}; frame-ancestors 'none'"
STILL_PAGE: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
"""The policy of a page without scripts that has its style in itself."""
HEADERS: Final = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what is bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Around the whole application. ``hosts`` are the names that a Host header may have, None: any (bound
    elsewhere, where the ``token`` decides). ``token`` is asked for, in the address or in the cookie that it
    left, unless it is None.
    """

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str] | None, token: str | None) -> None:
        self._app = app
        self._hosts = hosts
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand on."""
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
            return 403, "this server is asked by another name than its own"
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
    """What a page of another origin loads: it cannot read that, but would let us work. A link is not."""
    site = request.headers.get("sec-fetch-site", "none")
    mode = request.headers.get("sec-fetch-mode", "navigate")
    return site not in ("none", "same-origin") and mode != "navigate"


def _is_own(request: Request, host: str) -> bool:
    origin = request.headers.get("origin", "")
    site = request.headers.get("sec-fetch-site", "same-origin")
    return origin in (f"http://{host}", f"https://{host}") and site == "same-origin"
