"""Answers to the requests of the viewer's page: plain data read from run folders.

The server sends them as JSON, and a bundle stores them as files.
"""

import errno
import json
import math
import os
import platform
import re
import shlex
import signal
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outrider.errors import DataError
from outrider.files import is_locked, json_value, read_toml
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.memory.step_store import newest_revision, search_steps
from outrider.memory.tips import MemoryChange
from outrider.metrics import WRITTEN_TOKENS, UndeclaredMetric, declared_metric
from outrider.printing import plural
from outrider.types import Origin
from outrider.viewer.advantages import explain_advantages, path_to
from outrider.viewer.configuration import comparable, digest
from outrider.viewer.overview import overview as draw_overview
from outrider.viewer.ranges import bounds
from outrider.viewer.records import SCHEMA, StepFiles, read_changes, read_rollouts, step_file
from outrider.viewer.run_reader import (
    NOTES,
    finite,
    live_state,
    read_alarms,
    read_run,
    run_status,
    task_evaluation_message,
)
from outrider.viewer.search import RolloutIndex, TextSearch, find, rows_of_table


def metric_curves(run: Path) -> dict[str, Any]:
    """``x`` by axis and ``values`` by metric, one entry per training step, and a description of each metric
    in ``metrics``."""
    data = read_run(run)
    records = [record for record in data.records if record["kind"] == "train"]
    values = _columns(records)
    columns = {name: column for name, column in values.items() if any(value is not None for value in column)}
    cold_start = [record for record in data.records if record["kind"] == "sft"]
    cold_columns = {name: column for name, column in _columns(cold_start).items() if name.startswith("sft/")}

    def summed(*names: str) -> list[float]:
        summands = [values[name] for name in names if name in values]
        return list(accumulate(sum(column[i] or 0.0 for column in summands) for i in range(len(records))))

    return {
        "x": {
            "step": [record["step"] for record in records],
            "tokens": summed(*WRITTEN_TOKENS),
            "calls": summed("rollout/num_tool_calls"),
            "seconds": summed("time/step"),
        },
        "values": columns,
        "cold_start": {"step": [record["step"] for record in cold_start], "values": cold_columns},
        "metrics": {name: describe_metric(name, data.settings) for name in columns | cold_columns},
        "evaluations": [
            {
                "number": number,
                "label": evaluation.full_label,
                "step": evaluation.step,
                "split": evaluation.split,
                "num_tasks": evaluation.num_tasks,
                "num_faults": evaluation.num_faults,
                "score": evaluation.interval,
            }
            for number, evaluation in enumerate(data.evaluations)
        ],
        "notes": list(data.notes),
    }


def _columns(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for record in records for name in record if name not in ("step", "kind"))
    return {name: [finite(record.get(name)) for record in records] for name in names}


def describe_metric(name: str, settings: Mapping[str, str]) -> dict[str, str | float | None]:
    """Unit, meaning, healthy range (in words, and as numbers ``low`` and ``high`` for a run with these
    settings) and where to look. Fields are empty for a metric that is not registered here, for example that
    of a plug-in."""
    try:
        metric = declared_metric(name)
    except UndeclaredMetric:
        unknown = {"unit": "", "meaning": "not in the registry: of a plug-in", "healthy": "", "look_at": ""}
        return unknown | {"low": None, "high": None}
    low, high = bounds(name, settings)
    return {
        "unit": "" if metric.unit == "1" else metric.unit,
        "meaning": metric.meaning,
        "healthy": metric.healthy_range,
        "look_at": metric.look_at,
        "low": low,
        "high": high,
    }


# One group as a tree, and one rollout with a value for every token.


LONGEST_TEXT: Final = 200_000
"""Characters of a turn that are sent initially; the page requests the full text of a longer one."""
VALUES: Final = ("entropies", "logprobs", "advantages", "ratios", "trainer_logprobs")


def group_view(run: Path, stem: str, trace_id: str) -> dict[str, Any]:
    """Nodes (without tokens) and rollouts of a group. Raises DataError."""
    nodes = _rows(run, stem, trace_id)
    table = read_rollouts(run, f"{stem}.parquet")
    group = table.filter(pc.equal(table["trace_id"], trace_id))
    rollouts = rows_of_table(group.append_column("where", [[stem] * len(group)]))
    if not nodes and not rollouts:
        raise DataError(f"{stem} has no group {trace_id}")
    try:
        config = read_toml(run / "config.toml")
        advantages = explain_advantages(config.get("algorithm", {}), group.to_pylist(), nodes)
    except (OSError, DataError, ValueError, TypeError, AttributeError, ArithmeticError):
        advantages = None  # of another version, damaged, or returns with a mean of 0
    view = {"where": stem, "trace_id": trace_id, "nodes": [_node(row) for row in nodes]}
    return view | {"rollouts": rollouts, "advantages": json_value(advantages)}


