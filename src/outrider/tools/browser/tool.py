"""The tool: which page is meant, what is looked for, and the reading of it."""

import hashlib
import json
from typing import Final

from outrider.errors import DataError, ToolUnavailable
from outrider.tools.base import ToolContext, ToolOutput
from outrider.tools.browser.fetch import Fetcher
from outrider.tools.browser.pages import Page, PageCollection, Refused
from outrider.tools.browser.readers import Beginning, PageReader, cut, make_reader
from outrider.tools.browser.settings import BrowserSettings
from outrider.tools.once import SingleFlightCache

UNKNOWN: Final = "There is no such page. Name one as a search result does: its title, address or id."
EMPTY: Final = "The page is empty."
_MAX_BARS = 8  # a name may hold some; each is one look-up


class Browser:
    """Reads one page of a collection, or a live one, for a question."""

    Settings = BrowserSettings
    name = "browser"
    usage = (
        "Write <browser>page | what you look for</browser> to read a page; name it by the title, address or "
        "id that a search shows."
    )
    description = (
        "Read one page for a question. Name the page by the title, address or id that a search shows, then "
        "write | and what you look for."
    )
    argument = "page"

    def __init__(
        self,
        settings: BrowserSettings,
        *,
        pages: PageCollection | None,
        reader: PageReader,
        fetcher: Fetcher | None = None,
    ) -> None:
        self.settings = settings
        self._pages = pages
        self._reader = reader
        self._beginning = Beginning(settings.max_chars)
        self._fetcher = fetcher
        self._readings: SingleFlightCache[str] = SingleFlightCache(settings.cache_readings)

    @classmethod
    def build(cls, settings: BrowserSettings, context: ToolContext) -> "Browser":
        """Over the environment's ``pages``, else its ``corpus``. Raises ToolUnavailable without any page, or
        where the reader's server does not answer.
        """
        path = getattr(context.environment, "pages", None) or context.environment.corpus
        if path is None and settings.fetch is None:
            raise ToolUnavailable("browser: no pages, no corpus and no fetch are configured")
        try:
            pages = None if path is None else PageCollection.load(path)
        except DataError as error:
            raise ToolUnavailable(f"browser: {error}") from error
        reader = make_reader(settings.reader, settings.max_chars)
        fetcher = None if settings.fetch is None else Fetcher(settings.fetch, settings.max_page_chars)
        return cls(settings, pages=pages, reader=reader, fetcher=fetcher)

    def run_text(self, text: str) -> ToolOutput:
        """One call. What there is not, or may not be had, is told; raises ToolFault where a server or the
        network failed.
        """
        try:
            page, question = self._open(text)
        except Refused as refusal:
            return ToolOutput(text=str(refusal), failed=True)
        content = cut(page.text.strip(), self.settings.max_page_chars)
        if not content:
            return ToolOutput(text=EMPTY, failed=True)
        trimmed_page = Page(address=page.address, title=" ".join(page.title.split())[:200], text=content)
        key = hashlib.sha256(json.dumps([trimmed_page.title, content, question]).encode()).digest()
        return ToolOutput(text=self._readings.get(key, lambda: self._read(trimmed_page, question)))

    def close(self) -> None:
        """Nothing to release."""

    def _read(self, page: Page, question: str) -> str:
        reader = self._reader if question else self._beginning
        text = f"{page.title}\n{reader.read(page, question)}".strip()
        return text.encode("utf-8", "replace").decode("utf-8")  # half of a pair of surrogates is no text

    def _open(self, text: str) -> tuple[Page, str]:
        """The page and what is looked for on it. The longest name that is a page's wins, because titles may
        hold a bar too.
        """
        parts = text.split("|")
        for num in range(min(len(parts), _MAX_BARS), 0, -1):
            page = self._find_page("|".join(parts[:num]).strip())
            if page is not None:
                return page, " ".join("|".join(parts[num:]).split())
        if self._fetcher is None or "://" not in parts[0]:
            raise Refused(UNKNOWN)
        return self._fetcher.page(parts[0].strip()), " ".join("|".join(parts[1:]).split())

    def _find_page(self, name: str) -> Page | None:
        """The collection's page of a name, also in the brackets in which a search shows an id."""
        if self._pages is None or not name:
            return None
        return self._pages.find(name) or self._pages.find(name.strip("[]"))
