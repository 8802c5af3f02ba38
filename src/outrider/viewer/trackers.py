"""Trackers: optional mirrors of the metrics in TensorBoard, Weights & Biases or Trackio.

``metrics.jsonl`` is the authoritative record. A tracker that cannot start is an error before the run begins.
A tracker that fails later is disabled with a warning and counted, and training continues.

A resumed run continues the trackers' own runs, whose identities are in ``trackers.json`` of the run
directory. It repeats the steps after its checkpoint with the same values: TensorBoard discards the first
ones, the other trackers may show them twice. W&B cannot continue an offline run, so a resumed run starts a
new W&B run.
"""

import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any, Final, Protocol, Self, TypeAlias

from pydantic import Field

from outrider.config import Settings
from outrider.errors import ConfigError, OutriderError
from outrider.files import replace_file
from outrider.plugins.registry import build_by_name, resolve
from outrider.trace import Leaf, Node, Trace
from outrider.types import Json
from outrider.viewer.configuration import comparable, digest
from outrider.viewer.run_reader import read_run

Row: TypeAlias = tuple[str | float | bool, ...]
IDENTITIES: Final = "trackers.json"
PACKAGES: Final = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}

_log = logging.getLogger(__name__)


class TrackingSettings(Settings):
    """Names of a run in trackers, and the rollouts that they get. An evaluation sends one rollout of each
    task.
    """

    project: str = "outrider"
    """Project of the run in W&B and Trackio."""
    entity: str | None = None
    """User or team in W&B."""
    group: str | None = None
    """Group of the run in W&B and Trackio (None: runs that differ only in the seed share one)."""
    name: str | None = None
    """Name of the run (None: that of its folder)."""
    tags: tuple[str, ...] = ()
    """Tags of the run in W&B, besides its algorithm, environment and model."""
    num_rollouts: int = Field(4, ge=0)
    """Number of groups of a training step, the first ones, that send one rollout each to a table."""
    rollouts_every: int = Field(1, ge=0)
    """Interval in training steps between the steps that send rollouts, from the first one on (0: never)."""

    def sends_rollouts(self, step: int) -> bool:
        """Return whether rollouts of this training step (from 1) are sent."""
        return self.num_rollouts > 0 and self.rollouts_every > 0 and (step - 1) % self.rollouts_every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerContext:
    """Arguments for building a tracker: ``config`` are the run's settings, ``newest_step`` is the step of the
    newest checkpoint (None if there is none), ``known`` is the :attr:`Tracker.identity` from the start of the
    run, and ``first_step`` is the smallest step that may be logged (negative if the run has a cold start).
    """

    run_dir: Path
    project: str
    config: Mapping[str, Json]
    newest_step: int | None
    known: str | None
    first_step: int = 0
    tracking: TrackingSettings = field(default_factory=TrackingSettings)

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.tracking.name or self.run_dir.name


class Tracker(Protocol):
    """A mirror of the metrics. Methods may raise; :class:`TrackerSet` catches the exceptions. ``identity``
    identifies the tracker's run when it is resumed; a tracker that cannot resume a run needs none.

    A plug-in is a class with ``build(settings, context)``, where ``context`` is a :class:`TrackerContext`. If
    it has a method ``log_table(step, name, columns, rows)``, that gets the tables of sample rollouts, and a
    method ``alert(step, text)`` the alarms.
    """

    identity: str | None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step; all values are finite.

        Training steps count from 1. The steps of a cold start come before them and are at most 0, so steps
        never decrease within a run.
        """

    def close(self) -> None:
        """Flush and end the remote run."""


class _BuiltinTracker:
    """A tracker whose package is an optional dependency (an extra)."""

    identity: str | None = None

    def __init__(self, context: TrackerContext) -> None:
        raise NotImplementedError

    @classmethod
    def build(cls, settings: Settings, context: TrackerContext) -> Self:
        """Start the tracker. Raises ConfigError."""
        return cls(context)


class TensorboardTracker(_BuiltinTracker):
    """Scalars in the folder ``tensorboard`` of the run, through tensorboardX (no torch, no TensorFlow). A
    resumed run continues in its folder, so it needs no identity.
    """

    def __init__(self, context: TrackerContext) -> None:
        directory = context.run_dir / "tensorboard"
        purge = context.first_step if context.newest_step is None else context.newest_step + 1
        purged = {"purge_step": purge} if directory.exists() else {}
        module = _import("tensorboardX", extra="tensorboard")
        self._writer: Any = _start(
            "tensorboard", lambda: module.SummaryWriter(logdir=str(directory), **purged)
        )
        if names := [name for name in (context.tracking.group, *context.tracking.tags) if name]:
            self._writer.add_text("run", ", ".join(names), global_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Write the rows as text: tensorboardX has no tables."""
        blocks = []
        for row in rows:
            text = "\n".join(f"{key}: {value}" for key, value in zip(columns, row, strict=True))
            blocks.append(indent(text, "    ", lambda line: True))  # shown as it is
        self._writer.add_text(name, "\n\n---\n\n".join(blocks), global_step=step)

    def alert(self, step: int, text: str) -> None:
        self._writer.add_text("alarms", text, global_step=step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker(_BuiltinTracker):
    """A Weights & Biases run, by default under the name of the run directory. The step is an axis of its own,
    because W&B refuses negative steps, which the cold start has.
    """

    def __init__(self, context: TrackerContext) -> None:
        options: dict[str, Any] = {
            "project": context.project, "name": context.name, "dir": str(context.run_dir),
            "config": dict(context.config),
        }  # fmt: skip
        tracking = context.tracking
        optional = {"entity": tracking.entity, "group": tracking.group, "tags": list(tracking.tags)}
        # W&B has variables for the others
        options |= {key: value for key, value in optional.items() if value}
        if context.known is not None:
            options |= {"id": context.known, "resume": "allow"}
        self._module: Any = (module := _import("wandb", extra="wandb"))
        self._run: Any = _start("wandb", lambda: module.init(**options))
        self._run.define_metric("*", step_metric="outrider_step")
        self.identity = None if self._run.offline else str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"outrider_step": step, **metrics})

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Send a table under its own step; the viewer of W&B has a slider over them."""
        table = self._module.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({"outrider_step": step, name: table})

    def alert(self, step: int, text: str) -> None:
        """Alert by e-mail or Slack, as the user's settings in W&B say: about one problem once in an hour."""
        self._run.alert(title=_alert_title(text), text=text, level="WARN", wait_duration=_ALERT_EVERY_S)

    def close(self) -> None:
        """Wait for the upload."""
        self._run.finish()


