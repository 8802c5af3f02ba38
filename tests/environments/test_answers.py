"""Answer extraction and comparison: recorded cases of the released ARPO scoring code, and where we differ on
purpose.
"""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.environments.grading.answers import (
    contains_answer,
    exact_match,
    extract_answer,
    f1_score,
    last_boxed,
    normalize_answer,
    unwrap_text,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat, sat.", "cat sat"),
        ("an apple a day", "apple day"),
        ("U.S. (the)", "us"),
        ("1,000", "1000"),
        ("theory of a the", "theory of"),
    ],
)
def test_normalisation_agrees_with_the_recorded_cases(text: str, expected: str) -> None:
    assert normalize_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "upstream", "ours"),
    [
        ("-6", "6", "-6"),
        ("0.5", "05", "0.5"),
        ("12.0", "120", "12"),
        (".5", "5", "0.5"),
        ("-.50", "50", "-0.5"),
        ("-0.0", "00", "0"),
        ("The A", "", "the a"),
        ("A", "", "a"),
        ("A, C", "c", "a c"),
        ("(A) (C)", "c", "a c"),
        ("Vitamin A", "vitamin", "vitamin a"),
        ("Hepatitis A and B", "hepatitis and b", "hepatitis a and b"),
        ("%", "", "%"),
        ("costs $1,234.50 now", "costs 123450 now", "costs 1234.5 now"),
    ],
)
def test_normalisation_differs_from_squad_to_preserve_numbers_and_letters(
    text: str, upstream: str, ours: str
) -> None:
    assert normalize_answer(text) == ours != upstream


@pytest.mark.parametrize(
    "text", ["T cell", "D minor chord", "J. K. Rowling novel", "5 km run", "c. 1900 chair"]
)
def test_an_article_before_a_letter_or_number_is_removed(text: str) -> None:
    assert normalize_answer(f"a {text}") == normalize_answer(text)


@pytest.mark.parametrize("text", ["2020-25", "x-6", "f(x)-6", "v1.2", "3\\sqrt{3} - 6", "1,2,3", "B12"])
def test_a_dash_or_dot_that_is_no_sign_or_decimal_point_is_punctuation(text: str) -> None:
    assert (
        "-" not in normalize_answer(text)
        and "." not in normalize_answer(text)
        and "," not in normalize_answer(text)
    )


@given(st.text(max_size=40))
def test_normalisation_is_idempotent_and_never_empty(text: str) -> None:
    once = normalize_answer(text)
    assert bool(once) == bool(text.strip())
    assert exact_match(text, (text,)) == bool(text.strip())
    assert normalize_answer(once.upper()) == normalize_answer(once.upper().lower())


@given(st.integers(-(10**9), 10**9), st.integers(0, 3))
def test_numbers_match_however_they_are_written(number: int, zeros: int) -> None:
    plain = str(number) + ("." + "0" * zeros if zeros else "")
    assert normalize_answer(f"{number:,}") == normalize_answer(plain) == str(number)
    assert exact_match(str(-number), (str(number),)) == (number == 0)


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("Paris", ("paris",), 1.0),
        ("Paris France", ("France Paris",), 1.0),
        ("yes it is", ("yes",), 0.0),
        ("Paris", ("London", "Paris, France"), 2 / 3),
        ("", ("Paris",), 0.0),
        ("3\\sqrt{3} - 6", ("3\\sqrt{3} - 6",), 1.0),
        ("noanswer", ("Paris",), 0.0),
        ("new york", ("york new",), 1.0),
        ("Paris", (), 0.0),
    ],
)
def test_f1_agrees_with_the_recorded_cases(
    prediction: str, answers: tuple[str, ...], expected: float
) -> None:
    assert f1_score(prediction, answers) == pytest.approx(expected)


def test_a_degree_is_a_word_of_its_own() -> None:
    assert f1_score("30 °C", ("30",)) == f1_score("30°C", ("30",)) == pytest.approx(2 / 3)
    assert normalize_answer("30°C") == normalize_answer("30 °C") == normalize_answer(r"30^\circ C")
    assert normalize_answer("x^{n-1}") != normalize_answer("x^{n}-1")


def test_f1_distinguishes_minus_six_and_six() -> None:
    assert f1_score("-6", ("6",)) == 0.0


WORDS = st.lists(st.sampled_from(["red", "green", "dog", "cat"]), max_size=6)


