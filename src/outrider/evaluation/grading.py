r"""Extraction and grading of answers, by Outrider's rules or by those of a released evaluation.

``default`` uses ``environments.answers`` and ``environments.math_answers``, the rules of training, except
that it also removes ``\text{}`` from accepted answers, as from predictions. The other variants reproduce
released code, so that scores can be compared with published ones; ``Variant.deviations`` lists their
differences from the default. Training uses none of them. Test cases: ``tests/vectors/arpo_answers.json``.

Sources: ARPO (arXiv 2507.19849) and its released reward and evaluation, reimplemented; SQuAD 1.1
(arXiv 1606.05250), section 6.1; the string rules for mathematics are those of MATH (arXiv 2103.03874).
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Final, Literal

from outrider.environments.grading.answers import (
    contains_answer,
    exact_match,
    extract_answer,
    f1_score,
    normalize_answer,
    unwrap_text,
)
from outrider.environments.grading.math_answers import Verdict, compare_all, strings_equal
from outrider.environments.tool_qa.rewards import Judge
from outrider.errors import ConfigError, EngineFault, ModelError
from outrider.evaluation.results import SampleResult
from outrider.rollout.endpoint import Collected
from outrider.tokens.tool_calls import without_thoughts
from outrider.trace import Trace
from outrider.types import Outcome, Task

Kind = Literal["qa", "math"]
Scorer = Literal["em", "f1", "math", "judge"]

_CLOSED: Final = frozenset({"yes", "no", "noanswer"})
_ARTICLES: Final = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_LAST_LINES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Grades:
    """Grades of one prediction: the best over the accepted answers.

    ``contained``: the prediction contains an answer. ``math``: mathematically equal; None if this was not
    checked. ``num_undecided`` counts answers that were not safe to evaluate and are not equal as strings.
    """

    em: bool
    f1: float
    contained: bool
    math: bool | None = None
    num_undecided: int = 0

    def score(self, scorer: Scorer) -> tuple[float, bool]:
        """Score in [0, 1] and success; with ``f1`` success is the exact match. Raises ValueError if the grade
        of ``scorer`` was not computed.
        """
        if scorer == "judge" or (scorer == "math" and self.math is None):
            raise ValueError(f"these grades have no {scorer}")
        success = bool(self.math) if scorer == "math" else self.em
        return (self.f1 if scorer == "f1" else float(success)), success

    def metrics(self) -> dict[str, float]:
        """All grades as named floats."""
        values = {"em": float(self.em), "f1": self.f1, "answer_contained": float(self.contained)}
        if self.math is not None:
            values |= {"math_equal": float(self.math), "num_undecided_answers": float(self.num_undecided)}
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A rule for extraction, normalisation and comparison. ``extract`` maps the whole output (all turns of
    the policy, without tool results) to the prediction, empty for none; ``grade`` compares it with the
    accepted answers. Neither ever raises.
    """

    name: str
    deviations: tuple[str, ...]
    extract: Callable[[str], str]
    normalize: Callable[[str], str]
    grade: Callable[[str, Sequence[str], Kind], Grades]


def find_variant(name: str) -> Variant:
    """Return the variant of that name. Raises ConfigError, which lists the known names."""
    if name not in VARIANTS:
        raise ConfigError(f"unknown answer rules {name!r}; there are {', '.join(VARIANTS)}")
    return VARIANTS[name]


def _grade_default(prediction: str, answers: Sequence[str], kind: Kind) -> Grades:
    prediction = without_thoughts(prediction)
    # as extraction does: MATH has answers such as \text{Evelyn}
    answers = [unwrap_text(answer) for answer in answers]
    verdicts = compare_all(prediction, answers) if kind == "math" else []
    return Grades(
        em=exact_match(prediction, answers),
        f1=f1_score(prediction, answers),
        contained=contains_answer(prediction, answers),
        math=Verdict.EQUAL in verdicts if kind == "math" else None,
        num_undecided=verdicts.count(Verdict.UNDECIDED),
    )


def normalize_squad(text: str) -> str:
    """Lower-case, then remove ASCII punctuation, remove articles, and collapse whitespace. For example,
    ``0.5`` becomes ``05``.
    """
    return _without_articles(text.lower().translate(_NO_PUNCTUATION))


def _without_articles(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text).split())


