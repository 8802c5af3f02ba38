"""Pages of a file, found by what a search result shows of them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import DataError
from outrider.records import Row, read_rows
from outrider.tools.search import row_title

_SCHEME = re.compile(r"https?://(?:www\.)?")


class Refused(Exception):
    """The policy asked for what there is not, or may not have; the message is its observation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """``address`` is the url, or the title of a page without one, or else the id in brackets."""

    address: str
    title: str
    text: str


class PageCollection:
    """Pages by url, title and id, in this order: a title that is a number (``1984``) is no id.

    Case, blanks, the scheme, a last slash and what follows ``#`` do not count.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        texts: dict[str, list[str]] = {}
        titles: dict[str, str] = {}
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
            texts.setdefault(address, []).append(row.text("text"))
            titles.setdefault(address, title)
            if title:
                _add_name(self._title_index, title, address)
            if number is not None:
                _add_name(self._id_index, str(number), address)
        self._texts, self._titles = texts, titles

    @classmethod
    def load(cls, path: Path) -> "PageCollection":
        """Of a JSONL or Parquet file; raises DataError."""
        return cls(read_rows(path))

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, name: str) -> Page | None:
        """The page of a url, title or id; None without one. Raises Refused where several have the title."""
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
