"""From settings to a panel that can be played: tasks, an environment for each, limits, and what identifies
all of it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.environments.base import EnvironmentFactory, EnvironmentSettings, TaskFamily
from outrider.environments.families import make_family, split_tasks
from outrider.environments.tool_qa.datasets import panel_hash
from outrider.environments.tool_qa.judge import JudgeSettings
from outrider.environments.tool_qa.single_turn import QuestionFactory
from outrider.errors import ConfigError
from outrider.evals.benchmark.extraction import Kind, Scorer, find_variant
from outrider.evals.benchmark.settings import PanelSettings, environment_names, is_environment
from outrider.evals.benchmark.task_sets import Panel, TaskSet, load_task_set, prompt_messages
from outrider.plugins.record import plugin_digests
from outrider.rollout.limits import Limits
from outrider.types import Json, Message, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPanel:
    """``scorer`` is None where the environment's own record is the score. ``tools`` are the tag names of the
    tools that questions are asked with. ``identity`` is all that results depend on but for who plays.
    """

    panel: Panel
    factory: EnvironmentFactory
    stop: tuple[str, ...]
    limits: Limits
    scorer: Scorer | None
    tools: tuple[str, ...]
    identity: Mapping[str, Json]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """In the panel's order."""
        return self.panel.tasks

    @property
    def kind(self) -> Kind:
        """Of the questions."""
        return self.panel.task_set.kind


def judge_identity(judge: JudgeSettings) -> dict[str, Json]:
    """All that a verdict depends on; where the server stands is not among it."""
    given: dict[str, Json] = judge.model_dump(mode="json", exclude={"endpoint"})
    return {**given, "model": judge.endpoint.model, "seed": judge.endpoint.seed}


def open_panel(settings: PanelSettings) -> PlayedPanel:
    """Load tasks and tools; close ``factory`` in the end.

    Raises ConfigError, also for tasks that are not the pinned panel, DataError and ToolUnavailable.
    """
    family = None if settings.environment is None else make_family(settings.environment)
    panel = load_tasks(settings, family)
    scorer = scorer_of(panel.task_set, settings)
    identity: dict[str, Json] = {
        "tasks": panel.task_set.name, "panel_hash": panel.panel_hash, "rules": settings.rules,
        "metric": scorer, "judge": None if settings.judge is None else judge_identity(settings.judge),
        "temperature": settings.temperature, "rollout": settings.rollout.model_dump(mode="json"),
        "seed": settings.seed, "environment": None, "instruction": None,
    }  # fmt: skip
    if family is None or settings.environment is None or settings.tools == "off":
        prompt = partial(_prompt, panel.task_set, settings)
        identity["instruction"] = [message.content for message in prompt(Task(key="", question=""))]
        factory = QuestionFactory(prompt=prompt, extract=find_variant(settings.rules).extract)
        return PlayedPanel(
            panel=panel,
            factory=factory,
            stop=(),
            limits=settings.rollout,
            scorer=scorer,
            tools=(),
            identity=identity,
        )
    identity["environment"] = environment_identity(settings.environment) | dict(plugin_digests(settings))
    return PlayedPanel(
        panel=panel, factory=family.make(), stop=family.stop, limits=_limits(settings), scorer=scorer,
        tools=settings.environment.tool_names(),
        identity=identity,
    )  # fmt: skip


def load_tasks(settings: PanelSettings, family: TaskFamily | None) -> Panel:
    """The tasks, without what they are played with. Raises ConfigError and DataError."""
    panel = _own(settings, family) if is_environment(settings.tasks) else _given(settings)
    if settings.panel not in (None, panel.panel_hash):
        raise ConfigError(
            f"panel is {settings.panel}, and these {len(panel.tasks)} tasks are {panel.panel_hash}"
        )
    return panel


def _given(settings: PanelSettings) -> Panel:
    """A task set, or a file of questions."""
    return load_task_set(settings.tasks, limit=settings.limit, others=environment_names())


def _own(settings: PanelSettings, family: TaskFamily | None) -> Panel:
    """An environment's tasks of one split."""
    assert family is not None  # the settings see to it
    tasks = tuple(split_tasks(family, settings.split)[: settings.limit])
    task_set = TaskSet(name=settings.tasks, kind="qa", scorer="em", columns=())
    return Panel(task_set=task_set, tasks=tasks, panel_hash=panel_hash(tasks))


def scorer_of(task_set: TaskSet, settings: PanelSettings) -> Scorer | None:
    """None where the environment's own record is the score. Raises ConfigError for a metric that these tasks
    cannot have.
    """
    if settings.is_played:
        return None
    wanted = settings.metric or ("judge" if settings.judge is not None else task_set.scorer)
    if wanted == "judge" and settings.judge is None:
        raise ConfigError(
            f"{task_set.name} is graded by a judge: give its endpoint "
            "(--judge URL), or another metric (metric=em)"
        )
    if wanted == "math" and task_set.kind != "math":
        raise ConfigError(
            f"{task_set.name} is no task set of mathematics; for a file of problems give math500=FILE"
        )
    return wanted


def _prompt(task_set: TaskSet, settings: PanelSettings, task: Task) -> tuple[Message, ...]:
    instruction, question = prompt_messages(task_set, task)
    if settings.instruction == "system":
        return (instruction, question)
    return (replace(question, content=f"{instruction.content}\n\n{question.content}"),)


def _limits(settings: PanelSettings) -> Limits:
    """A step that may wait for others' Python calls has that much longer before it is a fault."""
    waiting = 0.0 if settings.environment is None else settings.environment.waiting_s(settings.num_concurrent)
    if not waiting:
        return settings.rollout
    return settings.rollout.model_copy(update={"step_timeout_s": settings.rollout.step_timeout_s + waiting})


def environment_identity(environment: EnvironmentSettings) -> dict[str, Json]:
    """The environment's settings. A file counts by what is in it, not by where it lies, and a cache not at
    all.
    """
    found: dict[str, Json] = _by_content(environment.model_dump())
    return found


def _by_content(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _by_content(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_by_content(one) for one in value]
    if not isinstance(value, Path):
        return value
    if not value.is_file():
        return None  # the folder of a cache
    with value.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
