"""``outrider prompt``: the first prompt of a task, as the policy sees it."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.commands.arguments import Commands, overrides
from outrider.environments.base import EnvironmentFactory, prompt_tools
from outrider.errors import ConfigError, EnvironmentFault, ModelError, OutriderError
from outrider.plugins.imports import describe_exception
from outrider.printing import print_lines
from outrider.seeding import reset_seed
from outrider.suggestions import did_you_mean
from outrider.types import Message, Task, ToolSchema

if TYPE_CHECKING:
    from outrider.tokens import ChatRenderer
    from outrider.training.settings import RunSettings


def add(commands: Commands) -> None:
    """The command ``prompt``."""
    parser = commands.add_parser(
        "prompt",
        help="print the first prompt of a task: messages, text as the chat template renders it, ids",
        description="Print the first prompt of a task as the policy sees it, without retrieved steps and "
        "tips. Example: outrider prompt recipe.toml --split train --task 3",
    )
    parser.add_argument("recipe", type=Path, help="TOML file, or a run directory")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--model", help="short for model.name=...")
    parser.add_argument("--split", help="of the task (default: that of the evaluations)")
    parser.add_argument(
        "--task",
        default="0",
        metavar="N",
        help="number (from 0) or key of the task in its split",
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
    from outrider.config import require_paths
    from outrider.engines.names import require_known_model
    from outrider.environments.task_sets import make_task_set, split_tasks
    from outrider.plugins.imports import search_folders

    settings = _settings(parsed.recipe, overrides(parsed))
    for name in ("environment", "engine"):
        require_paths(getattr(settings, name), search_folders(), prefix=f"{name}.")
    require_known_model(settings.model.name)
    split = parsed.split or settings.evaluation.split
    family = make_task_set(settings.environment)
    try:
        tasks = split_tasks(family, split)
        task = _find_task(tasks, parsed.task, split)
        factory = family.make()
        try:
            step = -1 if split == settings.evaluation.split else 0
            prompt = first_prompt(factory, task, run_seed=settings.seed, step=step)
        finally:
            factory.close()
    finally:
        family.close()
    print_lines(f"task {task.key} (split {split}, {len(tasks)} tasks)", *prompt.lines())
    from outrider.engines.local.model import resolve_model

    renderer = load_renderer(settings, resolve_model(settings.model.name))
    ids = rendered_ids(prompt, renderer)
    print_lines("", f"as the chat template of {settings.model.name} renders it: {len(ids)} ids", "")
    print_lines(*rendered_text(ids, renderer).split("\n"))
    if parsed.ids:
        print_lines("", " ".join(map(str, ids)))
    return 0


def _settings(recipe: Path, recipe_overrides: Sequence[str]) -> "RunSettings":
    from outrider import api
    from outrider.training.run_dir import RECORD

    return api.run_settings(recipe / RECORD if recipe.is_dir() else recipe, overrides=recipe_overrides)


def _find_task(tasks: "Sequence[Task]", task_id: str, split: str) -> "Task":
    """Raises ConfigError if no task has the number or the key."""
    tasks_by_key = {task.key: task for task in tasks}
    if task_id in tasks_by_key:
        return tasks_by_key[task_id]
    if task_id.isdecimal() and int(task_id) < len(tasks):
        return tasks[int(task_id)]
    if task_id.isdecimal():
        raise ConfigError(f"--task {task_id}: the split {split} has {len(tasks)} tasks, counted from 0")
    suggestion = did_you_mean(task_id, tasks_by_key)
    raise ConfigError(f"--task {task_id}: no task of the split {split} has this key{suggestion}")


# The first prompt of a task, as an environment writes it and a chat template renders it.


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPrompt:
    """The messages and tools with which an episode of ``task`` begins."""

    task: Task
    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]

    def lines(self) -> list[str]:
        """The messages by role, each of their lines on one of its own, and the names of the tools."""
        lines: list[str] = []
        for message in self.messages:
            lines += f"[{message.role}] {message.content}".split("\n")
        if self.tools:
            names = ", ".join(str(tool["name"]) for tool in self.tools)
            lines.append(f"tools, which the chat template describes: {names}")
        return lines


def first_prompt(factory: EnvironmentFactory, task: Task, *, run_seed: int, step: int) -> FirstPrompt:
    """Start an episode and end it. ``step`` is the training step that it would belong to, -1 for an
    evaluation. Raises EnvironmentFault for whatever breaks in an environment.
    """
    try:
        environment = factory(task)
        try:
            messages = tuple(environment.reset(reset_seed(run_seed, step, task.key)))
            tools = tuple(prompt_tools(environment))
        finally:
            environment.close()
        if wrong := [message for message in messages if not isinstance(message, Message)]:
            raise TypeError(f"reset returned a {type(wrong[0]).__name__} among the messages")
    except OutriderError:
        raise
    except Exception as error:  # somebody else's code
        raise EnvironmentFault(
            f"the environment cannot start task {task.key!r}{describe_exception(error)}"
        ) from error
    return FirstPrompt(task=task, messages=messages, tools=tools)


def load_renderer(settings: "RunSettings", folder: str) -> "ChatRenderer":
    """The renderer with the tokenizer of a model folder or Hugging Face id. Raises ModelError."""
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from outrider.training.setup import make_checked_renderer

    disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # damaged files raise whatever their readers raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"cannot load the tokenizer of {settings.model.name!r}: {reason}"[:500]) from error
    if tokenizer.chat_template is None:
        raise ModelError(f"model {settings.model.name!r} has no chat template; use an instruct model")
    note = logging.getLogger(__name__).info
    return make_checked_renderer(tokenizer, settings.model, settings.environment, note=note)


def rendered_ids(prompt: FirstPrompt, renderer: "ChatRenderer") -> tuple[int, ...]:
    """The ids that the policy sees first. Raises ModelError if the template cannot render the messages."""
    return renderer.prompt(prompt.messages, prompt.tools)


def rendered_text(ids: Sequence[int], renderer: "ChatRenderer") -> str:
    """These ids as text, with the template's markers."""
    from outrider.tokens import decode_text

    return decode_text(renderer.tokenizer, ids, skip_special_tokens=False)