class TrackioTracker(_BuiltinTracker):
    """A Trackio run, by default under the name of the run directory, and local."""

    def __init__(self, context: TrackerContext) -> None:
        self._module: Any = (module := _import("trackio", extra="trackio"))
        options: dict[str, Any] = {
            "config": dict(context.config), "resume": "never" if context.known is None else "allow",
        }  # fmt: skip
        if context.tracking.group is not None:
            options["group"] = context.tracking.group
        name = context.known or context.name
        self._run: Any = _start("trackio", lambda: module.init(project=context.project, name=name, **options))
        self.identity = str(self._run.name)  # differs from the requested name if that is taken

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        pandas: Any = _import("pandas", extra="trackio")  # a dependency of Trackio
        frame = pandas.DataFrame([list(row) for row in rows], columns=list(columns))
        self._run.log({name: self._module.Table(dataframe=frame)}, step=step)

    def alert(self, step: int, text: str) -> None:
        if hasattr(self._run, "alert"):  # earlier versions have none
            self._run.alert(title=_alert_title(text), text=text, step=step)

    def close(self) -> None:
        self._run.finish()


_ALERT_EVERY_S: Final = 3600


def _alert_title(text: str) -> str:
    """The problem, in fewer than 64 characters and without its numbers, so that every step has the same."""
    problem = re.sub(r"^(ALARM: )?(step \d+: )?|[:;] .*", "", text)
    return re.sub(r"\d+(\.\d+)?", "N", problem)[:63]


class TrackerSet:
    """Sends metrics to every tracker that still works; never raises. ``num_failures`` counts by tracker
    name.
    """

    def __init__(
        self,
        trackers: Mapping[str, Tracker],
        *,
        tracking: TrackingSettings | None = None,
        warn: Callable[[str], None] = _log.warning,
    ) -> None:
        self._trackers = dict(trackers)
        self._tracking = tracking or TrackingSettings()
        self._warn = warn
        self.num_failures: dict[str, int] = dict.fromkeys(trackers, 0)

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Send the values that are defined and finite, and disable a tracker that raises."""
        values = {
            name: float(value)
            for name, value in metrics.items()
            if value is not None and abs(value) < float("inf")
        }
        for name in list(self._trackers):
            self._attempt(name, "log", step, values)

    def log_rollouts(self, step: int, traces: Sequence[Trace], *, label: str | None = None) -> None:
        """Send a table of rollouts, one of each group: of a training step if its turn has come, or of the
        evaluation ``label``.
        """
        limit = None
        if label is None:
            if not self._tracking.sends_rollouts(step):
                return
            limit = self._tracking.num_rollouts
        with_tables = [name for name, item in self._trackers.items() if hasattr(item, "log_table")]
        rows = [row for trace in traces[:limit] if (row := _row(step, trace, label or "training"))]
        if not (with_tables and rows):
            return
        table = "rollouts/train" if label is None else "rollouts/eval"
        for name in with_tables:
            self._attempt(name, "log_table", step, table, COLUMNS, rows)

    def alert(self, step: int | None, text: str) -> None:
        """Send an alarm. ``step`` is None before training."""
        for name, tracker in list(self._trackers.items()):
            if getattr(tracker, "alert", None) is not None:
                self._attempt(name, "alert", step or 0, text)

    def close(self) -> None:
        """Close every tracker; may be called twice."""
        for name in list(self._trackers):
            self._attempt(name, "close")
        self._trackers.clear()

    def _attempt(self, name: str, method: str, *arguments: Any) -> None:
        try:
            getattr(self._trackers[name], method)(*arguments)
        except Exception as error:
            self.num_failures[name] += 1
            self._trackers.pop(name, None)
            cause = f"{type(error).__name__}: {error}"
            self._warn(f"TRACKER OFF: {name} failed ({cause}); training continues, metrics.jsonl is complete")


COLUMNS: Final = ("step", "policy", "task", "question", "rollout", "return", "success", "outcome")
"""Columns of the tables of rollouts; ``policy`` is ``training`` or the label of an evaluation."""
_MAX_CHARS: Final = 8_000  # of a rollout in a table


def _row(step: int, trace: Trace, label: str) -> Row | None:
    """Return the group's first rollout without a fault as values of :data:`COLUMNS`; None without any."""
    first: tuple[Leaf, list[Node]] | None = next(trace.scored_rollouts(), None)
    if first is None:
        return None
    leaf, path = first
    text = "\n".join(_describe(node) for node in path)
    if len(text) > _MAX_CHARS:
        text = f"{text[:_MAX_CHARS]}\n({len(text) - _MAX_CHARS} more characters)"
    task = trace.task
    assert leaf.episode_return is not None  # of a scored rollout
    result = (float(leaf.episode_return), bool(leaf.success), leaf.outcome.value)
    return (step, label, task.key, task.question, text, *result)


