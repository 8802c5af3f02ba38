"""WebShop: scores, goals and splits, pages, actions, the expert, and files."""

import json
import pickle
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from outrider.environments.base import (
    CopyableEnvironment,
    EnvironmentEpisode,
    EnvironmentTaskSet,
    StepResult,
    TaskSet,
)
from outrider.environments.text_games import render_action
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.environments.webshop import reward as webshop_reward
from outrider.environments.webshop.catalogue import (
    Catalogue,
    Goal,
    Instruction,
    Product,
    build_goals,
    draw_prices,
    load_catalogue,
    make_task,
    read_goal,
    split_goals,
)
from outrider.environments.webshop.environment import (
    BUY,
    MAX_ACTION_CHARACTERS,
    Page,
    Shop,
    WebShopConfig,
    WebShopEnvironment,
    parse_action,
)
from outrider.environments.webshop.reward import (
    OptionScoring,
    PurchaseScore,
    num_options_hit,
    token_set_ratio,
    training_return,
    type_factor,
)
from outrider.errors import ConfigError, DataError
from outrider.types import Message, Task

SPLITS = ("train", "valid", "test")
SHARED = Path(__file__).parents[3] / "shared" / "data" / "webshop"
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the 1,000-product set is not at ../shared/data/webshop"
)
# a steel bottle in three colours and sizes; a yoga mat in "standard" and "extra long"
BOTTLE, MAT = "OUTR000001", "OUTR000030"


def product(product_id: str = "A", **changes: object) -> Product:
    fields: dict[str, object] = {
        "product_id": product_id,
        "title": "Red Steel Kettle",
        "description": "It boils.",
        "features": ("Whistles loudly",),
        "reviews": (),
        "rating": "N.A.",
        "prices": (20.0,),
        "categories": ("Kitchen", "Kettles"),
        "query": "kettles",
        "attributes": ("stainless steel",),
        "options": {},
    }
    return Product(**(fields | changes))  # type: ignore[arg-type]


@cache
def family(**config: object) -> EnvironmentTaskSet:
    return task_set_of(WebShopConfig.model_validate(config))


def task_set_of(config: WebShopConfig) -> EnvironmentTaskSet:
    return EnvironmentTaskSet(WebShopEnvironment, config)


def all_tasks(shop_family: EnvironmentTaskSet) -> list[Task]:
    return [task for split in SPLITS for task in shop_family.tasks(split)]


def start(product_id: str = BOTTLE, **config: object) -> EnvironmentEpisode:
    task = next(task for task in all_tasks(family(**config)) if task.metadata["product"] == product_id)
    environment = family(**config).make()(task)
    environment.reset(0)
    return environment


def say(environment: EnvironmentEpisode, text: str) -> StepResult:
    return environment.step(Message(role="assistant", content=text))


def do(environment: EnvironmentEpisode, *actions: str) -> StepResult:
    """Do the actions and return the last answer."""
    return [say(environment, f"Thinking. <action>{action}</action>") for action in actions][-1]


def shown(result: StepResult) -> list[str]:
    """The fields of the page in an answer."""
    (message,) = result.observations
    assert message.role == "user"
    page = next(line for line in message.content.splitlines() if line.startswith("Page: "))
    return page.removeprefix("Page: ").split(" [SEP] ")


# --- the score (vector webshop_reward of EMPO2's reference checks) ---


@pytest.mark.parametrize(
    ("case", "score", "reward"),
    [
        ((2, 3, 1, 2, True, 1.0), 0.666667, 0.0),
        ((2, 3, 1, 2, True, 0.5), 0.333333, 0.0),
        ((3, 3, 2, 2, True, 1.0), 1.0, 10.0),
        ((3, 3, 2, 2, False, 1.0), 0.833333, 0.0),
        ((0, 2, 0, 0, True, 0.1), 0.033333, 0.0),
    ],
)
def test_task_score_and_training_return(
    case: tuple[int, int, int, int, bool, float], score: float, reward: float
) -> None:
    measured = PurchaseScore(**dict(zip(PurchaseScore.__dataclass_fields__, case, strict=True))).value  # type: ignore[arg-type]
    assert measured == pytest.approx(score, abs=1e-6)
    assert training_return(measured, "success10") == reward
    assert training_return(measured, "score") == measured


def test_success10_requires_a_score_of_exactly_one() -> None:
    assert [training_return(score, "success10") for score in (0.0, 0.999999, 1.0)] == [0.0, 0.0, 10.0]


@pytest.mark.parametrize(
    ("title", "query", "categories", "factor"),
    [
        ("Blue Copper Pan", "kettles", ("Kitchen", "Kettles"), 0.0),  # no word in common, whatever else fits
        ("Red Steel Kettle", "pans", ("Garden",), 1.0),
        ("Red Hat of Wool", "hats", ("Kitchen",), 1.0),  # a third of the words is more than a fifth
    ],
)
def test_type_factor_of_a_short_title(
    title: str, query: str, categories: tuple[str, ...], factor: float
) -> None:
    assert type_factor(product(title=title, query=query, categories=categories), product()) == factor