def tokens_view(run: Path, stem: str, trace_id: str, rollout: int) -> dict[str, Any]:
    """Tokens of the policy nodes on the path of a rollout, with their values, by node. Raises DataError."""
    rows = {row["node_id"]: row for row in _rows(run, stem, trace_id)}
    table = read_rollouts(run, f"{stem}.parquet")
    [*leaves] = [
        row["node_id"]
        for row in table.select(["trace_id", "rollout", "node_id"]).to_pylist()
        if (row["trace_id"], row["rollout"]) == (trace_id, rollout)
    ]
    if not leaves:
        raise DataError(f"{stem} has no rollout {rollout} in group {trace_id}")
    nodes = {
        str(row["node_id"]): {"tokens": row["tokens"]}
        | {name: [_short(value) for value in row[name]] for name in VALUES}
        for row in path_to(rows, leaves[0])
    }
    return {"where": stem, "trace_id": trace_id, "rollout": rollout, "nodes": nodes}


def whole_text(run: Path, stem: str, trace_id: str, node_id: int) -> dict[str, Any]:
    """Full text of a turn that is longer than :data:`LONGEST_TEXT`. Raises DataError."""
    for row in _rows(run, stem, trace_id):
        if row["node_id"] == node_id:
            return {"text": row["text"]}
    raise DataError(f"{stem} has no node {node_id} in group {trace_id}")


def _rows(run: Path, stem: str, trace_id: str) -> list[dict[str, Any]]:
    table = StepFiles(run / "traces").read_table(f"{stem}.parquet", SCHEMA)
    rows: list[dict[str, Any]] = table.filter(pc.equal(table["trace_id"], trace_id)).to_pylist()
    return rows


def _node(row: dict[str, Any]) -> dict[str, Any]:
    text, entropies = row["text"], row["entropies"]
    try:
        metadata = json.loads(row["metadata"] or "{}")
    except (ValueError, RecursionError):
        metadata = {}
    calls = metadata.get("tool_calls") if isinstance(metadata, dict) else None
    for call, seconds in zip(calls if isinstance(calls, list) else (), row["seconds"], strict=False):
        if isinstance(call, dict):
            call["seconds"] = None if math.isnan(seconds) else round(seconds, 3)
    return {
        "node_id": row["node_id"],
        "parent_id": row["parent_id"],
        "rollout": row["rollout"],
        "origin": row["origin"],
        "role": row["role"] or _ROLES[row["origin"]],
        "text": text[:LONGEST_TEXT],
        "num_hidden": max(0, len(text) - LONGEST_TEXT),
        "num_tokens": len(row["tokens"]),
        "mean_entropy": _short(sum(entropies) / len(entropies)) if entropies else None,
        "weight_version": row["weight_version"],
        "metadata": json_value(metadata) if isinstance(metadata, dict) else {},
    }


# records of version 1 have no roles
_ROLES: Final = {
    Origin.PROMPT: "user",
    Origin.POLICY: "assistant",
    Origin.ENVIRONMENT: "tool",
    Origin.BUFFER: "inline",
    Origin.MEMORY: "user",
    Origin.DEMONSTRATION: "assistant",
}


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


# Live state of a run, changes on disk since the last request of a page, and stopping a run.


def fingerprint(run: Path) -> dict[str, Any]:
    """A value that changes whenever a page of the run would: file sizes, steps, and live state."""
    files = [run / name for name in ("metrics.jsonl", "evaluations.jsonl", NOTES)]
    sizes = [file.stat().st_size if file.is_file() else -1 for file in files]
    steps = StepFiles(run / "traces").steps()
    return {
        "sizes": sizes,
        "newest": steps[-1] if steps else 0,
        "num": len(steps),
        "running": is_locked(run / "lock"),
        "live": live_state(run),
    }


