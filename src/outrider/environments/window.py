"""Prompts that are built anew for every turn and show the last steps only (``context = "window"``).

Published code for text worlds trains on one row per turn: one user message with the task, the last
observations and commands, the present observation and the possible commands, and the policy's reply.
:class:`WindowEpisode` plays an environment in this way. Every turn is a context of its own and one training
sample.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar, Final, Literal, Protocol

from pydantic import Field, model_validator

from outrider.config import Settings
from outrider.environments.base import (
    CopyableEnvironment,
    Env,
    EnvironmentEpisode,
    EnvironmentFactory,
    EnvironmentSettings,
    EpisodeResult,
    StepResult,
    TaskSet,
)
from outrider.environments.conversations import Conversation, ExternalAgent, PromptLimit, Refusal
from outrider.environments.parse_rules import NUM_NUMBERED, ParseRuleName, parse
from outrider.environments.text_games import parse_action
from outrider.errors import ConfigError
from outrider.types import Message, Step, Task

PROMPTS: Final = Path(__file__).with_name("prompts")
NOT_EXECUTED: Final = "Nothing was done: your reply has no command in the expected form."
_READS_COMMANDS: Final = ("strict-admissible", "index")  # parse rules that compare with the possible commands


class CommandWorld(Protocol):
    """What an environment offers to be played with a window. Commands are free of markup such as tags.

    Attributes:
        task_text: the goal in one line.
        opening: the first observation, without instructions and without the list of commands.
    """

    task_text: str
    opening: str

    def admitted(self) -> Sequence[str]:
        """The commands that are possible now."""
        ...

    def act(self, command: str) -> StepResult:
        """Execute a command whatever its form. The observation has no list of commands."""
        ...


# Templates: text with named fields in braces.


FIELDS: Final[Mapping[str, frozenset[str]]] = {
    name: frozenset(fields.split())
    for name, fields in {
        "first.txt": "task steps_taken num_shown history step observation actions skills",
        "later.txt": "task steps_taken num_shown history step observation actions skills",
        "step.txt": "step observation action",
        "action.txt": "number action command",
        "skills.txt": "",
    }.items()
}
"""Fields of every file of a prompt folder."""
_FIELD: Final = re.compile(r"\{\{([a-z_]+)\}\}|\{([a-z_]+)\}")  # {{name}} stands for the text {name}


@dataclass(frozen=True, slots=True)
class Template:
    """A text whose ``{field}`` parts are replaced. Any other text with braces stays as it is."""

    text: str
    fields: frozenset[str] = frozenset()

    @classmethod
    def read(cls, file: Path) -> "Template":
        """Read a file without the line break at its end.

        Raises ConfigError for a file that cannot be read and for an unknown field.
        """
        try:
            text = file.read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from error
        fields = frozenset(match[2] for match in _FIELD.finditer(text) if match[2])
        if unknown := sorted(fields - FIELDS[file.name]):
            known = ", ".join(f"{{{name}}}" for name in sorted(FIELDS[file.name])) or "none"
            raise ConfigError(
                f"{file}: unknown field {{{unknown[0]}}}; fields of this file: {known} "
                f"(write {{{{{unknown[0]}}}}} for the text {{{unknown[0]}}})"
            )
        return cls(text, fields)

    def render(self, values: Mapping[str, object]) -> str:
        """Replace the fields. Values are not read as templates."""
        return _FIELD.sub(lambda match: f"{{{match[1]}}}" if match[1] else str(values[match[2]]), self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTemplates:
    """The files of a prompt folder.

    ``first.txt`` is the prompt that shows no step, ``later.txt`` that of other turns. ``step.txt`` renders
    one step of the history, ``action.txt`` one command of the list. ``skills.txt`` is the text of the field
    ``skills``.
    """

    first: Template
    later: Template
    step: Template
    action: Template = Template("{action}")
    skills: str = ""

    @property
    def unused_fields(self) -> tuple[str, ...]:
        """Fields that neither ``first.txt`` nor ``later.txt`` contains, sorted."""
        return tuple(sorted(FIELDS["later.txt"] - self.first.fields - self.later.fields))


@cache
def read_templates(folder: Path) -> PromptTemplates:
    """Read a prompt folder, once per process. Raises ConfigError."""
    if missing := [name for name in ("first.txt", "later.txt", "step.txt") if not (folder / name).is_file()]:
        raise ConfigError(f"environment.window.prompt: {folder / missing[0]} does not exist")
    templates = {file.stem: Template.read(file) for file in _prompt_files(folder)}
    skills = templates.pop("skills", Template("")).render({})
    return PromptTemplates(skills=skills, **templates)


def _prompt_files(folder: Path) -> list[Path]:
    return [folder / name for name in FIELDS if (folder / name).is_file()]


# Settings.


class WindowSettings(Settings):
    """The prompt of a turn, with ``environment.context = "window"``, and how the reply is read."""

    steps: int = Field(2, ge=0)
    """Number of past steps that a prompt shows."""
    prompt: str | None = None
    """Folder with ``first.txt``, ``later.txt``, ``step.txt`` and, optionally, ``action.txt`` and
    ``skills.txt``; or the name of a shipped one. None: that of the environment.
    """
    order: Literal["observation-action", "action-observation"] = "observation-action"
    """A step of the history is an observation and the command that followed, or a command and the observation
    that followed.
    """
    actions: Literal["none", "lines", "quoted", "numbered", "templates"] = "lines"
    """The list of possible commands: none, one per line, in quotes, numbered from 0, or as templates of
    commands, if the environment has them.
    """
    hide: tuple[str, ...] = ()
    """Commands that are left out of the list."""
    parse: ParseRuleName = "strict"
    """The rule that finds the command in a reply, and decides whether the reply is valid."""
    max_prompt_tokens: int = Field(2048, ge=1)
    """Most tokens of a prompt, as the chat template renders it."""
    max_prompt_characters: int | None = Field(None, ge=1)
    """A prompt with more characters is replaced by ``first.txt``, as verl-agent does in WebShop at 13,000."""
    overflow: Literal["drop-oldest", "left", "right", "first-prompt", "error"] = "drop-oldest"
    """What happens to a longer prompt: it shows fewer steps, loses its first or its last tokens, is replaced
    by ``first.txt``, or stops the run.
    """

    def names_path(self, key: str) -> bool:
        return super().names_path(key) or (
            key == "prompt" and self.prompt is not None and self.prompt not in shipped_prompts()
        )

    @model_validator(mode="after")
    def _validate(self) -> "WindowSettings":
        if self.parse == "index" and self.actions != "numbered":
            raise ValueError('parse = "index" reads the number of a command: set actions = "numbered"')
        return self


def shipped_prompts() -> tuple[str, ...]:
    """Names of the prompt folders that are part of the package."""
    return tuple(sorted(folder.name for folder in PROMPTS.iterdir() if (folder / "first.txt").is_file()))


class WindowedSettings(EnvironmentSettings):
    """Settings of environments that offer :class:`CommandWorld`.

    Class attributes:
        own_prompt: name of the shipped prompt folder that ``window.prompt`` None stands for.
        has_templates: whether the environment has a method ``command_templates``, which returns the lines of
            the list with ``actions = "templates"``.
    """

    own_prompt: ClassVar[str] = ""
    has_templates: ClassVar[bool] = False

    context: Literal["chat", "window"] = "chat"
    """``chat``: the conversation grows with every turn. ``window``: every turn has a prompt of its own with
    the last steps, and is one training sample.
    """
    window: WindowSettings = Field(default_factory=WindowSettings)

    @model_validator(mode="after")
    def _validate_window(self) -> "WindowedSettings":
        if self.context == "chat":
            if self.window != type(self.window)():
                raise ValueError('window has no effect with context = "chat": set context = "window"')
            return self
        if getattr(self, "show_admissible", False):
            raise ValueError('show_admissible has no effect with context = "window": set window.actions')
        if self.window.actions == "templates" and not self.has_templates:
            raise ValueError('window.actions = "templates" needs an environment with templates of commands')
        if self.window.parse == "index" and self.window.prompt is None:
            raise ValueError(
                'window.parse = "index" reads the number of a command, and the default prompt requests tags: '
                'set window.prompt to "scienceworld-numbered" or to a folder of yours'
            )
        return self

    @property
    def keeps_conversations(self) -> bool:
        return self.context == "window"

    @property
    def rebuilt_prompt_tokens(self) -> int | None:
        return self.window.max_prompt_tokens if self.context == "window" else None

    @property
    def needs_commands(self) -> bool:
        """Whether a window needs the possible commands, for the prompt or to parse replies."""
        window = self.window
        lists = window.actions not in ("none", "templates") or window.parse in _READS_COMMANDS
        return self.context == "window" and lists

    @property
    def prompt_folder(self) -> Path:
        """The folder of the templates."""
        prompt = self.window.prompt or self.own_prompt
        return PROMPTS / prompt if prompt in shipped_prompts() else Path(prompt)

    def templates(self) -> PromptTemplates:
        """The templates. Raises ConfigError for a missing file, and for one that contradicts ``order``."""
        folder = self.prompt_folder
        if not folder.is_dir():
            raise ConfigError(
                f"environment.window.prompt: {folder} is no folder, and the shipped prompts are "
                f"{', '.join(shipped_prompts())}"
            )
        templates = read_templates(folder)
        text, (first, second) = templates.step.text, self.window.order.split("-")
        if text.rfind(f"{{{first}}}") > text.find(f"{{{second}}}") >= 0:
            raise ConfigError(
                f"{folder / 'step.txt'} writes {{{second}}} before {{{first}}}, which contradicts "
                f"environment.window.order = {self.window.order}"
            )
        return templates

    def reference_checks(self) -> Mapping[str, Callable[[], object]]:
        checks = {"window.prompt": self.templates} if self.context == "window" else {}
        return {**super().reference_checks(), **checks}

    def input_files(self) -> Mapping[str, Path]:
        files = _prompt_files(self.prompt_folder) if self.context == "window" else []
        return {f"window.prompt/{file.name}": file for file in files}

    def adapt_task_set(self, task_set: TaskSet) -> TaskSet:
        return WindowTaskSet(task_set, self) if self.context == "window" else task_set


# Task set, factory and episode.


class WindowTaskSet:
    """A task set whose episodes are played with a window. Experts play the environment itself."""

    stop: tuple[str, ...] = ()

    def __init__(self, task_set: TaskSet, settings: WindowedSettings) -> None:
        self._task_set, self.settings = task_set, settings  # settings.task_list selects tasks
        self.name, self.stateful = task_set.name, task_set.stateful

    def tasks(self, split: str) -> Sequence[Task]:
        return self._task_set.tasks(split)

    def make(self) -> "WindowFactory":
        templates = self.settings.templates()
        return WindowFactory(self._task_set.make(), self.settings.window, templates)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        return self._task_set.expert(task, seed)

    def close(self) -> None:
        self._task_set.close()


class WindowFactory:
    """Makes windows around the episodes of another factory."""

    def __init__(
        self, factory: EnvironmentFactory, settings: WindowSettings, templates: PromptTemplates
    ) -> None:
        self._factory, self._settings, self._templates = factory, settings, templates
        self.call_budget = getattr(factory, "call_budget", None)

    def __call__(self, task: Task) -> "WindowEpisode":
        return WindowEpisode(self._factory(task), self._settings, self._templates)

    def close(self) -> None:
        self._factory.close()


@dataclass(frozen=True, slots=True)
class PastStep:
    """A step of the history: the observation before a command, the command, and the observation after it."""

    before: str
    command: str
    after: str


class WindowEpisode(ExternalAgent):
    """Plays an environment with one prompt per turn. Its message is the environment's observation alone."""

    call_format = None

    def __init__(self, env: Env, settings: WindowSettings, templates: PromptTemplates) -> None:
        self._env, self._settings, self._templates = env, settings, templates
        self._past: tuple[PastStep, ...] = ()
        self._observation = self._world_observation = ""
        self._commands: tuple[str, ...] = ()
        self._num_shown = self._num_invalid = self._num_shortened = 0
        self._is_first_prompt = self._is_shortened = False
        self._request = Conversation(messages=())
        self._result = StepResult()
        if isinstance(env, CopyableEnvironment):  # the loop checks whether the method exists
            self.copy = self._copy

    @property
    def _world(self) -> CommandWorld:
        world: CommandWorld = (
            self._env.environment if isinstance(self._env, EnvironmentEpisode) else self._env  # type: ignore[assignment]
        )
        return world

    @property
    def request(self) -> Conversation:
        return self._request

    def reset(self, seed: int) -> Sequence[Message]:
        self._env.reset(seed)
        self._past, self._num_invalid, self._num_shortened = (), 0, 0
        self._result = StepResult()
        # The trace stores it for the first prompt: algorithms compare observations, not prompts.
        self.opening = self._observation = self._world_observation = self._world.opening
        self._start_turn()
        return self._request.messages

    def convert(self, text: str) -> str:
        """Experts write ``<action>`` tags without a thought. Add what the parse rule requires."""
        command, problem = parse_action(text)
        number = self._commands.index(command) if command in self._commands else 0
        for form in (text, f"<think>\n\n</think>\n\n{text}", f"### ACTION: {number} ###"):
            parsed = parse(self._settings.parse, form, self._commands)
            if not problem and parsed.valid and parsed.command == command:
                return form
        return text

    def step(self, message: Message) -> StepResult:
        reply = message.content
        if message.reasoning:  # separated by an endpoint; in a rollout, the rule sees the whole turn
            reply = f"<think>\n{message.reasoning}\n</think>\n\n{reply}"
        parsed = parse(self._settings.parse, reply, self._commands)
        if parsed.executed:
            act = self._env.act if isinstance(self._env, EnvironmentEpisode) else self._world.act
            result = act(parsed.command)
            # The rule decides what is valid; strict is the environment's own, which may know more.
            invalid = not parsed.valid or (self._settings.parse == "strict" and result.invalid)
            refused = result.refused or (result.invalid and not invalid)
            self._world_observation = text = result.text
            shown = Message(role="user", content=text) if result.observations else None
            result = replace(result, message=shown, messages=(), invalid=invalid, refused=refused)
        else:
            text = f"{NOT_EXECUTED}\n{self._world_observation}"
            result = StepResult(
                message=Message(role="user", content=text), invalid=not parsed.valid, refused=parsed.valid
            )
        self._num_invalid += result.invalid
        self._past = (*self._past, PastStep(self._observation, parsed.command, text))
        self._observation, self._result = text, result
        if not result.done:
            self._start_turn()
        return result

    def refuse(self, refusal: Refusal) -> StepResult | None:
        """Shorten a prompt that is too long, or return None if that is not possible."""
        overflow = self._settings.overflow
        if not refusal.is_too_long:
            return super().refuse(refusal)
        if overflow == "drop-oldest" and self._num_shown:
            self._num_shown -= 1
        elif overflow == "first-prompt" and not self._is_first_prompt:
            self._is_first_prompt, self._num_shown = True, 0
        else:
            return None
        self._num_shortened += not self._is_shortened
        self._is_shortened = True
        self._request = self._rendered()
        # The rollout records this result in place of that of the turn before, so it has the same reward.
        return replace(self._result, message=Message(role="user", content=self._observation))

    def result(self) -> EpisodeResult:
        record = self._env.result()
        counted = {
            "num_turns": float(len(self._past)),
            "num_invalid": float(self._num_invalid),
            "num_shortened_prompts": float(self._num_shortened),
        }
        return replace(record, metrics={**record.metrics, **counted})

    def _copy(self) -> "WindowEpisode":
        assert isinstance(self._env, CopyableEnvironment)
        twin = WindowEpisode(self._env.copy(), self._settings, self._templates)
        kept = {name: value for name, value in vars(self).items() if name not in ("_env", "copy")}
        vars(twin).update(kept)
        return twin

    def close(self) -> None:
        self._env.close()

    # The prompt

    def _start_turn(self) -> None:
        settings, lists = self._settings, self._settings.actions not in ("none", "templates")
        if lists or settings.parse in _READS_COMMANDS:
            self._commands = tuple(self._world.admitted())
        if lists and settings.actions == "numbered":  # numbers refer to the list that is shown
            self._commands = self._listed()[:NUM_NUMBERED]
        self._num_shown = min(settings.steps, len(self._past))
        self._is_first_prompt = not (self._past and settings.steps)
        self._is_shortened = False
        self._request = self._rendered()
        limit = settings.max_prompt_characters or math.inf
        if not self._is_first_prompt and len(self._request.messages[0].content) > limit:
            self._is_first_prompt, self._is_shortened, self._num_shown = True, True, 0
            self._num_shortened += 1
            self._request = self._rendered()

    def _rendered(self) -> Conversation:
        first_shown = len(self._past) - self._num_shown
        history = "\n".join(
            self._templates.step.render(
                {
                    "step": number,
                    "action": step.command,
                    "observation": step.before
                    if self._settings.order == "observation-action"
                    else step.after,
                }
            )
            for number, step in enumerate(self._past[first_shown:], start=first_shown + 1)
        )
        values = {
            "task": self._world.task_text,
            "steps_taken": len(self._past),
            "num_shown": self._num_shown,
            "history": history.strip(),
            "step": len(self._past) + 1,
            "observation": self._observation,
            "actions": self._list_text(),
            "skills": self._templates.skills,
        }
        template = self._templates.first if self._is_first_prompt else self._templates.later
        return Conversation(
            messages=(Message(role="user", content=template.render(values)),),
            prompt_limit=PromptLimit(
                max_tokens=self._settings.max_prompt_tokens, overflow=self._settings.overflow
            ),
        )

    def _listed(self) -> tuple[str, ...]:
        return tuple(command for command in self._commands if command not in self._settings.hide)

    def _list_text(self) -> str:
        form = self._settings.actions
        if form == "none":
            return ""
        if form == "templates":
            commands: Sequence[str] = self._world.command_templates()  # type: ignore[attr-defined]
        else:
            commands = self._listed()
        shown = {"quoted": "'{1}'", "numbered": "{0}. {1}"}.get(form, "{1}")
        lines = (
            self._templates.action.render(
                {"number": number, "command": command, "action": shown.format(number, command)}
            )
            for number, command in enumerate(commands)
        )
        return "\n".join(lines).strip()
