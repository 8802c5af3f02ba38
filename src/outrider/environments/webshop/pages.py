"""WebShop's pages: their texts, their clickable names, and the results of clicks. A page is immutable."""

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
    """The page that a shopper sees.

    Attributes:
        kind: the search page, a page of results, or an item.
        results: product ids, best first.
        number: number of the page of results, from 1.
        product_id: the item.
        chosen: the item's chosen options by name.
        sub: the item's sub-page, or None.
    """

    kind: Literal["search", "results", "item"] = "search"
    results: tuple[str, ...] = ()
    number: int = 1
    product_id: str = ""
    chosen: Mapping[str, str] = field(default_factory=dict)
    sub: SubPage | None = None

    @property
    def shown(self) -> tuple[str, ...]:
        """The product ids on this page of results."""
        end = self.number * RESULTS_PER_PAGE
        return self.results[end - RESULTS_PER_PAGE : end]


class Shop:
    """Products, their search index and their pages; read only, and shared by all episodes."""

    def __init__(
        self,
        products: Mapping[str, Product],
        prices: Mapping[str, float],
        *,
        show_attributes: bool,
        max_page_chars: int,
    ) -> None:
        """``prices`` are in dollars; ``max_page_chars`` limits the text of an item's sub-page."""
        self.products = products
        self.prices = prices
        self._ids = {product_id.lower(): product_id for product_id in products}
        self._max_page_chars = max_page_chars
        self._subs: tuple[SubPage, ...] = ("description", "features", "reviews")
        if show_attributes:
            self._subs += ("attributes",)
        self._index = SearchTool(
            [_passage(product) for product in products.values()],
            SearchConfig(top_k=NUM_RESULTS, title_weight=1),
        )

    def search(self, words: str) -> Page:
        """The first page of at most 50 products by BM25; of none if no word is in the index."""
        hits = self._index.run(words).passages
        return Page(kind="results", results=tuple(passage.passage_id for passage in hits))

    def clickables(self, page: Page) -> tuple[str, ...]:
        """The clickable names of a page in reading order and lower case; none on the search page."""
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
        """The page after a click on a name in lower case; None if the page has no such name. Buying is no
        page.

        As in the original, a value of several options belongs to the last of them; a button precedes a value.
        """
        if name == BUY or name not in self.clickables(page):
            return None
        if name == BACK:
            return Page()
        if name == NEXT:
            return replace(page, number=page.number + 1)
        if name == PREVIOUS:
            if page.kind == "results":
                return replace(page, number=page.number - 1)
            if page.sub is not None:  # the choices are kept; they are lost when the item is left
                return replace(page, sub=None)
            return replace(page, kind="results", product_id="", chosen={})
        if page.kind == "results":
            return replace(page, kind="item", product_id=self._ids[name])
        if (sub := next((sub for sub in self._subs if sub == name), None)) is not None:
            return replace(page, sub=sub)
        offers = [
            (option, value)
            for option, values in self.products[page.product_id].options.items()
            for value in values
            if _name(value) == name
        ]
        return replace(page, chosen=dict([*page.chosen.items(), offers[-1]]))

    def look(self, page: Page) -> tuple[tuple[str, ...], bool]:
        """The texts of a page, in the order of the original's text mode, and whether they were truncated."""
        if page.kind == "search":
            return ("Search",), False
        if page.kind == "results":
            title = f"Page {page.number} (Total results: {len(page.results)})"
            turns = [turn.title() for turn in self._turns(page)]
            rows = [
                text
                for key in page.shown
                for text in (key, self.products[key].title, self.products[key].price_tag)
            ]
            return _fields(_BACK_LABEL, title, *turns, *rows), False
        product = self.products[page.product_id]
        if page.sub is not None:
            return self._look_closer(product, page.sub)
        options = [text for name, values in product.options.items() for text in (name, *values)]
        price, rating = f"Price: {product.price_tag}", f"Rating: {product.rating}"
        subs = [sub.title() for sub in self._subs]
        head = (_BACK_LABEL, PREVIOUS.title())
        return _fields(*head, *options, product.title, price, rating, *subs, BUY.title()), False

    def _look_closer(self, product: Product, sub: SubPage) -> tuple[tuple[str, ...], bool]:
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
        return (_BACK_LABEL, PREVIOUS.title(), *lines), room < 0

    def _turns(self, page: Page) -> tuple[str, ...]:
        before = (PREVIOUS,) if page.number > 1 else ()
        return (*before, NEXT) if page.number * RESULTS_PER_PAGE < len(page.results) else before


def _name(text: str) -> str:
    return " ".join(text.split()).lower()


def _fields(*texts: str) -> tuple[str, ...]:
    lines = (" ".join(text.split()) for text in texts)
    return tuple(line for line in lines if line)


def _passage(product: Product) -> Passage:
    """The text that the original indexes: title, description, first feature and options."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    return Passage(
        passage_id=product.product_id,
        title=product.title,
        text=" ".join([product.description, *product.features[:1], options]),
    )
