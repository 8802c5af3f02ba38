"""From settings to a panel that can be played: tasks, an environment for each, limits, and what identifies
all of it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.environments.base import EnvironmentFactory, EnvironmentSettings, TaskSet
from outrider.environments.families import make_task_set, split_tasks
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.environments.tool_qa.judge import JudgeSettings
from outrider.environments.tool_qa.single_turn import QuestionFactory
from outrider.errors import ConfigError
from outrider.evals.benchmark.extraction import Kind, Scorer, find_variant
from outrider.evals.benchmark.settings import EvalTasksSettings, environment_names, is_environment
from outrider.evals.benchmark.task_sets import Benchmark, EvalTasks, load_benchmark, prompt_messages
from outrider.plugins.record import plugin_digests
from outrider.rollout.limits import Limits
from outrider.types import Json, Message, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSetup:
    """``scorer`` is None where the environment's own record is the score. ``tools`` are the tag names of the
    tools that questions are asked with. ``identity`` is all that results depend on but for who plays.
    """

    eval_tasks: EvalTasks
    factory: EnvironmentFactory
    stop: tuple[str, ...]
    limits: Limits
    scorer: Scorer | None
    tools: tuple[str, ...]
    identity: Mapping[str, Json]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """In the panel's order."""
        return self.eval_tasks.tasks

    @property
    def kind(self) -> Kind:
        """Of the questions."""
        return self.eval_tasks.benchmark.kind


def judge_identity(judge: JudgeSettings) -> dict[str, Json]:
    """All that a verdict depends on; where the server stands is not among it."""
    values: dict[str, Json] = judge.model_dump(mode="json", exclude={"endpoint"})
    return {**values, "model": judge.endpoint.model, "seed": judge.endpoint.seed}


def open_eval_tasks(settings: EvalTasksSettings) -> EvalSetup:
    """Load tasks and tools; close ``factory`` in the end.

    Raises ConfigError, also for tasks that are not the pinned panel, DataError and ToolUnavailable.
    """
    task_set = None if settings.environment is None else make_task_set(settings.environment)
    eval_tasks = load_tasks(settings, task_set)
    scorer = choose_scorer(eval_tasks.benchmark, settings)
    identity: dict[str, Json] = {
        "tasks": eval_tasks.benchmark.name, "panel_hash": eval_tasks.panel_hash, "rules": settings.rules,
        "metric": scorer, "judge": None if settings.judge is None else judge_identity(settings.judge),
        "temperature": settings.temperature, "rollout": settings.rollout.model_dump(mode="json"),
        "seed": settings.seed, "environment": None, "instruction": None,
    }  # fmt: skip
    if task_set is None or settings.environment is None or settings.tools == "off":
        prompt = partial(_prompt, eval_tasks.benchmark, settings)
        identity["instruction"] = [message.content for message in prompt(Task(key="", question=""))]
        factory = QuestionFactory(prompt=prompt, extract=find_variant(settings.rules).extract)
        return EvalSetup(
            eval_tasks=eval_tasks,
            factory=factory,
            stop=(),
            limits=settings.rollout,
            scorer=scorer,
            tools=(),
            identity=identity,
        )
    identity["environment"] = environment_identity(settings.environment) | dict(plugin_digests(settings))
    return EvalSetup(
        eval_tasks=eval_tasks, factory=task_set.make(), stop=task_set.stop, limits=_limits(settings), scorer=scorer,
        tools=settings.environment.tool_names(),
        identity=identity,
    )  # fmt: skip


def load_tasks(settings: EvalTasksSettings, task_set: TaskSet | None) -> EvalTasks:
    """The tasks, without what they are played with. Raises ConfigError and DataError."""
    eval_tasks = (
        _load_environment_tasks(settings, task_set)
        if is_environment(settings.tasks)
        else _load_questions(settings)
    )
    if settings.panel not in (None, eval_tasks.panel_hash):
        raise ConfigError(
            f"panel is {settings.panel}, and these {len(eval_tasks.tasks)} tasks are {eval_tasks.panel_hash}"
        )
    return eval_tasks


def _load_questions(settings: EvalTasksSettings) -> EvalTasks:
    """A task set, or a file of questions."""
    return load_benchmark(settings.tasks, limit=settings.limit, others=environment_names())


def _load_environment_tasks(settings: EvalTasksSettings, task_set: TaskSet | None) -> EvalTasks:
    """An environment's tasks of one split."""
    assert task_set is not None  # the settings see to it
    tasks = tuple(split_tasks(task_set, settings.split)[: settings.limit])
    benchmark = Benchmark(name=settings.tasks, kind="qa", scorer="em", columns=())
    return EvalTasks(benchmark=benchmark, tasks=tasks, panel_hash=hash_tasks(tasks))


def choose_scorer(benchmark: Benchmark, settings: EvalTasksSettings) -> Scorer | None:
    """None where the environment's own record is the score. Raises ConfigError for a metric that these tasks
    cannot have.
    """
    if settings.is_played:
        return None
    scorer = settings.metric or ("judge" if settings.judge is not None else benchmark.scorer)
    if scorer == "judge" and settings.judge is None:
        raise ConfigError(
            f"{benchmark.name} is graded by a judge: give its endpoint "
            "(--judge URL), or another metric (metric=em)"
        )
    if scorer == "math" and benchmark.kind != "math":
        raise ConfigError(
            f"{benchmark.name} is no task set of mathematics; for a file of problems give math500=FILE"
        )
    return scorer


def _prompt(benchmark: Benchmark, settings: EvalTasksSettings, task: Task) -> tuple[Message, ...]:
    instruction, question = prompt_messages(benchmark, task)
    if settings.instruction == "system":
        return (instruction, question)
    return (replace(question, content=f"{instruction.content}\n\n{question.content}"),)


def _limits(settings: EvalTasksSettings) -> Limits:
    """A step that may wait for others' Python calls has that much longer before it is a fault."""
    wait_s = 0.0 if settings.environment is None else settings.environment.waiting_s(settings.num_concurrent)
    if not wait_s:
        return settings.rollout
    return settings.rollout.model_copy(update={"step_timeout_s": settings.rollout.step_timeout_s + wait_s})


def environment_identity(environment: EnvironmentSettings) -> dict[str, Json]:
    """The environment's settings. A file counts by what is in it, not by where it lies, and a cache not at
    all.
    """
    identity: dict[str, Json] = _hash_files(environment.model_dump())
    return identity


def _hash_files(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _hash_files(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_hash_files(item) for item in value]
    if not isinstance(value, Path):
        return value
    if not value.is_file():
        return None  # the folder of a cache
    with value.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
