"""WebShop's task score of a purchase (Yao et al. 2022, arXiv 2207.01206, equation 1).

It follows the rules of the paper and of the authors' engine, with two differences. The engine compares the
nouns of two titles, as found by spaCy's tagger; here all words count, except numbers, single letters and
words like "for" and "with", so two titles share a smaller part of their words, or share an adjective. And the
list of colours is our own.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Literal, TypeAlias

from outrider.environments.webshop.catalogue import Goal, Product

OptionScoring: TypeAlias = Literal["fixed", "released"]
RewardKind: TypeAlias = Literal["score", "success10"]

SUCCESS: Final = 1.0
SUCCESS_RETURN: Final = 10.0
_CLOSE: Final = 85
"""Similarity (0 to 100) above which two texts count as equal."""
_WORD: Final = re.compile(r"[^\W_]+")
_TITLE_WORD: Final = re.compile(r"[^\W\d_]{2,}")
_FUNCTION_WORDS: Final = frozenset(
    _WORD.findall(
        "an and any are as at be by for from has have in into is it its no non not of off on one or our out "
        "over per so than that the these this to too under up us very via was we when "
        "which will with without you your"
    )
)
# Option values are compared by the first colour that they contain. The engine has a list of its own.
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
    """How well a purchase matches a goal. ``type_factor`` is 0, 0.1, 0.5 or 1."""

    num_attributes_hit: int
    num_attributes: int
    num_options_hit: int
    num_options: int
    price_ok: bool
    type_factor: float

    @property
    def value(self) -> float:
        """The task score in [0, 1]: the type factor times the share of matched attributes, options and price
        limit (equation 1).
        """
        num_hit = self.num_attributes_hit + self.num_options_hit + self.price_ok
        return self.type_factor * num_hit / (self.num_attributes + self.num_options + 1)


def training_return(score: float, kind: RewardKind) -> float:
    """The return for a task score: the score itself, or 10 for exactly 1.0 and else 0 (as in verl-agent,
    arXiv 2505.10978).
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
    goal: Goal,
    option_scoring: OptionScoring,
) -> PurchaseScore:
    """Score a purchase for a goal.

    Args:
        bought: the bought product.
        price: its price in dollars.
        chosen: the chosen options by name.
        target: the goal's product.
        goal: the goal.
        option_scoring: see :func:`num_options_hit`.
    """
    return PurchaseScore(
        num_attributes_hit=num_attributes_hit(bought, goal.attributes),
        num_attributes=len(goal.attributes),
        num_options_hit=num_options_hit(tuple(chosen.values()), goal.options, option_scoring),
        num_options=len(goal.options),
        price_ok=goal.price_limit is None or price <= goal.price_limit,
        type_factor=type_factor(bought, target),
    )


def type_factor(bought: Product, target: Product) -> float:
    """Similarity of the products' kinds.

    0 if the titles share no word, and 0.1 if they share less than a tenth of the target title's words.
    Otherwise 1 if the products have the same query, or share two categories or more than a fifth of those
    words, else 0.5. A target title without words counts as sharing a fifth.
    """
    words = title_words(target.title)
    share = len(words & title_words(bought.title)) / len(words) if words else 0.2
    if share < 0.1:
        return 0.1 if share else 0.0
    same_query = bought.query == target.query
    same_category = len(set(bought.categories) & set(target.categories)) >= 2
    return 1.0 if same_query or same_category or share > 0.2 else 0.5


def title_words(title: str) -> frozenset[str]:
    """The content words of a title in lower case; see the module's docstring."""
    return frozenset(_TITLE_WORD.findall(title.lower())) - _FUNCTION_WORDS


def num_attributes_hit(bought: Product, attributes: Sequence[str]) -> int:
    """Number of attributes that the product has: the text occurs in its title, features or description, or
    one of its own attributes is similar (above 85 of 100).
    """
    texts = (bought.title.lower(), " ".join(bought.features).lower(), bought.description.lower())
    return sum(
        any(attribute in text for text in texts)
        or any(token_set_ratio(own, attribute) > _CLOSE for own in bought.attributes)
        for attribute in attributes
    )


def num_options_hit(chosen: Sequence[str], options: Sequence[tuple[str, str]], scoring: OptionScoring) -> int:
    """Number of options, as pairs of name and value, that match a chosen value.

    Values are reduced to the first colour that they contain, then compared by similarity (above 85 of 100).
    As in the engine, "large" therefore matches "x-large", and one shade of blue another. ``fixed`` compares
    values with values. ``released`` reproduces a bug of the engine: if a name is known, it compares with the
    text of the pair, which is reduced to a colour only if the colour is the whole value. A value that merely
    contains a colour, for example "standard" ("tan"), then never matches.
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
    """Token set ratio of ``thefuzz``: similarity of two texts as sets of words, 0 to 100; 0 if one has no
    words.

    It is the largest similarity among three sorted and joined texts: the shared words, the shared words with
    the other words of ``left``, and with those of ``right``. The similarity of a pair is twice the length of
    its longest common subsequence, divided by the sum of the lengths.
    """
    words, others = set(_WORD.findall(left.lower())), set(_WORD.findall(right.lower()))
    if not words or not others:
        return 0
    shared = sorted(words & others)
    if shared and (words <= others or others <= words):
        return 100  # a shortcut with the result of the rule below
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
