"""Questions that a policy answers with tools: settings, tags, native calls, episodes."""

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeAlias, cast

from pydantic import Field, model_validator

from outrider.config import Settings
from outrider.environments.base import EnvironmentSettings, EpisodeResult, StepResult
from outrider.environments.grading.answers import last_boxed
from outrider.environments.tool_qa.datasets import DatasetConfig, load_tasks
from outrider.environments.tool_qa.rewards import (
    ANSWER,
    Answer,
    Call,
    Judged,
    Malformed,
    NoAction,
    RewardConfig,
    Score,
    Turn,
    final_answer,
    make_reward_judge,
    neutralise,
    parse_action,
    render_result,
    score_answer,
    score_turns,
    stop_strings,
)
from outrider.errors import ConfigError, DataError
from outrider.plugins.registry import Entry, build_by_name, load_settings_class, resolve
from outrider.tokens.call_formats import ProtocolName, describe_unwritable
from outrider.tokens.tool_calls import call_id, without_thoughts
from outrider.tools.base import CallBudget, Tool, ToolContext, ToolGroup, ToolOutput, Toolset, ToolSettings
from outrider.tools.python.tool import PythonToolConfig
from outrider.tools.search import SearchConfig
from outrider.types import Message, Step, Task, ToolCall, ToolSchema

# Episodes with tools, called by tags or natively.


# What episodes with tools have in common, whatever protocol their calls are written in: limits and the
# record.


OVER_LIMIT = "No tool calls are left. Give the answer now."
REPEATED = "This was asked before. Ask something else or answer."


Judge: TypeAlias = Callable[[Task, str], float | None]
"""Correctness of an answer to a task, as :data:`~outrider.environments.tool_qa.rewards.Judged`."""


class EpisodeConfig(EnvironmentSettings):
    """Limits and reward of a tool-reasoning episode. ``has_verifier``: whether the tasks bring their own."""

    has_verifier: ClassVar[bool] = False
    reports_metrics: ClassVar[bool] = False  # calls, refusals and rewards have metrics of their own

    max_calls: int = Field(default=3, ge=0)
    """Tool calls that an episode may execute, all tools together. The next one is refused once, with the
    request to answer; one more ends the episode as invalid.
    """
    max_batch_calls: int | None = Field(default=None, ge=0)
    """Tool calls that all episodes of one training step may execute together; once they are spent, further
    ones are refused as above. Evaluations and experts are not limited.
    """
    max_invalid: int = Field(default=3, ge=1)
    """Unreadable turns (and refused repetitions) after which an episode ends as invalid."""
    repeated: Literal["answer", "refuse"] = "answer"
    """Reply to a call that repeats an earlier one of the episode; either way it is counted."""
    reward: RewardConfig = RewardConfig()

    @model_validator(mode="after")
    def _verifiable(self) -> "EpisodeConfig":
        if self.reward.answer == "verifier" and not self.has_verifier:
            raise ValueError('reward.answer = "verifier": these tasks have no verifier of their own')
        return self

    @property
    def calls_tools(self) -> bool:
        """They are there to be called."""
        return True


