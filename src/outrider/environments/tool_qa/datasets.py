"""Question-and-answer data sets as task lists: JSONL and Parquet files and Hugging Face data sets."""

import hashlib
import importlib
import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, Literal
from uuid import UUID

from pydantic import Field, model_validator

from outrider.config import Settings, no_such_file
from outrider.environments.base import EpisodeResult, StepResult
from outrider.errors import DataError, ToolUnavailable
from outrider.plugins.imports import search_folders
from outrider.printing import plural
from outrider.records import SUFFIXES, Row, decode_arrow, number_text, read_rows
from outrider.types import Message, Task

Split = Literal["train", "valid", "test"]


class DatasetConfig(Settings):
    """Location and columns of the rows of a split. Dotted names go into nested columns
    (``reward_model.ground_truth``).
    """

    makes_tasks: ClassVar[bool] = True  # which are compared themselves, not the files that they are made of
    input_paths: ClassVar[frozenset[str]] = frozenset({"path"})

    path: Path | None = None
    """A ``.jsonl`` or ``.parquet`` file."""
    hub: str | None = None
    """A Hugging Face data set instead, such as ``openai/gsm8k``; needs the package ``datasets``."""
    hub_config: str | None = None
    """The configuration of the hub's data set, if it has several."""
    hub_split: str = "train"
    """The split of the hub's data set."""
    question: str = "question"
    """Column of the question."""
    answer: str = "answer"
    """Column of the answer: a string, a number, or a list of accepted ones. Rows that lack the column
    ``answer`` may have ``answers`` instead.
    """
    key: str | None = None
    """Column of a key that is unique in the data set; None numbers the rows."""
    answer_after: str | None = None
    """Only what follows the last occurrence of this mark is the answer (``####`` in GSM8K)."""
    blank_answers: Literal["error", "drop"] = "error"
    """Rows with a blank answer stop the run, or are left out with a warning that counts them."""
    limit: int | None = Field(default=None, ge=1)
    """Only the first rows."""

    @model_validator(mode="after")
    def _validate_source(self) -> "DatasetConfig":
        if (self.path is None) == (self.hub is None):
            raise ValueError("set exactly one of path and hub")
        return self


def load_tasks(
    config: DatasetConfig,
    *,
    setting: str = "",
    keeps_columns: bool = False,
    system_prompt: str | None = None,
) -> list[Task]:
    """The tasks of one split in file order. ``setting`` is the dotted key of ``config``, for messages.

    With ``keeps_columns``, all columns of a row are the metadata of its task, for functions that read them.
    The column ``answer`` may then be missing, null, or no text and no number: such a task has no accepted
    answers. Questions that occur more than once are reported in one line. So are, unless ``system_prompt`` is
    None, questions that are a message behind others than this system prompt, which no prompt contains.

    Raises DataError, naming file and line, for a missing or empty data set, a malformed row, a missing
    column, a blank question or answer and a duplicate key; ToolUnavailable if the hub is needed without
    its package.
    """
    if config.path is not None and config.path.suffix in SUFFIXES and not config.path.exists():
        prefix = f"{setting}.path: " if setting else ""
        raise DataError(f"{prefix}{no_such_file(config.path, search_folders())}")
    tasks: dict[str, Task] = {}
    blank: list[str] = []
    seen: dict[str, tuple[str, ...]] = {}  # the answers of each question where it occurs first
    repeated: list[str] = []
    contradicting: list[str] = []
    listed: list[str] = []
    without_context: list[str] = []
    if config.path is not None:
        rows: Iterable[Row] = read_rows(config.path)
    else:
        assert config.hub is not None
        rows = hub_rows(config.hub, config.hub_config, config.hub_split)
    name = config.path.stem if config.path is not None else f"{config.hub}-{config.hub_split}"
    for index, row in enumerate(rows):
        if config.limit is not None and index >= config.limit:
            break
        key = f"{name}-{index}" if config.key is None else _key(row, config.key)
        question = row.text(config.question).strip()
        column = answer_column(row, config.answer)
        has_answer = not keeps_columns or config.answer != "answer" or _has_answer(row, column, config)
        values = row.get(column) if has_answer else []
        answers = tuple(
            _answer(value, row, config) for value in (values if isinstance(values, list) else [values])
        )
        if has_answer and not answers:
            raise DataError(f"{row.location}: column {column!r} contains no answer")
        if isinstance(values, str) and is_list_text(values):
            listed.append(row.location)
        if system_prompt is not None and _earlier_texts(row, config.question) - {system_prompt.strip()}:
            without_context.append(row.location)
        columns = json.loads(json.dumps(row.values, default=_plain)) if keeps_columns else {}
        task = Task(key=key, question=question, answers=answers, metadata=columns)
        if not all(task.answers):
            blank.append(row.location)
            continue
        if task.key in tasks:
            raise DataError(f"{row.location}: duplicate key {task.key!r}")
        tasks[task.key] = task
        if question in seen:
            repeated.append(row.location)
            if set(seen[question]) != set(answers):
                contradicting.append(row.location)
        seen.setdefault(question, answers)
    if blank and config.blank_answers == "error":
        raise DataError(
            f"{blank[0]}: column {config.answer!r} contains a blank answer; "
            'blank_answers = "drop" leaves such rows out'
        )
    if blank:
        logging.getLogger(__name__).warning(
            "%d rows with a blank answer left out, the first at %s", len(blank), blank[0]
        )
    warn_of_list_texts(listed)
    if without_context:
        logging.getLogger(__name__).warning(
            "%s: %s messages in front of the question that are no part of the prompt, the first at %s: put a "
            "system message into environment.system_prompt", config.path or config.hub,
            plural(len(without_context), "row has", "rows have"), without_context[0],
        )  # fmt: skip
    if repeated:
        others = f"; {len(contradicting)} of them with other answers, the first at " if contradicting else ""
        logging.getLogger(__name__).warning(
            "%s: %d of %d rows repeat an earlier question, the first at %s%s%s", config.path or config.hub,
            len(repeated), len(tasks), repeated[0], others, contradicting[0] if contradicting else "",
        )  # fmt: skip
    if not tasks:
        raise DataError(f"{config.path or config.hub}: the data set is empty")
    return list(tasks.values())


