"""WebShop's goals: one list, one price draw and one split for every worker.

The released environments shuffle goals and draw prices from a stream of each worker, so that the same index
is another goal in another worker and training goals turn up in validation. Here everything follows from the
catalogue and ``goal_seed``.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Final, Literal, TypeAlias

from outrider.environments.webshop.catalogue import Catalogue, Instruction, Product
from outrider.errors import ConfigError
from outrider.seeding import stream, stream_seed
from outrider.types import Task

SplitUnit: TypeAlias = Literal["goal", "product"]

# The original's index ranges: test 0-499, valid 500-1499, train the rest. A small catalogue gives each a
# fifth at most.
NUM_TEST: Final = 500
NUM_VALID: Final = 1000
_LARGEST_SHARE: Final = 5
# A limit is the larger of two different ones among the next four tens of dollars above the price, up to 990.
_LIMITS: Final = tuple(float(dollars) for dollars in range(10, 1000, 10))
_NUM_LIMITS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The task of one episode. ``text`` is the whole instruction; ``options`` are (name, value) pairs, the
    name empty where it is not known; ``price_limit`` is in dollars, None for no limit. ``key`` is unique in a
    list of goals.
    """

    key: str
    product_id: str
    text: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    price_limit: float | None

    @property
    def request(self) -> str:
        """The instruction without the price: what to search for."""
        return self.text.removesuffix(_price_text(self.price_limit))


def draw_prices(catalogue: Catalogue, seed: int) -> dict[str, float]:
    """One price per product in dollars: its own, or a point drawn uniformly from its range."""
    return {key: _price(item, seed) for key, item in catalogue.products.items()}


def build_goals(catalogue: Catalogue, prices: Mapping[str, float], seed: int) -> tuple[Goal, ...]:
    """All goals in catalogue order: each instruction with every combination of its product's options, or with
    its own.

    All combinations of an instruction share one drawn price limit, as in the original.
    """
    return tuple(
        goal
        for product_id, instructions in catalogue.instructions.items()
        for index, instruction in enumerate(instructions)
        for goal in _goals(catalogue.products[product_id], instruction, index, prices[product_id], seed)
    )


def split_goals(goals: Sequence[Goal], *, seed: int, unit: SplitUnit) -> dict[str, tuple[Goal, ...]]:
    """The splits ``test``, ``valid`` and ``train`` over one fixed order: the first 500 goals, the next 1,000
    and the rest (a fifth of all goals at most for each of the first two).

    Goals of one wording are never parted, and with ``product`` those of one product; such a block goes to the
    first split that has room for all of it. The order sorts by a hash of seed and key, so that it is the same
    everywhere and does not depend on the order of the catalogue.
    """
    blocks: dict[str, list[Goal]] = defaultdict(list)
    for goal in goals:
        blocks[goal.product_id if unit == "product" else goal.text].append(goal)
    num_test, num_valid = (min(number, len(goals) // _LARGEST_SHARE) for number in (NUM_TEST, NUM_VALID))
    room = {"test": num_test, "valid": num_valid, "train": len(goals)}
    splits: dict[str, list[Goal]] = {split: [] for split in room}
    for name in sorted(blocks, key=lambda name: _order(seed, name)):
        split = next(split for split in room if room[split] >= len(blocks[name]))
        splits[split] += blocks[name]
        room[split] -= len(blocks[name])
    return {
        split: tuple(sorted(part, key=lambda goal: _order(seed, goal.key))) for split, part in splits.items()
    }


def make_task(goal: Goal) -> Task:
    """The goal as frozen task data; :func:`read_goal` reads it back."""
    return Task(
        key=goal.key,
        question=goal.text,
        metadata={
            "product": goal.product_id,
            "attributes": list(goal.attributes),
            "options": [[name, value] for name, value in goal.options],
            "price_limit": goal.price_limit,
        },
    )


def read_goal(task: Task) -> Goal:
    """The goal of a task. Raises ConfigError for a task of another family."""
    match dict(task.metadata):
        case {
            "product": str(product_id),
            "attributes": [*attributes],
            "options": [*options],
            "price_limit": limit,
        }:
            return Goal(
                key=task.key,
                product_id=product_id,
                text=task.question,
                attributes=tuple(str(attribute) for attribute in attributes),
                options=tuple(_pair(task, pair) for pair in options),
                price_limit=float(limit) if isinstance(limit, int | float) else None,
            )
    raise ConfigError(f"{task.key} is not a WebShop task")


def _pair(task: Task, pair: object) -> tuple[str, str]:
    match pair:
        case [str(name), str(value)]:
            return name, value
    raise ConfigError(f"{task.key} is not a WebShop task")


def _goals(item: Product, instruction: Instruction, index: int, price: float, seed: int) -> Iterator[Goal]:
    limit = _price_limit(price, seed, item.product_id, index)
    if instruction.options is None:
        names = sorted(item.options)
        choices = [
            tuple(zip(names, values, strict=True))
            for values in product(*(item.options[name] for name in names))
        ]
        for options in choices:
            extra = ", and ".join(f"{name}: {value}" for name, value in options)
            text = instruction.text + (f" with {extra}" if extra else "")
            yield _goal(item.product_id, _digest(options), text, instruction.attributes, options, limit)
    else:
        yield _goal(
            item.product_id,
            f"human-{index}",
            instruction.text,
            instruction.attributes,
            instruction.options,
            limit,
        )


def _goal(
    product_id: str,
    name: str,
    text: str,
    attributes: tuple[str, ...],
    options: tuple[tuple[str, str], ...],
    limit: float | None,
) -> Goal:
    return Goal(
        key=f"webshop/{product_id}/{name}",
        product_id=product_id,
        text=text + _price_text(limit),
        attributes=attributes,
        options=options,
        price_limit=limit,
    )


def _digest(options: Sequence[tuple[str, str]]) -> str:
    """A short name of an option combination that no other combination and no other order of goals changes."""
    return hashlib.sha256(json.dumps(options).encode()).hexdigest()[:16] if options else "plain"


def _order(seed: int, key: str) -> tuple[int, str]:
    return stream_seed(seed, "webshop order", key), key


def _price(item: Product, seed: int) -> float:
    if len(item.prices) == 1:
        return item.prices[0]
    low, high = item.prices
    return low + (high - low) * float(stream(seed, "webshop price", item.product_id).random())


def _price_limit(price: float, seed: int, product_id: str, index: int) -> float | None:
    above = [limit for limit in _LIMITS if limit > price][:_NUM_LIMITS]
    if len(above) < 2:
        return None
    larger = [second for _, second in combinations(above, 2)]
    return larger[int(stream(seed, "webshop price limit", product_id, index).random() * len(larger))]


def _price_text(limit: float | None) -> str:
    return "" if limit is None else f", and price lower than {limit:.2f} dollars"
