"""Contract checks of plug-ins, for tests.

For example::

    from outrider.testing import check_environment

    def test_the_contract():
        check_environment(MyWorld)
"""

import copy
import json
import math
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, cast

import numpy as np

from outrider.algorithms.base import Algorithm, GroupAdvantages, ObjectiveSettings
from outrider.engines.base import Engine, FinishReason, Generation, Request
from outrider.environments.base import (
    CopyableEnvironment,
    Env,
    Environment,
    EnvironmentSettings,
    Episode,
    EpisodeResult,
    StepResult,
    TaskSet,
    make_task_set,
    open_episode,
    settings_of,
    split_tasks,
)
from outrider.errors import DataError, EngineFault, InvalidResult, NonFiniteResult, OutriderError
from outrider.metrics import UndeclaredMetric, declare, declared_metric
from outrider.plugins.registry import find_settings, read_settings
from outrider.rollout.hooks import Hook, as_hooks
from outrider.tokens.call_formats import find_call_error
from outrider.tokens.tool_calls import CallFormat, ParsedCalls, call_id
from outrider.tools.base import SchemaTool, Tool, ToolOutput, tool_schema, trial_arguments
from outrider.tools.functions import tool_class
from outrider.trace import Leaf, Trace
from outrider.types import Json, Message, Origin, Outcome, Task, ToolCall, ToolSchema

# Unusual model outputs: empty text, half a tag, control characters, undecodable bytes, very long text.
GARBAGE: Final = (
    "", " \n", "<", "</", "<answer>", "</answer>", "<action></action>", "\x00\x1b[2J", "\ud800", "%s {} \\",
    "ß𝔘\u202e", "1" * 5000, "<action>" * 300, '{"a": [1, 2',
)  # fmt: skip


def require(condition: object, message: str) -> None:
    """Raise AssertionError, even if Python runs with ``-O``."""
    if not condition:
        raise AssertionError(message)


def require_finite(values: Mapping[str, Any] | Iterable[tuple[str, Any]], subject: str) -> None:
    """Check that every value is a finite number."""
    for name, value in dict(values).items():
        is_number = isinstance(value, int | float) and math.isfinite(value)
        require(is_number, f"{subject}: {name} is {value!r}, not a finite number")


def require_picklable(label: str, value: Any) -> None:
    """Check that a value can be pickled, because other processes get a copy."""
    require(_pickled_copy(value, label) == value, f"{label} differs after pickling")


@contextmanager
def _no_error(label: str, *, invalid: str | None = None) -> Iterator[None]:
    """Convert an exception of a plug-in to an AssertionError that begins with the label, or with ``invalid``
    if a method returned a wrong value.
    """
    try:
        yield
    except Exception as error:
        if invalid is not None and isinstance(error, InvalidResult | NonFiniteResult):
            raise AssertionError(f"{invalid}{error}") from error
        raise AssertionError(f"{label} {type(error).__name__}: {error}") from error


# Environments (:mod:`outrider.environments.base`).


def check_environment(
    environment: Environment | type[Environment] | Mapping[str, Any] | TaskSet,
    *,
    split: str = "train",
    num_tasks: int = 2,
    texts: Sequence[str] = (),
    max_turns: int = 12,
    expert_solves: bool = False,
) -> None:
    """Check an environment: play the first tasks of a split with garbage, ``texts`` and the expert's turns.

    Checks equal tasks, prompts and episodes for equal seeds; a valid record after every step; no exception
    for anything that a policy may write; independent copies; that two episodes played in turn are those
    played alone; that everything can be closed twice; and that tasks and settings can be pickled.

    Args:
        environment: the class (with its default settings), an instance with the settings to check, or the
            section ``environment`` of a recipe, for example ``{"type": "gym", "id": "FrozenLake-v1"}``.
        split: the split whose tasks are played.
        num_tasks: number of tasks.
        texts: further turns to play, for example valid actions.
        max_turns: turns per episode.
        expert_solves: whether the expert must solve every task that is played.

    Raises:
        AssertionError: with the problem that a run would encounter.
    """
    if isinstance(environment, Environment | type):
        task_set = environment.build(_settings(environment))
    elif isinstance(environment, Mapping):
        task_set = make_task_set(cast(EnvironmentSettings, read_settings("environments", environment)))
    else:
        task_set = environment
    tasks = _check_task_set(task_set, split)[:num_tasks]
    factory = task_set.make()
    played = []
    try:
        for task in tasks:
            for script in _scripts(task_set, texts):
                record = _check_episode(factory, task, script[:max_turns])
            with _no_error(f"{task.key}: the expert:"):
                expert = task_set.expert(task, 0)
            require(expert or not expert_solves, f"{task.key}: the environment has no expert")
            if expert:
                script = [step.text for step in expert]
                record = _check_episode(factory, task, script[:max_turns])
                require(
                    record.record.success or not expert_solves,
                    f"{task.key}: the expert does not solve the task",
                )
            played.append((task, script, record))
        if getattr(find_settings(task_set), "max_concurrent", None) != 1:
            _check_isolation(factory, played)
    finally:
        factory.close()
        factory.close()
        task_set.close()
        task_set.close()


