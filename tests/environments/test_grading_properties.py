r"""Grading is the same under what changes no meaning: dashes, blanks, quotes, markup, thoughts, units."""

from collections.abc import Callable
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from outrider.environments.tool_qa.rewards import RewardConfig, Turn, score_turns
from outrider.evaluation.grading import find_variant

RULES = find_variant("default")
Dressing = Callable[[str], str]

WORDS = st.sampled_from(
    ["Paris", "New York", "Jean-Luc", "O'Hara", "Spider-Man", "1969-70", "The Silent Harbour", "U.S.",
     "3.5 km", "5 May 1990", "Caf\u00e9 Zo\u00eb", "\u6771\u4eac", "yes", "noanswer", "6 billion", "-40 C"]
)  # fmt: skip
OF_SIGNS: list[Dressing] = [
    *(lambda text, sign=sign: text.replace("-", sign) for sign in "\u2010\u2011\u2013\u2014\u2015\u2212"),
    *(lambda text, sign=sign: text.replace("'", sign) for sign in "\u2019\u2018\u02bc\u00b4`"),
    *(lambda text, sign=sign: text.replace(" ", sign) for sign in ("\u00a0", "\u202f", "  ", "~", "\u3000")),
    *(lambda text, sign=sign: text[:1] + sign + text[1:] for sign in "\u200b\u200d\u00ad\ufeff\u2060\u200e"),
    str.upper,
]  # fmt: skip
OF_WORDS: list[Dressing] = [
    *(lambda text, pair=pair: pair[0] + text + pair[1]
      for pair in ("\u00ab\u00bb", "\u201e\u201c", "\u201c\u201d", '""', "\u300c\u300d", "\u201a\u2018")),
    *(lambda text, name=name: f"\\{name}{{{text}}}"
      for name in ("text", "textbf", "textit", "mathrm", "mbox", "emph", "textrm", "mathbf")),
    lambda text: f"**{text}**", lambda text: f"{text}.", lambda text: f" {text}\n", lambda text: f"${text}$",
    lambda text: f"\\text{{\\textbf{{{text}}}}}",
]  # fmt: skip
OUTPUTS: list[Dressing] = [
    lambda text: f"It is \\boxed{{{text}}}.",
    lambda text: f"<answer>{text}</answer>",
    lambda text: f"<answer>\\boxed{{{text}}}</answer>",
    lambda text: f"<think>Is it \\boxed{{Rome}}?</think><answer>{text}</answer>",
    lambda text: f"It may be \\boxed{{7}}.</think>\\boxed{{{text}}}",
    lambda text: f"[THINK]<answer>8</answer>[/THINK]\\boxed{{{text}}}",
]


@given(
    WORDS,
    WORDS,
    st.lists(st.sampled_from(OF_SIGNS), max_size=2),
    st.lists(st.sampled_from(OF_WORDS), max_size=2),
    st.sampled_from(OUTPUTS),
)
def test_words(
    answer: str, other: str, signs: list[Dressing], dressings: list[Dressing], output: Dressing
) -> None:
    dressed = answer
    for dressing in [*signs, *dressings]:
        dressed = dressing(dressed)
    prediction = RULES.extract(output(dressed))
    grades = RULES.grade(prediction, (answer,), "qa")
    assert (grades.em, grades.f1, grades.contained) == (True, 1.0, True)
    assert RULES.grade(prediction, (other,), "qa").em is (answer == other)
    turn = Turn(text=f"<think>Known.</think><answer>\\boxed{{{dressed}}}</answer>")
    assert score_turns([turn], (answer,), ("search",), RewardConfig()).reward == 1.0


NUMBERS = st.one_of(
    st.integers(-2000, 2000).map(str),
    st.fractions(-20, 20, max_denominator=12).map(
        lambda value: str(value) if value.denominator == 1 else _fraction(value)
    ),
    st.integers(2, 30).map(lambda value: f"{value}\\pi"),
    st.integers(2, 30).map(lambda value: f"{value}\\sqrt{{7}}"),
    st.sampled_from([2, 3, 5, 6, 7]).map(lambda value: f"\\frac{{\\sqrt{{{value}}}-3}}{{5}}"),
)
PARTS = st.lists(NUMBERS, min_size=2, max_size=4, unique=True)
OTHERS = st.one_of(
    PARTS.map(lambda parts: f"({', '.join(parts)})"),
    PARTS.map(", ".join),
    PARTS.map(lambda parts: f"\\{{{', '.join(parts)}\\}}"),
    PARTS.map(lambda parts: f"{parts[0]}, {parts[1]}, \\ldots, n"),
    st.integers(1, 9).map(lambda value: f"{value}+2\\mathrm{{i}}"),
    st.integers(1, 9).map(lambda value: f"x^{value}-\\mathrm{{e}}^{{x}}"),
    st.integers(-9, 9).map(lambda value: f"(-\\infty, {value}]"),
)


def _fraction(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


OF_MATHS: list[Dressing] = [
    lambda text: text.replace("-", "\u2212"), lambda text: text.replace("\\frac", "\\dfrac"),
    lambda text: text.replace("\\pi", "\u03c0"), lambda text: text.replace("\\sqrt{7}", "\u221a7"),
    lambda text: text.replace("(", "\\left(").replace(")", "\\right)").replace("]", "\\right]"),
    lambda text: text.replace(", ", ",\\,"), lambda text: text.replace(",", " , "), lambda text: f"${text}$",
    lambda text: f"\\displaystyle {text}", lambda text: f"{text}.", lambda text: f"\\({text}\\)",
    lambda text: text.replace("\\mathrm{e}", "e").replace("\\mathrm{i}", "i"),
    lambda text: text.replace("\\ldots", "\\dots"), lambda text: text.replace("\\infty", "\u221e"),
    lambda text: f"{text}\u200b", lambda text: text.replace("+", " + "),
]  # fmt: skip
UNITS: list[Dressing] = [
    lambda text: f"{text}\\text{{ cm}}", lambda text: f"{text} \\text{{ square units}}",
    lambda text: f"{text}\\,\\mathrm{{km}}^2", lambda text: f"{text} \\text{{ people}}",
    lambda text: f"x = {text}",
    lambda text: f"{text} inches", lambda text: f"{text} \\text{{ red marbles}}", lambda text: text,
]  # fmt: skip


@given(
    st.one_of(st.tuples(NUMBERS, st.sampled_from(UNITS)), st.tuples(OTHERS, st.just(str))),
    st.lists(st.sampled_from(OF_MATHS), max_size=2),
    st.sampled_from(OUTPUTS),
)
def test_mathematics(answer: tuple[str, Dressing], dressings: list[Dressing], output: Dressing) -> None:
    gold, unit = answer
    dressed = unit(gold)
    for dressing in dressings:
        dressed = dressing(dressed)
    prediction = RULES.extract(output(dressed))
    assert RULES.grade(prediction, (gold,), "math").math
    assert not RULES.grade(prediction, (_changed(gold),), "math").math


def _changed(gold: str) -> str:
    """Another answer: its last digit, or else its last letter, is another one."""
    for position in range(len(gold) - 1, -1, -1):
        if gold[position].isdigit():
            digit = "3" if gold[position] != "3" else "8"
            return gold[:position] + digit + gold[position + 1 :]
    return gold + "+1"
