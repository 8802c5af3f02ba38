"""RAPO's gain by the number of decisions that the policy must learn, on locks (tests/toys.py,
docs/algorithms/details/rapo_measured.md).

    python -m benchmarks.toy_decisions --out runs/decisions [--records records]

In series ``equal``, an untrained rollout is rewarded with a probability of 1 in 10,000, whatever the number
of decisions; in ``twenty``, every decision has a probability of one in twenty. A wrong turn has no effect, or
ends the episode (``strict``); there is one turn per decision. Every method has as many policy tokens as 1,500
rollouts of the untrained policy. The expected return is exact, at temperature 1 and without retrieval.
Results in ``--out`` are reused; ``--records`` writes the tables for ``make figures``.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from tests.toy_result import Result
from tests.toys import ACTIONS, Toy

from benchmarks.decisions import Lock, rewarded
from benchmarks.learning_methods import Method
from benchmarks.learning_toys import ARENAS, Arena, play_all
from benchmarks.markdown_table import markdown
from outrider.training.policy import set_threads

NUM_ROLLOUTS: Final = 1500
METHODS: Final = {"grpo": "GRPO", "rapo": "RAPO"}
HEADER: Final = (
    "decisions", "chance of each", "untrained, of 10,000: on-policy", "hybrid",
    "hybrid, with the policy's own step at decision 1, 2, ...", *METHODS.values(),
    "rewarded of GRPO's rollouts", "of RAPO's, on-policy / hybrid",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Locks that differ in their number of doors; ``product`` is that of the probabilities, None for one in
    twenty per door.
    """

    name: str
    is_strict: bool
    depths: tuple[int, ...]
    product: float | None = None

    def chance(self, depth: int) -> float:
        """Return the probability that the untrained policy opens one door."""
        return 1 / len(ACTIONS) if self.product is None else self.product ** (1 / depth)

    def lock(self, depth: int) -> Lock:
        """For the exact chances of a hybrid rollout."""
        return Lock(chances=(self.chance(depth),) * depth, num_turns=depth, is_strict=self.is_strict)

    def max_policy_tokens(self, depth: int) -> int:
        """The turns of NUM_ROLLOUTS untrained rollouts; a strict lock ends most of them early."""
        turns = sum(self.chance(depth) ** k for k in range(depth)) if self.is_strict else depth
        return round(NUM_ROLLOUTS * turns)

    def arena(self, depth: int) -> Arena:
        """RAPO's toy with this many doors and turns."""

        def toy(seed: int) -> Toy:
            return Toy(
                seed=seed, depth=depth, num_turns=depth, is_strict=self.is_strict, chance=self.chance(depth)
            )

        return replace(ARENAS[0], name=f"{self.name}-{depth}", toy=toy)


SERIES: Final = (
    Series(name="decisions-equal", is_strict=False, depths=(1, 2, 3, 4), product=1e-4),
    Series(name="decisions-equal-strict", is_strict=True, depths=(1, 2, 3, 4, 6, 8), product=1e-4),
    Series(name="decisions-twenty", is_strict=False, depths=(1, 2, 3, 4)),
)


def row(series: Series, depth: int, results: Mapping[str, Sequence[Result]]) -> tuple[str, ...]:
    """One lock: exact chances of a reward before training, returns after it, and how many training rollouts
    were rewarded.
    """
    lock = series.lock(depth)
    before = rewarded(replace(lock, probability=0.0)), rewarded(lock)
    own = ", ".join(f"{10_000 * rewarded(lock, own=door):.1f}" for door in range(1, depth + 1))
    returns = (_returns(results[key]) for key in METHODS)
    on_policy, _ = _shares(results["grpo"])
    return (
        str(depth), f"{series.chance(depth):.4f}", *(f"{10_000 * chance:.1f}" for chance in before), own,
        *returns, on_policy, " / ".join(_shares(results["rapo"])),
    )  # fmt: skip


def _returns(results: Sequence[Result]) -> str:
    values = [result.expected_return for result in results]
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _shares(results: Sequence[Result]) -> tuple[str, str]:
    num_rollouts = sum(result.num_rollouts for result in results)
    counts = (
        sum(result.num_on_policy_rewards for result in results),
        sum(result.num_hybrid_rewards for result in results),
    )
    on_policy, hybrid = (f"{100 * count / num_rollouts:.2f} %" for count in counts)
    return on_policy, hybrid


def main() -> None:
    """Run the missing trainings and print a table per series."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.toy_decisions", description="Gain against decisions."
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--series", nargs="+", default=[series.name for series in SERIES])
    parser.add_argument("--source", default="", help="description of the machine in the records")
    parser.add_argument("--records", type=Path)
    arguments = parser.parse_args()
    set_threads(1)
    for series in SERIES:
        if series.name not in arguments.series:
            continue
        rows = [row(series, depth, _played(series, depth, arguments)) for depth in series.depths]
        print(f"\n{series.name}\n\n{markdown(HEADER, rows)}", flush=True)
        if arguments.records:
            command = f"python -m benchmarks.toy_decisions --out runs/decisions --series {series.name}"
            record = {
                "kind": "cells",
                "source": arguments.source,
                "command": command,
                "columns": HEADER,
                "rows": rows,
            }
            text = json.dumps(record, indent=1) + "\n"
            (arguments.records / f"toy-{series.name}.json").write_text(text, encoding="utf-8")


def _played(series: Series, depth: int, arguments: argparse.Namespace) -> dict[str, list[Result]]:
    arena = series.arena(depth)
    chosen: list[Method] = [method for method in arena.methods() if method.key in METHODS]
    found = play_all(
        arguments.out, arena, chosen, seeds=range(arguments.seeds),
        max_policy_tokens=series.max_policy_tokens(depth), note=lambda text: print(text, flush=True),
    )  # fmt: skip
    return {key: list(by_seed.values()) for key, by_seed in found.items()}


if __name__ == "__main__":
    main()
