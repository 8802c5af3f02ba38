r"""Mathematical equality: what is the same in another spelling, what only looks alike, and what is not safe
to evaluate.
"""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.environments.grading.math_answers import Verdict, compare_math
from outrider.environments.grading.math_normal_form import split_unit

EQUAL, DIFFERENT, UNDECIDED = Verdict.EQUAL, Verdict.DIFFERENT, Verdict.UNDECIDED


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("1/2", "\\frac{1}{2}", EQUAL),
        (".5", "0.5", EQUAL),
        ("x = 5", "5", EQUAL),
        ("\\sqrt3", "\\sqrt{3}", EQUAL),
        ("5\\text{ cm}", "5", EQUAL),
        ("a b", "ab", EQUAL),
        ("3\\sqrt{3} - 6", "-6+3\\sqrt{3}", EQUAL),
        ("\\text{Paris}", "Paris", EQUAL),
        ("10^{5}", "100000", EQUAL),
        ("-6", "6", DIFFERENT),
        ("Paris", "pairs", DIFFERENT),
        ("", "5", DIFFERENT),
        ("7", "5", DIFFERENT),
    ],
)
def test_mathematical_equality(left: str, right: str, expected: Verdict) -> None:
    assert compare_math(left, right) is expected


@pytest.mark.parametrize(
    ("left", "right", "upstream", "ours"),
    [
        ("12", "12.0", False, EQUAL),
        ("1,000", "1000", False, EQUAL),
        ("2/4", "1/2", False, EQUAL),
        ("2 3", "23", True, DIFFERENT),
    ],
)
def test_mathematical_equality_differs_from_string_normalisation(
    left: str, right: str, upstream: bool, ours: Verdict
) -> None:
    assert compare_math(left, right) is ours
    assert (ours is EQUAL) is not upstream


@pytest.mark.parametrize(
    "bomb",
    [
        "9^{9^{9}}",
        "9^9^9",
        "9**9**9",
        "(2^{999})^{999}",
        "((((1+x)^{9})^{9})^{9})^{9}",
        "(1+x+y)^{99}",
        "99999999!",
        "\\binom{100000}{50000}",
        "\\int x^2 dx",
        "\\sum_{k=1}^{10} k",
        "1" * 201,
        "2^{9999999}",
        "\\sin(\\sin(\\sin(1)))",
    ],
)
def test_expressions_that_may_not_return_are_not_evaluated(bomb: str) -> None:
    start = time.monotonic()
    assert compare_math(bomb, "5") is UNDECIDED
    assert compare_math("5", bomb) is UNDECIDED
    assert compare_math(bomb, bomb) is EQUAL
    assert time.monotonic() - start < 10


@given(st.text(alphabet="0123456789x+-*/^(){}.,=\\ ", max_size=12))
def test_comparing_never_raises(text: str) -> None:
    assert compare_math(text, "5") in Verdict


@pytest.mark.parametrize(
    "bomb", ["(a+b+c+d+f+g+h+k)^{30}", "(a+b+c+d+f)^{20}", "(x+y+z+w)^{30}", "x^{1000}+y^{1}=3"]
)
def test_powers_with_too_many_terms_are_not_expanded(bomb: str) -> None:
    assert compare_math(bomb, "5") is UNDECIDED
    assert compare_math("(a+b)^2", "a^2+2ab+b^2") is EQUAL