def _describe(node: Node) -> str:
    message = node.message
    calls = [f"{call.name}({json.dumps(call.arguments)})" for call in message.tool_calls]
    return "\n".join([f"[{message.role}] {message.reasoning}{message.content}", *calls])


def require_installed(names: Sequence[str]) -> None:
    """Raises ConfigError for a built-in tracker whose package is not installed; imports none of them."""
    for name in names:
        if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(f"tracker {name!r} needs an extra: pip install 'outrider[{name}]'")


def make_trackers(
    names: Sequence[str],
    *,
    run_dir: Path,
    tracking: TrackingSettings | None = None,
    config: Mapping[str, Json],
    newest_step: int | None = None,
    first_step: int = 0,
    warn: Callable[[str], None] = _log.warning,
) -> TrackerSet:
    """Start the named trackers before the first rollout. ``newest_step``: the step of the newest checkpoint,
    or None. ``first_step``: the smallest step that may be logged.

    Raises :class:`~outrider.errors.ConfigError` for an unknown or repeated name, a missing extra, or a
    tracker that cannot start.
    """
    for name in names:
        try:
            resolve("trackers", name)
        except ConfigError as error:
            raise ConfigError(f"trackers: {error}") from error
    if len(set(names)) != len(names):
        raise ConfigError(f"a tracker is named twice: {', '.join(names)}")
    identities = run_dir / IDENTITIES
    known: dict[str, str] = json.loads(identities.read_text(encoding="utf-8")) if identities.exists() else {}
    trackers: dict[str, Tracker] = {}
    tracking = _with_configuration(tracking or TrackingSettings(), run_dir)
    for name in names:
        context = TrackerContext(
            run_dir=run_dir,
            project=tracking.project,
            tracking=tracking,
            config=config,
            newest_step=newest_step,
            known=known.get(name),
            first_step=first_step,
        )
        trackers[name] = _start(name, partial(build_by_name, "trackers", name, None, context))
    for name, tracker in trackers.items():
        if (identity := getattr(tracker, "identity", None)) is not None:  # optional for plug-ins
            known[name] = str(identity)
    if known:
        replace_file(identities, json.dumps(known).encode())
    return TrackerSet(trackers, tracking=tracking, warn=warn)


def _with_configuration(tracking: TrackingSettings, run_dir: Path) -> TrackingSettings:
    """Add the group of the run's configuration, unless one is set, and the tags of algorithm, environment and
    model. Variables of W&B count as set.
    """
    data = read_run(run_dir)
    if not data.config:
        return tracking
    group = tracking.group or os.environ.get("WANDB_RUN_GROUP")
    keys = ("environment.type", "model.name")
    own = [data.method, *(re.split(r"[:/]", data.config.get(key, ""))[-1][:64] for key in keys)]
    tags = [*(tracking.tags or os.environ.get("WANDB_TAGS", "").split(",")), *own]
    return tracking.model_copy(
        update={
            "group": group or f"{data.method} {digest(comparable(data.config))[:6]}",
            "tags": tuple(filter(None, dict.fromkeys(tags))),
        }
    )


def _import(module: str, *, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"tracker {extra!r} needs an extra: pip install 'outrider[{extra}]' ({error})"
        ) from error


def _start(name: str, start: Callable[[], Any]) -> Any:
    try:
        return start()
    except OutriderError:
        raise
    except Exception as error:  # no login, network or disk space: raise before the run begins
        raise ConfigError(f"tracker {name!r} cannot start: {error}") from error
