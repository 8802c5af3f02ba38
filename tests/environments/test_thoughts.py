r"""A model's thoughts are never graded, whatever marks them and wherever the answer is read."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.environments.grading.answers import extract_answer, last_boxed
from outrider.environments.tool_qa.environment import NativeTurn, native_fault
from outrider.environments.tool_qa.rewards import RewardConfig, Turn, final_answer, score_answer, score_turns
from outrider.evaluation.grading import find_variant
from outrider.tokens import ChatRenderer
from outrider.tokens.tool_calls import without_thoughts
from outrider.types import Message
from tests.tiny import TEMPLATE
from tests.tokens.test_renderer import byte_tokenizer

MARKERS = [
    ("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<Thought>", "</Thought>"),
    ("<reasoning>", "</reasoning>"), ("<THINK>\n", "\n</THINK>\n"), ("<analysis>", "</analysis>"),
    ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"), ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ("<|channel>thought\n", "<channel|>"), ("analysisWell, ", "assistantfinal"),
    ("Here is my thought process: ", "Here is my response:"),
]  # fmt: skip
RULES = find_variant("default")


def is_right(output: str, answer: str, kind: str) -> bool:
    grades = RULES.grade(RULES.extract(output), (answer,), "math" if kind == "math" else "qa")
    return bool(grades.math) if kind == "math" else grades.em


@pytest.mark.parametrize(("opening", "closing"), MARKERS)
@pytest.mark.parametrize("kind", ["math", "qa"])
def test_only_the_text_after_the_thoughts_is_graded(opening: str, closing: str, kind: str) -> None:
    thought = f"{opening}Perhaps \\boxed{{5}} or <answer>5</answer>?{closing}"
    assert not is_right(f"{thought}The answer is 7.", "5", kind)
    assert not is_right(f"{opening}Perhaps \\boxed{{5}}? Let me check, since", "5", kind)
    for said in ("So \\boxed{7}.", "<answer>7</answer>", "<answer>\\boxed{7}</answer>"):
        assert is_right(thought + said, "7", kind)
        assert not is_right(thought + said, "5", kind)
    assert last_boxed(thought) is None and extract_answer(thought) == ""


@pytest.mark.parametrize(("opening", "closing"), MARKERS)
def test_thoughts_of_a_sampled_turn_are_not_graded(opening: str, closing: str) -> None:
    """Their markers may be special tokens, and the turn is decoded from its ids."""
    tokenizer = byte_tokenizer(TEMPLATE)
    special = re.findall(r"<\|?[\w:/]+\|?>|\[/?THINK\]|\u25c1/?think\u25b7", opening + closing)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *special]})
    renderer = ChatRenderer(tokenizer)
    prompt = renderer.prompt([Message(role="user", content="2 + 5?")])
    thought = f"{opening}Perhaps \\boxed{{5}} or <answer>5</answer>?{closing}"
    ids = tokenizer.encode(f"{thought}So \\boxed{{7}}.", add_special_tokens=False)
    for text in (renderer.turn_text(ids, context=prompt), renderer.parse(ids, context=prompt).content):
        for kind in ("math", "qa"):
            assert is_right(text, "7", kind) and not is_right(text, "5", kind)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Paris", "Paris"), ("", ""), ("a < b > c", "a < b > c"),
        ("hidden</think>Paris", "Paris"),  # the template opened the block
        ("<think>a<think>b</think>c</think>Paris", "Paris"),
        ("<think>a</think>Par<think>b</think>is", "Paris"),
        ("<think>a</think>Paris</think>", "Paris"),
        ("<think>a</think>5</think>Paris", "Paris"),
        ("Paris<think>or Rome", "Paris"),
        ("<think>a </reasoning> b</think>Paris", "Paris"),
        ("<think>a</think><think>b</think>", ""),
        ("<|channel|>analysis<|message|>5<|end|>", ""),
        ("<|channel|>analysis<|message|>5", ""),
        ("<|channel|>final<|message|>Paris<|return|>", "Paris"),
        ("analysis of the text", "analysis of the text"),
    ],
)  # fmt: skip
def test_thoughts_are_cut_out(text: str, shown: str) -> None:
    assert without_thoughts(text) == shown


@given(st.text(max_size=40), st.sampled_from(MARKERS), st.text(max_size=20))
def test_any_thought_in_front_of_an_answer_changes_nothing(
    thought: str, marker: tuple[str, str], answer: str
) -> None:
    plain = "".join(sign for sign in answer if sign.isalnum()) or "7"
    hidden = thought.replace("<", "").replace("[", "").replace("\u25c1", "").replace("assistantfinal", "")
    assert without_thoughts(f"{marker[0]}{hidden}{marker[1]}{plain}").strip() == plain


def test_a_long_text_of_markers_is_read_in_one_pass() -> None:
    assert without_thoughts("<think>" * 100_000) == ""
    assert without_thoughts("</think>" * 100_000) == ""
    assert without_thoughts("<think></think>" * 50_000 + "x") == "x"


def test_an_answer_in_an_open_thought_gets_no_credit() -> None:
    config = RewardConfig(require_think=False, require_boxed=False, format_penalty=0.0)
    thought = Turn(text="<think>Maybe <answer>5</answer>")
    assert score_turns([thought], ("5",), (), config).correctness == 0
    searched = Turn(text="<think>I look.<search>x</search>", executed_tool="search", result="five")
    for last, correctness in (
        ("<answer>5</answer>", 0.0),  # the thought of the first turn is still open
        ("So it is 5.</think><answer>5</answer>", 1.0),
        ("Is it 5?</think><answer>7</answer>", 0.0),
    ):
        assert (
            score_turns([searched, Turn(text=last)], ("5",), ("search",), config).correctness == correctness
        )


def test_a_native_turn_that_only_thinks_does_not_answer() -> None:
    config = RewardConfig(require_think=False, require_boxed=False)
    turn = NativeTurn(content="[THINK]It is \\boxed{5}", has_thought=True)
    assert native_fault([turn], config) == "the last turn does not answer"
    boxed = NativeTurn(content="<thinking>It is \\boxed{5}</thinking>It is 5.", has_thought=True)
    assert native_fault([boxed], RewardConfig(require_think=False)) == "no closed \\boxed{} in the answer"
    assert final_answer(boxed.content) == "It is 5."


@pytest.mark.parametrize("kind", ["f1", "em", "math", "verifier"])
def test_a_prediction_is_scored_without_its_thoughts(kind: str) -> None:
    seen: list[str] = []

    def judged(prediction: str) -> float:
        seen.append(prediction)
        return float(prediction == "5")

    config = RewardConfig(answer=kind)  # type: ignore[arg-type]
    for prediction, correctness in (
        ("<think>7</think>5", 1.0),
        ("<think>5</think>7", 0.0),
        ("<think>5", 0.0),
    ):
        score = score_answer(prediction, ("5",), config, fault=None, num_tools=0, judged=judged)
        assert score.correctness == correctness
    assert not any("think" in prediction for prediction in seen)