class ToolEpisode(ABC):
    """Plays one task. Tools are shared with other episodes and not closed here."""

    def __init__(
        self,
        *,
        task: Task,
        tools: Toolset,
        config: EpisodeConfig,
        system_prompt: str,
        budget: CallBudget | None = None,
        judge: Judge | None = None,
    ) -> None:
        self._judge = judge
        self._budget = budget or CallBudget(None)
        self._task = task
        self._tools = tools
        self._config = config
        self._system_prompt = system_prompt
        self._start()

    def _start(self) -> None:
        self._calls: Counter[tuple[str, str]] = Counter()
        self._num_calls: Counter[str] = Counter()
        self._num_failed = 0
        self._num_invalid = 0
        self._num_refused = 0
        self._done = False

    def reset(self, seed: int) -> Sequence[Message]:
        """Start over. Nothing is drawn, so the seed is not used; the same turns always get the same
        results.
        """
        self._start()
        question = Message(role="user", content=self._task.question)
        return (
            (Message(role="system", content=self._system_prompt), question)
            if self._system_prompt
            else (question,)
        )

    def step(self, message: Message) -> StepResult:
        """Act with one policy turn. Raises ToolFault when a tool's infrastructure broke, and ValueError after
        the end of the episode; never for what the policy wrote.
        """
        if self._done:
            raise ValueError("the episode has ended; reset the environment first")
        return self._act(message)

    def result(self) -> EpisodeResult:
        """The return by the reward's rules and the counts. An episode cut before its answer has a bad
        format. Raises ToolFault where the reward's judge has no verdict.
        """
        score = self._score()
        metrics = {
            "em": float(score.em),
            "f1": score.f1,
            "answer_contained": float(score.contained),
            "format_ok": float(score.fault is None),
            "num_invalid": float(self._num_invalid),
            "num_repeated_queries": float(sum(count - 1 for count in self._calls.values())),
            "num_refused_calls": float(self._num_refused),
            "num_failed_calls": float(self._num_failed),
            "num_undecided_answers": float(score.num_undecided),
        }
        metrics |= {f"num_tool_calls_{name}": float(self._num_calls[name]) for name in self._tools.names}
        success = score.is_correct and score.fault is None
        return EpisodeResult(episode_return=score.reward, success=success, metrics=metrics)

    def copy(self) -> Self:
        """The same episode so far; tools keep no state between calls."""
        twin = copy(self)
        twin._calls, twin._num_calls = self._calls.copy(), self._num_calls.copy()
        return twin

    def close(self) -> None:  # noqa: B027
        """Nothing of its own to release."""

    @abstractmethod
    def _act(self, message: Message) -> StepResult:
        """Read the turn and do what it asks for."""

    @abstractmethod
    def _score(self) -> Score:
        """The reward of the turns so far. Raises what a judge raises."""

    def _is_open(self, num_more: int = 0) -> bool:
        """Whether another call may be executed behind ``num_more`` of the same turn."""
        return self._num_calls.total() + num_more < self._config.max_calls and self._budget.is_open

    def _count(self, key: tuple[str, str], *, failed: bool) -> None:
        """A call ran. Counted only then: a fault leaves the record as it was."""
        self._calls[key] += 1
        self._num_calls[key[0]] += 1
        self._budget.count()
        self._num_failed += failed

    def _is_refused_repetition(self, key: tuple[str, str]) -> bool:
        return bool(self._calls[key]) and self._config.repeated == "refuse"

    @property
    def _judged(self) -> Judged | None:
        judge = self._judge
        return None if judge is None else lambda prediction: judge(self._task, prediction)


# One tool-reasoning episode with native tool calls: every call gets a tool message, a turn without calls
# answers.
#
# Calls and their faults come read (:class:`outrider.environments.base.Episode`). The answer is the text
# of the last turn: its ``\boxed{}`` where there is one.


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeTurn:
    """One policy turn: its words, whether it thought, what was wrong with its calls, the tools that ran."""

    content: str
    has_thought: bool
    num_calls: int = 0
    problems: tuple[str, ...] = ()
    executed: tuple[str, ...] = ()