@pytest.mark.parametrize(
    ("num_shared", "query", "categories", "factor"),
    [
        (1, "other", ("Kitchen",), 0.1),  # 1 of 11 words
        (1, "kettles", ("Kitchen", "Kettles"), 0.1),
        (2, "other", ("Kitchen",), 0.5),  # 2 of 11: neither below a tenth nor above a fifth
        (2, "other", ("Kettles", "Kitchen"), 1.0),
        (2, "kettles", ("Garden",), 1.0),
        (3, "other", ("Garden",), 1.0),
        (0, "kettles", ("Kitchen", "Kettles"), 0.0),
    ],
)
def test_type_factor_of_a_long_title(
    num_shared: int, query: str, categories: tuple[str, ...], factor: float
) -> None:
    words = ["anvil", "bucket", "candle", "drum", "easel", "funnel", "goblet", "hammer", "inkwell", "jar"]
    words.append("kettle")
    wanted = product(title="The " + " ".join(words) + " with 12 x for you")
    bought = product(title=" ".join([*words[:num_shared], "zither"]), query=query, categories=categories)
    assert type_factor(bought, wanted) == factor


def test_a_target_title_without_words_shares_a_fifth() -> None:
    assert type_factor(product(), product(title="")) == 1.0
    assert type_factor(product(query="x", categories=()), product(title="12 of a")) == 0.5


def test_attributes_are_similar_to_one_of_the_product_or_occur_in_its_texts() -> None:
    features = ("Fast boil", "cool Touch")
    kettle = product(
        attributes=("stainless steel body",), title="A Kettle", features=features, description="BPA free."
    )
    assert (
        webshop_reward.num_attributes_hit(
            kettle, ["stainless steel", "cool touch", "bpa free", "boil cool", "rust proof"]
        )
        == 4
    )
    # 87 of 100
    assert webshop_reward.num_attributes_hit(product(attributes=("easy cleaning",)), ["easy clean"]) == 1
    assert webshop_reward.num_attributes_hit(product(attributes=("easy carry",)), ["easy clean"]) == 0


@pytest.mark.parametrize(
    ("chosen", "option", "fixed", "released"),
    [
        ("red", ("color", "red"), 1, 1),
        # the first colour of both is blue; the pair's text holds the word
        ("navy blue", ("color", "sky blue"), 1, 1),
        ("x-large", ("size", "large"), 1, 0),
        ("standard", ("size", "standard"), 1, 0),  # holds "tan", the pair's text does not
        ("bluewhite", ("color", "bluewhite"), 1, 0),
        ("size 9", ("size", "9"), 1, 1),
        ("9", ("size", "10"), 0, 0),
        ("\u2605", ("color", "\u2605"), 1, 0),
        ("standard", ("", "standard"), 1, 1),  # without a name there is no pair
    ],
)
def test_the_two_ways_to_score_options(
    chosen: str, option: tuple[str, str], fixed: int, released: int
) -> None:
    assert num_options_hit([chosen], [option], "fixed") == fixed
    assert num_options_hit([chosen], [option], "released") == released
    assert num_options_hit([], [option], "fixed") == num_options_hit([], [option], "released") == 0


def reference_ratio(left: str, right: str) -> int:
    """The token set ratio straight from its definition, with a recursive longest common subsequence."""

    @cache
    def common(i: int, j: int) -> int:
        if i == len(a) or j == len(b):
            return 0
        return 1 + common(i + 1, j + 1) if a[i] == b[j] else max(common(i + 1, j), common(i, j + 1))

    words, others = set(left.split()), set(right.split())
    best = 0
    for one, two in (((), words - others), ((), others - words), (words - others, others - words)):
        both = sorted(words & others)
        a, b = " ".join(both + sorted(one)), " ".join(both + sorted(two))
        common.cache_clear()
        if words and others and a + b:
            best = max(best, round(200 * common(0, 0) / len(a + b)))
    return best


_WORDS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4).map(" ".join)


@given(_WORDS, _WORDS)
def test_similarity_agrees_with_its_definition(left: str, right: str) -> None:
    assert token_set_ratio(left, right) == token_set_ratio(right, left) == reference_ratio(left, right)
    assert token_set_ratio(left.upper(), f"--{left}!") == (100 if left else 0)


@given(st.data())
def test_scores_are_in_range_and_one_for_the_perfect_purchase(data: st.DataObject) -> None:
    goals = [read_goal(task) for task in all_tasks(family())]
    shop = family().make()(all_tasks(family())[0]).environment.shared
    goal = data.draw(st.sampled_from(goals))
    bought = shop.products[data.draw(st.sampled_from(sorted(shop.products)))]
    chosen = {name: data.draw(st.sampled_from(values)) for name, values in bought.options.items()}
    scoring: OptionScoring = data.draw(st.sampled_from(["fixed", "released"]))
    assert 0.0 <= score_of(shop, goal, bought, chosen, scoring) <= 1.0
    assert score_of(shop, goal, shop.products[goal.product_id], dict(goal.options), "fixed") == 1.0


