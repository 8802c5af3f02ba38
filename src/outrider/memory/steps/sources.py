"""Off-policy trajectories from files of chats (JSONL or Parquet) for the Step-Trace Buffer.

A record is ``{question, messages: [{role, content}], reward, task_key?, agent?, trajectory_id?,
num_tokens?}``. Messages up to the first of the assistant are the prompt; each message of the assistant is a
step; what follows it, up to the next one, is its observation.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow
import pyarrow.parquet

from outrider.errors import DataError
from outrider.types import Message, Role, Step, Trajectory

_ROLES: Mapping[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
ANSWER_MARKS = ("<answer>", "\\boxed{")
_BOX = re.compile(r"\\boxed\b")  # in whatever form the scorer reads it


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Trajectories of a file in its order, the question of each task key (for building keys), and what was
    skipped.

    ``problems`` names file, line and reason of every malformed record that was skipped.
    """

    trajectories: tuple[Trajectory, ...]
    questions: Mapping[str, str]
    problems: tuple[str, ...]


def import_trajectories(
    path: str | Path,
    *,
    on_malformed: Literal["error", "skip"] = "error",
    agent: str = "imported",
    answer_marks: Sequence[str] = ANSWER_MARKS,
) -> Imported:
    """Read a ``.jsonl`` or ``.parquet`` file of chat trajectories.

    A missing ``task_key`` is a digest of the question, a missing ``trajectory_id`` a digest of the content,
    so that importing a file again finds the same trajectories. The last step of a trajectory and every step
    with an answer mark are terminal.

    Raises :class:`~outrider.errors.DataError` naming file and line (Parquet: row, from 1) for a malformed
    record unless ``on_malformed`` is ``skip``, and for a file that is missing, unreadable, empty or without
    any good record.
    """
    path = Path(path)
    trajectories: list[Trajectory] = []
    questions: dict[str, str] = {}
    problems: list[str] = []
    for number, read in _records(path):
        try:
            question, trajectory = _trajectory(read(), agent, answer_marks)
            if questions.setdefault(trajectory.task_key, question) != question:
                raise ValueError(f"task {trajectory.task_key!r} has another question than before")
        except (ValueError, OverflowError, RecursionError, TypeError) as error:
            problem = f"{path}:{number}: {' '.join(str(error).split())}"
            if on_malformed == "error":
                raise DataError(problem) from error
            problems.append(problem)
        else:
            trajectories.append(trajectory)
    if not trajectories:
        raise DataError(f"{path}: no usable trajectory ({len(problems)} malformed)")
    return Imported(trajectories=tuple(trajectories), questions=questions, problems=tuple(problems))


@dataclass(frozen=True, slots=True)
class _JsonLine:
    """One line, parsed on demand so that its errors are raised where they are named."""

    line: bytes

    def __call__(self) -> object:
        try:
            return json.loads(self.line.decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8: {error}") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a part of a table, read on demand as well: text that is not UTF-8 and dates out of range
    show only then.
    """

    table: pyarrow.RecordBatch
    index: int

    def __call__(self) -> object:
        try:
            (row,) = self.table.slice(self.index, 1).to_pylist()
        except pyarrow.ArrowException as error:
            raise ValueError(f"cannot be read: {error}") from error
        return {key: value for key, value in row.items() if value is not None}


def _records(path: Path) -> Iterator[tuple[int, _JsonLine | _Row]]:
    try:
        if path.suffix == ".jsonl":
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield number, _JsonLine(line)
        elif path.suffix == ".parquet":
            number = 0
            with pyarrow.parquet.ParquetFile(path) as table:
                for batch in table.iter_batches(batch_size=256):
                    for index in range(batch.num_rows):
                        number += 1
                        yield number, _Row(batch, index)
        else:
            raise DataError(f"{path}: must end in .jsonl or .parquet")
    except (OSError, pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error


def _trajectory(record: object, agent: str, answer_marks: Sequence[str]) -> tuple[str, Trajectory]:
    if not isinstance(record, dict):
        raise ValueError(f"a record is an object, not {type(record).__name__}")
    question = _text(record, "question")
    if not question.strip():
        raise ValueError("'question' is empty")
    reward = record.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"'reward' must be a finite number, not {reward!r}")
    num_tokens = record.get("num_tokens", 0)
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 0 <= num_tokens < 2**63:
        raise ValueError(f"'num_tokens' must be a count, not {num_tokens!r}")
    given = record.get("messages")
    if not isinstance(given, list):
        raise ValueError("'messages' must be a list")
    messages = [_message(message, index) for index, message in enumerate(given)]
    prompt, steps = _split(messages, answer_marks)
    agent = _text(record, "agent", agent)
    task_key = _text(record, "task_key", question_key(question))
    # Everything that tells trajectories apart: a second import has to find the same ids.
    content = json.dumps([task_key, agent, float(reward), [(m.role, m.content) for m in messages]])
    return question, Trajectory(
        trajectory_id=_text(record, "trajectory_id", f"{task_key}-{_digest(content)}"),
        task_key=task_key,
        agent=agent,
        prompt=prompt
        if any(m.role == "user" for m in prompt)
        else (*prompt, Message(role="user", content=question)),
        steps=steps,
        reward=float(reward),
        num_tokens=num_tokens,
    )


def _text(record: Mapping[str, object], key: str, default: str | None = None) -> str:
    value = record.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be text, not {type(value).__name__}")
    if key != "question":  # a name is compared and stored; texts are repaired where they are stored
        value.encode()
    return value


def _message(value: object, index: int) -> Message:
    """One chat message; an assistant's tool calls follow its text, one JSON object per call."""
    if not isinstance(value, dict):
        raise ValueError(f"message {index} must be an object")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"message {index} has unknown role {role!r}")
    content, calls = value.get("content"), value.get("tool_calls")
    if calls and role == "assistant":
        if not isinstance(calls, list) or not all(
            isinstance(call, dict) and "function" in call for call in calls
        ):
            raise ValueError(f"message {index}: 'tool_calls' must be a list of function calls")
        written = [
            f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls
        ]
        content = "\n".join([*([content] if isinstance(content, str) and content else []), *written])
    if not isinstance(content, str):
        raise ValueError(f"message {index}: 'content' must be text, not {type(content).__name__}")
    return Message(role=_ROLES[role], content=content)


def _split(
    messages: Sequence[Message], answer_marks: Sequence[str]
) -> tuple[tuple[Message, ...], tuple[Step, ...]]:
    starts = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not starts:
        raise ValueError("no message of the assistant")
    if any(message.role == "system" for message in messages[starts[0] :]):
        raise ValueError("a system message after the first message of the assistant")
    steps = []
    for start, end in zip(starts, [*starts[1:], len(messages)], strict=True):
        text = messages[start].content
        observation = "\n".join(message.content for message in messages[start + 1 : end])
        is_terminal = (
            start == starts[-1] or any(mark in text for mark in answer_marks) or _BOX.search(text) is not None
        )
        steps.append(Step(text=text, observation=observation, is_terminal=is_terminal))
    return tuple(messages[: starts[0]]), tuple(steps)


def question_key(question: str) -> str:
    """The task key of a record that has none."""
    return f"question-{_digest(question)}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
