"""A corpus of frozen runs, kept outside of the repository: a refactoring must resume them to the same bits.

    python -m tests.golden.corpus --make DIR [CASE ...]    # with the code to compare with
    python -m tests.golden.corpus --check DIR [CASE ...]   # with the changed code

``--make`` trains every case for all steps but the last and copies the run directory to ``DIR/runs``. It then
resumes the run for the last step and writes the digests of both states to ``DIR/expected.json``. ``--check``
resumes a copy of each frozen run, plays one case from the start, and exits with status 1 if a digest differs.

Internal names change in a refactoring, so this module uses only ``outrider.train`` and reads files: it does
not need the classes that wrote them. The recipes are frozen too (``DIR/recipes``). Digests depend on the
kernels, so both commands run on the least processor of the golden record and refuse other kernels.
"""

import argparse
import hashlib
import json
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

import outrider
from tests.golden.kernels import fingerprint
from tests.golden.lowest import variables, versions

Digests = dict[str, str]
CLOCK = ("time/", "speed/", "memory/", "seconds")  # prefixes of fields that the clock decides
# Keys of state.json that describe the code, the machine or the files' bytes, not the state of the run.
NOT_STATE = frozenset({"settings", "versions", "inputs", "checksums", "own_checksum", "reference_checksum"})
# Columns of the records that are newer than the corpus, and the one key of the nodes' metadata that is.
NEW_COLUMNS = frozenset({"targets", "answer", "reward_parts", "reason", "num_failed_calls"})
NEW_METADATA = "tool_calls"
FROM_START = "combined"  # the case that a check also plays from its first step


def make(folder: Path, cases: Sequence[str] = ()) -> None:
    """Freeze the ``cases`` (all by default) into the new directory ``folder``."""
    # --check needs no recipes, so only this function imports the modules that know internal names
    from tests.golden.corpus_cases import recipes, write_inputs

    write_inputs(folder / "inputs")
    expected: dict[str, Any] = {"versions": versions(), "kernels": fingerprint(), "cases": {}}
    (folder / "recipes").mkdir()
    for case, recipe in recipes(folder / "inputs").items():
        if cases and case not in cases:
            continue
        began, frozen = time.monotonic(), folder / "runs" / slug(case)
        recipe["train"]["num_steps"] -= 1
        (folder / "recipes" / f"{slug(case)}.json").write_text(json.dumps(recipe, indent=1))
        with tempfile.TemporaryDirectory() as scratch:
            run = Path(scratch, "run")
            outrider.train(recipe, run=run)
            shutil.copytree(run, frozen)
            resume(run, recipe)
            expected["cases"][case] = {"frozen": digests(frozen), "final": digests(run)}
        (folder / "expected.json").write_text(json.dumps(expected, indent=1))
        print(f"{case}: frozen, {time.monotonic() - began:.1f} s", flush=True)


def check(folder: Path, cases: Sequence[str] = ()) -> dict[str, list[str]]:
    """Resume the frozen runs and play one case from the start; print and return the differences by case."""
    expected = json.loads((folder / "expected.json").read_text())
    for name, here in (("versions", versions()), ("kernels", fingerprint())):
        if expected[name] != here:
            raise SystemExit(f"the corpus was made with other {name}: {expected[name]}, not {here}")
    chosen = [case for case in expected["cases"] if not cases or case in cases]
    if not chosen or len(chosen) < len(cases):
        raise SystemExit(f"not in the corpus: {sorted(set(cases) - set(chosen)) or 'any case'}")
    started = FROM_START if FROM_START in chosen else chosen[0]
    found = {case: _compare(folder, case, expected["cases"][case]["final"], resumes=True) for case in chosen}
    found[f"{started}, from the start"] = _compare(
        folder, started, expected["cases"][started]["frozen"], resumes=False
    )
    return found


