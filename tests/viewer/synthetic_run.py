"""A small run directory of fixed numbers, written with the real writers."""

import json
import math
import random
from pathlib import Path
from typing import Any

from outrider.metrics import MetricsWriter
from outrider.types import Origin, Outcome
from outrider.viewer.records import SCHEMA, StepFiles, TraceRow, step_file

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&"


def write_config(run_dir: Path) -> None:
    (run_dir / "config.toml").write_text(
        'seed = 7\n[algorithm]\ntype = "rapo"\nnum_hybrid = 8\n[model]\n'
        'name = "/home/someone/models/tiny-agent"\n'
        '[environment]\ntype = "arithmetic <b>tools</b>"\n'
    )


def write_metrics(run_dir: Path, num_steps: int) -> None:
    draw = random.Random(0)
    writer = MetricsWriter(run_dir / "metrics.jsonl")
    for step in range(1, 11):
        writer.write(step, "sft", {"sft/loss": 2.0 / step})
    for step in range(1, num_steps + 1):
        progress = step / num_steps
        noise = draw.gauss(0, 0.04)
        rate = None if step == num_steps // 2 else 0.5 + noise
        values = {
            "reward/mean": 0.2 + 0.5 * progress + noise,
            "retrieval/reward_on_policy": 0.15 + 0.5 * progress + noise,
            "retrieval/reward_hybrid": 0.25 + 0.5 * progress - noise,
            "entropy/token_mean": 1.1 - 0.7 * progress + noise,
            "rollout/length_tokens_mean": 310 - 60 * progress + 200 * noise, "retrieval/rate": rate,
            "retrieval/z_mean": 0.05 + noise, "retrieval/g_mean": 0.3 + noise,
            "retrieval/similarity_mean": 0.7 + noise / 4,
            "retrieval/entropy_before_mean": 1.2 - 0.6 * progress,
            "retrieval/entropy_after_mean": 1.0 - 0.6 * progress, "rollout/num_tool_calls": 40 + 100 * noise,
            "rollout/num_tool_calls_saved": 12 + 50 * noise, "rollout/num_tool_fault": step % 2,
            "gap/logprob_mean": 1e-4 + abs(noise) * 1e-4, "gap/logprob_max": 4e-3 + abs(noise) * 1e-3,
            "grad/norm": math.nan if step == 3 else 0.8 + noise, "speed/rollout_tokens": 900 + 1000 * noise,
            "speed/update_tokens": 14000 + 9000 * noise, "time/step": 12.0, "tokens/policy": 4000,
        }  # fmt: skip
        writer.write(step, "train", values)
    writer.close()


def write_evaluations(run_dir: Path) -> None:
    scores = [
        ("before cold start", 0, 0.11),
        ("after cold start", 0, 0.32),
        ("panel", 20, 0.4),
        ("panel", 40, 0.5),
        ("panel", 60, 0.57),
        ("after training", 60, 0.58),
        ("GRPO, after training", 60, 0.49),
    ]
    with (run_dir / "evaluations.jsonl").open("w") as stream:
        for label, step, value in scores:
            score = {"value": value, "ci_low": value - 0.04, "ci_high": value + 0.04}
            line = {
                "label": label,
                "split": "test",
                "num_tasks": 200,
                "metric": {"score": score},
                "step": step,
                "temperature": 0.0,
                "panel_hash": "9f2c" * 16,
            }
            stream.write(json.dumps(line) + "\n")


def trace(step: int, index: int, *, num_tokens: int = 60) -> list[TraceRow]:
    """One trace: prompt, turn, observation; one leaf goes on alone and a hybrid one goes through a retrieved
    step.
    """
    draw = random.Random(f"{step}/{index}")
    words = ["think", " about", " the", " sum", ":", "\n", " 12", "+", "30", " <b>", "=", " 42"]

    def node(
        node_id: int, parent_id: int, origin: Origin, text: str, rollout: int = 0, **fields: Any
    ) -> TraceRow:
        tokens = tuple(draw.choice(words) for _ in range(num_tokens)) if origin is Origin.POLICY else ()
        entropies = tuple(draw.expovariate(1.5) for _ in tokens)
        return TraceRow(
            step=step, task_key=f"task-{index:03d}", trace_id=f"t{index}", node_id=node_id,
            parent_id=parent_id, rollout=rollout, origin=origin, text="".join(tokens) or text, tokens=tokens,
            logprobs=tuple(-h for h in entropies), entropies=entropies, **fields,
        )  # fmt: skip

    end: dict[str, Any] = {
        "outcome": Outcome.FINISHED,
        "episode_return": index / 10,
        "advantage": 0.5 - index / 10,
    }
    return [
        node(0, -1, Origin.PROMPT, f"What is 12 + 30? {HOSTILE}"),
        node(1, 0, Origin.POLICY, ""),
        node(2, 1, Origin.ENVIRONMENT, f"<result>42 {HOSTILE}</result>"),
        node(3, 2, Origin.POLICY, "", hybrid=False, **end),
        node(
            4,
            2,
            Origin.BUFFER,
            f"<retrieve>add the tens first {HOSTILE}</retrieve>",
            1,
            metadata='{"similarity": 0.81, "source": "gold<i>"}',
        ),
        node(5, 4, Origin.POLICY, "", 1, hybrid=True, **end),
    ]


def write_run(run_dir: Path, *, num_steps: int = 60, num_tokens: int = 60) -> Path:
    """A whole run directory."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_config(run_dir)
    write_metrics(run_dir, num_steps)
    write_evaluations(run_dir)
    writer = StepFiles(run_dir / "traces")
    for step in (1, 2, num_steps // 2, num_steps):
        writer.write_rows(
            step_file(step),
            [row for index in range(4) for row in trace(step, index, num_tokens=num_tokens)],
            SCHEMA,
        )
    return run_dir
