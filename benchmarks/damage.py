"""Damages every file of a run (truncated, flipped, emptied, removed, replaced) and checks whether the damage
is detected or harmless.

    python -m benchmarks.damage [--out runs/damage] [--cases evolve] [--repeat 1] [--limit N]

Each case is a tiny run, as it ends and as a kill in its last step leaves it. One file of a copy is damaged;
then the copy is resumed and reported. damage.jsonl has one line per damage; the same command continues.
Verdicts: refused (one line, status 1 or 2), reported (a warning), harmless (the same final bits as without
damage), and the errors unnoticed (other bits without a warning) and traceback. The command prints a table and
exits with status 1 if there is an error.
"""

import argparse
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.training.forked import forked_outrider
from tests.training.whole_runs import CASES, command, differences, write_data

from benchmarks.kills import read
from benchmarks.markdown_table import markdown
from outrider.doctor import processor

NUM_STEPS = 3
STATES = ("ended", "killed")
VERDICTS = ("refused", "reported", "harmless", "unnoticed", "traceback")
_TOLD = ("DAMAGED", "NO CHECKSUM", "OTHER ", "NO REPORT", "last writer was killed")


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/damage"))
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=("evolve", "empo2", "reference"))
    parser.add_argument("--repeat", type=int, default=1, help="how often, with other draws")
    parser.add_argument("--limit", type=int, help="only so many, drawn over all")
    arguments = parser.parse_args(given)
    out = arguments.out.resolve()
    if not (out / "data" / "shown.jsonl").exists():
        shutil.rmtree(out / "data", ignore_errors=True)
        write_data(out / "data")
    wanted = list(_wanted(out, arguments.cases, arguments.repeat))
    random.Random("order").shuffle(wanted)
    done = read(out / "damage.jsonl")
    names = {json.dumps(one["what"]) for one in done}
    for what in wanted[: arguments.limit]:
        if json.dumps(list(what)) in names:
            continue
        one = play(out, *what)
        with (out / "damage.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(one) + "\n")
        done.append(one)
        print(f"{' '.join(map(str, what))}: {one['verdict']} {one['detail']}", flush=True)
    print(table(done), f"processor: {processor()}", sep="\n")
    return int(any(one["verdict"].isupper() for one in done))


def cut(content: bytes, draws: random.Random) -> bytes:
    """Keep a random part."""
    return content[: draws.randrange(len(content))] if content else content


def flip(content: bytes, draws: random.Random) -> bytes:
    """Flip one bit."""
    changed = bytearray(content)
    if changed:
        changed[draws.randrange(len(changed))] ^= 1 << draws.randrange(8)
    return bytes(changed)


def empty(content: bytes, draws: random.Random) -> bytes:
    """Remove all bytes."""
    return b""


def noise(content: bytes, draws: random.Random) -> bytes:
    """As many random bytes."""
    return draws.randbytes(len(content))


CHANGES: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": cut,
    "flip": flip,
    "empty": empty,
    "noise": noise,
}
DAMAGES = (*CHANGES, "remove", "replace")


def play(out: Path, case: str, state: str, file: str, damage: str, number: int) -> dict[str, Any]:
    """Damage a copy, continue it, view it, judge."""
    source, run = _made(out, case, state), out / "damaged"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(source, run)
    _damage(run, file, damage, random.Random(f"{case} {state} {file} {damage} {number}"))
    ended = [forked_outrider("train", "--resume", run, "--progress", "plain"), forked_outrider("report", run)]
    said = "\n".join(one.stdout + one.stderr for one in ended)
    told = next((line for line in said.splitlines() if any(mark in line for mark in _TOLD)), "")
    if "Traceback (most recent call last)" in said or any(one.returncode not in (0, 1, 2) for one in ended):
        verdict, detail = "traceback", said[-2000:]
    elif ended[0].returncode:
        lines = [line for line in ended[0].stderr.splitlines() if line.startswith("outrider: ")]
        verdict, detail = (
            ("refused", lines[0])
            if len(lines) == 1
            else ("unnoticed", f"{len(lines)} lines: {ended[0].stderr}")
        )
    elif told:
        verdict, detail = "reported", told
    else:
        wrong = differences(_made(out, case, "ended"), run, num_steps=NUM_STEPS)
        verdict, detail = ("unnoticed" if wrong else "harmless"), ", ".join(wrong)
    return {
        "what": [case, state, file, damage, number],
        "verdict": verdict,
        "detail": detail.replace(str(out), "OUT"),
    }


def table(done: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row per kind of damage and a total."""
    rows = [_row(name, [one for one in done if one["what"][3] == name]) for name in DAMAGES]
    return markdown(("damage", "files", *VERDICTS), [*rows, _row("all", done)])


def _row(name: str, done: Sequence[Mapping[str, Any]]) -> list[str]:
    verdicts = [one["verdict"] for one in done]
    return [name, str(len(done)), *(str(verdicts.count(one)) for one in VERDICTS)]


def _wanted(out: Path, cases: Sequence[str], repeat: int) -> Iterator[tuple[str, str, str, str, int]]:
    for case in cases:
        for state in STATES:
            made = _made(out, case, state)
            files = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
            yield from (
                (case, state, file, damage, n) for file in files for damage in DAMAGES for n in range(repeat)
            )


def _made(out: Path, case: str, state: str) -> Path:
    """Return the run as it ended, or without its last checkpoint. It is created once and atomically."""
    run = out / f"{case}-{state}"
    if run.exists():
        return run
    if state == "killed":
        shutil.copytree(_made(out, case, "ended"), out / "partial", dirs_exist_ok=False)
        shutil.rmtree(out / "partial" / "checkpoints" / f"step-{NUM_STEPS:06d}")
        return (out / "partial").rename(run)
    shutil.rmtree(out / "partial", ignore_errors=True)
    overrides = (f"train.num_steps={NUM_STEPS}", "evaluation.every=2", "evaluation.num_tasks=2")
    ended = forked_outrider(*command(out / "data", out / "partial", case), *overrides)
    if ended.returncode:
        raise RuntimeError(f"{case} does not run: {ended.stderr}")
    return (out / "partial").rename(run)


def _damage(run: Path, file: str, damage: str, draws: random.Random) -> None:
    path = run / file
    if damage == "remove":
        path.unlink()
    elif damage == "replace":
        alike = [one for one in sorted(run.rglob(f"*{path.suffix}")) if one.is_file() and one != path]
        path.write_bytes(draws.choice(alike).read_bytes() if alike else b"something else\n")
    else:
        path.write_bytes(CHANGES[damage](path.read_bytes(), draws))


if __name__ == "__main__":
    raise SystemExit(main())
