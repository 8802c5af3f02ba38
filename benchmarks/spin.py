"""How long idle OpenMP threads should spin: generation speed for several values of GOMP_SPINCOUNT, one
process each.

    python benchmarks/spin.py [--batch 96] [--busy]

``--busy`` runs one busy process beside it, as a simulator, a tool or an embedder would.
"""

import argparse
import os
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

VALUES = ("0", "1000", "10000", "100000")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--measure", action="store_true", help="print the two rates of this process")
    arguments = parser.parse_args()
    if arguments.measure:
        print(*measure(arguments.batch))
        return
    table = Table(
        "GOMP_SPINCOUNT",
        "prefill tokens/s",
        "decode tokens/s",
        title=f"batch {arguments.batch}, busy beside: {arguments.busy}",
    )
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if arguments.busy else None
    try:
        for value in VALUES:
            command = [sys.executable, __file__, "--measure", "--batch", str(arguments.batch)]
            environment = {**os.environ, "GOMP_SPINCOUNT": value}
            table.add_row(
                value,
                *subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=True
                ).stdout.split(),
            )
    finally:
        if busy is not None:
            busy.kill()
    Console().print(table)


def measure(batch: int) -> tuple[int, int]:
    """Prefill and decode rate after a warm-up, with contexts of about 160 to 250 tokens."""
    import torch

    from outrider.engines.base import Request
    from outrider.engines.local.engine import LocalEngine
    from outrider.engines.local.model import load_model

    torch.set_num_threads(2)
    engine = LocalEngine(load_model("smollm2-135m-instruct", precision="bfloat16"))
    random = torch.Generator().manual_seed(0)
    contexts = [torch.randint(100, 10_000, (60,), generator=random).tolist() for _ in range(batch)]

    def turn(added: int, new: int) -> float:
        for context in contexts:
            context.extend(torch.randint(100, 10_000, (added,), generator=random).tolist())
        requests = [
            Request(request_id=f"{i:04d}", token_ids=tuple(context), max_tokens=new, seed=i, cache_key=str(i))
            for i, context in enumerate(contexts)
        ]
        start = time.perf_counter()
        generations = engine.generate(requests)
        seconds = time.perf_counter() - start
        for context, generation in zip(contexts, generations, strict=True):
            context.extend(generation.token_ids)
        return seconds

    turn(20, 8)
    prefill = batch * 80 / turn(80, 1)
    return round(prefill), round(batch * 20 / turn(1, 20))


if __name__ == "__main__":
    main()
