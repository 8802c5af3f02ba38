"""What theory says about retrieval on the three-hop questions and in games, beside what was recorded
(docs/algorithms/details/rapo_measured.md).

    python -m benchmarks.decision_chances --grpo RUN ... --rapo RUN ... [--step 1] [--harmless]

A decision is a search of the expert's path, or the answer. A search is right if its result is that of the
expert, the answer if it is rewarded. The table has the chance of each decision of the policy where all steps
before it were right, and the shares of rewarded rollouts: those without a wrong step, and all. The predicted
row is the recursion of benchmarks/decisions.py with the chances of GRPO and the retrieval probability of the
step. All runs start from the same cold starts, so that at step 1 both policies are equal.

``--harmless`` is for games, in which a wrong turn only costs a turn: a decision is a command of the expert's
walkthrough, it stays open until a turn gets the walkthrough's next observation, and its chance is that of a
turn. Tasks are counted by the number of their decisions.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks.decisions import Lock, rewarded
from benchmarks.markdown_table import markdown
from benchmarks.shared_tokens import rollout_paths
from outrider.algorithms.exploration import RapoSettings
from outrider.algorithms.retrieval import scheduled_probability
from outrider.config import load_settings
from outrider.environments.base import make_task_set, split_tasks
from outrider.rollout.hooks import HYBRID
from outrider.training.experts import request_expert_paths
from outrider.training.settings import RunSettings
from outrider.types import Origin, Step
from outrider.viewer.records import TraceReader, TraceRow, parse_metadata


@dataclass(slots=True)
class Counts:
    """``tried`` and ``right`` by decision, of policy turns after right decisions; ``on_path`` counts rewarded
    rollouts without a wrong step, ``detours`` the other rewarded ones.
    """

    tried: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    num: int = 0
    on_path: int = 0
    detours: int = 0

    def add(self, path: Sequence[TraceRow], expert: Sequence[Step], *, is_strict: bool = True) -> None:
        """Count a rollout: its nodes from the root to the leaf. If it is strict, nothing counts after a wrong
        decision; otherwise the decision stays open.
        """
        while len(self.tried) < len(expert):
            self.tried.append(0)
            self.right.append(0)
        is_rewarded = (path[-1].episode_return or 0.0) > 0
        done, is_right = 0, True
        for row, following in zip(path, [*path[1:], None], strict=True):
            if done == len(expert) or (is_strict and not is_right):
                break
            wanted = expert[done].observation.strip()
            is_seen = following is not None and following.text.strip() == wanted
            if row.origin is Origin.BUFFER:
                is_right = is_seen or wanted in row.text
                done += is_right
            elif row.origin is Origin.POLICY:
                is_last = done == len(expert) - 1
                is_right = is_rewarded and following is None if is_last else is_seen
                self.tried[done] += 1
                self.right[done] += is_right
                done += is_right
        self.num += 1
        self.on_path += is_rewarded and done == len(expert)
        self.detours += is_rewarded and done < len(expert)

    @property
    def chances(self) -> tuple[float, ...]:
        """Of the decisions; 0 for one that was never reached."""
        return tuple(right / max(tried, 1) for right, tried in zip(self.right, self.tried, strict=True))


def count(
    runs: Sequence[Path], step: int, *, is_strict: bool = True, mode: str | None = None
) -> dict[int, Counts]:
    """Count the rollouts of a training step of several runs: all together (key 0), or if they are not strict
    by the number of the task's decisions. ``mode``: only rollouts of this mode.
    """
    counts: dict[int, Counts] = {}
    for run in runs:
        settings = load_settings(RunSettings, file=run / "config.toml")
        rows = TraceReader(run / "traces").read(step)
        keys = {row.task_key for row in rows}
        task_set = make_task_set(settings.environment)
        tasks = [task for task in split_tasks(task_set, "train") if task.key in keys]
        experts, _ = request_expert_paths(task_set, tasks, settings, training_step=step)
        for path in rollout_paths(rows):
            if mode is not None and parse_metadata(path[-1]).get("mode") != mode:
                continue
            if (expert := experts[path[-1].task_key]) is not None:
                key = 0 if is_strict else len(expert)
                counts.setdefault(key, Counts()).add(path, expert, is_strict=is_strict)
    return counts


def retrieval_probability(run: Path, step: int) -> float:
    """Return the probability of a retrieval in a training step (from 1) of a RAPO run."""
    settings = load_settings(RunSettings, file=run / "config.toml")
    assert isinstance(settings.algorithm, RapoSettings)
    return scheduled_probability(settings.algorithm.retrieval, step - 1, settings.train.num_steps)


def table(own: Counts, hybrid: Counts, *, probability: float) -> str:
    """Return the three rows."""
    num = len(own.chances)
    lock = Lock(chances=own.chances, num_turns=num, probability=probability, is_strict=True, only_known=True)
    header = ("", *(f"search {number}" for number in range(1, num)), "answer", "no wrong step", "rewarded")
    rows = [
        (name, *(f"{chance:.2f}" for chance in counts.chances),
         *(f"{100 * num / counts.num:.1f} %" for num in (counts.on_path, counts.on_path + counts.detours)))
        for name, counts in (("GRPO", own), ("RAPO", hybrid))
    ]  # fmt: skip
    rows.append(("RAPO, predicted", *[""] * num, f"{100 * rewarded(lock):.1f} %", ""))
    return markdown(header, rows)


def harmless_table(
    own: Mapping[int, Counts], hybrid: Mapping[int, Counts], *, probability: float, num_turns: int
) -> str:
    """One row per number of decisions, and one for all rollouts."""
    header = (
        "decisions", "rollouts", "chances of a turn", "GRPO, predicted", "GRPO", "RAPO, predicted", "RAPO",
    )  # fmt: skip
    rows, totals = [], [0.0] * 6
    for length in sorted(own.keys() & hybrid.keys()):
        mine, theirs = own[length], hybrid[length]
        predicted = [
            rewarded(Lock(chances=mine.chances, num_turns=num_turns, probability=q))
            for q in (0.0, probability)
        ]
        sums = [
            mine.num, predicted[0] * mine.num, mine.on_path + mine.detours,
            theirs.num, predicted[1] * theirs.num, theirs.on_path + theirs.detours,
        ]  # fmt: skip
        totals = [total + one for total, one in zip(totals, sums, strict=True)]
        rows.append((str(length), *_harmless_cells(sums, ", ".join(f"{one:.2f}" for one in mine.chances))))
    rows.append(("all", *_harmless_cells(totals, "")))
    return markdown(header, rows)


def _harmless_cells(sums: Sequence[float], chances: str) -> list[str]:
    shares = [sums[1] / sums[0], sums[2] / sums[0], sums[4] / sums[3], sums[5] / sums[3]]
    return [f"{sums[0]:.0f} and {sums[3]:.0f}", chances, *(f"{100 * share:.1f} %" for share in shares)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grpo", nargs="+", type=Path, required=True)
    parser.add_argument("--rapo", nargs="+", type=Path, required=True)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--harmless", action="store_true", help="a wrong turn only costs a turn")
    given = parser.parse_args()
    own = count(given.grpo, given.step, is_strict=not given.harmless)
    hybrid = count(given.rapo, given.step, is_strict=not given.harmless, mode=HYBRID)
    probability = retrieval_probability(given.rapo[0], given.step)
    if given.harmless:
        settings = load_settings(RunSettings, file=given.rapo[0] / "config.toml")
        text = harmless_table(own, hybrid, probability=probability, num_turns=settings.rollout.max_turns)
    else:
        text = table(own[0], hybrid[0], probability=probability)
    nums = [sum(one.num for one in counts.values()) for counts in (own, hybrid)]
    Console(soft_wrap=True).print(f"{nums[0]} and {nums[1]} rollouts:\n\n{text}")


if __name__ == "__main__":
    main()
