"""Pages of the browser tool: settings, decoding, HTML to text, collections of pages, live pages."""

import codecs
import html
import ipaddress
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import httpx2
from pydantic import Field, field_validator

from outrider.config import Settings
from outrider.engines.chat import AnswerTooLarge, EndpointSettings, HttpAnswer, HttpClient
from outrider.errors import DataError, ToolFault
from outrider.printing import one_line
from outrider.records import Row, read_rows
from outrider.tools.base import SingleFlightCache
from outrider.tools.search import row_title

_HOST = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*(?::[0-9]{1,5})?|\[[0-9a-f:.]+\](?::[0-9]{1,5})?")


class FetchSettings(Settings):
    """Live pages over http and https. Their content changes, so a run is not reproducible."""

    # Lists, because the table of a tool is compared with that of a checkpoint, and JSON has no tuples.
    allowed_hosts: list[str] = Field(min_length=1)
    """The only hosts that are contacted, also after redirects. For example ``en.wikipedia.org``,
    ``*.example.org`` for all names below it, ``127.0.0.1:8080`` for a port that is not the scheme's default.
    """
    private_hosts: list[str] = Field(default_factory=list)
    """Those of them that may resolve to an address of this machine or of a private network."""
    max_bytes: int = Field(default=2 << 20, ge=1, le=16 << 20)
    """A larger page is refused."""
    timeout_s: float = Field(default=15.0, gt=0)
    """Time limit of a page, including all redirects."""
    max_redirects: int = Field(default=4, ge=0, le=20)
    """Most redirects of one request."""
    cache_pages: int = Field(default=1024, ge=1)
    """Fetched pages to cache, so that all rollouts of a run see the same page; the oldest is dropped first.
    """

    @field_validator("allowed_hosts", "private_hosts")
    @classmethod
    def _are_hosts(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(
                    f"{host!r} is no host: lower case, without a scheme or path, such as en.wikipedia.org"
                )
        return hosts


class ReaderEndpoint(EndpointSettings):
    """The reader's chat server, with short limits, because a call has to end within a rollout's step."""

    timeout_s: float = Field(20.0, gt=0)
    max_retries: int = Field(1, ge=0)


class NoReader(Settings):
    """Return the beginning of the page for every question."""

    type: Literal["none"] = "none"


class PassageReader(Settings):
    """Return the passages of the page that BM25 ranks first, in the page's order."""

    type: Literal["bm25"] = "bm25"
    passage_chars: int = Field(default=400, ge=40)
    """Maximum characters of a passage; passages end with a sentence if possible."""


class EndpointReader(Settings):
    """Let a model behind an OpenAI-compatible server read the page and answer."""

    type: Literal["endpoint"] = "endpoint"
    endpoint: ReaderEndpoint
    max_tokens: int = Field(default=512, ge=1)
    """Maximum tokens of an answer."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the reader (0: greedy)."""


Reader: TypeAlias = Annotated[NoReader | PassageReader | EndpointReader, Field(discriminator="type")]


class BrowserSettings(Settings):
    """Settings of the tool ``browser``. Pages from a file are the environment's ``pages``."""

    fetch: FetchSettings | None = None
    """Live pages in addition; None for no network access."""
    reader: Reader = PassageReader()
    """What answers a question about a page."""
    max_page_chars: int = Field(default=24_000, ge=100)
    """Characters of a page that are read; about the 6,000 tokens of ARPO's browser."""
    max_chars: int = Field(default=2_000, ge=40)
    """Characters of an observation after the page's title, which has at most 200."""
    cache_readings: int = Field(default=4_096, ge=1)
    """Answers to cache, by page content and question; the oldest is dropped first."""


# --- Decoding, with the character sets that browsers use for a label (WHATWG Encoding Standard, "Names and
# labels"; HTML Standard, "Determining the character encoding"). Python's codecs of the same names are often
# smaller sets: a page labelled ``iso-8859-1`` or ``gb2312`` is written in ``windows-1252`` or ``gb18030``.
# ---

# Python's name of a label -> the codec that browsers use instead.
_LARGER: Final = {
    "ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874",
    "tis-620": "cp874", "gb2312": "gb18030", "gbk": "gb18030", "big5": "big5hkscs", "cp950": "big5hkscs",
    "shift_jis": "cp932", "euc_kr": "cp949", "utf-16": "utf-16-le",
}  # fmt: skip
# Known to Python, but to no browser. The first two are for host names and take quadratic time, the others can
# hide markup.
_NO_LABELS: Final = frozenset({"punycode", "idna", "utf-7", "hz", "iso2022_kr"})
# Labels that Python does not know, or reads as something else.
_LABELS: Final = {
    label: codec
    for codec, labels in {
        "utf-8": "unicode-1-1-utf-8 unicode11utf8 unicode20utf8 x-unicode20utf8",
        "utf-16-le": "utf-16 ucs-2 iso-10646-ucs-2 csunicode unicode unicodefeff",
        "utf-16-be": "unicodefffe",
        "cp1252": "iso_8859-1:1987 ansi_x3.4-1968 x-user-defined x-cp1252 iso88591",
        "cp1254": "x-cp1254 iso88599",
        "iso8859-6": "iso-8859-6-e iso-8859-6-i csiso88596e csiso88596i iso88596",
        "iso8859-8": "iso-8859-8-e iso-8859-8-i csiso88598e csiso88598i logical visual iso88598",
        "iso8859-7": "sun_eu_greek iso88597",
        "iso8859-15": "csisolatin9 l9 iso885915",
        "koi8-r": "koi koi8",
        "koi8-u": "koi8-ru",
        "mac-roman": "macintosh mac csmacintosh x-mac-roman",
        "mac-cyrillic": "x-mac-cyrillic x-mac-ukrainian",
        "cp866": "866 csibm866",
        "cp874": "dos-874 windows-874 iso885911",
        "gb18030": "x-gbk chinese csgb2312 csiso58gb231280 gb_2312 gb_2312-80 iso-ir-58",
        "big5hkscs": "x-x-big5 cn-big5 csbig5 big5-hkscs",
        "euc_jp": "x-euc-jp cseucpkdfmtjapanese",
        "iso2022_jp": "csiso2022jp",
        "cp932": "x-sjis windows-31j ms_kanji ms932 csshiftjis shift-jis",
        "cp949": "windows-949 iso-ir-149 korean cseuckr csksc56011987 ks_c_5601-1987 ks_c_5601-1989 ksc_5601",
        **{f"cp{number}": f"x-cp{number}" for number in (1250, 1251, 1253, 1255, 1256, 1257, 1258)},
        **{f"iso8859-{number}": f"iso8859{number}" for number in (2, 3, 4, 5, 10, 13, 14)},
    }.items()
    for label in labels.split()
}
# Old encodings that can hide markup: browsers show one U+FFFD instead of the page.
_UNREADABLE: Final = frozenset({
    "hz-gb-2312", "iso-2022-kr", "csiso2022kr", "iso-2022-cn", "iso-2022-cn-ext", "replacement",
})  # fmt: skip
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip
_HEAD_BYTES: Final = 4096  # browsers read 1024 first, and start again at a later declaration
_COMMENT: Final = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
_META: Final = re.compile(rb"<meta[\s/]([^>]*)", re.IGNORECASE)
_ATTRIBUTE: Final = re.compile(rb"""([a-z-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""", re.IGNORECASE)
_CONTENT_CHARSET: Final = re.compile(rb"""charset\s*=\s*["']?([^\s"';]+)""", re.IGNORECASE)
_XML: Final = re.compile(rb"""\s*<\?xml\s[^>]*?encoding\s*=\s*["']([^"']+)["']""", re.IGNORECASE)
_EUC_JP: Final = re.compile("\x8f[\xa1-\xfe]{2}|\x8e[\xa1-\xdf]|[\xa1-\xfe]{2}|[\x80-\xff]")


def decode_page(content: bytes, charset: str | None) -> str:
    """Decode a page by its byte order mark, else the server's ``charset``, else the page's own declaration.

    Without any of them it is read as UTF-8 if that is valid, else as windows-1252. Invalid bytes become
    U+FFFD.
    """
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            return _decode(content[len(mark) :], encoding)
    if codec := _codec(charset or ""):
        return _decode(content, codec)
    if codec := _codec(_declared(content[:_HEAD_BYTES])):
        # The declaration was read as ASCII, so the page is not in UTF-16.
        return _decode(content, "utf-8" if codec.startswith("utf-16") else codec)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return _decode(content, "cp1252")


def _codec(label: str) -> str | None:
    """Return the codec that browsers use for a label; None for an unknown label."""
    label = label.strip().lower()
    if label in _UNREADABLE:
        return "replacement"
    if label in _LABELS:
        return _LABELS[label]
    try:
        name = codecs.lookup(label).name
        b"a".decode(name, "ignore")  # raises LookupError for a codec that is no text encoding
    except (LookupError, ValueError):
        return None
    return None if name in _NO_LABELS else _LARGER.get(name, name)


def _declared(head: bytes) -> str:
    """Return the label that the page declares, or ""."""
    head = _COMMENT.sub(b"", head)
    if xml := _XML.match(head):
        return xml[1].decode("latin-1")
    for meta in _META.finditer(head):
        attributes: dict[bytes, bytes] = {
            name.lower(): double or single or bare
            for name, double, single, bare in _ATTRIBUTE.findall(meta[1])
        }
        label = attributes.get(b"charset")
        if label is None and attributes.get(b"http-equiv", b"").strip().lower() == b"content-type":
            inside = _CONTENT_CHARSET.search(attributes.get(b"content", b""))
            label = inside[1] if inside else None
        if label is not None and _codec(label.decode("latin-1")):
            return label.decode("latin-1")
    return ""


def _decode(content: bytes, codec: str) -> str:
    if codec == "replacement":
        return "\ufffd" if content else ""
    if codec == "euc_jp":
        return _EUC_JP.sub(_euc_jp_character, content.decode("latin-1"))
    try:
        text: str = content.decode(codec, _ERRORS)
        return text
    except ValueError:  # some codecs ignore the error handler
        return content.decode("utf-8", "replace")


def _euc_jp_character(match: re.Match[str]) -> str:
    """Decode one character of EUC-JP in the larger set of browsers, that of windows-31j."""
    raw = match[0].encode("latin-1")
    if len(raw) != 2:
        return raw.decode("euc_jp", "replace") if len(raw) == 3 else "\ufffd"
    if raw[0] == 0x8E:
        return raw[1:].decode("cp932", "replace")
    row, cell = raw[0] - 0xA0, raw[1] - 0xA0
    lead = (row - 1) // 2 + (0x81 if row <= 62 else 0xC1)
    trail = cell + (0x3F + (cell > 63) if row % 2 else 0x9E)
    return bytes([lead, trail]).decode("cp932", "replace")


def _as_browsers_do(error: UnicodeError) -> tuple[str, int]:
    """Decode single bytes that Python rejects and browsers accept."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    byte = error.object[error.start]
    if error.encoding == "charmap" and 0x80 <= byte < 0xA0:
        return chr(byte), error.start + 1
    if error.encoding == "gb18030" and byte == 0x80:
        return "\u20ac", error.start + 1
    return "\ufffd", error.end


_ERRORS: Final = "outrider-browser"
codecs.register_error(_ERRORS, _as_browsers_do)


# --- HTML to text: one pass in linear time, without scripts or network access. The standard library's parser
# needs minutes for two megabytes of ``<a``, and pages are untrusted. ---

# Elements whose content is no text. The first four end only at their own closing tag.
_RAW: Final = frozenset({"script", "style", "iframe", "noscript"})
_HIDDEN: Final = _RAW | {"template", "svg", "object"}
_INLINE: Final = frozenset(
    (
        "a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "dfn", "em", "font", "i", "kbd", "mark", "q",
        "s", "samp", "small", "span", "strong", "sub", "sup", "time", "tt", "u", "var", "wbr",
    )
)  # fmt: skip
_CELLS: Final = frozenset({"td", "th"})
_OPENS: Final = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9:-]{0,31})|<!--|<[!?/]")
_ENDS: Final = re.compile(r"""(?>[^>"']+|"[^"]*"|'[^']*')*+>""")
# Except line breaks and tabs
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_controls(text: str) -> str:
    """Replace control characters except line breaks and tabs by blanks."""
    return _CONTROLS.sub(" ", text)


def title_and_text(page: str) -> tuple[str, str]:
    """Return the title and the visible text: one line per block, cells of a table row separated by blanks."""
    parts: list[str] = []
    title, position, knows_quotes = "", 0, True

    def tag_end(start: int) -> int:
        """Position after the tag's ``>``; a ``>`` in quotes does not count as long as all quotes are closed.
        0 if the tag has no end.
        """
        nonlocal knows_quotes
        if knows_quotes:
            if match := _ENDS.match(page, start):
                return match.end()
            knows_quotes = False  # not searched again, which would take quadratic time
        return page.find(">", start) + 1

    while True:
        tag = _OPENS.search(page, position)
        parts.append(page[position : tag.start() if tag else None].replace("\n", " "))
        if tag is None:
            break
        if tag[0] == "<!--":
            position = page.find("-->", tag.start() + 2) + 3
            if position < 3:
                break
            continue
        position = tag_end(tag.end())
        if not position:
            break
        name = (tag[2] or "").lower()
        if name == "title" and not tag[1]:
            # up to its closing tag, or to any other tag
            end = page.find("<", position)
            title = title or page[position : end if end >= 0 else None].strip()
            position = end
            if end < 0:
                break
            continue
        is_closed = page[position - 2] == "/" and name not in _RAW
        if name in _HIDDEN and not tag[1] and not is_closed:
            closing = re.compile(f"</{name}", re.IGNORECASE).search(page, position)
            position = tag_end(closing.end()) if closing else 0
            if not position:
                break
        elif name and name not in _INLINE:
            parts.append(" " if name in _CELLS else "\n")
    lines = (" ".join(_unescape(line).split()) for line in "".join(parts).split("\n"))
    return " ".join(_unescape(title).split()), "\n".join(line for line in lines if line)


def _unescape(text: str) -> str:
    try:
        return without_controls(html.unescape(text))
    except ValueError:  # a number of thousands of digits
        return text


# --- Pages of a file ---

_SCHEME = re.compile(r"https?://(?:www\.)?")


class Refused(Exception):
    """The policy requested a page that does not exist or is not allowed; the message is its observation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """``address`` is the url, else the title, else the id in brackets."""

    address: str
    title: str
    text: str


class PageCollection:
    """Pages by url, title and id, in this order: a title that is a number (``1984``) takes precedence over an
    id. Case, blanks, the scheme, a trailing slash and the fragment are ignored.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._texts: dict[str, list[str]] = {}
        self._titles: dict[str, str] = {}
        self._url_index: dict[str, list[str]] = {}
        self._title_index: dict[str, list[str]] = {}
        self._id_index: dict[str, list[str]] = {}
        for row in rows:
            title = row_title(row.values.get("title"))
            url, number = row.values.get("url"), row.values.get("id")
            if isinstance(url, str) and url.strip():
                address = url
                _add_name(self._url_index, url, address)
            elif title or number is not None:
                address = title or f"[{number}]"
            else:
                raise DataError(f"{row.location}: a page needs a title, a url or an id to be named by")
            self._texts.setdefault(address, []).append(row.text("text"))
            self._titles.setdefault(address, title)
            if title:
                _add_name(self._title_index, title, address)
            if number is not None:
                _add_name(self._id_index, str(number), address)

    @classmethod
    def load(cls, path: Path) -> "PageCollection":
        """Read a JSONL or Parquet file; raises DataError."""
        return cls(read_rows(path))

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, name: str) -> Page | None:
        """Find a page by url, title or id, or return None. Raises Refused if several have the title."""
        key = _key(name)
        for table in (self._url_index, self._title_index, self._id_index):
            addresses = table.get(key, [])
            if len(addresses) > 1:
                raise Refused(f"Several pages are called that: {', '.join(addresses[:5])}")
            if addresses:
                (address,) = addresses
                return Page(
                    address=address, title=self._titles[address], text="\n".join(self._texts[address])
                )
        return None


def _add_name(table: dict[str, list[str]], name: str, address: str) -> None:
    known = table.setdefault(_key(name), [])
    if address not in known:
        known.append(address)


def _key(name: str) -> str:
    plain = " ".join(name.split()).casefold()
    rest = _SCHEME.sub("", plain, count=1) if _SCHEME.match(plain) else plain
    return plain if rest == plain else rest.partition("#")[0].rstrip("/")


# --- Allowed addresses ---

Resolve: TypeAlias = Callable[[str, int], Sequence[str]]
"""Resolve a host and port to numeric addresses. Raises Refused for a name that does not exist, ToolFault if
the lookup fails.
"""
_PORTS: Final = {"http": 80, "https": 443}
_MAX_URL: Final = 2000
# IPv6 addresses that contain an IPv4 address in their last four bytes
_TRANSLATED: Final = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("::/96"))
# All other public IPv6 addresses (RFC 4291, section 2.4)
_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
# The name does not exist, or has no address of the requested kinds
_NO_SUCH: Final = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})


