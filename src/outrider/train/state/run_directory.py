"""A run directory: never shared, never overwritten, readable at any instant."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from outrider.atomic_io import TEMPORARY, append, remove, remove_leftovers, replace_file
from outrider.config import to_toml
from outrider.errors import CheckpointError, ConfigError, DataError
from outrider.file_lock import FileLock
from outrider.json_lines import parsed, read_lines, replace_lines
from outrider.plugins.imports import ORIGINS_FILE
from outrider.plugins.record import write_origins
from outrider.rollout.evaluate import Evaluation
from outrider.train.settings import RunSettings
from outrider.train.state.growing import extend_settings
from outrider.train.state.recorded import recorded_settings
from outrider.watch.recorded_progress import LIVE, NOTES

_SCORE = ("value", "ci_low", "ci_high")

# Beside the configuration and the buffer: made while components and trackers are built.
_SETUP_FILES: Final = {
    "traces",
    "checkpoints",
    "tensorboard",
    "wandb",
    "trackio",
    "metrics.jsonl",
    NOTES,
    ORIGINS_FILE,
}


class RunDirectory:
    """Paths of a run, its lock, and its evaluations file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.evaluations = path / "evaluations.jsonl"
        self._lock: FileLock | None = None
        # by this process: the folder itself (True) or only what is in it (False)
        self._created: bool | None = None
        self._extended: RunSettings | None = None  # not yet on file
        self.allow_changed_plugins = (
            False  # whether the code of its plug-ins may be another one than it began with
        )

    @classmethod
    def create(cls, path: Path, settings: RunSettings) -> "RunDirectory":
        """A new folder with the resolved configuration.

        Raises ConfigError when it exists and is not empty, and for a device that is not here. A failure
        leaves no folder.
        """
        # torch: a folder that is taken shows without it
        from outrider.engines.local.model import require_device, resolve_precision

        require_free(path)
        require_device(settings.model.device)
        precision = resolve_precision(settings.model.precision, settings.model.device)
        settings = settings.model_copy(
            update={"model": settings.model.model_copy(update={"precision": precision})}
        )
        content = _as_toml(settings)
        existed = path.exists()
        path.mkdir(parents=True, exist_ok=True)
        run = cls(path)
        run.lock()
        try:
            require_free(path)  # another process may have been here since
        except ConfigError:
            run.release()
            raise
        run._created = not existed
        try:
            (path / ORIGINS_FILE).unlink(missing_ok=True)  # of a beginning that was killed
            write_origins(settings, path)
            replace_file(path / "config.toml", content)
        except BaseException:
            run.roll_back()
            run.release()
            raise
        return run

    def roll_back(self) -> None:
        """Take back a new run whose set-up failed, so that the same command works once the cause is gone.

        A run that was opened, not created, stays as it is, and so does one that :meth:`keep` was called for.
        Only what a set-up writes is removed: a file that somebody else put there meanwhile stays, and the
        folder with it. What cannot be removed stays too, because the failure of the set-up is what must be
        told.
        """
        if self._created is None:
            return
        with contextlib.suppress(OSError):
            for entry in sorted(self.path.iterdir(), key=lambda path: path.name == "lock"):  # the lock last
                if _is_of_setup(entry):
                    remove(entry)
            if self._created:
                self.path.rmdir()

    def retain(self) -> None:
        """The set-up is over: from here on what the run has done is kept, whatever happens."""
        self._created = None

    @classmethod
    def open(
        cls, path: Path, overrides: Sequence[str] = (), *, allow_changed_plugins: bool = False
    ) -> "tuple[RunDirectory, RunSettings]":
        """An existing run and its settings, with more of what may grow; ``allow_changed_plugins``: also with other
        code of its plug-ins.

        Raises CheckpointError when there is none, and ConfigError for overrides that a run cannot go on
        with.
        """
        if not (path / "config.toml").exists():
            raise CheckpointError(f"{path} is no run directory: it has no config.toml")
        run = cls(path)
        run.allow_changed_plugins = allow_changed_plugins
        run.lock()
        try:
            if not overrides:
                return run, recorded_settings(path / "config.toml")
            run._extended = extend_settings(path / "config.toml", overrides)
        except BaseException:
            run.release()
            raise
        return run, run._extended

    def commit(self) -> None:
        """Write down what the run was given more of: only once its set-up has succeeded."""
        if self._extended is not None:
            replace_file(self.path / "config.toml", _as_toml(self._extended))

    def lock(self) -> None:
        """One process per run; the kernel frees the lock when the process dies, however it dies."""
        try:
            self._lock = FileLock(self.path / "lock")
        except BlockingIOError as error:
            raise ConfigError(f"{self.path} is in use by another process") from error
        remove_leftovers(self.path)  # a reader may be writing a report
        remove_leftovers(self.checkpoints, is_only_writer=True)
        for checkpoint in self.checkpoints.glob("step-*"):  # whose records are written anew at a run's end
            if checkpoint.is_dir() and not checkpoint.is_symlink():
                remove_leftovers(checkpoint)

    def release(self) -> None:
        """Let the next process in; may be called twice."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def name_evaluation(self, number: int, label: str) -> None:
        """Another label for the evaluation in line ``number`` (from 0)."""
        finished = self.finished_evaluations()
        finished[number]["label"] = label
        self._replace(finished)

    def finished_evaluations(self) -> list[dict[str, Any]]:
        """Evaluations on file; a line torn by a kill is dropped from the file, and that evaluation runs
        again.
        """
        if not self.evaluations.exists():
            return []
        lines, torn = read_lines(self.evaluations)
        read = [self._evaluation(number, line) for number, line in enumerate(lines, start=1)]
        if torn:
            replace_lines(self.evaluations, lines)
        return read

    def _evaluation(self, number: int, line: bytes) -> dict[str, Any]:
        """A line with what a run needs of it; it may hold more."""
        try:
            read = parsed(line)
            score = read["metric"]["score"]
            numbers = (
                read["step"],
                read["num_tasks"],
                read["temperature"],
                *(score[name] for name in _SCORE),
            )
            texts = (read["label"], read["split"], read["panel_hash"])
            numbers = (*numbers, *read["task_scores"].values())
            if not all(isinstance(text, str) for text in texts) or not all(
                isinstance(value, int | float) for value in numbers
            ):
                raise ValueError("a value is of another kind than was written")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{self.evaluations.name} line {number} is damaged: {reason}") from error
        return read

    def cut_evaluations(self, num_retained: int) -> None:
        """Forget evaluations made after the checkpoint that a resumed run starts from; they run again, to the
        same bits.
        """
        finished = self.finished_evaluations()
        if len(finished) > num_retained:
            self._replace(finished[:num_retained])

    def _replace(self, evaluations: Sequence[dict[str, Any]]) -> None:
        replace_lines(self.evaluations, [json.dumps(evaluation).encode() for evaluation in evaluations])

    def add_evaluation(
        self,
        evaluation: Evaluation,
        *,
        split: str,
        temperature: float,
        tasks_hash: str,
        num_training_tasks: int = 0,
        trial: Evaluation | None = None,
    ) -> None:
        """Append one line and force it to disk; of an adaptation also what the ``trial`` alone brought.
        ``num_training_tasks`` of the panel are training tasks.
        """
        score = {"value": evaluation.score, "ci_low": evaluation.ci_low, "ci_high": evaluation.ci_high}
        line = {
            "label": evaluation.label,
            "split": split,
            "num_tasks": evaluation.num_tasks,
            "step": evaluation.step,
            "temperature": temperature,
            "panel_hash": tasks_hash,
            "num_faults": evaluation.num_faults,
            "num_tool_calls": evaluation.num_tool_calls,
            "num_policy_tokens": evaluation.num_policy_tokens,
            "mean_return": evaluation.mean_return,
            "metric": {"score": score},
            "task_scores": dict(evaluation.task_scores),
            "task_returns": dict(evaluation.task_returns),
        }
        if num_training_tasks:
            line["num_training_tasks"] = num_training_tasks
        if trial is not None:
            line["trial"] = {
                "task_scores": dict(trial.task_scores),
                "task_returns": dict(trial.task_returns),
            }
        append(self.evaluations, (json.dumps(line) + "\n").encode())


def _as_toml(settings: RunSettings) -> bytes:
    return (to_toml(settings.model_dump(mode="json")) + "\n").encode()


def _is_beginning(entry: Path) -> bool:
    """Whether it is all that a process leaves which was killed before it wrote its configuration."""
    if entry.name == "lock":
        return entry.is_file() and not entry.stat().st_size
    if entry.name == ORIGINS_FILE:  # else somebody's own
        return entry.with_name("lock").exists()
    return entry.name.startswith(("config.toml.", f"{ORIGINS_FILE}.")) and entry.match(TEMPORARY)


def _is_of_setup(entry: Path) -> bool:
    """Whether a run's set-up writes under this name."""
    return (
        _is_beginning(entry)
        or entry.name.startswith(("config.toml", "buffer.sqlite", LIVE))
        or entry.name in _SETUP_FILES
    )


def require_free(path: Path) -> None:
    """Raises ConfigError where a new run may not be: a folder that is not empty, or no folder."""
    if path.exists() and (not path.is_dir() or not all(map(_is_beginning, path.iterdir()))):
        raise ConfigError(
            f"{path} is not empty: a run directory is never overwritten (continue it with --resume)"
        )