def score_of(
    shop: Shop, goal: Goal, bought: Product, chosen: dict[str, str], scoring: OptionScoring
) -> float:
    return webshop_reward.score_purchase(
        bought=bought,
        price=shop.prices[bought.product_id],
        chosen=chosen,
        target=shop.products[goal.product_id],
        goal=goal,
        option_scoring=scoring,
    ).value


# --- goals, prices, splits ---


def catalogue(*products: Product) -> Catalogue:
    instruction = Instruction(text="Find me kettles", attributes=("stainless steel",))
    return Catalogue(
        products={found.product_id: found for found in products},
        instructions={found.product_id: (instruction,) for found in products},
    )


def test_every_combination_of_options_is_a_goal_and_shares_the_price_limit() -> None:
    found = catalogue(product("A", options={"size": ("s", "m"), "color": ("red", "blue")}), product("B"))
    goals = build_goals(found, draw_prices(found, 0), 0)
    assert [goal.options for goal in goals] == [
        (("color", color), ("size", size)) for color in ("red", "blue") for size in ("s", "m")
    ] + [()]
    assert len({goal.price_limit for goal in goals[:4]}) == 1
    assert goals[0].text == (
        "Find me kettles with color: red, and size: s, and price lower "
        f"than {goals[0].price_limit:.2f} dollars"
    )
    assert goals[0].request == "Find me kettles with color: red, and size: s"
    assert goals[4].request == "Find me kettles"
    assert len({goal.key for goal in goals}) == 5


@given(st.floats(0, 1100), st.floats(0, 1100), st.integers(0, 9))
def test_prices_and_limits_follow_the_rule(low: float, high: float, seed: int) -> None:
    found = catalogue(product(prices=(low, high)))
    prices = draw_prices(found, seed)
    assert min(low, high) <= prices["A"] <= max(low, high)
    (goal,) = build_goals(found, prices, seed)
    above = [10.0 * tens for tens in range(1, 100) if 10.0 * tens > prices["A"]][:4]
    assert goal.price_limit in above[1:] if len(above) > 1 else goal.price_limit is None
    assert ("price lower than" in goal.text) == (goal.price_limit is not None)


def test_the_limit_is_drawn_among_three_and_the_larger_of_two() -> None:
    found = catalogue(*(product(str(number)) for number in range(300)))
    limits = [goal.price_limit for goal in build_goals(found, draw_prices(found, 0), 0)]
    counts = [limits.count(limit) for limit in (40.0, 50.0, 60.0)]
    assert sum(counts) == 300 and all(
        abs(count - 50 * share) < 30 for count, share in zip(counts, (1, 2, 3), strict=True)
    )


def test_a_goal_is_restored_from_its_task() -> None:
    goals = [read_goal(task) for task in all_tasks(family())]
    assert [read_goal(pickle.loads(pickle.dumps(make_task(goal)))) for goal in goals] == goals
    task = make_task(goals[0])
    assert (task.question, task.key, task.answers) == (goals[0].text, goals[0].key, ())


@pytest.mark.parametrize(
    "metadata", [{}, {"product": "A", "attributes": [], "options": ["x"], "price_limit": None}]
)
def test_a_task_of_another_environment_is_refused(metadata: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="t1 is not a WebShop task"):
        family().make()(Task(key="t1", question="?", metadata=metadata)).reset(0)  # type: ignore[arg-type]
    other = make_task(build_goals(catalogue(product()), {"A": 1.0}, 0)[0])
    with pytest.raises(ConfigError, match="no product 'A'"):
        family().make()(other).reset(0)


@pytest.mark.parametrize("split_by", ["goal", "product"])
def test_splits_are_disjoint_complete_and_the_same_in_every_instance(split_by: str) -> None:
    one, two = (task_set_of(WebShopConfig.model_validate({"split_by": split_by})) for _ in range(2))
    splits = [one.tasks(split) for split in SPLITS]
    assert [hash_tasks(tasks) for tasks in splits] == [hash_tasks(two.tasks(split)) for split in SPLITS]
    for field in ("key", "question"):
        assert (
            sum(map(len, splits)) == len({getattr(task, field) for tasks in splits for task in tasks}) == 155
        )
    products = [{task.metadata["product"] for task in tasks} for tasks in splits]
    assert (len(set().union(*products)) == sum(map(len, products))) == (split_by == "product")


