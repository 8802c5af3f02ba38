"""Number of threads and precision for training on this machine: generation and update speed, in one process.

    python benchmarks/threads.py [--model NAME] [--repeats 3] [--threads 1 2] [--precisions bfloat16 float32]

Two virtual processors are often two hyper-threads of one core: they share its matrix unit, and a thread that
waits at a barrier slows down the other one. The numbers of threads alternate, so that a slow minute of the
machine affects all of them.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from itertools import product

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from rich.console import Console
from rich.table import Table

from outrider.engines.base import Request
from outrider.engines.local.engine import LocalEngine
from outrider.engines.local.model import load_model
from outrider.engines.local.processor import read_processor
from outrider.trace import Trace
from outrider.training.packing import RolloutPath, pack
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings
from outrider.types import Message, Origin, Task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--precisions", nargs="+", default=["bfloat16", "float32"])
    arguments = parser.parse_args()
    policies = {
        precision: Policy(
            load_model(arguments.model, precision=precision), OptimizerSettings(learning_rate=1e-9)
        )
        for precision in arguments.precisions
    }
    rates: dict[tuple[str, int], list[tuple[float, float, float]]] = defaultdict(list)
    for _ in range(arguments.repeats + 1):
        for (precision, policy), count in product(policies.items(), arguments.threads):
            torch.set_num_threads(count)
            rates[precision, count].append((*generated(LocalEngine(policy.language_model)), updated(policy)))
    columns = ("precision", "threads", "prefill tokens/s", "decode tokens/s", "update tokens/s")
    sets = sorted(name for name in read_processor().instruction_sets if "bf16" in name)
    title = f"{arguments.model}, {read_processor().model}, {sets}, medians of {arguments.repeats}"
    table = Table(*columns, title=title)
    for (precision, count), measured in rates.items():
        # the first round warms up
        medians = [statistics.median(column) for column in zip(*measured[1:], strict=True)]
        table.add_row(precision, str(count), *(f"{median:.0f}" for median in medians))
    Console().print(table)


def tokens(number: int, seed: int) -> tuple[int, ...]:
    return tuple(
        torch.randint(100, 10_000, (number,), generator=torch.Generator().manual_seed(seed)).tolist()
    )


def generated(
    engine: LocalEngine, *, batch: int = 32, prompt: int = 200, new: int = 24
) -> tuple[float, float]:
    """Return prefill and decode rates of different prompts; one more token separates the two."""
    seconds = []
    for length in (1, new + 1):
        engine.load(engine.weight_version + 1)
        requests = [
            Request(
                request_id=str(i), token_ids=tokens(prompt, i), max_tokens=length, seed=i, cache_key=str(i)
            )
            for i in range(batch)
        ]
        began = time.perf_counter()
        num_tokens = sum(len(one.token_ids) for one in engine.generate(requests))
        seconds.append((time.perf_counter() - began, num_tokens))
    (first, few), (whole, many) = seconds
    return batch * prompt / first, (many - few) / max(whole - first, 1e-9)


def updated(policy: Policy, *, num_rollouts: int = 6) -> float:
    """Return unique tokens per second of forward and backward over one group of the demo's shape."""
    trace = Trace(task=Task(key="threads", question=""))
    message = Message(role="user", content="")
    root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=tokens(90, 0), message=message)
    paths = []
    for index in range(num_rollouts):
        tip = root
        for turn in range(3):
            ids, zeros = tokens(20, 7 * index + turn + 1), (0.0,) * 20
            tip = trace.append(
                parent=tip.node_id,
                origin=Origin.POLICY,
                token_ids=ids,
                message=message,
                logprobs=zeros,
                entropies=zeros,
            )
            tip.credit = (1.0,) * 20
            if turn < 2:
                tip = trace.append(
                    parent=tip.node_id,
                    origin=Origin.ENVIRONMENT,
                    token_ids=tokens(80, 7 * index + turn + 4),
                    message=message,
                )
        paths.append(RolloutPath(nodes=trace.path(tip.node_id), rollout_index=index))
    began = time.perf_counter()
    num_tokens = 0
    for batch in pack(paths, max_tokens=2048):
        (-policy.score(batch).logprobs_T.mean()).backward()
        num_tokens += batch.num_tokens
    for master in policy.masters.values():
        master.grad = None
    return num_tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
