"""WebShop's pages: what the shop shows, what can be clicked there, and where a click leads. A page is a
value, never changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from outrider.environments.webshop.catalogue import Product
from outrider.tools.search import Passage, SearchConfig, SearchTool

NUM_RESULTS: Final = 50
RESULTS_PER_PAGE: Final = 10
BACK: Final = "back to search"
NEXT: Final = "next >"
PREVIOUS: Final = "< prev"
BUY: Final = "buy now"
_BACK_LABEL: Final = "Back to Search"
_CUT_MARK: Final = " ..."

SubPage: TypeAlias = Literal["description", "features", "reviews", "attributes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Where a shopper is. ``results`` are product ids, best first, and ``number`` counts their pages from 1;
    ``chosen`` maps option names to values. ``sub`` is an item's sub-page.
    """

    kind: Literal["search", "results", "item"] = "search"
    results: tuple[str, ...] = ()
    number: int = 1
    product_id: str = ""
    chosen: Mapping[str, str] = field(default_factory=dict)
    sub: SubPage | None = None

    @property
    def shown(self) -> tuple[str, ...]:
        """The ids on this page of results."""
        end = self.number * RESULTS_PER_PAGE
        return self.results[end - RESULTS_PER_PAGE : end]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A page as text fields in reading order. ``is_cut`` says that a long text was shortened."""

    fields: tuple[str, ...]
    is_cut: bool = False


class Shop:
    """Products, their index and their pages; shared by all episodes and read only, so safe from several
    threads.
    """

    def __init__(
        self,
        products: Mapping[str, Product],
        prices: Mapping[str, float],
        *,
        show_attributes: bool,
        max_page_chars: int,
    ) -> None:
        """``prices`` are what a purchase costs, in dollars; ``max_page_chars`` bounds the text of an item's
        sub-page.
        """
        self.products = products
        self.prices = prices
        self._ids = {product_id.lower(): product_id for product_id in products}
        self._max_page_chars = max_page_chars
        self._subs: tuple[SubPage, ...] = (
            "description",
            "features",
            "reviews",
            *(("attributes",) if show_attributes else ()),
        )
        self._index = SearchTool(
            [_passage(product) for product in products.values()],
            SearchConfig(top_k=NUM_RESULTS, title_weight=1),
        )

    def search(self, words: str) -> Page:
        """The first page of at most 50 products by BM25; of none when no word is known."""
        hits = self._index.run(words).passages
        return Page(kind="results", results=tuple(passage.passage_id for passage in hits))

    def clickables(self, page: Page) -> tuple[str, ...]:
        """The names that can be clicked, in reading order and lower case; none on the search page."""
        if page.kind == "search":
            return ()
        if page.kind == "results":
            return (BACK, *self._turns(page), *(product_id.lower() for product_id in page.shown))
        if page.sub is not None:
            return (BACK, PREVIOUS)
        values = [
            _name(value) for values in self.products[page.product_id].options.values() for value in values
        ]
        return (BACK, PREVIOUS, *values, *self._subs, BUY)

    def click(self, page: Page, name: str) -> Page | None:
        """The page behind a name (in lower case), None when this page does not have it. Buying is not a page.

        A value that several options offer goes to the last of them, as in the original; a button goes before
        a value.
        """
        if name == BUY or name not in self.clickables(page):
            return None
        if name == BACK:
            return Page()
        if name == NEXT:
            return replace(page, number=page.number + 1)
        if name == PREVIOUS:
            return _previous(page)
        if page.kind == "results":
            return replace(page, kind="item", product_id=self._ids[name])
        sub = next((sub for sub in self._subs if sub == name), None)
        return replace(page, sub=sub) if sub is not None else self._choose(page, name)

    def look(self, page: Page) -> Sight:
        """Text of the page, in the order of the original's text mode."""
        if page.kind == "search":
            return Sight(fields=("Search",))
        if page.kind == "results":
            head = f"Page {page.number} (Total results: {len(page.results)})"
            turns = [turn.title() for turn in self._turns(page)]
            rows = [
                text
                for key in page.shown
                for text in (key, self.products[key].title, self.products[key].price_tag)
            ]
            return Sight(fields=_fields(_BACK_LABEL, head, *turns, *rows))
        product = self.products[page.product_id]
        if page.sub is not None:
            return self._look_closer(product, page.sub)
        options = [text for name, values in product.options.items() for text in (name, *values)]
        price, rating = f"Price: {product.price_tag}", f"Rating: {product.rating}"
        subs = [sub.title() for sub in self._subs]
        return Sight(
            fields=_fields(
                _BACK_LABEL, PREVIOUS.title(), *options, product.title, price, rating, *subs, BUY.title()
            )
        )

    def _look_closer(self, product: Product, sub: SubPage) -> Sight:
        texts: tuple[str, ...]
        match sub:
            case "description":
                texts = (product.description,)
            case "features":
                texts = product.features
            case "reviews":
                texts = product.reviews or ("There are no reviews.",)
            case "attributes":
                texts = (*product.attributes, " > ".join(product.categories), product.query)
        lines, room = [], self._max_page_chars
        for text in _fields(*texts):
            if room > 0:
                lines.append(text if len(text) <= room else text[:room] + _CUT_MARK)
            room -= len(text)
        return Sight(fields=(_BACK_LABEL, PREVIOUS.title(), *lines), is_cut=room < 0)

    def _turns(self, page: Page) -> tuple[str, ...]:
        before = (PREVIOUS,) if page.number > 1 else ()
        return (*before, NEXT) if page.number * RESULTS_PER_PAGE < len(page.results) else before

    def _choose(self, page: Page, name: str) -> Page:
        chosen = dict(page.chosen)
        offers = [
            (key, value) for key, values in self.products[page.product_id].options.items() for value in values
        ]
        key, value = [(key, value) for key, value in offers if _name(value) == name][-1]
        return replace(page, chosen=chosen | {key: value})


def _previous(page: Page) -> Page:
    if page.kind == "results":
        return replace(page, number=page.number - 1)
    # Back from a sub-page the choices are kept; leaving the item forgets them.
    return (
        replace(page, sub=None)
        if page.sub is not None
        else replace(page, kind="results", product_id="", chosen={})
    )


def _name(text: str) -> str:
    return " ".join(text.split()).lower()


def _fields(*texts: str) -> tuple[str, ...]:
    lines = (" ".join(text.split()) for text in texts)
    return tuple(line for line in lines if line)


def _passage(product: Product) -> Passage:
    """The text that the original indexes: title, description, first feature, options."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    return Passage(
        passage_id=product.product_id,
        title=product.title,
        text=" ".join([product.description, *product.features[:1], options]),
    )
