"""The files of a run folder that other processes read: configuration, metrics, evaluations and progress.

``live.json`` has the present state of a run and ``notes.jsonl`` every printed note; :class:`RecordedProgress`
writes both. Readers take a run folder as it is: a missing or torn file becomes a note, never an error.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
import re
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final, Literal, NamedTuple

from outrider.config import flatten
from outrider.engines.base import sampling_truncation
from outrider.errors import DataError
from outrider.files import append, is_locked, parsed, readable, whole_lines
from outrider.printing import is_graded, plural
from outrider.rollout.evaluate import evaluation_label
from outrider.types import Json
from outrider.viewer.configuration import algorithm_name, is_trained
from outrider.viewer.progress import SET_UP, Clock, Field, Progress, StageClocks, is_alarm

LIVE: Final = "live.json"
NOTES: Final = "notes.jsonl"
CHECKPOINT: Final = re.compile(r"step-(\d+)")
_EVERY_S: Final = 1.0
_STEP: Final = re.compile(r"\bstep (\d+)\b")
_log = logging.getLogger(__name__)


class RecordedProgress(Progress):
    """Wraps a display and also records progress on disk, at most once a second and at every stage and note.

    Nothing is written before the end of the set-up, so that a run that fails then, or has nothing left to do,
    is unchanged. If the disk is full, recording ends and the run continues. ``on_alarm`` is called with the
    step and the text of every alarm.
    """

    def __init__(self, inner: Progress, run: Path, *, clock: Clock = time.monotonic) -> None:
        self._inner = inner
        self._run = run
        self._clock = clock
        self._last_write = -float("inf")
        self._is_broken = False
        self._clocks = StageClocks(clock)
        self._stage = self._clocks.begin("", None, done=0, num_parallel=1)
        self._has_begun = False
        self._setup_lines: list[str] = []  # lines of the set-up
        self.on_alarm: Callable[[int | None, str], None] = lambda step, text: None
        self._state: dict[str, Any] = {
            "pid": os.getpid(),
            "host": platform.node(),
            "stage": "",
            "total": None,
            "done": 0,
            "fields": {},
            "has_ended": False,
        }

    def stage(
        self, name: str, total: int | None, *, done: int = 0, num_parallel: int = 1, **options: Any
    ) -> None:
        self._inner.stage(name, total, done=done, num_parallel=num_parallel, **options)
        self._stage = self._clocks.begin(name, total, done=done, num_parallel=num_parallel)
        self._state |= {"stage": name, "total": total, "done": done, "fields": {}}
        if name != SET_UP and not self._has_begun:
            self._has_begun = True
            for line in self._setup_lines:
                self._guarded(partial(self._append, line))
        self._write()

    def advance(self, done: int, **fields: Field) -> None:
        self._inner.advance(done, **fields)
        self._stage.advance(done, dict(fields))
        self._state["done"] = done
        self._state["fields"] |= fields
        if self._clock() - self._last_write >= _EVERY_S:
            self._write()

    def note(self, text: str, **details: Any) -> None:
        """Record a message with the step that it names, or else the newest step. A checkpoint is only shown:
        it is a file of the run.
        """
        self._inner.note(text, **details)
        if details.get("event") == "checkpoint":
            return
        match = _STEP.search(text)
        step = int(match[1]) if match else self._state["done"] if self._state["stage"] == "train" else None
        if details.get("event", "note") == "note" and is_alarm(text):
            self.on_alarm(step, text)
        line = {"time": time.time(), "stage": self._state["stage"], "step": step, "text": text}
        if self._has_begun:
            self._guarded(partial(self._append, json.dumps(line)))
        else:
            self._setup_lines.append(json.dumps(line))

    def tick(self) -> None:
        self._inner.tick()

    def stopping(self) -> bool:
        return self._inner.stopping()

    def close(self) -> None:
        """Record that the process has finished, and close the display."""
        self._state["has_ended"] = True
        self._write()
        self._inner.close()

    def _append(self, line: str) -> None:
        append(self._run / NOTES, (line + "\n").encode())

    def _write(self) -> None:
        self._last_write = self._clock()
        if self._has_begun:
            self._guarded(self._replace)

    def _replace(self) -> None:
        # Neither synced to disk nor locked, because the next update replaces it a second later.
        temporary = self._run / f"{LIVE}.new"
        temporary.write_text(
            json.dumps(self._state | {"line": self._stage.summary(), "time": time.time()}), encoding="utf-8"
        )
        temporary.replace(self._run / LIVE)

    def _guarded(self, write: Any) -> None:
        if self._is_broken:
            return
        try:
            write()
        except (OSError, ValueError, TypeError) as error:
            self._is_broken = True
            _log.warning("the run's progress is no longer recorded, the run continues: %s", error)


_MAX_LISTED_LINES: Final = 3
_LARGEST: Final = 1e300  # sums and ranges of larger numbers overflow
_LARGEST_STEP: Final = 2**53  # larger ones are no floats of their own


class Interval(NamedTuple):
    """A score with its 95 % interval."""

    value: float
    ci_low: float
    ci_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One line of ``evaluations.jsonl``. ``interval`` is None if every rollout ended in a fault;
    ``task_scores`` and ``task_returns`` are empty if they are not on file.

    ``num_faults`` are rollouts that ended in a fault and are in no score; ``num_training_tasks`` of the tasks
    are training tasks. ``panel`` is the name of the evaluation set, or "" if the run has only one.
    ``top_p`` and ``top_k`` are those of sampling, or None.
    """

    label: str
    split: str
    num_tasks: int
    interval: Interval | None
    step: int
    temperature: float
    panel_hash: str
    num_faults: int = 0
    num_training_tasks: int = 0
    task_scores: Mapping[str, float] = field(default_factory=dict)
    task_returns: Mapping[str, float] = field(default_factory=dict)
    mean_return: float | None = None
    panel: str = ""
    top_p: float | None = None
    top_k: float | None = None

    @property
    def full_label(self) -> str:
        """The label with the name of the evaluation set, if it has one."""
        return evaluation_label(self.label, self.panel)

    @property
    def truncation(self) -> dict[str, Any]:
        """``top_p`` and ``top_k``, as far as they are set."""
        return sampling_truncation(self)

    @property
    def score(self) -> float:
        """Mean success over tasks, or NaN if no rollout has a result."""
        return math.nan if self.interval is None else self.interval.value

    @property
    def conditions(self) -> tuple[str, float, str, float | None, float | None]:
        """Split, temperature, panel, top-p and top-k: only scores with the same ones can be compared."""
        return self.split, self.temperature, self.panel_hash, self.top_p, self.top_k

    @property
    def graded_return(self) -> float | None:
        """The mean return if it differs from the share of solved tasks, else None."""
        return self.mean_return if is_graded(self.score, self.mean_return) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Contents of a run directory; ``notes`` list the files that could not be read.

    ``config`` is flat (dotted keys) and for display, with only the last part of each path. ``settings`` are
    the same with absolute paths, for comparing runs; do not show them on a page.
    """

    config: Mapping[str, str]
    settings: Mapping[str, str]
    records: tuple[Mapping[str, Json], ...]
    evaluations: tuple[Evaluation, ...]
    notes: tuple[str, ...]

    @property
    def main_evaluations(self) -> tuple[Evaluation, ...]:
        """The evaluations on the main evaluation set, which is always evaluated first."""
        first = self.evaluations[0].panel if self.evaluations else ""
        return tuple(evaluation for evaluation in self.evaluations if evaluation.panel == first)

    @property
    def evaluates_training_tasks(self) -> bool:
        """Whether an evaluation is on tasks of which some are training tasks."""
        return any(evaluation.num_training_tasks for evaluation in self.evaluations)

    def curve(self, kind: str, name: str) -> list[tuple[int, float | None]]:
        """(step, value) of a metric over the records of a kind that have it."""
        return [
            (step, finite(record[name]))
            for record in self.records
            if record["kind"] == kind and name in record and isinstance(step := record["step"], int)
        ]

    @property
    def num_steps(self) -> int:
        """Number of recorded training steps."""
        return max((step for step, _ in self.curve("train", "reward/mean")), default=0)

    @property
    def has_all_steps(self) -> bool:
        """Whether the steps of the recipe are recorded, or fewer that spent the token budget."""
        num_steps = self.config.get("train.num_steps", "")
        return self.is_budget_spent or (num_steps.isdigit() and self.num_steps >= int(num_steps))

    @property
    def is_done(self) -> bool:
        """Whether the run has all steps, and then an evaluation on the last evaluation set. A run without
        steps is done when its cold start, or else its model, has been evaluated in this way, and an
        adaptation after its last trial.
        """
        num_steps = self.config.get("train.num_steps", "")
        if not self.has_all_steps:
            return False
        if not self.evaluations:  # if it evaluates at its start, there are no tasks to evaluate on
            return num_steps != "0" and self.config.get("evaluation.at_start") != "False"
        last = self.evaluations[-1]
        if num_steps == "0" and is_trained(self.config) and last.label != "after cold start":
            return False
        # the name of the last set, in the text of the list; sets are evaluated in order
        last_set = self.settings.get("evaluation.panels", "[]").rpartition("'name': ")[2]
        return (
            last.step >= self.num_steps
            and (last_set == "[]" or last_set.startswith(repr(last.panel)))
            and not pending_trials(self.config, self.main_evaluations)
        )

    @property
    def has_trials(self) -> bool:
        """Whether this is an adaptation (``outrider eval --adapt``), which cannot be resumed."""
        return self.config.get("evaluation.num_trials", "0") != "0"

    @property
    def is_budget_spent(self) -> bool:
        """Whether the run has generated ``train.max_policy_tokens``, which ends it before its last step."""
        budget = self.config.get("train.max_policy_tokens", "none")
        totals = [value for _, value in self.curve("train", "tokens/policy_total") if value is not None]
        return budget.isdigit() and max(totals, default=0.0) >= int(budget)

    @property
    def method(self) -> str:
        """The preset or algorithm that trained; ``imitation`` for a cold start without training steps, and
        ``evaluation`` if nothing trained.
        """
        if self.config.get("train.num_steps") == "0":
            return "imitation" if is_trained(self.config) else "evaluation"
        return algorithm_name(self.config)

    def total(self, kind: str, name: str) -> float:
        """Sum of a metric over the records of a kind."""
        return math.fsum(value for _, value in self.curve(kind, name) if value is not None)


def pending_trials(config: Mapping[str, str], trials: Sequence[Evaluation]) -> int:
    """Number of trials that an adaptation has not made; Reflexion ends when every task is solved."""
    num_trials = config.get("evaluation.num_trials", "0")
    is_solved = bool(trials) and trials[-1].score == 1.0 and not trials[-1].num_faults
    if not num_trials.isdecimal() or (is_solved and config.get("evaluation.memory") == "reflexion"):
        return 0
    return max(0, int(num_trials) - len(trials))


def run_status(run: Path, data: RunData) -> Literal["running", "finished", "stopped", "not started"]:
    """The state of a run whose contents are ``data``; a killed run is ``stopped``."""
    if is_locked(run / "lock"):
        return "running"
    if data.is_done or (data.has_all_steps and not data.evaluations and not _has_evaluation_tasks(run)):
        return "finished"
    has_begun = data.records or data.evaluations or live_state(run) is not None
    return "stopped" if has_begun else "not started"


def _has_evaluation_tasks(run: Path) -> bool:
    """Whether a run evaluates, by its newest checkpoint that can be read; True without one."""
    for state in sorted(run.glob("checkpoints/step-*/state.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            tasks = json.loads(state.read_text(encoding="utf-8"))["tasks"]
            # other hashes of evaluation sets than that of no tasks
            return bool({tasks[name] for name in tasks if name != "train"} - {hashlib.sha256().hexdigest()})
    return True


def read_run(run_dir: Path) -> RunData:
    """Read configuration, metrics and evaluations of a run."""
    notes: list[str] = []
    config, settings = _read_config(run_dir / "config.toml", notes)
    path, metrics = run_dir / "evaluations.jsonl", run_dir / "metrics.jsonl"
    lines: list[dict[str, Json]] = []
    # A run in its set-up has only its configuration and the lock.
    others = (run_dir / LIVE, path, run_dir / "traces")
    if metrics.exists() or any(other.exists() for other in others) or not config:
        lines = _read_lines(metrics, notes)
    records = [record for record in lines if _is_record(record, notes)]
    lines = []
    if path.exists() or any(record["kind"] == "eval" for record in records):  # else none has been made yet
        lines = _read_lines(path, notes)
    evaluations = [_evaluation(line, notes) for line in lines]
    return RunData(
        config=config,
        settings=settings,
        records=tuple(records),
        evaluations=tuple(evaluation for evaluation in evaluations if evaluation is not None),
        notes=tuple(notes),
    )


def numbered_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Steps and folders of checkpoints, ascending; without files, and folders of other names, such as copies
    that a user made.
    """
    matches = ((CHECKPOINT.fullmatch(path.name), path) for path in folder.glob("step-*") if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file of a run, without a last line that is being written; none if the file is
    missing. Raises DataError for a damaged line.
    """
    try:
        return [parsed(line) for line in whole_lines(path)]
    except ValueError as error:
        raise DataError(f"{path.name} is damaged: {error}") from error


def task_evaluation_message(folder: Path) -> str:
    """Error message for the folder of an evaluation of tasks, which is no run; empty for any other folder."""
    if not (folder / "results.jsonl").is_file() or (folder / "config.toml").is_file():
        return ""
    return (
        f"{folder} is an evaluation of eval --tasks, no run: its scores are in summary.json, its replies "
        "in results.jsonl, and outrider inspect-log makes a log of them that inspect view opens"
    )


def finite(value: object) -> float | None:
    """The value as a float if it is a number that can be added up and drawn, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:
        return None
    return float(value)


def _read_config(path: Path, notes: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The configuration for display and for comparing runs (:class:`RunData`)."""
    try:
        # its errors, unlike those of read_toml, name no folder of this machine
        flat = dict(flatten(tomllib.loads(path.read_text(encoding="utf-8-sig"))))
        return {key: _portable(value) for key, value in flat.items()}, {k: str(v) for k, v in flat.items()}
    except FileNotFoundError:
        notes.append("config.toml is missing")
    except OSError as error:  # its text names folders of this machine
        notes.append(f"config.toml cannot be read: {error.strerror}")
    except ValueError as error:
        notes.append(f"config.toml cannot be read: {error}")
    except RecursionError:
        notes.append("config.toml cannot be read: it is nested too deeply")
    return {}, {}


def _portable(value: object) -> str:
    """The value without the folders of this machine, because reports are read on other machines."""
    if isinstance(value, list):
        return "[" + ", ".join(_portable(item) for item in value) + "]"
    text = str(value)
    for path in (PurePosixPath(text), PureWindowsPath(text)):
        if path.is_absolute():
            return f".../{path.name}"
    return f".../{text.rpartition('/')[2]}" if text.startswith("~/") else text


def _read_lines(path: Path, notes: list[str]) -> list[dict[str, Json]]:
    try:
        lines = list(readable(path))
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        notes.append(
            f"{path.name} is missing" if is_missing else f"{path.name} cannot be read: {error.strerror}"
        )
        return []
    bad = [number for number, value in lines if value is None]
    if bad:
        numbers = ", ".join(map(str, bad[:_MAX_LISTED_LINES])) + (
            ", ..." if len(bad) > _MAX_LISTED_LINES else ""
        )
        notes.append(f"{path.name}: {plural(len(bad), 'damaged or torn line')} left out (line {numbers})")
    return [value for _, value in lines if value is not None]


def _is_record(record: Mapping[str, Json], notes: list[str]) -> bool:
    step = record.get("step")
    if (
        isinstance(step, int)
        and not isinstance(step, bool)
        and abs(step) < _LARGEST_STEP
        and record.get("kind") in ("train", "sft", "eval")
    ):
        return True
    notes.append("metrics.jsonl: a line without step or kind was left out")
    return False


def _task_values(line: Mapping[str, Any], name: str) -> dict[str, float]:
    values = {str(key): finite(value) for key, value in line.get(name, {}).items()}
    return {key: value for key, value in values.items() if value is not None}


def _evaluation(line: Mapping[str, Any], notes: list[str]) -> Evaluation | None:
    try:
        interval = Interval(*(float(line["metric"]["score"][name]) for name in Interval._fields))
        evaluation = Evaluation(
            label=str(line["label"]),
            split=str(line["split"]),
            num_tasks=int(line["num_tasks"]),
            interval=None if None in map(finite, interval) else interval,
            step=int(line["step"]),
            temperature=float(line["temperature"]),
            panel_hash=str(line["panel_hash"]),
            num_faults=int(line.get("num_faults", 0)),
            num_training_tasks=int(line.get("num_training_tasks", 0)),
            task_scores=_task_values(line, "task_scores"),
            task_returns=_task_values(line, "task_returns"),
            mean_return=finite(line.get("mean_return")),
            panel=str(line.get("panel", "")),
            top_p=finite(line.get("top_p")),
            top_k=finite(line.get("top_k")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        notes.append(f"evaluations.jsonl: an evaluation was left out ({type(error).__name__}: {error})")
        return None
    if abs(evaluation.step) >= _LARGEST_STEP:
        notes.append("evaluations.jsonl: an evaluation of an impossible step was left out")
        return None
    if evaluation.interval is None:
        faults = plural(evaluation.num_faults, "fault")
        notes.append(f"evaluations.jsonl: {evaluation.label!r} has no score: {faults}")
    return evaluation


def live_state(run: Path) -> dict[str, Any] | None:
    """The content of ``live.json``: stage, units done, fields and time; None if there is none."""
    try:
        state = json.loads((run / LIVE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def read_notes(run: Path) -> list[dict[str, Any]]:
    """The lines of ``notes.jsonl`` with a text; none if the run has no notes."""
    try:
        return [line for _, line in readable(run / NOTES) if line and "text" in line]
    except OSError:
        return []


def read_alarms(run: Path) -> list[dict[str, Any]]:
    """The notes that are warnings, with their step (None: before training) and time, in order. Of those that
    a resumed run repeats, the last one counts.
    """
    alarms: dict[tuple[Any, str], dict[str, Any]] = {}
    for note in read_notes(run):
        if is_alarm(text := str(note["text"])):
            key = note.get("step"), text
            alarms.pop(key, None)
            alarms[key] = {"step": key[0], "time": note.get("time"), "text": text}
    return list(alarms.values())
