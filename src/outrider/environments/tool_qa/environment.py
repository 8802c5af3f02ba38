"""Questions that a policy answers with tools: settings, tags, native calls, episodes."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, cast

from pydantic import Field, model_validator

from outrider.config import Settings
from outrider.environments.base import (
    Environment,
    EnvironmentSettings,
    EnvironmentTaskSet,
    EpisodeResult,
    StepResult,
    TaskSet,
    unparsed_calls,
)
from outrider.environments.grading.answers import last_boxed
from outrider.environments.tool_qa.datasets import DatasetConfig, load_tasks
from outrider.environments.tool_qa.rewards import (
    ANSWER,
    RESULT,
    Answer,
    Call,
    Judged,
    Malformed,
    NoAction,
    RewardConfig,
    RewardFunction,
    Score,
    Turn,
    final_answer,
    make_reward_judge,
    neutralise,
    parse_action,
    render_result,
    score_answer,
    score_by_function,
    score_turns,
    stop_strings,
)
from outrider.environments.window import WindowedSettings, WindowSettings
from outrider.errors import ConfigError, DataError, ToolFault
from outrider.plugins.registry import Entry, build_by_name, load_settings_class, resolve
from outrider.tokens.call_formats import ProtocolName, describe_unwritable
from outrider.tokens.tool_calls import call_id, without_thoughts
from outrider.tools.base import (
    CallBudget,
    Tool,
    ToolContext,
    ToolGroup,
    ToolOutput,
    Toolset,
    ToolSettings,
    recorded_call,
)
from outrider.tools.python.tool import PythonToolConfig
from outrider.tools.search import SearchConfig
from outrider.types import CallRecord, Message, Step, Task, ToolCall, ToolSchema

OVER_LIMIT = "No tool calls are left. Give the answer now."
REPEATED = "This was asked before. Ask something else or answer."
WRONG_ANSWER = "This answer is wrong. Search again or give another answer."


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
    max_answers: int = Field(default=1, ge=1)
    """Answers that an episode may give: a wrong one is reported, and another may follow. The score is that of
    the turns after the last wrong answer that was reported.
    """
    result_tag: str = RESULT
    """Tag around the results of tools with ``protocol = "tags"``: ``<result>``, or with Search-R1's prompts
    ``information``. The policy must not write it.
    """
    reward: RewardConfig = RewardConfig()

    @model_validator(mode="after")
    def _distinct_tags(self) -> "EpisodeConfig":
        taken = set(RESERVED_TAGS) - {RESULT}
        if self.result_tag in taken or not _TAG.fullmatch(self.result_tag):
            raise ValueError(
                f"result_tag = {self.result_tag!r} is no tag of its own: lower-case letters, digits "
                f"and _, and none of {', '.join(sorted(taken))}"
            )
        if self.call_format is not None and self.result_tag != RESULT:
            raise ValueError('result_tag is for protocol = "tags": native results are messages of their own')
        return self

    @model_validator(mode="after")
    def _verifiable(self) -> "EpisodeConfig":
        if self.max_answers > 1 and self.call_format is not None:
            raise ValueError('max_answers above 1 needs protocol = "tags": native answers end the episode')
        if self.reward.answer == "verifier" and not self.has_verifier:
            raise ValueError('reward.answer = "verifier": these tasks have no verifier of their own')
        return self

    @property
    def calls_tools(self) -> bool:
        """True: these tasks are made for tools."""
        return True


class SearchWindowSettings(WindowSettings):
    """The prompt of a turn, with ``environment.context = "window"``: the question with the last searches and
    their results.
    """

    steps: int = Field(4, ge=0)
    """Number of past steps that a prompt shows."""
    order: Literal["action-observation"] = "action-observation"
    """A step of the history is a search and its result."""
    actions: Literal["none"] = "none"
    """There is no list of commands."""
    parse: Literal["verl-agent-search"] = "verl-agent-search"
    """The rule that finds the search or the answer in a reply."""


class SearchSettings(EpisodeConfig, WindowedSettings):
    """Settings of environments whose search can be played with a window."""

    own_prompt: ClassVar[str] = "search"

    window: Annotated[SearchWindowSettings, Field(default_factory=SearchWindowSettings)]

    @model_validator(mode="after")
    def _validate_search_window(self) -> Self:
        if self.context == "chat":
            return self
        if self.call_format is not None:
            raise ValueError('context = "window" needs protocol = "tags": a search is text between tags')
        if self.reward.require_think:
            raise ValueError(
                'context = "window" scores the commands without the thoughts of the replies: '
                "set reward.require_think = false"
            )
        if self.reward.require_boxed and self.window.prompt is None:
            raise ValueError(
                "the shipped prompt of a window does not ask for a box: set reward.require_boxed = false, or "
                "name a prompt of yours in window.prompt"
            )
        return self


# The tools that a recipe names: their tags, their lines of the system prompt, and the tools themselves.


ToolName: TypeAlias = Annotated[str | Settings, Entry("tools")]
"""A tool by name, with its default settings, or a table with its ``type`` and settings."""
_TAG = re.compile(r"[a-z][a-z0-9_]*")
RESERVED_TAGS = ("think", RESULT, "retrieve", ANSWER)


def validate_tools(tools: Sequence[ToolName], result_tag: str = RESULT) -> None:
    """Raises ValueError for a tag name that occurs twice or is no tag, as far as that is known without asking
    a server.
    """
    plain = [entry for entry in tools if not issubclass(_tool_class(entry), ToolGroup)]
    _require_tags(tuple(name for entry in plain for name in _lines(entry)), result_tag)


def tool_tags(tools: Sequence[ToolName], result_tag: str = RESULT) -> tuple[str, ...]:
    """Tag names in the recipe's order, including those that servers report.

    Raises ConfigError for a name that occurs twice or is no tag, and ToolUnavailable if a server does not
    answer.
    """
    names: list[str] = []
    try:
        for entry in tools:
            cls = _tool_class(entry)
            names += cls.names(_settings(entry)) if issubclass(cls, ToolGroup) else _lines(entry)
        _require_tags(names, result_tag)
    except ValueError as error:
        raise ConfigError(f"environment.tools: {error}") from error
    return tuple(names)


def _require_tags(names: Sequence[str], result_tag: str) -> None:
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"tools must name at least one tool, each once: {twice!r} is there twice")
    reserved = tuple(dict.fromkeys((*RESERVED_TAGS, result_tag)))
    if wrong := [name for name in names if not _TAG.fullmatch(name) or name in reserved]:
        raise ValueError(
            f"a tool cannot have the tag name {wrong[0]!r}: lower-case letters, "
            f"and none of {', '.join(reserved)}"
        )


def load_tools(tools: Sequence[ToolName], environment: EnvironmentSettings) -> list[Tool]:
    """The tools themselves, for an environment with these settings. Raises ToolUnavailable or DataError if
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
    """The line of a tool's class for the system prompt; a default one if it has none."""
    name = getattr(tool, "name", "")
    return str(getattr(tool, "usage", f"Write <{name}>input</{name}> to use {name}."))


