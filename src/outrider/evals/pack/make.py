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
from outrider.evals.pack.exact import ExactResult, exact_line, exact_result
from outrider.evals.pack.format import (
    CHECKSUM,
    EXACT,
    FORMAT,
    MANIFEST,
    TABLES,
    Manifest,
    PackedFile,
    PackedPanel,
    PackedRun,
    checksum_line,
    file_sha256,
)
from outrider.evals.pack.panel_run import write_panel_run
from outrider.evals.pack.panels import panel_file, read_recipe, rebuilt_panel
from outrider.evals.pack.run import checkpoints_of, pack_name, write_run
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
    exact, folders = _sorted_out(paths)
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
    by_folder = {folder.resolve(): name for name, folder in folders.items()}
    runs: dict[str, PackedRun] = {}
    for name, folder in folders.items():
        target = pack / "runs" / name
        target.mkdir(parents=True)
        if (folder / RESULTS).exists():
            write_panel_run(folder, target)
            runs[name] = PackedRun(kind="panel", command="outrider eval --tasks", versions={}, inputs={})
        else:
            runs[name] = write_run(folder, target, by_folder)
    if weights:
        checkpoints_of(pack, folders)
    if exact:
        lines = "".join(exact_line(one) + "\n" for one in exact)
        (pack / EXACT).write_text(lines, encoding="utf-8")
    panels = _write_panels(pack, runs)
    given = {"runs": runs, "panels": panels, "packed_on": _machine(), "commands": tuple(commands)}
    draft = Manifest(format=FORMAT, outrider=__version__, files=_files(pack), **given)
    _write_json(pack / TABLES, make_tables(pack, draft))
    manifest = Manifest(format=FORMAT, outrider=__version__, files=_files(pack), **given)
    _write_json(pack / MANIFEST, manifest.model_dump(mode="json"))
    (pack / CHECKSUM).write_bytes(checksum_line((pack / MANIFEST).read_bytes()))
    return manifest


def _sorted_out(paths: Sequence[Path]) -> tuple[list[ExactResult], list[Path]]:
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
            found = exact_result(file.read_bytes(), str(file))
            if found.name in exact:
                raise DataError(f"{file}: {found.name} is given twice")
            exact[found.name] = found
    return sorted(exact.values(), key=lambda one: (one.toy, one.method, one.seed)), folders


def _write_panels(pack: Path, runs: Mapping[str, PackedRun]) -> dict[str, PackedPanel]:
    """The panels of all evaluations: keys from the environment where it is installed, else of the tasks that
    were scored.
    """
    panels: dict[str, PackedPanel] = {}
    for name, run in runs.items():
        file = pack / "runs" / name / "evaluations.jsonl"
        for line in map(json.loads, file.read_bytes().splitlines() if file.is_file() else []):
            wanted = str(line["panel_hash"])
            if wanted in panels:
                continue
            recipe = read_recipe(pack, name)
            num_tasks = int(recipe.get("evaluation", {}).get("num_tasks", line["num_tasks"]))
            panels[wanted] = PackedPanel(run=name, split=str(line["split"]), num_tasks=num_tasks)
            keys = _panel_keys(recipe, panels[wanted], run, wanted) or list(line.get("task_scores") or {})
            (pack / "panels").mkdir(exist_ok=True)
            _write_json(
                pack / panel_file(wanted), {"panel_hash": wanted, "split": line["split"], "keys": keys}
            )
    return panels


def _panel_keys(recipe: Mapping[str, Any], panel: PackedPanel, run: PackedRun, wanted: str) -> list[str]:
    try:
        keys, found = rebuilt_panel(recipe, panel, given={}, inputs=run.inputs)
    except (OutriderError, OSError):  # not installed, or from files that stay here
        return []
    if found != wanted:
        raise PackError(
            f"the tasks of the environment here are not the panel {wanted} "
            f"of {panel.run}: its data have changed"
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