class NativeToolEnvironment(ToolEpisode):
    """Plays one task whose tools are called natively."""

    def _start(self) -> None:
        super()._start()
        self._turns: list[NativeTurn] = []

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        return self._tools.schemas

    @property
    def call_format(self) -> str:
        assert self._config.call_format is not None  # the factory asks for it
        return self._config.call_format

    def copy(self) -> Self:
        twin = super().copy()
        twin._turns = list(self._turns)
        return twin

    def _act(self, message: Message) -> StepResult:
        turn = NativeTurn(
            content=message.content,
            has_thought=bool(message.reasoning),
            num_calls=len(message.tool_calls),
            problems=message.problems,
        )
        if not message.tool_calls and not message.problems:
            return self._end(turn, invalid=not without_thoughts(message.content).strip())
        is_over = bool(message.tool_calls) and not self._is_open()
        if is_over and self._num_refused:
            self._num_refused += 1
            return self._end(turn, invalid=True)
        if message.problems and self._num_invalid + 1 >= self._config.max_invalid:
            return self._end(turn, invalid=True)
        return self._answer(turn, message.tool_calls)

    def _answer(self, turn: NativeTurn, calls: Sequence[ToolCall]) -> StepResult:
        """Run the calls in their order; each gets a message, and each problem one behind them."""
        outputs: list[tuple[ToolCall, ToolOutput]] = []
        messages: list[Message] = []
        is_refused = is_repeated = False
        seen_keys: set[tuple[str, str]] = set()
        for call in calls:
            key = self._tools.call_key(call)
            if not self._is_open(len(outputs)):
                is_refused = True
                messages.append(_result(call, OVER_LIMIT))
            elif self._is_refused_repetition(key) or (key in seen_keys and self._config.repeated == "refuse"):
                is_repeated = True
                messages.append(_result(call, REPEATED))
            else:
                output = self._tools.run_call(call)
                outputs.append((call, output))
                messages.append(_result(call, output.text))
            seen_keys.add(key)
        # Behind the last one: a fault leaves the record as it was.
        for call, output in outputs:
            self._count(self._tools.call_key(call), failed=output.failed)
        first = len(calls) + len(turn.problems)  # behind the numbers of all calls, read or not
        messages += [  # some templates reject a tool's message without the id of a call
            Message(role="tool", content=problem, tool_call_id=call_id(number))
            for number, problem in enumerate(turn.problems, first)
        ]
        executed = tuple(call.name for call, _ in outputs)
        self._turns.append(replace(turn, executed=executed))
        is_invalid = bool(turn.problems) or is_repeated
        self._num_refused += is_refused
        self._num_invalid += is_invalid
        if is_invalid and self._num_invalid >= self._config.max_invalid:
            self._done = True
            reward = self._score().reward
            return StepResult(
                reward=reward, done=True, invalid=True, num_tool_calls=len(executed), tools=executed
            )
        return StepResult(
            messages=tuple(messages),
            invalid=is_invalid,
            refused=is_refused and not outputs,
            num_tool_calls=len(executed),
            tools=executed,
        )

    def _end(self, turn: NativeTurn, *, invalid: bool) -> StepResult:
        # Scored first: a judge's fault leaves the record as it was.
        score = self._scored([*self._turns, turn])
        self._turns.append(turn)
        self._num_invalid += invalid
        self._done = True
        return StepResult(reward=score.reward, done=True, invalid=invalid)

    def _score(self) -> Score:
        return self._scored(self._turns)

    def _scored(self, turns: Sequence[NativeTurn]) -> Score:
        reward = self._config.reward
        fault = native_fault(turns, reward)
        answers = turns and not turns[-1].num_calls and not turns[-1].problems
        return score_answer(
            final_answer(turns[-1].content) if answers else "",
            self._task.answers,
            reward,
            fault=fault,
            num_tools=len({name for turn in turns for name in turn.executed}),
            judged=self._judged,
        )


def native_fault(turns: Sequence[NativeTurn], config: RewardConfig) -> str | None:
    """Why the episode's format is bad, or None when it is good: thought at least once where that is required,
    no unreadable call, and a last turn that answers, with a closed box where required.
    """
    if not turns:
        return "no turn"
    if config.require_think and not any(turn.has_thought for turn in turns):
        return "no <think>"
    if any(turn.problems for turn in turns):
        return "a call that cannot be read"
    if turns[-1].num_calls or not without_thoughts(turns[-1].content).strip():
        return "the last turn does not answer"
    if config.require_boxed and last_boxed(turns[-1].content) is None:
        return "no closed \\boxed{} in the answer"
    return None


def _result(call: ToolCall, text: str) -> Message:
    return Message(
        role="tool", content=neutralise(text).strip(), tool_call_id=call.call_id, tool_name=call.name
    )


# One tool-reasoning episode in the tag protocol: reads policy turns, runs tools within limits, keeps the
# record.