def _settings(environment: Environment | type[Environment]) -> EnvironmentSettings:
    """Return the settings of an instance, or the default settings of a class."""
    cls = environment if isinstance(environment, type) else type(environment)
    name = cls.__qualname__
    require(
        issubclass(cls, Environment), f"{name} is no environment: write class {name}(outrider.Environment)"
    )
    require(
        isinstance(cls.Settings, type) and issubclass(cls.Settings, EnvironmentSettings),
        f"{name}.Settings is no subclass of outrider.EnvironmentSettings: "
        "write class Settings(outrider.EnvironmentSettings)",
    )
    if isinstance(environment, Environment):
        require(
            isinstance(environment.settings, EnvironmentSettings),
            f"the settings of the instance are {environment.settings!r}, no {name}.Settings",
        )
        return cast(EnvironmentSettings, settings_of(environment))
    try:
        return cls.Settings()
    except ValueError as error:
        raise AssertionError(
            f"{name}.Settings() has no valid defaults; check an instance, {name}({name}.Settings(...)): "
            f"{' '.join(str(error).split())}"
        ) from error


def _read_tasks(task_set: TaskSet, split: str) -> list[Task]:
    try:
        return split_tasks(task_set, split)
    except OutriderError:
        raise
    except Exception as error:
        raise AssertionError(
            f"tasks raises for the split {split!r}: {type(error).__name__}: {error}"
        ) from error


def _check_task_set(task_set: TaskSet, split: str) -> list[Task]:
    """Check the attributes of the task set and its tasks. Returns the tasks of the split."""
    require(isinstance(task_set.name, str) and task_set.name, "name is not a non-empty string")
    require(
        all(isinstance(stop, str) and stop for stop in task_set.stop),
        f"stop must contain non-empty strings: {task_set.stop!r}",
    )
    require(
        isinstance(task_set.stateful, bool), f"stateful is {task_set.stateful!r}, but must be True or False"
    )
    try:
        tasks = _read_tasks(task_set, split)
    except DataError as error:
        raise AssertionError(str(error)) from error
    require(len(tasks) > 0, f"the split {split!r} has no task")
    again = _read_tasks(task_set, split)
    require(tasks == again, f"the split {split!r} differs when its tasks are read again")
    for other in {"train", "test"} - {split}:
        with suppress(DataError):  # not every environment has both splits
            shared = {task.key for task in tasks} & {task.key for task in _read_tasks(task_set, other)}
            require(not shared, f"the task {min(shared, default='')!r} is in {split!r} and in {other!r}")
    for task in tasks[:2]:
        require_picklable(f"the task {task.key!r}", task)
    if (settings := find_settings(task_set)) is not None:
        require_picklable("the settings", settings)
    return tasks


def _scripts(task_set: TaskSet, texts: Sequence[str]) -> list[list[str]]:
    """Return turns to play: garbage, garbage with an end-of-turn tag, and the caller's ``texts``."""
    endings = [f"{text}{stop}" for stop in task_set.stop for text in ("", "x", "<x>")]
    closing = [stop for stop in task_set.stop if stop.startswith("</")]
    tags = [f"<{stop[2:]}{word}{stop}" for stop in closing for word in ("?", "go", "1")]
    return [script for script in (list(GARBAGE), endings, tags, list(texts)) if script]


@dataclass(slots=True)
class _EpisodeRecord:
    """Record of an episode, which must be equal for equal seeds and texts."""

    prompt: Sequence[Message]
    results: list[StepResult]
    record: EpisodeResult


def _check_episode(factory: Callable[[Task], Env], task: Task, script: Sequence[str]) -> _EpisodeRecord:
    with _no_error(f"{task.key}: creating an episode raises"):
        environment = factory(task)
    first = _play(environment, script, seed=3)
    again = _play(factory(task), script, seed=3)
    require(first.prompt == again.prompt, f"{task.key}: the prompt differs for the same seed")
    for i, (result, other) in enumerate(zip(first.results, again.results, strict=False)):
        require(
            result == other,
            f"{task.key}: step {i} ({script[i][:40]!r}) returns {result!r}, then {other!r} for the same seed",
        )
    require(
        len(first.results) == len(again.results),
        f"{task.key}: the length of the episode differs for the same seed",
    )
    require(first.record == again.record, f"{task.key}: the result differs for the same seed")
    _check_copy(factory(task), task, script, first)
    return first


