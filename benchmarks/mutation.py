"""Mutation score of the core: which of many small changes of the code make a test fail.

``make mutation`` or ``python -m benchmarks.mutation [--modules credit losses ...] [--count 15] [--seed 1]``:
a random sample of mutants of each module, each against the module's short list of tests. The record in
``--out`` is continued: a mutant runs again when its file has changed, and one that survived when the tests
have.
"""

import argparse
import hashlib
import json
import random
import secrets
import subprocess
import sys
import tempfile
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.mutants import Mutant, mutants_of
from benchmarks.mutation_children import module_name
from benchmarks.mutation_score import FOUND, Score, breakdown, equivalents, printed, survivors
from benchmarks.mutation_targets import ROOT, SOURCE, TARGETS, Target


def main() -> int:
    """Run what is missing and print the scores."""
    given = _arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    known = equivalents()
    modules, count, seed = given.modules, given.count, given.seed
    draws = {name: sample(TARGETS[name], count=count, seed=f"{seed}/{name}") for name in modules}
    if given.declarations:
        draws["declarations"] = declarations(modules, count=given.declarations, seed=f"{seed}/declarations")
    found = results({name: drawn for name, (drawn, _) in draws.items()}, given.out)
    scores = [Score.of(name, num_all, found[name], known) for name, (_, num_all) in draws.items()]
    if given.survivors:
        print("\n".join(filter(None, (survivors(lines, known) for lines in found.values()))))
    print(printed(scores, head=True))
    print(printed(scores, total=True))
    print(breakdown(scores))
    if given.json is not None:
        given.json.write_text(json.dumps([score.as_record() for score in scores], indent=1) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    names = list(TARGETS)
    parser.add_argument(
        "--modules", nargs="+", choices=names, default=names, metavar="MODULE", help=" ".join(names)
    )
    parser.add_argument("--count", type=int, default=15, help="mutants of functions a module, 0: all")
    parser.add_argument("--declarations", type=int, default=0, help="mutants outside of functions, in all")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutation", help="of the record")
    parser.add_argument("--survivors", action="store_true", help="list the mutants that survived")
    parser.add_argument("--json", type=Path, help="write the scores to this file as well")
    return parser.parse_args()


def sample(target: Target, *, count: int, seed: str) -> tuple[list[Mutant], int]:
    """The first ``count`` of the mutants of functions in a random order, and how many there are.

    A larger sample contains a smaller one.
    """
    every = [mutant for file in target.source_files for mutant in mutants_of(file)]
    return _drawn([mutant for mutant in every if mutant.function is not None], count, seed)


def declarations(modules: list[str], *, count: int, seed: str) -> tuple[list[Mutant], int]:
    """The same for constants, class bodies and defaults of all modules together.

    Each costs an import of the package, so they have a sample of their own.
    """
    files = [file for name in modules for file in TARGETS[name].source_files]
    every = [mutant for file in files for mutant in mutants_of(file)]
    return _drawn([mutant for mutant in every if mutant.function is None], count, seed)


def _drawn(every: list[Mutant], count: int, seed: str) -> tuple[list[Mutant], int]:
    random.Random(seed).shuffle(every)
    return (every[:count] if count else every), len(every)


def results(drawn: dict[str, list[Mutant]], out: Path) -> dict[str, list[dict[str, Any]]]:
    """The record's lines of these mutants by module, after those that were missing have been run."""
    owner = {file: name for name, target in TARGETS.items() for file in target.source_files}
    run = secrets.token_hex(8)
    orders = []
    for name in TARGETS:
        mine = {_key(mutant): mutant for mutant in chain(*drawn.values()) if owner[mutant.file] == name}
        if (order := _order(name, mine, out, run))["jobs"]:
            orders.append(order)
    if orders:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "orders.json"
            file.write_text(json.dumps(orders))
            command = [sys.executable, "-m", "benchmarks.mutation_worker", str(file)]
            subprocess.run(command, cwd=ROOT, check=True)
    lines = {key: line for name in TARGETS for key, line in _read(_record(name, out)).items()}
    return {name: [lines[_key(mutant)] for mutant in mutants] for name, mutants in drawn.items()}


def _order(name: str, mutants: dict[str, Mutant], out: Path, run: str) -> dict[str, Any]:
    """What the worker needs to run the mutants that the record lacks."""
    target, record = TARGETS[name], _record(name, out)
    helpers = sorted((ROOT / "tests").glob("*.py"))
    tests = _digest(*target.test_files, *helpers)
    lines = _read(record)
    done = {key for key, line in lines.items() if line["result"] in FOUND or line["tests"] == tests}
    sources = [file for each in TARGETS.values() for file in each.source_files]
    baseline = out / "baseline"
    digests = {test: _digest(*sources, test, *helpers) for test in target.test_files}
    return {
        "tests": {
            str(test): str(baseline / f"{test.stem}-{digest}.json") for test, digest in digests.items()
        },
        "sources": [str(file) for file in sources],
        "record": str(record),
        "run": run,
        "jobs": [_job(mutant, key, tests, run) for key, mutant in mutants.items() if key not in done],
    }


def _record(name: str, out: Path) -> Path:
    return out / f"{name}.jsonl"


def _key(mutant: Mutant) -> str:
    return mutant.key + _digest(mutant.file)


def _job(mutant: Mutant, key: str, tests: str, run: str) -> dict[str, Any]:
    before, after = mutant.difference
    return {
        "key": key,
        "tests": tests,
        "run": run,
        "file": mutant.file.relative_to(SOURCE / "outrider").as_posix(),
        "line": mutant.lines.start,
        "function": mutant.function,
        "operator": mutant.operator,
        "before": before,
        "after": after,
        "path": str(mutant.file),
        "module": module_name(mutant.file, SOURCE),
        "lines": [mutant.lines.start, mutant.lines.stop],
        "source": mutant.source,
    }


def _read(record: Path) -> dict[str, dict[str, Any]]:
    """The last line of every mutant."""
    lines = record.read_text().splitlines() if record.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


@cache
def _digest(*files: Path) -> str:
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
