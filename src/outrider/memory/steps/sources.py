"""Off-policy trajectories from files of chats for the Step-Trace Buffer and as demonstrations.

A record is ``{question, messages: [{role, content}], reward, task_key?, agent?, trajectory_id?,
num_tokens?}``; :mod:`outrider.memory.steps.chats` reads the other usual forms. Messages up to the first of
the assistant are the prompt; each message of the assistant is a step; what follows it, up to the next one, is
its observation.
"""

import csv
import hashlib
import importlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow
import pyarrow.parquet

from outrider.errors import DataError, ToolUnavailable
from outrider.memory.steps.chats import COLUMNS, read_chat, turn_text
from outrider.types import Message, Step, Trajectory

ANSWER_MARKS = ("<answer>", "\\boxed{")
SUFFIXES: Final = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
_UNREADABLE: Final = (
    OSError,
    pyarrow.ArrowException,
    ValueError,
    OverflowError,
    TypeError,
    MemoryError,
    RecursionError,
    KeyError,
)
_BOM: Final = b"\xef\xbb\xbf"
_OWN_COLUMNS: Final = COLUMNS | {"reward", "task_key", "agent", "trajectory_id", "num_tokens"}
_BOX = re.compile(r"\\boxed\b")  # in whatever form the scorer reads it


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Trajectories of a file in its order, the question of each task key (for building keys), and what was
    skipped.

    ``problems`` names file, line and reason of every malformed record that was skipped. ``dropped`` counts by
    name what the trajectories have no place for: columns that are not read, and fields of messages.
    """

    trajectories: tuple[Trajectory, ...]
    questions: Mapping[str, str]
    problems: tuple[str, ...]
    dropped: Mapping[str, int] = field(default_factory=dict, compare=False)


def import_trajectories(
    path: str | Path,
    *,
    on_malformed: Literal["error", "skip"] = "error",
    agent: str = "imported",
    answer_marks: Sequence[str] = ANSWER_MARKS,
) -> Imported:
    """Read a file of chat trajectories: JSON lines, a JSON array, Parquet, CSV, or a folder that ``datasets``
    has saved.

    A missing ``task_key`` is a digest of the question, a missing ``trajectory_id`` a digest of the content,
    so that importing a file again finds the same trajectories. The last step of a trajectory and every step
    with an answer mark are terminal.

    Raises :class:`~outrider.errors.DataError` naming file and line (elsewhere: record, from 1) for a
    malformed record unless ``on_malformed`` is ``skip``, and for a file that is missing, unreadable, empty or
    without any good record.
    """
    path = Path(path)
    trajectories: list[Trajectory] = []
    questions: dict[str, str] = {}
    problems: list[str] = []
    dropped: Counter[str] = Counter()
    for number, read in _records(path):
        try:
            question, trajectory, left_out = _trajectory(read(), agent, answer_marks)
            if questions.setdefault(trajectory.task_key, question) != question:
                raise ValueError(f"task {trajectory.task_key!r} has another question than before")
        except (ValueError, OverflowError, RecursionError, TypeError) as error:
            problem = f"{path}:{number}: {' '.join(str(error).split())}"
            if on_malformed == "error":
                raise DataError(problem) from error
            problems.append(problem)
        else:
            trajectories.append(trajectory)
            dropped += left_out
    if not trajectories:
        raise DataError(f"{path}: no usable trajectory ({len(problems)} malformed)")
    return Imported(
        trajectories=tuple(trajectories),
        questions=questions,
        problems=tuple(problems),
        dropped=dict(sorted(dropped.items())),
    )


@dataclass(frozen=True, slots=True)
class _JsonLine:
    """One line, parsed on demand so that its errors are raised where they are named."""

    line: bytes

    def __call__(self) -> object:
        return _parsed(self.line)


@dataclass(frozen=True, slots=True)
class _Value:
    """A record that is read already."""

    value: object

    def __call__(self) -> object:
        return self.value


def _parsed(data: bytes) -> object:
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a part of a table, read on demand as well: text that is not UTF-8 and dates out of range
    show only then. A null is a missing value, in nested columns too: a table gives every record all columns.
    """

    table: pyarrow.RecordBatch
    index: int

    def __call__(self) -> object:
        row = self.table.slice(self.index, 1)
        try:
            (values,) = row.to_pylist()
        except pyarrow.ArrowNotImplementedError:
            values = self._readable(row)
        except (pyarrow.ArrowException, ValueError, OverflowError) as error:
            raise ValueError(f"cannot be read: {error}") from error
        except Exception:  # a type that Python does not have here, such as an unknown time zone
            values = self._readable(row)
        return _without_nulls(values)

    def _readable(self, row: pyarrow.RecordBatch) -> dict[str, object]:
        """The columns that Python can have. Of a column that nobody reads only its name is left."""
        values: dict[str, object] = {}
        for name, column in zip(row.schema.names, row.columns, strict=True):
            try:
                (values[name],) = column.to_pylist()
            except Exception as error:
                if name in _OWN_COLUMNS:
                    raise ValueError(
                        f"column {name!r} of the type {column.type} cannot be read: {error}"
                    ) from error
                values[name] = f"of the type {column.type}"
        return values


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _records(path: Path) -> Iterator[tuple[int, Callable[[], object]]]:
    suffix = path.suffix.lower()
    try:
        if path.is_dir():
            yield from _saved_dataset(path)
        elif suffix in (".jsonl", ".ndjson", ".json"):
            yield from _json_records(path)
        elif suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as table:
                yield from _iter_rows(table.iter_batches(batch_size=256))
        elif suffix == ".csv":
            yield from _csv_records(path)
        else:
            raise DataError(f"{path}: must end in one of {', '.join(SUFFIXES)}")
    except DataError:
        raise
    except _UNREADABLE as error:
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error


