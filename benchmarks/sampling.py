"""Drawing tokens by a race of exponentials (what Outrider does) and by the inverse of the cumulated
distribution (what it did).

    python benchmarks/sampling.py [--rows 8 32 64] [--repeats 15] [--noise 1e-6 1e-5]
                                  [--model smollm2-135m-instruct]

Milliseconds of processor time of a call, on one thread; draws that change when every logit moves by a
relative noise (1e-5 is what another batch moves log-probs by); with ``--model`` the new tokens per second (of
the same clock) of whole generations, the rules taking turns. Shape letters: B rows, V vocabulary.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from unittest.mock import patch

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from outrider.engines.base import Request
from outrider.engines.local import engine as local
from outrider.engines.local.model import load_model
from outrider.engines.local.sampling import request_stream, sample
from outrider.training.policy import set_threads

VOCABULARY = 49_152
Sampled = tuple[list[int], list[float], list[float]]
Rule = Callable[[torch.Tensor, Sequence[float], Sequence[np.random.Generator]], Sampled]


def inverse_cdf(
    logits_BV: torch.Tensor, temperatures: Sequence[float], streams: Sequence[np.random.Generator]
) -> Sampled:
    """The engine's rule before, with the same blocks of 16 rows; every row at temperature 1."""
    columns: list[Sequence[torch.Tensor]] = []
    for start in range(0, len(logits_BV), 16):
        part_BV = logits_BV[start : start + 16].float()
        logprobs_BV, probs_BV = torch.log_softmax(part_BV, dim=-1), torch.softmax(part_BV, dim=-1)
        entropies = -(probs_BV * logprobs_BV).sum(dim=-1)
        cumulated_BV = probs_BV.cumsum(dim=-1)
        uniforms_B1 = torch.tensor([one.random(dtype=np.float32) for one in streams[start : start + 16]])[
            :, None
        ]
        found_B1 = torch.searchsorted(cumulated_BV, uniforms_B1 * cumulated_BV[:, -1:], right=True)
        chosen_B1 = found_B1.clamp_(max=part_BV.shape[-1] - 1)
        columns.append((chosen_B1[:, 0], logprobs_BV.gather(1, chosen_B1)[:, 0], entropies))
    chosen, picked, entropy = (torch.cat(column).tolist() for column in zip(*columns, strict=True))
    return chosen, picked, entropy


RULES: dict[str, Rule] = {"inverse of the cumulated": inverse_cdf, "race of exponentials": sample}


def example_logits(num_rows: int, *, size: int = VOCABULARY) -> torch.Tensor:
    """[B, V]: normal logits with a deviation of 3."""
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(0)) * 3.0


def num_changed(rule: Rule, logits_BV: torch.Tensor, *, noise: float, num_rounds: int) -> int:
    """Return the number of draws (one per row and round) that change if every logit is multiplied by 1 +
    ``noise`` times a normal number.
    """
    moved_BV = logits_BV * (
        1 + noise * torch.randn(logits_BV.shape, generator=torch.Generator().manual_seed(1))
    )
    temperatures = [1.0] * len(logits_BV)
    streams = {side: [request_stream(i) for i in range(len(logits_BV))] for side in ("as it is", "moved")}
    count = 0
    for _ in range(num_rounds):
        before = rule(logits_BV, temperatures, streams["as it is"])[0]
        after = rule(moved_BV, temperatures, streams["moved"])[0]
        count += sum(a != b for a, b in zip(before, after, strict=True))
    return count


def milliseconds(num_rows: int, repeats: int) -> dict[str, float]:
    logits_BV, streams = example_logits(num_rows), [request_stream(i) for i in range(num_rows)]
    taken: dict[str, list[float]] = {name: [] for name in RULES}
    for _ in range(repeats + 1):  # the first round warms up
        for name, rule in RULES.items():
            began = time.process_time()
            rule(logits_BV, [1.0] * num_rows, streams)
            taken[name].append(1e3 * (time.process_time() - began))
    return {name: statistics.median(values[1:]) for name, values in taken.items()}


def tokens_per_second(
    engine: local.LocalEngine, num_rows: int, repeats: int, *, new: int = 48
) -> dict[str, float]:
    prompts = torch.randint(100, 10_000, (num_rows, 32), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [
        Request(request_id=str(i), token_ids=tuple(prompt), max_tokens=new, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    rates: dict[str, list[float]] = {name: [] for name in RULES}
    for _ in range(repeats + 1):
        for name, rule in RULES.items():
            with patch.object(local, "sample", rule):
                began = time.process_time()
                num_tokens = sum(len(one.token_ids) for one in engine.generate(requests))
                rates[name].append(num_tokens / (time.process_time() - began))
    return {name: statistics.median(values[1:]) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--noise", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--draws", type=int, default=2_048)
    parser.add_argument(
        "--model", help="also time complete generations with it (48 new tokens after 32, float32)"
    )
    arguments = parser.parse_args()
    set_threads(1, device="cpu")  # processor time of several threads would count their waiting
    title = f"{VOCABULARY:,} ids, one thread, processor time; {torch.backends.cpu.get_cpu_capability()}"
    table = Table("", *RULES, "ratio", title=title)
    for num_rows in arguments.rows:
        taken = milliseconds(num_rows, arguments.repeats)
        _add(table, f"ms, {num_rows} rows", taken)
    logits_BV, num_rounds = example_logits(64), arguments.draws // 64
    for noise in arguments.noise:
        counts = [num_changed(rule, logits_BV, noise=noise, num_rounds=num_rounds) for rule in RULES.values()]
        table.add_row(f"changed of {64 * num_rounds:,}, noise {noise:g}", *map(str, counts))
    if arguments.model:
        engine = local.LocalEngine(load_model(arguments.model, precision="float32"))
        for num_rows in arguments.rows:
            _add(
                table,
                f"new tokens/s, {num_rows} rows",
                tokens_per_second(engine, num_rows, max(2, arguments.repeats // 5)),
            )
    Console().print(table)


def _add(table: Table, name: str, values: dict[str, float]) -> None:
    before, after = values.values()
    table.add_row(name, f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f} x")


if __name__ == "__main__":
    main()
