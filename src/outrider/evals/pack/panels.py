"""Panels of a pack: the tasks of an environment made again, and compared with the keys and the hash that were
packed.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.algorithms.common.loss_settings import in_todays_keys
from outrider.config import Settings, validate
from outrider.environments.families import EnvironmentConfig, make_family
from outrider.environments.tool_qa.datasets import panel_hash
from outrider.errors import OutriderError, PackError
from outrider.evals.pack.format import Manifest, PackedInput, PackedPanel, read_bytes, read_json
from outrider.evals.pack.recipe import local
from outrider.plugins.names import is_import_path

_NAMING: Final = ("type", "tools", "embedder", "trackers")


class _Chosen(Settings):
    environment: EnvironmentConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelCheck:
    """Result for a panel: ``rebuilt`` from its environment and equal, or why that could not be tried."""

    panel_hash: str
    num_tasks: int
    rebuilt: bool
    reason: str


def rebuilt_panel(
    config: Mapping[str, Any],
    panel: PackedPanel,
    *,
    given: Mapping[str, Path],
    inputs: Mapping[str, PackedInput],
) -> tuple[list[str], str]:
    """Task keys and hash as the environment on this machine gives them. Raises an OutriderError where it
    cannot be loaded.
    """
    table = local({"environment": config.get("environment", {})}, given, inputs)
    family = make_family(validate(_Chosen, table).environment)
    try:
        tasks = family.tasks(panel.split)[: panel.num_tasks]
        return [task.key for task in tasks], panel_hash(tasks)
    finally:
        family.close()


def check_panels(pack: Path, manifest: Manifest, given: Mapping[str, Path]) -> list[PanelCheck]:
    """Every panel. Raises PackError where the keys, the hash or a scored task are not those of the panel."""
    return [_check(pack, manifest, wanted, panel, given) for wanted, panel in sorted(manifest.panels.items())]


def panel_file(wanted: str) -> str:
    """The name of a panel's file in the pack."""
    return f"panels/{wanted}.json"


def read_recipe(pack: Path, name: str) -> dict[str, Any]:
    """The table of a packed run's ``config.toml``. Raises PackError."""
    place = f"runs/{name}/config.toml"
    if not (pack / place).is_file():
        raise PackError(f"{place} is missing")
    try:
        recipe = tomllib.loads(read_bytes(pack / place).decode())
    except (ValueError, RecursionError) as error:
        raise PackError(f"{place} is malformed: {error}") from error
    if named := next(_import_paths(recipe), None):
        raise PackError(
            f"{place} names {named!r}: code is never imported from a pack by its path; "
            "install it as a package that registers a name (docs/plugins.md)"
        )
    if server := next(_servers(recipe), None):
        raise PackError(f"{place} names the MCP server {server!r}: nothing is started or asked for a pack")
    return in_todays_keys(recipe)


def _servers(recipe: Mapping[str, Any]) -> Iterator[str]:
    """MCP servers that a recipe names, wherever it does."""
    if recipe.get("type") == "mcp":
        yield str(recipe.get("name", ""))
    for value in recipe.values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Mapping):
                yield from _servers(one)


def _import_paths(value: Any, key: str = "") -> Iterator[str]:
    """Plug-ins that a recipe names as ``module:Class``."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _import_paths(one, name)
    elif isinstance(value, list):
        for one in value:
            yield from _import_paths(one, key)
    elif isinstance(value, str) and key in _NAMING and is_import_path(value):
        yield value


def _check(
    pack: Path, manifest: Manifest, wanted: str, panel: PackedPanel, given: Mapping[str, Path]
) -> PanelCheck:
    place = panel_file(wanted)
    keys = _keys(pack, manifest, place)
    _require_known(pack, manifest, wanted, place, keys)
    if panel.run not in manifest.runs:
        raise PackError(f"{place}: there is no run {panel.run}")
    try:
        found, computed = rebuilt_panel(
            read_recipe(pack, panel.run), panel, given=given, inputs=manifest.runs[panel.run].inputs
        )
    except PackError as error:
        return PanelCheck(panel_hash=wanted, num_tasks=len(keys), rebuilt=False, reason=str(error))
    except (OutriderError, OSError) as error:  # data or a simulator that this machine does not have
        return PanelCheck(
            panel_hash=wanted, num_tasks=len(keys), rebuilt=False, reason=str(error).splitlines()[0]
        )
    if computed != wanted:
        raise PackError(f"{place}: the tasks of the environment here have the hash {computed}")
    if found != keys:
        raise PackError(f"{place}: the keys are not those of the tasks with this hash")
    return PanelCheck(panel_hash=wanted, num_tasks=len(keys), rebuilt=True, reason="")


def _keys(pack: Path, manifest: Manifest, place: str) -> list[str]:
    if place not in manifest.files:
        raise PackError(f"{place} is missing")
    content = read_json(pack / place)
    keys = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise PackError(f"{place} is no list of task keys")
    return keys


def _require_known(pack: Path, manifest: Manifest, wanted: str, place: str, keys: Sequence[str]) -> None:
    """Raises PackError where an evaluation on this panel has scored a task that is not in it."""
    known = set(keys)
    for name, run in manifest.runs.items():
        file = pack / "runs" / name / "evaluations.jsonl"
        if run.kind != "training" or not file.is_file():
            continue
        for number, line in enumerate(map(json.loads, read_bytes(file).splitlines()), start=1):
            others = (
                sorted(set(line.get("task_scores") or {}) - known) if line["panel_hash"] == wanted else []
            )
            if others:
                raise PackError(
                    f"runs/{name}/evaluations.jsonl:{number}: {others[0]!r} is no task of {place}"
                )
