"""What theory says about retrieval on the three-hop questions, beside what was recorded
(docs/algorithms/details/rapo_measured.md).

    python -m benchmarks.decision_chances --grpo RUN ... --rapo RUN ... [--step 1]

A decision is a search of the expert's path, or the answer. A search is right if its result is that of the
expert, the answer if it is rewarded. The table has the chance of each decision of the policy where all steps
before it were right, and the shares of rewarded rollouts: those without a wrong step, and all. The predicted
row is the recursion of benchmarks/decisions.py with the chances of GRPO and the retrieval probability of the
step. All runs start from the same cold starts, so that at step 1 both policies are equal.
"""

import argparse
from collections.abc import Sequence
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
from outrider.training.experts import request_expert_paths
from outrider.training.settings import RunSettings
from outrider.types import Origin, Step
from outrider.viewer.records import TraceReader, TraceRow


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

    def add(self, path: Sequence[TraceRow], expert: Sequence[Step]) -> None:
        """Count a rollout: its nodes from the root to the leaf."""
        while len(self.tried) < len(expert):
            self.tried.append(0)
            self.right.append(0)
        is_rewarded = (path[-1].episode_return or 0.0) > 0
        done, is_right = 0, True
        for row, following in zip(path, [*path[1:], None], strict=True):
            if done == len(expert) or not is_right:
                break
            wanted = expert[done].observation.strip()
            if row.origin is Origin.BUFFER:
                is_right = wanted in row.text
                done += 1
            elif row.origin is Origin.POLICY:
                is_last = done == len(expert) - 1
                seen = following.text.strip() if following is not None else ""
                is_right = is_rewarded and following is None if is_last else seen == wanted
                self.tried[done] += 1
                self.right[done] += is_right
                done += 1
        self.num += 1
        self.on_path += is_rewarded and is_right
        self.detours += is_rewarded and not is_right

    @property
    def chances(self) -> tuple[float, ...]:
        """Of the decisions; 0 for one that was never reached."""
        return tuple(right / max(tried, 1) for right, tried in zip(self.right, self.tried, strict=True))


def count(runs: Sequence[Path], step: int) -> Counts:
    """Count the rollouts of a training step of several runs."""
    counts = Counts()
    for run in runs:
        settings = load_settings(RunSettings, file=run / "config.toml")
        rows = TraceReader(run / "traces").read(step)
        keys = {row.task_key for row in rows}
        task_set = make_task_set(settings.environment)
        tasks = [task for task in split_tasks(task_set, "train") if task.key in keys]
        experts, _ = request_expert_paths(task_set, tasks, settings, training_step=step)
        for path in rollout_paths(rows):
            if (expert := experts[path[-1].task_key]) is not None:
                counts.add(path, expert)
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


def main() -> None:
    """Print the table, and write its record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grpo", nargs="+", type=Path, required=True)
    parser.add_argument("--rapo", nargs="+", type=Path, required=True)
    parser.add_argument("--step", type=int, default=1)
    given = parser.parse_args()
    own, hybrid = (count(runs, given.step) for runs in (given.grpo, given.rapo))
    text = table(own, hybrid, probability=retrieval_probability(given.rapo[0], given.step))
    Console(soft_wrap=True).print(f"{own.num} and {hybrid.num} rollouts:\n\n{text}")


if __name__ == "__main__":
    main()
