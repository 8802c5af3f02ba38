"""``outrider train``."""

import argparse
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Final, TypeVar

from outrider.commands.arguments import Commands, overrides
from outrider.commands.prompt import FirstPrompt, first_prompt, load_renderer, rendered_ids, rendered_text
from outrider.config import Settings, require_paths
from outrider.engines.names import find_model
from outrider.environments.base import TaskSet
from outrider.environments.task_sets import make_task_set
from outrider.errors import ConfigError, EnvironmentFault, OutriderError
from outrider.plugins.imports import describe_exception, search_folders
from outrider.plugins.listing import validate_references
from outrider.printing import print_lines
from outrider.resolved import format_toml as as_toml
from outrider.resolved import key_sources, leaves
from outrider.signals import stop_on_first_signal
from outrider.types import Task
from outrider.viewer.trackers import require_installed

if TYPE_CHECKING:
    from outrider.training.settings import RunSettings


# Output of ``--dry-run``.


def print_settings(
    settings: Settings,
    recipe: Path | None,
    overrides: Sequence[str],
    *,
    others: str = "derived",
    smoke: Sequence[str] = (),
) -> int:
    """The resolved configuration, which :func:`load_settings` reads back, and who set what of it:
    ``smoke`` are the overrides of ``--smoke``, for whose stand-ins nothing is looked up. Raises ConfigError
    if something that the settings name is missing or cannot be used.
    """
    validate_references(settings)
    check_lines = [] if smoke else _check_lines(settings)
    from outrider.training.run_dir import UNSEEN

    origins = key_sources(recipe, overrides) | dict.fromkeys(key_sources(None, smoke), "smoke")
    text = as_toml(leaves(settings, sources=origins, unseen=UNSEEN, others=others))
    print_lines(*text.split("\n"))
    if check_lines:
        print_lines("", *(f"# {line}".rstrip() for line in check_lines))
    return 0


def _check_lines(settings: Settings) -> list[str]:
    """Of a training, or an evaluation on a recipe's tasks: what is there."""
    from outrider.training.settings import RunSettings

    return check_run(settings) if isinstance(settings, RunSettings) else []


# What ``--dry-run`` checks beside the settings: files, tasks, tools, trackers and the model. It plays no
# rollout, downloads and writes nothing, and starts no simulator and no program of an agent.


T = TypeVar("T")
_MAX_PROMPT_CHARS: Final = 4_000  # characters of the prompt


def check_run(settings: "RunSettings") -> list[str]:
    """Lines about what was found. Raises ConfigError, one line, for the first thing without which the run
    would fail.
    """
    try:
        return list(_checks(settings))
    except ConfigError:
        raise
    except OutriderError as error:
        raise ConfigError(str(error)) from error


def _checks(settings: "RunSettings") -> Iterator[str]:
    from outrider.training.experts import require_experts

    require_experts(settings)
    require_paths(settings, search_folders())
    require_installed(settings.trackers)
    model_source, folder = find_model(settings.model.name)
    if not settings.environment.starts_quickly:
        yield (
            f"tasks: not opened, because environment.type = {settings.environment.type} starts a program; "
            "outrider prompt RECIPE starts it"
        )
        yield f"model: {model_source}"
        return
    task_set = _call_plugin("the environment cannot be built", lambda: make_task_set(settings.environment))
    try:
        prompt = yield from _tasks(settings, task_set)
    finally:
        task_set.close()
    yield f"model: {model_source}"
    if prompt is None:
        if folder is not None:
            load_renderer(settings, folder)
        return
    if folder is None:
        yield f"first prompt of {prompt.task.key}:"
        yield from _truncate(prompt.lines())
        return
    renderer = load_renderer(settings, folder)
    ids = rendered_ids(prompt, renderer)
    yield f"first prompt of {prompt.task.key}, {len(ids)} tokens as the chat template renders it:"
    yield from _truncate(rendered_text(ids, renderer).split("\n"))


def _tasks(settings: "RunSettings", task_set: TaskSet) -> Generator[str, None, FirstPrompt | None]:
    """Tasks of both splits, demonstrations, tools, and the first prompt."""
    from outrider.training.data import read_eval_tasks, task_notes, training_tasks

    split = settings.evaluation.split
    train = _call_plugin("the training tasks cannot be read", lambda: training_tasks(task_set, settings))
    test = _call_plugin(
        f"the tasks of the split {split} cannot be read",
        lambda: read_eval_tasks(task_set, settings.evaluation),
    )
    if train:
        yield f"tasks: {_format_count(train)} to train on"
    yield f"tasks: {_format_count(test)} to evaluate on (split {split})"
    yield from task_notes(task_set, settings, train, test)[1]
    if settings.cold_start.num_examples and settings.cold_start.demonstrations is not None:
        from outrider.training.experts import read_demonstrations

        demonstrations = read_demonstrations(settings.cold_start.demonstrations, train)
        num_demonstrated = sum(demonstrations.get(task.key) is not None for task in train)
        yield f"cold_start.demonstrations: {num_demonstrated} of {len(train)} training tasks have one"
    if settings.environment.keeps_conversations:
        yield "first prompt: written by the program; outrider prompt RECIPE starts it"
        return None
    factory = _call_plugin("the environment cannot start", task_set.make)
    try:
        if names := settings.environment.tool_names():
            yield f"tools: {', '.join(names)}"
        task = next(iter(test or train), None)
        if task is None:
            return None
        return first_prompt(factory, task, run_seed=settings.seed, step=-1)
    finally:
        factory.close()


def _call_plugin(problem: str, call: Callable[[], T]) -> T:
    """What somebody else's code returns. Raises EnvironmentFault, one line, for what it raises."""
    try:
        return call()
    except OutriderError:
        raise
    except Exception as error:
        raise EnvironmentFault(f"{problem}{describe_exception(error)}") from error


def _format_count(tasks: Sequence[Task]) -> str:
    num_answered = sum(bool(task.answers) for task in tasks)
    if not num_answered:
        return str(len(tasks))
    return f"{len(tasks)}, {'all' if num_answered == len(tasks) else num_answered} with answers"


def _truncate(lines: Sequence[str]) -> Iterator[str]:
    chars_left = _MAX_PROMPT_CHARS
    for number, line in enumerate(lines):
        if chars_left <= 0:
            yield f"({len(lines) - number} more lines)"
            return
        yield f"| {line[:chars_left]}"
        chars_left -= len(line)


# The option ``--smoke`` of the commands that have one.


def add_smoke(parser: argparse.ArgumentParser) -> None:
    """The option, after which nothing else sets what it shrinks."""
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="all of it in seconds on a CPU: a tiny random model, one step, two tasks, stand-ins for files",
    )


@contextmanager
def smoke(
    make_settings: Callable[[Sequence[str]], "RunSettings"],
    overrides: Sequence[str],
    *,
    enabled: bool,
    dry_run: bool,
) -> Iterator[list[str]]:
    """What ``--smoke`` sets above the overrides ``overrides``: nothing where it is not on. Where a command only
    ``dry_run`` its settings, nothing is written and no server runs.
    """
    if not enabled:
        yield []
        return
    from outrider.smoke import settings as stand_ins
    from outrider.smoke.settings import describe_omissions, smoke_overrides

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
    from outrider.smoke import settings as stand_ins

    stand_ins.write(names := stand_ins.smoke_assets())
    return file if file.exists() else names.trajectories


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
        from outrider.training.run_dir import extend_settings

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