def _compare(folder: Path, case: str, expected: Digests, *, resumes: bool) -> list[str]:
    began = time.monotonic()
    recipe = json.loads((folder / "recipes" / f"{slug(case)}.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch, "run")
        try:
            if resumes:
                resume(shutil.copytree(folder / "runs" / slug(case), run), recipe)
            else:
                outrider.train(recipe, run=run)
            found = digests(run)
            differences = sorted(k for k in expected.keys() | found.keys() if expected.get(k) != found.get(k))
        except Exception as error:  # the other cases are still worth checking
            differences = [f"{type(error).__name__}: {error}"]
    name = case if resumes else f"{case}, from the start"
    print(f"{name}: {', '.join(differences) or 'same'}, {time.monotonic() - began:.1f} s", flush=True)
    return differences


def resume(run: Path, recipe: Mapping[str, Any]) -> None:
    """Train a frozen run for its last step."""
    overrides = [f"train.num_steps={recipe['train']['num_steps'] + 1}"]
    outrider.train(resume=run, overrides=overrides, changed_plugins=True)


def digests(run: Path) -> Digests:
    """Digests of everything that a run directory remembers, by part, without times, versions and paths."""
    newest = max((run / "checkpoints").iterdir())
    found = {}
    for path in [*sorted(newest.rglob("*.safetensors")), *run.glob("*.safetensors")]:
        found[path.name] = _digest_tensors(path)
    for key, value in json.loads((newest / "state.json").read_text()).items():
        if key not in NOT_STATE:
            found[f"state.json {key}"] = _digest(value)
    for path in sorted(run.glob("*/*.parquet")):
        found[f"{path.parent.name}/{path.name}"] = _digest(map(_known, pq.read_table(path).to_pylist()))
    for name in ("metrics", "evaluations"):
        for number, line in enumerate((run / f"{name}.jsonl").read_text().splitlines()):
            sections: dict[str, dict[str, Any]] = {}
            for key, value in _timeless(json.loads(line)).items():
                sections.setdefault(key.partition("/")[0] if "/" in key else "", {})[key] = value
            for section, values in sections.items():
                found[f"{name}.jsonl line {number} {section}".strip()] = _digest(values)
    if (run / "buffer.sqlite").exists():
        with closing(sqlite3.connect(f"{(run / 'buffer.sqlite').as_uri()}?mode=ro", uri=True)) as database:
            for table in ("trajectories", "steps", "vectors"):
                found[f"buffer.sqlite {table}"] = _digest(
                    database.execute(f"SELECT * FROM {table} ORDER BY 1")
                )
    return found


def slug(case: str) -> str:
    """The name of a case in a path."""
    return case.replace(",", "").replace(" ", "-")


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a record that the corpus has, without the clock's."""
    values = {key: value for key, value in _timeless(row).items() if key not in NEW_COLUMNS}
    if "origin" in values and NEW_METADATA in (metadata := json.loads(values["metadata"])):
        del metadata[NEW_METADATA]
        values["metadata"] = json.dumps(metadata)
    return values


def _timeless(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if not key.startswith(CLOCK)}


def _digest(value: Any) -> str:
    """Of plain data, with every bit of its numbers."""
    content = list(value) if isinstance(value, Iterable) and not isinstance(value, str | Mapping) else value
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=_plain).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else str(value)


def _digest_tensors(path: Path) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Make or check a corpus, on the least processor."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.corpus", description=__doc__)
    command = parser.add_mutually_exclusive_group(required=True)
    command.add_argument("--make", type=Path, metavar="DIR", help="freeze runs in a new directory")
    command.add_argument("--check", type=Path, metavar="DIR", help="resume the frozen runs and compare")
    parser.add_argument("cases", nargs="*", help="only these cases")
    options = parser.parse_args()
    least = {name: value for name, value in variables().items() if os.environ.get(name) != value}
    if least:  # libraries choose their kernels when they are loaded, so begin again
        os.execve(sys.executable, [*sys.orig_argv], {**os.environ, **least})
    began = time.monotonic()
    if options.make is not None:
        make(options.make.resolve(), options.cases)
        print(f"made in {time.monotonic() - began:.0f} s")
        return
    differences = {
        case: found for case, found in check(options.check.resolve(), options.cases).items() if found
    }
    print(f"{len(differences)} differ; checked in {time.monotonic() - began:.0f} s")
    raise SystemExit(1 if differences else 0)


if __name__ == "__main__":
    main()