def stop(run: Path) -> None:
    """Send SIGTERM, so that the run writes a checkpoint and exits. Raises DataError if the run is not on this
    machine or its process has ended, because another process may have its id.
    """
    state = live_state(run)
    if state is None or not is_locked(run / "lock"):
        raise DataError(f"{run.name} is not running")
    if state.get("host") != platform.node():
        raise DataError(f"{run.name} runs on another machine, {state.get('host')}: stop it there")
    pid = state.get("pid")
    if not isinstance(pid, int) or pid < 2:
        raise DataError(f"{run.name} does not record its process id: stop it with Ctrl-C")
    try:
        _end(pid, run / "lock")
    except OSError as error:
        raise DataError(f"{run.name} cannot be stopped: {error.strerror}") from error


def _end(pid: int, lock: Path) -> None:
    """Send SIGTERM to a process that has the lock file open. Systems other than Linux do not expose open
    files, so there only the process id is checked. Raises OSError.
    """
    if not Path("/proc/self/fd").is_dir():
        os.kill(pid, signal.SIGTERM)
        return
    process = os.pidfd_open(pid)  # refers to this process, even if the id is reused
    try:
        if not _has_open(pid, lock):
            raise ProcessLookupError(errno.ESRCH, "the process that it names is another one")
        signal.pidfd_send_signal(process, signal.SIGTERM)
    finally:
        os.close(process)


def _has_open(pid: int, path: Path) -> bool:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if descriptor.samefile(path):
                return True
        except OSError:
            continue  # closed since it was listed
    return False


# Content of the memories at a step, nearest neighbours of a query, and insertions into rollouts.


MOST: Final = 500
_EMBEDDERS: Final = ("algorithm.memory.embedder", "algorithm.tips.memory.embedder")


def memory_view(run: Path, step: int, words: str = "") -> dict[str, Any]:
    """Steps and tips that were stored after training ``step`` and contain ``words``, at most :data:`MOST` of
    each. Raises DataError.
    """
    revision, tips = _state_at_step(run, step)
    query = words.lower()
    matches = [tip for tip in tips if query in tip.text.lower() or query in tip.key.lower()]
    view: dict[str, Any] = {
        "step": step,
        "tips": {"total": len(matches), "items": [_tip(match) for match in matches[:MOST]]},
        "steps": {"total": 0, "items": [], "revision": revision},
    }
    path = run / "buffer.sqlite"
    if path.is_file():
        revision = newest_revision(path) if revision is None else revision
        total, items = search_steps(path, revision, words, limit=MOST)
        view["steps"] = {"total": total, "items": items, "revision": revision}
    return view


def neighbours(run: Path, step: int, words: str, *, memory: str) -> list[dict[str, Any]]:
    """The 20 nearest steps by key, or nearest tips by text, with the cosine similarity. Raises DataError,
    and the embedder's error if it is not installed.
    """
    config = read_run(run).settings
    revision, tips = _state_at_step(run, step)
    if memory == "steps":
        embedder = load_embedder(config.get("buffer.embedder", "minilm"))
        with StepTraceBuffer(run / "buffer.sqlite", embedder, mode="read", revision=revision) as buffer:
            return [
                {
                    "item_id": hit.record.step_id,
                    "writer": hit.record.trajectory_id,
                    "key": hit.record.task_key,
                    "agent": hit.record.agent,
                    "score": hit.record.reward,
                    "index": hit.record.step_index,
                    "text": hit.record.text,
                    "observation": hit.record.observation,
                    "similarity": hit.similarity,
                }
                for hit in buffer.query(words, k=20)
            ]
    embedder = load_embedder(next((config[name] for name in _EMBEDDERS if name in config), "minilm"))
    if not tips:
        return []
    vectors = embedder.embed([words, *(tip.text for tip in tips)])
    similarities = vectors[1:].astype(np.float64) @ vectors[0].astype(np.float64)
    best = np.argsort(-similarities, kind="stable")[:20]
    return [_tip(tips[i]) | {"similarity": float(similarities[i])} for i in best.tolist()]


def insertions(
    run: Path, *, until: int | None = None, memory: str = "", key: str = "", item: int = -1
) -> list[dict[str, Any]]:
    """Insertions of retrieved steps and tips into rollouts, newest first, at most :data:`MOST`: only those of
    training step ``until``, or those of one ``item`` over the run.
    """
    steps = [until] if until is not None else list(reversed(StepFiles(run / "traces").steps()))
    rows: list[dict[str, Any]] = []
    for step in steps:
        rows += [
            row for row in _insertions_at_step(run, step) if item < 0 or _matches_item(row, memory, key, item)
        ]
        if len(rows) >= MOST:
            break
    return rows[:MOST]


