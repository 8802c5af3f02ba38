"""Attacks on the library: hostile programs in the sandbox, hostile files, servers, pages and chat markers.

None may succeed.

    python -m benchmarks.attacks [--areas sandbox data endpoint html tokens] [--count 300]
                                 [--out runs/attacks.jsonl]

``--count`` is the number of seeds of each area except the sandbox, which runs all of its programs. Every
attack is recorded when it has ended; the same command continues a stopped campaign. Exits with status 1 if an
attack succeeded.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.attack_inputs import CHECKS
from benchmarks.attack_programs import PROGRAMS
from benchmarks.attack_sandbox import sandbox
from outrider.doctor import processor
from outrider.files import append

AREAS = ("sandbox", *CHECKS)


def attack(areas: Sequence[str], count: int, out: Path) -> list[dict[str, object]]:
    """Run the attacks that ``out`` does not contain yet. Returns the area, name, seconds and success of all
    attacks.
    """
    wanted = [(area, name) for area in areas for name in names(area, count)]
    done = {(one["area"], one["name"]): one for one in read(out)}
    for area in areas:
        left = [name for of, name in wanted if of == area and (of, name) not in done]
        if not left:
            continue
        with attacker(area) as run:
            for name in left:
                start = time.monotonic()
                through = run(name)
                found = {
                    "area": area,
                    "name": name,
                    "seconds": round(time.monotonic() - start, 3),
                    "through": through,
                }
                # on a new line, because a kill may have left a torn one
                append(out, f"\n{json.dumps(found)}\n".encode())
                done[area, name] = found
    return [done[key] for key in wanted]


def names(area: str, count: int) -> list[str]:
    """The attacks of an area in their order: programs, or seeds."""
    return list(PROGRAMS) if area == "sandbox" else [str(seed) for seed in range(count)]


@contextmanager
def attacker(area: str) -> Iterator[Callable[[str], str]]:
    """Yield a function that runs one attack by name."""
    if area == "sandbox":
        with sandbox() as box:
            yield box.attack
    else:
        yield lambda name: CHECKS[area](int(name))


def read(out: Path) -> list[dict[str, object]]:
    """Return the recorded attacks without a torn last line."""
    found = []
    for line in out.read_text(encoding="utf-8").splitlines() if out.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def table(results: Sequence[Mapping[str, object]]) -> Table:
    """One row an area."""
    shown = Table("area", "attacks", "got through", "slowest, s")
    for area in dict.fromkeys(str(one["area"]) for one in results):
        ours = [one for one in results if one["area"] == area]
        slowest = max(float(str(one["seconds"])) for one in ours)
        shown.add_row(area, str(len(ours)), str(sum(bool(one["through"]) for one in ours)), f"{slowest:.1f}")
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=AREAS)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("runs/attacks.jsonl"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results = attack(arguments.areas, arguments.count, arguments.out)
    through = [one for one in results if one["through"]]
    Console().print(table(results), f"processor: {processor()}", sep="\n")
    for one in through:
        print(f"got through: {one['area']} {one['name']!r}: {one['through']}")
    return 1 if through else 0


if __name__ == "__main__":
    raise SystemExit(main())
