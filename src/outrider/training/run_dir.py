"""The folder of a run: its settings and which of them may change, its lock, and its evaluations."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from outrider.algorithms.loss_settings import migrate_keys
from outrider.config import Settings, flatten, load_settings, to_toml
from outrider.errors import CheckpointError, ConfigError, DataError
from outrider.files import (
    TEMPORARY,
    FileLock,
    append,
    parsed,
    read_lines,
    remove,
    remove_leftovers,
    replace_file,
    replace_lines,
)
from outrider.plugins.imports import ORIGINS_FILE
from outrider.plugins.listing import write_origins
from outrider.rollout.evaluate import Evaluation
from outrider.training.settings import RunSettings
from outrider.viewer.run_reader import LIVE, NOTES, read_run
from outrider.viewer.trackers import TrackingSettings

RECORD: Final = "config.toml"
"""Name of the file with the settings of a run directory, and of a run in a pack."""


def recorded_settings(file: Path, overrides: Sequence[str] = ()) -> RunSettings:
    """The settings in a run's ``config.toml``; ``overrides`` have today's keys.

    Raises ConfigError as :func:`~outrider.config.load_settings` does.
    """
    return load_settings(RunSettings, file=file, overrides=overrides, respelled=migrate_keys)


# The settings with which a run began, as its checkpoints store them, and which of them may change on resume.
#
# Paths are not compared, because data may move. The contents are digested instead
# (:mod:`outrider.training.resume`).


_PATH_PLACEHOLDER: Final = "(a path)"
# Keys of paths that are plain text.
_PATHS: Final = {
    "buffer.path",
    "model.initial_checkpoint",
    "algorithm.demonstrations",
    "cold_start.demonstrations",
    "environment.window.prompt",
}
# Results do not depend on them unless something breaks, so they may change.
FREE: Final = {
    "train.checkpoint_every", "train.keep_checkpoints", "train.watchdog_s", "train.expert_timeout_s",
    "train.max_retries", "rollout.step_timeout_s", "train.group_timeout_s", "environment.heap",
    "environment.start_limit_s", "environment.load_limit_s", "environment.step_limit_s",
    "environment.borrow_limit_s", "environment.server_url",
    "environment.make_ahead", "environment.num_makers", "environment.make_limit_s",
    "environment.python.num_servers", "engine.memory", "trackers",
    *(f"tracking.{name}" for name in TrackingSettings.model_fields),
    "cluster.ray_address", "cluster.placement_timeout_s", "cluster.stall_s",
    "cluster.heartbeat_s", "cluster.weights", "cluster.max_restarts",
    "cluster.placement", "protocol", "protocol_sha256",
}  # fmt: skip
# They change the order of sums or the device, so results are equal in exact arithmetic only.
ROUNDING: Final = {
    "num_threads", "model.device", "engine.max_rows", "engine.eager", "train.max_concurrent",
    "environment.num_workers", "environment.num_sessions",
    "update.max_tokens", "update.checkpoint_activations", "update.attention",
    "cluster.num_trainers", "cluster.num_engines", "cluster.tensor_parallel",
}  # fmt: skip
# The length of a run, and how often it is evaluated.
_LENGTH: Final = {"train.num_steps", "train.max_policy_tokens", "evaluation.every"}


def comparable_settings(settings: RunSettings) -> dict[str, Any]:
    """Plain values by dotted key, with ``auto`` resolved, without paths and what no number depends on."""
    from outrider.engines.local.model import resolve_precision

    resolved = resolve_precision(settings.model.precision, settings.model.device)
    # With the tables themselves, a key that was added to one or removed from it is noticed.
    flat = dict(flatten(settings.model_dump())) | {key: {} for key in _free_tables(settings, "")}
    if Path(settings.model.name).is_dir():
        flat["model.name"] = _PATH_PLACEHOLDER
    plain = {
        key: _PATH_PLACEHOLDER if value is not None and key in _PATHS else _plain(value)
        for key, value in flat.items()
        if key not in FREE
    }
    return {**plain, "model.precision": resolved}


def _free_tables(settings: Settings, prefix: str) -> Iterator[str]:
    """Dotted keys of the tables whose keys are the user's, such as ``model.template_kwargs``."""
    for name, value in settings:
        if isinstance(value, Settings):
            yield from _free_tables(value, f"{prefix}{name}.")
        elif isinstance(value, Mapping):
            yield f"{prefix}{name}"


