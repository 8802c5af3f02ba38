"""Generation and update speed compared with the usual alternatives: same model, prompts and machine, in one
run.

    python benchmarks/speed.py [--model NAME] [--repeats 5] [--precision auto] [--device cpu]
        [--vllm .venv-vllm/bin/python [--compiled]]

The sides alternate, so that a slow minute of the machine affects all of them. Prints the limit of the
machine, medians of new tokens per second with their ratio to plain ``generate``, of trained tokens per second
with their ratio to the padded computation, and the log-prob mismatches.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from rich.console import Console
from rich.table import Table
from speed_clock import against, alternate
from speed_gap import compared, drawing, trainer_gap, written_alone, written_elsewhere, written_together
from speed_sides import WORKLOADS, Outrider, Plain, Vllm, play
from speed_update import UPDATES, packed, padded
from transformers import AutoModelForCausalLM

from outrider.engines.local.model import (
    LanguageModel,
    copy_rate,
    load_model,
    product_rate,
    resolve_model,
    resolve_precision,
)
from outrider.planning.memory import token_bytes, weight_bytes
from outrider.planning.shape import shape_from_config
from outrider.training.policy import Policy, set_threads
from outrider.training.settings import OptimizerSettings

SIDES = ("generate, dynamic", "generate, static", "outrider", "vllm, eager", "vllm, compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm", help="the Python of an environment with vLLM (make test-vllm builds one)")
    parser.add_argument(
        "--compiled", action="store_true", help="vLLM with its compiler too, whose start takes minutes"
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=SIDES,
        help="of generation (default: all); the first of them is the base of the ratios",
    )
    parser.add_argument(
        "--workloads", type=int, nargs="+", help="numbers of the generation workloads, from 1"
    )
    parser.add_argument("--updates", type=int, nargs="+", help="numbers of the update workloads, from 1")
    parser.add_argument(
        "--layers", type=int, help="updates with the first layers only: cheaper, the head weighs more"
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="of updates; processor time where others compute too",
    )
    parser.add_argument("--gap-tokens", type=int, default=48, help="sampled tokens of a request in the gap")
    parser.add_argument(
        "--inverse-cdf",
        action="store_true",
        help="the gap of the sampling rule before (benchmarks/sampling.py)",
    )
    parser.add_argument(
        "--only",
        choices=("limit", "generation", "update", "gap"),
        nargs="+",
        default=["limit", "generation", "update", "gap"],
    )
    arguments = parser.parse_args()
    if any(side.startswith("vllm") for side in arguments.sides or ()) and not arguments.vllm:
        parser.error("--sides with vLLM needs --vllm")
    set_threads(arguments.threads, device=arguments.device)
    precision = resolve_precision(arguments.precision, arguments.device)
    title = (
        f"{arguments.model}, {precision}, {arguments.device}, {arguments.threads} threads, "
        f"medians of {arguments.repeats}"
    )
    ours = load_model(arguments.model, precision=precision, device=arguments.device)
    folder = resolve_model(arguments.model)
    if "limit" in arguments.only and arguments.device == "cpu":
        limits(folder, precision, arguments)
    if "generation" in arguments.only:
        generation(title, ours, folder, precision, arguments)
    if "update" in arguments.only:
        updates(title, ours, folder, precision, arguments)
    if "gap" in arguments.only:
        with drawing(inverse_cdf=arguments.inverse_cdf):
            gaps(ours, precision, arguments)
    print(
        f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB "
        "(of the process that holds all sides)"
    )


def gaps(ours: LanguageModel, precision: str, arguments: argparse.Namespace) -> None:
    """Measure how log-probs and sequences depend on the trainer, the batch and the processor."""
    new = arguments.gap_tokens
    values = trainer_gap(ours, new)
    print(
        f"log-prob gap engine - trainer, {precision}: mean {values.mean():.1e}, max {values.max():.1e} nats",
        flush=True,
    )
    here = written_together(ours, new)
    others = {"alone": partial(written_alone, ours, new)}
    if arguments.device == "cpu" and precision == "float32":  # a lesser processor has no fast bfloat16
        others["on a lesser processor"] = partial(
            written_elsewhere,
            arguments.model,
            precision,
            arguments.threads,
            new,
            inverse_cdf=arguments.inverse_cdf,
        )
    for other, write in others.items():
        there = write()
        for kind, sequences in here.items():
            print(
                (
                    f"in a batch - {other}, {kind}, {new} tokens, {precision}: "
                    f"{compared(there[kind], sequences)}"
                ),
                flush=True,
            )


def limits(folder: str, precision: str, arguments: argparse.Namespace) -> None:
    """Print the rate of each workload if it consisted of the matrix products of the layers only, at the rates
    that are measured here: every token once, in each decoding step the bytes of all weights, keys and values,
    and in an update three products for each one of the forward pass, with logits of trained tokens only.
    """
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    shape, dtype = shape_from_config(config, name=arguments.model), getattr(torch, precision)
    layers = 2 * shape.num_layers * shape.layer_parameters
    bandwidth, many = 1e9 * copy_rate(), 1e12 * product_rate(2048, dtype)
    size = {"tensor_parallel": 1, "value_bytes": dtype.itemsize}
    for name, workload in WORKLOADS.items():
        rows = workload.num_prompts * workload.samples
        # the last token of a turn is computed with the next turn
        prefilled = workload.num_prompts * workload.prompt + rows * (workload.turns - 1) * (
            workload.observed + 1
        )
        context = workload.prompt + workload.turns * (workload.new + workload.observed) // 2
        operations = rows * (layers + 2 * shape.embedding_parameters)
        read = weight_bytes(shape, **size) + rows * context * token_bytes(shape, **size)
        step = max(operations / (1e12 * product_rate(rows, dtype)), read / bandwidth)
        seconds = prefilled * layers / many + workload.turns * workload.new * step
        rate = rows * workload.turns * workload.new / seconds
        print(
            f"{name}: at most {rate:.0f} new tokens/s ({precision}, products of the layers alone)", flush=True
        )
    for name, update in UPDATES.items():
        trained = update.rollouts * update.new
        tokens = update.shared + update.rollouts * update.own + trained
        operations = 3 * (tokens * layers + trained * 2 * shape.embedding_parameters)
        rate = update.rollouts * (update.shared + update.own + update.new) * many / operations
        print(f"{name}: at most {rate:.0f} padded tokens/s", flush=True)


def plain_model(folder: str, dtype: torch.dtype, device: str) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)


def generation(
    title: str, ours: LanguageModel, folder: str, precision: str, arguments: argparse.Namespace
) -> None:
    plain = plain_model(folder, getattr(torch, precision), arguments.device)
    vllm = partial(Vllm, arguments.vllm, folder, precision, threads=arguments.threads)
    makers: list[Callable[[], Any]] = [
        partial(Plain, plain, static=False),
        partial(Plain, plain, static=True),
        partial(Outrider, replace(ours, eos_token_ids=frozenset(), eos_texts=())),
        *([partial(vllm, eager=True)] if arguments.vllm else ()),
        *([partial(vllm, eager=False)] if arguments.vllm and arguments.compiled else ()),
    ]
    sides = {
        name: make() for name, make in zip(SIDES, makers, strict=False) if name in (arguments.sides or SIDES)
    }
    table = Table("new tokens/s", *sides, title=title)
    chosen = arguments.workloads or range(1, len(WORKLOADS) + 1)
    for name, workload in (list(WORKLOADS.items())[number - 1] for number in chosen):
        runs = {side: lambda one=one, w=workload: play(one, w) for side, one in sides.items()}
        rates = alternate(runs, arguments.repeats, device=arguments.device)
        table.add_row(name, *against(rates, next(iter(sides))))
        print(name, rates, flush=True)  # print each row at once, because the table takes a while
    Console().print(table)
    for one in sides.values():
        one.close()


def updates(
    title: str, ours: LanguageModel, folder: str, precision: str, arguments: argparse.Namespace
) -> None:
    """Compare updates. The plain side has float32 weights, and autocast for a lower working precision."""
    plain = plain_model(folder, torch.float32, arguments.device)
    for model in (plain, ours.model):
        model.model.layers = model.model.layers[: arguments.layers]
    policy = Policy(ours, OptimizerSettings(learning_rate=1e-9))
    table = Table("trained row", "plain, padded", "outrider", title=f"{title}: padded tokens/s")
    chosen = arguments.updates or range(1, len(UPDATES) + 1)
    for name, shape in (list(UPDATES.items())[number - 1] for number in chosen):
        sides = {
            "plain, padded": padded(plain, shape, lower=precision == "bfloat16"),
            "outrider": packed(policy, shape),
        }
        clock = time.process_time if arguments.clock == "processor" else time.perf_counter
        rates = alternate(sides, arguments.repeats, device=arguments.device, clock=clock)
        table.add_row(name, *against(rates, "plain, padded"))
        print(name, rates, flush=True)
    Console().print(table)


if __name__ == "__main__":
    main()
