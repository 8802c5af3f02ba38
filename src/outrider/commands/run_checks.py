"""What ``--dry-run`` checks beside the settings: files, tasks, tools, trackers and the model. It plays no
rollout, downloads and writes nothing, and starts no simulator and no program of an agent.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from outrider.commands.first_prompt import (
    FirstPrompt,
    first_prompt,
    load_renderer,
    rendered_ids,
    rendered_text,
)
from outrider.config_paths import require_paths
from outrider.engines.model_names import find_model
from outrider.environments.base import TaskSet
from outrider.environments.families import make_task_set
from outrider.errors import ConfigError, EnvironmentFault, OutriderError
from outrider.plugins.imports import describe_exception, search_folders
from outrider.types import Task
from outrider.watch.trackers import require_installed

if TYPE_CHECKING:
    from outrider.train.settings import RunSettings

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
    from outrider.train.data.no_expert import require_experts

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
    from outrider.train.data.task_checks import read_eval_tasks, task_notes, training_tasks

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
        from outrider.train.data.experts import read_demonstrations

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
