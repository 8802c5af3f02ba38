"""The ``factbook`` family: multi-hop questions over real data, offline, each solvable by searches that are
known.

Every kept question has been solved by its scripted expert on the configured search tool, so a wrong answer is
the policy's.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from outrider.environments.factbook.data import Factbook, load_factbook
from outrider.environments.factbook.questions import Question, build_questions, fact_passages
from outrider.environments.tool_qa.environment import EpisodeConfig, ToolEnvironmentFactory
from outrider.environments.tool_qa.rewards import RewardConfig, render_result, stop_strings
from outrider.errors import DataError
from outrider.seeding import stream_seed
from outrider.tools.search import SearchConfig, SearchResult, SearchTool
from outrider.types import Step, Task

SPLITS = ("train", "valid", "test")
# Short: a small model on a CPU pays for every token of every prompt.
SYSTEM_PROMPT = r"Use <search>query</search> to find facts, then give <answer>\boxed{answer}</answer>."
_FIRST_THOUGHT = "Look it up."


class FactbookConfig(EpisodeConfig):
    """Which questions, how many, and what a search shows."""

    is_closed_book: ClassVar[bool] = True

    type: Literal["factbook"] = "factbook"
    hops: tuple[int, ...] = (2,)
    """Numbers of searches that a question needs (1 to 3 are plentiful; from 4 on, extremes and
    comparisons).
    """
    num_train: int | None = Field(default=None, ge=1)
    """Only the first tasks of the split; None keeps all. Every prefix holds the forms in the split's
    proportions.
    """
    num_valid: int | None = Field(default=None, ge=1)
    """The same for ``valid``."""
    num_test: int | None = Field(default=None, ge=1)
    """The same for ``test``."""
    seed: int = 0
    """Order of the tasks within a split; it moves nothing between splits."""
    passages: Literal["fields", "facts"] = "fields"
    """Texts that a search covers: the book's fields as they are, or one line per fact that questions ask."""
    tuning: bool = False
    """Splits of the training countries alone (a third of them plays ``test``): to tune without touching the
    test panel.
    """
    expert_thinks: bool = True
    """Whether the expert writes a thought in front of every call; without it a turn is half as long."""
    search: SearchConfig = SearchConfig(top_k=2, max_chars=220)
    reward: RewardConfig = RewardConfig(
        answer="em", format_penalty=0.0, require_think=False, multi_tool_bonus=0.0
    )
    system_prompt: str = SYSTEM_PROMPT
    """System prompt; empty for none."""

    @field_validator("hops")
    @classmethod
    def _sorted(cls, hops: tuple[int, ...]) -> tuple[int, ...]:
        if not hops or min(hops) < 1 or len(set(hops)) < len(hops):
            raise ValueError("hops must hold different numbers from 1 on")
        return tuple(sorted(hops))

    @model_validator(mode="after")
    def _solvable(self) -> "FactbookConfig":
        if max(self.hops) > self.max_calls:
            raise ValueError(
                f"questions with {max(self.hops)} hops cannot be solved with max_calls = {self.max_calls}"
            )
        return self


