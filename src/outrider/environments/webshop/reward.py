"""WebShop's task score: what a purchase is worth for a goal (Yao et al. 2022, arXiv 2207.01206, equation 1).

Written from the rules of the paper and of the authors' engine, with two differences. The engine compares the
nouns of two titles as a tagger of spaCy finds them; here all words of a title count, except numbers, single
letters and words like "for" and "with". More words count, so that two titles share a smaller part of them, or
share an adjective that was no noun. And the list of colours is our own.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Literal, TypeAlias

from outrider.environments.webshop.catalogue import Product

OptionScoring: TypeAlias = Literal["fixed", "released"]
RewardKind: TypeAlias = Literal["score", "success10"]

SUCCESS: Final = 1.0
SUCCESS_RETURN: Final = 10.0
_CLOSE: Final = 85
"""Similarity (0 to 100) above which two texts count as the same."""
_WORD: Final = re.compile(r"[^\W_]+")
_TITLE_WORD: Final = re.compile(r"[^\W\d_]{2,}")
_FUNCTION_WORDS: Final = frozenset(
    _WORD.findall(
        "an and any are as at be by for from has have in into is it its no non not of off on one or our out "
        "over per so than that the these this to too under up us very via was we when "
        "which will with without you your"
    )
)
# Option values are compared by the first of these that they contain, as the engine does with a list of its
# own.
COLOURS: Final = tuple(
    _WORD.findall(
        "amber apricot aqua ash azure beige black blue bronze brown burgundy camel charcoal chocolate copper "
        "coral cream crimson cyan ebony emerald fuchsia gold gray green grey indigo ivory jade khaki "
        "lavender lilac lime magenta maroon mauve mint mustard navy olive orange peach pearl pink plum "
        "purple red rose ruby rust salmon sand sapphire scarlet silver sky slate tan taupe teal "
        "turquoise violet white wine yellow"
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PurchaseScore:
    """Degree to which a purchase fulfils a goal. ``type_factor`` is 0, 0.1, 0.5 or 1; ``value`` is the task
    score in [0, 1].
    """

    num_attributes_hit: int
    num_attributes: int
    num_options_hit: int
    num_options: int
    price_ok: bool
    type_factor: float

    @property
    def value(self) -> float:
        """The task score."""
        return task_score(
            num_attributes_hit=self.num_attributes_hit,
            num_attributes=self.num_attributes,
            num_options_hit=self.num_options_hit,
            num_options=self.num_options,
            price_ok=self.price_ok,
            type_factor=self.type_factor,
        )


def task_score(
    *,
    num_attributes_hit: int,
    num_attributes: int,
    num_options_hit: int,
    num_options: int,
    price_ok: bool,
    type_factor: float,
) -> float:
    """The type factor times the share of attributes, options and price limit that are met, in [0, 1]
    (equation 1).
    """
    return (
        type_factor * (num_attributes_hit + num_options_hit + price_ok) / (num_attributes + num_options + 1)
    )


def training_return(score: float, kind: RewardKind) -> float:
    """The return of an episode that ends with this task score: the score itself, or 10 for exactly 1.0 and 0
    for anything less (as verl-agent trains, arXiv 2505.10978).
    """
    if kind == "score":
        return score
    return SUCCESS_RETURN if score == SUCCESS else 0.0


def score_purchase(
    *,
    bought: Product,
    price: float,
    chosen: Mapping[str, str],
    target: Product,
    attributes: Sequence[str],
    options: Sequence[tuple[str, str]],
    price_limit: float | None,
    option_scoring: OptionScoring,
) -> PurchaseScore:
    """Score the purchase of ``bought`` at ``price`` dollars with the options ``chosen`` for a goal: the
    product ``target``, its ``attributes``, (name, value) ``options`` and a limit in dollars (None for no
    limit).
    """
    return PurchaseScore(
        num_attributes_hit=num_attributes_hit(bought, attributes),
        num_attributes=len(attributes),
        num_options_hit=num_options_hit(tuple(chosen.values()), options, option_scoring),
        num_options=len(options),
        price_ok=price_limit is None or price <= price_limit,
        type_factor=type_factor(bought, target),
    )


def type_factor(bought: Product, target: Product) -> float:
    """Whether it is the kind of product that was wanted: 0 when the titles share no word, 0.1 when they share
    less than a tenth of the wanted title's words; else 1 when the products were collected under the same
    query, share two categories or more than a fifth of those words, and 0.5 when none of this holds. A wanted
    title without words shares a fifth.
    """
    words = title_words(target.title)
    share = len(words & title_words(bought.title)) / len(words) if words else 0.2
    if share < 0.1:
        return 0.1 if share else 0.0
    same_query = bought.query == target.query
    same_category = len(set(bought.categories) & set(target.categories)) >= 2
    return 1.0 if same_query or same_category or share > 0.2 else 0.5


def title_words(title: str) -> frozenset[str]:
    """The different words of a title that say what it names (module docstring), lower case."""
    return frozenset(_TITLE_WORD.findall(title.lower())) - _FUNCTION_WORDS


def num_attributes_hit(bought: Product, attributes: Sequence[str]) -> int:
    """How many wanted attributes the product has: the attribute's text stands in its title, features or
    description, or one of its own attributes is similar (above 85 of 100).
    """
    texts = (bought.title.lower(), " ".join(bought.features).lower(), bought.description.lower())
    return sum(
        any(attribute in text for text in texts)
        or any(token_set_ratio(own, attribute) > _CLOSE for own in bought.attributes)
        for attribute in attributes
    )


def num_options_hit(chosen: Sequence[str], options: Sequence[tuple[str, str]], scoring: OptionScoring) -> int:
    """How many wanted (name, value) options are among the values chosen.

    Values are reduced to the first colour in them, then compared by similarity (above 85 of 100), so that
    "large" meets "x-large" and one blue another: the engine's own leniency. ``fixed`` compares values with
    values. ``released`` repeats the engine's slip: where a name is known it compares with the text of the
    pair, from which no colour is taken unless it is the whole value. A value that merely contains a colour
    ("standard" contains "tan") is then lost even when chosen rightly.
    """
    values = [_reduced(value) for value in chosen]
    if scoring == "released":
        targets = [_released_target(name, value) for name, value in options]
    else:
        targets = [_reduced(value) for _, value in options]
    return sum(
        any(
            (scoring == "fixed" and value == target) or token_set_ratio(value, target) > _CLOSE
            for value in values
        )
        for target in targets
    )


def token_set_ratio(left: str, right: str) -> int:
    """Similarity of two texts as sets of words, 0 to 100; 0 when one has no words.

    The token set ratio of ``thefuzz``. Shared words, shared words with the left rest, shared words with the
    right rest: the largest similarity among these three sorted and joined texts, a pair's being twice the
    length of their longest common subsequence over both lengths.
    """
    words, others = set(_WORD.findall(left.lower())), set(_WORD.findall(right.lower()))
    if not words or not others:
        return 0
    shared = sorted(words & others)
    if shared and (words <= others or others <= words):
        return 100  # what the rule below gives, without its cost
    texts = [" ".join(shared + sorted(rest)) for rest in (set(), words - others, others - words)]
    return max(_ratio(first, second) for first, second in combinations(texts, 2))


def _ratio(left: str, right: str) -> int:
    length = len(left) + len(right)
    return round(200 * _num_common(left, right) / length) if length else 0


def _num_common(left: str, right: str) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(right) + 1)
    for letter in left:
        diagonal = 0
        for index, other in enumerate(right, start=1):
            above = row[index]
            row[index] = diagonal + 1 if letter == other else max(above, row[index - 1])
            diagonal = above
    return row[-1]


def _reduced(value: str) -> str:
    return next((colour for colour in COLOURS if colour in value), value)


def _released_target(name: str, value: str) -> str:
    if not name:
        return _reduced(value)
    return next((colour for colour in COLOURS if colour in (name, value)), str((name, value)))
