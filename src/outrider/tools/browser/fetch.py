"""Live pages: asked of allowed hosts alone, within one limit of time and one of size."""

import time
from typing import Final

import httpx2

from outrider.engines.chat.http_client import AnswerTooLarge, HttpAnswer, HttpClient
from outrider.errors import ToolFault
from outrider.printing import one_line
from outrider.tools.browser.charsets import decode_page
from outrider.tools.browser.hosts import (
    Resolve,
    call_with_timeout,
    look_up,
    read_url,
    resolve_address,
    url_host,
)
from outrider.tools.browser.html_text import title_and_text, without_controls
from outrider.tools.browser.pages import Page, Refused
from outrider.tools.browser.settings import FetchSettings
from outrider.tools.once import SingleFlightCache

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
# Of the server or of the way to it; every other refusal is about the page that was named.
_FAULTS: Final = frozenset({407, 408, 425, 429})
_HTML: Final = frozenset({"text/html", "application/xhtml+xml"})
_PLAIN: Final = frozenset({"application/json", "application/xml"})


class Fetcher:
    """Safe to use from several threads. ``transport`` and ``resolve`` take the place of the network in
    tests.
    """

    def __init__(
        self,
        settings: FetchSettings,
        max_chars: int,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
        resolve: Resolve = look_up,
    ) -> None:
        self._settings = settings
        self._max_chars = max_chars
        self._client = HttpClient(transport, is_bare=True)
        self._resolve = resolve
        self._pages: SingleFlightCache[Page] = SingleFlightCache(settings.cache_pages)

    def page(self, address: str) -> Page:
        """The page as it was when it was first asked for. Raises Refused for what the policy cannot have, and
        ToolFault where the network or the server failed.
        """
        url = read_url(address, self._settings).copy_with(fragment=None)
        return self._pages.get(str(url), lambda: self._fetch(url))

    def _fetch(self, url: httpx2.URL) -> Page:
        ends = time.monotonic() + self._settings.timeout_s
        for _ in range(self._settings.max_redirects + 1):
            answer = self._request(url, ends)
            if answer.status not in _REDIRECTS or not (target := answer.headers.get("Location")):
                return self._read(url, answer)
            try:
                next_url = str(url.join(target))
            except (httpx2.InvalidURL, ValueError) as error:
                raise Refused("The page leads to what is no address.") from error
            url = read_url(next_url, self._settings)
        raise Refused("The page leads from one address to another without an end.")

    def _request(self, url: httpx2.URL, ends: float) -> HttpAnswer:
        host = url_host(url)
        try:
            number = call_with_timeout(
                _left(ends), lambda: resolve_address(url, self._settings, self._resolve)
            )
            return self._client.request(
                str(url.copy_with(host=number, fragment=None)),
                None,
                {
                    "Host": url.netloc.decode("ascii"),
                    "Accept": "text/html, text/*;q=0.9",
                    "Connection": "close",  # another host of this number has another certificate
                },
                timeout_s=_left(ends),
                max_bytes=self._settings.max_bytes,
                server_name=host,
            )
        except TimeoutError as error:
            raise ToolFault(f"browser: {host}: no page within {self._settings.timeout_s:g} s") from error
        except AnswerTooLarge as error:
            raise Refused("The page is too large.") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            reason = one_line(str(error).partition(": bytearray(")[0] or type(error).__name__)
            raise ToolFault(f"browser: {host}: {reason[:200]}") from error

    def _read(self, url: httpx2.URL, answer: HttpAnswer) -> Page:
        if answer.status in _FAULTS or answer.status >= 500:
            raise ToolFault(f"browser: {url_host(url)}: status {answer.status}")
        if answer.is_error:
            raise Refused(f"The page cannot be had: status {answer.status}.")
        if answer.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise Refused("The page cannot be read: it is compressed, which was not asked for.")
        kind, _, rest = answer.headers.get("Content-Type", "text/html").partition(";")
        kind = kind.strip().lower()
        if kind not in _HTML | _PLAIN and not kind.startswith("text/"):
            raise Refused("The page cannot be read: it is no text.")
        _, _, charset = rest.lower().partition("charset=")
        text = without_controls(decode_page(answer.content, charset.partition(";")[0].strip(" \"'") or None))
        title, text = title_and_text(text) if kind in _HTML else ("", text)
        return Page(address=str(url), title=title or str(url), text=text[: self._max_chars + 1])


def _left(ends: float) -> float:
    """Seconds until then; raises TimeoutError where there are none."""
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