class ToolEnvironment(ToolEpisode):
    """Plays one task whose calls, results and answer stand inside one assistant message."""

    def _start(self) -> None:
        super()._start()
        self._turns: list[Turn] = []

    def copy(self) -> Self:
        twin = super().copy()
        twin._turns = list(self._turns)
        return twin

    def _act(self, message: Message) -> StepResult:
        action = parse_action(message.content, self._tools.names)
        match action:
            case Answer():
                return self._end(message.content, invalid=False)
            case NoAction():
                return self._end(message.content, invalid=True)
            case Malformed(reason=reason):
                return self._complain(message.content, reason)
            case Call():
                return self._call(message.content, action)

    def _call(self, text: str, call: Call) -> StepResult:
        if not self._is_open():
            self._num_refused += 1
            return (
                self._end(text, invalid=True)
                if self._num_refused > 1
                else self._answer(text, OVER_LIMIT, refused=True)
            )
        key = (call.tool, " ".join(call.argument.split()) if call.tool == "search" else call.argument)
        if self._is_refused_repetition(key):
            self._calls[key] += 1
            return self._complain(text, REPEATED)
        output = self._tools.run_text(call.tool, call.argument)
        self._count(key, failed=output.failed)
        return self._answer(text, output.text, executed=call.tool)

    def _answer(
        self,
        text: str,
        output: str,
        *,
        executed: str | None = None,
        invalid: bool = False,
        refused: bool = False,
    ) -> StepResult:
        content = render_result(output)
        self._turns.append(Turn(text=text, executed_tool=executed, result=content))
        tools = () if executed is None else (executed,)
        observation = Message(role="inline", content=content)
        return StepResult(
            message=observation, invalid=invalid, refused=refused, num_tool_calls=len(tools), tools=tools
        )

    def _complain(self, text: str, reason: str) -> StepResult:
        """Return an observation that names the mistake, or the end after too many mistakes."""
        if self._num_invalid + 1 >= self._config.max_invalid:
            return self._end(text, invalid=True)
        self._num_invalid += 1
        return self._answer(text, reason, invalid=True)

    def _end(self, text: str, *, invalid: bool) -> StepResult:
        # Scored first: a judge's fault leaves the record as it was.
        score = self._scored([*self._turns, Turn(text=text)])
        self._turns.append(Turn(text=text))
        self._num_invalid += invalid
        self._done = True
        return StepResult(message=None, reward=score.reward, done=True, invalid=invalid)

    def _score(self) -> Score:
        return self._scored(self._turns)

    def _scored(self, turns: Sequence[Turn]) -> Score:
        answers, tools = self._task.answers, self._tools.names
        return score_turns(turns, answers, tools, self._config.reward, judged=self._judged)


class ToolEnvironmentFactory:
    """Makes environments over one set of tools, which it owns; ``config.call_format`` decides about the
    protocol.

    ``call_budget`` bounds the calls of a batch. Raises ToolUnavailable where the reward's judge does not
    answer, and ConfigError where calls in that form cannot name one of the tools or its arguments.
    """

    def __init__(
        self,
        *,
        tools: Sequence[Tool],
        config: EpisodeConfig,
        system_prompt: str,
        verifier: Judge | None = None,
    ) -> None:
        """``verifier`` is the tasks' own, for the reward ``verifier``."""
        self._tools = Toolset(tools)
        self._config = config
        self._system_prompt = system_prompt
        self.call_budget = CallBudget(config.max_batch_calls)
        try:
            if config.call_format and (
                problem := describe_unwritable(config.call_format, self._tools.schemas)
            ):
                raise ConfigError(f"environment.protocol: {problem}")
            judge = make_reward_judge(config.reward.judge)
        except BaseException:
            self.close()
            raise
        self._judge = verifier if judge is None else judge.is_correct

    def __call__(self, task: Task) -> ToolEpisode:
        """A fresh environment for one episode of the task."""
        environment_class = ToolEnvironment if self._config.call_format is None else NativeToolEnvironment
        return environment_class(
            task=task,
            tools=self._tools,
            config=self._config,
            system_prompt=self._system_prompt,
            budget=self.call_budget,
            judge=self._judge,
        )

    def close(self) -> None:
        """Close the tools; may be called twice."""
        self._tools.close()


# The tools that a recipe names: their tags, their lines of the system prompt, and the tools themselves.


ToolName: TypeAlias = Annotated[str | Settings, Entry("tools")]
"""A tool by name, with its default settings, or a table with its ``type`` and settings."""
_TAG = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED = ("think", "result", "retrieve", ANSWER)


def validate_tools(tools: Sequence[ToolName]) -> None:
    """Raises ValueError for a tag name that occurs twice or is no tag, as far as that is known without asking
    a server.
    """
    plain = [entry for entry in tools if not issubclass(_tool_class(entry), ToolGroup)]
    _require_tags(tuple(name for entry in plain for name in _lines(entry)))