def _grade_normalized(
    prediction: str, answers: Sequence[str], normalize: Callable[[str], str], *, closed: bool, blank: bool
) -> Grades:
    """Grade after a normalisation. ``closed``: yes, no and noanswer only match themselves. ``blank``: an
    empty prediction may be an exact match.
    """
    predicted = normalize(prediction)
    golds = [normalize(answer) for answer in answers]
    best_f1 = 0.0
    for gold in golds:
        if closed and gold != predicted and {gold, predicted} & _CLOSED:
            continue
        words, gold_words = predicted.split(), gold.split()
        if shared := sum((Counter(words) & Counter(gold_words)).values()):
            best_f1 = max(best_f1, 2 * shared / (len(words) + len(gold_words)))
    return Grades(
        em=predicted in golds and (blank or bool(predicted)),
        f1=best_f1,
        contained=any(gold in predicted for gold in golds),
    )


def _grade_squad(
    prediction: str, answers: Sequence[str], kind: Kind, *, closed: bool = False, blank: bool = True
) -> Grades:
    """SQuAD's rules with our mathematical equality, for variants that have none of their own."""
    grades = _grade_normalized(prediction, answers, normalize_squad, closed=closed, blank=blank)
    ours = _grade_default(prediction, answers, kind)
    return replace(grades, math=ours.math, num_undecided=ours.num_undecided)


def _extract_squad(output: str) -> str:
    output = without_thoughts(output)
    return extract_answer(output) if "<answer>" in output or "\\boxed" in output else output.strip()


def _extract_arpo_train(output: str) -> str:
    inside, closing, _ = output.partition("<answer>")[2].partition("</answer>")
    if not closing:
        return ""
    if "\\boxed " in inside:  # this form takes precedence over braces, wherever it occurs
        return inside.rpartition("\\boxed ")[2].split("$")[0]
    start = inside.rfind("\\boxed{")
    end = _find_closing_brace(inside, start) if start >= 0 and start == inside.rfind("\\boxed") else None
    return "" if end is None else inside[start + len("\\boxed{") : end]


