"""What ``--dry-run`` checks beside the settings: files, tasks, tools, trackers and the model. It plays no
rollout, downloads and writes nothing, and starts no simulator and no program of an agent. The last lines
describe the work of a step.
"""

import logging
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from outrider.config import require_paths, shown_path
from outrider.engines.base import find_model
from outrider.environments.base import EnvironmentFactory, TaskSet, make_task_set, open_episode
from outrider.environments.window import WindowedSettings
from outrider.errors import ConfigError, EnvironmentFault, ModelError, OutriderError
from outrider.plugins.imports import describe_exception, search_folders
from outrider.printing import plural
from outrider.seeding import reset_seed
from outrider.types import Message, Task, ToolSchema
from outrider.viewer.trackers import require_installed

if TYPE_CHECKING:
    from outrider.tokens import ChatRenderer
    from outrider.training.settings import RunSettings


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

    def start() -> FirstPrompt:
        with closing(factory(task)) as environment:
            episode = open_episode(environment)
            messages = episode.start(reset_seed(run_seed, step, task.key))
            return FirstPrompt(task=task, messages=messages, tools=tuple(episode.tools))

    return _call_plugin(f"the environment cannot start task {task.key!r}", start)


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


T = TypeVar("T")
_MAX_PROMPT_CHARS: Final = 4_000  # characters of the prompt


def check_run(settings: "RunSettings") -> list[str]:
    """Lines about what was found. Raises ConfigError, one line, for the first thing without which the run
    would fail.
    """
    try:
        return [*_checks(settings), *work_lines(settings)]
    except ConfigError:
        raise
    except OutriderError as error:
        raise ConfigError(str(error)) from error


def _checks(settings: "RunSettings") -> Iterator[str]:
    from outrider.planning.plan import unpacked_refusal
    from outrider.training.settings import require_experts, require_extras
    from outrider.training.unused_keys import unused_keys

    device = settings.model.device
    if not re.fullmatch(r"(cpu|cuda|mps|xpu|npu|hpu|mtia|xla)(:\d+)?", device):  # torch is not imported
        raise ConfigError(
            f"model.device = {device!r} cannot be used: the device is not known; set model.device=cpu, "
            "cuda, cuda:1, mps, xpu or npu"
        )
    require_experts(settings)
    require_extras(settings)
    if refusal := unpacked_refusal(settings):
        raise ConfigError(refusal)
    if settings.trains:  # an evaluation of a recipe's tasks does not read most of it
        yield from unused_keys(settings)
    require_paths(settings, search_folders())
    require_installed(settings.trackers)
    if settings.trackers:
        yield f"trackers: {', '.join(settings.trackers)}"
    environment = settings.environment
    if isinstance(environment, WindowedSettings) and environment.context == "window":
        unused, folder_name = environment.templates().unused_fields, shown_path(environment.prompt_folder)
        yield f"prompts: {folder_name}; fields that they do not use: {', '.join(unused) or 'none'}"
    model_source, folder = find_model(settings.model.name)
    if not settings.environment.starts_quickly:
        yield (
            f"tasks: not opened, because environment.type = {settings.environment.type} starts a program; "
            "outrider prompt RECIPE starts it"
        )
        yield f"model: {model_source}"
        return
    task_set = _call_plugin("the environment cannot be built", lambda: make_task_set(settings.environment))
    with closing(task_set):
        prompt = yield from _tasks(settings, task_set)
    yield f"model: {model_source}"
    if prompt is None:
        if folder is not None:
            load_renderer(settings, folder)
        return
    if folder is None:
        yield f"first prompt of {prompt.task.key}:"
        yield from _truncate(prompt.lines())
        return
    from outrider.tokens import decode_text

    renderer = load_renderer(settings, folder)
    ids = renderer.prompt(prompt.messages, prompt.tools)
    yield f"first prompt of {prompt.task.key}, {plural(len(ids), 'token')} as the chat template renders it:"
    yield from _truncate(decode_text(renderer.tokenizer, ids, skip_special_tokens=False).split("\n"))


