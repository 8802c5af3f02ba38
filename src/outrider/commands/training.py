"""``outrider train``."""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Event

from outrider.commands.dry_run import print_settings
from outrider.commands.parts import Commands, overrides
from outrider.commands.smoking import add_smoke, smoke
from outrider.errors import ConfigError
from outrider.stopping import stop_on_first_signal


def add(commands: Commands) -> None:
    """The command ``train``."""
    parser = commands.add_parser("train", help="train from a recipe, or continue a run")
    parser.add_argument("recipe", nargs="?", type=Path, help="TOML file")
    parser.add_argument("overrides", nargs="*", help="section.key=value; with --resume those that may grow")
    parser.add_argument("--run", type=Path, help="new run directory")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="continue this run directory")
    parser.add_argument("--model", help="short for model.name=...")
    parser.add_argument("--ray-address", metavar="ADDRESS", help="short for cluster.ray_address=...")
    parser.add_argument(
        "--changed-plugins",
        action="store_true",
        help="with --resume: although the code of a plug-in is another one",
    )
    parser.add_argument("--progress", choices=("auto", "rich", "plain", "none"), default="auto")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    add_smoke(parser)
    parser.set_defaults(command=_train, interrupted="; continue with: outrider train --resume {run}")


def _train(parsed: argparse.Namespace) -> int:
    from outrider import api

    # no recipe, but the first override in its place
    if parsed.resume is not None and "=" in str(parsed.recipe or ""):
        parsed.recipe, parsed.overrides = None, [str(parsed.recipe), *parsed.overrides]
    new_run_options = (parsed.run, parsed.model, parsed.ray_address)
    if parsed.resume is not None and parsed.recipe is None and any(new_run_options):
        raise ConfigError("a resumed run keeps its model, its directory and the address of its Ray")
    if parsed.changed_plugins and parsed.resume is None:
        raise ConfigError("--changed-plugins goes with --resume RUN")
    if parsed.dry_run and parsed.resume is not None and parsed.recipe is None:
        from outrider.train.state.growing import extend_settings

        resumed_settings = extend_settings(parsed.resume / "config.toml", parsed.overrides)
        return print_settings(resumed_settings, None, parsed.overrides, others="run")
    if parsed.smoke and parsed.resume is not None:
        raise ConfigError("--smoke goes with a recipe; a smoke run goes on without it")
    recipe_overrides = overrides(parsed)
    if parsed.ray_address is not None:
        recipe_overrides.append(f"cluster.ray_address={parsed.ray_address}")
    is_dry_run = parsed.dry_run and parsed.recipe is not None and parsed.resume is None
    with smoke(
        lambda values: api.run_settings(parsed.recipe, overrides=values),
        recipe_overrides,
        enabled=parsed.smoke and parsed.recipe is not None,
        dry_run=is_dry_run,
    ) as more:
        if is_dry_run:
            settings = api.run_settings(parsed.recipe, overrides=[*recipe_overrides, *more])
            return print_settings(settings, parsed.recipe, recipe_overrides, smoke=more)
        return stoppable(
            lambda stop: api.train(
                parsed.recipe,
                run=parsed.run,
                resume=parsed.resume,
                overrides=[*recipe_overrides, *more],
                progress=parsed.progress,
                changed_plugins=parsed.changed_plugins,
                on_start=stop,
            )
        )


def stoppable(run: Callable[[Callable[[Callable[[], bool]], None]], object]) -> int:
    """The first SIGTERM or Ctrl-C asks the trainer to write a checkpoint of what is finished and leave. Exit
    status as of ``main``."""
    with ExitStack() as stack:
        interruptions: list[Event] = []
        run(
            lambda request_stop: interruptions.append(stack.enter_context(stop_on_first_signal(request_stop)))
        )
    return 130 if any(event.is_set() for event in interruptions) else 0
