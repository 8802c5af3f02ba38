"""How many tool calls a method executes until its rollouts earn a given reward.

    python -m benchmarks.calls_to_reward runs/demo-compare [DIR ...] [--levels 0.2 0.3 0.4]
                                                           [--methods grpo arpo-threshold]

Reads the runs ``METHOD-SEED`` of ``benchmarks.learning`` (or of a pack's ``runs``). A level is reached at the
end of the first step at which the mean training reward of the last three steps is at least as high. Shared
calls count once. The reward is that of the training rollouts, so it is a fair measure for methods whose
rollouts contain only steps of the policy (GRPO, ARPO), and not for RAPO or LUFFY. Prints a row per method:
calls by seed and their median; a run that ends below the level counts as more than all of its calls.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.markdown_table import markdown
from outrider.errors import OutriderError
from outrider.viewer.run_reader import read_run

WINDOW: Final = 3  # steps
LEVELS: Final = (0.2, 0.3, 0.4)
METHODS: Final = ("grpo", "arpo-threshold", "arpo-released")
_REWARD: Final = "reward/mean"
_CALLS: Final = "rollout/num_tool_calls"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--levels", nargs="+", type=float, default=LEVELS)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    arguments = parser.parse_args(given)
    try:
        print(table(read_calls(arguments.folders, arguments.methods, arguments.levels), arguments.levels))
    except OutriderError as error:
        print(f"calls_to_reward: {error}", file=sys.stderr)
        return 1
    return 0


def calls_to(rewards: Sequence[float], calls: Sequence[float], level: float) -> float:
    """Return the number of calls until the level is reached, or minus all calls if it is never reached."""
    spent = 0.0
    for step, executed in enumerate(calls, start=1):
        spent += executed
        last = rewards[max(0, step - WINDOW) : step]
        if step >= WINDOW and math.fsum(last) / WINDOW >= level:
            return spent
    return -spent


def read_calls(
    folders: Sequence[Path], methods: Sequence[str], levels: Sequence[float]
) -> dict[str, dict[int, dict[float, float]]]:
    """Return :func:`calls_to` by method, seed and level. If several folders have a run of one name, the first
    one counts.
    """
    found: dict[str, dict[int, dict[float, float]]] = {}
    for method in methods:
        for folder in folders:
            for run in sorted(folder.glob(f"{method}-*")):
                seed = run.name.removeprefix(f"{method}-")
                if seed.isdigit() and int(seed) not in found.get(method, {}):
                    found.setdefault(method, {})[int(seed)] = run_calls(run, levels)
    if not found:
        raise OutriderError(f"no run METHOD-SEED of {', '.join(methods)} in {', '.join(map(str, folders))}")
    return found


def run_calls(run: Path, levels: Sequence[float]) -> dict[float, float]:
    """Return :func:`calls_to` of a run by level."""
    data = read_run(run)
    rewards, calls = (dict(data.curve("train", name)) for name in (_REWARD, _CALLS))
    steps = sorted(rewards.keys() | calls.keys())  # a step without any call has no entry of them
    found = ([each.get(step) or 0.0 for step in steps] for each in (rewards, calls))
    by_step = dict(zip(("rewards", "calls"), found, strict=True))
    return {level: calls_to(**by_step, level=level) for level in levels}


def table(found: Mapping[str, Mapping[int, Mapping[float, float]]], levels: Sequence[float]) -> str:
    """A row a method and level, in Markdown."""
    rows = []
    for level in levels:
        for method, seeds in found.items():
            calls = [seeds[seed][level] for seed in sorted(seeds)]
            reached = sum(one > 0 for one in calls)
            rows.append(
                (
                    f"{level:g}",
                    method,
                    f"{reached} of {len(calls)}",
                    ", ".join(map(_told, calls)),
                    _median(calls),
                )
            )
    return markdown(("reward", "method", "seeds that reach it", "calls until then, by seed", "median"), rows)


def _told(calls: float) -> str:
    return f"{calls:.0f}" if calls > 0 else f"> {-calls:.0f}"


def _median(calls: Sequence[float]) -> str:
    """With runs that never reach it as the largest; a median among them is known as a lower bound only."""
    ranked = sorted((one if one > 0 else math.inf) for one in calls)
    middle = median(ranked)
    return f"{middle:.0f}" if math.isfinite(middle) else "not reached"


if __name__ == "__main__":
    raise SystemExit(main())
