r"""Task sets by name, from the Hugging Face hub or from a file of the user's, and the panel that an
evaluation freezes.

A name stands for a data set, its columns, its metric and its prompt. The metric is the one that ARPO reports
(arXiv 2507.19849, section 4): token F1 for the Wikipedia questions, a judge for open ones, mathematical
equality for mathematics.
"""

import base64
import binascii
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Final

from outrider.environments.tool_qa.datasets import answer_column, hash_tasks, hub_rows
from outrider.errors import ConfigError, DataError
from outrider.evals.benchmark.extraction import Kind, Scorer, number_after_mark
from outrider.near import did_you_mean
from outrider.records import SUFFIXES, Row, read_rows
from outrider.types import Json, Message, Task

PROMPTS: Final[Mapping[Kind, str]] = {
    "math": r"Solve the problem step by step. End with the final answer alone in \boxed{...}.",
    "qa": (
        r"Answer the question. Think it through first, then end with the shortest "
        r"exact answer alone in \boxed{...}."
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """Where a data set is on the hub."""

    name: str
    config: str | None = None
    split: str = "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Columns of one known format; dotted names go into nested records."""

    question: str = "question"
    answer: str = "answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A named task set. ``columns`` are the known formats, the first that fits the first row is taken.

    ``gold_behind_mark``: the answer is GSM8K's number behind ``####``. ``attachment`` names a column whose
    rows need a file and are left out; ``canary`` one that holds the key of encrypted rows; ``level`` one that
    goes into the tasks' metadata; ``aliases`` one of further accepted answers, where a row has it. ``access``
    tells what a user has to do to get the data.
    """

    name: str
    kind: Kind
    scorer: Scorer
    columns: tuple[Columns, ...]
    hub: Hub | None = None
    gold_behind_mark: bool = False
    attachment: str | None = None
    canary: str | None = None
    level: str | None = None
    aliases: str | None = None
    access: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTasks:
    """Tasks of an evaluation in a fixed order, and the hash of all that is in them.

    ``num_left_out`` counts rows that need an attachment.
    """

    benchmark: Benchmark
    tasks: tuple[Task, ...]
    panel_hash: str
    num_left_out: int = 0


def _wiki(name: str, config: str, split: str, *, aliases: str | None = None) -> Benchmark:
    hub = Hub(name="RUC-NLPIR/FlashRAG_datasets", config=config, split=split)
    return Benchmark(
        name=name,
        kind="qa",
        scorer="f1",
        hub=hub,
        columns=(Columns(answer="golden_answers"), Columns()),
        aliases=aliases,
    )


_PROBLEM: Final = Columns(question="problem")
_GAIA_ACCESS: Final = (
    "GAIA is gated: accept its terms at huggingface.co/datasets/gaia-benchmark/GAIA and log in "
    "(hf auth login, or HF_TOKEN), or give your copy as gaia=FILE. Only its validation split has answers"
)
_BROWSECOMP_ACCESS: Final = (
    "BrowseComp must not be published as plain text: keep traces of it to yourself. Without the hub give "
    "your copy as browsecomp=FILE (.jsonl or .parquet with the columns problem, answer and canary)"
)

BENCHMARKS: Final[Mapping[str, Benchmark]] = {
    task_set.name: task_set
    for task_set in (
        Benchmark(
            name="gsm8k", kind="math", scorer="math", hub=Hub(name="openai/gsm8k", config="main"),
            columns=(Columns(),), gold_behind_mark=True,
        ),
        Benchmark(
            name="math500", kind="math", scorer="math", hub=Hub(name="HuggingFaceH4/MATH-500"),
            columns=(_PROBLEM, Columns()),
        ),
        Benchmark(
            name="aime24", kind="math", scorer="math", hub=Hub(name="HuggingFaceH4/aime_2024", split="train"),
            columns=(_PROBLEM, Columns()),
        ),
        Benchmark(name="aime25", kind="math", scorer="math", hub=Hub(name="math-ai/aime25"),
                columns=(_PROBLEM, Columns())),
        _wiki("hotpotqa", "hotpotqa", "dev"),
        _wiki("2wiki", "2wikimultihopqa", "dev"),
        _wiki("musique", "musique", "dev", aliases="answer_aliases"),
        _wiki("bamboogle", "bamboogle", "test"),
        Benchmark(name="simpleqa", kind="qa", scorer="judge", hub=Hub(name="basicv8vc/SimpleQA"),
                columns=(_PROBLEM, Columns())),
        Benchmark(
            name="webwalkerqa", kind="qa", scorer="judge", hub=Hub(name="callanwu/WebWalkerQA", split="main"),
            columns=(Columns(),),
        ),
        Benchmark(
            name="gaia", kind="qa", scorer="judge",
            hub=Hub(name="gaia-benchmark/GAIA", config="2023_all", split="validation"),
            columns=(Columns(question="Question", answer="Final answer"), Columns()),
            attachment="file_name", level="Level", access=_GAIA_ACCESS,
        ),
        Benchmark(
            name="browsecomp", kind="qa", scorer="judge", hub=Hub(name="smolagents/browse_comp"),
            columns=(_PROBLEM, Columns()), canary="canary", access=_BROWSECOMP_ACCESS,
        ),
    )
}  # fmt: skip
_OTHER_NAMES: Final = {"2wikimultihopqa": "2wiki", "aime2024": "aime24", "aime2025": "aime25"}
_ANY_FILE: Final = (
    Columns(),
    _PROBLEM,
    *(
        Columns(question=question, answer=answer)
        for answer in ("answers", "golden_answers")
        for question in ("question", "problem")
    ),
)


def load_benchmark(name_or_path: str, *, limit: int | None = None, others: Sequence[str] = ()) -> EvalTasks:
    """A panel from ``gsm8k`` (the hub), ``gsm8k=FILE`` (the set's rules on a file of one's own) or ``FILE``
    (questions, F1).

    A name goes as papers write it, too (``MATH-500``). ``limit`` takes the first tasks; ``others`` are names
    beside those of task sets, for the message about an unknown one. Raises ConfigError for an unknown name or
    a limit below 1, ToolUnavailable without the package ``datasets`` where the hub is needed, and DataError,
    naming the row, for data that are missing, gated, empty or malformed.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"a panel needs at least one task, not {limit}")
    benchmark, path = find_benchmark(name_or_path, others=others)
    rows = read_rows(path) if path is not None else _hub_rows(benchmark)
    columns = _columns(benchmark, rows)
    usable = [
        (index, row)
        for index, row in enumerate(rows)
        if benchmark.attachment is None or not row.values.get(benchmark.attachment)
    ]
    tasks = tuple(_task(benchmark, columns, row, index) for index, row in usable[:limit])
    if not tasks:
        raise DataError(f"{name_or_path}: every task needs an attachment, and none can be given")
    return EvalTasks(
        benchmark=benchmark, tasks=tasks, panel_hash=hash_tasks(tasks), num_left_out=len(rows) - len(usable)
    )


def prompt_messages(benchmark: Benchmark, task: Task) -> tuple[Message, Message]:
    """The prompt of an evaluation without tools; with tools the environment makes its own."""
    return Message(role="system", content=PROMPTS[benchmark.kind]), Message(
        role="user", content=task.question
    )


def find_benchmark(name_or_path: str, *, others: Sequence[str] = ()) -> tuple[Benchmark, Path | None]:
    """The task set that a name stands for, and the file of the user's, where one is given; nothing is read.

    Raises ConfigError as :func:`load_benchmark` does.
    """
    written, equals, file = name_or_path.partition("=")
    bare = re.sub(r"[-_ ]", "", written.lower())
    name = _OTHER_NAMES.get(bare, bare)
    if name in BENCHMARKS and (file or not equals):
        return BENCHMARKS[name], Path(file) if equals else None
    path = Path(name_or_path)
    known = (*BENCHMARKS, *others)
    if equals and file and not path.exists():
        suggestion = did_you_mean(written, BENCHMARKS)
        raise ConfigError(
            f"unknown task set {written!r} in {name_or_path!r}{suggestion}; NAME=FILE takes the rules of one "
            f"of {', '.join(BENCHMARKS)}, and questions of your own go as FILE alone"
        )
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"unknown task set {name_or_path!r}{did_you_mean(written, known)}; "
            f"give one of {', '.join(known)}, or a file ({', '.join(SUFFIXES)})"
        )
    return Benchmark(name=path.stem, kind="qa", scorer="f1", columns=_ANY_FILE), path


