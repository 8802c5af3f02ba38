"""Run folders to pack: written by hand on an environment of six questions, with the scores that they are
given.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from outrider.environments.tool_qa.datasets import DatasetConfig, hash_tasks, load_tasks
from outrider.metrics import MetricsWriter
from outrider.rollout.evaluate import interval

RECIPE = """
seed = {seed}
[model]
name = "tiny"
initial_checkpoint = "{start}"
[environment]
type = "tools"
tools = ["search"]
corpus = "{root}/corpus.jsonl"
test = {{ path = "{root}/tasks.jsonl" }}
[algorithm]
type = "{algorithm}"
[train]
num_steps = 2
[evaluation]
num_tasks = 6
"""


def write_questions(root: Path) -> Path:
    """The environment's files; returns their folder."""
    root.mkdir(parents=True, exist_ok=True)
    for name, row in (
        ("tasks", {"question": "Where is {}?", "answer": "here"}),
        ("corpus", {"id": "{}", "title": "{}", "text": "here"}),
    ):
        lines = [json.dumps({key: value.format(number) for key, value in row.items()}) for number in range(6)]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return root


def write_run(
    run: Path,
    root: Path,
    *,
    scores: Sequence[float],
    seed: int = 0,
    algorithm: str = "grpo",
    start: str = "none",
) -> Path:
    """A finished run of two steps, evaluated at its start and at its end."""
    run.mkdir(parents=True)
    (run / "config.toml").write_text(RECIPE.format(root=root, seed=seed, algorithm=algorithm, start=start))
    writer = MetricsWriter(run / "metrics.jsonl")
    for step in (1, 2):
        values = {
            "tokens/policy": 100.0 + seed,
            "rollout/num_tool_calls": 20.0,
            "time/step": 3.0,
            "reward/mean": 0.5,
        }
        writer.write(step, "train", values)
    writer.close()
    first = "before training" if start == "none" else f"of {start}"
    lines = [
        evaluation(root, [0.0] * 6, label=first, step=0),
        evaluation(root, scores, label=f"after {algorithm.upper()}", step=2),
    ]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def evaluation(root: Path, scores: Sequence[float], *, label: str, step: int) -> dict[str, object]:
    """A line of ``evaluations.jsonl`` as a run writes it."""
    tasks = load_tasks(DatasetConfig(path=root / "tasks.jsonl"))
    low, high = interval(scores, binary=all(one in (0.0, 1.0) for one in scores))
    by_task = dict(zip([task.key for task in tasks], scores, strict=True))
    return {
        "label": label, "split": "test", "num_tasks": 6, "step": step, "temperature": 1.0,
        "panel_hash": hash_tasks(tasks), "num_faults": 0, "mean_return": fmean(scores),
        "metric": {"score": {"value": fmean(scores), "ci_low": low, "ci_high": high}}, "task_scores": by_task,
        "task_returns": by_task,
    }  # fmt: skip


def write_exact(folder: Path, method: str, returns: Sequence[float], *, toy: str = "lock") -> Path:
    """Results as the toy suite writes them, one file a seed."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, value in enumerate(returns):
        result = {"expected_return": value, "sampled_return": value, "num_policy_tokens": 60,
                  "num_rollouts": 10, "num_steps": 1, "num_on_policy_rewards": 1,
                  "num_hybrid_rewards": 0}  # fmt: skip
        record = {
            "toy": toy,
            "method": method,
            "seed": seed,
            "settings": {"type": method},
            "max_policy_tokens": 40,
            "result": result,
        }
        (folder / f"{method}-{seed}.json").write_text(json.dumps(record))
    return folder