def _state_at_step(run: Path, step: int) -> tuple[int | None, list[MemoryChange]]:
    """The revision of the stored steps (None if it was not recorded), and the stored tips."""
    revision: int | None = None
    tips: dict[tuple[str, int], MemoryChange] = {}
    for _, change in read_changes(run, until=step):
        if change.memory == "steps":
            revision = change.version
        elif change.change == "added":
            tips[change.key, change.item_id] = change
        else:
            tips.pop((change.key, change.item_id), None)
    return revision, list(tips.values())


def _insertions_at_step(run: Path, step: int) -> Iterator[dict[str, Any]]:
    columns = ("step", "task_key", "trace_id", "rollout", "node_id", "origin", "metadata", "text")
    name = step_file(step)
    table = StepFiles(run / "traces").read_table(name, pa.schema(map(SCHEMA.field, columns)))
    for row in table.filter(pc.is_in(table["origin"], pa.array(["buffer", "memory"]))).to_pylist():
        metadata = json.loads(row.pop("metadata") or "{}")
        row["text"] = row["text"][:300]
        yield row | {
            "where": name.removesuffix(".parquet"),
            "ids": metadata.get("step_ids") or metadata.get("tip_ids") or [],
            "similarity": _number(metadata.get("similarity", metadata.get("similarities"))),
            "source": metadata.get("source") or ", ".join(map(str, metadata.get("writers", ()))),
        }


def _matches_item(row: dict[str, Any], memory: str, key: str, item: int) -> bool:
    """A tip's number counts within its buffer, which with the scope ``task`` is the task's."""
    is_same_memory = row["origin"] == ("buffer" if memory == "steps" else "memory")
    return is_same_memory and item in row["ids"] and (memory == "steps" or key in (row["task_key"], "all"))


def _number(value: object) -> float | None:
    number = max(value, default=None) if isinstance(value, list) else value
    return float(number) if isinstance(number, int | float) and number == number else None


def _tip(tip: MemoryChange) -> dict[str, Any]:
    return {name: value for name, value in asdict(tip).items() if name not in ("memory", "change")}


# The runs below the given folders, and their overview on the first page.


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
        """``running``, ``finished``, ``stopped`` or ``not started``."""
        return run_status(self.path, read_run(self.path))


class Catalogue:
    """Runs by id. :meth:`all` rescans the folders, because runs may begin while a page is open."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Raises DataError if there is no run below ``roots``."""
        self._roots = list(roots)
        self._known: dict[str, ViewedRun] = {}
        self.names: dict[str, str] = {}  # by id: of each run, the shortest end of its path that no other has
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
        parts = {name: run.path.resolve().parts for name, run in runs.items()}
        ends = Counter(path[-n:] for path in parts.values() for n in range(1, len(path) + 1))
        self.names = {
            name: "/".join(next((path[-n:] for n in range(1, len(path)) if ends[path[-n:]] == 1), path))
            for name, path in parts.items()
        }
        return list(runs.values())

    def get(self, name: str) -> ViewedRun:
        """Raises KeyError for an id that no run has."""
        return self._known[name]

    def overview(self) -> list[dict[str, Any]]:
        """One entry a run, as the page has them."""
        return [self._overview(run) for run in self.all()]

    def _overview(self, run: ViewedRun) -> dict[str, Any]:
        """Cached until the run changes, because a page requests it every few seconds."""
        now = fingerprint(run.path)
        if (known := self._overviews.get(run.id)) is None or known[0] != now:
            self._overviews[run.id] = known = now, overview(run)
        return known[1] | {"name": self.names[run.id]}


def run_id(path: Path) -> str:
    """A name that distinguishes runs with the same name in different folders."""
    whole = path.resolve()
    return f"{_NOT_IN_A_NAME.sub('-', whole.name)[:60]}-{zlib.crc32(str(whole).encode()):08x}"