def tool_tags(tools: Sequence[ToolName]) -> tuple[str, ...]:
    """Tag names, in the recipe's order; a server is asked for its own. Raises ConfigError for one that occurs
    twice or is no tag, ToolUnavailable where a server cannot be asked.
    """
    names: list[str] = []
    try:
        for entry in tools:
            cls = _tool_class(entry)
            names += cls.names(_settings(entry)) if issubclass(cls, ToolGroup) else _lines(entry)
        _require_tags(names)
    except ValueError as error:
        raise ConfigError(f"environment.tools: {error}") from error
    return tuple(names)


def _require_tags(names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"tools must name at least one tool, each once: {twice!r} is there twice")
    if wrong := [name for name in names if not _TAG.fullmatch(name) or name in _RESERVED]:
        raise ValueError(
            f"a tool cannot have the tag name {wrong[0]!r}: lower-case letters, "
            f"and none of {', '.join(_RESERVED)}"
        )


def load_tools(tools: Sequence[ToolName], environment: EnvironmentSettings) -> list[Tool]:
    """The tools themselves, for an environment with these settings. Raises ToolUnavailable or DataError where
    one cannot work here; none is left open then.
    """
    loaded: list[Tool] = []
    try:
        for entry in tools:
            settings = None if isinstance(entry, str) else entry
            context = ToolContext(environment=environment)
            built = build_by_name("tools", plugin_name(entry), settings, context)
            loaded += built.tools if isinstance(built, ToolGroup) else [cast(Tool, built)]
    except BaseException:
        for tool in loaded:
            tool.close()
        raise
    return loaded


def plugin_name(tool: str | Settings) -> str:
    """The plug-in's name of an entry of ``tools``."""
    return tool if isinstance(tool, str) else str(tool.type)  # type: ignore[attr-defined]


def usage(tool: type) -> str:
    """The line of a tool's class for the system prompt; a plain one where it has none."""
    name = getattr(tool, "name", "")
    return str(getattr(tool, "usage", f"Write <{name}>input</{name}> to use {name}."))


def usages(tools: Sequence[ToolName]) -> list[str]:
    """The lines of all tools, in the recipe's order; a server is asked for its own."""
    return [line for entry in tools for line in _lines(entry).values()]


def argument_lines(tools: Sequence[ToolName]) -> list[str]:
    """The lines of the tools that take arguments by name (a JSON object inside the tag), which a tag alone
    does not describe.
    """
    lines = [item for entry in tools for item in _lines(entry).items()]
    return [line for name, line in lines if f"<{name}>{{" in line]


def waiting_s(tools: Sequence[ToolName], num_concurrent: int) -> float:
    """Seconds that a call may wait for those of other episodes, whatever tool it is of."""
    own = [entry.waiting_s(num_concurrent) for entry in tools if isinstance(entry, ToolSettings)]
    return max(own, default=0.0)


def _lines(entry: ToolName) -> Mapping[str, str]:
    """The line of each tool of an entry, by tag name. Raises ValueError for a class that has none."""
    cls = _tool_class(entry)
    if issubclass(cls, ToolGroup):
        return cls.lines(_settings(entry))
    name = getattr(cls, "name", None)
    if not isinstance(name, str):
        raise ValueError(
            f"{plugin_name(entry)} is no tool: a class of one has its tag in the attribute name; a function "
            "with type hints and a docstring needs none"
        )
    return {name: usage(cls)}


def _tool_class(entry: ToolName) -> type:
    return resolve("tools", plugin_name(entry))


def _settings(entry: ToolName) -> Settings:
    return load_settings_class("tools", entry)() if isinstance(entry, str) else entry


# The ``tools`` environment: questions answered with search and Python in the papers' tag protocol (ARPO,
# RAPO).


