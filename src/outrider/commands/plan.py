"""``outrider plan``: what a recipe needs, before anything is loaded."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.commands import describe, positive
from outrider.commands.train import recipe_changes
from outrider.errors import ConfigError
from outrider.printing import print_lines

if TYPE_CHECKING:
    from outrider.planning.memory import Layout
    from outrider.planning.plan import Plan, PlanOptions


_DEVICES = ("cpu", "A100", "H100", "H200")


def add_plan(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    describe(
        parser,
        "Estimate memory, tokens and seconds of a recipe before anything is loaded, and whether it fits. The "
        "exit status is 1 if it does not fit.",
        "outrider plan recipes/demo.toml",
        "outrider plan recipes/tool-reasoning.toml --device H100 --gpus 8",
    )
    parser.add_argument("recipe", type=Path, help="TOML file")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--model", help="short for model.name=...")
    parser.add_argument(
        "--device",
        choices=_DEVICES,
        help="its memory and peak rate (default: cpu if the recipe trains on it and no option of GPUs is "
        "there, else H100)",
    )
    parser.add_argument(
        "--gpu-memory",
        type=_above_zero,
        metavar="GB",
        help="memory per GPU in 10^9 bytes, for example 24; with --device cpu, of the CPU",
    )
    parser.add_argument("--peak", type=_above_zero, metavar="TFLOP/s", help="peak rate per GPU in bfloat16")
    parser.add_argument(
        "--gpus", type=positive, metavar="N", help="GPUs of all nodes (default: the recipe's [cluster])"
    )
    parser.add_argument(
        "--gpus-per-node", type=positive, default=8, metavar="N", help="GPUs of one node (default: 8)"
    )
    parser.add_argument(
        "--placement",
        choices=("colocate", "disaggregate"),
        help="engines on the GPUs of the trainer, or on GPUs of their own (default: the one that fits)",
    )
    parser.add_argument("--tensor-parallel", type=positive, metavar="N", help="GPUs per engine")
    parser.add_argument("--engines", type=positive, metavar="N", help="number of engines, with disaggregate")
    parser.add_argument(
        "--prompt-tokens",
        type=positive,
        default=1024,
        metavar="N",
        help="length of the longest prompt (default: 1024)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    parser.set_defaults(command=_plan)


def _above_zero(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def _plan(parsed: argparse.Namespace) -> int:
    """Return 0 if the plan fits and the recipe can use its layout, else 1."""
    from outrider import api
    from outrider.planning.plan import as_json, lines, make_plan

    recipe_overrides = recipe_changes(parsed)
    settings = api.run_settings(parsed.recipe, overrides=recipe_overrides)
    plan = make_plan(settings, plan_options(parsed, recipe_device=settings.model.device))
    refusals = _layout_errors(parsed.recipe, recipe_overrides, plan)
    refusal = refusals.get(plan.fit.layout)
    if parsed.json:
        print_lines(json.dumps(as_json(plan, refusals)))
    else:
        print_lines(*(part for line in lines(plan, refusals) for part in line.split("\n")))
    return 0 if plan.fit.fits and refusal is None else 1


def plan_options(parsed: argparse.Namespace, *, recipe_device: str) -> "PlanOptions":
    """The command line's numbers in bytes and operations per second.

    Without a device on the command line a recipe for the CPU is planned for this machine, unless options of
    GPUs are there.
    """
    from outrider.planning.plan import PlanOptions
    from outrider.planning.shape import DEVICES, GB, this_cpu

    gpu_options = (parsed.gpus, parsed.placement, parsed.tensor_parallel, parsed.gpu_memory)
    name = parsed.device or ("H100" if any(gpu_options) or recipe_device != "cpu" else "cpu")
    device = this_cpu() if name == "cpu" else DEVICES[name]
    if parsed.gpu_memory:
        # without --device, the peak rate of a card with this memory is unknown
        device = replace(device, memory=parsed.gpu_memory * GB, peak=device.peak if parsed.device else 0.0)
    if parsed.peak:
        device = replace(device, name="the given", peak=parsed.peak * 1e12)
    return PlanOptions(
        device=device,
        gpus_per_node=parsed.gpus_per_node,
        gpus=parsed.gpus,
        placement=parsed.placement,
        tensor_parallel=parsed.tensor_parallel,
        engines=parsed.engines,
        prompt_tokens=parsed.prompt_tokens,
    )


def _layout_errors(recipe: Path, recipe_overrides: list[str], plan: "Plan") -> "dict[Layout, str]":
    """Return the layouts of several processes that the recipe cannot use, with the reasons."""
    from outrider import api
    from outrider.planning.plan import packed_only

    errors = {}
    shape, is_cpu = plan.shape, plan.options.device.is_cpu
    for layout in (plan.fit.layout, *(one.layout for one in plan.fewest)):
        if layout.placement == "process":
            continue
        if layout.trainers > 1 and shape.is_unpacked:
            errors[layout] = packed_only(f"cluster.num_trainers = {layout.trainers}", shape)
            continue
        if is_cpu:  # it is the recipe's own layout
            continue
        overrides = ["model.device=cuda", *layout.overrides]
        if layout.placement == "disaggregate" and not plan.work.has_vllm:
            overrides.append("cluster.weights=files")  # the local engine cannot receive from GPU to GPU
        try:
            api.run_settings(recipe, overrides=[*recipe_overrides, *overrides])
        except ConfigError as error:
            errors[layout] = str(error)
    return errors
