"""``outrider train``."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from outrider.commands import add_progress, describe
from outrider.config import Settings
from outrider.errors import ConfigError
from outrider.plugins.listing import validate_references
from outrider.printing import print_lines, shell_command
from outrider.resolved import format_toml as as_toml
from outrider.resolved import key_sources, leaves
from outrider.signals import stop_on_first_signal

if TYPE_CHECKING:
    from outrider.training.settings import RunSettings


def recipe_changes(parsed: argparse.Namespace) -> list[str]:
    """Return the overrides of a command, including the one that ``--model`` abbreviates."""
    return [*parsed.overrides, *([f"model.name={parsed.model}"] if parsed.model else [])]


# Output of ``--dry-run``.


def print_settings(
    settings: Settings,
    recipe: Path | None,
    overrides: Sequence[str],
    *,
    others: str = "derived",
    smoke: Sequence[str] = (),
) -> int:
    """Print the resolved settings, which :func:`load_settings` reads, with the source of each value.
    ``smoke`` are the overrides of ``--smoke``, for whose stand-ins nothing is looked up. Raises ConfigError
    if something that the settings name is missing or cannot be used.
    """
    from outrider.training.settings import RunSettings

    validate_references(settings)
    check_lines = []
    if isinstance(settings, RunSettings) and not smoke:  # a training, or an evaluation on a recipe's tasks
        from outrider.commands.dry_run import check_run

        check_lines = check_run(settings)
    origins = key_sources(recipe, overrides) | dict.fromkeys(key_sources(None, smoke), "smoke")
    text = as_toml(leaves(settings, sources=origins, others=others))
    print_lines(*text.split("\n"))
    if check_lines:
        print_lines("", *(f"# {line}".rstrip() for line in check_lines))
    return 0


# The option ``--smoke`` of the commands that have one.


def add_smoke(parser: argparse.ArgumentParser) -> None:
    """The option, after which nothing else sets what it shrinks."""
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="run all of it in seconds on a CPU (with [cluster] in about a minute): a tiny random model, one "
        "step, two tasks, stand-in files",
    )


@contextmanager
def smoke(
    make_settings: Callable[[Sequence[str]], "RunSettings"],
    overrides: Sequence[str],
    *,
    enabled: bool,
    dry_run: bool,
) -> Iterator[list[str]]:
    """Yield the overrides that ``--smoke`` adds to ``overrides``, none if it is off. With ``dry_run``,
    nothing is written and no server is started.
    """
    if not enabled:
        yield []
        return
    from outrider import smoke as stand_ins
    from outrider.smoke import describe_omissions, smoke_overrides

    settings, names = make_settings(overrides), stand_ins.smoke_assets()
    if omissions := describe_omissions(settings):
        print_lines(omissions, to_stderr=True)
    if dry_run:
        yield smoke_overrides(settings, names, server=stand_ins.NO_SERVER)
        return
    stand_ins.write(names)
    with stand_ins.server() as url:
        yield smoke_overrides(settings, names, server=url)


def resolve_trajectories(file: Path) -> Path:
    """A file of trajectories, or under ``--smoke`` the chats that stand in for one that is not there."""
    from outrider import smoke as stand_ins

    stand_ins.write(names := stand_ins.smoke_assets())
    return file if file.exists() else names.trajectories


def add_train(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    describe(
        parser,
        "Train from a recipe, or continue a run. With --smoke the whole recipe runs in seconds on a CPU, "
        "which finds most errors before a long run does. With --dry-run nothing is trained.",
        "outrider train recipes/demo.toml --smoke --run runs/smoke",
        "outrider train recipes/demo.toml --dry-run",
        "outrider train recipes/demo.toml --run runs/demo train.num_steps=20",
        "outrider train --resume runs/demo",
    )
    parser.add_argument("recipe", nargs="?", type=Path, help="TOML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        help="section.key=value (`outrider explain` lists the settings); with --resume those that may grow",
    )
    parser.add_argument("--run", type=Path, help="new run directory")
    add_smoke(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="check files, model and tools, print all settings, and stop"
    )
    parser.add_argument("--resume", type=Path, metavar="RUN", help="continue this run directory")
    parser.add_argument("--model", help="short for model.name=...")
    parser.add_argument("--ray-address", metavar="ADDRESS", help="short for cluster.ray_address=...")
    parser.add_argument(
        "--changed-plugins",
        action="store_true",
        help="with --resume: continue although the code of a plug-in has changed",
    )
    add_progress(parser)
    parser.set_defaults(
        command=_train, interrupted=f"; continue with: {shell_command('train', '--resume')} {{run}}"
    )


def _train(parsed: argparse.Namespace) -> int:
    from outrider.api import run_settings
    from outrider.api import train as train_run

    # no recipe, but the first override in its place
    if parsed.resume is not None and "=" in str(parsed.recipe or ""):
        parsed.recipe, parsed.overrides = None, [str(parsed.recipe), *parsed.overrides]
    new_run_options = (parsed.run, parsed.model, parsed.ray_address)
    if parsed.resume is not None and parsed.recipe is None and any(new_run_options):
        raise ConfigError("a resumed run has its own model, directory and Ray address")
    if parsed.changed_plugins and parsed.resume is None:
        raise ConfigError("--changed-plugins needs --resume RUN")
    if parsed.dry_run and parsed.resume is not None and parsed.recipe is None:
        from outrider.training.run_dir import extend_settings

        resumed_settings = extend_settings(parsed.resume / "config.toml", parsed.overrides)
        return print_settings(resumed_settings, None, parsed.overrides, others="run")
    if parsed.smoke and parsed.resume is not None:
        raise ConfigError("--smoke needs a recipe; resume a smoke run without it")
    recipe_overrides = recipe_changes(parsed)
    if parsed.ray_address is not None:
        recipe_overrides.append(f"cluster.ray_address={parsed.ray_address}")
    is_dry_run = parsed.dry_run and parsed.recipe is not None and parsed.resume is None
    with smoke(
        lambda values: run_settings(parsed.recipe, overrides=values),
        recipe_overrides,
        enabled=parsed.smoke and parsed.recipe is not None,
        dry_run=is_dry_run,
    ) as more:
        if is_dry_run:
            settings = run_settings(parsed.recipe, overrides=[*recipe_overrides, *more])
            return print_settings(settings, parsed.recipe, recipe_overrides, smoke=more)
        return stoppable(
            lambda stop: train_run(
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
    """Run a training that the first SIGTERM or Ctrl-C stops with a checkpoint of the finished steps.

    Returns the exit status of ``main``.
    """
    with ExitStack() as stack:
        interruptions: list[Event] = []
        run(
            lambda request_stop: interruptions.append(stack.enter_context(stop_on_first_signal(request_stop)))
        )
    return 130 if any(event.is_set() for event in interruptions) else 0
