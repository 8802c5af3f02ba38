"""``outrider critic``: a critic from recorded trajectories, for ``engine.type = "retrospex"``."""

import argparse
from pathlib import Path
from typing import Final

from outrider.commands import describe
from outrider.commands.train import add_smoke, resolve_trajectories
from outrider.config import load_settings
from outrider.errors import ConfigError

_SMOKE: Final = ("embedder=hash", "num_updates=4", "batch_size=4")


def add_critic(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    describe(
        parser,
        "Train a critic on recorded trajectories with implicit Q-learning. The engine retrospex combines its "
        "scores with the policy's.",
        "outrider critic --from runs/base --out critic.safetensors",
    )
    parser.add_argument("overrides", nargs="*", help="key=value (docs/algorithms/retrospex.md)")
    parser.add_argument(
        "--from",
        dest="sources",
        type=Path,
        action="append",
        required=True,
        metavar="SOURCE",
        help="a run directory, or a file of trajectories (docs/formats.md); can be repeated",
    )
    parser.add_argument(
        "--held-out",
        action="store_true",
        help="also read the evaluations of runs on splits other than train; do not evaluate the critic there",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="new file for the critic")
    add_smoke(parser)
    parser.set_defaults(command=_critic)


def _critic(parsed: argparse.Namespace) -> int:
    from outrider.algorithms.retrospex import CriticSettings

    overrides = [*parsed.overrides, *(_SMOKE if parsed.smoke else ())]
    settings = load_settings(CriticSettings, file=None, overrides=overrides)
    if parsed.out.exists():
        raise ConfigError(f"{parsed.out} exists: name a new file with --out")
    if not parsed.out.parent.is_dir():  # hours before it would be found
        raise ConfigError(f"{parsed.out.parent} is no folder: name a file in one with --out")
    from outrider.evaluation.critic_training import train_critic

    sources = [resolve_trajectories(source) for source in parsed.sources] if parsed.smoke else parsed.sources
    return train_critic(sources, out=parsed.out, settings=settings, held_out=parsed.held_out)