def usages(tools: Sequence[ToolName]) -> list[str]:
    """The lines of all tools in the recipe's order, including those that servers report."""
    return [line for entry in tools for line in _lines(entry).values()]


def argument_lines(tools: Sequence[ToolName]) -> list[str]:
    """The lines of the tools that take arguments by name (a JSON object inside the tag), which a tag alone
    does not describe.
    """
    lines = [item for entry in tools for item in _lines(entry).items()]
    return [line for name, line in lines if f"<{name}>{{" in line]


def waiting_s(tools: Sequence[ToolName], python: PythonToolConfig, num_concurrent: int) -> float:
    """Seconds that a call may wait for those of other episodes, whatever tool it is of. The Python tool runs
    a limited number of calls at a time; other tools report their own time.
    """
    own = [entry.waiting_s(num_concurrent) for entry in tools if isinstance(entry, ToolSettings)]
    if "python" in map(plugin_name, tools):
        own.append(python.wall_seconds * math.ceil(num_concurrent / python.num_servers))
    return max(own, default=0.0)


def _may_search(entry: ToolName) -> bool:
    """Whether an entry has the tag ``search``, as far as that is known without asking a server."""
    return issubclass(_tool_class(entry), ToolGroup) or "search" in _lines(entry)


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


class ToolsConfig(SearchSettings):
    """Tasks from your own data, with the tools that you name."""

    input_paths: ClassVar[frozenset[str]] = frozenset({"corpus", "pages"})

    type: Literal["tools"] = "tools"
    train: DatasetConfig | None = None
    valid: DatasetConfig | None = None
    test: DatasetConfig | None = None
    tools: tuple[ToolName, ...] = ("search", "python")
    """The tools in use: names of plug-ins, Python functions (``"my_module:add"``), or tables such as
    ``{type = "my_module:MyTool", digits = 3}``. With a native ``protocol`` the list may be empty: the first
    turn is then the answer.
    """
    protocol: ProtocolName = "tags"
    """How tools are called: by the papers' tags inside one message, or natively in one of the forms that
    model families write, with a message of the role ``tool`` for every result.
    """
    corpus: Path | None = None
    """Passages to search: JSONL or Parquet with the columns id, title, text. Needed by the tool search."""
    pages: Path | None = None
    """Pages that the tool browser opens: JSONL or Parquet with ``title``, ``text`` and optionally
    ``url`` and ``id``. None takes the corpus. Rows of one url (without urls: of one title) are one page.
    """
    search: SearchConfig = SearchConfig()
    python: PythonToolConfig = PythonToolConfig()
    """Limits of the tool ``python``: time, memory, disk and output of a call
    (docs/tasks/tools_and_rewards.md).
    """
    prompt: Literal["full", "short", "none"] = "full"
    """The system prompt: with the whole format explained, one line for small models, or none at all."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """Your own system prompt in place of that choice."""

    @model_validator(mode="after")
    def _validate(self) -> "ToolsConfig":
        if not self.tools and self.call_format is None:
            raise ValueError(
                'tools must name at least one tool, each once; without tools, set protocol = "hermes"'
            )
        validate_tools(self.tools, self.result_tag)
        if "search" in map(plugin_name, self.tools) and self.corpus is None:
            raise ValueError("the tool search needs a corpus")
        if self.context == "window" and not any(map(_may_search, self.tools)):
            raise ValueError('context = "window" plays searches: add the tool search to tools')
        return self

    @property
    def has_experts(self) -> bool:
        return False

    @property
    def calls_tools(self) -> bool:
        return bool(self.tools)

    @property
    def call_format(self) -> str | None:
        return None if self.protocol == "tags" else self.protocol

    def tool_names(self) -> tuple[str, ...]:
        """Tag names, in the recipe's order."""
        return tool_tags(self.tools, self.result_tag)

    def waiting_s(self, num_concurrent: int) -> float:
        return waiting_s(self.tools, self.python, num_concurrent)


