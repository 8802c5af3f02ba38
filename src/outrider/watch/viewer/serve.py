"""Starts the viewer's server, and says where it is."""

import secrets
import socket
import webbrowser
from collections.abc import Callable

import uvicorn

from outrider.errors import ConfigError
from outrider.watch.viewer.catalogue import Catalogue
from outrider.watch.viewer.guard import is_loopback
from outrider.watch.viewer.server import Compare, make_app

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
    """Serve until Ctrl-C. Bound to another address than loopback, the printed one has a token without which
    nothing is answered. Raises ConfigError for an address that cannot be bound.
    """
    is_own = is_loopback(host)
    token = None if is_own else secrets.token_urlsafe(24)
    bound = _bound(host, port)
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


def _bound(host: str, port: int) -> socket.socket:
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
