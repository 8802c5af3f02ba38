"""Live pages with hostile servers and addresses. No request leaves this machine."""

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ToolFault
from outrider.testing import check_tool
from outrider.tools.browser.pages import Fetcher, FetchSettings, Refused, look_up
from tests.chat_server import Answer, Asked, ChatServer, chat_server
from tests.tools.browser.pages import browser

PUBLIC = "93.184.216.34"
Respond = Callable[[httpx2.Request], httpx2.Response]


def fetcher(respond: Respond, resolve: Any = None, **settings: Any) -> Fetcher:
    chosen = FetchSettings.model_validate({"allowed_hosts": ["a.org", "*.b.org"]} | settings)
    transport = httpx2.MockTransport(lambda request: unread(respond(request)))
    return Fetcher(chosen, 1000, transport=transport, resolve=resolve or (lambda host, port: [PUBLIC]))


def unread(response: httpx2.Response) -> httpx2.Response:
    """As it comes from a network: one that is made with its content counts as read."""
    return httpx2.Response(response.status_code, headers=response.headers, stream=response.stream)


def html(text: str, **headers: str) -> httpx2.Response:
    return httpx2.Response(200, content=text.encode(), headers={"Content-Type": "text/html", **headers})


def never(request: httpx2.Request) -> httpx2.Response:
    raise AssertionError(f"request to {request.url}")


def test_the_request_goes_to_the_resolved_address_with_the_name_of_the_host() -> None:
    seen: list[httpx2.Request] = []

    def respond(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return html("<title>T</title><p>Hi", **{"Set-Cookie": "a=b"})

    tool = fetcher(respond)
    page = tool.page("https://A.org/x?y=1#z")
    assert (page.address, page.title, page.text) == ("https://a.org/x?y=1", "T", "Hi")
    assert tool.page("https://a.org/x?y=1") is page and len(seen) == 1
    tool.page("https://a.org/other")
    for request in seen:
        assert (request.url.host, request.headers["Host"]) == (PUBLIC, "a.org")
        assert request.extensions["sni_hostname"] == "a.org"
        assert "Cookie" not in request.headers and "Authorization" not in request.headers


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("file:///etc/passwd", "Only http and https"),
        ("ftp://a.org/x", "Only http and https"),
        ("http:///x", "Only http and https"),
        ("https://a.org/" + "x" * 2000, "Only http and https"),
        ("https://c.org/", "This host cannot be opened, only a.org"),
        ("https://b.org/", "This host"),  # below it, not it
        ("https://eb.org/", "This host"),
        ("https://a.org.c.org/", "This host"),
        ("https://a.org:8443/", "This host"),
        ("http://a.org:99999/", "This host"),
        ("http://a.org:0/", "This host"),
        ("https://c.org\\@a.org/", "user name"),
        ("https://a.org@c.org/", "user name"),
        ("http://127.0.0.1/", "This host"),
        ("http://2130706433/", "This host"),
        ("http://[::1]/", "This host"),
        ("http://a.org\x00/", "no address"),
        ("http://\ud800/", "no address"),
        ("\ud800://a.org", "no address"),
    ],
)
def test_a_forbidden_address_is_not_requested(address: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        fetcher(never).page(address)


@pytest.mark.parametrize(
    "address", ["http://a.org/", "https://a.org:443/", "https://x.y.b.org/", "HTTPS://A.ORG."]
)
def test_an_allowed_address_is_requested(address: str) -> None:
    assert fetcher(lambda request: html("hi")).page(address).text == "hi"


@pytest.mark.parametrize(
    "target",
    [
        "https://c.org/",
        "http://169.254.169.254/latest",
        "file:///etc/passwd",
        "//c.org/x",
        "http://[",
        "data:,x",
    ],
)
def test_a_redirect_is_checked_like_the_first_address(target: str) -> None:
    def respond(request: httpx2.Request) -> httpx2.Response:
        assert request.headers["Host"] == "a.org"
        return httpx2.Response(302, headers={"Location": target})

    with pytest.raises(Refused):
        fetcher(respond).page("https://a.org/")


def test_redirects_to_allowed_hosts_are_followed_and_bounded() -> None:
    def respond(request: httpx2.Request) -> httpx2.Response:
        if request.headers["Host"] == "x.b.org":
            return html("there")
        return httpx2.Response(
            301, headers={"Location": "https://x.b.org/y" if request.url.path == "/" else "/z"}
        )

    page = fetcher(respond).page("https://a.org/")
    assert (page.address, page.text) == ("https://x.b.org/y", "there")
    with pytest.raises(Refused, match="without an end"):
        fetcher(respond).page("https://a.org/z")


@pytest.mark.parametrize(
    "number",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:10.0.0.1",
        "2002:0a00:0001::", "64:ff9b::7f00:1", "::127.0.0.1", "64:ff9b:1::a00:1", "5f00::1", "400::1",
    ],
)  # fmt: skip
def test_a_name_with_a_private_address_is_not_requested(number: str) -> None:
    """Also where one of several is private: a second look-up could have given it."""
    for addresses in ([number], [PUBLIC, number]):
        with pytest.raises(Refused, match="private address"):
            fetcher(never, lambda host, port, addresses=addresses: addresses).page("https://a.org/")
    listed = fetcher(lambda request: html("hi"), lambda host, port: ["10.1.2.3"], private_hosts=["a.org"])
    assert listed.page("https://a.org/").text == "hi"


