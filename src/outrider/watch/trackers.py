"""Trackers: optional mirrors of the metrics in TensorBoard, Weights & Biases or Trackio.

``metrics.jsonl`` is the record; a tracker that cannot start stops the run before it begins, and a tracker that fails later
is switched off, said loudly and counted, while training goes on. A resumed run goes on in the trackers' own runs. It plays the
steps behind its checkpoint again, with the same values: TensorBoard forgets the first ones, the others may show them twice.
"""

import importlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Protocol

from outrider.errors import ConfigError
from outrider.types import Json

TRACKER_NAMES: Final = ("tensorboard", "wandb", "trackio")

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """A mirror of the metrics; may raise, :class:`TrackerSet` deals with it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step; all values are finite."""

    def close(self) -> None:
        """Flush and end the remote run."""


class TensorboardTracker:
    """Scalars in ``directory`` for TensorBoard, through tensorboardX (no torch, no TensorFlow)."""

    def __init__(self, *, directory: Path, resumed_at: int | None) -> None:
        module = _import("tensorboardX", extra="tensorboard")
        purged = {} if resumed_at is None else {"purge_step": resumed_at + 1}
        self._writer: Any = _start("tensorboard", lambda: module.SummaryWriter(logdir=str(directory), **purged))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run. The step is an own axis, since cold start and training both count from one."""

    def __init__(self, *, project: str, name: str, directory: Path, config: Mapping[str, Json], resumed_at: int | None) -> None:
        module = _import("wandb", extra="wandb")
        known = None if resumed_at is None else _last_wandb_id(directory)
        resumed = {} if known is None else {"id": known, "resume": "allow"}
        self._run: Any = _start(
            "wandb", lambda: module.init(project=project, name=name, dir=str(directory), config=dict(config), **resumed)
        )
        self._run.define_metric("*", step_metric="outrider_step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One record with its own step axis."""
        self._run.log({"outrider_step": step, **metrics})

    def close(self) -> None:
        """Wait for the upload."""
        self._run.finish()


class TrackioTracker:
    """A Trackio run, local by default."""

    def __init__(self, *, project: str, name: str, config: Mapping[str, Json], resumed_at: int | None) -> None:
        module = _import("trackio", extra="trackio")
        resume = "never" if resumed_at is None else "allow"
        self._run: Any = _start("trackio", lambda: module.init(project=project, name=name, config=dict(config), resume=resume))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One record at the step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Flush the record."""
        self._run.finish()


class TrackerSet:
    """Sends metrics to every tracker that still works; never raises. ``num_failures`` counts by tracker name."""

    def __init__(self, trackers: Mapping[str, Tracker], *, warn: Callable[[str], None] = _log.warning) -> None:
        self._trackers = dict(trackers)
        self._warn = warn
        self.num_failures: dict[str, int] = dict.fromkeys(trackers, 0)

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the trackers that still receive metrics."""
        return tuple(self._trackers)

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Send the values that are defined and finite; a tracker that raises is switched off."""
        values = {name: float(value) for name, value in metrics.items() if value is not None and abs(value) < float("inf")}
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, tracker, lambda tracker=tracker: tracker.log(step, values))  # type: ignore[misc]

    def close(self) -> None:
        """Close every tracker; may be called twice."""
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, tracker, tracker.close)
        self._trackers.clear()

    def _attempt(self, name: str, tracker: Tracker, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.num_failures[name] += 1
            self._trackers.pop(name, None)
            cause = f"{type(error).__name__}: {error}"
            self._warn(f"TRACKER OFF: {name} failed ({cause}); training goes on, metrics.jsonl is complete")


def make_trackers(
    names: Sequence[str],
    *,
    run_dir: Path,
    project: str = "outrider",
    config: Mapping[str, Json],
    resumed_at: int | None = None,
    warn: Callable[[str], None] = _log.warning,
) -> TrackerSet:
    """Start the named trackers before the first rollout. ``resumed_at``: the step of the checkpoint that the run goes on from.

    Raises :class:`~outrider.errors.ConfigError` for an unknown or repeated name, a missing extra, or a tracker that cannot start.
    """
    for name in names:
        if name not in TRACKER_NAMES:
            raise ConfigError(f"unknown tracker {name!r}; known: {', '.join(TRACKER_NAMES)}")
    if len(set(names)) != len(names):
        raise ConfigError(f"a tracker is named twice: {', '.join(names)}")
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorboardTracker(directory=run_dir / "tensorboard", resumed_at=resumed_at),
        "wandb": lambda: WandbTracker(
            project=project, name=run_dir.name, directory=run_dir, config=config, resumed_at=resumed_at
        ),
        "trackio": lambda: TrackioTracker(project=project, name=run_dir.name, config=config, resumed_at=resumed_at),
    }
    return TrackerSet({name: makers[name]() for name in names}, warn=warn)


def _import(module: str, *, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"tracker {extra!r} needs an extra: pip install 'outrider[{extra}]' ({error})") from error


def _start(name: str, start: Callable[[], Any]) -> Any:
    try:
        return start()
    except Exception as error:  # no login, no network, no space: said before the run begins
        raise ConfigError(f"tracker {name!r} cannot start: {error}") from error


def _last_wandb_id(directory: Path) -> str | None:
    """The id of the newest run that W&B has written there (``wandb/run-DATE_TIME-ID``, offline ones too)."""
    found = [re.fullmatch(r"(?:offline-)?run-(\d+_\d+)-(.+)", path.name) for path in (directory / "wandb").glob("*run-*")]
    named = [(match.group(1), match.group(2)) for match in found if match is not None]
    return max(named)[1] if named else None