def hash_tasks(tasks: Sequence[Task]) -> str:
    """SHA-256 (hex) over everything in a task list, in order: two panels are the same exactly when this
    is.
    """
    digest = hashlib.sha256()
    for task in tasks:
        record = [task.key, task.question, list(task.answers), dict(task.metadata)]
        digest.update(json.dumps(record, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def hub_rows(name: str, config: str | None, split: str, *, advice: str = "") -> Iterator[Row]:
    """Rows of a Hugging Face data set, read lazily; ``advice`` ends every message.

    Raises ToolUnavailable without the package ``datasets``, and DataError when the data set cannot be loaded.
    """
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise ToolUnavailable(
            f"{name}: the hub needs the package datasets (pip install 'outrider[hub]'){advice}"
        ) from error
    try:
        data = library.load_dataset(name, config, split=split)
        records = iter(data)
    # the library and its transports raise many kinds; all mean that the data set is not there
    except Exception as error:
        raise _unloadable(name, error, advice) from error
    features = getattr(data, "features", None)  # None for data sets without declared types
    kinds = {} if features is None else {field.name: field.type for field in features.arrow_schema}
    for index in itertools.count():
        try:
            record = next(records)
        except StopIteration:
            return
        except Exception as error:  # a broken shard fails when it is read
            raise _unloadable(name, error, advice) from error
        values = {
            key: decode_arrow(value, kinds.get(key), is_json_decoded=True) for key, value in record.items()
        }
        yield Row(location=f"{name}:row {index}", values=values)


def _unloadable(name: str, error: Exception, advice: str) -> DataError:
    reason = (str(error) or repr(error)).splitlines()[0].rstrip(".")
    return DataError(f"{name}: cannot load: {reason}{advice}")


def answer_column(row: Row, column: str) -> str:
    """``answers`` if a row has this column and lacks ``answer``; else the named column."""
    is_other = (
        column == "answer" and row.values.get("answer") is None and row.values.get("answers") is not None
    )
    return "answers" if is_other else column


def _earlier_texts(row: Row, column: str) -> set[str]:
    """The texts of the messages in front of the one that a name such as ``prompt.1.content`` selects."""
    selected = re.fullmatch(r"(.+)\.(\d+)\.content", column)
    if selected is None or column in row.values:  # a flattened table has dots in its names
        return set()
    messages = row.get(selected[1])
    earlier = messages[: int(selected[2])] if isinstance(messages, list) else []
    return {
        str(item["content"]).strip() for item in earlier if isinstance(item, dict) and item.get("content")
    }


def _has_answer(row: Row, column: str, config: DatasetConfig) -> bool:
    """Whether a row has a value that can be an accepted answer, or a null that leaves the row out."""
    value = row.values.get(column)
    if value is None:
        return column in row.values and config.blank_answers == "drop"
    values = value if isinstance(value, list) else [value]
    types = (str, int, float, Decimal)
    return bool(values) and all(isinstance(item, types) and not isinstance(item, bool) for item in values)


def warn_of_list_texts(locations: Sequence[str]) -> None:
    """Warn of answers at these locations for which :func:`is_list_text` is true."""
    if locations:
        logging.getLogger(__name__).warning(
            "%s the text of a JSON list, the first at %s: each is one answer; several accepted answers are a "
            "list and not text", plural(len(locations), "answer is", "answers are"), locations[0],
        )  # fmt: skip


def is_list_text(text: str) -> bool:
    """Whether a text is a JSON list of texts, as some tables store several accepted answers."""
    if not text.lstrip().startswith("["):
        return False
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(values) and all(isinstance(value, str) for value in values)


def _plain(value: Any) -> float | str:
    """A value of a table that JSON does not have: a decimal is a number, bytes, dates and UUIDs are text. Of
    others, such as images, only the type is kept.
    """
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, bytes | date | time | timedelta | UUID):
        return str(value)
    return f"<{type(value).__name__}>"


def _key(row: Row, column: str) -> str:
    """Return the key of a row. Raises DataError if it is neither text nor an integer."""
    value = row.get(column)
    if isinstance(value, float | Decimal) and math.isfinite(value) and value == int(value):
        value = int(value)  # of a column with missing values, or a decimal
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise DataError(
            f"{row.location}: the key in column {column!r} must be text or an integer, got {value!r}"[:300]
        )
    return str(value)


def _answer(value: Any, row: Row, config: DatasetConfig) -> str:
    if value is None and config.blank_answers == "drop":
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):  # Decimal: of Parquet
        raise DataError(
            f"{row.location}: column {config.answer!r} must contain text or numbers, got {value!r}"[:300]
            + ('; blank_answers = "drop" leaves such rows out' if value is None else "")
        )
    text: str = value if isinstance(value, str) else ""
    if isinstance(value, int) or (not isinstance(value, str) and math.isfinite(value)):  # NaN: missing
        text = number_text(value)
    if config.answer_after is not None:
        _, mark, text = text.rpartition(config.answer_after)
        if not mark:
            raise DataError(
                f"{row.location}: column {config.answer!r} lacks the mark {config.answer_after!r}"
            )
    return text.strip()