def _find_closing_brace(text: str, start: int) -> int | None:
    """Index at which the first group after ``start`` closes, counting every brace; None if it stays open."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0 and text[position] == "}":
            return position
    return None


def _extract_arpo_eval(output: str) -> str:
    end = output.rfind("</answer>")
    start = output[:end].rfind("<answer>") if end >= 0 else -1
    pair = output[start + len("<answer>") : end] if start >= 0 else ""
    answer = _arpo_eval_box(pair or output) or pair
    return answer or "\n".join(output.replace("\n\n", "\n").strip().split("\n")[-_LAST_LINES:])


def _arpo_eval_box(text: str) -> str:
    """The content of the last box, or the text from its command on if its group is not closed; empty if there
    is no box.
    """
    text = text.strip()
    start = text.rfind("\\boxed")
    start = text.rfind("\\fbox") if start < 0 else start
    if start < 0:
        return ""
    end = _find_closing_brace(text, start)
    box = text[start:] if end is None else text[start : end + 1]
    return (
        _strip_command(_strip_command(box, "\\boxed{"), "\\text{")
        if box.startswith("\\boxed{") and box.endswith("}")
        else box
    )


def _strip_command(text: str, command: str) -> str:
    return text[len(command) : -1] if text.startswith(command) and text.endswith("}") else text


def _normalize_arpo_eval(text: str) -> str:
    return _without_articles(text.lower())


def _grade_arpo_eval(prediction: str, answers: Sequence[str], kind: Kind) -> Grades:
    if not prediction:
        return Grades(em=False, f1=0.0, contained=False, math=False)
    if kind == "qa" and len(answers) == 1 and answers[0].startswith("["):
        answers = [part.strip() for part in answers[0].strip("[]").split(",")]
    normalize = _normalize_arpo_eval if kind == "qa" else lambda text: " ".join(text.lower().split())
    grades = _grade_normalized(prediction, answers, normalize, closed=False, blank=True)
    equal = any(strings_equal(normalize(prediction), normalize(answer)) for answer in answers)
    return replace(grades, math=equal)


def number_after_mark(solution: str) -> str | None:
    """GSM8K's final number, which follows the first ``#### ``, without thousands separators; None if there is
    none, or if the line contains anything else.
    """
    line = solution.partition("#### ")[2].partition("\n")[0]
    match = re.fullmatch(r"(-?[0-9.,]+)[ \t\r]*", line)
    return match.group(1).replace(",", "") if match else None


def count_tag_pairs(text: str, tag: str) -> int:
    """Count closed pairs of a tag, as ``arpo-eval`` counts tool calls, whether executed or rejected."""
    count = 0
    while (closed := text.partition(f"<{tag}>")[2].partition(f"</{tag}>"))[1]:
        count, text = count + 1, closed[2]
    return count


VARIANTS: Final[Mapping[str, Variant]] = {
    variant.name: variant
    for variant in (
        Variant(
            name="default",
            deviations=(),
            extract=extract_answer,
            normalize=normalize_answer,
            grade=_grade_default,
        ),
        Variant(
            name="arpo-train",
            deviations=(
                "thoughts are read like any other text",
                "the first answer pair counts, not the last, and an answer without a box is none",
                (
                    r"`\boxed x` counts up to the next `$` even where `\boxed{y}` follows; "
                    r"an unclosed last box is no answer"
                ),
                r"`\text{Paris}` keeps its command; every brace counts, `\{` too",
                (
                    "punctuation goes before all else: -6 equals 6, 0.5 is 05, "
                    "12.0 differs from 12, a lone A or % is never right"
                ),
                (
                    "an answer is contained as a part of words too; exact match is "
                    "not part of the released reward"
                ),
                "mathematical equality: the release has none, so it is ours",
            ),
            extract=_extract_arpo_train,
            normalize=normalize_squad,
            grade=partial(_grade_squad, closed=True, blank=False),
        ),
        Variant(
            name="arpo-eval",
            deviations=(
                "thoughts are read like any other text",
                (
                    r"an unclosed box or `\fbox` is taken with its command; "
                    r"without tag and box the last five lines are the answer"
                ),
                (
                    "punctuation stays: `Paris.` differs from Paris; articles go "
                    "in questions, not in mathematics"
                ),
                (
                    "yes, no and noanswer have no rule of their own; an answer "
                    "is contained as a part of words too"
                ),
                "a single answer that begins with [ is split at its commas",
                (
                    "mathematical equality is of rewritten lower-case strings: "
                    "12 differs from 12.0, `2 3` equals 23"
                ),
            ),
            extract=_extract_arpo_eval,
            normalize=_normalize_arpo_eval,
            grade=_grade_arpo_eval,
        ),
        Variant(
            name="squad",
            deviations=(
                (
                    "an output with neither answer tag nor box is the answer as a whole: "
                    "SQuAD has no rule for extraction"
                ),
                "punctuation goes before all else, as in arpo-train",
                (
                    "yes, no and noanswer have no rule of their own; two texts "
                    "that both normalise to nothing match exactly"
                ),
                "an answer is contained as a part of words too; mathematical equality is ours",
            ),
            extract=_extract_squad,
            normalize=normalize_squad,
            grade=lambda prediction, answers, kind: _grade_squad(
                prediction, [unwrap_text(answer) for answer in answers], kind
            ),
        ),
    )
}


# The result of a finished rollout: the environment's record, or the extracted answer, graded or judged.


RETURN = "episode_return"
"""Metric that stores an environment's return."""
JUDGE_METRICS: Final = frozenset({"num_judge_asks", "num_judge_tokens"})
"""Metrics of a judge's verdict, not of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """A finished rollout. ``turns`` is the text of all policy turns without tool results, and ``token_ids``
    their token ids if the player has them. After a fault both are None and the other fields are empty.

    ``num_tokens`` is None if a server did not report the number of generated tokens.
    """

    task: Task
    sample: int
    outcome: Outcome
    turns: tuple[str, ...] | None = None
    token_ids: tuple[tuple[int, ...], ...] | None = None
    episode_return: float = 0.0
    success: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_tool_calls: int = 0
    num_tokens: int | None = 0
    detail: str = ""

    @property
    def output(self) -> str:
        """The turns as one text, from which the answer is extracted."""
        return "".join(self.turns or ())


def from_trace(trace: Trace, sample: int) -> FinishedRollout:
    """Convert the only rollout of a trace of the rollout loop."""
    ((leaf, path),) = trace.rollouts()
    if leaf.episode_return is None:
        return FinishedRollout(task=trace.task, sample=sample, outcome=leaf.outcome, detail=leaf.detail)
    nodes = [node for node in path if node.trainable]
    return FinishedRollout(
        task=trace.task, sample=sample, outcome=leaf.outcome,
        turns=tuple(node.message.content for node in nodes),
        token_ids=tuple(node.token_ids for node in nodes),
        episode_return=leaf.episode_return, success=leaf.success, metrics=leaf.metrics,
        num_tool_calls=sum(node.metadata.get("num_tool_calls", 0) for node in path),
        num_tokens=sum(len(node.token_ids) for node in nodes),
    )  # fmt: skip


def from_collected(task: Task, sample: int, collected: Collected) -> FinishedRollout:
    """Convert a rollout of an agent behind an endpoint."""
    trajectory = collected.trajectory
    if trajectory is None:
        return FinishedRollout(task=task, sample=sample, outcome=collected.outcome, detail=collected.detail)
    turns = tuple(step.text for step in trajectory.steps)
    return FinishedRollout(
        task=task, sample=sample, outcome=collected.outcome, turns=turns,
        episode_return=trajectory.reward, success=collected.success, metrics=collected.metrics,
        num_tool_calls=collected.num_tool_calls,
        num_tokens=trajectory.num_tokens or (None if any(turns) else 0),
    )  # fmt: skip


class Grader:
    """Grades rollouts of one set of evaluation tasks; thread-safe. If ``scorer`` is None, the environment's
    record is the result.

    After ``max_faults_in_a_row`` consecutive failures, the judge gets no more requests and :meth:`check`
    raises.
    """

    def __init__(
        self,
        *,
        rules: Variant,
        kind: Kind,
        scorer: Scorer | None,
        tools: tuple[str, ...] = (),
        judge: Judge | None = None,
        max_faults_in_a_row: int = 8,
    ) -> None:
        self._rules, self._kind, self._scorer, self._tools, self._judge = rules, kind, scorer, tools, judge
        self._max_faults = max_faults_in_a_row
        self._num_faults = 0
        self._last_fault = ""
        self._fatal_error: ModelError | None = None
        self._lock = Lock()

    def grade(self, rollout: FinishedRollout) -> SampleResult:
        """The result of one rollout."""
        task, sample = rollout.task, rollout.sample
        if rollout.outcome.is_fault:
            return SampleResult(
                task_key=task.key, sample=sample, outcome=rollout.outcome, detail=rollout.detail
            )
        if self._scorer is None:
            return SampleResult(
                task_key=task.key, sample=sample, outcome=rollout.outcome, score=float(rollout.success),
                success=rollout.success, metrics={RETURN: rollout.episode_return, **rollout.metrics},
                num_tool_calls=rollout.num_tool_calls, num_tokens=rollout.num_tokens, turns=rollout.turns,
                token_ids=rollout.token_ids,
            )  # fmt: skip
        prediction = self._rules.extract(rollout.output)
        grades = self._rules.grade(prediction, task.answers, self._kind)
        metrics = {**rollout.metrics, **grades.metrics()}
        if self._tools:
            metrics["num_written_calls"] = float(
                sum(count_tag_pairs(rollout.output, name) for name in self._tools)
            )
        answer = SampleResult(
            task_key=task.key, sample=sample, outcome=Outcome.ENGINE_FAULT, answered=rollout.outcome,
            prediction=prediction, metrics=metrics, num_tool_calls=rollout.num_tool_calls,
            num_tokens=rollout.num_tokens, turns=rollout.turns, token_ids=rollout.token_ids,
        )  # fmt: skip
        if self._scorer == "judge":
            return self.judge_answer(task, answer)
        score, success = grades.score(self._scorer)
        return replace(answer, outcome=rollout.outcome, answered=None, score=score, success=success)

    def judge_answer(self, task: Task, answer: SampleResult) -> SampleResult:
        """Judge an answer whose verdict is pending. If the judge fails, the verdict stays pending and the
        answer does not count as wrong.
        """
        assert self._judge is not None and answer.answered is not None
        if self._fatal_error is not None:
            return replace(answer, detail="judge: request skipped after a fatal error")
        if self._num_faults >= self._max_faults:
            detail = f"judge: request skipped after {self._max_faults} failures in a row"
            return replace(answer, detail=detail)
        try:
            verdict = self._judge.judge(
                task.question, task.answers, answer.prediction, key=f"{task.key}/{answer.sample}"
            )
        except ModelError as error:  # ends the evaluation, but only after the finished rollouts are stored
            self._fatal_error = error
            return replace(answer, detail=f"judge: {error}")
        if verdict.num_requests:  # otherwise it was decided without the judge
            with self._lock:
                self._num_faults = self._num_faults + 1 if verdict.is_correct is None else 0
                self._last_fault = verdict.fault or self._last_fault
        judge_costs = {
            "num_judge_asks": float(verdict.num_requests),
            "num_judge_tokens": float(verdict.num_tokens),
        }
        if verdict.is_correct is None:
            return replace(answer, detail=f"judge: {verdict.fault}")
        return replace(
            answer, outcome=answer.answered, answered=None, score=float(verdict.is_correct),
            success=verdict.is_correct, metrics={**answer.metrics, **judge_costs}, detail=verdict.reply,
        )  # fmt: skip

    def check(self) -> None:
        """Raises EngineFault if the judge failed too often in a row, ModelError if it can never respond."""
        if self._fatal_error is not None:
            raise self._fatal_error
        if self._num_faults >= self._max_faults:
            raise EngineFault(
                f"the judge failed {self._max_faults} times in a row; the last: {self._last_fault}"
            )