class FactbookTaskSet:
    """Tasks, environment and scripted expert over one Factbook and one search index, both loaded once."""

    Settings = FactbookConfig
    name = "factbook"
    protocol = "inline"
    stateful = False

    def __init__(self, config: FactbookConfig) -> None:
        self.config = config
        self.stop = stop_strings(("search",))
        self._tasks: dict[str, tuple[Task, ...]] = {}

    @cached_property
    def _factbook(self) -> Factbook:
        return load_factbook()

    @cached_property
    def _search(self) -> SearchTool:
        facts = self.config.passages == "facts"
        return SearchTool(
            fact_passages(self._factbook) if facts else self._factbook.passages, self.config.search
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """The frozen list of a split. Raises DataError for an unknown split, missing data or when nothing is
        left.
        """
        if split not in SPLITS:
            raise DataError(f"factbook: unknown split {split!r}, expected one of {', '.join(SPLITS)}")
        if split not in self._tasks:
            built = build_questions(self._factbook, split, tuning=self.config.tuning)
            questions = [question for question in built if len(question.hops) in self.config.hops]
            solvable = self._solvable(questions)
            if not solvable:
                raise DataError(
                    f"factbook: no question of {split!r} with hops "
                    f"{self.config.hops} can be solved by its expert"
                )
            limits = {
                "train": self.config.num_train,
                "valid": self.config.num_valid,
                "test": self.config.num_test,
            }
            tasks = interleave([_task(question) for question in solvable], self.config.seed)
            self._tasks[split] = tuple(tasks[: limits[split]])
        return self._tasks[split]

    def make(self) -> ToolEnvironmentFactory:
        """Load data and index; raises DataError when they cannot be."""
        return ToolEnvironmentFactory(
            tools=[self._search], config=self.config, system_prompt=self.config.system_prompt
        )

    def close(self) -> None:
        """Nothing is held."""

    def expert(self, task: Task, seed: int) -> Sequence[Step]:
        """The gold searches with their real results, then the answer. Nothing is drawn, so the seed is not
        used.
        """
        queries, reveals = _texts(task, "gold_queries"), _texts(task, "reveals")
        thoughts = [_FIRST_THOUGHT, *(f"{fact}." for fact in reveals[:-1])]
        steps = [
            Step(
                text=f"{self._thought(thought)}<search>{query}</search>",
                observation=render_result(self._search.run(query).text),
            )
            for thought, query in zip(thoughts, queries, strict=True)
        ]
        last = f"{self._thought('Found it.')}<answer>\\boxed{{{task.answers[0]}}}</answer>"
        return (*steps, Step(text=last, observation="", is_terminal=True))

    def _thought(self, text: str) -> str:
        return f"<think>{text}</think>" if self.config.expert_thinks else ""

    def _solvable(self, questions: Sequence[Question]) -> list[Question]:
        """Questions whose searches find their evidence and show what the next step needs, and not the answer
        too early.
        """
        memo: dict[str, SearchResult] = {}
        for question in questions:
            for hop in question.hops:
                if hop.query not in memo:
                    memo[hop.query] = self._search.run(hop.query)
        return [
            question
            for question in questions
            if is_solved([memo[hop.query] for hop in question.hops], question)
        ]


def is_solved(results: Sequence[SearchResult], question: Question) -> bool:
    """Whether each hop's result holds its evidence and shows what it must reveal, while an answer that the
    last hop reveals is not shown by an earlier one (or the question would need fewer hops than it says).
    """
    for hop, result in zip(question.hops, results, strict=True):
        if (
            hop.evidence not in {passage.passage_id for passage in result.passages}
            or hop.reveals not in result.text
        ):
            return False
    is_last_revealed = question.answer == question.hops[-1].reveals
    return not (is_last_revealed and any(question.answer in result.text for result in results[:-1]))


def interleave(tasks: Sequence[Task], seed: int) -> list[Task]:
    """Shuffle within each form, then merge so that every prefix holds each form in its overall share (to
    within one).

    The shuffle sorts by a hash of seed and key, so that it is the same everywhere.
    """
    forms: dict[str, list[Task]] = defaultdict(list)
    for task in sorted(tasks, key=lambda task: (stream_seed(seed, "factbook order", task.key), task.key)):
        forms[str(task.metadata["form"])].append(task)
    # Item i of a form with n tasks belongs at the share (i + 1/2) / n of the list.
    placed = [
        ((2 * i + 1) / (2 * len(group)), form, task)
        for form, group in forms.items()
        for i, task in enumerate(group)
    ]
    return [task for _, _, task in sorted(placed, key=lambda item: item[:2])]


def _task(question: Question) -> Task:
    return Task(
        key=f"factbook/{question.form}/{question.subject}",
        question=question.text,
        answers=(question.answer,),
        metadata={
            "form": question.form,
            "hops": len(question.hops),
            "entities": list(question.entities),
            "evidence": [hop.evidence for hop in question.hops],
            "gold_queries": [hop.query for hop in question.hops],
            "reveals": [hop.reveals for hop in question.hops],
        },
    )


def _texts(task: Task, field: str) -> list[str]:
    value = task.metadata[field]
    assert isinstance(value, list)
    return [str(item) for item in value]