def overview(run: ViewedRun) -> dict[str, Any]:
    """Status, method, task, score with interval, tokens, and the last alarm of a run; equal ``configuration``
    numbers mark runs that differ only in the seed.
    """
    data = read_run(run.path)
    status = run.status
    last = data.main_evaluations[-1] if data.evaluations else None
    alarms = read_alarms(run.path)
    return {
        "id": run.id,
        "configuration": digest(comparable(data.config)),
        "status": status,
        "method": data.method,
        "task": data.config.get("environment.type", ""),
        "model": data.config.get("model.name", ""),
        "seed": data.config.get("seed", ""),
        "steps": data.num_steps,
        "num_steps": data.config.get("train.num_steps", ""),
        "score": last and last.interval,
        "scored": "" if last is None else f"{last.label}, {plural(last.num_tasks, 'task')}",
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
        except (PermissionError, FileNotFoundError):  # of another user, or deleted since it was listed
            return
        for child in children:
            if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                yield from _runs_below(child, depth - 1)


# The requests of the page.


Params = Mapping[str, str]
REQUESTS: Final = frozenset(
    {"runs", "curves", "places", "rollouts", "search", "group", "tokens", "text", "memory", "neighbours"}
    | {"shown", "overview"}
)


class Viewer:
    """The runs, and the text search of the open run: only its texts are kept in memory."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._lock = Lock()
        self._search: tuple[str, TextSearch] | None = None
        self._overviews: dict[tuple[str, bool], tuple[Any, str]] = {}

    def search(self, run: ViewedRun) -> TextSearch:
        """The text search of a run. The first call reads the run's files in a thread, so that neither the
        first search nor the first filter waits for all of them; whatever opens a run calls this.
        """
        with self._lock:
            if self._search is None or self._search[0] != run.id:
                if self._search is not None:
                    self._search[1].leave()
                self._search = run.id, TextSearch(run.path)
                Thread(target=_warm_cache, args=(run, self._search[1]), daemon=True).start()
            return self._search[1]

    def answer(self, request: str, params: Params) -> Any:
        """The answer to one of :data:`REQUESTS`.

        Raises KeyError for an unknown run, file or missing parameter, and ValueError or DataError for values
        that cannot be used.
        """
        if request == "runs":
            runs = self.catalogue.overview()
            if len(runs) == 1:
                self.search(self.catalogue.get(runs[0]["id"]))  # the one that will be opened
            return runs
        run = self.catalogue.get(params["run"])
        words = params.get("words", "")
        stems = run.index.stems() if request in ("places", "search", *_OF_FILE) else []
        # The name of a file becomes a part of a path: it must be one of the run's files.
        is_of_file = request in _OF_FILE or (request == "search" and params.get("where"))
        if is_of_file and params["where"] not in stems:
            raise KeyError(params["where"])
        match request:
            case "curves":
                path = shlex.quote(str(run.path))  # for shown commands
                return metric_curves(run.path) | {"path": path, "name": self.catalogue.names[run.id]}
            case "places":
                self.search(run)  # the page sends this first
                return stems
            case "rollouts":
                page = find(run.index.table(params.get("where", "")), params)
                return page | {"notes": [] if params.get("where") else sorted(run.index.notes.values())}
            case "search":
                return self.search(run).find(
                    words[:1000], [params["where"]] if params.get("where") else stems
                )
            case "group":
                return group_view(run.path, params["where"], params["trace"])
            case "tokens":
                return tokens_view(run.path, params["where"], params["trace"], int(params["rollout"]))
            case "text":
                return whole_text(run.path, params["where"], params["trace"], int(params["node"]))
            case "memory":
                return memory_view(run.path, int(params["step"]), words)
            case "neighbours":
                memory = params.get("memory", "steps")
                return neighbours(run.path, int(params["step"]), words, memory=memory)
            case "shown" if "item" in params:
                memory, key = params.get("memory", ""), params.get("key", "")
                return insertions(run.path, memory=memory, key=key, item=int(params["item"]))
            case "shown":
                return insertions(run.path, until=int(params["step"]))
            case "overview":
                return {"html": self._overview(run, is_shared=params.get("shared") == "1")}
        raise KeyError(request)

    def _overview(self, run: ViewedRun, *, is_shared: bool) -> str:
        """Cached until the recorded data change; the live state is in no answer."""
        key, now = (run.id, is_shared), fingerprint(run.path) | {"live": None}
        if (known := self._overviews.get(key)) is None or known[0] != now:
            data, table = read_run(run.path), run.index.table()
            notes = [*data.notes, *sorted(run.index.notes.values())]
            options: dict[str, Any] = {"address": f"#/run/{run.id}", "is_shared": is_shared}
            page = draw_overview(run.path, data, table, title="Overview", notes=notes, **options)
            self._overviews[key] = known = now, str(page)
        return known[1]


_OF_FILE: Final = frozenset({"group", "tokens", "text"})


def _warm_cache(run: ViewedRun, search: TextSearch) -> None:
    run.index.table()
    search.warm(run.index.stems())
