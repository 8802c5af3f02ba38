"""Steps of a buffer as a person looks at them: by words, at a revision, read-only beside whoever writes."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from outrider.errors import DataError
from outrider.memory.steps.database import connect
from outrider.memory.steps.format import check_schema

_STEPS_AT_REVISION: Final = """
    FROM steps s JOIN trajectories t ON t.trajectory_row = s.trajectory_row
    WHERE t.added <= ? AND t.removed > ?
      AND (instr(lower(s.text), ?) OR instr(lower(s.observation), ?) OR instr(lower(t.task_key), ?))
"""
_COLUMNS: Final = ("item_id", "writer", "key", "agent", "score", "index", "text", "observation", "version")


def newest_revision(path: Path) -> int:
    """Of a buffer's file. Raises DataError where it cannot be read."""
    return int(_read(path, "SELECT value FROM meta WHERE key = 'revision'", ())[0][0])


def search_steps(path: Path, revision: int, words: str, *, limit: int) -> tuple[int, list[dict[str, Any]]]:
    """How many steps the buffer held at ``revision`` whose text, observation or task has ``words``, and the
    first ``limit`` of them. Raises DataError.
    """
    lowered = words.lower()
    parameters = (revision, revision, lowered, lowered, lowered)
    [(total,)] = _read(path, f"SELECT count(*) {_STEPS_AT_REVISION}", parameters)
    rows = _read(
        path,
        "SELECT s.step_id, t.trajectory_id, t.task_key, t.agent, t.reward, s.step_id - t.first_step_id, "
        f"s.text, s.observation, t.added {_STEPS_AT_REVISION} ORDER BY s.step_id LIMIT ?",
        (*parameters, limit),
    )
    return int(total), [dict(zip(_COLUMNS, row, strict=True)) for row in rows]


def _read(path: Path, query: str, parameters: tuple[object, ...]) -> list[tuple[Any, ...]]:
    try:
        with closing(connect(path, writable=False)) as db:
            check_schema(path, db)
            return db.execute(query, parameters).fetchall()
    except sqlite3.Error as error:
        raise DataError(f"{path.name} cannot be read: {error}") from error
