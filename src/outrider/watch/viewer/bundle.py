"""The viewer as a folder of files that any file server gives out: what the page would ask, asked before."""

import json
import shutil
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from outrider.atomic_io import replacing_folder
from outrider.errors import ConfigError, OutriderError
from outrider.watch.step_files import StepFiles
from outrider.watch.traces import SCHEMA
from outrider.watch.viewer.answers import ANSWERS, Viewer
from outrider.watch.viewer.catalogue import Catalogue, ViewedRun
from outrider.watch.viewer.group_view import LONGEST_TEXT
from outrider.watch.viewer.rollout_query import rows_of_table

PAGE: Final = Path(__file__).with_name("page")
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
"""Of the page's content: no script, style or address but ours. A file server says nothing, so a bundle's page
says it itself."""
_META: Final = (
    f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
    '<meta name="outrider-bundle" content="1">'
)
_FIRST: Final = '<meta charset="utf-8">'  # a policy holds for what stands behind it
_TEXTS: Final = ["task_key", "trace_id", "node_id", "rollout", "origin", "text"]


def write_bundle(
    catalogue: Catalogue,
    folder: Path,
    *,
    compare: Callable[[Sequence[Path]], str],
    note: Callable[[str], None],
) -> None:
    """Everything of all runs into a new ``folder``. Raises ConfigError where something is there already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: --bundle writes a new folder")
    viewer = Viewer(catalogue)
    runs = catalogue.all()
    with replacing_folder(folder) as new:
        shutil.copytree(PAGE, new, dirs_exist_ok=True)
        page = (PAGE / "index.html").read_text(encoding="utf-8")
        (new / "index.html").write_text(page.replace(_FIRST, f"{_FIRST}\n{_META}"), encoding="utf-8")
        entries = zip(catalogue.overview(), runs, strict=True)
        _write(
            new / "data" / "runs.json",
            [_without_paths(entry | {"live": None}, run.path) for entry, run in entries],
        )
        for run in runs:
            note(f"{run.path.name}: {len(run.index.stems())} files")
            _RunFiles(viewer, run, new / "data" / run.id).write()
        if len(runs) > 1:
            (new / "compare.html").write_text(_comparison_page(runs, compare, note), encoding="utf-8")


def _comparison_page(
    runs: Sequence[ViewedRun], compare: Callable[[Sequence[Path]], str], note: Callable[[str], None]
) -> str:
    """Runs that cannot be compared are looked at all the same."""
    try:
        return compare([run.path for run in runs])
    except OutriderError as error:
        note(f"not compared: {error}")
        return f'<!doctype html><meta charset="utf-8"><title>Outrider</title><p>{escape(str(error))}</p>'


def _without_paths(value: Any, run: Path) -> Any:
    """Without the folder of this machine that the run is in: a bundle is read elsewhere."""
    if isinstance(value, dict):
        return {name: _without_paths(item, run) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item, run) for item in value]
    if isinstance(value, str):
        return value.replace(str(run.resolve()), "RUN").replace(str(run.absolute()), "RUN")
    return value


class _RunFiles:
    """The files of one run, below ``folder``."""

    def __init__(self, viewer: Viewer, run: ViewedRun, folder: Path) -> None:
        self._viewer = viewer
        self._run = run
        self._folder = folder

    def write(self) -> None:
        _write(self._folder / "curves.json", self._answer("curves") | {"path": "RUN"})
        for kind in ("places", "alarms"):
            _write(self._folder / f"{kind}.json", _without_paths(self._answer(kind), self._run.path))
        table = self._run.index.table()
        rows = rows_of_table(table)
        for stem in self._run.index.stems():
            self._write_stem(stem, [row for row in rows if row["where"] == stem])
        for step in StepFiles(self._run.path / "traces").steps():
            _write(self._folder / f"memory-{step}.json", self._answer("memory", step=str(step)))
            _write(self._folder / f"shown-{step}.json", self._answer("shown", step=str(step)))

    def _write_stem(self, stem: str, rows: list[dict[str, Any]]) -> None:
        folder = self._folder / stem
        _write(folder / "rollouts.json", rows)
        nodes = (
            StepFiles(self._run.path / "traces").read(f"{stem}.parquet", SCHEMA).select(_TEXTS).to_pylist()
        )
        _write(folder / "texts.json", [node | {"where": stem} for node in nodes])
        for trace in dict.fromkeys(row["trace_id"] for row in rows):
            params = {"where": stem, "trace": trace}
            number = trace.rpartition("/")[2]
            _write(folder / f"group-{number}.json", self._answer("group", **params))
            for row in (entry for entry in rows if entry["trace_id"] == trace):
                name = f"tokens-{number}-{row['rollout']}.json"
                _write(folder / name, self._answer("tokens", **params, rollout=str(row["rollout"])))
            for node in nodes:
                if node["trace_id"] == trace and len(node["text"]) > LONGEST_TEXT:
                    _write(folder / f"text-{number}-{node['node_id']}.json", {"text": node["text"]})

    def _answer(self, kind: str, **params: str) -> Any:
        return ANSWERS[kind](self._viewer, {"run": self._run.id, **params})


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    path.write_bytes(text.encode("utf-8", "backslashreplace"))
