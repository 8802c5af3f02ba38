"""``outrider buffer``: fill, import, and look into step-trace buffers."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.commands.train import add_smoke, resolve_trajectories, smoke
from outrider.config import require_paths
from outrider.errors import ConfigError
from outrider.plugins.imports import search_folders

if TYPE_CHECKING:
    from outrider.training.settings import RunSettings


def add_buffer(parser: argparse.ArgumentParser) -> None:
    """The actions and their arguments."""
    buffer = parser.add_subparsers(required=True, metavar="ACTION")
    building = buffer.add_parser(
        "build", help="fill a buffer with expert or endpoint trajectories of a recipe's training tasks"
    )
    building.add_argument("recipe", type=Path)
    building.add_argument("overrides", nargs="*")
    building.add_argument("--out", type=Path, required=True)
    building.add_argument(
        "--endpoint",
        help="OpenAI-compatible base URL of an off-policy agent (default: the environment's expert)",
    )
    building.add_argument("--endpoint-model", default="default")
    building.add_argument("--num-trajectories", type=int, default=16, help="per task, from an endpoint")
    add_smoke(building)
    building.set_defaults(command=_build, interrupted="; the same command continues")
    imported = buffer.add_parser("import", help="add chat trajectories from JSONL or Parquet")
    imported.add_argument("file", type=Path)
    imported.add_argument("--out", type=Path, required=True)
    imported.add_argument("--embedder", default="minilm")
    imported.add_argument("--keep-best", type=int, default=5)
    imported.add_argument("--min-reward", type=float)
    imported.add_argument(
        "--skip-malformed", action="store_true", help="count malformed lines instead of stopping at the first"
    )
    add_smoke(imported)
    imported.set_defaults(command=_import, interrupted="; the same command continues")
    shown = (
        ("stats", _stats, "contents of a buffer"),
        ("query", _query, "the steps that a rollout with this history would get"),
    )
    for name, command, meaning in shown:
        action = buffer.add_parser(name, help=meaning)
        action.add_argument("file", type=Path)
        action.add_argument("--embedder", default="minilm")
        if name == "query":
            action.add_argument("history")
            action.add_argument("-k", type=int, default=1)
        action.set_defaults(command=command)


def _build(parsed: argparse.Namespace) -> int:
    from outrider import api

    if parsed.endpoint is None and parsed.endpoint_model != "default":
        raise ConfigError("--endpoint-model needs --endpoint URL")
    endpoint, num_trajectories, overrides = parsed.endpoint, parsed.num_trajectories, parsed.overrides

    def make_settings(values: Sequence[str]) -> "RunSettings":
        return api.run_settings(parsed.recipe, overrides=values)

    with smoke(make_settings, overrides, enabled=parsed.smoke, dry_run=False) as more, ExitStack() as served:
        settings = make_settings([*overrides, *more])
        require_paths(settings, search_folders())
        if parsed.smoke:
            from outrider.smoke import server

            endpoint = endpoint and served.enter_context(server())
            num_trajectories = min(2, num_trajectories)
        from outrider.training.buffer_commands import build_buffer

        return build_buffer(
            settings,
            out=parsed.out,
            endpoint=endpoint,
            endpoint_model=parsed.endpoint_model,
            num_trajectories=num_trajectories,
        )


def _import(parsed: argparse.Namespace) -> int:
    from outrider.training.buffer_commands import import_trajectories

    return import_trajectories(
        resolve_trajectories(parsed.file) if parsed.smoke else parsed.file,
        out=parsed.out,
        embedder="hash" if parsed.smoke else parsed.embedder,
        keep_best=parsed.keep_best,
        min_reward=parsed.min_reward,
        skip_malformed=parsed.skip_malformed,
    )


def _stats(parsed: argparse.Namespace) -> int:
    from outrider.training.buffer_commands import print_stats

    return print_stats(parsed.file, embedder=parsed.embedder)


def _query(parsed: argparse.Namespace) -> int:
    from outrider.training.buffer_commands import print_hits

    return print_hits(parsed.file, embedder=parsed.embedder, history=parsed.history, k=parsed.k)
