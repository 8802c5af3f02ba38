"""``outrider doctor``, ``list``, ``new`` and ``init``: the machine, the plug-ins, and files to begin with."""

import argparse
from pathlib import Path

from outrider.plugins.registry import KINDS


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``doctor``."""
    parser.add_argument("--model", help="load this model: which path computes it, and why")
    parser.add_argument("--cluster", action="store_true", help="what a run on several processes needs")
    parser.add_argument("--ray-address", default="local", help="with --cluster: auto, or of a Ray to join")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), help="with --cluster: where runs will be (default: runs)"
    )
    parser.set_defaults(command=_doctor)


def add_list(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``list``."""
    parser.add_argument("kind", nargs="?", choices=KINDS, help="only this kind")
    parser.set_defaults(command=_list)


def add_new(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``new``."""
    parser.add_argument("kind", choices=("environment", "gym", "agent", "tool", "functions", "algorithm"))
    parser.add_argument("name", help="of the plug-in and, with _ for -, of its package")
    parser.add_argument("--folder", type=Path, help="where (default: NAME in the current folder)")
    parser.set_defaults(command=_new)


def add_init(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``init``."""
    parser.add_argument("file", type=Path, help="the new TOML file")
    parser.add_argument(
        "--demo", action="store_true", help="the recipe of the demo: RAPO on a CPU, in minutes"
    )
    parser.set_defaults(command=_init)


def _doctor(parsed: argparse.Namespace) -> int:
    if parsed.cluster:
        from outrider.distributed import require_packages

        require_packages()
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
