"""``outrider doctor``, ``list``, ``new`` and ``init``: the machine, the plug-ins, and files to begin with."""

import argparse
from pathlib import Path

from outrider.commands.arguments import Commands
from outrider.plugins.registry import KINDS


def add(commands: Commands) -> None:
    """The commands ``doctor``, ``list``, ``new`` and ``init``."""
    doctor = commands.add_parser("doctor", help="what works on this machine")
    doctor.add_argument("--model", help="load this model: which path computes it, and why")
    doctor.add_argument("--cluster", action="store_true", help="what a run on several processes needs")
    doctor.add_argument("--ray-address", default="local", help="with --cluster: auto, or of a Ray to join")
    doctor.add_argument(
        "--folder", type=Path, default=Path("runs"), help="with --cluster: where runs will be (default: runs)"
    )
    doctor.set_defaults(command=_doctor)
    listed = commands.add_parser("list", help="every plug-in, where it comes from, and what it is")
    listed.add_argument("kind", nargs="?", choices=KINDS, help="only this kind")
    listed.set_defaults(command=_list)
    new = commands.add_parser("new", help="a small package with a plug-in of your own, its test and a recipe")
    new.add_argument("kind", choices=("environment", "gym", "agent", "tool", "functions", "algorithm"))
    new.add_argument("name", help="of the plug-in and, with _ for -, of its package")
    new.add_argument("--folder", type=Path, help="where (default: NAME in the current folder)")
    new.set_defaults(command=_new)
    init = commands.add_parser("init", help="write a commented recipe to start from")
    init.add_argument("file", type=Path)
    init.set_defaults(command=_init)


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

    return write_recipe(parsed.file)