def test_ipv6_addresses_are_in_brackets() -> None:
    def respond(request: httpx2.Request) -> httpx2.Response:
        return html(str(request.url))

    page = fetcher(respond, lambda host, port: ["2606:4700::1111"]).page("https://a.org/x")
    assert page.text == "https://[2606:4700::1111]/x"


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (httpx2.Response(404, content=b"gone"), "status 404"),
        (httpx2.Response(403), "status 403"),
        (httpx2.Response(302), "status 302"),
        (httpx2.Response(200, content=b"%PDF", headers={"Content-Type": "application/pdf"}), "no text"),
        (httpx2.Response(200, content=b"x" * 101, headers={"Content-Type": "text/plain"}), "too large"),
        (
            httpx2.Response(200, stream=httpx2.ByteStream(b"x"), headers={"Content-Encoding": "gzip"}),
            "compressed",
        ),
    ],
)
def test_a_page_that_cannot_be_read_is_refused_with_the_reason(
    response: httpx2.Response, reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        fetcher(lambda request: response, max_bytes=100).page("https://a.org/")


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_an_error_of_the_server_is_a_fault_and_is_not_cached(status: int) -> None:
    answers = [httpx2.Response(status), html("hi")]
    tool = fetcher(lambda request: answers.pop(0))
    with pytest.raises(ToolFault, match=f"a.org: status {status}"):
        tool.page("https://a.org/")
    assert tool.page("https://a.org/").text == "hi"


def test_an_error_of_the_network_is_a_fault() -> None:
    def respond(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused\x1b[2J")

    with pytest.raises(ToolFault, match=r"a\.org: refused \[2J"):
        fetcher(respond).page("https://a.org/")
    with pytest.raises(ToolFault, match="no address"):
        fetcher(never, lambda host, port: []).page("https://a.org/")


def test_the_time_limit_includes_the_resolver() -> None:
    """The system's resolver takes no limit; it may hang for minutes."""
    release = threading.Event()

    def hang(host: str, port: int) -> list[str]:
        release.wait(30)
        return [PUBLIC]

    begun = time.monotonic()
    with pytest.raises(ToolFault, match=r"no page within 0\.2 s"):
        fetcher(never, hang, timeout_s=0.2).page("https://a.org/")
    release.set()
    assert time.monotonic() - begun < 15  # and not when the resolver is done


@pytest.mark.parametrize("number", [socket.EAI_NONAME, socket.EAI_NODATA])
def test_an_unknown_host_is_refused_and_no_fault(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise socket.gaierror(number, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(Refused, match="no such host"):
        look_up("nobody.example", 443)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: fail())
    number = socket.EAI_AGAIN
    with pytest.raises(ToolFault, match="unknown"):
        look_up("nobody.example", 443)


def serving(server: ChatServer, folder: Path, **settings: Any) -> Any:
    host = server.url.removeprefix("http://").removesuffix("/v1")
    allowed = {"allowed_hosts": [host], "private_hosts": [host]}
    return browser(folder, fetch=allowed | settings, reader={"type": "none"}), f"http://{host}"


def test_a_page_over_a_real_connection(tmp_path: Path) -> None:
    pages = {
        "/latin": (b"<title>Caf\xe9</title>cr\xe8me", "text/html; charset=latin-1"),
        "/upper": (b"cr\xe8me", "text/html; CHARSET=Latin-1"),
        "/controls": (b"a\x1b[2Jb\x00&#27;c", "text/html"),
        "/name": (b"b-a", "text/plain; charset=punycode"),
        "/meta": (b"<meta charset='latin-1'>cr\xe8me", "text/html"),
        "/bad": (b"a\xff\xfe b", "text/plain; charset=utf-8"),
        "/hex": (b"plain", "text/plain; charset=hex"),
        "/escape": (rb"a\ud800b", "text/plain; charset=unicode_escape"),
        "/bare": ("née".encode(), "text/html"),
    }

    def script(request: Asked) -> Answer:
        body, kind = pages[request.path]
        return Answer(body, headers={"Content-Type": kind})

    with chat_server(script) as server:
        tool, url = serving(server, tmp_path)
        shown = {path: tool.run_text(url + path).text.split("\n") for path in pages}
        check_tool(tool, texts=(f"{url}/latin | what", f"{url}/bare"))
    assert shown["/latin"] == ["Café", "crème"]
    assert [lines[1] for path, lines in shown.items() if path != "/latin"] == [
        "crème", "a [2Jb c", "b-a", "crème", "a\ufffd\ufffd b", "plain", "a?b", "née",
    ]  # fmt: skip


def test_this_machine_cannot_be_reached_by_default(tmp_path: Path) -> None:
    with chat_server([Answer(b"secret")]) as server:
        tool, url = serving(server, tmp_path, private_hosts=())
        assert "private address" in tool.run_text(url).text
        assert server.asked == []


@pytest.mark.parametrize("how", ["hold", "trickle", "trickle_headers"])
def test_a_slow_server_is_a_fault_within_the_limit(tmp_path: Path, how: str) -> None:
    release = threading.Event()
    slow = Answer(b"x" * 5000, **{how: release if how == "hold" else True})
    with chat_server([slow]) as server:
        tool, url = serving(server, tmp_path, timeout_s=0.3)
        with pytest.raises(ToolFault, match=r"no page within 0\.3 s"):
            tool.run_text(url)
        release.set()


def test_a_huge_page_is_not_read_to_its_end(tmp_path: Path) -> None:
    with chat_server([Answer(b"x" * (8 << 20), headers={"Content-Type": "text/plain"})]) as server:
        tool, url = serving(server, tmp_path, max_bytes=1000)
        addresses = tool.run_text(url)
    assert (addresses.text, addresses.failed) == ("The page is too large.", True)


def test_without_the_option_no_request_is_sent(tmp_path: Path) -> None:
    with chat_server([Answer(b"hi")]) as server:
        assert browser(tmp_path).run_text(server.url).failed
        assert server.asked == []


@given(st.text(max_size=40))
def test_no_address_leads_to_a_host_outside_the_list(text: str) -> None:
    for address in (text, f"https://{text}", f"https://a.org{text}", f"https://{text}a.org/"):
        try:
            fetcher(lambda request: html(request.headers["Host"])).page(address)
        except Refused:
            continue
        url = httpx2.URL(address)
        assert url.host.rstrip(".") == "a.org" or url.host.rstrip(".").endswith(".b.org")


@pytest.mark.parametrize("host", ["https://a.org", "A.org", "a.org/x", "", "*", "a..org", "[::1", "*.*.org"])
def test_allowed_hosts_must_be_hosts(host: str) -> None:
    with pytest.raises(ValueError, match="is no host"):
        FetchSettings(allowed_hosts=[host])
