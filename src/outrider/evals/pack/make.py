"""``outrider pack``: run folders become a reproducibility pack, whole or not at all, without a path of the
machine.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider import __version__
from outrider.atomic_io import replacing_folder
from outrider.engines.local.processor import read_processor
from outrider.errors import ConfigError, DataError, OutriderError, PackError
from outrider.evals.benchmark.store import RESULTS, SUMMARY
from outrider.evals.compare.runs import run_names
from outrider.evals.pack.exact import ExactResult, exact_line, parse_exact_result
from outrider.evals.pack.format import (
    CHECKSUM,
    EXACT,
    FORMAT,
    MANIFEST,
    TABLES,
    Manifest,
    PackedEvalTasks,
    PackedFile,
    PackedRun,
    checksum_line,
    file_sha256,
)
from outrider.evals.pack.panel_run import write_eval_tasks_run
from outrider.evals.pack.panels import eval_tasks_file, read_recipe, rebuild_eval_tasks
from outrider.evals.pack.run import copy_checkpoints, pack_name, write_run
from outrider.evals.pack.tables import make_tables


def make_pack(
    paths: Sequence[Path], out: Path, *, commands: Sequence[str] = (), weights: bool = False
) -> Manifest:
    """Pack run folders of ``outrider train`` and ``outrider eval``, and folders or files of exact results.

    ``commands`` are what made them, for people. With ``weights`` the newest checkpoint of each training, and
    those from which others of the pack start, come along. Raises ConfigError where ``out`` is there,
    DataError for what is no run, and PackError for results that contradict themselves.
    """
    if out.exists():
        raise ConfigError(f"{out} exists: a pack is never overwritten")
    exact, folders = _classify_paths(paths)
    names = [pack_name(name) for name in run_names(folders)] if folders else []
    if len(set(names)) < len(names):
        raise ConfigError(f"two of these runs would have one name in the pack: {', '.join(sorted(names))}")
    with replacing_folder(out) as partial:
        return _write(
            partial, dict(sorted(zip(names, folders, strict=True))), exact, commands=commands, weights=weights
        )


def _write(
    pack: Path,
    folders: Mapping[str, Path],
    exact: Sequence[ExactResult],
    *,
    commands: Sequence[str],
    weights: bool,
) -> Manifest:
    names_by_folder = {folder.resolve(): name for name, folder in folders.items()}
    runs: dict[str, PackedRun] = {}
    for name, folder in folders.items():
        target = pack / "runs" / name
        target.mkdir(parents=True)
        if (folder / RESULTS).exists():
            write_eval_tasks_run(folder, target)
            runs[name] = PackedRun(kind="panel", command="outrider eval --tasks", versions={}, inputs={})
        else:
            runs[name] = write_run(folder, target, names_by_folder)
    if weights:
        copy_checkpoints(pack, folders)
    if exact:
        lines = "".join(exact_line(result) + "\n" for result in exact)
        (pack / EXACT).write_text(lines, encoding="utf-8")
    eval_tasks = _write_eval_tasks(pack, runs)
    contents = {"runs": runs, "panels": eval_tasks, "packed_on": _machine(), "commands": tuple(commands)}
    draft = Manifest(format=FORMAT, outrider=__version__, files=_files(pack), **contents)
    _write_json(pack / TABLES, make_tables(pack, draft))
    manifest = Manifest(format=FORMAT, outrider=__version__, files=_files(pack), **contents)
    _write_json(pack / MANIFEST, manifest.model_dump(mode="json"))
    (pack / CHECKSUM).write_bytes(checksum_line((pack / MANIFEST).read_bytes()))
    return manifest


def _classify_paths(paths: Sequence[Path]) -> tuple[list[ExactResult], list[Path]]:
    """Exact results, and run folders. Raises DataError for a path that is neither."""
    exact: dict[str, ExactResult] = {}
    folders: list[Path] = []
    for path in paths:
        if (path / "config.toml").is_file() or ((path / RESULTS).is_file() and (path / SUMMARY).is_file()):
            folders.append(path)
            continue
        files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        if not files or not path.exists():
            raise DataError(
                f"{path} is no run: it has no config.toml, no finished evaluation "
                "of tasks, and no exact results"
            )
        for file in files:
            result = parse_exact_result(file.read_bytes(), str(file))
            if result.name in exact:
                raise DataError(f"{file}: {result.name} is given twice")
            exact[result.name] = result
    return sorted(exact.values(), key=lambda item: (item.toy, item.method, item.seed)), folders


def _write_eval_tasks(pack: Path, runs: Mapping[str, PackedRun]) -> dict[str, PackedEvalTasks]:
    """The panels of all evaluations: keys from the environment where it is installed, else of the tasks that
    were scored.
    """
    eval_tasks: dict[str, PackedEvalTasks] = {}
    for name, run in runs.items():
        file = pack / "runs" / name / "evaluations.jsonl"
        for line in map(json.loads, file.read_bytes().splitlines() if file.is_file() else []):
            tasks_hash = str(line["panel_hash"])
            if tasks_hash in eval_tasks:
                continue
            recipe = read_recipe(pack, name)
            num_tasks = int(recipe.get("evaluation", {}).get("num_tasks", line["num_tasks"]))
            eval_tasks[tasks_hash] = PackedEvalTasks(run=name, split=str(line["split"]), num_tasks=num_tasks)
            keys = _task_keys(recipe, eval_tasks[tasks_hash], run, tasks_hash) or list(
                line.get("task_scores") or {}
            )
            (pack / "panels").mkdir(exist_ok=True)
            _write_json(
                pack / eval_tasks_file(tasks_hash),
                {"panel_hash": tasks_hash, "split": line["split"], "keys": keys},
            )
    return eval_tasks


def _task_keys(
    recipe: Mapping[str, Any], eval_tasks: PackedEvalTasks, run: PackedRun, tasks_hash: str
) -> list[str]:
    try:
        keys, computed_hash = rebuild_eval_tasks(recipe, eval_tasks, local_paths={}, inputs=run.inputs)
    except (OutriderError, OSError):  # not installed, or from files that stay here
        return []
    if computed_hash != tasks_hash:
        raise PackError(
            f"the tasks of the environment here are not the panel {tasks_hash} "
            f"of {eval_tasks.run}: its data have changed"
        )
    return keys


def _machine() -> dict[str, str]:
    processor = read_processor()
    return {
        "processor": processor.model,
        "instruction sets": " ".join(sorted(processor.instruction_sets)) or "unknown",
    }


def _files(pack: Path) -> dict[str, PackedFile]:
    paths = {path.relative_to(pack).as_posix(): path for path in sorted(pack.rglob("*")) if path.is_file()}
    return {
        name: PackedFile(num_bytes=path.stat().st_size, sha256=file_sha256(path))
        for name, path in paths.items()
    }


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
