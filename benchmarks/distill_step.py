"""Time of an update with self-distillation, relative to the same update without it.

    python benchmarks/distill_step.py [--repeats 5] [--precision float32]

The update has the size of the demo's: 4 groups of 8 rollouts, 4 turns each, SmolLM2-135M of which the upper
half trains. The teacher reads ``--help-tokens`` tokens at the end of the prompt, the same for all rollouts of
a group (a file, tips, a demonstration) or different ones (a sibling's success).
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from rich.console import Console
from rich.table import Table

from outrider.algorithms.base import ObjectiveSettings
from outrider.algorithms.distill import DistillSettings
from outrider.config import validate
from outrider.engines.local.model import load_model, resolve_precision
from outrider.trace import Insertion, Leaf, Trace
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.update import update
from outrider.types import Message, Origin, Outcome, Task

ROLLOUTS, TURNS = 8, 4
PROMPT, ACTION, OBSERVATION = 200, 20, 30
TEXT = Message(role="user", content="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--help-tokens", type=int, default=48)
    parser.add_argument("--trained-layers", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=("auto", "bfloat16", "float32"), default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    precision = resolve_precision(arguments.precision, "cpu")
    policy = Policy(
        load_model(arguments.model, precision=precision),
        OptimizerSettings(learning_rate=1e-9),
        trained_layers=arguments.trained_layers,
    )
    shared, own = (
        groups(arguments.groups, arguments.help_tokens, is_shared=is_shared) for is_shared in (True, False)
    )
    sides: dict[str, tuple[list[Trace], dict[str, object] | None]] = {
        "without": (shared, None),
        "forward KL, top 64, one help per group": (shared, {"support": 64}),
        "forward KL, top 64, one help per rollout": (own, {"support": 64}),
        "forward KL, all tokens, one help per group": (shared, {"support": "all"}),
        "reverse KL of sampled tokens, one help per group": (shared, {"form": "reverse_kl"}),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for repeat in range(arguments.repeats + 1):
        for name, (traces, distill) in sides.items():  # alternating: the machine may become slower
            elapsed = step(policy, traces, distill)
            if repeat:  # the first one warms up
                seconds[name].append(elapsed)
    medians = {
        name: [statistics.median(values) for values in zip(*pairs, strict=True)]
        for name, pairs in seconds.items()
    }
    title = f"{arguments.model}, {precision}, {arguments.threads} threads, medians of {arguments.repeats}"
    table = Table("update", "seconds", "against without", "CPU seconds", "against without", title=title)
    for name, values in medians.items():
        ratios = (value / base for value, base in zip(values, medians["without"], strict=True))
        cells = [f"{each:.2f}" for pair in zip(values, ratios, strict=True) for each in pair]
        table.add_row(name, *cells)
    Console().print(table)


def step(policy: Policy, traces: list[Trace], distill: dict[str, object] | None) -> tuple[float, float]:
    """Return the seconds of an update, and those of the processor, which other processes disturb less."""
    settings = None if distill is None else validate(DistillSettings, {"help": "tips", **distill})
    began = time.perf_counter(), time.process_time()
    update(
        policy,
        traces,
        objective=ObjectiveSettings(distill=settings),
        settings=UpdateSettings(max_tokens=1024, max_logprob_gap=1e9),
        reference=None,
    )
    return time.perf_counter() - began[0], time.process_time() - began[1]


def groups(num: int, num_help: int, *, is_shared: bool) -> list[Trace]:
    """Groups of random tokens with random advantages."""
    random = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(100, 10_000, (count,), generator=random).tolist())

    traces = []
    for group in range(num):
        trace = Trace(task=Task(key=str(group), question=""))
        root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=ids(PROMPT), message=TEXT)
        help_ids = ids(num_help)
        for rollout in range(ROLLOUTS):
            node = root
            for _ in range(TURNS):
                node = trace.append(
                    parent=node.node_id,
                    origin=Origin.POLICY,
                    token_ids=ids(ACTION),
                    message=TEXT,
                    logprobs=(-10.0,) * ACTION,
                    entropies=(1.0,) * ACTION,
                )
                node.credit = (1.0 if rollout % 2 else -1.0,) * ACTION
                node = trace.append(
                    parent=node.node_id, origin=Origin.ENVIRONMENT, token_ids=ids(OBSERVATION), message=TEXT
                )
            trace.finish(
                Leaf(
                    node_id=node.node_id,
                    rollout=rollout,
                    outcome=Outcome.FINISHED,
                    episode_return=float(rollout % 2),
                )
            )
            trace.help[rollout] = (
                Insertion(
                    node_id=root.node_id,
                    offset=PROMPT - 5,
                    token_ids=help_ids if is_shared else ids(num_help),
                    text="",
                    source="file",
                ),
            )
        traces.append(trace)
    return traces


if __name__ == "__main__":
    main()