class ToolsConfig(EpisodeConfig):
    """Tasks from your own data, with the tools that you name."""

    input_paths: ClassVar[frozenset[str]] = frozenset({"corpus", "pages"})

    type: Literal["tools"] = "tools"
    train: DatasetConfig | None = None
    valid: DatasetConfig | None = None
    test: DatasetConfig | None = None
    tools: tuple[ToolName, ...] = ("search", "python")
    """The tools in use: names of plug-ins, Python functions (``"my_module:add"``), or tables such as
    ``{type = "my_module:MyTool", digits = 3}``.
    """
    protocol: ProtocolName = "tags"
    """How tools are called: by the papers' tags inside one message, or natively in one of the forms that
    model families write, with a message of the role ``tool`` for every result.
    """
    corpus: Path | None = None
    """Passages to search: JSONL or Parquet with the columns id, title, text. Needed by the tool search."""
    pages: Path | None = None
    """Pages that the tool browser opens: JSONL or Parquet with ``title``, ``text`` and, where they have any,
    ``url`` and ``id``. None takes the corpus. Rows of one url (without urls: of one title) are one page.
    """
    search: SearchConfig = SearchConfig()
    python: PythonToolConfig = PythonToolConfig()
    prompt: Literal["full", "short", "none"] = "full"
    """The system prompt: with the whole format explained, one line for small models, or none at all."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """Your own system prompt in place of that choice."""

    @model_validator(mode="after")
    def _validate(self) -> "ToolsConfig":
        if not self.tools:
            raise ValueError("tools must name at least one tool, each once")
        validate_tools(self.tools)
        if "search" in self.tools and self.corpus is None:
            raise ValueError("the tool search needs a corpus")
        return self

    @property
    def has_experts(self) -> bool:
        return False

    @property
    def call_format(self) -> str | None:
        return None if self.protocol == "tags" else self.protocol

    def tool_names(self) -> tuple[str, ...]:
        """Tag names, in the recipe's order."""
        return tool_tags(self.tools)

    def waiting_s(self, num_concurrent: int) -> float:
        """Python runs so many calls at a time, and other tools say themselves; the others wait."""
        own = waiting_s(self.tools, num_concurrent)
        if "python" not in self.tools:
            return own
        return max(own, self.python.wall_seconds * math.ceil(num_concurrent / self.python.num_servers))


class ToolsTaskSet:
    """Questions of your own, with tools. Showing a step is the same as doing it: tools change nothing."""

    Settings = ToolsConfig
    name = "tools"
    protocol = "inline"
    stateful = False

    def __init__(self, config: ToolsConfig) -> None:
        self.config = config
        # a native turn ends where the policy closes its message
        self.stop = stop_strings(config.tool_names()) if config.call_format is None else ()

    def tasks(self, split: str) -> Sequence[Task]:
        """The rows of a split in file order; raises DataError when none is configured or the data are bad."""
        dataset = {"train": self.config.train, "valid": self.config.valid, "test": self.config.test}.get(
            split
        )
        if dataset is None:
            raise DataError(f"tools: no data set is configured for the split {split!r}")
        return load_tasks(dataset, setting=f"environment.{split}")

    def make(self) -> ToolEnvironmentFactory:
        """Load every configured tool; raises ToolUnavailable or DataError when one cannot work here."""
        return ToolEnvironmentFactory(
            tools=load_tools(self.config.tools, self.config),
            config=self.config,
            system_prompt=system_prompt(self.config),
        )

    def close(self) -> None:
        """Nothing is held."""

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """None: data sets come without solutions."""
        return None


def system_prompt(config: ToolsConfig) -> str:
    """The system prompt that the settings choose; empty for none."""
    if config.system_prompt is not None:
        return config.system_prompt
    if config.prompt == "none":
        return ""
    box = r"\boxed{...}" if config.reward.require_boxed else "..."
    if config.call_format is not None:
        return _native_prompt(config)
    if config.prompt == "short":
        calls = " or ".join(f"<{name}>...</{name}>" for name in config.tool_names())
        arguments = "".join(f" {line}" for line in argument_lines(config.tools))
        return f"Think, use {calls}, then end with <answer>{box}</answer>.{arguments}"
    lines = [
        "Solve the question step by step. Put your thoughts in <think> and </think> before each action.",
        *usages(config.tools),
        (
            "What a tool returns appears between <result> and </result>; never write that yourself. "
            f"You have {config.max_calls} calls."
        ),
        f"End with <answer>{box}</answer>, which holds the final answer and nothing else.",
    ]
    return "\n".join(lines)


def _native_prompt(config: ToolsConfig) -> str:
    """The same without the tools, which the chat template describes."""
    boxed = config.reward.require_boxed
    if config.prompt == "short":
        return r"Use the tools, then answer with \boxed{...}." if boxed else "Use the tools, then answer."
    thinking = "Put your thoughts in <think> and </think>. " if config.reward.require_think else ""
    return f"Solve the question step by step. {thinking}You have {config.max_calls} tool calls. " + (
        r"Then answer without a call; write the final answer as \boxed{...}."
        if boxed
        else "Then answer without a call; write the final answer and nothing else."
    )
