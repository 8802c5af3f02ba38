"""``outrider push --dataset``: a buffer, demonstrations or traces as a data set of the Hugging Face hub."""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from huggingface_hub import get_token

from outrider import __version__
from outrider.errors import ConfigError
from outrider.memory.steps.database import Database, copy_database
from outrider.memory.steps.format import check_file, check_schema, meta
from outrider.memory.steps.load import load_all
from outrider.memory.steps.sources import SUFFIXES, Imported, import_trajectories
from outrider.train.hub.dataset_card import dataset_card
from outrider.train.hub.shown import may_be_secret
from outrider.train.hub.uploading import CARD, Pushed, hub, list_files, require_target, upload
from outrider.types import Trajectory
from outrider.watch.step_files import StepFiles, evaluation_file, step_file
from outrider.watch.traces import node_table, read_rows

_SHORTEST: Final = 8  # characters of a secret: a shorter one would be found in any text


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Files in a folder, what they are, how many of what, and the agents by their trajectories."""

    kind: str
    counts: dict[str, int]
    agents: Counter[str] = field(default_factory=Counter)


def push_dataset(path: Path, repo: str, *, private: bool = False, dry_run: bool = False) -> Pushed:
    """Check a file of ours, write its card, and upload both. ``path`` is a step-trace buffer, a file of
    chat trajectories, or the folder ``traces`` of a run.

    Raises DataError and BufferCorrupt for what is none of these or is damaged, and ConfigError where it holds
    a secret of this environment; else as :func:`outrider.train.hub.push.push_run`.
    """
    require_target(repo, dry_run=dry_run)
    with tempfile.TemporaryDirectory(prefix="outrider-push-") as scratch:
        folder = Path(scratch) / "dataset"
        folder.mkdir()
        if path.is_dir():
            prepared = _traces(path, folder)
        elif path.suffix.lower() in SUFFIXES:
            prepared = _trajectories(path, folder)
        else:
            prepared = _buffer(path, folder)
        card = dataset_card(repo, prepared.kind, prepared.counts, prepared.agents)
        (folder / CARD).write_text(card, encoding="utf-8")
        files = list_files(folder)
        if dry_run:
            return Pushed(card=card, files=files)
        message = f"Outrider {__version__}: {prepared.kind}"
        url = upload(hub(), folder, repo, kind="dataset", private=private, message=message)
    return Pushed(card=card, files=files, url=url)


def _buffer(path: Path, folder: Path) -> Prepared:
    """A copy of the file as it is at one moment, removed steps included."""
    copy = folder.with_name("copy.sqlite")  # SQLite puts files of its own beside what it reads
    copy_database(path, copy)
    database = Database(copy, writable=False)
    try:
        with database.guard() as db:
            check_schema(path, db)
        dim = int(meta(database, "dim"))
        check_file(copy, embedder=str(meta(database, "embedder")), dim=dim)
        load_all(database, dim=dim)  # every checksum
        with database.guard() as db:
            trajectories = db.execute("SELECT agent, task_key, question, trajectory_id FROM trajectories")
            rows = trajectories.fetchall()
            _require_no_secret(path, (text for row in rows for text in row))
            steps = db.execute("SELECT text, observation FROM steps")
            _require_no_secret(path, (text for row in steps for text in row))
        num_steps = int(meta(database, "num_steps"))
    finally:
        database.close()
    copy.rename(folder / "buffer.sqlite")
    counts = {"tasks": len({row[1] for row in rows}), "trajectories": len(rows), "steps": num_steps}
    return Prepared(kind="step-trace buffer", counts=counts, agents=Counter(row[0] for row in rows))


def _trajectories(path: Path, folder: Path) -> Prepared:
    """What Outrider reads of the file; columns of others stay here."""
    imported = import_trajectories(path)
    lines = [_record(trajectory, imported) for trajectory in imported.trajectories]
    _require_no_secret(path, lines)
    (folder / "trajectories.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    trajectories = imported.trajectories
    counts = {
        "tasks": len(imported.questions),
        "trajectories": len(trajectories),
        "steps": sum(len(trajectory.steps) for trajectory in trajectories),
    }
    return Prepared(
        kind="trajectories", counts=counts, agents=Counter(trajectory.agent for trajectory in trajectories)
    )


def _record(trajectory: Trajectory, imported: Imported) -> str:
    """A line that is read back as the same trajectory."""
    messages = [{"role": message.role, "content": message.content} for message in trajectory.prompt]
    for step in trajectory.steps:
        messages.append({"role": "assistant", "content": step.text})
        if step.observation:
            messages.append({"role": "user", "content": step.observation})
    record = {
        "question": imported.questions[trajectory.task_key],
        "messages": messages,
        "reward": trajectory.reward,
        "task_key": trajectory.task_key,
        "agent": trajectory.agent,
        "trajectory_id": trajectory.trajectory_id,
        "num_tokens": trajectory.num_tokens,
    }
    return json.dumps(record, ensure_ascii=False)


def _traces(path: Path, folder: Path) -> Prepared:
    source = StepFiles(path)
    names = [*map(step_file, source.steps()), *map(evaluation_file, source.evaluations())]
    if not names:
        raise ConfigError(f"{path} holds no traces: name the folder traces of a run")
    counts = Counter({"files of steps and evaluations": len(names), "nodes": 0, "rollouts": 0})
    copies = StepFiles(folder / "traces")
    for name in names:
        rows = read_rows(path, name)
        _require_no_secret(path / name, (text for row in rows for text in (row.text, row.metadata)))
        counts["nodes"] += len(rows)
        counts["rollouts"] += sum(row.outcome is not None for row in rows)
        copies.write(name, node_table(rows))
    return Prepared(kind="traces", counts=dict(counts))


def _require_no_secret(path: Path, texts: Iterable[str]) -> None:
    secrets = dict(_secrets())
    for text in texts:
        for name, value in secrets.items():
            if value in text or json.dumps(value)[1:-1] in text:
                raise ConfigError(f"{path} holds {name}; nothing was sent: take it out first")


def _secrets() -> Iterator[tuple[str, str]]:
    """Names and values of what this environment keeps from others."""
    if token := get_token():
        yield "the token of the hub", token
    for name, value in os.environ.items():
        if may_be_secret(name) and len(value) >= _SHORTEST:
            yield f"the value of ${name}", value
