"""Answer rules: the recorded cases of the released code, and what each variant makes of the same answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.environments.grading.answers import exact_match, f1_score
from outrider.environments.grading.math_answers import strings_equal
from outrider.errors import ConfigError
from outrider.evaluation.grading import VARIANTS, Grades, count_tag_pairs, find_variant, number_after_mark

VECTORS: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "arpo_answers.json").read_text()
)
TRAIN, RELEASED, SQUAD, OURS = (VARIANTS[name] for name in ("arpo-train", "arpo-eval", "squad", "default"))


def listed(answers: str | list[str]) -> list[str]:
    return [answers] if isinstance(answers, str) else answers


@pytest.mark.parametrize("case", VECTORS["normalize_answer_reward"])
def test_recorded_normalisation(case: dict[str, Any]) -> None:
    assert TRAIN.normalize(case["s"]) == SQUAD.normalize(case["s"]) == case["out"]


@pytest.mark.parametrize("case", VECTORS["f1_reward"])
def test_recorded_f1(case: dict[str, Any]) -> None:
    assert TRAIN.grade(case["pred"], listed(case["gold"]), "qa").f1 == pytest.approx(case["f1"], abs=1e-12)


@pytest.mark.parametrize("case", VECTORS["boxed_extraction_reward"])
def test_recorded_boxes(case: dict[str, Any]) -> None:
    """What raises there is no answer here."""
    expected = "" if case["inner"].startswith("!") else case["inner"]
    assert TRAIN.extract(f"<answer>{case['text']}</answer>") == expected


@pytest.mark.parametrize("case", [case for case in VECTORS["reward"] if case["score"] >= 0])
def test_recorded_rewards(case: dict[str, Any]) -> None:
    prediction = TRAIN.extract(case["solution"])
    assert prediction == case["answer"]
    assert TRAIN.grade(prediction, [case["gold"]], "qa").f1 == case["f1"]


@pytest.mark.parametrize("case", VECTORS["math_equiv"])
def test_recorded_string_equality(case: dict[str, Any]) -> None:
    assert strings_equal(case["a"], case["b"]) is case["equal"]
    assert strings_equal(case["b"], case["a"]) is case["equal"]


def test_only_a_short_name_before_one_equals_sign_is_dropped() -> None:
    assert strings_equal("x = 5", "5") and strings_equal("k=5", "x=5")
    assert (
        not strings_equal("xyz=5", "5")
        and not strings_equal("x=y=5", "5")
        and not strings_equal("x=y=5", "y=5")
    )


def test_one_missing_text_equals_no_text() -> None:
    assert not strings_equal(None, "5") and not strings_equal("", None)


@pytest.mark.parametrize("case", VECTORS["qa_metrics"])
def test_recorded_grades_of_questions(case: dict[str, Any]) -> None:
    found = RELEASED.grade(case["pred"], listed(case["refs"]), "qa")
    assert (found.em, found.contained, found.f1, found.math) == (
        case["em"],
        case["acc"],
        case["f1"],
        case["math_equal"],
    )


@pytest.mark.parametrize("case", VECTORS["math_metrics"])
def test_recorded_grades_of_mathematics(case: dict[str, Any]) -> None:
    found = RELEASED.grade(case["pred"], [case["ref"]], "math")
    assert (found.em, found.contained, found.f1, found.math) == (
        case["em"],
        case["acc"],
        case["f1"],
        case["math_equal"],
    )


@pytest.mark.parametrize("case", VECTORS["extract_answer_eval"])
def test_recorded_extraction(case: dict[str, Any]) -> None:
    assert RELEASED.extract(case["text"]) == case["pred"]


@pytest.mark.parametrize("case", VECTORS["gsm8k_gold"])
def test_recorded_golds(case: dict[str, Any]) -> None:
    assert number_after_mark(case["text"]) == case["gold"]


def test_a_solution_without_a_mark_has_no_number() -> None:
    assert number_after_mark("72") is None and number_after_mark("#### none") is None
    assert number_after_mark("#### -3.5") == "-3.5"
    assert number_after_mark("#### 1/2\n#### 5") is None  # the first mark counts


@pytest.mark.parametrize("text", ["#### 1/2", "#### 10 000", "#### 5%", "#### 5 apples"])
def test_a_number_with_other_text_behind_it_is_not_cut(text: str) -> None:
    assert number_after_mark(text) is None and number_after_mark(f"{text}\nmore") is None
    assert number_after_mark("#### 1,234 \r\nmore") == "1234"


@pytest.mark.parametrize("case", VECTORS["count_tags"])
def test_recorded_counts(case: dict[str, Any]) -> None:
    assert count_tag_pairs(case["text"], "search") == case["search"]
    assert count_tag_pairs(case["text"], "python") == case["python"]


@pytest.mark.parametrize(
    ("output", "ours", "train", "released", "squad"),
    [
        ("", "", "", "", ""),
        ("<answer></answer>", "", "", "<answer></answer>", ""),
        ("Paris", "", "", "Paris", "Paris"),
        ("a\n\nb\nc\nd\ne\nf", "", "", "b\nc\nd\ne\nf", "a\n\nb\nc\nd\ne\nf"),
        ("<answer>1</answer> <answer>\\boxed{2}</answer>", "2", "", "2", "2"),
        ("<answer>\\boxed{1}</answer> <answer>\\boxed{2}</answer>", "2", "1", "2", "2"),
        ("<answer> Paris </answer>", "Paris", "", " Paris ", "Paris"),
        ("<answer>\\boxed 7$ and \\boxed{8}</answer>", "8", "7", "8", "8"),
        (
            "<answer>\\boxed{\\text{São Tomé}}</answer>",
            "São Tomé",
            "\\text{São Tomé}",
            "São Tomé",
            "São Tomé",
        ),
        ("<answer>\\boxed{1} or \\boxed{2</answer>", "1", "", "\\boxed{2", "1"),
        ("<answer>\\boxed{}</answer>", "", "", "\\boxed{}", ""),
        (
            "<answer>\\boxed{\\frac{1}{2}}</answer>",
            "\\frac{1}{2}",
            "\\frac{1}{2}",
            "\\frac{1}{2}",
            "\\frac{1}{2}",
        ),
        ("<answer>\\fbox{4}</answer>", "\\fbox{4}", "", "\\fbox{4}", "\\fbox{4}"),
        ("no tags \\boxed{7}", "7", "", "7", "7"),
    ],
)
def test_extraction_by_each_variant(output: str, ours: str, train: str, released: str, squad: str) -> None:
    assert (OURS.extract(output), TRAIN.extract(output), RELEASED.extract(output), SQUAD.extract(output)) == (
        ours, train, released, squad,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("prediction", "gold", "ours", "train", "released", "squad"),
    [
        ("0.5", "05", False, True, False, True),
        ("-6", "6", False, True, False, True),
        ("12", "1/2", False, True, False, True),
        ("12.0", "12", True, False, False, False),
        ("1,000", "1000", True, True, False, True),
        ("U.S.", "US", True, True, False, True),
        ("A", "A", True, False, True, True),
        ("", "Paris", False, False, False, False),
        ("", "The", False, False, False, True),
        ("5 cm", "5", False, False, False, False),
        ("Sa\u0303o", "S\u00e3o", True, False, False, False),
        ("\u212b", "\u00e5", True, True, True, True),
        ("the cat", "Cat", True, True, True, True),
        ("yes", "Yes.", True, True, False, True),
    ],
)
def test_exact_match_of_each_variant(
    prediction: str, gold: str, ours: bool, train: bool, released: bool, squad: bool
) -> None:
    found = [variant.grade(prediction, (gold,), "qa").em for variant in (OURS, TRAIN, RELEASED, SQUAD)]
    assert found == [ours, train, released, squad]


def test_text_commands_of_accepted_answers_are_unwrapped() -> None:
    output = "<answer>\\boxed{\\text{Evelyn}}</answer>"
    found = [
        variant.grade(variant.extract(output), ("\\text{Evelyn}",), "math").em
        for variant in (OURS, TRAIN, RELEASED, SQUAD)
    ]
    assert found == [True, True, False, True]


def test_only_two_variants_know_closed_answers() -> None:
    found = [variant.grade("yes it is", ("yes",), "qa").f1 for variant in (OURS, TRAIN, RELEASED, SQUAD)]
    assert found == [0.0, 0.0, 0.5, 0.5]


def test_a_list_in_one_text_is_split_by_the_released_evaluation_alone() -> None:
    answers = ("[London, Paris]",)
    assert [variant.grade("Paris", answers, "qa").em for variant in (OURS, TRAIN, RELEASED, SQUAD)] == [
        False,
        False,
        True,
        False,
    ]
    assert RELEASED.grade("Paris", ("[London, Paris]", "Rome"), "qa").em is False
    assert RELEASED.grade("[1, 2]", ("[1, 2]",), "math").em is True


def test_the_best_answer_counts_and_no_answer_gives_nothing() -> None:
    for variant in VARIANTS.values():
        assert variant.grade("Paris France", ("London", "Paris"), "qa").f1 == pytest.approx(2 / 3)
        assert variant.grade("Paris", (), "qa").metrics()["f1"] == 0.0


@pytest.mark.parametrize(
    ("prediction", "gold", "ours", "released"),
    [
        ("\\frac{1}{2}", "0.5", True, True),
        ("\\frac12", "\\dfrac{1}{2}", True, True),
        ("\\frac{3}{4}", "0.75", True, False),
        ("12", "12.0", True, False),
        ("2/4", "1/2", True, False),
        ("2 3", "23", False, True),
        ("5\\text{ cm}", "5", True, True),
        ("90^\\circ", "90", True, True),
        ("50\\%", "50", True, True),
        ("", "5", False, False),
        ("(1,2)", "(2,1)", False, False),
    ],
)
def test_mathematical_equality_of_the_default_and_of_arpo_eval(
    prediction: str, gold: str, ours: bool, released: bool
) -> None:
    assert OURS.grade(prediction, (gold,), "math").math is ours
    assert TRAIN.grade(prediction, (gold,), "math").math is ours
    assert RELEASED.grade(prediction, (gold,), "math").math is released


@pytest.mark.parametrize("broken", ["\\frac", "1\\sqrt", "a\\text{ b}\\text{ c}", "\\frac{1}{2}\\frac"])
def test_broken_latex_is_compared_as_text(broken: str) -> None:
    assert strings_equal(broken, broken) and not strings_equal(broken, broken + " ")


def test_an_answer_that_is_not_safe_to_evaluate_is_counted() -> None:
    found = OURS.grade("9^{9^{9}}", ("5",), "math")
    assert (found.math, found.num_undecided) == (False, 1)
    assert found.metrics()["num_undecided_answers"] == 1.0


def test_scores_by_metric() -> None:
    grades = Grades(em=False, f1=0.5, contained=True, math=True)
    assert (
        grades.score("f1") == (0.5, False)
        and grades.score("em") == (0.0, False)
        and grades.score("math") == (1.0, True)
    )
    with pytest.raises(ValueError, match="have no judge"):
        grades.score("judge")
    with pytest.raises(ValueError, match="have no math"):
        Grades(em=True, f1=1.0, contained=True).score("math")
    assert "math_equal" not in Grades(em=True, f1=1.0, contained=True).metrics()


def test_variants_have_names_and_deviations() -> None:
    assert find_variant("arpo-train") is TRAIN
    assert not OURS.deviations and all(
        variant.deviations for variant in VARIANTS.values() if variant is not OURS
    )
    with pytest.raises(
        ConfigError, match=r"unknown answer rules 'verl'; there are default, arpo-train, arpo-eval, squad"
    ):
        find_variant("verl")


PIECES = [
    *"ab 0.5-/{}$[],\n<>é",
    "\\boxed{",
    "\\boxed ",
    "\\frac",
    "\\sqrt",
    "\\text{ ",
    "<answer>",
    "</answer>",
]
TEXT = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


@given(TEXT, TEXT)
def test_no_text_makes_any_variant_raise(output: str, gold: str) -> None:
    for variant in VARIANTS.values():
        found = variant.grade(variant.extract(output), (gold,), "math")
        assert 0.0 <= found.f1 <= 1.0
        variant.normalize(output)


@given(st.text(max_size=20), st.text(max_size=20))
def test_f1_is_symmetric_and_an_exact_match_that_is_not_blank_is_complete(left: str, right: str) -> None:
    for variant in VARIANTS.values():
        found = variant.grade(left, (right,), "qa")
        if left and right:
            assert found.f1 == variant.grade(right, (left,), "qa").f1
        if found.em and variant.normalize(left):
            assert found.f1 == 1.0


@given(st.text(max_size=20), st.text(max_size=20))
def test_the_default_variant_grades_as_training_does(left: str, right: str) -> None:
    found = OURS.grade(left, (right,), "qa")
    assert (found.em, found.f1, found.math) == (exact_match(left, (right,)), f1_score(left, (right,)), None)
