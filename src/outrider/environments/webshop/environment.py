"""WebShop: buying a product in a text web shop by an instruction (Yao et al. 2022, arXiv 2207.01206).

The pages (immutable), the goals and the score are written anew. The score of an episode that buys nothing is
0. Without files of your own, the environment uses a small invented catalogue.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from outrider.environments.base import Environment, EpisodeResult, StepResult, known_split, split_size
from outrider.environments.text_games import STOP, TAGGED, render_action
from outrider.environments.tool_qa.rewards import neutralise
from outrider.environments.webshop import catalogue as webshop_goals
from outrider.environments.webshop import reward as webshop_reward
from outrider.environments.webshop.catalogue import Product, SplitUnit, load_catalogue
from outrider.environments.webshop.reward import OptionScoring, PurchaseScore, RewardKind
from outrider.environments.window import WindowedSettings
from outrider.errors import ConfigError, DataError
from outrider.tools.search import Passage, SearchConfig, SearchTool, terms
from outrider.types import Step, Task

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


MAX_ACTION_CHARACTERS: Final = 500
SEPARATOR: Final = " [SEP] "
_ACTION: Final = re.compile(r"(search|click) ?\[(.*)\]", re.IGNORECASE)

INSTRUCTIONS: Final = (
    "You are shopping on a web site, one action a turn. Find the product that fits the request, "
    "choose the options that it asks for, and buy it; buying ends the task.\n"
    "You may think first. Then write exactly one action between <action> and </action>:\n"
    "<action>search[words]</action> searches, on the page with the search bar only;\n"
    "<action>click[name]</action> clicks a button, a product number or an option value of the page, "
    "for example <action>click[buy now]</action>.\n"
    "The next message shows the page that follows, its parts separated by [SEP]."
)
NO_SEARCH_BAR: Final = "This page has no search bar, so nothing was done. Go back to search first."
QUERY: Final = "search[<your query>]"
"""Stands for every search in the list of possible commands."""
NO_SUCH_NAME: Final = "Nothing on this page has that name, so nothing was done."


_COUNTED: Final = ("num_turns", "num_invalid", "num_inadmissible", "num_searches", "num_cut_pages")
# Leaves room for the verb and the brackets.
_MAX_QUERY_CHARACTERS: Final = MAX_ACTION_CHARACTERS - 20
Verb: TypeAlias = Literal["search", "click"]


def parse_action(text: str) -> tuple[Verb, str] | str:
    """Find the one ``<action>...</action>`` of a turn; text around it is ignored. Never raises.

    Returns:
        The verb and its argument, with white space collapsed and the name of a click in lower case. Or a text
        for the policy that explains what is wrong with the turn.
    """
    actions = TAGGED.findall(text)
    if not actions:
        return "No action found. Write exactly one, as <action>search[words]</action>."
    if len(actions) > 1:
        return f"Found {len(actions)} actions, so nothing was done. Write exactly one."
    return read_command(actions[0])


def read_command(command: str) -> tuple[Verb, str] | str:
    """Read a command without tags; the result is that of :func:`parse_action`."""
    action = " ".join(command.split())
    if len(action) > MAX_ACTION_CHARACTERS:
        return f"The action is longer than {MAX_ACTION_CHARACTERS} characters, so nothing was done."
    match = _ACTION.fullmatch(action)
    if match is None or not match[2].strip():
        return "The action must read search[words] or click[name], so nothing was done."
    argument = match[2].strip()
    return ("search", argument) if match[1].lower() == "search" else ("click", argument.lower())


class WebShopConfig(WindowedSettings):
    """Which catalogue and goals are used, and how a purchase is scored."""

    own_prompt: ClassVar[str] = "webshop"
    input_paths: ClassVar[frozenset[str]] = frozenset({"products", "attributes", "human_goals"})

    type: Literal["webshop"] = "webshop"
    products: Path | None = None
    """Products in the format of ``products_1k.json``; None for the small shipped catalogue."""
    attributes: Path | None = None
    """Their attributes and synthetic instructions in the format of ``items_ins_v2_1000.json``; required with
    ``products``.
    """
    human_goals: Path | None = None
    """Human instructions by product in the format of the original's ``items_human_ins.json``, instead of the
    synthetic ones. A list of instructions without products cannot be scored.
    """
    goal_seed: int = 0
    """Seed of the prices and of the order of goals. Another value gives another benchmark."""
    split_by: SplitUnit = "goal"
    """What two splits never share: a goal and its wording, or a product."""
    num_train: Annotated[int, Field(ge=1)] | None = None
    """Number of goals of the split: the first ones; None for all."""
    num_valid: Annotated[int, Field(ge=1)] | None = None
    num_test: Annotated[int, Field(ge=1)] | None = None
    option_scoring: OptionScoring = "fixed"
    """``released`` compares option values as the original engine does, which makes some goals impossible."""
    reward: RewardKind = "score"
    """The return of a purchase: the task score, or 10 for a perfect one and 0 otherwise (``success10``)."""
    invalid_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Subtracted from the return for every turn without a readable action; verl-agent uses 0.1."""
    show_actions: bool = True
    """List the possible actions below every page (up to twice the text)."""
    show_attributes: bool = False
    """Add a sub-page with the attributes of an item, which the reward compares."""
    max_page_chars: Annotated[int, Field(ge=1)] = 2000
    """Limit of characters for an item's description, features, reviews or attributes."""

    @property
    def score_mark(self) -> str:
        """With the released option scoring, some goals are impossible."""
        is_fixed = self.option_scoring == "fixed"
        return "" if is_fixed else 'option_scoring = "released": some goals cannot reach the full score'

    @model_validator(mode="after")
    def _validate(self) -> "WebShopConfig":
        if (self.products is None) != (self.attributes is None):
            raise ValueError("products and attributes belong together: set both or neither")
        if self.context == "window" and self.invalid_penalty:
            raise ValueError(
                'invalid_penalty does not know the rule of window.parse: with context = "window", '
                "set algorithm.invalid_penalty"
            )
        if self.context == "window" and not self.show_actions:
            raise ValueError('show_actions is of conversations: with context = "window", set window.actions')
        return self


