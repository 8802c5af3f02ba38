"""Writes the golden record, or plays some of it: ``python -m tests.golden --write``; ``--add CASE ...``;
``--into FILE [--sample] [CASE ...]``.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.golden.lowest import run_lowest

RECORD = Path(__file__).with_name("record.json")


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    options.add_argument(
        "--write", action="store_true", help="play all runs on the least processor, and write the record"
    )
    options.add_argument(
        "--add", nargs="+", default=(), metavar="CASE", help="put new cases into the record; no entry changes"
    )
    options.add_argument("--into", type=Path, help="play in this process, and write what was found")
    options.add_argument(
        "--inputs", type=Path, help="a folder that keeps the model and the data for further calls"
    )
    options.add_argument("--sample", action="store_true", help="one preset a page")
    options.add_argument("cases", nargs="*", help="only these cases")
    given = options.parse_args()
    if given.add:
        _add(given.add)
    elif given.into is None:
        target = RECORD if given.write else Path(tempfile.gettempdir(), "golden.json")
        run_lowest(
            ["--into", str(target), *(["--sample"] if given.sample else []), *given.cases], timeout=3600
        )
        print(f"written: {target}")
    else:
        _play(given)


def _add(cases: Sequence[str]) -> None:
    from tests.golden.cases import runs

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "found.json")
        run_lowest(["--into", str(target), *cases], timeout=3600)
        found, record = json.loads(target.read_text()), json.loads(RECORD.read_text())
    if found["versions"] != record["versions"]:
        raise SystemExit(f"the record is of {record['versions']}, and these are {found['versions']}")
    known = found["runs"] | record["runs"]
    names = [name for case, player in runs() if (name := f"{case} / {player}") in known]
    RECORD.write_text(written({**record, "runs": {name: known[name] for name in names}}))


def _play(given: argparse.Namespace) -> None:
    import tests.train.forked_imports  # noqa: F401  # one thread, and what every run would compute again
    from tests.golden.cases import runs
    from tests.golden.lowest import versions
    from tests.golden.record import play, write_inputs

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        inputs, played = given.inputs or Path(folder, "inputs"), Path(folder, "played")
        if not inputs.exists():
            write_inputs(inputs)
        for case, player in runs(sample=given.sample):
            if given.cases and case not in given.cases:
                continue
            began = time.process_time()
            found[f"{case} / {player}"] = play(case, player, root=inputs, folder=played)
            print(f"{case} / {player}: {time.process_time() - began:.2f} s", flush=True)
    given.into.write_text(written({"versions": versions(), "runs": found}))


def written(record: dict[str, Any]) -> str:
    """One line a step: a change of the record shows which steps of which runs it changes."""
    lines = [f'  "versions": {json.dumps(record["versions"])}', '  "runs": {']
    for number, (name, steps) in enumerate(record["runs"].items()):
        ended = "," if number + 1 < len(record["runs"]) else ""
        inner = ",\n".join(f"      {json.dumps(step)}" for step in steps)
        lines.append(f"    {json.dumps(name)}: [\n{inner}\n    ]{ended}")
    return "{\n" + lines[0] + ",\n" + "\n".join(lines[1:]) + "\n  }\n}\n"


if __name__ == "__main__":
    main()
