"""The outcome reward of tool-reasoning episodes, computed over structured turns and not over one decoded
string.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from outrider.config import Settings
from outrider.environments.grading.answers import (
    contains_answer,
    exact_match,
    f1_score,
    last_boxed,
    unwrap_text,
)
from outrider.environments.grading.math_answers import Verdict, compare_all
from outrider.environments.tool_qa.reward_judge import RewardJudgeSettings
from outrider.environments.tool_qa.tag_protocol import Answer, Turn, format_fault, parse_action
from outrider.tokens.thoughts import without_thoughts

Judged: TypeAlias = Callable[[str], float | None]
"""Correctness in [0, 1] of a prediction by a judge (0 or 1) or by the tasks' own verifier, where 1 is
correct; None where a verifier could not decide. Raises what a judge raises.
"""


class RewardConfig(Settings):
    """How an answer becomes a reward (ARPO, arXiv 2507.19849, equation 8, is the default)."""

    details: ClassVar[frozenset[str]] = frozenset({"judge", "require_boxed"})

    answer: Literal["f1", "em", "math", "judge", "verifier"] = "f1"
    """Correctness: token F1, or 0 or 1 by exact match after normalisation, by mathematical equivalence, or by
    what the judge says; or what the tasks' own verifier gives, in environments that have one.
    """
    judge: RewardJudgeSettings | None = None
    """The model that judges, for ``answer = "judge"``: ``judge = {endpoint = {base_url = "..."}}``."""
    format_penalty: float = Field(default=-1.0, le=0.0)
    """Reward of an episode whose format is bad, whatever it answered."""
    require_think: bool = True
    """Whether at least one think block is part of the format."""
    require_boxed: bool = True
    r"""Whether the answer must hold a closed ``\boxed{}``; without a box the answer tag's text counts."""
    multi_tool_bonus: float = Field(default=0.1, ge=0.0)
    """Added to a correctness above 0 when two different tools were executed (not: mentioned)."""

    @model_validator(mode="after")
    def _has_its_judge(self) -> "RewardConfig":
        if (self.answer == "judge") != (self.judge is not None):
            raise ValueError('answer = "judge" and judge = {endpoint = {base_url = "..."}} need each other')
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The reward and all that it was made from. ``fault`` is None for a good format; ``num_undecided`` counts
    golds that could not be compared safely (math), or an answer that a verifier could not score.
    """

    reward: float
    correctness: float
    prediction: str
    fault: str | None
    em: bool
    f1: float
    contained: bool
    is_correct: bool
    num_undecided: int = 0


def score_turns(
    turns: Sequence[Turn],
    answers: Sequence[str],
    tools: Sequence[str],
    config: RewardConfig,
    *,
    judged: Judged | None = None,
) -> Score:
    """Score an episode's turns against the accepted answers. ``tools`` are the tag names in use."""
    fault = (
        "no turn"
        if not turns
        else format_fault(
            turns, tools, require_think=config.require_think, require_boxed=config.require_boxed
        )
    )
    prediction = _prediction(turns, tools)
    num_tools = len({turn.executed_tool for turn in turns} - {None})
    return score_answer(prediction, answers, config, fault=fault, num_tools=num_tools, judged=judged)


def score_answer(
    prediction: str,
    answers: Sequence[str],
    config: RewardConfig,
    *,
    fault: str | None,
    num_tools: int,
    judged: Judged | None = None,
) -> Score:
    """Score what an episode answered, whose format has this ``fault``; ``num_tools`` different tools ran.

    Reward: ``format_penalty`` for a bad format; otherwise correctness in [0, 1], plus the bonus if it is
    above 0. ``judged`` is asked for a good format alone.
    """
    prediction = without_thoughts(prediction)
    em = exact_match(prediction, answers)
    f1 = f1_score(prediction, answers)
    match config.answer:
        case "math":
            graded = _grade_math(prediction, answers)
        case "judge" | "verifier":
            assert judged is not None
            graded = _grade_judged(prediction, judged) if fault is None else _Graded(0.0)
        case _:
            graded = _Graded(float(em))
    correctness = f1 if config.answer == "f1" else graded.correctness
    bonus = config.multi_tool_bonus if num_tools >= 2 and correctness > 0 else 0.0
    return Score(
        reward=config.format_penalty if fault is not None else correctness + bonus,
        correctness=correctness,
        prediction=prediction,
        fault=fault,
        em=em,
        f1=f1,
        contained=contains_answer(prediction, answers),
        is_correct=graded.correctness >= 1,
        num_undecided=graded.num_undecided,
    )


@dataclass(frozen=True, slots=True)
class _Graded:
    """Correctness in [0, 1], where 1 is correct, and how many comparisons were left open."""

    correctness: float
    num_undecided: int = 0


def _grade_math(prediction: str, answers: Sequence[str]) -> _Graded:
    verdicts = compare_all(prediction, answers)
    return _Graded(float(Verdict.EQUAL in verdicts), verdicts.count(Verdict.UNDECIDED))


def _grade_judged(prediction: str, judged: Judged) -> _Graded:
    score = judged(prediction)
    return _Graded(float(score or 0.0), num_undecided=int(score is None))


def final_answer(text: str) -> str:
    """The answer in a text: its last box, else the text itself. Thoughts are no part of it."""
    text = without_thoughts(text)
    boxed = last_boxed(text)
    return unwrap_text(text if boxed is None else boxed)


def _prediction(turns: Sequence[Turn], tools: Sequence[str]) -> str:
    """Answer of the last turn: its last box, else the answer's text; empty when it does not answer, or only
    in its thoughts, which may have begun in an earlier turn.
    """
    if not turns:
        return ""
    earlier = "".join(turn.text for turn in turns[:-1])
    spoken = without_thoughts(earlier + turns[-1].text).removeprefix(without_thoughts(earlier))
    action = parse_action(spoken, tools)
    if not isinstance(action, Answer):
        return ""
    return final_answer(action.text)
