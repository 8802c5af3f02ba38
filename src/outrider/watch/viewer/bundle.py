"""The viewer as a folder of files that any file server gives out: what the page would ask, asked before."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from outrider.atomic_io import replacing_folder
from outrider.errors import ConfigError
from outrider.watch.step_files import StepFiles
from outrider.watch.traces import SCHEMA
from outrider.watch.viewer.answers import ANSWERS, Viewer
from outrider.watch.viewer.catalogue import Catalogue, ViewedRun
from outrider.watch.viewer.group_view import LONGEST_TEXT
from outrider.watch.viewer.rollout_query import rows_of_table

PAGE: Final = Path(__file__).with_name("page")
_META: Final = '<meta name="outrider-bundle" content="1">'
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
        (new / "index.html").write_text(page.replace("<title>", f"{_META}\n<title>"), encoding="utf-8")
        _write(new / "data" / "runs.json", [one | {"live": None} for one in catalogue.overview()])
        for run in runs:
            note(f"{run.path.name}: {len(run.index.places())} files")
            _RunFiles(viewer, run, new / "data" / run.id).write()
        if len(runs) > 1:
            (new / "compare.html").write_text(compare([run.path for run in runs]), encoding="utf-8")


class _RunFiles:
    """The files of one run, below ``folder``."""

    def __init__(self, viewer: Viewer, run: ViewedRun, folder: Path) -> None:
        self._viewer = viewer
        self._run = run
        self._folder = folder

    def write(self) -> None:
        # a bundle is read elsewhere: it names no folder of this machine
        _write(self._folder / "curves.json", self._ask("curves") | {"path": "RUN"})
        for kind in ("places", "alarms"):
            _write(self._folder / f"{kind}.json", self._ask(kind))
        table = self._run.index.table()
        rows = rows_of_table(table)
        for place in self._run.index.places():
            self._place(place, [row for row in rows if row["where"] == place])
        for step in StepFiles(self._run.path / "traces").steps():
            _write(self._folder / f"memory-{step}.json", self._ask("memory", step=str(step)))
            _write(self._folder / f"shown-{step}.json", self._ask("shown", step=str(step)))

    def _place(self, place: str, rows: list[dict[str, Any]]) -> None:
        folder = self._folder / place
        _write(folder / "rollouts.json", rows)
        nodes = (
            StepFiles(self._run.path / "traces").read(f"{place}.parquet", SCHEMA).select(_TEXTS).to_pylist()
        )
        _write(folder / "texts.json", [node | {"where": place} for node in nodes])
        for trace in dict.fromkeys(row["trace_id"] for row in rows):
            given = {"where": place, "trace": trace}
            number = trace.rpartition("/")[2]
            _write(folder / f"group-{number}.json", self._ask("group", **given))
            for row in (one for one in rows if one["trace_id"] == trace):
                name = f"tokens-{number}-{row['rollout']}.json"
                _write(folder / name, self._ask("tokens", **given, rollout=str(row["rollout"])))
            for node in nodes:
                if node["trace_id"] == trace and len(node["text"]) > LONGEST_TEXT:
                    _write(folder / f"text-{number}-{node['node_id']}.json", {"text": node["text"]})

    def _ask(self, kind: str, **given: str) -> Any:
        return ANSWERS[kind](self._viewer, {"run": self._run.id, **given})


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    path.write_bytes(text.encode("utf-8", "backslashreplace"))