def _hub_rows(benchmark: Benchmark) -> list[Row]:
    hub = benchmark.hub
    assert hub is not None  # only what is a file of the user's has none
    advice = f". {benchmark.access}" if benchmark.access else f"; or give {benchmark.name}=FILE"
    rows = list(hub_rows(hub.name, hub.config, hub.split, advice=advice))
    if not rows:
        raise DataError(f"{hub.name}: the data set is empty")
    return rows


def _columns(benchmark: Benchmark, rows: Sequence[Row]) -> Columns:
    """The first known format whose columns the first row has."""
    for columns in benchmark.columns:
        try:
            rows[0].get(columns.question), rows[0].get(columns.answer)
        except DataError:
            continue
        return columns
    expected = " or ".join(
        f"{candidate.question!r} and {candidate.answer!r}" for candidate in benchmark.columns
    )
    available = ", ".join(sorted(rows[0].values))
    raise DataError(
        f"{rows[0].location}: {benchmark.name} needs the columns {expected}; the row has {available}"
    )


def _task(benchmark: Benchmark, columns: Columns, row: Row, index: int) -> Task:
    question = row.text(columns.question).strip()
    value = row.get(answer_column(row, columns.answer))
    aliases = row.values.get(benchmark.aliases) if benchmark.aliases is not None else None
    values = [
        *(value if isinstance(value, list) else [value]),
        *(aliases if isinstance(aliases, list) else []),
    ]
    answers = list(dict.fromkeys(_answers(values, row, columns)))
    if benchmark.gold_behind_mark:
        answers = [_number(answer, row) for answer in answers]
    task = Task(key=f"{benchmark.name}-{index}", question=question, answers=tuple(answers))
    if benchmark.canary is not None and benchmark.canary in row.values:
        key = row.text(benchmark.canary)
        task = replace(
            task,
            question=_decrypt(question, key, row),
            answers=tuple(_decrypt(encrypted, key, row) for encrypted in answers),
        )
    if benchmark.level is not None and benchmark.level in row.values:
        task = replace(task, metadata={"level": str(row.get(benchmark.level))})
    return task