def read_url(text: str, settings: FetchSettings) -> httpx2.URL:
    """Parse an address of the policy or of a redirect; raises Refused unless its host is allowed.

    The parser is that of the library that sends the request: two parsers that differ could be exploited.
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
    """Return the host as it is sent, without brackets or a trailing dot."""
    return url.raw_host.decode("ascii").lower().strip("[]").removesuffix(".")


def resolve_address(url: httpx2.URL, settings: FetchSettings, resolve: Resolve) -> str:
    """Resolve the host once; the connection uses this number, so no second lookup can return another one.

    Raises Refused if any address of the host is not public and the host is not in ``private_hosts``.
    """
    host, port = url_host(url), _port(url)
    addresses = resolve(host, port)
    if not addresses:
        raise ToolFault(f"browser: {host} has no address")
    if not _is_listed(host, port, url.scheme, settings.private_hosts) and not all(map(is_public, addresses)):
        raise Refused("This host cannot be opened: it stands for a private address.")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an address is on the public internet; also checks an IPv4 address inside an IPv6 address."""
    number = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(number, ipaddress.IPv6Address):
        inner = number.ipv4_mapped or number.sixtofour
        if inner is None and any(number in network for network in _TRANSLATED):
            inner = ipaddress.IPv4Address(number.packed[-4:])
        if inner is None:
            return number in _UNICAST and number.is_global
        number = inner
    return number.is_global and not number.is_multicast


