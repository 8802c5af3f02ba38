"""``outrider buffer``: fill, import, and look into step-trace buffers."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.commands import describe, positive
from outrider.commands.train import add_smoke, resolve_trajectories, smoke
from outrider.config import require_paths
from outrider.errors import ConfigError
from outrider.plugins.imports import search_folders

if TYPE_CHECKING:
    from outrider.training.settings import RunSettings


def add_buffer(parser: argparse.ArgumentParser) -> None:
    """The actions and their arguments."""
    describe(
        parser,
        "Work with step-trace buffers, from which RAPO retrieves steps of other agents.",
        "outrider buffer build recipes/demo.toml --out steps.sqlite",
    )
    buffer = parser.add_subparsers(required=True, metavar="ACTION")
    building = buffer.add_parser("build", help="fill a buffer with trajectories of experts or of an endpoint")
    describe(
        building,
        "Fill a buffer with trajectories of a recipe's training tasks, played by the environment's expert or "
        "by an agent behind an endpoint. Run the command again to continue.",
        "outrider buffer build recipes/demo.toml --out steps.sqlite",
    )
    building.add_argument("recipe", type=Path, help="TOML file")
    building.add_argument("overrides", nargs="*", help="section.key=value")
    building.add_argument("--out", type=Path, required=True, metavar="FILE", help="the buffer")
    building.add_argument(
        "--endpoint",
        metavar="URL",
        help="OpenAI-compatible base URL of an off-policy agent (default: the environment's expert)",
    )
    building.add_argument(
        "--endpoint-model", default="default", metavar="NAME", help="name of the model on the server"
    )
    building.add_argument(
        "--num-trajectories",
        type=int,
        default=16,
        metavar="N",
        help="per task, from an endpoint (default: 16)",
    )
    add_smoke(building)
    building.set_defaults(command=_build, interrupted="; the same command continues")
    imported = buffer.add_parser("import", help="add chat trajectories from JSONL or Parquet")
    describe(
        imported,
        "Add chat trajectories of any agent to a buffer, which is created if it does not exist.",
        "outrider buffer import chats.jsonl --out steps.sqlite",
    )
    imported.add_argument("file", type=Path, help="JSONL or Parquet (docs/formats.md)")
    imported.add_argument("--out", type=Path, required=True, metavar="FILE", help="the buffer")
    _add_embedder(imported)
    imported.add_argument(
        "--keep-best", type=int, default=5, metavar="N", help="trajectories to store per task (default: 5)"
    )
    imported.add_argument("--min-reward", type=float, metavar="R", help="skip trajectories below this reward")
    imported.add_argument(
        "--skip-malformed", action="store_true", help="count malformed lines instead of stopping at the first"
    )
    add_smoke(imported)
    imported.set_defaults(command=_import, interrupted="; the same command continues")
    stats = buffer.add_parser("stats", help="print the contents of a buffer in numbers")
    describe(stats, "Print the contents of a buffer in numbers.", "outrider buffer stats steps.sqlite")
    query = buffer.add_parser("query", help="print the steps that would be retrieved for a history")
    describe(
        query,
        "Print the steps that a rollout with this history would retrieve, the most similar first.",
        "outrider buffer query steps.sqlite 'What is the capital of Peru?'",
    )
    for action, command in ((stats, _stats), (query, _query)):
        action.add_argument("file", type=Path, help="the buffer")
        action.set_defaults(command=command)
    stats.add_argument("--embedder", help=argparse.SUPPRESS)  # earlier versions needed it
    _add_embedder(query)
    query.add_argument("history", help="text of the conversation so far")
    query.add_argument("-k", type=positive, default=5, metavar="K", help="number of steps (default: 5)")


def _add_embedder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--embedder",
        default="minilm",
        metavar="NAME",
        help="minilm, hash, or a sentence-transformers model (default: minilm)",
    )


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

    return print_stats(parsed.file)


def _query(parsed: argparse.Namespace) -> int:
    from outrider.training.buffer_commands import print_hits

    return print_hits(parsed.file, embedder=parsed.embedder, history=parsed.history, k=parsed.k)