def test_the_default_splits_are_frozen() -> None:
    found = {split: (len(family().tasks(split)), hash_tasks(family().tasks(split))[:16]) for split in SPLITS}
    assert found == {
        "train": (93, "74d0925d969f07e3"),
        "valid": (31, "64c90c47fa8d6049"),
        "test": (31, "9d0228d76f5d8c7e"),
    }


def many_goals(number: int, **changes: str) -> list[Goal]:
    fields = {"attributes": ("a",), "options": (), "price_limit": None}
    return [
        Goal(**{"key": f"k{i}", "product_id": f"p{i // 7}", "text": f"t{i}", **fields, **changes})  # type: ignore[arg-type]
        for i in range(number)
    ]


def test_a_large_list_has_the_original_sizes_and_no_order_of_its_own() -> None:
    goals = many_goals(3000)
    splits = split_goals(goals, seed=0, unit="goal")
    assert {split: len(part) for split, part in splits.items()} == {"test": 500, "valid": 600, "train": 1900}
    assert split_goals(goals[::-1], seed=0, unit="goal") == splits != split_goals(goals, seed=1, unit="goal")
    assert len(split_goals(many_goals(6000), seed=0, unit="goal")["valid"]) == 1000
    same = many_goals(9, text="t")  # of one wording: they stay together
    parts = list(split_goals([*same, *goals], seed=0, unit="goal").values())
    assert [len(part) for part in parts] == [500, 601, 1908]
    assert sum(any(goal.text == "t" for goal in part) for part in parts) == 1


def test_limits_take_a_prefix_and_another_seed_is_another_benchmark() -> None:
    assert list(family(num_test=7).tasks("test")) == list(family().tasks("test")[:7])
    other = family(goal_seed=1)
    assert {task.key for task in all_tasks(other)} == {task.key for task in all_tasks(family())}
    assert [task.key for task in other.tasks("test")] != [task.key for task in family().tasks("test")]
    assert {task.question for task in all_tasks(other)} != {task.question for task in all_tasks(family())}
    with pytest.raises(ConfigError, match="unknown split 'dev'"):
        family().tasks("dev")


# --- pages ---


def test_the_prompt_contains_rules_request_and_search_page() -> None:
    environment = start()
    (message,) = environment.reset(1)
    assert list(environment.reset(2)) == [message]  # the goal is the task; nothing is drawn
    assert message.role == "user" and "<action>click[name]</action>" in message.content
    assert "Request: Find me leak proof water bottles made of stainless steel with color: " in message.content
    assert message.content.endswith("\n\nPage: Search\nActions: search[words]")
    assert (family().stop, family().stateful) == (("</action>",), True)


