"""Texts of a WebShop agent: the prompt, the pages, the action tag and what is said about a bad one."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, TypeAlias

from pydantic import Field, model_validator

from outrider.environments.base import EnvironmentSettings, EpisodeResult, StepResult
from outrider.environments.tool_qa.tag_protocol import neutralise
from outrider.environments.webshop import catalogue as webshop_goals
from outrider.environments.webshop import pages as webshop_pages
from outrider.environments.webshop import reward as webshop_reward
from outrider.environments.webshop.catalogue import Catalogue, Goal, SplitUnit, load_catalogue
from outrider.environments.webshop.pages import Page, Shop, Sight
from outrider.environments.webshop.reward import OptionScoring, PurchaseScore, RewardKind
from outrider.errors import ConfigError, DataError
from outrider.tools.search import terms
from outrider.types import Message, Step, Task

STOP: Final = "</action>"
MAX_ACTION_CHARACTERS: Final = 500
SEPARATOR: Final = " [SEP] "
_TAGGED: Final = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.DOTALL)
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
NO_SUCH_NAME: Final = "Nothing on this page has that name, so nothing was done."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopAction:
    """A readable action. The name of a click is in lower case; white space is collapsed."""

    verb: Literal["search", "click"]
    argument: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """Text that is no action; ``problem`` says why in words for the policy."""

    problem: str


ParsedAction: TypeAlias = ShopAction | Unreadable


def parse_action(text: str) -> ParsedAction:
    """Read the one ``<action>...</action>`` of a message; everything around it is free thought. Never
    raises.
    """
    actions = _TAGGED.findall(text)
    if not actions:
        return Unreadable(problem="No action found. Write exactly one, as <action>search[words]</action>.")
    if len(actions) > 1:
        return Unreadable(problem=f"Found {len(actions)} actions, so nothing was done. Write exactly one.")
    action = " ".join(actions[0].split())
    if len(action) > MAX_ACTION_CHARACTERS:
        return Unreadable(
            problem=f"The action is longer than {MAX_ACTION_CHARACTERS} characters, so nothing was done."
        )
    read = _ACTION.fullmatch(action)
    if read is None or not read[2].strip():
        return Unreadable(problem="The action must read search[words] or click[name], so nothing was done.")
    argument = read[2].strip()
    return ShopAction(verb="search", argument=argument) if read[1].lower() == "search" else _click(argument)


def render_action(verb: Literal["search", "click"], argument: str) -> str:
    """A policy message that holds the action and nothing else."""
    return f"<action>{verb}[{argument}]{STOP}"


def render_prompt(request: str, page: str) -> str:
    """The first user message: how to act, what to buy, and the first page."""
    return f"{INSTRUCTIONS}\n\nRequest: {neutralise(request)}\n\n{page}"


def render_page(sight: Sight, clickables: Sequence[str] | None) -> str:
    """The page in one line and, unless ``clickables`` is None, the actions that it allows in another.

    Scraped texts may hold what reads as a tag or as a chat template's special token; their ``<`` becomes
    ``&lt;``.
    """
    page = f"Page: {SEPARATOR.join(sight.fields)}"
    if clickables is not None:
        actions = [f"click[{name}]" for name in clickables] or ["search[words]"]
        page += "\nActions: " + " ".join(actions)
    return neutralise(page)


def _click(name: str) -> ShopAction:
    return ShopAction(verb="click", argument=name.lower())


# WebShop: buying what an instruction asks for in a text web shop (Yao et al. 2022, arXiv 2207.01206),
# written new.
#
# The score is the task score of :mod:`outrider.environments.webshop.reward`, 0 for an episode that never
# buys. Without files of your own it plays on a small invented catalogue.


_COUNTED: Final = ("num_turns", "num_invalid", "num_inadmissible", "num_searches", "num_cut_pages")
# Leaves room for the verb and the brackets.
_MAX_QUERY_CHARACTERS: Final = MAX_ACTION_CHARACTERS - 20


class WebShopConfig(EnvironmentSettings):
    """Which catalogue, which goals, and how a purchase is scored and paid."""

    input_paths: ClassVar[frozenset[str]] = frozenset({"products", "attributes", "human_goals"})

    type: Literal["webshop"] = "webshop"
    products: Path | None = None
    """Products in the format of ``products_1k.json``; None for the small catalogue shipped here."""
    attributes: Path | None = None
    """Their attributes and synthetic instructions in the format of ``items_ins_v2_1000.json``; goes with
    ``products``.
    """
    human_goals: Path | None = None
    """Human instructions by product in the format of the original's ``items_human_ins.json``, in place of the
    synthetic ones. A bare list of instructions names no products and cannot be scored.
    """
    goal_seed: int = 0
    """Draws the prices and orders the goals, for all workers alike. Another value gives another benchmark."""
    split_by: SplitUnit = "goal"
    """Unit that no two splits share: a goal and its wording, or even a product."""
    num_train: Annotated[int, Field(ge=1)] | None = None
    """Only the first goals of the split; None keeps all."""
    num_valid: Annotated[int, Field(ge=1)] | None = None
    """The same for ``valid``."""
    num_test: Annotated[int, Field(ge=1)] | None = None
    """The same for ``test``."""
    option_scoring: OptionScoring = "fixed"
    """``released`` compares option values as the original engine does, which makes some goals impossible to
    fulfil.
    """
    reward: RewardKind = "score"
    """The return of a purchase: the task score, or 10 for a perfect one and 0 otherwise (``success10``)."""
    invalid_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Subtracted from the return for every turn that cannot be read as an action; verl-agent takes 0.1."""
    show_actions: bool = True
    """List the actions that a page allows below it (up to twice the text)."""
    show_attributes: bool = False
    """Give items a sub-page with their attributes, which are what the reward looks for."""
    max_page_chars: Annotated[int, Field(ge=1)] = 2000
    """Characters of an item's description, features, reviews or attributes that are shown; cuts are
    counted.
    """

    @model_validator(mode="after")
    def _both_files(self) -> "WebShopConfig":
        if (self.products is None) != (self.attributes is None):
            raise ValueError("products and attributes go together: set both or neither")
        return self