class ToolResources:
    """Shared by all episodes: the tools, the limit of calls of a batch, the system prompt and the judge."""

    def __init__(
        self, *, tools: Sequence[Tool], settings: EpisodeConfig, system_prompt: str, verifier: Any = None
    ) -> None:
        """Take over the tools.

        Args:
            tools: the tools; closed with this object, also if an error is raised.
            settings: the settings of the episodes.
            system_prompt: the system prompt; empty for none.
            verifier: the tasks' own :data:`Judge`, for the reward ``verifier``; closed with this object.

        Raises:
            ToolUnavailable: if the reward's judge does not answer.
            ConfigError: if calls in ``settings.call_format`` cannot name one of the tools or its arguments.
        """
        self.tools = Toolset(tools)
        self.system_prompt = system_prompt
        self.call_budget = CallBudget(settings.max_batch_calls)
        self.verifier = verifier
        self.reward_function = RewardFunction(path) if (path := settings.reward.function) else None
        try:
            if settings.call_format and (
                problem := describe_unwritable(settings.call_format, self.tools.schemas)
            ):
                raise ConfigError(f"environment.protocol: {problem}")
            judge = settings.reward.judge
            self.judge: Judge | None = verifier if judge is None else make_reward_judge(judge)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the tools and the verifier; may be called twice."""
        with ExitStack() as opened:
            if self.verifier is not None:
                opened.callback(self.verifier.close)
            self.tools.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeTurn:
    """One policy turn with native calls.

    Attributes:
        content: the text outside of thoughts and calls.
        has_thought: whether the turn contains a thought.
        num_calls: number of calls that could be parsed.
        problems: what was wrong with the other calls.
        executed: names of the executed tools.
    """

    content: str
    has_thought: bool
    num_calls: int = 0
    problems: tuple[str, ...] = ()
    executed: tuple[str, ...] = ()


class ToolEnvironment(Environment):
    r"""Questions that the policy answers with tools: ``type = "tools"``.

    If ``settings.call_format`` is None, the policy calls tools by tags (ARPO, RAPO): calls, results and the
    answer are inside one assistant message. Otherwise tools are called natively: every call gets a message
    of the role ``tool``, and a turn without calls is the answer (its ``\boxed{}`` if there is one).

    Tools keep no state between calls, so a step that is only shown is equivalent to one that is executed.
    """

    Settings: ClassVar[type[EnvironmentSettings]] = ToolsConfig
    name = "tools"
    protocol = "inline"
    stateful = False
    shared: ToolResources
    expert_needs_shared: ClassVar[bool] = True

    @classmethod
    def build(cls, settings: Any, context: object = None) -> TaskSet:
        # A subclass with an expert or a shared object of its own does not inherit the value of the class.
        owner = next(base for base in cls.__mro__ if {"expert", "open_shared"} & vars(base).keys())
        needs_shared = vars(owner).get("expert_needs_shared", True)
        return (EnvironmentTaskSet if needs_shared else TasksWithAnswers)(cls, settings)

    @classmethod
    def tasks(cls, settings: Any, split: str) -> Sequence[Task]:
        """The rows of a split in file order. Raises DataError if none is configured or the data are bad."""
        dataset = {"train": settings.train, "valid": settings.valid, "test": settings.test}.get(split)
        if dataset is None:
            raise DataError(f"tools: no data set is configured for the split {split!r}")
        path = settings.reward.function
        tasks = load_tasks(
            dataset,
            setting=f"environment.{split}",
            keeps_columns=path is not None,
            system_prompt=settings.system_prompt or "",
        )
        if path is None:
            return tasks
        function = RewardFunction(path)
        for task in tasks:
            if missing := function.missing_column(task):
                raise DataError(
                    f"environment.{split}: the reward function {path} needs the column {missing}; "
                    f"task {task.key} has {', '.join(sorted(task.metadata))}"
                )
        return tasks

    @classmethod
    def stop_strings(cls, settings: Any) -> tuple[str, ...]:
        """The closing tags; none with native calls, because the policy ends its message itself."""
        return stop_strings(settings.tool_names()) if settings.call_format is None else ()

    @classmethod
    def open_shared(cls, settings: Any) -> ToolResources:
        """Load every configured tool. Raises ToolUnavailable or DataError if one cannot work here."""
        return ToolResources(
            tools=load_tools(settings.tools, settings),
            settings=settings,
            system_prompt=system_prompt(settings),
        )

    def __init__(self, settings: Any = None, shared: Any = None) -> None:
        super().__init__(settings, shared)
        self._clear()

    def _clear(self) -> None:
        self._calls: Counter[tuple[str, str]] = Counter()
        self._num_calls: Counter[str] = Counter()
        self._num_failed = 0
        self._num_invalid = 0
        self._num_refused = 0
        self._num_answers = 0
        self._first_scored = 0  # number of the turn after the last wrong answer
        self._turns: list[Any] = []  # Turn, or NativeTurn with native calls
        self._final: Score | None = None

    def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Return the question. ``seed`` is not used: the same turns always get the same results."""
        self._clear()
        question = Message(role="user", content=task.question)
        prompt = self.shared.system_prompt
        return (Message(role="system", content=prompt), question) if prompt else (question,)

    def step(self, action: str) -> StepResult:
        """Execute one turn. Raises ToolFault if the infrastructure of a tool fails."""
        if self.settings.call_format is not None:
            return self._step_native(self.turn)
        turn = getattr(self, "turn", None)  # a world of commands has none
        if turn is not None and turn.reasoning and turn.content == action:
            # separated by an endpoint; in a rollout, it is part of the text
            action = f"<think>\n{turn.reasoning}\n</think>\n\n{action}"
        match parse_action(action, self.shared.tools.names):
            case Answer():
                return self._answer(Turn(text=action))
            case NoAction():
                return self._end(Turn(text=action), invalid=True)
            case Malformed(tag=tag, reason=reason):
                record = CallRecord(name=tag, arguments=reason, status="error")
                result = self._complain(action, reason)
                return result if tag == ANSWER else replace(result, tool_calls=(record,))
            case Call() as call:
                return self._call(action, call)

    @property
    def task_text(self) -> str:
        """The question."""
        return self.task.question

    @property
    def opening(self) -> str:
        """The question, which is all that there is to see."""
        return self.task.question

    def admitted(self) -> Sequence[str]:
        """Nothing: searches and answers are free text."""
        return ()

    def act(self, command: str) -> StepResult:
        """Execute a search or an answer between its tags. The message is the result as text of its own."""
        result = self.step(command)
        text = result.text.strip()
        return replace(result, message=Message(role="user", content=text) if text else None)

    def result(self) -> EpisodeResult:
        """The return by the reward's rules, and counts. An episode without an answer has a bad format.

        Raises ToolFault if the reward's judge has no verdict.
        """
        score = self._final or self._score(self._turns)
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
        for name in self.shared.tools.names:
            metrics[f"num_tool_calls_{name}"] = float(self._num_calls[name])
        has_function = self.settings.reward.function is not None  # whose reward alone decides
        success = score.is_correct and (has_function or score.fault is None)
        return EpisodeResult(
            episode_return=score.reward,
            success=success,
            metrics=metrics,
            answer=score.prediction or None,
            reward_parts=score.parts,
            reason=score.reason,
        )

    def copy(self) -> Self:
        twin = copy(self)
        twin._calls, twin._num_calls = self._calls.copy(), self._num_calls.copy()
        twin._turns = list(self._turns)
        return twin

    def tools(self) -> Sequence[ToolSchema]:
        return self.shared.tools.schemas

    # Calls by tags.

    def _answer(self, turn: Turn) -> StepResult:
        self._num_answers += 1
        if self._num_answers >= self.settings.max_answers or self._score([*self._turns, turn]).is_correct:
            return self._end(turn, invalid=False)
        result = self._reply(turn.text, WRONG_ANSWER)
        self._first_scored = len(self._turns)
        return result

    def _call(self, text: str, call: Call) -> StepResult:
        record = CallRecord(name=call.tool, arguments=call.argument, status="refused")
        key = (call.tool, " ".join(call.argument.split()) if call.tool == "search" else call.argument)
        if not self._is_open():
            self._num_refused += 1
            result = (
                self._end(Turn(text=text), invalid=True)
                if self._num_refused > 1
                else self._reply(text, OVER_LIMIT, refused=True)
            )
        elif self._is_refused_repetition(key):
            self._calls[key] += 1
            result = self._complain(text, REPEATED)
        else:
            run = partial(self.shared.tools.run_text, call.tool, call.argument)
            output, record = recorded_call(run, call.tool, call.argument)
            self._count(key, failed=output.failed)
            result = self._reply(text, output.text, executed=call.tool)
        return replace(result, tool_calls=(record,))

    def _reply(
        self,
        text: str,
        output: str,
        *,
        executed: str | None = None,
        invalid: bool = False,
        refused: bool = False,
    ) -> StepResult:
        content = render_result(output, self.settings.result_tag)
        self._turns.append(Turn(text=text, executed_tool=executed, result=content))
        tools = () if executed is None else (executed,)
        observation = Message(role="inline", content=content)
        return StepResult(
            message=observation, invalid=invalid, refused=refused, num_tool_calls=len(tools), tools=tools
        )

    def _complain(self, text: str, reason: str) -> StepResult:
        """Return an observation that names the mistake, or the end after too many mistakes."""
        if self._num_invalid + 1 >= self.settings.max_invalid:
            return self._end(Turn(text=text), invalid=True)
        self._num_invalid += 1
        return self._reply(text, reason, invalid=True)

    # Native calls. :class:`outrider.environments.base.Episode` has parsed them.

    def _step_native(self, message: Message) -> StepResult:
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
        elif not (message.problems and self._num_invalid + 1 >= self.settings.max_invalid):
            return self._call_natively(turn, message.tool_calls)
        refused = [
            CallRecord(name=call.name, arguments=call.arguments_text, status="refused")
            for call in message.tool_calls
        ]
        records = (*refused, *unparsed_calls(message.problems))
        return replace(self._end(turn, invalid=True), tool_calls=records)

    def _call_natively(self, turn: NativeTurn, calls: Sequence[ToolCall]) -> StepResult:
        """Execute the calls in order. Each one gets a message, followed by one message per problem."""
        tools, refuses_repetitions = self.shared.tools, self.settings.repeated == "refuse"
        outputs: list[tuple[tuple[str, str], ToolOutput]] = []  # by the key of the call
        messages: list[Message] = []
        records: list[CallRecord] = []
        is_refused = is_repeated = False
        seen_keys: set[tuple[str, str]] = set()
        for call in calls:
            key = tools.call_key(call)
            record = CallRecord(name=call.name, arguments=call.arguments_text, status="refused")
            if not self._is_open(len(outputs)):
                is_refused = True
                messages.append(_result(call, OVER_LIMIT))
            elif self._is_refused_repetition(key) or (key in seen_keys and refuses_repetitions):
                is_repeated = True
                messages.append(_result(call, REPEATED))
            else:
                try:
                    output, record = recorded_call(partial(tools.run_call, call), call.name, record.arguments)
                except ToolFault as fault:
                    fault.tool_calls = (*records, *fault.tool_calls)
                    raise
                outputs.append((key, output))
                messages.append(_result(call, output.text))
            records.append(record)
            seen_keys.add(key)
        # Count after the last call, so that a fault leaves the record unchanged.
        for key, output in outputs:
            self._count(key, failed=output.failed)
        first = len(calls) + len(turn.problems)  # after the numbers of all calls, parsed or not
        messages += [  # some chat templates reject a tool message without a call id
            Message(role="tool", content=problem, tool_call_id=call_id(number))
            for number, problem in enumerate(turn.problems, first)
        ]
        tool_calls = (*records, *unparsed_calls(turn.problems))
        executed = tuple(name for (name, _), _ in outputs)
        self._turns.append(replace(turn, executed=executed))
        is_invalid = bool(turn.problems) or is_repeated
        self._num_refused += is_refused
        self._num_invalid += is_invalid
        if is_invalid and self._num_invalid >= self.settings.max_invalid:
            self._final = self._score(self._turns)
            return StepResult(
                reward=self._final.reward,
                done=True,
                invalid=True,
                num_tool_calls=len(executed),
                tools=executed,
                tool_calls=tool_calls,
            )
        return StepResult(
            messages=tuple(messages),
            invalid=is_invalid,
            refused=is_refused and not outputs,
            num_tool_calls=len(executed),
            tools=executed,
            tool_calls=tool_calls,
        )

    # Both.

    def _is_open(self, num_more: int = 0) -> bool:
        """Whether another call may be executed after ``num_more`` calls of the same turn."""
        num_calls = self._num_calls.total() + num_more
        return num_calls < self.settings.max_calls and self.shared.call_budget.is_open

    def _count(self, key: tuple[str, str], *, failed: bool) -> None:
        """Count an executed call; not called after a fault, which leaves the record unchanged."""
        self._calls[key] += 1
        self._num_calls[key[0]] += 1
        self.shared.call_budget.count()
        self._num_failed += failed

    def _is_refused_repetition(self, key: tuple[str, str]) -> bool:
        return bool(self._calls[key]) and self.settings.repeated == "refuse"

    def _end(self, turn: Turn | NativeTurn, *, invalid: bool) -> StepResult:
        # Score first, so that a fault of a judge leaves the record unchanged.
        self._final = self._score([*self._turns, turn])
        self._turns.append(turn)
        self._num_invalid += invalid
        return StepResult(reward=self._final.reward, done=True, invalid=invalid)

    def _score(self, turns: Sequence[Any]) -> Score:
        function, reward = self.shared.reward_function, self.settings.reward
        turns = turns[self._first_scored :]
        if function is None:
            return self._grade(turns, reward)
        text = "".join(map(_completion, turns))
        return score_by_function(
            function, self.task, text, self._grade(turns, reward.model_copy(update={"answer": "f1"}))
        )

    def _grade(self, turns: Sequence[Any], reward: RewardConfig) -> Score:
        task, judge = self.task, self.shared.judge
        judged: Judged | None = None if judge is None else lambda prediction: judge(task, prediction)
        if self.settings.call_format is None:
            return score_turns(
                turns,
                task.answers,
                self.shared.tools.names,
                reward,
                judged=judged,
                result_tag=self.settings.result_tag,
            )
        answers = turns and not turns[-1].num_calls and not turns[-1].problems
        return score_answer(
            final_answer(turns[-1].content) if answers else "",
            task.answers,
            reward,
            fault=native_fault(turns, reward),
            num_tools=len({name for turn in turns for name in turn.executed}),
            judged=judged,
        )


