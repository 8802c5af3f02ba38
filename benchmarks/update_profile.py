"""Where the time of an update goes, compared with plain transformers, and its share of the machine's matrix
rate.

    python benchmarks/update_profile.py [--model NAME] [--repeats 3] [--precision auto]

Forward and backward of four rows of 512 tokens without a common prefix (the update workload of speed.py
without sharing). Then the backward pass of attention alone: the fused kernel against plain products in
blocks.
"""

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from rich.console import Console
from rich.table import Table
from speed_update import UPDATES, packed, padded
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from outrider.engines.local.attention import _CpuAttention, _fused
from outrider.engines.local.model import load_model, product_rate, resolve_model, resolve_precision
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings

SHAPE = UPDATES["4 rows of 512, nothing common"]
KINDS = ("linear layers", "attention", "the rest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    precision = resolve_precision(arguments.precision, "cpu")
    plain = AutoModelForCausalLM.from_pretrained(resolve_model(arguments.model), dtype=torch.float32)
    policy = Policy(load_model(arguments.model, precision=precision), OptimizerSettings(learning_rate=1e-9))
    sides = {
        "plain, padded": padded(plain, SHAPE, lower=precision == "bfloat16"),
        "outrider": packed(policy, SHAPE),
    }
    kept: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(arguments.repeats + 1):
        for name, run in sides.items():
            kept[name].append(seconds_by_kind(run))
    table = Table(
        "", *KINDS, "whole", title=f"seconds of an update, {precision}, medians of {arguments.repeats}"
    )
    for name, rounds in kept.items():
        medians = {kind: statistics.median(one[kind] for one in rounds[1:]) for kind in (*KINDS, "whole")}
        table.add_row(
            name,
            *(f"{medians[kind]:.2f} ({medians[kind] / medians['whole']:.0%})" for kind in (*KINDS, "whole")),
        )
    Console().print(table)
    flops = 6 * SHAPE.rollouts * (SHAPE.own + SHAPE.new) * block_parameters(plain)
    flops += 6 * SHAPE.rollouts * SHAPE.new * plain.lm_head.weight.numel()
    rate = product_rate(2048, getattr(torch, precision))
    print(
        f"linear layers: {flops / 1e12:.2f} TFLOP, {flops / rate / 1e12:.2f} s at "
        f"the machine's {rate:.3f} TFLOP/s"
    )
    attention(precision)


def block_parameters(model: torch.nn.Module) -> int:
    """Weights of the linear layers between embedding and head."""
    return sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "head" not in name
    )


def seconds_by_kind(run: Callable[[], int]) -> dict[str, float]:
    """Return the self time of operators; those inside an attention function count for it."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        began = time.perf_counter()
        run()
        ended = time.perf_counter()
    seconds = Counter(whole=ended - began)
    for event in profiler.events():
        names = [event.name]
        parent = event.cpu_parent
        while parent is not None:
            names.append(parent.name)
            parent = parent.cpu_parent
        if any("attention" in name.lower() for name in names):
            kind = "attention"
        else:
            kind = (
                "linear layers"
                if event.name in ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise")
                else "the rest"
            )
        seconds[kind] += event.self_cpu_time_total / 1e6
    return dict(seconds)


def attention(precision: str) -> None:
    """Milliseconds of the backward pass of nine query and three key-value heads of 64."""
    table = Table(
        "queries x keys",
        "fused",
        "products in blocks",
        title=f"attention's backward pass, ms, {precision}, medians of 7",
    )
    for queries, keys in ((128, 640), (512, 512), (1024, 1024), (2048, 2048)):
        inputs = [
            torch.randn(1, heads, length, 64).to(getattr(torch, precision)).requires_grad_()
            for heads, length in ((9, queries), (3, keys), (3, keys))
        ]
        cells = []
        for function in (_fused, _CpuAttention.apply):
            output = function(*inputs, 0.125)
            gradient = torch.randn_like(output)
            seconds = []
            for _ in range(8):
                began = time.perf_counter()
                torch.autograd.grad(output, inputs, gradient, retain_graph=True)
                seconds.append(time.perf_counter() - began)
            cells.append(f"{1000 * statistics.median(seconds[1:]):.1f}")
        table.add_row(f"{queries} x {keys}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
