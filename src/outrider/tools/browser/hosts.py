"""Which addresses may be asked: the rules that a fetched page cannot talk its way around."""

import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeAlias, TypeVar

import httpx2

from outrider.errors import ToolFault
from outrider.tools.browser.pages import Refused
from outrider.tools.browser.settings import FetchSettings

Resolve: TypeAlias = Callable[[str, int], Sequence[str]]
"""Numeric addresses of a host and port. Raises Refused for a name that nobody has, ToolFault without an
answer.
"""
ResultT = TypeVar("ResultT")
_PORTS: Final = {"http": 80, "https": 443}
_MAX_URL: Final = 2000
# IPv6 addresses that stand for an IPv4 address, which is their last four bytes
_TRANSLATED: Final = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("::/96"))
# All other IPv6 addresses that anybody on the internet has (RFC 4291, section 2.4)
_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
# Nobody has the name, or it has no address of the kinds that are asked for
_NO_SUCH: Final = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})


def read_url(text: str, settings: FetchSettings) -> httpx2.URL:
    """The url of what the policy or a redirect names; raises Refused unless its host is allowed.

    It is read by the library that sends the request: two readings of one address would be a way around.
    """
    try:
        url = httpx2.URL(text)
        port = _port(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise Refused("This is no address that can be opened.") from error
    if url.scheme not in _PORTS or not url.host or len(text) > _MAX_URL:
        raise Refused("Only http and https addresses can be opened.")
    if url.userinfo:
        raise Refused("An address with a user name cannot be opened.")
    if not _is_listed(url_host(url), port, url.scheme, settings.allowed_hosts):
        raise Refused(f"This host cannot be opened, only {', '.join(settings.allowed_hosts[:10])}.")
    return url


def url_host(url: httpx2.URL) -> str:
    """The host as it is sent, without brackets or a last dot."""
    return url.raw_host.decode("ascii").lower().strip("[]").removesuffix(".")


def resolve_address(url: httpx2.URL, settings: FetchSettings, resolve: Resolve) -> str:
    """The number that is connected to, so that no second look-up can give another one.

    Raises Refused where any number of the host is not public and the host is not among the private ones.
    """
    host, port = url_host(url), _port(url)
    addresses = resolve(host, port)
    if not addresses:
        raise ToolFault(f"browser: {host} has no address")
    if not _is_listed(host, port, url.scheme, settings.private_hosts) and not all(map(is_public, addresses)):
        raise Refused("This host cannot be opened: it stands for a private address.")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether a number is of the public internet, also where it wraps an IPv4 address."""
    number = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(number, ipaddress.IPv6Address):
        inner = number.ipv4_mapped or number.sixtofour
        if inner is None and any(number in network for network in _TRANSLATED):
            inner = ipaddress.IPv4Address(number.packed[-4:])
        if inner is None:
            return number in _UNICAST and number.is_global
        number = inner
    return number.is_global and not number.is_multicast


def call_with_timeout(limit_s: float, call: Callable[[], ResultT]) -> ResultT:
    """What the call gives or raises; raises TimeoutError after ``limit_s`` seconds.

    For the system's resolver, which takes no limit: it goes on in a thread that keeps no process alive.
    """
    future: Future[ResultT] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="outrider-look-up", daemon=True).start()
    return future.result(timeout=limit_s)


def look_up(host: str, port: int) -> list[str]:
    """By the system's resolver, in its order."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        if isinstance(error, UnicodeError) or error.errno in _NO_SUCH:
            raise Refused("There is no such host.") from error
        raise ToolFault(f"browser: {host}: {error.strerror}") from error
    return [str(info[4][0]) for info in infos]


def _port(url: httpx2.URL) -> int:
    """0 is a port that nobody is at, and not that of the scheme."""
    return _PORTS.get(url.scheme, 0) if url.port is None else url.port


def _is_listed(host: str, port: int, scheme: str, listed: Sequence[str]) -> bool:
    return any(_matches(host, port, scheme, entry) for entry in listed)


def _matches(host: str, port: int, scheme: str, entry: str) -> bool:
    name, _, own = entry.rpartition(":") if not entry.endswith("]") and ":" in entry else (entry, "", "")
    if port != (int(own) if own else _PORTS[scheme]):
        return False
    return host.endswith(name[1:]) if name.startswith("*.") else host == name.strip("[]")
