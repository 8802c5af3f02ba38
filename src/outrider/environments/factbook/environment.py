"""The environment ``factbook``: multi-hop questions over real data, offline, with the searches that solve
them.

Every question is solved by its scripted expert with the configured search tool, so a wrong answer is the
policy's fault.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache, partial
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from outrider.environments.base import Split, known_split, split_size
from outrider.environments.factbook.data import (
    Factbook,
    Question,
    build_questions,
    fact_passages,
    load_factbook,
)
from outrider.environments.tool_qa.environment import (
    SearchSettings,
    ToolEnvironment,
    ToolResources,
    validate_tools,
)
from outrider.environments.tool_qa.rewards import RewardConfig, render_result, stop_strings
from outrider.errors import DataError
from outrider.seeding import stream_seed
from outrider.tools.search import SearchConfig, SearchResult, SearchTool
from outrider.types import Step, Task

# Short, because every token of a prompt costs time with a small model on a CPU.
SYSTEM_PROMPT = r"Use <search>query</search> to find facts, then give <answer>\boxed{answer}</answer>."
_FIRST_THOUGHT = "Look it up."


class FactbookConfig(SearchSettings):
    """Which questions there are, and what a search returns."""

    is_closed_book: ClassVar[bool] = True

    type: Literal["factbook"] = "factbook"
    hops: tuple[int, ...] = (2,)
    """Numbers of searches that a question needs. There are many questions with 1 to 3; those with 4 or more
    are extremes and comparisons.
    """
    num_train: int | None = Field(default=None, ge=1)
    """Number of tasks of the split: the first ones; None for all. Every prefix has the forms of questions in
    the split's proportions.
    """
    num_valid: int | None = Field(default=None, ge=1)
    num_test: int | None = Field(default=None, ge=1)
    seed: int = 0
    """Seed of the order within a split; it does not change which tasks are in a split."""
    passages: Literal["fields", "facts"] = "fields"
    """Texts that are searched: the book's fields, or one line per fact of the questions."""
    tuning: bool = False
    """Split only the training countries (a third of them is ``test``), to tune without the real test tasks.
    """
    expert_thinks: bool = True
    """Whether the expert writes a thought before every call; without thoughts a turn is half as long."""
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
            raise ValueError("hops must be different numbers of at least 1")
        return tuple(sorted(hops))

    @model_validator(mode="after")
    def _solvable(self) -> "FactbookConfig":
        validate_tools(("search",), self.result_tag)
        if max(self.hops) > self.max_calls:
            raise ValueError(
                f"questions with {max(self.hops)} hops cannot be solved with max_calls = {self.max_calls}"
            )
        return self


@cache
def _book() -> Factbook:
    return load_factbook()


@cache
def _search(passages: Literal["fields", "facts"], config: SearchConfig) -> SearchTool:
    return SearchTool(fact_passages(_book()) if passages == "facts" else _book().passages, config)


@cache
def _run_search(passages: Literal["fields", "facts"], config: SearchConfig, query: str) -> SearchResult:
    return _search(passages, config).run(query)  # many questions share a search


@cache
def _split_tasks(
    split: Split,
    *,
    hops: tuple[int, ...],
    passages: Literal["fields", "facts"],
    search: SearchConfig,
    tuning: bool,
    seed: int,
    size: int | None,
) -> tuple[Task, ...]:
    """The tasks of a split: the questions for which :func:`is_solved` holds."""
    questions = [
        question for question in build_questions(_book(), split, tuning=tuning) if len(question.hops) in hops
    ]
    run = partial(_run_search, passages, search)
    solvable = [
        question for question in questions if is_solved([run(hop.query) for hop in question.hops], question)
    ]
    if not solvable:
        raise DataError(f"factbook: no question of {split!r} with hops {hops} can be solved by its expert")
    tasks = interleave([_task(question) for question in solvable], seed)
    return tuple(tasks[:size])


class FactbookEnvironment(ToolEnvironment):
    """The tasks of one Factbook and one search index, both loaded once per process."""

    Settings = FactbookConfig
    name = "factbook"
    expert_needs_shared = False

    @classmethod
    def tasks(cls, settings: FactbookConfig, split: str) -> Sequence[Task]:
        """The tasks of a split. Raises DataError if data are missing or no question is left."""
        # The settings as a whole have no hash: a judge's endpoint contains a dictionary.
        known = known_split(split, "factbook")
        return _split_tasks(
            known,
            hops=settings.hops,
            passages=settings.passages,
            search=settings.search,
            tuning=settings.tuning,
            seed=settings.seed,
            size=split_size(settings, known),
        )

    @classmethod
    def stop_strings(cls, settings: FactbookConfig) -> tuple[str, ...]:
        return stop_strings(("search",))

    @classmethod
    def open_shared(cls, settings: FactbookConfig) -> ToolResources:
        """Load data and index. Raises DataError if this fails."""
        tools = [_search(settings.passages, settings.search)]
        return ToolResources(tools=tools, settings=settings, system_prompt=settings.system_prompt)

    def expert(self) -> Sequence[Step]:
        """The gold searches with their real results, then the answer."""
        search = _search(self.settings.passages, self.settings.search)
        run = search.run_text if self.shared is None else partial(self.shared.tools.run_text, "search")
        queries, reveals = _texts(self.task, "gold_queries"), _texts(self.task, "reveals")
        thoughts = [_FIRST_THOUGHT, *(f"{fact}." for fact in reveals[:-1])]
        steps = [
            Step(
                text=f"{self._thought(thought)}<search>{query}</search>",
                observation=render_result(run(query).text, self.settings.result_tag),
            )
            for thought, query in zip(thoughts, queries, strict=True)
        ]
        last = f"{self._thought('Found it.')}<answer>\\boxed{{{self.task.answers[0]}}}</answer>"
        return (*steps, Step(text=last, observation="", is_terminal=True))

    def _thought(self, text: str) -> str:
        return f"<think>{text}</think>" if self.settings.expert_thinks else ""


def is_solved(results: Sequence[SearchResult], question: Question) -> bool:
    """Whether each search finds its evidence and shows what it must reveal. An answer that the last search
    reveals must not be shown by an earlier one, because the question would then need fewer searches.
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
    """Shuffle within each form, then merge so that every prefix has each form in its overall share (to within
    one).

    The shuffle sorts by a hash of seed and key.
    """
    forms: dict[str, list[Task]] = defaultdict(list)
    for task in sorted(tasks, key=lambda task: (stream_seed(seed, "factbook order", task.key), task.key)):
        forms[str(task.metadata["form"])].append(task)
    # Item i of a form with n tasks is placed at the fraction (i + 1/2) / n of the list.
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
