"""Scores of the mutation benchmark with 95 % intervals, and the mutants that were named equivalent."""

import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EQUIVALENT = Path(__file__).with_name("mutation_equivalent.toml")
_Z = 1.959964  # of 95 %
_HEAD = "| module | mutants | drawn | equivalent | found | score | 95 % interval |"
Line = dict[str, Any]
Names = set[tuple[str, ...]]
FOUND = ("killed", "import", "timeout")


@dataclass(frozen=True, slots=True)
class Score:
    """Of a module: ``num_all`` mutants exist, ``num_found`` of ``num_counted`` drawn ones made a test fail.

    Mutants that are named equivalent count nowhere. ``num_import`` and ``num_timeout`` of the found ones
    broke the import or ran past their limit; ``num_argument`` changed or left out an argument of a call,
    which often raises whatever is tested.
    """

    module: str
    num_all: int
    num_counted: int
    num_found: int
    num_import: int
    num_timeout: int
    num_equivalent: int
    num_not_run: int
    num_argument: int
    num_argument_found: int

    @staticmethod
    def of(module: str, num_all: int, found: Sequence[Line], known: Names) -> "Score":
        """From the record's lines."""
        counted = [line for line in found if line["result"] in FOUND or _name(line) not in known]
        results = Counter(line["result"] for line in counted)
        arguments = [line for line in counted if line["operator"] == "arg_removal"]
        return Score(
            module=module,
            num_all=num_all,
            num_counted=len(counted),
            num_found=sum(results[name] for name in FOUND),
            num_import=results["import"],
            num_timeout=results["timeout"],
            num_equivalent=len(found) - len(counted),
            num_not_run=results["not run"],
            num_argument=len(arguments),
            num_argument_found=sum(line["result"] in FOUND for line in arguments),
        )

    @property
    def share(self) -> float:
        """The score, of 1."""
        return self.num_found / self.num_counted if self.num_counted else math.nan

    def as_record(self) -> dict[str, Any]:
        """With score and interval."""
        low, high = wilson(self.num_found, self.num_counted)
        return {**asdict(self), "share": self.share, "low": low, "high": high}


def wilson(num_found: float, num: float) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson, 1927); 0 to 1 for none."""
    if num <= 0:
        return 0.0, 1.0
    share, z2 = num_found / num, _Z**2
    middle = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = _Z / (1 + z2 / num) * math.sqrt(share * (1 - share) / num + z2 / (4 * num**2))
    return middle - half, middle + half


def overall(scores: Sequence[Score]) -> tuple[float, float, float]:
    """Share and interval over all mutants of the modules, each module weighted by how many it has.

    The interval is Wilson's for the number of draws from the whole that would have the same variance.
    """
    total = sum(score.num_all for score in scores if score.num_counted)
    parts = [(score.num_all / total, score.share, score.num_counted) for score in scores if score.num_counted]
    share = sum(weight * part for weight, part, _ in parts)
    variance = sum(weight**2 * part * (1 - part) / num for weight, part, num in parts)
    num_drawn = float(sum(num for _, _, num in parts))
    effective = share * (1 - share) / variance if variance > 0 else num_drawn
    return share, *wilson(share * effective, effective)


def equivalents(file: Path = EQUIVALENT) -> Names:
    """File, function, lines before and after of the mutants that nothing can tell from the original."""
    entries = tomllib.loads(file.read_text()).get("mutant", [])
    return {(entry["file"], entry.get("function", ""), entry["before"], entry["after"]) for entry in entries}


def printed(scores: Sequence[Score], *, head: bool = False, total: bool = False) -> str:
    """A row a module, and with ``total`` one for all of them instead."""
    rows = [_HEAD, "| --- " * 7 + "|"] if head else []
    if total:
        share, low, high = overall(scores)
        names = ("num_all", "num_counted", "num_equivalent", "num_found")
        sums = [sum(getattr(score, name) for score in scores) for name in names]
        rows.append(_row("all", sums, share, low, high))
    else:
        for score in scores:
            sums = [score.num_all, score.num_counted, score.num_equivalent, score.num_found]
            rows.append(_row(score.module, sums, score.share, *wilson(score.num_found, score.num_counted)))
    return "\n".join(rows)


def breakdown(scores: Sequence[Score]) -> str:
    """How they were found, and the score of arguments and of everything else, over what was drawn."""

    def total(name: str) -> int:
        return sum(getattr(score, name) for score in scores)

    arguments, found = total("num_argument"), total("num_argument_found")
    return (
        f"Of the found ones {total('num_import')} broke the import and {total('num_timeout')} ran past the "
        f"limit; {total('num_not_run')} are in lines that no test runs.\n"
        f"Arguments of calls: {found} of {arguments} found, everything else: "
        f"{total('num_found') - found} of {total('num_counted') - arguments}."
    )


def survivors(found: Iterable[Line], known: Names) -> str:
    """What no test noticed and nobody has named equivalent."""
    left = [line for line in found if line["result"] not in FOUND and _name(line) not in known]
    return "\n".join(
        f"{line['file']}:{line['line']} {line['function']} ({line['operator']}, {line['result']}, "
        f"{line['num_tests']} tests)\n  - {line['before']}\n  + {line['after']}"
        for line in left
    )


def _row(name: str, sums: Sequence[int], share: float, low: float, high: float) -> str:
    interval = f"{100 * low:.1f} to {100 * high:.1f} %"
    return f"| {name} | {' | '.join(map(str, sums))} | {100 * share:.1f} % | {interval} |"


def _name(line: Line) -> tuple[str, ...]:
    return line["file"], line["function"] or "", line["before"], line["after"]
