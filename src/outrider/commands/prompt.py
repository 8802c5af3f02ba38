"""``outrider prompt``: the first prompt of a task, as the policy sees it."""

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.commands import describe
from outrider.commands.train import recipe_changes
from outrider.errors import ConfigError, OutriderError
from outrider.printing import plural, print_lines
from outrider.suggestions import did_you_mean

if TYPE_CHECKING:
    from outrider.types import Task


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    describe(
        parser,
        "Print the first prompt of a task as the policy sees it, without retrieved steps and tips: the "
        "messages, the text that the chat template renders, and the token ids.",
        "outrider prompt recipes/demo.toml",
        "outrider prompt recipes/demo.toml --split train --task 3 --ids",
    )
    parser.add_argument("recipe", type=Path, help="TOML file, or a run directory")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--model", help="short for model.name=...")
    parser.add_argument("--split", help="split of the task (default: that of the evaluations)")
    parser.add_argument(
        "--task", default="0", metavar="N", help="number (from 0) or key of the task in its split"
    )
    parser.add_argument("--ids", action="store_true", help="also print the token ids")
    parser.set_defaults(command=_prompt)


def _prompt(parsed: argparse.Namespace) -> int:
    """Print the prompt. Raises ConfigError, as ``--dry-run`` does, for whatever keeps an episode from
    starting.
    """
    try:
        return _print_prompt(parsed)
    except ConfigError:
        raise
    except OutriderError as error:
        raise ConfigError(str(error)) from error


def _print_prompt(parsed: argparse.Namespace) -> int:
    from outrider import api
    from outrider.commands.dry_run import first_prompt, load_renderer
    from outrider.config import require_paths
    from outrider.engines.base import require_known_model
    from outrider.environments.base import make_task_set, split_tasks
    from outrider.plugins.imports import search_folders
    from outrider.training.run_dir import RECORD

    recipe = parsed.recipe / RECORD if parsed.recipe.is_dir() else parsed.recipe
    settings = api.run_settings(recipe, overrides=recipe_changes(parsed))
    for name in ("environment", "engine"):
        require_paths(getattr(settings, name), search_folders(), prefix=f"{name}.")
    require_known_model(settings.model.name)
    split = parsed.split or settings.evaluation.sets[0].split
    with closing(make_task_set(settings.environment)) as task_set:
        tasks = split_tasks(task_set, split)
        task = _find_task(tasks, parsed.task, split)
        with closing(task_set.make()) as factory:
            step = -1 if split == settings.evaluation.sets[0].split else 0
            prompt = first_prompt(factory, task, run_seed=settings.seed, step=step)
    print_lines(f"task {task.key} (split {split}, {plural(len(tasks), 'task')})", *prompt.lines())
    from outrider.engines.local.model import resolve_model
    from outrider.tokens import decode_text

    renderer = load_renderer(settings, resolve_model(settings.model.name))
    ids = renderer.prompt(prompt.messages, prompt.tools)
    print_lines("", f"as the chat template of {settings.model.name} renders it: {plural(len(ids), 'id')}", "")
    print_lines(*decode_text(renderer.tokenizer, ids, skip_special_tokens=False).split("\n"))
    if parsed.ids:
        print_lines("", " ".join(map(str, ids)))
    return 0


def _find_task(tasks: "Sequence[Task]", task_id: str, split: str) -> "Task":
    """Raises ConfigError if no task has the number or the key."""
    tasks_by_key = {task.key: task for task in tasks}
    if task_id in tasks_by_key:
        return tasks_by_key[task_id]
    if task_id.isdecimal() and int(task_id) < len(tasks):
        return tasks[int(task_id)]
    if task_id.isdecimal():
        raise ConfigError(
            f"--task {task_id}: the split {split} has {plural(len(tasks), 'task')}, counted from 0"
        )
    suggestion = did_you_mean(task_id, tasks_by_key)
    raise ConfigError(f"--task {task_id}: no task of the split {split} has this key{suggestion}")