def check_settings(recorded: Mapping[str, Any], settings: RunSettings) -> list[str]:
    """Return a line for each allowed change; keys that only one side has are not compared.

    Raises CheckpointError, which names the keys, for changed settings that determine the results.
    """
    now = comparable_settings(settings)
    changed: dict[str, tuple[Any, Any]] = {}
    for key in sorted(recorded.keys() | now):
        if key in recorded and key in now:
            differs = recorded[key] != now[key]
        else:  # a key of a section that is ``none`` on one side differs; one of another version does not
            lacking = now if key in recorded else recorded
            differs = any(key[:end] in lacking for end, letter in enumerate(key) if letter == ".")
        if differs:
            changed[key] = recorded.get(key), now.get(key)
    allowed = ROUNDING | _LENGTH
    if settings.algorithm.depends_on_num_steps:
        allowed = allowed - {"train.num_steps"}
    if refused := {key: values for key, values in changed.items() if key not in allowed}:
        raise CheckpointError(
            f"config.toml is not what this run began with: {_describe_changes(refused)}; "
            "put it back, or begin a new run with model.initial_checkpoint"
        )
    lines = []
    for kind, meaning in (
        (_LENGTH, " and reproduces the same bits as far as it went"),
        (ROUNDING, ", but may not reproduce the same bits"),
    ):
        if reported := {key: values for key, values in changed.items() if key in kind}:
            lines.append(f"OTHER SETTINGS: {_describe_changes(reported)}; the run continues{meaning}")
    return lines


def _plain(value: Any) -> Any:
    """Convert to the value that JSON would return."""
    if isinstance(value, Path):
        return _PATH_PLACEHOLDER
    if isinstance(value, list | tuple):
        return [
            {key: _plain(inner) for key, inner in flatten(item)} if isinstance(item, dict) else _plain(item)
            for item in value
        ]
    return value


