"""The contract of an environment (:mod:`outrider.environments.base`)."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from outrider.environments.base import (
    CopyableEnvironment,
    Environment,
    StepResult,
    TaskSet,
    episode_result,
    start_episode,
    take_step,
    turn_message,
)
from outrider.errors import DataError, InvalidResult, NonFiniteResult
from outrider.testing.common import GARBAGE, find_settings, require, require_picklable
from outrider.types import Message, Task


def check_environment(
    task_set: TaskSet,
    *,
    split: str = "train",
    num_tasks: int = 2,
    texts: Sequence[str] = (),
    max_turns: int = 12,
) -> None:
    """Play the first tasks of a split with garbage, with ``texts`` and with the expert's steps; the family is
    closed in the end.

    Checked: equal tasks, prompts and episodes for equal seeds; a valid record after every step; no exception
    for what a policy may write; a copy that is independent; everything closes twice; tasks and settings go to
    other processes.
    """
    _check_task_set(task_set, split)
    tasks = list(islice(task_set.tasks(split), num_tasks))
    factory = task_set.make()
    try:
        for task in tasks:
            for script in _scripts(task_set, task, texts):
                _check_episode(factory, task, script[:max_turns])
    finally:
        factory.close()
        factory.close()
        task_set.close()
        task_set.close()


def _check_task_set(task_set: TaskSet, split: str) -> None:
    require(isinstance(task_set.name, str) and task_set.name, "name is no text")
    require(
        all(isinstance(stop, str) and stop for stop in task_set.stop),
        f"stop holds what is no text: {task_set.stop!r}",
    )
    require(isinstance(task_set.stateful, bool), f"stateful is {task_set.stateful!r}, not True or False")
    tasks = task_set.tasks(split)
    require(len(tasks) > 0, f"the split {split!r} has no task")
    require(
        list(tasks) == list(task_set.tasks(split)),
        f"the split {split!r} is another list when it is asked for again",
    )
    keys = [task.key for task in tasks]
    require(len(set(keys)) == len(keys), "a task's key occurs twice")
    others = {"train", "test"} - {split}
    for other in others:
        with suppress(DataError):  # not every family has both
            shared = set(keys) & {task.key for task in task_set.tasks(other)}
            require(not shared, f"the task {min(shared, default='')!r} is in {split!r} and in {other!r}")
    for task in tasks[:2]:
        require_picklable(f"the task {task.key!r}", task)
    if (settings := find_settings(task_set)) is not None:
        require_picklable("the settings", settings)


def _scripts(task_set: TaskSet, task: Task, texts: Sequence[str]) -> list[list[str]]:
    """Scripts to play: garbage, garbage inside what ends a turn, what was asked for, and the expert's way."""
    endings = [f"{text}{stop}" for stop in task_set.stop for text in ("", "x", "<x>")]
    closing = [stop for stop in task_set.stop if stop.startswith("</")]
    tags = [f"<{stop[2:]}{word}{stop}" for stop in closing for word in ("?", "go", "1")]
    scripts = [list(GARBAGE), endings, tags, list(texts)]
    expert = task_set.expert(task, 0)
    return [script for script in (*scripts, [step.text for step in expert or ()]) if script]


@dataclass(slots=True)
class _EpisodeRecord:
    """Record of an episode: of equal seeds and texts it must be equal."""

    prompt: Sequence[Message]
    results: list[StepResult]
    record: object


def _check_episode(factory: Callable[[Task], Environment], task: Task, script: Sequence[str]) -> None:
    first = _play(factory(task), script, seed=3)
    again = _play(factory(task), script, seed=3)
    require(first.prompt == again.prompt, f"{task.key}: another prompt with the same seed")
    for i, (result, other) in enumerate(zip(first.results, again.results, strict=False)):
        require(
            result == other,
            f"{task.key}: step {i} ({script[i][:40]!r}) gives {result!r}, and {other!r} with the same seed",
        )
    require(
        len(first.results) == len(again.results),
        f"{task.key}: an episode of another length with the same seed",
    )
    require(first.record == again.record, f"{task.key}: another record with the same seed")
    _check_copy(factory(task), task, script, first)


def _play(environment: Environment, script: Sequence[str], *, seed: int) -> _EpisodeRecord:
    try:
        try:
            prompt = start_episode(environment, seed)
        except InvalidResult as error:
            raise AssertionError(str(error)) from error
        _require_record(environment, "before the first step")
        results: list[StepResult] = []
        for text in script:
            results.append(_step(environment, text))
            if results[-1].done:
                break
        return _EpisodeRecord(prompt, results, episode_result(environment))
    finally:
        environment.close()
        environment.close()


def _step(environment: Environment, text: str) -> StepResult:
    try:
        result = take_step(environment, turn_message(environment, text))
    except (InvalidResult, NonFiniteResult) as error:
        raise AssertionError(f"step after {text[:40]!r}: {error}") from error
    except Exception as error:
        raise AssertionError(f"step raises for {text[:40]!r}: {type(error).__name__}: {error}") from error
    require(
        result.observations or result.done,
        f"no message after {text[:40]!r}, and the episode goes on",
    )
    require(result.done or not result.truncated, "truncated without done")
    _require_record(environment, f"after {text[:40]!r}")
    return result


def _require_record(environment: Environment, when: str) -> None:
    try:
        record = episode_result(environment)
    except (InvalidResult, NonFiniteResult) as error:
        raise AssertionError(f"result {when}: {error}") from error
    except Exception as error:
        raise AssertionError(f"result raises {when}: {type(error).__name__}: {error}") from error
    require(record == episode_result(environment), f"result {when} is another one when it is asked for again")


def _check_copy(environment: Environment, task: Task, script: Sequence[str], whole: _EpisodeRecord) -> None:
    """A copy in the middle goes its own way, and the original ends as if there had been none."""
    try:
        if not isinstance(environment, CopyableEnvironment) or len(whole.results) < 2:
            return
        environment.reset(3)
        middle = len(whole.results) // 2
        for text in script[:middle]:
            _step(environment, text)
        record, twin = episode_result(environment), environment.copy()
        require(episode_result(twin) == record, f"{task.key}: a copy has another record")
        _step(twin, "something else")
        require(
            episode_result(environment) == record,
            f"{task.key}: what a copy does changes the record of the original",
        )
        twin.close()
        twin.close()
        results = [_step(environment, text) for text in script[middle : len(whole.results)]]
        require(
            results == whole.results[middle:],
            f"{task.key}: the original goes another way after it was copied",
        )
        require(
            episode_result(environment) == whole.record, f"{task.key}: another record after a copy was made"
        )
    finally:
        environment.close()