class WebShopEnvironment:
    """One shopping episode. Chat protocol: the action in ``<action>...</action>``, the next page as a user
    message.
    """

    def __init__(self, *, task: Task, config: WebShopConfig, shop: Shop) -> None:
        """Raises ConfigError for a task of another family or another catalogue."""
        self._task = task
        self._goal = webshop_goals.read_goal(task)
        if self._goal.product_id not in shop.products:
            raise ConfigError(f"{task.key}: the catalogue has no product {self._goal.product_id!r}")
        self._config = config
        self._shop = shop
        self._start()

    def reset(self, seed: int) -> Sequence[Message]:
        """Go to the search page. Nothing is drawn, so the seed is not used: all rollouts of a task start
        equal.
        """
        self._start()
        return (Message(role="user", content=render_prompt(self._goal.text, self._look())),)

    def step(self, message: Message) -> StepResult:
        """Do the one action of the message. What cannot be read, and what the page does not allow, changes
        nothing and is answered in words; the former is ``invalid``, the latter ``refused``. Raises
        RuntimeError after the end of the episode.
        """
        if self._done:
            raise RuntimeError("the WebShop episode has ended")
        self._counts["num_turns"] += 1
        action = parse_action(message.content)
        if isinstance(action, Unreadable):
            self._counts["num_invalid"] += 1
            answer = Message(role="user", content=action.problem)
            return StepResult(message=answer, reward=0.0 - self._config.invalid_penalty, invalid=True)
        if action.verb == "search":
            return self._search(action.argument)
        if action.argument == webshop_pages.BUY and action.argument in self._shop.clickables(self._page):
            return self._buy()
        next_page = self._shop.click(self._page, action.argument)
        return self._refuse(NO_SUCH_NAME) if next_page is None else self._go(next_page)

    def result(self) -> EpisodeResult:
        """The return, success (a task score of exactly 1.0) and the parts of the score, all 0 before a
        purchase.
        """
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
        penalties = self._config.invalid_penalty * self._counts["num_invalid"]
        return EpisodeResult(
            episode_return=webshop_reward.training_return(score, self._config.reward) - penalties,
            success=score == webshop_reward.SUCCESS,
            metrics={"score": score, "bought": float(bought is not None)} | parts | counts,
        )

    def copy(self) -> "WebShopEnvironment":
        """The same episode so far, independent from then on: pages are values, the shop is read only."""
        twin = WebShopEnvironment(task=self._task, config=self._config, shop=self._shop)
        twin._page, twin._bought, twin._done = self._page, self._bought, self._done
        twin._counts = self._counts.copy()
        return twin

    def close(self) -> None:
        """Nothing of its own to release."""

    def _start(self) -> None:
        self._page = Page()
        self._bought: PurchaseScore | None = None
        self._done = False
        self._counts: Counter[str] = Counter()

    def _search(self, words: str) -> StepResult:
        if self._page.kind != "search":
            return self._refuse(NO_SEARCH_BAR)
        self._counts["num_searches"] += 1
        return self._go(self._shop.search(words))

    def _go(self, page: Page) -> StepResult:
        self._page = page
        return StepResult(message=Message(role="user", content=self._look()))

    def _refuse(self, reason: str) -> StepResult:
        self._counts["num_inadmissible"] += 1
        return StepResult(message=Message(role="user", content=f"{reason}\n{self._look()}"), refused=True)

    def _buy(self) -> StepResult:
        page, goal = self._page, self._goal
        self._done = True
        self._bought = webshop_reward.score_purchase(
            bought=self._shop.products[page.product_id],
            price=self._shop.prices[page.product_id],
            chosen=page.chosen,
            target=self._shop.products[goal.product_id],
            attributes=goal.attributes,
            options=goal.options,
            price_limit=goal.price_limit,
            option_scoring=self._config.option_scoring,
        )
        return StepResult(
            message=None,
            reward=webshop_reward.training_return(self._bought.value, self._config.reward),
            done=True,
        )

    def _look(self) -> str:
        sight = self._shop.look(self._page)
        self._counts["num_cut_pages"] += sight.is_cut
        return render_page(sight, self._shop.clickables(self._page) if self._config.show_actions else None)