@given(WORDS, WORDS)
def test_f1_is_twice_the_overlap_over_the_total_length(left: list[str], right: list[str]) -> None:
    overlap = sum(min(left.count(word), right.count(word)) for word in set(left))
    expected = 2 * overlap / (len(left) + len(right)) if overlap else 0.0
    assert f1_score(" ".join(left), (" ".join(right),)) == pytest.approx(expected)
    assert f1_score(" ".join(right), (" ".join(left),)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "answers", "em", "contained"),
    [
        ("Paris", ("Paris",), True, True),
        ("The Paris", ("paris",), True, True),
        ("U.S.", ("US",), True, True),  # the released evaluation keeps punctuation: 0 there
        ("Paris", ("London", "Paris"), True, True),
        ("new york", ("york new",), False, False),
        ("in New York City", ("New York",), False, True),
        ("art", ("a",), False, False),
        ("", ("Paris",), False, False),
    ],
)
def test_exact_match_and_containment(
    prediction: str, answers: tuple[str, ...], em: bool, contained: bool
) -> None:
    assert exact_match(prediction, answers) is em
    assert contains_answer(prediction, answers) is contained


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{a}", "a"),
        ("\\boxed 12$ z", "12"),
        ("\\boxed{unclosed", None),
        ("\\[ \\boxed{\\text{Paris}} \\]", "\\text{Paris}"),
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{open", "1"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\fbox{4}", None),
        ("boxed{4}", None),
        ("\\boxed{}", ""),
        ("", None),
    ],
)
def test_the_last_closed_box_is_taken(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


@given(st.text(alphabet="\\boxed{}$ a1", max_size=40))
@example("\\boxed{\\}")
def test_box_extraction_never_raises(text: str) -> None:
    inside = last_boxed(text)
    assert inside is None or inside in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>\\boxed{5}</answer>", "5"),
        ("<answer>\\boxed{\\text{Paris}}</answer>", "Paris"),
        ("no tags \\boxed{7}", "7"),
        ("<answer>\\fbox{4}</answer>", "\\fbox{4}"),
        ("<answer>1</answer> or <answer> \\boxed{2} </answer>", "2"),
        ("<answer>Paris</answer>", "Paris"),
        ("nothing", ""),
        # The released evaluation takes the raw text of an answer and box that were never closed.
        ("<answer>\\boxed{3", ""),
    ],
)
def test_the_answer_of_a_whole_output(text: str, expected: str) -> None:
    assert extract_answer(text) == expected


def test_only_a_whole_text_command_is_unwrapped() -> None:
    assert unwrap_text(" \\text{ New York } ") == "New York"
    assert unwrap_text("5\\text{ cm}") == "5\\text{ cm}"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        # numbers that lose their punctuation
        ("12", "1/2"), ("34", "(3,4)"), ("1030", "10:30"), ("10", "1.0.0"), ("12.1.2020", "12.10.2020"),
        ("5", "-$5"), ("15", "1,5"), ("1e-5", "1e5"),
        # a letter after a number, which keeps its sign and point
        ("-5km", "5km"), ("-40C", "40C"), ("-0.5x", "0.5x"), ("1e-3", "1e3"), ("1.5e-3", "1.5e3"),
        ("2.5km", "2 5km"), ("6.88b", "688b"),
        # formulas and temperatures
        ("CO_{2}", "CO_{3}"), ("x_{12}", "x_{1}2"), ("x^{10}", "x^{1}0"), ("x^{-1}", "x^{1}"),
        ("10_{2}", "102"), ("30 \u00b0C", "30 \u00b0F"), ("-5 \u00b0C", "5 \u00b0C"),
    ],
)  # fmt: skip
def test_different_numbers_and_formulas_never_become_equal(left: str, right: str) -> None:
    assert not exact_match(left, (right,)) and not exact_match(right, (left,))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        # Unicode and powers of ten
        ("Sa\u0303o Tome\u0301", "S\u00e3o Tom\u00e9"), ("\u22126", "-6"), ("O\u2019Brien", "O'Brien"),
        ("-$5", "-5"), ("1e-05", "1e-5"), ("1e-0", "1e+00"), ("2e+05", "2e5"), ("\uff11\uff12", "12"),
        ("\u201cParis\u201d", "Paris"),
        # letters after a quantity
        ("1.50m", "1.5m"), ("1,000km", "1000km"), ("10.0km", "10km"), ("1.0e+3", "1e3"), ("the 1st", "1st"),
        ("1990s", "1990s"),
        # formulas and temperatures in LaTeX and Unicode
        (r"\text{CO}_{2}", "CO2"), ("H_{2}O", "H\u2082O"), ("C_{6}H_{12}O_{6}", "C6H12O6"),
        (r"\mathrm{H_{2}SO_{4}}", "H2SO4"), ("Fe^{3+}", "Fe\u00b3\u207a"), ("x^{2}", "x\u00b2"),
        (r"30^\circ C", "30\u00b0C"), (r"30^\circ \text{C}", "30 \u00b0C"), ("30 \u2103", "30\u00b0 C"),
    ],
)  # fmt: skip
def test_the_same_text_in_two_spellings_is_equal(left: str, right: str) -> None:
    assert exact_match(left, (right,)) and f1_score(left, (right,)) == 1.0
