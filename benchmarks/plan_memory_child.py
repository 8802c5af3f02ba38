"""One process with a model of random weights that computes one update and reports its peak of resident
memory.

Called by ``plan_memory.py``: ``python -m benchmarks.plan_memory_child JOB.json RANK [PORT]``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tests.distributed.groups import groups

from outrider.algorithms.base import ObjectiveSettings
from outrider.engines.local.model import load_model
from outrider.training.policy import Policy, set_threads
from outrider.training.settings import ColdStartSettings, LoraSettings, OptimizerSettings, UpdateSettings
from outrider.training.update import update

GROUPS, ROLLOUTS, LONGEST = 4, 8, 96


def resident(kind: str) -> int:
    """Bytes: ``VmRSS`` now, or ``VmHWM``, the most since :func:`forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024
    raise ValueError(kind)


def forget_peak() -> None:
    """Reset VmHWM (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def settings_of(job: dict[str, Any]) -> UpdateSettings:
    return UpdateSettings(
        max_tokens=job["max_tokens"], max_logprob_gap=1e9, checkpoint_activations=job["checkpoint"]
    )


def lora_of(job: dict[str, Any]) -> LoraSettings | None:
    return None if job["lora_rank"] is None else LoraSettings(rank=job["lora_rank"])


def alone(job: dict[str, Any], folder: str) -> Any:
    """Return a policy in this process, and its reference if the job has one."""
    model = load_model(folder, precision=job["precision"])
    policy = Policy(
        model, OptimizerSettings(), lora=lora_of(job), trained_layers=job["trained_layers"],
        checkpoint_activations=job["checkpoint"],
    )  # fmt: skip
    return policy, policy.frozen_copy() if job["reference"] else None


def sharded(job: dict[str, Any], folder: str, rank: int) -> Any:
    """One rank of several. Rank 0 prints the port at which they meet; the others get it as an argument."""
    from outrider.distributed.learner import Rank, RankSettings

    one = Rank(
        RankSettings(
            folder=folder,
            precision=job["precision"],
            initial=None,
            has_reference=job["reference"],
            lora=lora_of(job),
            trained_layers=job["trained_layers"],
            optimizer=OptimizerSettings(),
            update=settings_of(job),
            cold_start=ColdStartSettings(),
            seed=0,
            num_threads=1,
            stall_s=300.0,
        ),
        rank,
        job["ranks"],
    )
    port = int(sys.argv[3]) if rank else one.open_store("127.0.0.1")
    if rank == 0:
        print(json.dumps({"port": port}), flush=True)
    one.build("127.0.0.1", port)
    return one.policy, one.reference


def train(job: dict[str, Any], folder: str, rank: int) -> None:
    """Build, and two updates: moments exist from the first step on."""
    policy, reference = alone(job, folder) if job["ranks"] == 1 else sharded(job, folder, rank)
    traces = groups(GROUPS, rollouts=ROLLOUTS, longest=LONGEST)
    objective = ObjectiveSettings(kl_weight=0.01 if job["reference"] else 0.0)
    for _ in range(2):
        update(policy, traces, objective=objective, settings=settings_of(job), reference=reference)


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    set_threads(1)
    # Plan does not count libraries, thread pools and code.
    train({**job, "ranks": 1, "trained_layers": None}, job["tiny"], 0)
    before = resident("VmRSS")
    forget_peak()
    train(job, job["folder"], rank)
    print(json.dumps({"before": before, "peak": resident("VmHWM")}), flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
