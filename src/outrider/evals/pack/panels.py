"""Panels of a pack: the tasks of an environment made again, and compared with the keys and the hash that were
packed.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.algorithms.common.loss_settings import migrate_keys
from outrider.config import Settings, validate
from outrider.environments.families import EnvironmentConfig, make_task_set
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import OutriderError, PackError
from outrider.evals.pack.format import Manifest, PackedEvalTasks, PackedInput, read_bytes, read_json
from outrider.evals.pack.recipe import local
from outrider.plugins.names import is_import_path

_PLUGIN_KEYS: Final = ("type", "tools", "embedder", "trackers")


class _EnvironmentTable(Settings):
    environment: EnvironmentConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTasksCheck:
    """Result for a panel: ``rebuilt`` from its environment and equal, or why that could not be tried."""

    panel_hash: str
    num_tasks: int
    rebuilt: bool
    reason: str


def rebuild_eval_tasks(
    config: Mapping[str, Any],
    eval_tasks: PackedEvalTasks,
    *,
    local_paths: Mapping[str, Path],
    inputs: Mapping[str, PackedInput],
) -> tuple[list[str], str]:
    """Task keys and hash as the environment on this machine gives them. Raises an OutriderError where it
    cannot be loaded.
    """
    table = local({"environment": config.get("environment", {})}, local_paths, inputs)
    task_set = make_task_set(validate(_EnvironmentTable, table).environment)
    try:
        tasks = task_set.tasks(eval_tasks.split)[: eval_tasks.num_tasks]
        return [task.key for task in tasks], hash_tasks(tasks)
    finally:
        task_set.close()


def check_eval_tasks(pack: Path, manifest: Manifest, local_paths: Mapping[str, Path]) -> list[EvalTasksCheck]:
    """Every panel. Raises PackError where the keys, the hash or a scored task are not those of the panel."""
    return [
        _check(pack, manifest, tasks_hash, eval_tasks, local_paths)
        for tasks_hash, eval_tasks in sorted(manifest.panels.items())
    ]


def eval_tasks_file(tasks_hash: str) -> str:
    """The name of a panel's file in the pack."""
    return f"panels/{tasks_hash}.json"


def read_recipe(pack: Path, name: str) -> dict[str, Any]:
    """The table of a packed run's ``config.toml``. Raises PackError."""
    path = f"runs/{name}/config.toml"
    if not (pack / path).is_file():
        raise PackError(f"{path} is missing")
    try:
        recipe = tomllib.loads(read_bytes(pack / path).decode())
    except (ValueError, RecursionError) as error:
        raise PackError(f"{path} is malformed: {error}") from error
    if import_path := next(_import_paths(recipe), None):
        raise PackError(
            f"{path} names {import_path!r}: code is never imported from a pack by its path; "
            "install it as a package that registers a name (docs/plugins.md)"
        )
    if server := next(_servers(recipe), None):
        raise PackError(f"{path} names the MCP server {server!r}: nothing is started or asked for a pack")
    return migrate_keys(recipe)


def _servers(recipe: Mapping[str, Any]) -> Iterator[str]:
    """MCP servers that a recipe names, wherever it does."""
    if recipe.get("type") == "mcp":
        yield str(recipe.get("name", ""))
    for value in recipe.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                yield from _servers(item)


def _import_paths(value: Any, key: str = "") -> Iterator[str]:
    """Plug-ins that a recipe names as ``module:Class``."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _import_paths(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _import_paths(item, key)
    elif isinstance(value, str) and key in _PLUGIN_KEYS and is_import_path(value):
        yield value


def _check(
    pack: Path,
    manifest: Manifest,
    tasks_hash: str,
    eval_tasks: PackedEvalTasks,
    local_paths: Mapping[str, Path],
) -> EvalTasksCheck:
    path = eval_tasks_file(tasks_hash)
    keys = _keys(pack, manifest, path)
    _require_known(pack, manifest, tasks_hash, path, keys)
    if eval_tasks.run not in manifest.runs:
        raise PackError(f"{path}: there is no run {eval_tasks.run}")
    try:
        rebuilt_keys, computed = rebuild_eval_tasks(
            read_recipe(pack, eval_tasks.run),
            eval_tasks,
            local_paths=local_paths,
            inputs=manifest.runs[eval_tasks.run].inputs,
        )
    except PackError as error:
        return EvalTasksCheck(panel_hash=tasks_hash, num_tasks=len(keys), rebuilt=False, reason=str(error))
    except (OutriderError, OSError) as error:  # data or a simulator that this machine does not have
        return EvalTasksCheck(
            panel_hash=tasks_hash, num_tasks=len(keys), rebuilt=False, reason=str(error).splitlines()[0]
        )
    if computed != tasks_hash:
        raise PackError(f"{path}: the tasks of the environment here have the hash {computed}")
    if rebuilt_keys != keys:
        raise PackError(f"{path}: the keys are not those of the tasks with this hash")
    return EvalTasksCheck(panel_hash=tasks_hash, num_tasks=len(keys), rebuilt=True, reason="")


def _keys(pack: Path, manifest: Manifest, path: str) -> list[str]:
    if path not in manifest.files:
        raise PackError(f"{path} is missing")
    content = read_json(pack / path)
    keys = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise PackError(f"{path} is no list of task keys")
    return keys


def _require_known(pack: Path, manifest: Manifest, tasks_hash: str, path: str, keys: Sequence[str]) -> None:
    """Raises PackError where an evaluation on this panel has scored a task that is not in it."""
    known = set(keys)
    for name, run in manifest.runs.items():
        file = pack / "runs" / name / "evaluations.jsonl"
        if run.kind != "training" or not file.is_file():
            continue
        for number, line in enumerate(map(json.loads, read_bytes(file).splitlines()), start=1):
            others = (
                sorted(set(line.get("task_scores") or {}) - known) if line["panel_hash"] == tasks_hash else []
            )
            if others:
                raise PackError(f"runs/{name}/evaluations.jsonl:{number}: {others[0]!r} is no task of {path}")
