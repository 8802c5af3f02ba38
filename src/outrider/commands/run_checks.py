"""What ``--dry-run`` checks beside the settings: files, tasks, tools, trackers and the model. It plays no
rollout, downloads and writes nothing, and starts no simulator and no program of an agent.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from outrider.commands.first_prompt import FirstPrompt, first_prompt, rendered_ids, rendered_text, renderer_of
from outrider.config_paths import require_paths
from outrider.engines.model_names import find_model
from outrider.environments.base import TaskFamily
from outrider.environments.families import make_family
from outrider.errors import ConfigError, EnvironmentFault, OutriderError
from outrider.plugins.imports import searched, told_of
from outrider.types import Task
from outrider.watch.trackers import require_installed

if TYPE_CHECKING:
    from outrider.train.settings import RunSettings

T = TypeVar("T")
_LONGEST: Final = 4_000  # characters of the prompt


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
    require_paths(settings, searched())
    require_installed(settings.trackers)
    found, folder = find_model(settings.model.name)
    if not settings.environment.starts_quickly:
        yield (
            f"tasks: not opened, because environment.type = {settings.environment.type} starts a program; "
            "outrider prompt RECIPE starts it"
        )
        yield f"model: {found}"
        return
    family = _of_others("the environment cannot be built", lambda: make_family(settings.environment))
    try:
        prompt = yield from _tasks(settings, family)
    finally:
        family.close()
    yield f"model: {found}"
    if prompt is None:
        if folder is not None:
            renderer_of(settings, folder)
        return
    if folder is None:
        yield f"first prompt of {prompt.task.key}:"
        yield from _cut(prompt.lines())
        return
    renderer = renderer_of(settings, folder)
    ids = rendered_ids(prompt, renderer)
    yield f"first prompt of {prompt.task.key}, {len(ids)} tokens as the chat template renders it:"
    yield from _cut(rendered_text(ids, renderer).split("\n"))


def _tasks(settings: "RunSettings", family: TaskFamily) -> Generator[str, None, FirstPrompt | None]:
    """Tasks of both splits, demonstrations, tools, and the first prompt."""
    from outrider.train.data.task_checks import held_out_panel, task_notes, training_tasks

    split = settings.evaluation.split
    train = _of_others("the training tasks cannot be read", lambda: training_tasks(family, settings))
    test = _of_others(
        f"the tasks of the split {split} cannot be read", lambda: held_out_panel(family, settings.evaluation)
    )
    if train:
        yield f"tasks: {_counted(train)} to train on"
    yield f"tasks: {_counted(test)} to evaluate on (split {split})"
    yield from task_notes(family, settings, train, test)[1]
    if settings.cold_start.num_examples and settings.cold_start.demonstrations is not None:
        from outrider.train.data.experts import demonstrations_of

        shown = demonstrations_of(settings.cold_start.demonstrations, train)
        num = sum(shown.get(task.key) is not None for task in train)
        yield f"cold_start.demonstrations: {num} of {len(train)} training tasks have one"
    if settings.environment.keeps_conversations:
        yield "first prompt: written by the program; outrider prompt RECIPE starts it"
        return None
    factory = _of_others("the environment cannot start", family.make)
    try:
        if names := settings.environment.tool_names():
            yield f"tools: {', '.join(names)}"
        task = next(iter(test or train), None)
        if task is None:
            return None
        return first_prompt(factory, task, run_seed=settings.seed, step=-1)
    finally:
        factory.close()


def _of_others(what: str, call: Callable[[], T]) -> T:
    """What somebody else's code returns. Raises EnvironmentFault, one line, for what it raises."""
    try:
        return call()
    except OutriderError:
        raise
    except Exception as error:
        raise EnvironmentFault(f"{what}{told_of(error)}") from error


def _counted(tasks: Sequence[Task]) -> str:
    with_answers = sum(bool(task.answers) for task in tasks)
    if not with_answers:
        return str(len(tasks))
    return f"{len(tasks)}, {'all' if with_answers == len(tasks) else with_answers} with answers"


def _cut(lines: Sequence[str]) -> Iterator[str]:
    room = _LONGEST
    for number, line in enumerate(lines):
        if room <= 0:
            yield f"({len(lines) - number} more lines)"
            return
        yield f"| {line[:room]}"
        room -= len(line)