def _play(environment: Env, script: Sequence[str], *, seed: int) -> _EpisodeRecord:
    try:
        episode = open_episode(environment)
        with _no_error("reset raises", invalid=""):
            episode.start(seed)
        _require_record(episode, "before the first step")
        for text in script:
            if _step(episode, text).done:
                break
        return _EpisodeRecord(episode.prompt, episode.results, episode.result())
    finally:
        environment.close()
        environment.close()


def _step(episode: Episode, text: str) -> StepResult:
    with _no_error(f"step raises for {text[:40]!r}:", invalid=f"step after {text[:40]!r}: "):
        result = episode.act(text)
    require(
        result.observations or result.done,
        f"step after {text[:40]!r} returns no message and does not end the episode",
    )
    require(result.done or not result.truncated, "step returns truncated=True without done=True")
    _require_record(episode, f"after {text[:40]!r}")
    return result


def _require_record(episode: Episode, when: str) -> None:
    with _no_error(f"result raises {when}:", invalid=f"result {when}: "):
        record = episode.result()
    require(record == episode.result(), f"result {when} differs when it is called again")


def _check_isolation(
    factory: Callable[[Task], Env], played: Sequence[tuple[Task, Sequence[str], _EpisodeRecord]]
) -> None:
    """Check that episodes that are played in turn, step by step, are those that were played alone."""
    environments = [factory(task) for task, _, _ in played]
    try:
        episodes = [open_episode(environment) for environment in environments]
        for episode in episodes:
            episode.start(3)
        for turn in range(max(len(alone.results) for _, _, alone in played)):
            for episode, (_, script, alone) in zip(episodes, played, strict=True):
                if turn < len(alone.results):
                    _step(episode, script[turn])
        for episode, (task, _, alone) in zip(episodes, played, strict=True):
            together = _EpisodeRecord(episode.prompt, episode.results, episode.result())
            require(together == alone, f"{task.key}: the episode differs while another one is played")
    finally:
        for environment in environments:
            environment.close()


def _check_copy(environment: Env, task: Task, script: Sequence[str], whole: _EpisodeRecord) -> None:
    """Check that a copy in mid-episode is independent and does not affect the original."""
    with closing(environment):
        if not isinstance(environment, CopyableEnvironment) or len(whole.results) < 2:
            return
        episode = open_episode(environment)
        episode.start(3)
        middle = len(whole.results) // 2
        for text in script[:middle]:
            _step(episode, text)
        record = episode.result()
        try:
            copied = environment.copy()
        except Exception as error:
            raise AssertionError(
                f"{task.key}: copy raises {type(error).__name__}: {error}; "
                "define copy() or set can_copy = False"
            ) from error
        twin = open_episode(copied)
        require(twin.result() == record, f"{task.key}: the result of a copy differs")
        _step(twin, "something else")
        require(
            episode.result() == record, f"{task.key}: a step of a copy changes the result of the original"
        )
        twin.environment.close()
        twin.environment.close()
        results = [_step(episode, text) for text in script[middle : len(whole.results)]]
        require(
            results == whole.results[middle:],
            f"{task.key}: the original returns other results after it was copied",
        )
        require(episode.result() == whole.record, f"{task.key}: the result differs after a copy was made")


# Tools (:mod:`outrider.tools.base`).


_Input: TypeAlias = str | Mapping[str, Json]
"""Input of a call by tag (text) or of a native call (arguments)."""