def _tasks(settings: "RunSettings", task_set: TaskSet) -> Generator[str, None, FirstPrompt | None]:
    """Tasks of both splits, demonstrations, tools, and the first prompt."""
    from outrider.training.data import (
        read_eval_tasks,
        read_other_sets,
        require_some_tasks,
        task_notes,
        training_tasks,
    )

    main = settings.evaluation.sets[0]
    split, name = main.split, f"{main.name}, " if main.name else ""
    train = _call_plugin("the training tasks cannot be read", lambda: training_tasks(task_set, settings))
    test = _call_plugin(
        f"the tasks of the split {split} cannot be read",
        lambda: read_eval_tasks(task_set, settings.evaluation),
    )
    require_some_tasks(train, test, settings)
    if train:
        yield f"tasks: {len(train)} to train on{_format_answers(train)}"
    if test:
        yield f"tasks: {len(test)} to evaluate on ({name}split {split}){_format_answers(test)}"
    else:
        yield f"WARNING: the split {split!r} has no tasks: the run evaluates nothing; set evaluation.split"
    others, lines = _call_plugin(
        "the tasks of evaluation.panels cannot be read", lambda: read_other_sets(task_set, settings, train)
    )
    for entry in others:
        yield f"tasks: {len(entry.tasks)} to evaluate on ({entry.name}, split {entry.split})"
    yield from [*task_notes(task_set, settings, train, test)[1], *lines]
    files = {"algorithm.demonstrations": getattr(settings.algorithm, "demonstrations", None)}
    if settings.cold_start.num_examples:
        files["cold_start.demonstrations"] = settings.cold_start.demonstrations
    for key, file in files.items():
        if file is not None and train:
            from outrider.training.experts import read_demonstrations

            demonstrations = read_demonstrations(file, train, settings.environment)
            num_demonstrated = sum(demonstrations.get(task.key) is not None for task in train)
            yield f"{key}: {num_demonstrated} of {plural(len(train), 'training task')} have one"
    environment = settings.environment
    if environment.keeps_conversations and environment.rebuilt_prompt_tokens is None:
        yield "first prompt: written by the program; outrider prompt RECIPE starts it"
        return None
    with closing(_call_plugin("the environment cannot start", task_set.make)) as factory:
        if names := settings.environment.tool_names():
            yield f"tools: {', '.join(names)}"
        task = next(iter(test or train), None)
        if task is None:
            return None
        return first_prompt(factory, task, run_seed=settings.seed, step=-1)


def _call_plugin(problem: str, call: Callable[[], T]) -> T:
    """Call a plug-in. Raises EnvironmentFault with one line for any exception."""
    try:
        return call()
    except OutriderError:
        raise
    except Exception as error:
        raise EnvironmentFault(f"{problem}{describe_exception(error)}") from error


def _format_answers(tasks: Sequence[Task]) -> str:
    num_answered = sum(bool(task.answers) for task in tasks)
    if not num_answered:
        return ""
    return f", {'all' if num_answered == len(tasks) else num_answered} with answers"


def work_lines(settings: "RunSettings") -> list[str]:
    """Describe the cold start, and the groups, rollouts, tokens and updates of a training step."""
    train, cold_start = settings.train, settings.cold_start
    lines = []
    if cold_start.num_examples:
        lines.append(
            f"cold start: up to {plural(cold_start.num_examples, 'demonstration')}, "
            f"{plural(cold_start.max_steps, 'update')}"
        )
    if not train.num_steps:
        return [*lines, "no training step (train.num_steps = 0)"]
    num_rollouts = train.tasks_per_step * settings.algorithm.group_size
    num_updates = settings.update.num_mini_batches * settings.update.num_epochs
    updates = f"{num_updates} update{'s' * (num_updates > 1)} of the weights"
    if (size := settings.update.mini_batch_samples) is not None:
        updates = f"an update of the weights for every {size} sample{'s' * (size > 1)}"
        updates += f", {num_updates} times" if num_updates > 1 else ""
    max_tokens = settings.max_rollout_tokens
    lines.append(
        f"a step: {plural(train.tasks_per_step, 'group')} of "
        f"{plural(settings.algorithm.group_size, 'rollout')} "
        f"({num_rollouts}), at most {num_rollouts * max_tokens:,} response tokens ({max_tokens:,} each), "
        f"{updates}"
    )
    if (prompt_tokens := settings.environment.rebuilt_prompt_tokens) is not None:
        num_samples = num_rollouts * settings.rollout.max_turns
        longest = prompt_tokens + settings.rollout.max_turn_tokens
        lines.append(
            f"every turn is a sample: at most {num_samples:,} a step, of at most {longest:,} tokens "
            "(environment.window.max_prompt_tokens + rollout.max_turn_tokens)"
        )
    budget, every = train.max_policy_tokens, train.checkpoint_every
    limit = f", or {budget:,} policy tokens" if budget else ""
    lines.append(
        f"the run: {train.num_steps} step{'s' * (train.num_steps > 1)}{limit}; a checkpoint "
        f"after every {'step' if every == 1 else f'{every} steps'}"
    )
    return lines


def _truncate(lines: Sequence[str]) -> Iterator[str]:
    chars_left = _MAX_PROMPT_CHARS
    for number, line in enumerate(lines):
        if chars_left <= 0:
            yield f"({len(lines) - number} more lines)"
            return
        yield f"| {line[:chars_left]}"
        chars_left -= len(line)