def _iter_rows(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[tuple[int, Callable[[], object]]]:
    number = 0
    for batch in batches:
        for index in range(batch.num_rows):
            number += 1
            yield number, _Row(batch, index)


def _json_records(path: Path) -> Iterator[tuple[int, Callable[[], object]]]:
    """One record a line, or an array of records."""
    with path.open("rb") as file:
        begin = file.read(4096).removeprefix(_BOM).lstrip()
        file.seek(0)
        if begin[:1] == b"[":
            yield from _array(file.read().removeprefix(_BOM))
            return
        if path.suffix.lower() == ".json" and (whole := _single_object(file.read().removeprefix(_BOM))):
            yield 1, _Value(whole)
            return
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(_BOM)
            if line.strip():
                yield number, _JsonLine(line)


def _array(data: bytes) -> Iterator[tuple[int, Callable[[], object]]]:
    try:
        records = _parsed(data)
    except (ValueError, RecursionError) as error:
        problem = str(error)

        def fails() -> object:
            raise ValueError(problem)

        yield 1, fails
        return
    assert isinstance(records, list)  # of what begins with a bracket
    for number, record in enumerate(records, start=1):
        yield number, _Value(record)


def _single_object(data: bytes) -> dict[str, object] | None:
    """The object that is the whole file, where it is no file of lines."""
    try:
        value = _parsed(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _csv_records(path: Path) -> Iterator[tuple[int, Callable[[], object]]]:
    """Rows of text; empty cells are missing values."""
    limit = csv.field_size_limit(2**31 - 1)  # of this process: a chat is longer than csv's own limit
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            if not reader.fieldnames:
                raise DataError(
                    f"{path}: the file is empty. A file of trajectories must end in one of "
                    f"{', '.join(SUFFIXES)}; a CSV file begins with the names of its columns"
                )
            for number, row in enumerate(reader, start=1):
                cells = {key: cell for key, cell in row.items() if isinstance(key, str) and cell}
                yield number, _Value(cells)
    except csv.Error as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    finally:
        csv.field_size_limit(limit)


def _saved_dataset(path: Path) -> Iterator[tuple[int, Callable[[], object]]]:
    """A folder of ``Dataset.save_to_disk``."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(folder.name for folder in path.iterdir() if (folder / "state.json").is_file())
        raise DataError(f"{path} holds the splits {', '.join(splits)}: name the folder of one of them")
    if not (path / "state.json").is_file():
        raise DataError(f"{path} is a folder that datasets has not saved: name a file")
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ToolUnavailable(f"{path}: needs the package datasets (pip install 'outrider[hub]')") from error
    try:
        table = datasets.load_from_disk(str(path)).with_format("arrow")
        batches = (batch for part in table.iter(256) for batch in part.to_batches())
    except Exception as error:  # the library raises many kinds
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    yield from _iter_rows(batches)


def _trajectory(
    record: object, agent: str, answer_marks: Sequence[str]
) -> tuple[str, Trajectory, Counter[str]]:
    if not isinstance(record, dict):
        raise ValueError(f"a record is an object, not {type(record).__name__}")
    chat = read_chat(record)
    reward = _reward(record)
    num_tokens = _count(record.get("num_tokens"))
    question = chat.question
    prompt, steps, texts = _split(chat.messages, answer_marks)
    agent = _text(record, "agent", agent)
    task_key = _text(record, "task_key", question_key(question))
    # Everything that tells trajectories apart: a second import has to find the same ids.
    content = json.dumps([task_key, agent, reward, texts])
    trajectory = Trajectory(
        trajectory_id=_text(record, "trajectory_id", f"{task_key}-{_digest(content)}"),
        task_key=task_key,
        agent=agent,
        prompt=prompt
        if any(m.role == "user" for m in prompt)
        else (*prompt, Message(role="user", content=question)),
        steps=steps,
        reward=reward,
        num_tokens=num_tokens,
    )
    unread = Counter(f"column {str(key)!r}" for key in record if key not in _OWN_COLUMNS)
    return question, trajectory, chat.dropped + unread


_WORDS: Final[Mapping[str, float]] = {
    "true": 1.0, "yes": 1.0, "correct": 1.0, "success": 1.0, "pass": 1.0,
    "false": 0.0, "no": 0.0, "incorrect": 0.0, "failure": 0.0, "fail": 0.0,
}  # fmt: skip


def _reward(record: Mapping[str, Any]) -> float:
    """A number, a truth value, or either of them as text."""
    if "reward" not in record:
        raise ValueError(
            "no column 'reward' (the outcome of the trajectory, such as 1.0); the record has the columns "
            f"{', '.join(map(str, record))}"
        )
    value = record["reward"]
    if isinstance(value, str):
        word = value.strip().lower()
        try:
            reward = _WORDS[word] if word in _WORDS else float(word)
        except ValueError:
            reward = math.nan
    else:
        is_number = isinstance(value, int | float | Decimal)
        if is_number and not math.isfinite(value):  # an int may be too large for that
            is_number = False
        reward = float(value) if is_number else math.nan
    if not math.isfinite(reward):
        raise ValueError(f"'reward' must be a finite number, not {value!r}")
    return reward


def _count(value: Any) -> int:
    """A number of tokens; 0 where it is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return 0
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
        value = int(value)
    if isinstance(value, float | Decimal) and math.isfinite(value) and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"'num_tokens' must be a count, not {value!r}")
    return value


def _text(record: Mapping[str, object], key: str, default: str) -> str:
    value = record.get(key, default)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be text, not {type(value).__name__}")
    value.encode()  # a name is compared and stored; texts are repaired where they are stored
    return value


def _split(
    messages: Sequence[Message], answer_marks: Sequence[str]
) -> tuple[tuple[Message, ...], tuple[Step, ...], list[tuple[str, str]]]:
    """Prompt, steps, and all messages as role and text."""
    starts = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not starts:
        raise ValueError("no message of the assistant")
    if any(message.role == "system" for message in messages[starts[0] :]):
        raise ValueError("a system message after the first message of the assistant")
    texts = [turn_text(message) if message.role == "assistant" else message.content for message in messages]
    steps = []
    for start, end in zip(starts, [*starts[1:], len(messages)], strict=True):
        text = texts[start]
        is_terminal = (
            start == starts[-1] or any(mark in text for mark in answer_marks) or _BOX.search(text) is not None
        )
        steps.append(Step(text=text, observation="\n".join(texts[start + 1 : end]), is_terminal=is_terminal))
    roles_and_texts: list[tuple[str, str]] = [
        (message.role, text) for message, text in zip(messages, texts, strict=True)
    ]
    return tuple(messages[: starts[0]]), tuple(steps), roles_and_texts


def question_key(question: str) -> str:
    """The task key of a record that has none."""
    return f"question-{_digest(question)}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
