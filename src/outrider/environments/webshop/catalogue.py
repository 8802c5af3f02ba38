"""WebShop's products and instructions, read from the files of the 1,000-product set or from the small
catalogue shipped here.

The shipped catalogue is invented; it serves tests and demos, and its scores compare with nothing published.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from outrider.errors import DataError

SHIPPED: Final = "catalogue.json"
# The original's price of a product without one, in dollars.
DEFAULT_PRICE: Final = 100.0
_CATEGORY_MARK: Final = "\u203a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product. ``prices`` are dollars: one, or the two ends of a range. ``categories`` go from wide to
    narrow; ``query`` is the search under which the product was collected. ``options`` maps a name to its
    different values.
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
        """The price as a page shows it."""
        return " to ".join(f"${price}" for price in self.prices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """A shopper's wish. ``options`` are the (name, value) pairs wanted, the name empty where none is known;
    None stands for every combination of the product's options, each a goal of its own.
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
    """The catalogue of two files (the formats of ``products_1k.json`` and ``items_ins_v2_1000.json``), or the
    shipped one where they are None. With ``human_goals`` (the format of ``items_human_ins.json``) its
    instructions replace the synthetic ones.

    Raises DataError, naming the file and the entry, for a missing or malformed file, a product id that occurs
    twice and a catalogue without any instruction.
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
        # A page's buttons are read without regard to case, so ids must differ in more than that.
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
        # A value listed twice is one value, or it would make the same goal twice.
        options={name: tuple(dict.fromkeys(values)) for name, values in details.options.items()},
    )


def _synthetic(product_id: str, record: _Synthetic, source: str) -> tuple[Instruction, ...]:
    if not record.instruction_attributes:
        raise DataError(f"{source}: {product_id} has an instruction without instruction_attributes")
    return (Instruction(text=record.instruction or "", attributes=record.instruction_attributes),)


def _human(records: tuple[_Human, ...]) -> tuple[Instruction, ...]:
    """As in the original, an instruction without attributes is left out."""
    instructions: list[Instruction] = []
    for record in records:
        raw_options = record.instruction_options
        options = (
            tuple(raw_options.items())
            if isinstance(raw_options, dict)
            else tuple(("", value) for value in raw_options)
        )
        if record.instruction_attributes:
            instructions.append(
                Instruction(
                    text=record.instruction.strip("."),
                    attributes=record.instruction_attributes,
                    options=options,
                )
            )
    return tuple(instructions)
