"""One training run in a pack: its recipe, evaluations and metrics without paths of the machine, and weights
where asked for.
"""

import json
import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from outrider.config import to_toml
from outrider.errors import DataError, PackError
from outrider.evals.pack.format import PackedRun
from outrider.evals.pack.recipe import PACK_PREFIX, portable

WEIGHTS: Final = "masters.safetensors"
_STATE: Final = "state.json"
_CHECKPOINT: Final = re.compile(r"step-(\d+)")


def pack_name(name: str) -> str:
    """A run's name as a name in a pack: letters, digits and ``._=+-``."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", name).lstrip(".") or "run"


def write_run(source: Path, target: Path, runs: Mapping[Path, str]) -> PackedRun:
    """Copy what results are made of. ``runs`` are the folders of the pack (resolved) by name.

    Raises DataError for a recipe that cannot be read, and PackError where the machine's folders are still in
    what was copied.
    """
    try:
        recipe = tomllib.loads((source / "config.toml").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source / 'config.toml'} cannot be read: {error}") from error
    if not isinstance(recipe.get("evaluation"), dict):  # an empty file is TOML too
        raise DataError(
            f"{source / 'config.toml'} is no resolved recipe of a run: it has no table evaluation"
        )
    tree, inputs = portable(recipe, runs)
    (target / "config.toml").write_text(to_toml(tree) + "\n", encoding="utf-8")
    start = str(recipe.get("model", {}).get("initial_checkpoint"))
    for name in ("evaluations.jsonl", "metrics.jsonl"):
        whole = _whole_lines(source / name)
        if name == "evaluations.jsonl":  # that of the start is named after it
            whole = whole.replace(
                json.dumps(f"of {start}"), json.dumps(f"of {tree.get('model', {}).get('initial_checkpoint')}")
            )
        if whole:
            (target / name).write_text(whole, encoding="utf-8")
    _require_portable(source, target)
    return PackedRun(
        kind="training", command=_command(target.name, recipe), versions=_versions(source), inputs=inputs
    )


def copy_checkpoints(pack: Path, folders: Mapping[str, Path]) -> None:
    """Weights of the newest checkpoint of each training, and of those that others of the pack start from."""
    checkpoints: set[tuple[str, str]] = set()
    for name, folder in folders.items():
        if newest := _checkpoints(folder)[-1:]:
            checkpoints.add((name, newest[0].name))
        config = pack / "runs" / name / "config.toml"
        if config.is_file() and (start := packed_start(tomllib.loads(config.read_text(encoding="utf-8")))):
            checkpoints.add(start)
    for name, checkpoint in sorted(checkpoints):
        _write_checkpoint(
            folders[name] / "checkpoints" / checkpoint, pack / "runs" / name / "checkpoints" / checkpoint
        )


def packed_start(recipe: Mapping[str, Any]) -> tuple[str, str] | None:
    """(run, checkpoint) of the pack that a training starts from; None for another start."""
    match = re.fullmatch(
        rf"{PACK_PREFIX}([^/]+)/checkpoints/({_CHECKPOINT.pattern})",
        str(recipe.get("model", {}).get("initial_checkpoint")),
    )
    return None if match is None else (match[1], match[2])


def _write_checkpoint(source: Path, target: Path) -> None:
    """The weights, and of the state only what tells that they are whole."""
    try:
        state = json.loads((source / _STATE).read_text(encoding="utf-8"))
        weights_state = {"step": state["step"], "checksums": {WEIGHTS: state["checksums"][WEIGHTS]}}
        target.mkdir(parents=True)
        shutil.copyfile(source / WEIGHTS, target / WEIGHTS)
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{source} is no checkpoint with weights ({type(error).__name__})") from error
    (target / _STATE).write_text(json.dumps(weights_state, sort_keys=True) + "\n", encoding="utf-8")


def _command(name: str, recipe: Mapping[str, Any]) -> str:
    trials = recipe.get("evaluation", {}).get("num_trials", 0)
    adapt = (
        f"eval runs/{name}/config.toml --adapt {trials} --method {recipe['evaluation'].get('memory', 'tips')}"
    )
    return f"outrider {adapt if trials else f'train runs/{name}/config.toml'} --run DIRECTORY"


def _versions(folder: Path) -> dict[str, str]:
    """Versions in the newest checkpoint; none for a run without any."""
    for checkpoint in reversed(_checkpoints(folder)):
        try:
            versions = json.loads((checkpoint / _STATE).read_text(encoding="utf-8")).get("versions", {})
            return {str(key): str(value) for key, value in versions.items()}
        except (OSError, ValueError, AttributeError):
            continue
    return {}


def _checkpoints(folder: Path) -> list[Path]:
    """Ascending by step."""
    paths = [path for path in (folder / "checkpoints").glob("step-*") if _CHECKPOINT.fullmatch(path.name)]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")))


def _whole_lines(file: Path) -> str:
    """The lines of a JSONL file but for one that a kill tore."""
    return (
        file.read_text(encoding="utf-8").rpartition("\n")[0] + "\n"
        if file.exists() and file.stat().st_size
        else ""
    )


def _require_portable(source: Path, target: Path) -> None:
    private = {str(source.resolve().parent), str(Path.home()), str(Path.cwd())}
    for file in sorted(target.iterdir()):
        text = file.read_text(encoding="utf-8")
        if leaks := [folder for folder in sorted(private) if len(folder) > 4 and f"{folder}/" in text]:
            raise PackError(f"{source / file.name} holds a path of this machine: {leaks[0]}")
