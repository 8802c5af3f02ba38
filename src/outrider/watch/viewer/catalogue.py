"""The runs below the folders that were named, and what the first page tells of each."""

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.errors import DataError
from outrider.file_lock import is_locked
from outrider.metrics import WRITTEN_TOKENS
from outrider.watch.run_directory import read_run, task_evaluation_message
from outrider.watch.viewer.alarms import read_alarms
from outrider.watch.viewer.live import fingerprint, live_state
from outrider.watch.viewer.rollout_index import RolloutIndex

_DEPTH: Final = 4  # of folders between the one that was named and a run
_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class ViewedRun:
    """One run. ``id`` is its name in addresses."""

    id: str
    path: Path
    index: RolloutIndex

    @property
    def status(self) -> str:
        """``running``, ``finished`` or ``stopped``."""
        if is_locked(self.path / "lock"):
            return "running"
        return "finished" if read_run(self.path).is_done else "stopped"


class Catalogue:
    """Runs by id; looks again whenever it is asked for all, since runs begin while a page is open."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Raises DataError where no run is below any of ``roots``."""
        self._roots = list(roots)
        self._known: dict[str, ViewedRun] = {}
        self._overviews: dict[str, tuple[Any, dict[str, Any]]] = {}
        for root in roots:
            if not root.is_dir():
                raise DataError(f"{root} is no folder")
        for root in roots:
            if refusal := task_evaluation_message(root):
                raise DataError(refusal)
        if not self.all():
            raise DataError(f"no run directory (one with config.toml) is below {', '.join(map(str, roots))}")

    def all(self) -> list[ViewedRun]:
        """In the order of the folders, and of names within one."""
        runs: dict[str, ViewedRun] = {}
        for path in (folder for root in self._roots for folder in _runs_below(root, _DEPTH)):
            name = run_id(path)
            runs[name] = self._known.get(name) or ViewedRun(name, path, RolloutIndex(path))
        self._known = runs
        return list(runs.values())

    def get(self, name: str) -> ViewedRun:
        """Raises KeyError for an id that no run has."""
        return self._known[name]

    def overview(self) -> list[dict[str, Any]]:
        """One entry a run, as the page has them."""
        return [self._overview(run) for run in self.all()]

    def _overview(self, run: ViewedRun) -> dict[str, Any]:
        """Read again only where something has changed: a page asks every few seconds."""
        now = fingerprint(run.path)
        if (known := self._overviews.get(run.id)) is None or known[0] != now:
            self._overviews[run.id] = known = now, overview(run)
        return known[1]


def run_id(path: Path) -> str:
    """A name that tells runs of one name in two folders apart."""
    whole = path.resolve()
    return f"{_NOT_IN_A_NAME.sub('-', whole.name)[:60]}-{zlib.crc32(str(whole).encode()):08x}"


def overview(run: ViewedRun) -> dict[str, Any]:
    """Status, method, task, score with interval, tokens, and the last alarm of a run."""
    data = read_run(run.path)
    status = run.status
    last = data.evaluations[-1] if data.evaluations else None
    score = last.metrics.get("score") if last is not None else None
    alarms = read_alarms(run.path)
    return {
        "id": run.id,
        "name": run.path.resolve().name,
        "status": status,
        "method": data.config.get("algorithm.type", ""),
        "task": data.config.get("environment.type", ""),
        "model": data.config.get("model.name", ""),
        "seed": data.config.get("seed", ""),
        "steps": data.num_steps,
        "num_steps": data.config.get("train.num_steps", ""),
        "score": None if score is None else [score.value, score.ci_low, score.ci_high],
        "scored": "" if last is None else f"{last.label}, {last.num_tasks} tasks",
        "tokens": sum(data.total("train", name) for name in WRITTEN_TOKENS),
        "alarm": alarms[-1] if alarms else None,
        "num_alarms": len(alarms),
        "live": live_state(run.path) if status == "running" else None,
        "notes": list(data.notes)[:5],
    }


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "config.toml").is_file():
        yield folder
    elif depth:
        try:
            children = sorted(folder.iterdir())
        except (PermissionError, FileNotFoundError):  # of somebody else, or gone since it was listed
            return
        for child in children:
            if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                yield from _runs_below(child, depth - 1)