def _answers(values: Sequence[Json], row: Row, columns: Columns) -> Iterator[str]:
    """Texts of the accepted answers; a blank one among others is passed over."""
    texts: list[str] = []
    for value in values:
        if isinstance(value, Decimal) and value.is_finite():  # of Parquet
            texts.append(str(value))
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, str | int | float)
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            raise DataError(
                f"{row.location}: column {columns.answer!r} must hold text or numbers, got {value!r}"[:300]
            )
        texts.append(str(value).strip())
    if not any(texts):
        raise DataError(f"{row.location}: column {columns.answer!r} holds no answer")
    yield from filter(None, texts)


def _number(solution: str, row: Row) -> str:
    number = number_after_mark(solution)
    if number is None:
        raise DataError(f"{row.location}: the answer lacks a number behind '#### '")
    return number


def _decrypt(text: str, canary: str, row: Row) -> str:
    """BrowseComp's cipher: base64 of the text XOR the canary's SHA-256, repeated."""
    key = hashlib.sha256(canary.encode()).digest()
    try:
        cipher = base64.b64decode(text, validate=True)
        return bytes(byte ^ key[position % len(key)] for position, byte in enumerate(cipher)).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError) as error:
        raise DataError(f"{row.location}: cannot decrypt with the row's canary") from error