def check_tool(
    function_or_tool: Tool | Callable[..., Any],
    *,
    texts: Sequence[str] = (),
    num_threads: int = 4,
    is_deterministic: bool = True,
) -> None:
    """Check a tool: call it with garbage, ``texts`` and arguments that its schema allows, also from several
    threads.

    Checks that its name is a valid tag, that it returns text for any input, that some call of a tool with a
    schema succeeds, that equal inputs return equal text, that it can be closed twice, and that its settings
    can be pickled.

    Args:
        function_or_tool: a tool, or a function with type hints and a docstring.
        texts: further texts to call it with.
        num_threads: number of threads.
        is_deterministic: whether equal inputs must return equal text.

    Raises:
        AssertionError: with the problem that a run would encounter.
    """
    is_tool = hasattr(function_or_tool, "run_text")
    tool = cast(Tool, function_or_tool) if is_tool else tool_class(cast(Any, function_or_tool))()
    is_tag = isinstance(tool.name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", tool.name)
    require(is_tag, f"the name {tool.name!r} is not a tag: use lower-case letters, digits and _")
    usage = getattr(type(tool), "usage", "")
    require(not usage or f"<{tool.name}>" in usage, f"usage does not contain <{tool.name}>: {usage!r}")
    if (settings := find_settings(tool)) is not None:
        require_picklable("the settings", settings)
    # The empty text is excluded, because runs never pass an empty call to a tool.
    inputs: list[_Input] = [text for text in (*GARBAGE, *texts) if text.strip()]
    inputs += trial_arguments(tool_schema(tool)) if isinstance(tool, SchemaTool) else []
    try:
        alone = [_call_tool(tool, item) for item in inputs]
        succeeds = not isinstance(tool, SchemaTool) or not all(item.failed for item in alone)
        require(
            succeeds,
            f"no call succeeds (pass a valid one as texts=): {inputs[-1]!r} returns {alone[-1].text!r}",
        )
        if not is_deterministic:
            return
        with ThreadPoolExecutor(num_threads) as pool:
            together = list(pool.map(lambda item: _call_tool(tool, item), inputs))
        for call_input, item, other in zip(inputs, alone, together, strict=True):
            require(
                item == other,
                f"{_shorten(call_input)} returns {item!r}, but {other!r} in parallel with other calls",
            )
    finally:
        tool.close()
        tool.close()


def _call_tool(tool: Tool, call_input: _Input) -> ToolOutput:
    method = "run_text" if isinstance(call_input, str) else "run_call"
    with _no_error(f"{method} raises for {_shorten(call_input)}:"):
        if isinstance(call_input, str):
            output = tool.run_text(call_input)
        else:
            assert isinstance(tool, SchemaTool)  # arguments are only generated for these
            output = tool.run_call(call_input)
    is_text = isinstance(output, ToolOutput) and isinstance(output.text, str)
    require(is_text, f"{method} returns {output!r} for {_shorten(call_input)}, not a ToolOutput with text")
    return output


def _shorten(call_input: _Input) -> str:
    return repr(call_input[:40] if isinstance(call_input, str) else call_input)


# Engines (:mod:`outrider.engines.base`).


def check_engine(
    engine: Engine, *, text: str = "Once upon a time", max_tokens: int = 6, is_deterministic: bool = True
) -> None:
    """Check an engine: sample a few continuations of ``text``.

    Checks one result per request, in order; one finite log-prob and entropy per token; limits; equal tokens
    for equal seeds, also after caches were dropped; an increasing weight version; that a context that is too
    long raises EngineFault and no other error; and that unknown cache keys can be released.
    """
    ids = tuple(engine.tokenizer.encode(text, add_special_tokens=False))
    require(ids, f"the tokenizer has no token for {text!r}")
    requests = [
        Request(
            request_id=f"check-{i}", token_ids=ids, max_tokens=max_tokens, seed=i // 2, cache_key=f"key-{i}"
        )
        for i in range(4)
    ]
    requests.append(Request(request_id="greedy", token_ids=ids, max_tokens=1, seed=9, temperature=0.0))
    first = _generate(engine, requests)
    engine.release([request.cache_key for request in requests if request.cache_key is not None])
    engine.release(["unknown key"])
    engine.free_cache()
    engine.free_cache()
    again = _generate(engine, requests)
    if is_deterministic:
        _require_same(first, again, "after the caches were dropped")
    version = engine.weight_version
    engine.load(engine.weight_version + 1)
    require(engine.weight_version == version + 1, "load does not set the given weight version")
    later = _generate(engine, requests)
    if is_deterministic:
        _require_same(first, later, "after the same weights were loaded")
    _check_garbage(engine, requests[0])


def _generate(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    generations = engine.generate(requests)
    names = [item.request_id for item in generations]
    require(
        names == [item.request_id for item in requests],
        f"results {names} are not in the order of the requests",
    )
    for request, item in zip(requests, generations, strict=True):
        num = len(item.token_ids)
        require(
            0 < num <= request.max_tokens,
            f"{item.request_id}: {num} tokens, but 1 to {request.max_tokens} were requested",
        )
        require(
            len(item.logprobs) == len(item.entropies) == num,
            f"{item.request_id}: needs one log-prob and one entropy per token",
        )
        require_finite({f"log-prob {i}": value for i, value in enumerate(item.logprobs)}, item.request_id)
        require_finite({f"entropy {i}": value for i, value in enumerate(item.entropies)}, item.request_id)
        require(max(item.logprobs) <= 1e-6, f"{item.request_id}: a log-prob above 0")
        require(min(item.entropies) >= -1e-6, f"{item.request_id}: an entropy below 0")
        require(
            isinstance(item.finish_reason, FinishReason),
            f"{item.request_id}: finish_reason {item.finish_reason!r}",
        )
        require(
            item.weight_version == engine.weight_version,
            f"{item.request_id}: the weight version differs from that of the engine",
        )
    require(engine.generate([]) == [], "a result without a request")
    return generations


def _require_same(expected: Sequence[Generation], actual: Sequence[Generation], when: str) -> None:
    for first, second in zip(expected, actual, strict=True):
        same = first.token_ids == second.token_ids and first.logprobs == second.logprobs
        require(same, f"{first.request_id}: tokens or log-probs differ for the same seed {when}")


def _check_garbage(engine: Engine, request: Request) -> None:
    """Check that a request returns a result or raises an EngineFault."""
    longest = replace(
        request, token_ids=request.token_ids * (engine.context_length // len(request.token_ids) + 1)
    )
    try:
        engine.generate([longest])
    except EngineFault:
        pass
    except Exception as error:
        raise AssertionError(
            f"a context that is too long raises {type(error).__name__} instead of EngineFault: {error}"
        ) from error
    _generate(engine, [request])


# Hooks with copies in other processes (:class:`outrider.rollout.hooks.Hook`).


def check_copies(hooks: Sequence[Hook], copies: Sequence[Hook], groups: Iterable[Trace]) -> None:
    """Check hooks against ``copies`` that are built from the same settings and restored from snapshots.

    The hooks observe ``groups``. For every portable hook, checks that snapshots and gathered data can be
    pickled; that a restored copy has the same snapshot, also if restored twice; and that ``absorb`` changes
    no memory, because only ``after_group`` may.
    """
    require(len(hooks) == len(copies), "the same settings create different hooks")
    hooks, copies = as_hooks(hooks), as_hooks(copies)
    for trace in groups:
        for leaf in trace.leaves.values():
            leaf.reflection = f"tip {leaf.rollout} of {trace.task.key}"
        for hook in hooks:
            hook.after_group(trace)
    for hook, hook_copy in zip(hooks, copies, strict=True):
        if not hook.is_portable:
            continue
        name = type(hook).__name__
        require(hook_copy.is_portable, f"{name} is portable, its copy is not")
        snapshot = _pickled_copy(hook.snapshot(), f"{name}.snapshot()")
        for _ in range(2):
            hook_copy.restore(_pickled_copy(snapshot, f"{name}.snapshot()"))
            require(equal(hook_copy.snapshot(), snapshot), f"{name}: a restored copy has another snapshot")
        before = _pickled_copy(hook.gathered(), f"{name}.gathered()")
        hook.absorb(_pickled_copy(hook_copy.gathered(), f"{name}.gathered()"))
        require(
            equal(hook.snapshot(), snapshot), f"{name}.absorb changes the snapshot: change it in after_group"
        )
        require(equal(hook.gathered(), before), f"{name}: a copy without rollouts has gathered data")


def _pickled_copy(value: Any, label: str) -> Any:
    """Return the value after pickling, as another process receives it."""
    try:
        return pickle.loads(pickle.dumps(value))
    except Exception as error:
        raise AssertionError(f"{label} cannot be pickled for another process: {error}") from error


def equal(left: Any, right: Any) -> bool:
    """Return whether plain data with arrays is bit-identical."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return np.asarray(left).dtype == np.asarray(right).dtype and np.array_equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


# Forms of native tool calls (:mod:`outrider.tokens.tool_calls`).


_TYPES: Final = ("string", "integer", "number", "boolean", "array", "object")
_TOOL: Final[ToolSchema] = {
    "name": "look_up",
    "description": "Look something up.",
    "parameters": {
        "type": "object",
        "properties": {f"a_{kind}": {"type": kind} for kind in _TYPES},
        "required": [],
    },
}
_PLAIN: Final[ToolSchema] = {
    "name": "clock", "description": "Tell the time.", "parameters": {"type": "object", "properties": {}}
}  # fmt: skip
_ARGUMENTS: Final[Sequence[Mapping[str, Any]]] = (
    {},
    {"a_string": "Rome"},
    {"a_string": 'two\nlines, "quoted" and \\ ß 𝔘 {"a": [1]}'},
    {"a_string": "1"},
    {"a_integer": -3, "a_number": 0.5, "a_boolean": True},
    {"a_array": [1, "b", None, [2]], "a_object": {"key": {"inner": "ü"}}},
)


def check_call_format(form: CallFormat) -> None:
    """Check a call format: write single and multiple calls and parse them again; parse garbage and truncated
    text.

    Checks that markers are strings; that parsing raises no error for any text; that calls with arguments of
    all schema types survive a round trip; that truncated text is not parsed as a call with other arguments;
    and that the description names the tools.
    """
    require(all(isinstance(marker, str) and marker for marker in form.markers), f"markers: {form.markers!r}")
    tools = (_TOOL, _PLAIN)
    for text in GARBAGE:
        parsed = _read(form, text, tools)
        require(not parsed.calls, f"{text[:40]!r} is parsed as calls: {parsed.calls!r}")
    single = [[_call(0, "look_up", arguments)] for arguments in _ARGUMENTS]
    several = [_call(0, "look_up", _ARGUMENTS[1]), _call(1, "clock", {}), _call(2, "look_up", _ARGUMENTS[5])]
    for calls in (*single, several):
        _require_read_back(form, calls, tools)
    description = form.describe(tools)
    for tool in tools:
        require(
            str(tool["name"]) in description, f"describe does not name {tool['name']}: {description[:200]!r}"
        )


def _call(number: int, name: str, arguments: Mapping[str, Any]) -> ToolCall:
    return ToolCall(name=name, arguments=dict(arguments), call_id=call_id(number))


def _read(form: CallFormat, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
    with _no_error(f"read raises for {text[:60]!r}:"):
        return form.read(text, tools)


def _require_read_back(form: CallFormat, calls: Sequence[ToolCall], tools: Sequence[ToolSchema]) -> None:
    text = form.write(calls)
    parsed = _read(form, text, tools)
    require(
        parsed.calls == tuple(calls) and not parsed.problems and not parsed.content.strip(),
        f"{text[:200]!r} is parsed as {parsed!r}",
    )
    for end in range(0, len(text), 7):
        whole = _read(form, text[:end], tools).calls
        good = [call for call in whole if not find_call_error(call, tools)]
        require(
            good == list(calls[: len(good)]), f"the truncated text {text[:end][-80:]!r} is parsed as {good!r}"
        )


# Algorithms (:mod:`outrider.algorithms.base`).


# Returns of one group each: with spread, without, with faults, only faults, one remaining rollout.
_RETURNS: tuple[tuple[float | None, ...], ...] = (
    (0.0, 1.0),
    (1.0, 1.0),
    (None, 0.5, 1.0),
    (None,),
    (2.0, None, None),
)


def check_algorithm(
    algorithm: Algorithm | type[Algorithm] | Callable[[], Algorithm],
    *,
    num_steps: int = 2,
    without_effect: Sequence[str] = (),
) -> None:
    """Check an algorithm on made-up groups of a few steps, with faults and without spread.

    Checks modes that depend on step and group only; advantages that are finite, reproducible and only on
    tokens that the update may train on; a ``has_signal`` that agrees with them; no advantage for a rollout
    that ended by a fault; declared metrics; a state that survives a checkpoint; hooks whose copies in other
    processes act alike (:class:`outrider.rollout.hooks.Hook`). If the algorithm overrides nothing but
    advantages, changing any number among its own settings must change some advantage.

    Args:
        algorithm: the class (with its default settings), a new instance, or a function that returns one.
        num_steps: number of steps.
        without_effect: names of settings that may change no advantage.

    Raises:
        AssertionError: with the problem that a run would encounter.
    """
    make = _maker(algorithm)
    first, other = make(), make()
    declare(getattr(first, "metrics", ()))
    require(
        isinstance(first, Algorithm),
        f"{type(first).__name__} is not a subclass of outrider.Algorithm",
    )
    require(isinstance(first.objective, ObjectiveSettings), "objective is not an ObjectiveSettings")
    require(isinstance(first.hooks, tuple), "hooks is not a tuple")
    require_picklable("the settings", first.objective)
    for step in range(num_steps):
        groups, same = _build_step(first, step), _build_step(other, step)
        results = _assign_advantages(first, groups)
        _assign_advantages(other, same)
        for trace, result in zip(groups, results, strict=True):
            _check_advantages(trace, result)
        require(
            _assigned_values(groups) == _assigned_values(same),
            f"step {step}: advantages differ for equal groups",
        )
    _check_effects(first, without_effect)
    if first.remembers:
        _check_memory(first, make(), num_steps)
    check_copies(first.hooks, make().hooks, _build_step(first, num_steps))


def _maker(algorithm: Any) -> Callable[[], Algorithm]:
    if isinstance(algorithm, type):
        return lambda: cast(Algorithm, algorithm(algorithm.Settings()))  # type: ignore[attr-defined]
    if hasattr(algorithm, "assign_advantages"):
        return lambda: copy.deepcopy(algorithm)
    return algorithm  # type: ignore[no-any-return]


def _build_step(algorithm: Algorithm, step: int) -> list[Trace]:
    groups = []
    for group, returns in enumerate(_RETURNS):
        modes = tuple(algorithm.modes_of(step, group))
        require(
            modes and all(isinstance(mode, str) for mode in modes),
            f"modes_of({step}, {group}) returns {modes!r}",
        )
        require(
            modes == tuple(algorithm.modes_of(step, group)),
            f"modes_of({step}, {group}) returns other modes when it is called again",
        )
        values = [returns[i % len(returns)] for i in range(len(modes))]
        groups.append(build_group(values, key=f"task-{group}", modes=modes))
    return groups


def build_group(
    returns: Sequence[float | None], *, key: str, modes: Sequence[str], num_turns: Sequence[int] = ()
) -> Trace:
    """Build a group of rollouts with these returns; None means that a fault ended the rollout. ``num_turns``
    is the number of turns of each rollout (default: two).
    """
    trace = Trace(task=Task(key=key, question="?"), modes=modes)
    root = trace.append(
        parent=None,
        origin=Origin.PROMPT,
        token_ids=(1, 2),
        message=Message(role="user", content=f"question {key}"),
    )
    for rollout, value in enumerate(returns):
        last = root
        for turn in range(num_turns[rollout] if num_turns else 2):
            ids = tuple(5 + (rollout + turn + i) % 4 for i in range(2 + rollout % 3))
            message = Message(role="assistant", content=f"turn {turn} of {rollout}")
            logprobs = tuple(-0.5 - 0.1 * i for i in range(len(ids)))
            last = trace.append(
                parent=last.node_id, origin=Origin.POLICY, token_ids=ids, message=message, logprobs=logprobs,
                entropies=tuple(-2 * logprob for logprob in logprobs),
            )  # fmt: skip
            seen = Message(role="user", content=f"state {turn} of {key}")
            last = trace.append(parent=last.node_id, origin=Origin.ENVIRONMENT, token_ids=(3,), message=seen)
        trace.finish(
            Leaf(
                node_id=None if value is None else last.node_id,
                rollout=rollout,
                outcome=Outcome.TOOL_FAULT if value is None else Outcome.FINISHED,
                episode_return=value,
                success=value == 1.0,
            )
        )
    return trace


def _assign_advantages(algorithm: Algorithm, groups: Sequence[Trace]) -> list[GroupAdvantages]:
    with _no_error("advantages raises"):
        results = algorithm.assign_step_advantages(groups)
    require(len(results) == len(groups), f"advantages of {len(groups)} groups has {len(results)} entries")
    return results


def _check_advantages(trace: Trace, result: GroupAdvantages) -> None:
    key = trace.task.key
    values = np.asarray(result.advantages.values)
    require(
        len(values) == len(trace.leaves), f"{key}: {len(values)} advantages for {len(trace.leaves)} rollouts"
    )
    require(bool(np.isfinite(values).all()), f"{key}: an advantage is not finite: {values.tolist()}")
    _check_flag(trace, result)
    for leaf, path in trace.rollouts():
        if leaf.episode_return is None:
            require(
                leaf.advantage is None,
                f"{key}: rollout {leaf.rollout}, which a fault ended, has an advantage",
            )
        for node in path:
            written = node.credit is not None or node.shares is not None
            require(
                node.receives_advantages or not written,
                f"{key}: advantages on a node that the policy did not write",
            )
            if node.credit is not None:
                require(len(node.credit) == len(node.token_ids), f"{key}: needs one advantage per token")
                require_finite({str(i): value for i, value in enumerate(node.credit)}, f"{key}: credit")
    for name, measured in result.measurements.items():
        try:
            declared_metric(name)
        except UndeclaredMetric as error:
            raise AssertionError(f"{error}: declare it in the class's metrics") from error
        require_finite({f"{name}[{i}]": float(value) for i, value in enumerate(measured)}, key)


def _check_flag(trace: Trace, result: GroupAdvantages) -> None:
    """Check that ``has_signal`` agrees with the advantages; metrics and dynamic sampling depend on it."""
    key, advantages = trace.task.key, result.advantages
    values = np.asarray(advantages.values)
    require(
        advantages.has_signal or not values.any(),
        f"{key}: advantages are {values.tolist()}, but has_signal is False (reason {advantages.reason!r}): "
        "outrider.algorithms.base.with_values sets both",
    )
    has_advantages = any(
        any(node.credit or ()) or any(any(share.credit) for share in (node.shares or {}).values())
        for node in trace.nodes
    )
    require(
        not advantages.has_signal or values.any() or has_advantages,
        f"{key}: every advantage is 0, but has_signal is True",
    )


_OTHER_PARTS: Final = ("modes_of", "choose_tasks", "prepare", "augment", "token_loss", "measure")
_FACTORS: Final = (0.0, 0.5, 2.0, 10.0)


def _check_effects(algorithm: Any, without_effect: Sequence[str]) -> None:
    """Check that each number among the settings that a class adds changes some advantage.

    Skipped for classes in which a setting can have another effect, or that need more than settings to build.
    """
    settings = getattr(algorithm, "settings", None)
    if not isinstance(settings, ObjectiveSettings) or algorithm.hooks:
        return
    if any(getattr(type(algorithm), name) is not getattr(Algorithm, name) for name in _OTHER_PARTS):
        return
    if type(settings).token_loss is not ObjectiveSettings.token_loss:
        return
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        is_own = name not in ObjectiveSettings.model_fields and name not in without_effect
        if not is_own or isinstance(value, bool) or not isinstance(value, float):
            continue
        variants = _setting_variants(type(settings), settings, name, value)
        try:
            known, effects = (
                _measure_effects(type(algorithm)(settings)),
                [_measure_effects(type(algorithm)(other)) for other in variants],
            )
        except Exception:  # the class needs more than its settings
            return
        require(
            not effects or any(other != known for other in effects),
            f"no value of the setting {name} changes an advantage (pass check_algorithm(..., "
            f"without_effect=[{name!r}]) if that is intended)",
        )


def _setting_variants(kind: type[Any], settings: Any, name: str, value: float) -> list[Any]:
    """Return the settings with other values of one number, as far as they are valid."""
    variants = []
    for other in {*(value * factor for factor in _FACTORS), 0.0, 1.0, 0.1, 100.0} - {value}:
        with suppress(ValueError):
            variants.append(kind.model_validate({**settings.model_dump(), name: other}))
    return variants


def _measure_effects(algorithm: Any) -> list[Any]:
    """Return the assigned values for groups that differ in returns, turns, tokens and step rewards."""
    effects: list[Any] = []
    for step in range(4):
        modes = tuple(algorithm.modes_of(step, 0))
        returns = [((3 * rollout + 2 * step) % 5) / 4 - 0.25 * (step == 2) for rollout in range(len(modes))]
        turns = [1 + (rollout + step) % 3 for rollout in range(len(modes))]
        varied = build_group(returns, key="effects", modes=modes, num_turns=turns)
        equal = build_group([step / 4] * len(modes), key="equal", modes=modes, num_turns=turns)
        groups = [varied, equal]
        for number, node in enumerate(node for trace in groups for node in trace.nodes if node.trainable):
            node.reward = (number % 3) / 4
            node.metadata |= {"invalid": number % 2 == 0, "num_tool_calls": number % 3, "tools": []}
        _assign_advantages(algorithm, groups)
        effects.append(_rounded(_assigned_values(groups)))
    return effects


def _rounded(value: Any) -> Any:
    """Round numbers to nine decimals, so that rounding differences do not count as an effect."""
    if isinstance(value, float):
        return round(value, 9) + 0.0
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _assigned_values(groups: Sequence[Trace]) -> list[Any]:
    return [
        (leaf.advantage, [(node.credit, node.ratio_scale) for node in path])
        for trace in groups
        for leaf, path in trace.rollouts()
    ]


def _check_memory(algorithm: Any, fresh: Any, num_steps: int) -> None:
    """Check that the JSON and arrays of a checkpoint restore all state."""
    state, arrays = algorithm.state()
    require(
        all(isinstance(value, np.ndarray) for value in arrays.values()),
        "state: all values of arrays must be numpy arrays",
    )
    try:
        plain = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"state cannot be written as JSON: {error}") from error
    fresh.restore(plain, {name: value.copy() for name, value in arrays.items()})
    groups, same = _build_step(algorithm, num_steps), _build_step(fresh, num_steps)
    _assign_advantages(algorithm, groups)
    _assign_advantages(fresh, same)
    require(_assigned_values(groups) == _assigned_values(same), "advantages differ after state and restore")