def look_up(host: str, port: int) -> list[str]:
    """Resolve with the system's resolver, in its order."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        if isinstance(error, UnicodeError) or error.errno in _NO_SUCH:
            raise Refused("There is no such host.") from error
        raise ToolFault(f"browser: {host}: {error.strerror}") from error
    return [str(info[4][0]) for info in infos]


def _port(url: httpx2.URL) -> int:
    """An explicit port 0 stays 0 and does not mean the scheme's default."""
    return _PORTS.get(url.scheme, 0) if url.port is None else url.port


def _is_listed(host: str, port: int, scheme: str, listed: Sequence[str]) -> bool:
    for entry in listed:
        name, _, own = entry.rpartition(":") if not entry.endswith("]") and ":" in entry else (entry, "", "")
        is_host = host.endswith(name[1:]) if name.startswith("*.") else host == name.strip("[]")
        if is_host and port == (int(own) if own else _PORTS[scheme]):
            return True
    return False


# --- Live pages ---

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
# Errors of the server or the connection; every other error concerns the requested page.
_FAULTS: Final = frozenset({407, 408, 425, 429})
_HTML: Final = frozenset({"text/html", "application/xhtml+xml"})
_PLAIN: Final = frozenset({"application/json", "application/xml"})


class Fetcher:
    """Fetches pages of allowed hosts, within one time limit and one size limit; thread-safe.

    Tests replace the network by ``transport`` and ``resolve``.
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
        """Return the page as of its first request. Raises Refused, or ToolFault if the network or the server
        failed.
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
            number = self._resolve_in_time(url, ends)
            return self._client.request(
                str(url.copy_with(host=number, fragment=None)),
                None,
                {
                    "Host": url.netloc.decode("ascii"),
                    "Accept": "text/html, text/*;q=0.9",
                    "Connection": "close",  # another host at this address has another certificate
                },
                timeout_s=_seconds_left(ends),
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

    def _resolve_in_time(self, url: httpx2.URL, ends: float) -> str:
        """Resolve in a daemon thread, because the system resolver has no time limit. Raises TimeoutError."""
        future: Future[str] = Future()

        def run() -> None:
            try:
                future.set_result(resolve_address(url, self._settings, self._resolve))
            except BaseException as error:
                future.set_exception(error)

        seconds = _seconds_left(ends)
        threading.Thread(target=run, name="outrider-look-up", daemon=True).start()
        return future.result(timeout=seconds)

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


def _seconds_left(ends: float) -> float:
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
