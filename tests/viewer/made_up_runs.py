"""Made-up runs of tool episodes that learn, with the noise of 32 rollouts a step, and planted failures."""

import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from outrider.types import Origin, Outcome
from outrider.viewer.records import (
    ROLLOUT_SCHEMA,
    ROLLOUTS,
    SCHEMA,
    RolloutRow,
    StepFiles,
    TraceRow,
    step_file,
)

NUM_STEPS = 24
NUM_GROUPS, GROUP_SIZE = 4, 8
NUM = NUM_GROUPS * GROUP_SIZE
Curve = Callable[[float], float | None]  # of the progress of the run, from above 0 to 1

HEALTHY: Mapping[str, Curve] = {
    "rollout/num": lambda t: NUM,
    "rollout/num_truncated_turns": lambda t: 6 - 4 * t,
    "rollout/num_truncated_tokens": lambda t: 2,
    "rollout/num_invalid": lambda t: 2 - 2 * t,
    "rollout/tool_calls_per_leaf": lambda t: 2.5 - 0.7 * t,
    "rollout/truncated_fraction": lambda t: 0.06,
    "reward/mean": lambda t: 0.15 + 0.4 * t,
    "reward/success_rate": lambda t: 0.15 + 0.4 * t,
    "reward/min": lambda t: 0,
    "reward/max": lambda t: 1,
    "group/num": lambda t: NUM_GROUPS,
    "group/num_without_signal_no_spread": lambda t: 1.5 - t,
    "group/num_without_signal_singleton": lambda t: 0,
    "group/num_without_signal_unscorable": lambda t: 0,
    "group/num_without_signal_rejected": lambda t: 0,
    "group/fraction_without_signal": lambda t: 0.4 - 0.25 * t,
    "entropy/token_mean": lambda t: 0.8 - 0.5 * t,
    "gap/logprob_mean": lambda t: 1e-4,
    "ratio/importance_ess_share": lambda t: 0.99,
    "retrieval/reward_hybrid": lambda t: 0.25 + 0.4 * t,
    "retrieval/reward_on_policy": lambda t: 0.1 + 0.4 * t,
    "retrieval/num_inserted": lambda t: 12,
    "retrieval/num_no_candidate": lambda t: 14,
    "retrieval/num_refused": lambda t: 0,
    "retrieval/num_dropped": lambda t: 1,
    "buffer/num_steps": lambda t: 448,
    "tips/memory_size": lambda t: 300 * t,
    "tips/num_shown": lambda t: 60 * t,
    "tips/num_turns_without": lambda t: 40 - 35 * t,
    "tips/return_plain": lambda t: 0.15 + 0.4 * t,
    "tips/return_tips_on": lambda t: 0.2 + 0.4 * t,
}
_RATES = {"reward/mean", "reward/success_rate", "group/fraction_without_signal", "retrieval/reward_hybrid",
          "retrieval/reward_on_policy", "tips/return_plain", "tips/return_tips_on"}  # fmt: skip
_CONSTANT = {"rollout/num", "group/num", "reward/min", "reward/max", "buffer/num_steps"}


def write_metrics(run: Path, *, seed: int = 0, planted: Mapping[str, Curve] | None = None) -> Path:
    """Metrics and configuration: healthy curves, except for the planted ones. Rates have the noise of few
    rollouts, other values 15 % of theirs."""
    run.mkdir(exist_ok=True)
    (run / "config.toml").write_text(
        '[model]\nprecision = "float32"\n[algorithm.retrieval]\nschedule = "constant"\n', encoding="utf-8"
    )
    draw, lines = random.Random(seed), []
    for step in range(1, NUM_STEPS + 1):
        values: dict[str, Any] = {"step": step, "kind": "train"}
        for name, curve in {**HEALTHY, **(planted or {})}.items():
            value = curve(step / NUM_STEPS)
            if value is not None and name in _RATES:
                value = sum(draw.random() < value for _ in range(16)) / 16
            elif value is not None and name not in _CONSTANT:
                value *= draw.uniform(0.7, 1.3)
            values[name] = value
        lines.append(json.dumps(values) + "\n")
    (run / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return run


def write_traces(
    run: Path, *, seed: int = 0, template: float = 0.0, steps: Iterable[int] = range(1, 7)
) -> None:
    """Turns with words of their task among common ones. ``template`` is the share of rollouts of the later
    half that are the same sentence for every task."""
    draw, writer, steps = random.Random(seed), StepFiles(run / "traces"), list(steps)
    for step in steps:
        rows = []
        for task in draw.sample(range(50), NUM_GROUPS):
            for rollout in range(GROUP_SIZE):
                words = ["search", "answer", *draw.choices(["the", "of", "is", "then", "so"], k=8)]
                words += [f"town{task}", f"river{draw.choice([task, draw.randrange(50)])}"]
                draw.shuffle(words)
                if step > steps[len(steps) // 2] and draw.random() < template:
                    words = ["let", "me", "think", *draw.choices(["the", "of", "is", "then", "so"], k=8)]
                rows.append(
                    TraceRow(
                        step=step, task_key=f"task-{task}", trace_id=f"{step}/{task}", node_id=rollout,
                        parent_id=-1, rollout=rollout, origin=Origin.POLICY, text=" ".join(words),
                    )
                )  # fmt: skip
        writer.write_rows(step_file(step), rows, SCHEMA)


def rollout(step: int, group: int, number: int, episode_return: float | None, **fields: object) -> RolloutRow:
    """A finished rollout."""
    defaults = {"task_key": f"task-{group}", "node_id": number, "outcome": Outcome.FINISHED, "mode": "hybrid"}
    return RolloutRow(
        step=step, trace_id=f"{step}/{group}", rollout=number, episode_return=episode_return,
        **{"forked_from": number, **defaults, **fields},  # type: ignore[arg-type]
    )  # fmt: skip


def write_rollouts(run: Path, rows: Iterable[RolloutRow]) -> None:
    """One file per step."""
    by_step: dict[int, list[RolloutRow]] = {}
    for row in rows:
        by_step.setdefault(row.step, []).append(row)
    for step, part in by_step.items():
        StepFiles(run / ROLLOUTS).write_rows(step_file(step), part, ROLLOUT_SCHEMA)


def write_records(run: Path, name: str, values: Iterable[float | None], *, config: str = "") -> Path:
    """Training records of one metric."""
    run.mkdir(exist_ok=True)
    (run / "config.toml").write_text(config, encoding="utf-8")
    lines = [json.dumps({"step": step, "kind": "train", name: value}) for step, value in enumerate(values, 1)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return run