def _completion(turn: Turn | NativeTurn) -> str:
    """What a reward function sees of a turn: its text, and the result that continues the message."""
    return turn.content if isinstance(turn, NativeTurn) else turn.text + (turn.result or "")


class TasksWithAnswers(EnvironmentTaskSet):
    """Tasks whose expert needs no shared object: tools, a sandbox or a judge are not started for it."""

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        if not self.settings.has_experts:
            return None
        environment = self.plugin_class(self.settings)
        environment.task = task
        steps = cast(Sequence[Step] | None, environment.expert())
        return None if steps is None else list(steps)


def native_fault(turns: Sequence[NativeTurn], config: RewardConfig) -> str | None:
    """Why the format of an episode with native calls is bad; None if it is good.

    A good format has at least one thought if thoughts are required, no call that could not be parsed, and a
    last turn that answers, with a closed box if that is required.
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
            f"What a tool returns appears between <{config.result_tag}> and </{config.result_tag}>; never "
            f"write that yourself. You have {config.max_calls} calls."
        ),
        f"End with <answer>{box}</answer>, which holds the final answer and nothing else.",
    ]
    return "\n".join(lines)


def _native_prompt(config: ToolsConfig) -> str:
    """The same without the tools, which the chat template describes."""
    boxed = config.reward.require_boxed
    if not config.tools:
        answer = r"Write the final answer as \boxed{...}." if boxed else "Answer the question."
        return answer if config.prompt == "short" else f"Solve the question step by step. {answer}"
    if config.prompt == "short":
        return r"Use the tools, then answer with \boxed{...}." if boxed else "Use the tools, then answer."
    thinking = "Put your thoughts in <think> and </think>. " if config.reward.require_think else ""
    return f"Solve the question step by step. {thinking}You have {config.max_calls} tool calls. " + (
        r"Then answer without a call; write the final answer as \boxed{...}."
        if boxed
        else "Then answer without a call; write the final answer and nothing else."
    )