def _describe_changes(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Name the changed keys. If a type changed, only the type is named, because its other keys follow
    from it.
    """
    types = [key for key in changed if key.endswith(".type") or key == "type"]
    keys = types or list(changed)
    more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
    return ", ".join(f"{key} is {changed[key][1]!r}, was {changed[key][0]!r}" for key in keys[:4]) + more


# Settings that ``outrider train --resume RUN key=value`` may change, with reasons.


MAY_CHANGE: Final[Mapping[str, str]] = {
    "train.num_steps": "can be increased: no step depends on how many follow",
    "train.max_policy_tokens": "can be increased or removed (none): it is only checked between steps",
    "evaluation.every": "an evaluation draws from random streams of its own and changes no weight",
    "train.checkpoint_every": "a checkpoint stores the state and does not change it",
    "train.keep_checkpoints": "older checkpoints are never read while the newest one is whole",
    "train.watchdog_s": "the watchdog only reads",
}
"""Reasons, as in the table of docs/resuming.md (checked by a test)."""


def extend_settings(config: Path, overrides: Sequence[str]) -> RunSettings:
    """The settings of a run with the changes of the overrides.

    Raises ConfigError, one line with the reason, for a change that :data:`MAY_CHANGE` does not name, for one
    that shrinks the run, for a schedule that follows from the number of steps, and for a run that never
    trained.
    """
    original, extended = recorded_settings(config), recorded_settings(config, overrides)
    before, after = (dict(flatten(settings.model_dump())) for settings in (original, extended))
    changed = [key for key in sorted(before.keys() | after) if before.get(key) != after.get(key)]
    if refused := [key for key in changed if key not in MAY_CHANGE]:
        if refused[0] in FREE:
            reason = "no number depends on it, so no command needs to; it may be changed in config.toml"
        elif refused[0] in ROUNDING:
            reason = (
                "it changes how numbers are rounded, so the run would not have the bits of one that began "
                "with it"
            )
        else:
            reason = (
                "it decides the results. Begin a new run with it, and with model.initial_checkpoint for the "
                "weights"
            )
        raise ConfigError(
            f"{refused[0]} cannot change in a resumed run: {reason}. These may: {', '.join(MAY_CHANGE)}"
        )
    for key in {"train.num_steps", "train.max_policy_tokens"} & set(changed):
        # None is a budget without an end.
        if before[key] is None or (after[key] is not None and after[key] < before[key]):
            was = "without an end" if before[key] is None else before[key]
            raise ConfigError(f"{key} may only grow: it is {was}, {after[key]} would end the run earlier")
    if "train.num_steps" in changed:
        if not original.train.num_steps:
            raise ConfigError(
                "train.num_steps cannot grow from 0: this run has made nothing to train with. "
                "Begin a new run, with model.initial_checkpoint for the weights"
            )
        if original.algorithm.depends_on_num_steps:
            raise ConfigError(
                "train.num_steps cannot grow here: the probability of a retrieval runs to "
                "algorithm.retrieval.final_probability at the last step, "
                "so a longer run has other steps from the first on. Begin a new run (with "
                "algorithm.retrieval.schedule_steps it could grow)"
            )
    return extended


# A run directory: never shared, never overwritten, readable at any instant.


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
        # whether this process created the folder itself (True) or only its contents (False)
        self._created: bool | None = None
        self._extended: RunSettings | None = None  # not yet written
        self.allow_changed_plugins = False  # since the run began

    @classmethod
    def create(cls, path: Path, settings: RunSettings) -> "RunDirectory":
        """Create a folder with the resolved configuration.

        Raises ConfigError if it exists and is not empty, and for a device that does not exist. A failure
        leaves no folder.
        """
        # imports torch, which an error about the folder does not need
        from outrider.engines.local.model import require_device, resolve_precision

        require_free(path)
        require_device(settings.model.device)
        precision = resolve_precision(settings.model.precision, settings.model.device)
        settings = settings.model_copy(
            update={"model": settings.model.model_copy(update={"precision": precision})}
        )
        content = _as_toml(settings)
        existed = path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path} cannot be created: {error.strerror}") from error
        run = cls(path)
        run.lock()
        try:
            require_free(path)  # another process may have been here since
        except ConfigError:
            run.release()
            raise
        run._created = not existed
        try:
            (path / ORIGINS_FILE).unlink(missing_ok=True)  # left by a process that was killed
            write_origins(settings, path)
            replace_file(path / "config.toml", content)
        except BaseException:
            run.roll_back()
            run.release()
            raise
        return run

    def roll_back(self) -> None:
        """Remove a new run whose set-up failed, so that the same command works after the cause is fixed.

        A run that was opened instead of created stays, as does one for which :meth:`retain` was called. Only
        files that the set-up writes are removed; if there are others, the folder stays. Errors are ignored,
        because the failure of the set-up must be reported.
        """
        if self._created is None:
            return
        with contextlib.suppress(OSError):
            for entry in sorted(self.path.iterdir(), key=lambda path: path.name == "lock"):  # the lock last
                if (
                    _is_beginning(entry)
                    or entry.name.startswith(("config.toml", "buffer.sqlite", LIVE))
                    or entry.name in _SETUP_FILES
                ):
                    remove(entry)
            if self._created:
                self.path.rmdir()

    def retain(self) -> None:
        """The set-up has succeeded: :meth:`roll_back` does nothing from now on."""
        self._created = None

    @classmethod
    def open(
        cls, path: Path, overrides: Sequence[str] = (), *, allow_changed_plugins: bool = False
    ) -> "tuple[RunDirectory, RunSettings]":
        """Open an existing run with its settings and the allowed overrides (for example more steps).

        With ``allow_changed_plugins``, the code of its plug-ins may differ. Raises CheckpointError if there
        is no run, and ConfigError for overrides that are not allowed on resume.
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
        """Write the changed settings of a resumed run; called when nothing can refuse them any more."""
        if self._extended is not None:
            replace_file(self.path / "config.toml", _as_toml(self._extended))

    def lock(self) -> None:
        """Lock the run for this process; the kernel frees the lock when the process ends in any way."""
        try:
            self._lock = FileLock(self.path / "lock")
        except BlockingIOError as error:
            raise ConfigError(f"{self.path} is in use by another process") from error
        remove_leftovers(self.path)  # a reader may be writing a report
        remove_leftovers(self.checkpoints, is_only_writer=True)
        for checkpoint in self.checkpoints.glob("step-*"):  # a run's end rewrites a file in them
            if checkpoint.is_dir() and not checkpoint.is_symlink():
                remove_leftovers(checkpoint)

    def release(self) -> None:
        """Free the lock; may be called twice."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def name_evaluation(self, number: int, label: str) -> None:
        """Change the label of the evaluation in line ``number`` (from 0)."""
        finished = self.finished_evaluations()
        finished[number]["label"] = label
        self._replace(finished)

    def finished_evaluations(self) -> list[dict[str, Any]]:
        """Return the recorded evaluations. A line torn by a kill is removed, and that evaluation runs
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
        """Parse a line and check the keys that a run needs."""
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
                raise ValueError("a value has another type than was written")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{self.evaluations.name} line {number} is damaged: {reason}") from error
        return read

    def cut_evaluations(self, num_retained: int) -> None:
        """Remove evaluations after the checkpoint that a resumed run starts from; they run again with the
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
        panel: str = "",
        truncation: Mapping[str, float] = MappingProxyType({}),
        trial: Evaluation | None = None,
    ) -> None:
        """Append one line and force it to disk; an adaptation also records the results of the ``trial``
        alone. ``num_training_tasks`` of the evaluation tasks are training tasks. ``panel`` is the name of the
        evaluation set, if it has one, and ``truncation`` the top-p and top-k of sampling, if they are set.
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
        if panel:
            line["panel"] = panel
        line |= truncation
        if num_training_tasks:
            line["num_training_tasks"] = num_training_tasks
        if trial is not None:
            line["trial"] = {"task_scores": dict(trial.task_scores), "task_returns": dict(trial.task_returns)}
        append(self.evaluations, (json.dumps(line) + "\n").encode())


def _as_toml(settings: RunSettings) -> bytes:
    return (to_toml(settings.model_dump(mode="json")) + "\n").encode()


def _is_beginning(entry: Path) -> bool:
    """Whether a process that was killed before it wrote the configuration left this file."""
    if entry.name == "lock":
        return entry.is_file() and not entry.stat().st_size
    if entry.name == ORIGINS_FILE:  # without a lock it is not ours
        return entry.with_name("lock").exists()
    return entry.name.startswith(("config.toml.", f"{ORIGINS_FILE}.")) and entry.match(TEMPORARY)


def require_free(path: Path) -> None:
    """Raise ConfigError if a new run cannot use the path: a folder that is not empty, or a file."""
    if path.exists() and (not path.is_dir() or not all(map(_is_beginning, path.iterdir()))):
        hint = "" if read_run(path).has_trials else " (continue it with --resume; resume= in Python)"
        raise ConfigError(f"{path} is not empty: a run directory is never overwritten{hint}")
