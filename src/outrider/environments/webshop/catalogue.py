"""WebShop's products, instructions and goals, from the files of the 1,000-product set or a small catalogue.

The shipped catalogue is invented, for tests and demos; its scores are not comparable with published ones.

The released environments shuffle goals and draw prices from a random stream per worker, so the same index is
a different goal in every worker, and training goals occur in validation. Here everything is determined by the
catalogue and ``goal_seed``.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from outrider.errors import ConfigError, DataError
from outrider.seeding import stream, stream_seed
from outrider.types import Task

SHIPPED: Final = "catalogue.json"
# The original's price of a product without a price, in dollars.
DEFAULT_PRICE: Final = 100.0
_CATEGORY_MARK: Final = "\u203a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product.

    Attributes:
        prices: in dollars: one, or the two ends of a range.
        categories: from wide to narrow.
        query: the search with which the product was collected.
        options: from a name to its different values.
    """

    product_id: str
    title: str
    description: str
    features: tuple[str, ...]
    reviews: tuple[str, ...]
    rating: str
    prices: tuple[float, ...]
    categories: tuple[str, ...]
    query: str
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def price_tag(self) -> str:
        """The price on a page."""
        return " to ".join(f"${price}" for price in self.prices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """A shopper's request. ``options`` are pairs of name (or empty) and value; None stands for every
    combination of the product's options, each a goal of its own.
    """

    text: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Products by id and the instructions written for them, both in file order."""

    products: Mapping[str, Product]
    instructions: Mapping[str, tuple[Instruction, ...]]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class _Review(_Record):
    title: str = ""
    score: float | str = ""
    body: str = ""


class _Details(_Record):
    title: str = Field(alias="Title")
    description: str = Field(alias="Description")
    features: tuple[str, ...] = Field(alias="BulletPoints")
    reviews: tuple[_Review, ...] = Field(default=(), alias="Reviews")
    rating: str = Field(default="N.A.", alias="Rating")
    pricing: tuple[Annotated[float, Field(ge=0)], ...]
    product_category: str
    query: str
    options: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]]


class _Listed(_Record):
    id: str = Field(min_length=1)
    product: _Details


class _Synthetic(_Record):
    attributes: tuple[str, ...] = ()
    instruction: str | None = None
    instruction_attributes: tuple[str, ...] = ()


class _Human(_Record):
    instruction: str
    instruction_attributes: tuple[str, ...]
    instruction_options: tuple[str, ...] | dict[str, str]


class _Bundle(_Record):
    """Format of the shipped catalogue."""

    products: tuple[_Listed, ...]
    attributes: dict[str, _Synthetic]


_PRODUCTS: Final = TypeAdapter(tuple[_Listed, ...])
_ATTRIBUTES: Final = TypeAdapter(dict[str, _Synthetic])
_HUMAN: Final = TypeAdapter(dict[str, tuple[_Human, ...]])
_BUNDLE: Final = TypeAdapter(_Bundle)
_ValueT = TypeVar("_ValueT")


def load_catalogue(
    products: Path | None, attributes: Path | None, human_goals: Path | None = None
) -> Catalogue:
    """Load a catalogue.

    Args:
        products: file in the format of ``products_1k.json``; None for the shipped catalogue.
        attributes: file in the format of ``items_ins_v2_1000.json``.
        human_goals: file in the format of ``items_human_ins.json``, whose instructions replace the synthetic
            ones.

    Raises DataError with the file and the entry for a missing or malformed file, a duplicate product id, and
    a catalogue without instructions.
    """
    if products is None or attributes is None:
        source = SHIPPED
        bundle = _validated(
            _BUNDLE, resources.files("outrider.environments.webshop").joinpath(SHIPPED).read_bytes(), source
        )
        listed, records = bundle.products, bundle.attributes
    else:
        source = str(products)
        listed, records = (
            _validated(_PRODUCTS, _read(products), source),
            _validated(_ATTRIBUTES, _read(attributes), str(attributes)),
        )
    known_products = _products(listed, records, source)
    if human_goals is None:
        keys = [key for key in known_products if key in records and records[key].instruction]
        candidates = {key: _synthetic(key, records[key], str(attributes or source)) for key in keys}
    else:
        written = _validated(_HUMAN, _read(human_goals), str(human_goals))
        candidates = {key: _human(written[key]) for key in known_products if key in written}
    instructions = {key: texts for key, texts in candidates.items() if texts}
    if not instructions:
        raise DataError(f"{human_goals or attributes or source}: no instruction for any product of {source}")
    return Catalogue(products=known_products, instructions=instructions)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _validated(adapter: TypeAdapter[_ValueT], raw: bytes, source: str) -> _ValueT:
    try:
        return adapter.validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        location = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{source}: {location + ': ' if location else ''}{first['msg']}") from error


def _products(
    listed: tuple[_Listed, ...], records: Mapping[str, _Synthetic], source: str
) -> dict[str, Product]:
    products: dict[str, Product] = {}
    seen: set[str] = set()
    for entry in listed:
        # Names on a page are not case-sensitive.
        if entry.id.lower() in seen:
            raise DataError(f"{source}: duplicate product id {entry.id!r}")
        seen.add(entry.id.lower())
        own = records[entry.id].attributes if entry.id in records else ()
        products[entry.id] = _product(entry.id, entry.product, own)
    if not products:
        raise DataError(f"{source}: the catalogue is empty")
    return products


def _product(product_id: str, details: _Details, attributes: tuple[str, ...]) -> Product:
    return Product(
        product_id=product_id,
        title=details.title,
        description=details.description,
        features=details.features,
        reviews=tuple(f"{review.title} {review.score} {review.body}".strip() for review in details.reviews),
        rating=details.rating,
        prices=details.pricing[:2] or (DEFAULT_PRICE,),
        categories=tuple(part.strip() for part in details.product_category.split(_CATEGORY_MARK)),
        query=details.query.lower().strip(),
        attributes=attributes,
        # Without repeated values, which would make the same goal twice.
        options={name: tuple(dict.fromkeys(values)) for name, values in details.options.items()},
    )


def _synthetic(product_id: str, record: _Synthetic, source: str) -> tuple[Instruction, ...]:
    if not record.instruction_attributes:
        raise DataError(f"{source}: {product_id} has an instruction without instruction_attributes")
    return (Instruction(text=record.instruction or "", attributes=record.instruction_attributes),)


def _human(records: tuple[_Human, ...]) -> tuple[Instruction, ...]:
    """As in the original, an instruction without attributes is left out."""
    return tuple(
        Instruction(
            text=record.instruction.strip("."),
            attributes=record.instruction_attributes,
            options=tuple(options.items())
            if isinstance(options := record.instruction_options, dict)
            else tuple(("", value) for value in options),
        )
        for record in records
        if record.instruction_attributes
    )


SplitUnit: TypeAlias = Literal["goal", "product"]

# The original's index ranges are test 0-499, valid 500-1499, train the rest. In a small catalogue, test and
# valid are a fifth each at most.
NUM_TEST: Final = 500
NUM_VALID: Final = 1000
_LARGEST_SHARE: Final = 5
# A price limit is the larger of two different draws among the next four multiples of $10 above the price, up
# to $990.
_LIMITS: Final = tuple(float(dollars) for dollars in range(10, 1000, 10))
_NUM_LIMITS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The goal of one episode.

    Attributes:
        key: unique in a list of goals.
        text: the whole instruction.
        options: pairs of name (or empty) and value.
        price_limit: in dollars, or None.
    """

    key: str
    product_id: str
    text: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    price_limit: float | None

    @property
    def request(self) -> str:
        """The instruction without the price limit."""
        return self.text.removesuffix(_price_text(self.price_limit))


def draw_prices(catalogue: Catalogue, seed: int) -> dict[str, float]:
    """One price per product in dollars; drawn uniformly if the product has a range."""
    return {key: _price(item, seed) for key, item in catalogue.products.items()}


def build_goals(catalogue: Catalogue, prices: Mapping[str, float], seed: int) -> tuple[Goal, ...]:
    """All goals in catalogue order: each instruction with its options, or with every combination of its
    product's options. As in the original, all goals of an instruction share one drawn price limit.
    """
    return tuple(
        goal
        for product_id, instructions in catalogue.instructions.items()
        for index, instruction in enumerate(instructions)
        for goal in _goals(catalogue.products[product_id], instruction, index, prices[product_id], seed)
    )


def split_goals(goals: Sequence[Goal], *, seed: int, unit: SplitUnit) -> dict[str, tuple[Goal, ...]]:
    """Split goals in one fixed order: test is the first 500, valid the next 1,000 (each at most a fifth of
    all goals), and train the rest.

    Goals with the same wording (with ``product``: of the same product) are in the same split, the first one
    with enough room. The order is by a hash of seed and key, and so independent of the order of the
    catalogue.
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
    """The goal as a task; the inverse of :func:`read_goal`."""
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
    """The goal of a task. Raises ConfigError for a task of another environment."""
    match dict(task.metadata):
        case {
            "product": str(product_id),
            "attributes": [*attributes],
            "options": [*options],
            "price_limit": limit,
        }:
            pairs = []
            for option in options:
                match option:
                    case [str(name), str(value)]:
                        pairs.append((name, value))
            if len(pairs) == len(options):
                return Goal(
                    key=task.key,
                    product_id=product_id,
                    text=task.question,
                    attributes=tuple(map(str, attributes)),
                    options=tuple(pairs),
                    price_limit=float(limit) if isinstance(limit, int | float) else None,
                )
    raise ConfigError(f"{task.key} is not a WebShop task")


def _goals(item: Product, instruction: Instruction, index: int, price: float, seed: int) -> Iterator[Goal]:
    limit = _price_limit(price, seed, item.product_id, index)

    def goal(name: str, text: str, options: tuple[tuple[str, str], ...]) -> Goal:
        return Goal(
            key=f"webshop/{item.product_id}/{name}",
            product_id=item.product_id,
            text=text + _price_text(limit),
            attributes=instruction.attributes,
            options=options,
            price_limit=limit,
        )

    if instruction.options is not None:
        yield goal(f"human-{index}", instruction.text, instruction.options)
        return
    names = sorted(item.options)
    for values in product(*(item.options[name] for name in names)):
        options = tuple(zip(names, values, strict=True))
        extra = ", and ".join(f"{name}: {value}" for name, value in options)
        yield goal(_digest(options), instruction.text + (f" with {extra}" if extra else ""), options)


def _digest(options: Sequence[tuple[str, str]]) -> str:
    """A short name of an option combination, independent of other combinations and of the order of goals."""
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
