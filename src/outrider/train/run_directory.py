"""A run directory: never shared, never overwritten, readable at any instant."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from outrider.config import load_settings, to_toml
from outrider.durable import TEMPORARY, append, replace_file
from outrider.engines.model import resolve_precision
from outrider.errors import CheckpointError, ConfigError, DataError
from outrider.evals.runner import Evaluation
from outrider.train.settings import RunSettings

_BEGUN = {"lock", "config.toml.tmp"}  # all that a process leaves which was killed before it wrote its configuration

_SCORE = ("value", "ci_low", "ci_high")


class RunDirectory:
    """Paths of a run, its lock, and its evaluations file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.evaluations = path / "evaluations.jsonl"
        self._lock: int | None = None
        self._created: bool | None = None  # by this process: the folder itself (True) or only what is in it (False)

    @classmethod
    def create(cls, path: Path, settings: RunSettings) -> "RunDirectory":
        """A new folder with the resolved configuration. Raises ConfigError when it exists and is not empty."""
        _require_free(path)
        precision = resolve_precision(settings.model.precision, settings.model.device)
        settings = settings.model_copy(update={"model": settings.model.model_copy(update={"precision": precision})})
        content = (to_toml(settings.model_dump(mode="json")) + "\n").encode()
        existed = path.exists()
        path.mkdir(parents=True, exist_ok=True)
        run = cls(path)
        run.lock()
        _require_free(path)  # another process may have been here since
        run._created = not existed
        replace_file(path / "config.toml", content)
        return run

    def discard(self) -> None:
        """Take back a new run whose set-up failed, so that the same command works once the cause is gone.

        A run that was opened, not created, stays as it is.
        """
        if self._created is None:
            return
        for entry in self.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if self._created:
            self.path.rmdir()

    @classmethod
    def open(cls, path: Path) -> "tuple[RunDirectory, RunSettings]":
        """An existing run and its settings. Raises CheckpointError when there is none."""
        if not (path / "config.toml").exists():
            raise CheckpointError(f"{path} is no run directory: it has no config.toml")
        run = cls(path)
        run.lock()
        return run, load_settings(RunSettings, file=path / "config.toml")

    def lock(self) -> None:
        """One process a run; the kernel frees the lock when the process dies, however it dies."""
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise ConfigError(f"{self.path} is in use by another process") from error
        for left in self.path.glob(TEMPORARY):  # by a kill: nobody else writes here now, but a reader's report
            if not left.name.startswith("report.html."):
                left.unlink(missing_ok=True)

    def release(self) -> None:
        """Let the next process in; may be called twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def finished_evaluations(self) -> list[dict[str, Any]]:
        """Evaluations on file; a line torn by a kill is dropped from the file, and that evaluation runs again."""
        if not self.evaluations.exists():
            return []
        *lines, tail = self.evaluations.read_text(encoding="utf-8", errors="replace").split("\n")
        read = [self._evaluation(number, line) for number, line in enumerate(lines, start=1)]
        if tail:
            self._replace(lines)
        return read

    def _evaluation(self, number: int, line: str) -> dict[str, Any]:
        """A line with what a run needs of it; it may hold more."""
        try:
            read: dict[str, Any] = json.loads(line)
            score = read["metric"]["score"]
            numbers = (read["step"], read["num_tasks"], read["temperature"], *(score[name] for name in _SCORE))
            texts = (read["label"], read["split"], read["panel_hash"])
            numbers = (*numbers, *read["task_scores"].values())
            if not all(isinstance(text, str) for text in texts) or not all(isinstance(one, int | float) for one in numbers):
                raise ValueError("a value is of another kind than was written")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{self.evaluations.name} line {number} is damaged: {reason}") from error
        return read

    def cut_evaluations(self, num_kept: int) -> None:
        """Forget evaluations made after the checkpoint that a resumed run starts from; they run again, to the same bits."""
        finished = self.finished_evaluations()
        if len(finished) > num_kept:
            self._replace([json.dumps(one) for one in finished[:num_kept]])

    def _replace(self, lines: list[str]) -> None:
        replace_file(self.evaluations, "".join(line + "\n" for line in lines).encode())

    def add_evaluation(self, evaluation: Evaluation, *, split: str, temperature: float, panel_hash: str) -> None:
        """Append one line and force it to disk."""
        score = {"value": evaluation.score, "ci_low": evaluation.ci_low, "ci_high": evaluation.ci_high}
        line = {
            "label": evaluation.label,
            "split": split,
            "num_tasks": evaluation.num_tasks,
            "step": evaluation.step,
            "temperature": temperature,
            "panel_hash": panel_hash,
            "num_faults": evaluation.num_faults,
            "num_tool_calls": evaluation.num_tool_calls,
            "num_policy_tokens": evaluation.num_policy_tokens,
            "mean_return": evaluation.mean_return,
            "metric": {"score": score},
            "task_scores": dict(evaluation.task_scores),
            "task_returns": dict(evaluation.task_returns),
        }
        append(self.evaluations, (json.dumps(line) + "\n").encode())


def _is_beginning(entry: Path) -> bool:
    """Whether it is all that a process leaves which was killed before it wrote its configuration."""
    return entry.name == "lock" or (entry.name.startswith("config.toml.") and entry.match(TEMPORARY))


def _require_free(path: Path) -> None:
    if path.exists() and (not path.is_dir() or not all(map(_is_beginning, path.iterdir()))):
        raise ConfigError(f"{path} is not empty: a run directory is never overwritten (continue it with --resume)")
