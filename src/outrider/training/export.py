"""``outrider export``: the weights of a run's checkpoint as a Hugging Face folder, on the CPU."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.environments.base import make_task_set, open_episode, split_tasks
from outrider.errors import CheckpointError, ConfigError, OutriderError
from outrider.files import replacing_folder
from outrider.plugins.imports import describe_exception
from outrider.seeding import reset_seed
from outrider.training.checkpoint import checkpoint_step, checkpoints_newest_first
from outrider.training.run_dir import RECORD, recorded_settings
from outrider.training.settings import RunSettings
from outrider.training.setup import make_policy
from outrider.types import ToolSchema

RENDERING: Final = "outrider.json"
"""File in an exported folder that records how the conversations of the training were rendered."""
_NUM_PROMPTS: Final = 2  # tasks whose system prompts are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationDefaults:
    """What the conversations of a run have in common.

    Attributes:
        system_prompt: the first message; empty without a system message, and if tasks have different ones.
        tools: the native tools that the chat template describes.
        stop: the stop strings of a turn.
    """

    system_prompt: str = ""
    tools: tuple[ToolSchema, ...] = ()
    stop: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """One line each for the system prompt, the stop strings and the names of the tools."""
        names = ", ".join(str(tool["name"]) for tool in self.tools)
        first = self.system_prompt.strip().split("\n")[0]
        return [
            f"system prompt: {first[:80] or 'none'}{' ...' if len(self.system_prompt) > 80 else ''}",
            f"stop strings: {' '.join(self.stop) or 'none'}",
            f"tools: {names or 'none'}",
        ]


def read_defaults(
    settings: RunSettings, *, note: Callable[[str], None], starts_slowly: bool
) -> ConversationDefaults:
    """Start an episode of two tasks of the evaluation's split and read its beginning.

    Agent programs, which write their own prompts, are not started, and neither are simulators unless
    ``starts_slowly``. ``note`` gets one line if the environment cannot be used here.
    """
    environment = settings.environment
    stop: tuple[str, ...] = ()
    try:
        with closing(make_task_set(environment)) as task_set:
            stop = tuple(task_set.stop)
            if environment.keeps_conversations or not (environment.starts_quickly or starts_slowly):
                return ConversationDefaults(stop=stop)
            with closing(task_set.make()) as factory:
                beginnings: list[tuple[str, tuple[ToolSchema, ...]]] = []
                for task in split_tasks(task_set, settings.evaluation.sets[0].split)[:_NUM_PROMPTS]:
                    with closing(factory(task)) as env:
                        episode = open_episode(env)
                        first, *_ = episode.start(reset_seed(settings.seed, -1, task.key))
                        system_prompt = first.content if first.role == "system" else ""
                        beginnings.append((system_prompt, tuple(episode.tools)))
    except Exception as error:  # a plug-in may raise anything
        reason = f": {error}" if isinstance(error, OutriderError) else describe_exception(error)
        note(f"the system prompt and the tools of the run are unknown{reason}")
        return ConversationDefaults(stop=stop)
    if not beginnings or any(beginning != beginnings[0] for beginning in beginnings):
        note("the system prompt and the tools differ between tasks: requests must contain them")
        return ConversationDefaults(stop=stop)
    system_prompt, tools = beginnings[0]
    return ConversationDefaults(system_prompt=system_prompt, tools=tools, stop=stop)


def write_rendering(folder: Path, settings: RunSettings, defaults: ConversationDefaults) -> None:
    """Write the rendering of conversations, so that a server of the weights can use the same."""
    rendering: dict[str, Any] = {
        "template_kwargs": settings.model.template_kwargs,
        "history_thinking": settings.model.history_thinking,
        "call_format": settings.environment.call_format,
        "stop": defaults.stop,
    }
    if defaults.system_prompt:
        rendering["system_prompt"] = defaults.system_prompt
    if defaults.tools:
        rendering["tools"] = defaults.tools
    (folder / RENDERING).write_text(json.dumps(rendering, indent=2, default=str) + "\n", encoding="utf-8")


def find_checkpoint(run: Path, step: int | None) -> Path:
    """Return the newest checkpoint of a run, or that of a step. Raises CheckpointError if there is none."""
    if not (run / RECORD).is_file():
        raise CheckpointError(f"{run} is no run directory: it has no {RECORD}")
    checkpoints = {checkpoint_step(path): path for path in checkpoints_newest_first(run / "checkpoints")}
    if not checkpoints:
        raise CheckpointError(f"{run} has no checkpoint")
    if step is None:
        return next(iter(checkpoints.values()))
    if step not in checkpoints:
        known = ", ".join(map(str, sorted(checkpoints)))
        raise CheckpointError(f"{run} has no checkpoint of step {step} (of steps: {known})")
    return checkpoints[step]


def export_run(
    run: Path,
    out: Path,
    *,
    checkpoint: Path | None = None,
    with_prompt: bool = True,
    note: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write model, tokenizer and configuration into the new folder ``out``, with adapters merged. Returns the
    checkpoint, by default the newest one.

    ``with_prompt``: with the run's system prompt and tools. ``note`` gets a line if they are unknown.

    Raises CheckpointError if there is none, and ConfigError if the folder is not empty.
    """
    checkpoint = checkpoint or find_checkpoint(run, None)
    settings = recorded_settings(run / RECORD)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty: name a new folder")
    overrides = {"initial_checkpoint": str(checkpoint), "device": "cpu"}
    model = settings.model.model_copy(update=overrides)
    defaults = read_defaults(settings, note=note, starts_slowly=False)
    if not with_prompt:
        defaults = ConversationDefaults(stop=defaults.stop)
    policy = make_policy(settings.model_copy(update={"model": model}))
    with replacing_folder(out) as temporary:
        policy.export(temporary)
        write_rendering(temporary, settings, defaults)
    return checkpoint