class _World:
    """What the episodes of some settings share."""

    def __init__(self, config: WebShopConfig) -> None:
        catalogue = load_catalogue(config.products, config.attributes, config.human_goals)
        prices = webshop_goals.draw_prices(catalogue, config.goal_seed)
        goals = webshop_goals.build_goals(catalogue, prices, config.goal_seed)
        self.splits = webshop_goals.split_goals(goals, seed=config.goal_seed, unit=config.split_by)
        self.shop = Shop(
            catalogue.products,
            prices,
            show_attributes=config.show_attributes,
            max_page_chars=config.max_page_chars,
        )


def _world(config: WebShopConfig) -> _World:
    """Load a catalogue once per process, and again if a file has changed."""
    files = (config.products, config.attributes, config.human_goals)
    states = [(file.stat().st_mtime_ns, file.stat().st_size) for file in files if file and file.exists()]
    return _load(config, tuple(states))


@lru_cache(maxsize=1)
def _load(config: WebShopConfig, states: tuple[tuple[int, int], ...]) -> _World:
    return _World(config)


class WebShopEnvironment(Environment):
    """One shopping episode. ``shared`` is the :class:`Shop`."""

    Settings = WebShopConfig
    name = "webshop"
    stop = (STOP,)

    @classmethod
    def tasks(cls, settings: WebShopConfig, split: str) -> Sequence[Task]:
        """The tasks of a split. Raises DataError for bad files, or if the split has no goals."""
        known = known_split(split, "WebShop")
        goals = _world(settings).splits[known][: split_size(settings, known)]
        if not goals:
            raise DataError(f"webshop: the catalogue has too few goals for the split {split!r}")
        return tuple(webshop_goals.make_task(goal) for goal in goals)

    @classmethod
    def open_shared(cls, settings: WebShopConfig) -> Shop:
        """Load the catalogue and build the index. Raises DataError if a file is missing or malformed."""
        return _world(settings).shop

    def reset(self, task: Task, seed: int) -> str:
        """Go to the search page. ``seed`` is not used, because nothing is drawn.

        Raises ConfigError for a task of another environment or another catalogue.
        """
        self._goal = webshop_goals.read_goal(task)
        if self._goal.product_id not in self.shared.products:
            raise ConfigError(f"{task.key}: the catalogue has no product {self._goal.product_id!r}")
        self._page = Page()
        self._bought: PurchaseScore | None = None
        self._bought_text = ""
        self._counts: Counter[str] = Counter()
        self.opening, self.task_text = self._fields(self._page), neutralise(self._goal.text)
        return f"{INSTRUCTIONS}\n\nRequest: {self.task_text}\n\n{self._look()}"

    def step(self, action: str) -> StepResult:
        """Execute the action of the turn. A turn without a readable action is ``invalid``, and an action that
        the page does not allow is ``refused``.
        """
        result, problem = self._execute(parse_action(action))
        if result.done:
            return result
        lines = (problem,) if result.invalid else (problem, self._look())
        return replace(result, message="\n".join(line for line in lines if line))

    def admitted(self) -> Sequence[str]:
        """A search, if the page has a search bar, and a click on every name of the page. The button of the
        search bar is left out, because a click on it does nothing.
        """
        bar = (QUERY,) if self._page.kind == "search" else ()
        return (*bar, *(f"click[{neutralise(name)}]" for name in self.shared.clickables(self._page)))

    def act(self, command: str) -> StepResult:
        """Execute a command without tags. A command that cannot be read or executed does nothing. The
        observation is always the page.
        """
        result, _ = self._execute(read_command(command))
        return result if result.done else replace(result, message=self._fields(self._page))

    def result(self) -> EpisodeResult:
        """Return, success (a task score of exactly 1.0) and the parts of the score, 0 before a purchase."""
        bought = self._bought
        score = 0.0 if bought is None else bought.value
        parts = {"type_factor": 0.0, "price_ok": 0.0, "share_attributes": 0.0, "share_options": 0.0}
        if bought is not None:
            parts = {
                "type_factor": bought.type_factor,
                "price_ok": float(bought.price_ok),
                "share_attributes": _share(bought.num_attributes_hit, bought.num_attributes),
                "share_options": _share(bought.num_options_hit, bought.num_options),
            }
        counts = {name: float(self._counts[name]) for name in _COUNTED}
        penalties = self.settings.invalid_penalty * self._counts["num_invalid"]
        products, goal = self.shared.products, self._goal
        penalty = {"invalid_penalty": -penalties} if penalties else {}
        return EpisodeResult(
            episode_return=webshop_reward.training_return(score, self.settings.reward) - penalties,
            success=score == webshop_reward.SUCCESS,
            metrics={"score": score, "bought": float(bought is not None)} | parts | counts,
            targets=(_purchase(products[goal.product_id].title, [value for _, value in goal.options]),),
            answer=None if bought is None else self._bought_text,
            reward_parts=parts | penalty if bought is not None else penalty,
            reason="nothing was bought" if bought is None else f"the purchase has the score {score:.2f}",
        )

    def copy(self) -> Self:
        """An independent episode in the same state: pages are immutable and the shop is read only."""
        twin = copy.copy(self)
        twin._counts = self._counts.copy()
        return twin

    def expert(self) -> Sequence[Step] | None:
        """Search for the product, open it, choose the options and buy. None if no search finds it.

        The query is the instruction, or the product's title if that shows the product on an earlier page of
        results.
        """
        steps: list[Step] = []
        for command in self._plan():
            text = render_action(command)
            outcome = self.step(text)
            steps.append(Step(text=text, observation=outcome.text, is_terminal=outcome.done))
        return steps or None

    def _plan(self) -> list[str]:
        """The expert's commands; empty if neither query finds the product."""
        goal = self._goal
        texts = (goal.request, self.shared.products[goal.product_id].title)
        queries = [" ".join(terms(text))[:_MAX_QUERY_CHARACTERS] for text in texts]
        matches: list[tuple[int, int]] = []
        for index, query in enumerate(queries):
            results = self.shared.search(query).results
            if goal.product_id in results:
                matches.append((results.index(goal.product_id) // RESULTS_PER_PAGE, index))
        if not matches:
            return []
        num_turns, index = min(matches)
        values = [value for _, value in goal.options]
        names = [NEXT] * num_turns + [goal.product_id, *values, BUY]
        return [f"search[{queries[index]}]", *(f"click[{name}]" for name in names)]

    def _execute(self, action: tuple[Verb, str] | str) -> tuple[StepResult, str]:
        """Execute what :func:`parse_action` returned. Returns the result without a message, and what was
        wrong with the action (empty for nothing).
        """
        self._counts["num_turns"] += 1
        if isinstance(action, str):
            self._counts["num_invalid"] += 1
            return StepResult(reward=0.0 - self.settings.invalid_penalty, invalid=True), action
        verb, argument = action
        if verb == "search":
            if self._page.kind != "search":
                return self._refuse(NO_SEARCH_BAR)
            self._counts["num_searches"] += 1
            self._page = self.shared.search(argument)
            return StepResult(), ""
        if argument == BUY and argument in self.shared.clickables(self._page):
            return self._buy(), ""
        next_page = self.shared.click(self._page, argument)
        if next_page is None:
            return self._refuse(NO_SUCH_NAME)
        self._page = next_page
        return StepResult(), ""

    def _refuse(self, reason: str) -> tuple[StepResult, str]:
        self._counts["num_inadmissible"] += 1
        return StepResult(refused=True), reason

    def _buy(self) -> StepResult:
        page, goal = self._page, self._goal
        self._bought_text = _purchase(self.shared.products[page.product_id].title, page.chosen.values())
        self._bought = webshop_reward.score_purchase(
            bought=self.shared.products[page.product_id],
            price=self.shared.prices[page.product_id],
            chosen=page.chosen,
            target=self.shared.products[goal.product_id],
            goal=goal,
            option_scoring=self.settings.option_scoring,
        )
        return StepResult(
            message=None,
            reward=webshop_reward.training_return(self._bought.value, self.settings.reward),
            done=True,
        )

    def _fields(self, page: Page) -> str:
        """The texts of a page in quotes, as verl-agent shows them."""
        fields, is_cut = self.shared.look(page)
        self._counts["num_cut_pages"] += is_cut
        return neutralise(SEPARATOR.join(f"'{field}'" for field in fields))

    def _look(self) -> str:
        fields, is_cut = self.shared.look(self._page)
        self._counts["num_cut_pages"] += is_cut
        page = f"Page: {SEPARATOR.join(fields)}"
        if self.settings.show_actions:
            actions = [f"click[{name}]" for name in self.shared.clickables(self._page)] or ["search[words]"]
            page += "\nActions: " + " ".join(actions)
        # Scraped texts may contain tags or special tokens of a chat template; their "<" becomes "&lt;".
        return neutralise(page)


def _purchase(title: str, options: Iterable[str]) -> str:
    """A product and its chosen options in one line."""
    return "; ".join((title, *options))


def _share(num_hit: int, total: int) -> float:
    """1 if there is nothing to match."""
    return num_hit / total if total else 1.0
