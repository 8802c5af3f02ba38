"""``outrider doctor``, ``list``, ``new`` and ``init``: the machine, the plug-ins, and files to begin with."""

import argparse
from pathlib import Path

from outrider.commands import describe
from outrider.plugins.registry import KINDS


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``doctor``."""
    describe(
        parser,
        "Check the processor, packages, models and tools of this machine, and print what to install.",
        "outrider doctor",
        "outrider doctor --model smollm2-135m-instruct",
        "outrider doctor --cluster --folder runs",
    )
    parser.add_argument("--model", help="load this model: print how it is computed, and why")
    parser.add_argument(
        "--cluster", action="store_true", help="check ranks, engines and, with an address, Ray"
    )
    parser.add_argument(
        "--ray-address",
        default="local",
        metavar="ADDRESS",
        help="with --cluster: this machine (local), auto, or the address of a running Ray (default: local)",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), help="with --cluster: where runs will be (default: runs)"
    )
    parser.set_defaults(command=_doctor)


def add_list(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``list``."""
    describe(
        parser,
        "List algorithms, their presets, environments, tools, engines, embedders, trackers and call formats: "
        "built-in ones and those of installed packages.",
        "outrider list",
        "outrider list algorithms",
    )
    parser.add_argument(
        "kind", nargs="?", choices=KINDS, metavar="KIND", help=f"only this kind: {', '.join(KINDS)}"
    )
    parser.set_defaults(command=_list)


def add_new(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``new``."""
    describe(
        parser,
        "Write a small package with a plug-in of your own, a test of its contract and a recipe.",
        "outrider new environment my-world",
    )
    parser.add_argument(
        "kind",
        choices=("environment", "gym", "agent", "tool", "functions", "algorithm"),
        metavar="KIND",
        help="environment, gym, agent, tool, functions or algorithm",
    )
    parser.add_argument("name", help="name of the plug-in and, with _ for -, of its package")
    parser.add_argument("--folder", type=Path, help="new folder (default: NAME in the current folder)")
    parser.set_defaults(command=_new)


def add_init(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``init``."""
    describe(
        parser,
        "Write a commented recipe to start from: GRPO with questions about the CIA World Factbook. With "
        "--demo, write the recipe of the demo.",
        "outrider init first.toml",
        "outrider init demo.toml --demo",
    )
    parser.add_argument("file", type=Path, help="new TOML file")
    parser.add_argument(
        "--demo", action="store_true", help="the recipe of the demo: RAPO on a CPU, in minutes"
    )
    parser.set_defaults(command=_init)


def _doctor(parsed: argparse.Namespace) -> int:
    if parsed.cluster:
        from outrider.distributed import require_torch

        require_torch()
        from outrider.commands.cluster_doctor import examine_cluster

        return examine_cluster(ray_address=parsed.ray_address, folder=parsed.folder)
    from outrider.doctor import examine, examine_model

    return examine() if parsed.model is None else examine_model(parsed.model)


def _list(parsed: argparse.Namespace) -> int:
    from outrider.plugins.listing import print_plugins

    return print_plugins([parsed.kind] if parsed.kind else KINDS)


def _new(parsed: argparse.Namespace) -> int:
    from outrider.scaffold import write_package

    return write_package(parsed.kind, parsed.name, parsed.folder)


def _init(parsed: argparse.Namespace) -> int:
    from outrider.doctor import write_recipe

    return write_recipe(parsed.file, demo=parsed.demo)
