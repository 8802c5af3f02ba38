"""Which published games lie in a folder (``json_2.1.1``, which ``alfworld-download`` fetches)."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.environments.alfworld.floor_plans import Split, TaskType
from outrider.errors import DataError

FOLDERS: Final[dict[Split, str]] = {"train": "train", "valid": "valid_seen", "test": "valid_unseen"}
"""Folder of each split: published scores are those of ``valid_seen`` and ``valid_unseen``."""
GAME: Final = "game.tw-pddl"
_TASK: Final = re.compile(r"Your task is to: (.+?)\.?\"")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """One game on disk. ``name``: its folder below that of its split; ``digest``: SHA-256 of the file."""

    path: Path
    name: str
    task_type: TaskType
    task: str
    digest: str


def find_games(
    data: Path, split: Split, task_types: Sequence[TaskType], limit: int | None
) -> tuple[PublishedFile, ...]:
    """The first ``limit`` games of a split, by name. As in the package, those count that are marked solvable
    and neither need a movable receptacle nor a slice. Raises DataError where there is none.
    """
    root = data / FOLDERS[split]
    games: list[PublishedFile] = []
    for file in sorted(root.rglob("traj_data.json")):
        if limit is not None and len(games) >= limit:
            break
        name = file.parent.relative_to(root).as_posix()
        if "movable" in name or "Sliced" in name or not file.with_name(GAME).is_file():
            continue
        if game := _read(file, name, task_types):
            games.append(game)
    if not games and limit != 0:
        raise DataError(
            f"{root} holds no solvable ALFWorld game of these types (alfworld-download brings them)"
        )
    return tuple(games)


def _read(file: Path, name: str, task_types: Sequence[TaskType]) -> PublishedFile | None:
    path = file.with_name(GAME)
    try:
        task_type = json.loads(file.read_bytes())["task_type"]
        content = path.read_bytes()
        game = json.loads(content)
        task = _TASK.search(game["grammar"])
        is_match = task_type in task_types and bool(game.get("solvable"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file.parent} is no ALFWorld game: {type(error).__name__}: {error}") from error
    if not is_match:
        return None
    return PublishedFile(
        path=path,
        name=name,
        task_type=task_type,
        task=task[1] if task else name,
        digest=hashlib.sha256(content).hexdigest(),
    )
