"""Questions with computed answers over the Factbook, each with the searches that solve it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.environments.factbook.data import Country, Factbook
from outrider.environments.grading.answers import normalize_answer
from outrider.tools.search import Passage

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
