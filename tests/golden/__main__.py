"""Writes the golden record of this machine's kernels, or plays some of it: ``python -m tests.golden --write
[CASE ...]``; ``--into FILE [--sample] [CASE ...]``.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from outrider.engines.local.processor import read_processor
from tests.golden.kernels import RECORDS, fitting, records
from tests.golden.lowest import run_lowest


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    options.add_argument(
        "--write", action="store_true", help="play on the least processor; put what is found into its record"
    )
    options.add_argument("--into", type=Path, help="play in this process, and write what was found")
    options.add_argument(
        "--inputs", type=Path, help="a folder that keeps the model and the data for further calls"
    )
    options.add_argument("--sample", action="store_true", help="one preset a page")
    options.add_argument("cases", nargs="*", help="only these cases")
    given = options.parse_args()
    if given.into is not None:
        _play(given)
        return
    found_in = Path(tempfile.gettempdir(), "golden.json")
    run_lowest(["--into", str(found_in), *(["--sample"] if given.sample else []), *given.cases], timeout=3600)
    print(f"written: {_put(json.loads(found_in.read_text())) if given.write else found_in}")


def _put(found: dict[str, Any]) -> Path:
    """Into the record of these kernels, in the place of what it had of these runs; a new file for new
    ones.
    """
    from tests.golden.cases import runs

    kept = records()
    name = fitting(kept, found["kernels"])
    played = {**(kept[name]["runs"] if name else {}), **found["runs"]}
    order = [f"{case} / {player}" for case, player in runs(sample=False)]
    maker = read_processor().model.split()[0]
    record = {**found, "maker": maker, "runs": {run: played[run] for run in order if run in played}}
    path = RECORDS / f"{name or '-'.join([maker.lower(), found['kernels']])}.json"
    path.write_text(written(record))
    return path


def _play(given: argparse.Namespace) -> None:
    import tests.training.forked_imports  # noqa: F401  # one thread, and what every run would compute again
    from tests.golden.cases import runs
    from tests.golden.kernels import fingerprint
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
    held = {"versions": versions(), "kernels": fingerprint(), "maker": "", "runs": found}
    given.into.write_text(written(held))


def written(record: dict[str, Any]) -> str:
    """One line a step: a change of the record shows which steps of which runs it changes."""
    told = [f'  "{name}": {json.dumps(record[name])}' for name in ("versions", "kernels", "maker")]
    lines = [",\n".join(told), '  "runs": {']
    for number, (name, steps) in enumerate(record["runs"].items()):
        ended = "," if number + 1 < len(record["runs"]) else ""
        inner = ",\n".join(f"      {json.dumps(step)}" for step in steps)
        lines.append(f"    {json.dumps(name)}: [\n{inner}\n    ]{ended}")
    return "{\n" + lines[0] + ",\n" + "\n".join(lines[1:]) + "\n  }\n}\n"


if __name__ == "__main__":
    main()