class WebShopFactory:
    """Makes environments over one shop, which they share."""

    def __init__(self, *, config: WebShopConfig, shop: Shop) -> None:
        self._config = config
        self._shop = shop

    def __call__(self, task: Task) -> WebShopEnvironment:
        """A fresh environment for one episode of the task."""
        return WebShopEnvironment(task=task, config=self._config, shop=self._shop)

    def close(self) -> None:
        """Nothing is held."""


class WebShopTaskSet:
    """Goals, shop and scripted shopper over one catalogue, loaded once."""

    Settings = WebShopConfig
    name = "webshop"
    stop: tuple[str, ...] = (STOP,)
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True

    def __init__(self, config: WebShopConfig) -> None:
        """Read nothing."""
        self.config = config

    @cached_property
    def _catalogue(self) -> Catalogue:
        return load_catalogue(self.config.products, self.config.attributes, self.config.human_goals)

    @cached_property
    def _prices(self) -> dict[str, float]:
        return webshop_goals.draw_prices(self._catalogue, self.config.goal_seed)

    @cached_property
    def _splits(self) -> dict[str, tuple[Goal, ...]]:
        goals = webshop_goals.build_goals(self._catalogue, self._prices, self.config.goal_seed)
        return webshop_goals.split_goals(goals, seed=self.config.goal_seed, unit=self.config.split_by)

    @cached_property
    def _shop(self) -> Shop:
        return Shop(
            self._catalogue.products,
            self._prices,
            show_attributes=self.config.show_attributes,
            max_page_chars=self.config.max_page_chars,
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """The frozen list of ``train``, ``valid`` or ``test``. Raises DataError for another split, bad files
        or no goals.
        """
        limits = {
            "train": self.config.num_train,
            "valid": self.config.num_valid,
            "test": self.config.num_test,
        }
        if split not in limits:
            raise DataError(f"webshop: unknown split {split!r}, expected one of {', '.join(limits)}")
        goals = self._splits[split][: limits[split]]
        if not goals:
            raise DataError(f"webshop: the catalogue has too few goals for the split {split!r}")
        return tuple(webshop_goals.make_task(goal) for goal in goals)

    def make(self) -> WebShopFactory:
        """Load the catalogue and build the index; raises DataError when a file is missing or malformed."""
        return WebShopFactory(config=self.config, shop=self._shop)

    def close(self) -> None:
        """Nothing is held."""

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """A shopper who knows the product: it searches, opens it, chooses the options and buys. None where no
        search finds it.

        It searches with the words of the instruction, or with the product's title where that shows the
        product on an earlier page of results. Nothing is drawn, so the seed is not used.
        """
        goal = webshop_goals.read_goal(task)
        environment = self.make()(task)
        environment.reset(seed)
        steps: list[Step] = []
        for verb, argument in self._plan(goal) or ():
            text = render_action(verb, argument)
            outcome = environment.step(Message(role="assistant", content=text))
            steps.append(Step(text=text, observation=outcome.text, is_terminal=outcome.done))
        return tuple(steps) or None

    def _plan(self, goal: Goal) -> list[tuple[Literal["search", "click"], str]] | None:
        """The oracle's actions, or None when the product is not among the results of either query."""
        texts = (goal.request, self._shop.products[goal.product_id].title)
        queries = [" ".join(terms(text))[:_MAX_QUERY_CHARACTERS] for text in texts]
        matches: list[tuple[int, int]] = []
        for index, query in enumerate(queries):
            results = self._shop.search(query).results
            if goal.product_id in results:
                matches.append((results.index(goal.product_id) // webshop_pages.RESULTS_PER_PAGE, index))
        if not matches:
            return None
        num_turns, index = min(matches)
        names = [webshop_pages.NEXT] * num_turns + [
            goal.product_id,
            *(value for _, value in goal.options),
            webshop_pages.BUY,
        ]
        return [("search", queries[index]), *(("click", name) for name in names)]


def _share(num_hit: int, total: int) -> float:
    """Asking for nothing leaves nothing to miss."""
    return num_hit / total if total else 1.0