def test_results_come_in_pages_of_ten_with_next_and_prev() -> None:
    environment = start()
    first = shown(do(environment, "search[steel with for and]"))
    total = int(first[1].removeprefix("Page 1 (Total results: ").removesuffix(")"))
    assert total > 20 and first[0] == "Back to Search" and first[2] == "Next >"
    assert len(first) == 3 + 3 * 10
    assert first[3].startswith("OUTR") and first[5].startswith("$")
    second = shown(do(environment, "click[Next >]"))
    assert second[1:4] == [f"Page 2 (Total results: {total})", "< Prev", "Next >"]
    assert not set(first[3::3]) & set(second[4::3])
    assert shown(do(environment, "click[< prev]")) == first
    last = shown(do(environment, *["click[next >]"] * ((total - 1) // 10)))
    assert len(last) == 3 + 3 * ((total - 1) % 10 + 1) and "Next >" not in last
    do(environment, "click[next >]")
    assert environment.result().metrics["num_inadmissible"] == 1


def test_a_search_without_matches() -> None:
    environment = start()
    assert shown(do(environment, "search[zyzzyva !!]")) == ["Back to Search", "Page 1 (Total results: 0)"]
    assert shown(do(environment, "click[back to search]")) == ["Search"]


def test_an_item_shows_its_options_and_links_to_its_texts() -> None:
    environment = start()
    item = shown(do(environment, "search[Tarnhill steel bottle]", f"click[{BOTTLE.lower()}]"))
    options = ["color", "black", "moss green", "sand", "size", "18 oz", "24 oz", "32 oz"]
    details = ["Tarnhill Ridge Steel Water Bottle with Loop Lid", "Price: $18.5", "Rating: 3.8"]
    buttons = ["Description", "Features", "Reviews", "Buy Now"]
    assert item == ["Back to Search", "< Prev", *options, *details, *buttons]
    texts = ["Double wall keeps tea warm for nine hours", "Loop lid hooks on a pack"]
    features = ["Back to Search", "< Prev", *texts]
    assert shown(do(environment, "click[Features]")) == features
    assert shown(do(environment, "click[< Prev]")) == item
    assert "for long walks" in shown(do(environment, "click[description]"))[2]
    assert "Does what it says 4.0" in shown(do(environment, "click[< prev]", "click[reviews]"))[2]
    assert shown(do(environment, "click[< prev]", "click[< prev]"))[1].startswith("Page 1 (Total results: ")
    do(environment, "click[back to search]", "search[mat]", f"click[{MAT}]", "click[reviews]")
    assert environment.result().metrics["num_inadmissible"] == 0


def test_choices_are_kept_on_sub_pages_and_lost_when_the_item_is_left() -> None:
    environment = start()
    do(
        environment,
        "search[Tarnhill steel bottle]",
        f"click[{BOTTLE}]",
        "click[Moss  Green]",
        "click[24 oz]",
        "click[18 oz]",
    )
    do(environment, "click[features]", "click[< prev]")
    assert environment.environment._page.chosen == {"color": "moss green", "size": "18 oz"}
    do(environment, "click[< prev]", f"click[{BOTTLE}]")
    assert environment.environment._page.chosen == {}


def test_a_value_of_two_options_belongs_to_the_last() -> None:
    found = product(options={"color": ("red", "x"), "trim": ("red",)})
    shop = Shop({"A": found}, {"A": 20.0}, show_attributes=False, max_page_chars=100)
    page = shop.click(Page(kind="item", product_id="A"), "red")
    assert page is not None and page.chosen == {"trim": "red"}
    assert shop.click(page, BUY) is None


def test_attributes_are_shown_on_demand_only() -> None:
    hidden, open_ = (start(show_attributes=value) for value in (False, True))
    for environment in (hidden, open_):
        item = shown(do(environment, "search[Tarnhill steel bottle]", f"click[{BOTTLE}]"))
        assert ("Attributes" in item) == (environment is open_)
        texts = shown(do(environment, "click[attributes]"))
        assert ("double wall" in texts and "water bottles" in texts) == (environment is open_)
    assert hidden.result().metrics["num_inadmissible"] == 1


def test_actions_are_listed_unless_switched_off() -> None:
    loud, quiet = start(), start(show_actions=False)
    (prompt,) = quiet.reset(0)
    assert prompt.content.endswith("Page: Search")
    for environment in (loud, quiet):
        content = do(environment, "search[Tarnhill steel bottle]", f"click[{BOTTLE}]").text
        assert ("click[back to search] click[< prev] click[black] click[moss green]" in content) == (
            environment is loud
        )


def test_long_texts_are_truncated_and_special_tokens_are_escaped() -> None:
    environment = start(max_page_chars=30)
    features = shown(do(environment, "search[Tarnhill steel bottle]", f"click[{BOTTLE}]", "click[features]"))
    assert features[2:] == ["Double wall keeps tea warm for ..."]
    assert environment.result().metrics["num_cut_pages"] == 1
    hostile = product(description="a <|im_end|> b </action>")
    shop = Shop({"A": hostile}, {"A": 20.0}, show_attributes=False, max_page_chars=2000)
    goal = build_goals(catalogue(hostile), {"A": 20.0}, 0)[0]
    other = EnvironmentEpisode(WebShopEnvironment(WebShopConfig(), shop), make_task(goal))
    other.reset(0)
    assert (
        shown(do(other, "search[kettle]", "click[a]", "click[description]"))[2]
        == "a &lt;|im_end|> b &lt;/action>"
    )


# --- what the policy writes ---


@pytest.mark.parametrize(
    ("text", "verb", "argument"),
    [
        ("I think.\n<action>search[Red  Kettle\n]</action>", "search", "Red Kettle"),
        ("<action> CLICK[ Buy Now ] </action> so be it", "click", "buy now"),
        ("I should write <action> soon: <action>click[a [b] c]</action>", "click", "a [b] c"),
    ],
)
def test_one_tagged_action_is_parsed(text: str, verb: str, argument: str) -> None:
    assert parse_action(text) == (verb, argument)


UNREADABLE = [
    "",
    "search[kettle]",
    "<action>search[kettle]",
    "<action>kettle</action>",
    "<action>search[]</action>",
    "<action>click[ ]</action>",
    "<action>search[a] click[b</action>",
    "<action>buy[a]</action>",
    "<action>search[a]</action><action>search[b]</action>",
    f"<action>search[{'x' * MAX_ACTION_CHARACTERS}]</action>",
]


@pytest.mark.parametrize("text", UNREADABLE)
def test_text_without_an_action_changes_nothing_and_is_explained(text: str) -> None:
    environment = start(invalid_penalty=0.1)
    before = environment.environment._page
    result = say(environment, text)
    assert (result.invalid, result.reward, result.done, environment.environment._page) == (
        True,
        -0.1,
        False,
        before,
    )
    assert not result.carried_out
    assert "action" in result.text
    record = environment.result()
    assert (record.metrics["num_invalid"], record.metrics["num_turns"], record.episode_return) == (
        1.0,
        1.0,
        -0.1,
    )


@pytest.mark.parametrize(
    ("before", "action"),
    [
        ([], "click[buy now]"),
        ([], "click[search]"),
        ([], "click[back to search]"),
        (["search[bottle]"], "search[mat]"),
        (["search[bottle]"], "click[buy now]"),
        (["search[bottle]"], "click[< prev]"),
        (["search[bottle]"], f"click[{MAT}]"),
        (["search[bottle]", f"click[{BOTTLE}]"], "click[purple]"),
        (["search[bottle]", f"click[{BOTTLE}]"], "click[color]"),
        (["search[bottle]", f"click[{BOTTLE}]", "click[features]"], "click[buy now]"),
    ],
)
def test_an_action_that_the_page_does_not_allow_changes_nothing(before: list[str], action: str) -> None:
    environment = start()
    page = shown(do(environment, *before)) if before else ["Search"]
    result = do(environment, action)
    assert (result.invalid, result.reward, result.done) == (False, 0.0, False)
    assert result.refused and not result.carried_out
    assert shown(result) == page
    assert "nothing was done" in result.text
    assert environment.result().metrics["num_inadmissible"] == 1
    assert environment.result().metrics["num_invalid"] == 0


_TALK = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=st.sampled_from(list("<>/action[]search click\n\x00")), max_size=60),
    st.sampled_from(
        ["search[bottle]", "click[next >]", "click[back to search]", "click[< prev]", "click[buy now]"]
    ).map(lambda action: f"<action>{action}</action>"),
    st.sampled_from([BOTTLE, MAT, "black", "24 oz", "reviews", "x" * 600]).map(
        lambda name: render_action(f"click[{name}]")
    ),
    st.text(max_size=20).map(lambda words: render_action(f"search[{words}]")),
)


@given(st.lists(_TALK, max_size=12), st.sampled_from(["score", "success10"]), st.sampled_from([0.0, 0.1]))
def test_no_text_raises_and_rewards_add_up_to_the_return(
    texts: list[str], reward: str, penalty: float
) -> None:
    environment = start(reward=reward, invalid_penalty=penalty)
    total, num_invalid = 0.0, 0
    for text in texts:
        result = say(environment, text)
        total, num_invalid = total + result.reward, num_invalid + result.invalid
        assert (not result.observations) == result.done
        if result.done:
            break
    record = environment.result()
    assert total == pytest.approx(record.episode_return)
    assert record.metrics["num_invalid"] == num_invalid
    assert record.metrics["score"] == 0.0 or record.metrics["bought"] == 1.0


# --- buying ---


def buy(environment: EnvironmentEpisode, product_id: str, values: Sequence[str]) -> StepResult:
    title = environment.environment.shared.products[product_id].title
    clicks = [f"click[{name}]" for name in (product_id, *values, BUY)]
    return do(environment, f"search[{title}]", *clicks)


def test_the_right_purchase_is_worth_everything() -> None:
    for reward, value in (("score", 1.0), ("success10", 10.0)):
        environment = start(reward=reward)
        result = buy(environment, BOTTLE, [text for _, text in environment.environment._goal.options])
        assert (result.done, result.observations, result.reward) == (True, (), value)
        record = environment.result()
        assert (record.episode_return, record.success, record.metrics["score"]) == (value, True, 1.0)
        assert [
            record.metrics[name] for name in ("bought", "type_factor", "price_ok", "share_attributes")
        ] == [1.0] * 4
        with pytest.raises(RuntimeError, match="has ended"):
            do(environment, "search[bottle]")
        environment.reset(0)
        assert environment.result().metrics["bought"] == 0.0


def test_the_scores_of_a_partial_purchase_and_of_none() -> None:
    environment = start(reward="success10")
    buy(environment, BOTTLE, [])
    record = environment.result()  # two attributes and the price of two attributes, two options and the price
    assert (record.episode_return, record.success) == (0.0, False)
    assert (record.metrics["score"], record.metrics["share_options"]) == (3 / 5, 0.0)
    environment = start()
    do(environment, "search[bottle]", f"click[{BOTTLE}]")
    record = environment.result()
    assert (record.episode_return, record.success, record.metrics["score"], record.metrics["bought"]) == (
        0.0,
        False,
        0.0,
        0.0,
    )


def test_a_purchase_above_the_limit_misses_the_price() -> None:
    task = next(task for task in all_tasks(family()) if task.metadata["product"] == BOTTLE)
    goal = read_goal(task)
    cheap = Task(key=task.key, question=task.question, metadata=dict(task.metadata) | {"price_limit": 18.0})
    environment = family().make()(cheap)
    environment.reset(0)
    buy(environment, BOTTLE, [value for _, value in goal.options])
    assert (environment.result().metrics["price_ok"], environment.result().episode_return) == (0.0, 4 / 5)


def test_the_released_scoring_takes_a_point_from_a_right_choice() -> None:
    for scoring, score in (("fixed", 1.0), ("released", 3 / 4)):
        environment = next(
            start_task(task, option_scoring=scoring)
            for task in all_tasks(family())
            if task.metadata["product"] == MAT
            and ["size", "standard"]
            in list(
                task.metadata["options"]  # type: ignore[arg-type]
            )
        )
        buy(environment, MAT, ["standard"])
        assert environment.result().episode_return == score


def test_released_option_scoring_is_marked() -> None:
    assert WebShopConfig().score_mark == ""
    mark = WebShopConfig(option_scoring="released").score_mark
    assert mark == 'option_scoring = "released": some goals cannot reach the full score'


def start_task(task: Task, **config: object) -> EnvironmentEpisode:
    environment = family(**config).make()(task)
    environment.reset(0)
    return environment


def test_a_copy_is_independent() -> None:
    one = start()
    say(one, "?")
    do(one, "search[Tarnhill steel bottle]", f"click[{BOTTLE}]", "click[black]")
    two = one.copy()
    assert isinstance(two, CopyableEnvironment) and two.result() == one.result()
    do(two, "click[sand]", "click[buy now]")
    assert (one.environment._page.chosen, two.environment._page.chosen) == (
        {"color": "black"},
        {"color": "sand"},
    )
    assert (one.result().metrics["bought"], two.result().metrics["bought"]) == (0.0, 1.0)
    assert shown(do(one, "click[< prev]"))[1].startswith("Page 1")
    three = two.copy()
    with pytest.raises(RuntimeError, match="has ended"):
        do(three, "search[bottle]")


# --- the oracle ---


def test_the_expert_solves_every_goal_of_the_shipped_catalogue() -> None:
    shop_family: TaskSet = family()
    factory = shop_family.make()
    for task in all_tasks(family()):
        steps = shop_family.expert(task, 0)
        assert steps is not None and [step.is_terminal for step in steps] == [False] * (len(steps) - 1) + [
            True
        ]
        environment = factory(task)
        environment.reset(1)
        for step in steps:
            result = environment.step(Message(role="assistant", content=step.text))
            assert result.text == step.observation and result.carried_out
        record = environment.result()
        assert (record.episode_return, record.success, record.metrics["num_inadmissible"]) == (1.0, True, 0.0)
    factory.close()
    shop_family.close()


def first_hit(shop_family: EnvironmentTaskSet, task: Task) -> float:
    """The score of the rule that searches the instruction and buys the first product."""
    environment = shop_family.make()(task)
    environment.reset(0)
    results = shown(do(environment, f"search[{task.question}]"))
    do(environment, f"click[{next(field for field in results[2:] if field != 'Next >')}]", "click[buy now]")
    return environment.result().episode_return


def test_the_first_hit_is_not_enough() -> None:
    assert 0.4 < fmean(first_hit(family(), task) for task in all_tasks(family())) < 0.7


# --- files ---


def listed(product_id: str = "A1", **details: object) -> dict[str, object]:
    base = {
        "Title": "Kettle",
        "Description": "",
        "BulletPoints": [],
        "pricing": [20.0],
        "product_category": "",
        "query": "kettles",
    }
    return {"id": product_id, "product": base | {"options": {}} | details}


WISH = {"attributes": ["steel"], "instruction": "Find me kettles", "instruction_attributes": ["steel"]}


def write(folder: Path, products: object, attributes: object) -> EnvironmentTaskSet:
    for name, content in (("products.json", products), ("attributes.json", attributes)):
        (folder / name).write_text(
            content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
        )
    return task_set_of(
        WebShopConfig(products=folder / "products.json", attributes=folder / "attributes.json")
    )


@pytest.mark.parametrize(
    ("products", "attributes", "message"),
    [
        ("[", {}, r"products\.json: Invalid JSON"),
        ([], {}, "the catalogue is empty"),
        ([{"id": "A"}], {}, r"products\.json: 0\.product: Field required"),
        ([listed(pricing=["?"])], {}, r"products\.json: 0\.product\.pricing\.0: .*number"),
        ([listed(options={"size": []})], {}, r"options\.size"),
        ([listed("a1"), listed("A1")], {}, "duplicate product id 'A1'"),
        ([listed()], {"A1": {"attributes": "steel"}}, r"attributes\.json: A1\.attributes"),
        (
            [listed()],
            {"A1": {"instruction": "Find me kettles"}},
            r"attributes\.json: A1 has an instruction without",
        ),
        ([listed()], {"A1": {"attributes": ["steel"]}}, "no instruction for any product"),
        ([listed(Title="")], {"A1": WISH}, "no passage has a word"),
    ],
)
def test_a_bad_file_is_an_error_before_the_first_rollout(
    tmp_path: Path, products: object, attributes: object, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        write(tmp_path, products, attributes).make()


def test_a_missing_file_is_an_error_and_both_files_are_required(tmp_path: Path) -> None:
    missing = task_set_of(WebShopConfig(products=tmp_path / "p.json", attributes=tmp_path / "a.json"))
    with pytest.raises(DataError, match=r"cannot read .*p\.json"):
        missing.tasks("train")
    for bad in (
        {"products": "p.json"},
        {"attributes": "a.json"},
        {"num_test": 0},
        {"invalid_penalty": -1},
        {"product": "p"},
    ):
        with pytest.raises(ValidationError):
            WebShopConfig.model_validate(bad)


def test_details_of_the_file_are_read_without_repeated_values(tmp_path: Path) -> None:
    rows = [
        listed(options={"size": ["s", "m", "s"]}, pricing=[5.0, 9.5]),
        listed("B1", pricing=[], Title="Teapot"),
    ]
    shop_family = write(tmp_path, rows, {"A1": WISH})
    found = load_catalogue(shop_family.settings.products, shop_family.settings.attributes)
    assert found.products["A1"].options == {"size": ("s", "m")}
    assert [found.products[key].price_tag for key in ("A1", "B1")] == ["$5.0 to $9.5", "$100.0"]
    assert list(found.instructions) == ["A1"]
    assert len(shop_family.tasks("train")) == 2
    with pytest.raises(DataError, match="too few goals for the split 'test'"):
        shop_family.tasks("test")


def test_a_product_that_no_search_finds_has_no_expert(tmp_path: Path) -> None:
    shop_family = write(tmp_path, [listed(Title=""), listed("B1", Title="Teapot")], {"A1": WISH})
    (task,) = shop_family.tasks("train")
    assert shop_family.expert(task, 0) is None


def test_human_goals_replace_the_synthetic_ones(tmp_path: Path) -> None:
    base = write(tmp_path, [listed(options={"size": ["s", "m"]}), listed("B1")], {"A1": WISH}).settings
    records = [
        {"instruction": "a small kettle.", "instruction_attributes": ["steel"], "instruction_options": ["s"]},
        {"instruction": "anything", "instruction_attributes": [], "instruction_options": []},
        {
            "instruction": "a medium one",
            "instruction_attributes": ["steel"],
            "instruction_options": {"size": "m"},
        },
    ]
    path = tmp_path / "human.json"
    path.write_text(json.dumps({"A1": records, "unknown": records}), encoding="utf-8")
    shop_family = task_set_of(base.model_copy(update={"human_goals": path}))
    goals = sorted((read_goal(task) for task in shop_family.tasks("train")), key=lambda goal: goal.key)
    assert [(goal.request, goal.options) for goal in goals] == [
        ("a small kettle", (("", "s"),)),
        ("a medium one", (("size", "m"),)),
    ]
    steps = shop_family.expert(make_task(goals[0]), 0)
    assert steps is not None and [step.text for step in steps][2:] == [
        render_action("click[s]"),
        render_action(f"click[{BUY}]"),
    ]
    path = tmp_path / "texts.json"
    path.write_text(json.dumps(["a kettle"]), encoding="utf-8")
    with pytest.raises(DataError, match=r"texts\.json: .*object"):
        task_set_of(base.model_copy(update={"human_goals": path})).tasks("train")


# --- the 1,000-product set ---


@cache
def shared_family(**config: object) -> EnvironmentTaskSet:
    paths = {"products": SHARED / "products_1k.json", "attributes": SHARED / "items_ins_v2_1000.json"}
    return task_set_of(WebShopConfig.model_validate(paths | config))


@needs_shared
def test_the_published_set_has_its_goals_and_sizes() -> None:
    # 6,910 combinations, nine of which repeat one because an option lists a value twice.
    assert {split: len(shared_family().tasks(split)) for split in SPLITS} == {
        "train": 5401,
        "valid": 1000,
        "test": 500,
    }
    texts = [{task.question for task in shared_family().tasks(split)} for split in SPLITS]
    assert len(set().union(*texts)) == sum(map(len, texts))


@needs_shared
def test_the_expert_and_the_first_hit_on_the_published_set() -> None:
    shop_family, scores = shared_family(), []
    factory = shop_family.make()
    tasks = shop_family.tasks("test")[::5]
    for task in tasks:
        environment = factory(task)
        environment.reset(0)
        for step in shop_family.expert(task, 0) or ():
            environment.step(Message(role="assistant", content=step.text))
        scores.append(environment.result().episode_return)
    assert fmean(scores) > 0.99
    assert 0.4 < fmean(first_hit(shop_family, task) for task in tasks) < 0.65


@needs_shared
def test_the_known_defect_on_the_published_set() -> None:
    goals = [read_goal(task) for split in SPLITS for task in shared_family().tasks(split)]
    lost = {"fixed": 0, "released": 0}
    for scoring in lost:
        for goal in goals:
            rightly = [value for _, value in goal.options]
            lost[scoring] += num_options_hit(
                rightly,
                goal.options,
                scoring,  # type: ignore[arg-type]
            ) < len(goal.options)
    assert lost["fixed"] == 0
    assert 350 <= lost["released"] <= 550  # an audit of the released engine counted 458