# One question, one reply, no tools: episodes of evaluations without an environment.


class QuestionEnvironment:
    """One question and one reply. The return is always 0, because the evaluation grades the reply.

    ``extract`` takes the answer out of a reply; a reply without one is invalid.
    """

    def __init__(self, *, prompt: Sequence[Message], extract: Callable[[str], str]) -> None:
        self._prompt = prompt
        self._extract = extract

    def reset(self, seed: int) -> Sequence[Message]:
        """The prompt. Nothing is drawn, so the seed is not used."""
        return self._prompt

    def step(self, message: Message) -> StepResult:
        """Any reply ends the episode."""
        return StepResult(message=None, done=True, invalid=not self._extract(message.content).strip())

    def result(self) -> EpisodeResult:
        """A return of 0: there is no reward here."""
        return EpisodeResult(episode_return=0.0, success=False)

    def close(self) -> None:
        """Nothing to release."""


class QuestionFactory:
    """Makes environments; ``prompt`` returns the messages of a task."""

    def __init__(self, *, prompt: Callable[[Task], Sequence[Message]], extract: Callable[[str], str]) -> None:
        self._prompt = prompt
        self._extract = extract

    def __call__(self, task: Task) -> QuestionEnvironment:
        """A fresh environment for one reply."""
        return QuestionEnvironment(prompt=self._prompt(task), extract=self._extract)

    def close(self) -> None:
        """Nothing is shared."""