@pytest.mark.parametrize(
    ("left", "right"),
    [
        # matrices
        (r"\begin{pmatrix}-\frac{1}{3}\\\frac{5}{3}\end{pmatrix}",
         r"\begin{pmatrix} -1/3 \\ 5/3 \end{pmatrix}"),
        (r"\begin{pmatrix}-0.2\\-3.6\end{pmatrix}", r"\begin{pmatrix}-1/5\\-18/5\end{pmatrix}"),
        # thousands and thin spaces
        ("10,080", r"10,\!080"), ("10080", r"10,\!080"), ("11111111100", r"11,\! 111,\! 111,\! 100"),
        ("32348", r"\$32,\!348"), (r"1\,000", "1000"),
        # units
        ("5 meters", "5"), ("18 dollars", "18"), ("90 degrees", "90"), ("5.4 cents", "5.4"), ("5 cm", "5"),
        (r"90^\circ", "90"), ("864", r"864 \mbox{ inches}^2"), (r"6\mbox{ inches}", "6"),
        (r"6\mbox{ cm}^2", "6"), ("3/4 cups", "3/4"), ("5 square meters", r"5\text{ m}^2"),
        ("5 meters", "5 meter"), ("5 inches", "5 in"), (r"2\frac{1}{3} \text{ cups}", "7/3"), (r"\$5", "5"),
        # scientific notation and plain forms
        ("1e3", "1000"), ("2e-3", "0.002"), (r"3\times10^{8}", "3e8"), ("1E3", "1000"), ("10^-3", "0.001"),
        ("x**2", "x^2"), ("sqrt(4)", "2"),
        # mixed numbers and full stops
        ("1 1/2", "3/2"), ("1 2/3", "5/3"), (r"1\frac12", "3/2"), (r"\frac{1}{2}.", r"\frac{1}{2}"),
        (r"\sqrt{2}.", r"\sqrt{2}"), ("(1,2).", "(1,2)"), ("5.", "5"), ("No.", "no"),
        # sums of small powers
        ("1+x+x^2+x^3+x^4+x^5+x^6+x^7+x^8", "x^8+x^7+x^6+x^5+x^4+x^3+x^2+x+1"),
        ("x^7+x^6+x^5", "x^5+x^6+x^7"),
        # other Unicode
        ("\u00bd", "0.5"), ("1\u00bd", "3/2"), ("\u221a2", r"\sqrt{2}"), ("x\u00b2", "x^2"),
        ("x\u207b\u00b2", "x^{-2}"), ("\u20135", "-5"), ("\uff13", "3"), ("\u22125", "-5"),
        ("\u03c0", r"\pi"),
        # the same on both sides
        ("[0,1)", r"0\le x<1"), ("2^0.5", r"\sqrt{2}"), ("(1,2)", "1,2"), (r"\{1,2\}", r"\{2,1\}"),
        ("1,2", "2,1"), ("x=5", "5"), (r"x \in [-2,7]", "[-2,7]"), ("1011_2", "1011_{2}"), ("1011_2", "13_8"),
    ],
)  # fmt: skip
def test_one_value_in_two_spellings(left: str, right: str) -> None:
    assert compare_math(left, right) is EQUAL
    assert compare_math(right, left) is EQUAL


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"\begin{pmatrix}x+1\end{pmatrix}", r"\begin{pmatrix}x-1\end{pmatrix}"),
        (r"\begin{pmatrix}-x\\1\end{pmatrix}", r"\begin{pmatrix}x\\1\end{pmatrix}"),
        ("-xyz", "xyz"), ("abc+1", "abc-1"), ("a+bcd", "a-bcd"), ("abc^2", "abc_2"), ("x^2yzw", "x2yzw"),
        ("-5meters", "5meters"), (r"\sqrt{2}\text{ and }-\sqrt{2}", r"\sqrt{2}\text{ and }\sqrt{2}"),
        ("5 km", "5 m"), ("5 kg", "5 g"), (r"5\text{ km}", r"5\text{ m}"),
        (r"6\text{ cm}", r"6\text{ inches}"), ("5 meters", "6"), ("5 apples", "5 oranges"), ("5m^2", "5m^3"),
        ("1011_2", "1011_3"), ("1012_2", "1012_3"), ("0.5", "05"), ("2 3", "23"), ("(1,2)", "2,1"),
        ("(1,2)", r"\{2,1\}"), ("[1,2]", "(1,2)"), ("(0,1)", "[0,1)"), ("yes", "no"),
        # a word that is no unit is part of the value
        ("2 pi", "2"), ("3 x", "3"), ("5 million", "5"), ("5 or more", "5"), ("5 factorial", "5"),
        ("2 squared", "2"), ("5 minus x", "5"), ("5 times", "5"), ("1 half", "1"), (r"5\text{ million}", "5"),
        (r"5\text{ or more}", "5"), ("7 theta", "7"),
    ],
)  # fmt: skip
def test_answers_that_only_look_alike_are_different(left: str, right: str) -> None:
    assert compare_math(left, right) is DIFFERENT
    assert compare_math(right, left) is DIFFERENT


@pytest.mark.parametrize(
    "bomb",
    [
        "3E500000",
        "1e9999999",
        "1E999999999",
        "9E999999*9E999999",
        "1.0E200000+1",
        "1 E 99999",
        "x^{31}*y^{31}*z^{31}",
    ],
)
def test_huge_powers_of_ten_are_not_evaluated(bomb: str) -> None:
    start = time.monotonic()
    assert compare_math(bomb, "5") is UNDECIDED and compare_math("5", bomb) is UNDECIDED
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("text", "number", "unit"),
    [
        ("5 square meters", "5", "m^2"), (r"5\text{ cubic feet}", "5", "ft^3"),
        ("18 dollars", "18", "dollar"), ("-2.5 kg", "-2.5", "kg"),
        (r"\frac{1}{2} cup", r"\frac{1}{2}", "cup"), ("5m", "5m", ""), ("3x", "3x", ""),
        ("Paris", "Paris", ""), ("7", "7", ""), ("60 miles per hour", "60", "mi / hour"),
    ],
)  # fmt: skip
def test_a_number_and_its_unit(text: str, number: str, unit: str) -> None:
    assert split_unit(text) == (number, unit)


SPELLINGS = [
    "1",
    "2",
    "x",
    "-",
    "+",
    "/",
    "^2",
    "(",
    ")",
    "{",
    "}",
    ",",
    ".",
    " ",
    "\\frac",
    "\\text{m}",
    "\\!",
    "1e3",
    "\u00bd",
    "\u00b2",
    "km",
]


@given(st.lists(st.sampled_from(SPELLINGS), max_size=6), st.lists(st.sampled_from(SPELLINGS), max_size=6))
def test_equality_does_not_depend_on_the_side_and_never_raises(left: list[str], right: list[str]) -> None:
    assert compare_math("".join(left), "".join(right)) is compare_math("".join(right), "".join(left))


@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=60))
def test_a_fraction_is_equal_in_every_way_of_writing_it(value: Fraction) -> None:
    plain = f"{value.numerator}/{value.denominator}"
    sign = "-" if value < 0 else ""
    whole, rest = divmod(abs(value.numerator), value.denominator)
    spelled = [rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"]
    if value.denominator > 1 and whole:
        spelled.append(f"{sign}{whole} {rest}/{value.denominator}")
    for one in spelled:
        assert compare_math(one, plain) is EQUAL
        assert compare_math(one, f"{value.numerator + 1}/{value.denominator}") is DIFFERENT
