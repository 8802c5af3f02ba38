"""The contract of a tool (a name, text in, text out), and what tools that share a process need: time limits,
a cache and a budget of calls.
"""

import contextlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

from outrider.config import Settings
from outrider.tokens.tool_calls import Accepted, Arguments, accepted_values
from outrider.types import Json, ToolCall, ToolSchema

# The contract of a tool: a name, text in, text out.


class ToolSettings(Settings):
    """Base of the settings of tools that have more to say than their keys."""

    def waiting_s(self, num_concurrent: int) -> float:
        """Seconds that a call may wait for those of so many other episodes."""
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutput:
    """Result of one executed call. ``failed`` marks that the call ran and reported an error of the caller's
    making (a Python exception, say); the text then says which. An error of the infrastructure is a ToolFault
    instead.
    """

    text: str
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """Facts for building a tool beside its own settings: those of the environment that has it."""

    environment: Any


class Tool(Protocol):
    """A tool that the policy calls by writing ``<name>input</name>``. Called from several threads at once.

    As a plug-in, a class with the tag ``name`` and the line ``usage``, which tells the policy in the system
    prompt what to write. For native calls it may say what it does (``description``) and name its one
    argument (``argument``). A Python function is a plug-in too (:mod:`outrider.tools.functions`).
    """

    @property
    def name(self) -> str:
        """The tag name, lower case."""
        ...

    def run_text(self, text: str) -> ToolOutput:
        """Execute one call. Raises ToolFault when the infrastructure broke, never for bad input."""
        ...

    def close(self) -> None:
        """Release what the tool holds; may be called twice."""
        ...


@runtime_checkable
class SchemaTool(Tool, Protocol):
    """A tool with named arguments."""

    @property
    def schema(self) -> ToolSchema:
        """Name, description and the JSON schema of its arguments."""
        ...

    def run_call(self, arguments: Mapping[str, Json]) -> ToolOutput:
        """Execute one native call, whose arguments fit the schema at the top level. Raises as
        :meth:`run_text`.
        """
        ...


class ToolGroup(ABC):
    """A plug-in that brings several tools, known only from its settings: those of an MCP server, say."""

    @classmethod
    @abstractmethod
    def lines(cls, settings: Any) -> Mapping[str, str]:
        """The line of the system prompt of every tool by its tag name, in order. May ask a server.

        Raises ToolUnavailable where that cannot be told.
        """

    @classmethod
    def names(cls, settings: Any) -> tuple[str, ...]:
        """The tag names alone, for which a recipe may be enough."""
        return tuple(cls.lines(settings))

    @property
    @abstractmethod
    def tools(self) -> Sequence[Tool]:
        """The tools, in that order. Each is closed by whoever has it."""


# What a policy is told of a tool that it calls by tag, out of the tool's schema; and arguments to try it.


_TRIAL_VALUES: Final[Mapping[str, tuple[Json, ...]]] = {
    "string": ("...", "", "1"),
    "integer": (1, 0, -1),
    "number": (1.5, 0, -1),
    "boolean": (True, False),
    "array": ([],),
    "object": ({},),
    "null": (None,),
}
"""Values of a type; the first one is shown."""
_MAX_DEPTH: Final = 3


def usage_line(schema: ToolSchema) -> str:
    """What the system prompt says of a tool: what to write, what for, and what its arguments are."""
    name, spec = schema["name"], Arguments.from_schema(schema)
    first = spec.alternatives[0] if spec.alternatives else None
    omitted = set() if first is None else {key for item in spec.alternatives for key in item} - {*first}
    example_arguments = {
        key: _values(spec.schema(key), spec.root)[0] for key in spec.properties if key not in omitted
    }
    example = text_argument(schema) or json.dumps(example_arguments, ensure_ascii=False)
    purpose = _sentence(str(schema["description"]))
    arguments = "; ".join(_argument(spec, key) for key in spec.properties)
    sentences = [
        f"Write <{name}>{example}</{name}> for this: {purpose}",
        f"{arguments}." if arguments else "",
    ]
    if spec.alternatives:
        sets = [" and ".join(item) or "none of these" for item in spec.alternatives]
        sentences.append(f"Give {' or '.join(sets)}.")
    if not spec.properties and not spec.is_closed:
        sentences.append("It takes a JSON object with any arguments.")
    return " ".join(item for item in sentences if item)


def text_argument(schema: ToolSchema) -> str | None:
    """The name of the one argument of a tool that has no other, where it is a text."""
    spec = Arguments.from_schema(schema)
    only = next(iter(spec.properties)) if len(spec.properties) == 1 else None
    accepted = None if only is None else spec.accepted(only)
    return only if accepted is not None and _is_text(accepted) else None


def trial_arguments(schema: ToolSchema) -> list[dict[str, Json]]:
    """Arguments that a tool takes by its schema: those that it needs alone, and all of them, with several
    values.
    """
    spec = Arguments.from_schema(schema)
    values = {key: _values(spec.schema(key), spec.root) for key in spec.properties}
    rows = range(max((len(item) for item in values.values()), default=1))
    full_sets: list[dict[str, Json]] = [
        {key: item[row % len(item)] for key, item in values.items()} for row in rows
    ]
    needed = [dict.fromkeys((*spec.required, *item)) for item in spec.alternatives or ((),)]
    return [*({key: values[key][0] for key in keys if key in values} for keys in needed), *full_sets]


def _argument(spec: Arguments, key: str) -> str:
    schema, accepted = spec.schema(key), spec.accepted(key)
    kinds = [] if accepted is None else [accepted.describe().removeprefix("of type ")]
    if key not in spec.required:
        kinds.append("may be left out")
    description = schema.get("description") if isinstance(schema, Mapping) else None
    detail = (
        f": {_sentence(description).removesuffix('.')}"
        if isinstance(description, str) and description
        else ""
    )
    return key + (f" ({', '.join(kinds)})" if kinds else "") + detail


def _sentence(text: str) -> str:
    """In one line."""
    return " ".join(text.split()).rstrip(".") + "."


def _is_text(accepted: Accepted) -> bool:
    return not set(accepted.types) - {"string"} and all(
        isinstance(choice, str) for choice in accepted.choices
    )


def _values(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[Json]:
    """Some values that a schema takes, the plainest one first."""
    accepted = accepted_values(schema, root)
    if accepted is None:
        return ["..."]
    values: list[Json] = list(accepted.choices)
    for kind in accepted.types:
        inner = _inner_value(kind, schema, root, depth)
        values += _TRIAL_VALUES[kind] if inner is None else (inner,)
    return values


def _inner_value(kind: str, schema: Any, root: Mapping[str, Any], depth: int) -> Json:
    """A list or an object that is not empty, where the schema itself says what is inside; else None."""
    if kind == "array" and depth < _MAX_DEPTH and isinstance(schema.get("items"), Mapping):
        return [_values(schema["items"], root, depth + 1)[0]]
    if kind == "object" and depth < _MAX_DEPTH and isinstance(schema.get("properties"), Mapping):
        return {
            key: _values(property_schema, root, depth + 1)[0]
            for key, property_schema in schema["properties"].items()
        }
    return None


# The tools of one environment under their names: one registry for calls by tag and native calls.


_INPUT = "input"


class Toolset:
    """Tools by name, each called with text (a tag's inside) or with named arguments (a native call).

    A tool that knows text only has one argument: its class may name it (``argument``) and say what the tool
    does (``description``).
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self.names: tuple[str, ...] = tuple(self._tools)

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """What a policy is told of them, in order."""
        return tuple(tool_schema(tool) for tool in self._tools.values())

    def run_text(self, name: str, text: str) -> ToolOutput:
        """One call by tag. Raises ToolFault when the infrastructure broke."""
        return self._tools[name].run_text(text)

    def run_call(self, call: ToolCall) -> ToolOutput:
        """One native call, whose arguments were checked against the schema. Raises ToolFault when the
        infrastructure broke.
        """
        tool = self._tools[call.name]
        if isinstance(tool, SchemaTool):
            return tool.run_call(call.arguments)
        text = str(call.arguments[argument_name(tool)])
        if not text.strip():
            return ToolOutput(text=f"The argument {argument_name(tool)!r} is empty.", failed=True)
        return tool.run_text(text)

    def call_key(self, call: ToolCall) -> tuple[str, str]:
        """What makes two native calls the same one."""
        return call.name, repr(_sorted(call.arguments))

    def close(self) -> None:
        """Close the tools; may be called twice."""
        for tool in self._tools.values():
            tool.close()


def argument_name(tool: Tool) -> str:
    """The name of the one argument of a tool that knows text only."""
    return str(getattr(tool, "argument", _INPUT))


def tool_schema(tool: Tool) -> ToolSchema:
    """What a policy is told of a tool."""
    if isinstance(tool, SchemaTool):
        return tool.schema
    description = getattr(tool, "description", f"The tool {tool.name}.")
    argument = {"type": "string", "description": "What the tool is given."}
    return {
        "name": tool.name,
        "description": str(description),
        "parameters": {
            "type": "object",
            "properties": {argument_name(tool): argument},
            "required": [argument_name(tool)],
        },
    }


def _sorted(value: Any) -> object:
    if isinstance(value, Mapping):
        return sorted((key, _sorted(item)) for key, item in value.items())
    return [_sorted(item) for item in value] if isinstance(value, list) else value


# The time limit of an environment's call. It does not run while the call waits for a shared process.


class CallAbandoned(Exception):
    """Raised in a waiting call whose caller no longer waits for it."""


class CallClock:
    """Measures one call that runs in a thread of its own; safe to use from several threads.

    Waiting in a queue behind the calls of other episodes, and work that has a limit of its own (grading,
    code in the sandbox), is not the call's time: what one policy writes must not become a fault of another.
    """

    def __init__(self, limit_s: float) -> None:
        self._lock = threading.Lock()
        self._left_s = limit_s
        self._num_pauses = 0
        self._since = time.monotonic()
        self._is_abandoned = False
        self._wake_ups: list[Callable[[], None]] = []

    def seconds_left(self) -> float:
        """Seconds until the limit if the clock runs from now on; 0 or less at the limit."""
        with self._lock:
            return self._left_s - (0.0 if self._num_pauses else time.monotonic() - self._since)

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for the call any more."""
        return self._is_abandoned

    def abandon(self) -> None:
        """Nobody waits for the call any more: it leaves the queues that it waits in."""
        with self._lock:
            self._is_abandoned = True
            wake_ups = list(self._wake_ups)
        for wake_up in wake_ups:
            wake_up()

    @contextlib.contextmanager
    def paused(self, wake_up: Callable[[], None]) -> Iterator[None]:
        """Stop the clock for the block; ``wake_up`` is called if the call is abandoned meanwhile."""
        with self._lock:
            if not self._num_pauses:
                self._left_s -= time.monotonic() - self._since
            self._num_pauses += 1
            self._wake_ups.append(wake_up)
            is_abandoned = self._is_abandoned
        try:
            if is_abandoned:
                wake_up()
            yield
        finally:
            with self._lock:
                self._wake_ups.remove(wake_up)
                self._num_pauses -= 1
                self._since = time.monotonic()

    @contextlib.contextmanager
    def running_here(self) -> Iterator[None]:
        """Make this the clock of the calling thread for the block."""
        _THREAD.clock = self
        try:
            yield
        finally:
            _THREAD.clock = None


_THREAD = threading.local()


@contextlib.contextmanager
def uncounted(wake_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Stop the clock of this thread's call, if it has one; see :meth:`CallClock.paused`."""
    clock: CallClock | None = getattr(_THREAD, "clock", None)
    if clock is None:
        yield
        return
    with clock.paused(wake_up):
        yield


def is_abandoned() -> bool:
    """Whether nobody waits for this thread's call any more."""
    clock: CallClock | None = getattr(_THREAD, "clock", None)
    return clock is not None and clock.is_abandoned


# Things that many threads share one at a time, handed out in the order in which the threads asked.


ItemT = TypeVar("ItemT")


class FairPool(Generic[ItemT]):
    """First come, first served; of several idle items the one used last, which is warm.

    ``queue.Queue`` is not fair: a thread that gives an item back and asks again takes it before the one that
    was woken for it.
    """

    def __init__(self, items: Iterable[ItemT]) -> None:
        self._idle = list(items)
        self._waiting: deque[_Turn[ItemT]] = deque()
        self._lock = threading.Lock()

    def acquire(self) -> ItemT:
        """An item for this thread alone; waits behind all who asked before. Give it back with
        :meth:`give`.

        The wait is not part of the time limit of an environment's call. Raises CallAbandoned if nobody waits
        for that call any more.
        """
        turn: _Turn[ItemT] = _Turn()
        try:
            with self._lock:
                if self._idle and not self._waiting:
                    return self._idle.pop()
                self._waiting.append(turn)
            with uncounted(turn.ready.set):
                turn.ready.wait()
            if is_abandoned():
                raise CallAbandoned
        except BaseException:  # interrupted: leave the line, or pass on what was handed over just now
            with self._lock:
                if turn in self._waiting:
                    self._waiting.remove(turn)
            for item in turn.item:
                self.release(item)
            raise
        return turn.item[0]

    def release(self, item: ItemT) -> None:
        """Hand the item to the thread that has waited longest; it is idle when nobody waits."""
        with self._lock:
            if not self._waiting:
                self._idle.append(item)
                return
            turn = self._waiting.popleft()
            turn.item.append(item)
        turn.ready.set()


class _Turn(Generic[ItemT]):
    """One thread's place in the line."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.item: list[ItemT] = []


# A bounded cache in which everything is made once, however many threads ask for it at a time.


ValueT = TypeVar("ValueT")


class SingleFlightCache(Generic[ValueT]):
    """Keeps ``size`` values; the one that was asked for longest ago goes first. What raised is not kept."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._futures: OrderedDict[Hashable, Future[ValueT]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._futures)

    def get(self, key: Hashable, make: Callable[[], ValueT]) -> ValueT:
        """The value of a key, made by the first who asks; the others wait for it, or for its exception.

        Their wait is not part of the time limit of an environment's call. If the first one's call is
        abandoned, the next one makes the value.
        """
        while True:
            try:
                return self._get(key, make)
            except CallAbandoned:
                if is_abandoned():
                    raise

    def _get(self, key: Hashable, make: Callable[[], ValueT]) -> ValueT:
        with self._lock:
            future = self._futures.get(key)
            if future is not None:
                self._futures.move_to_end(key)
            else:
                own_future: Future[ValueT] = Future()
                self._futures[key] = own_future
                if len(self._futures) > self._size:
                    self._futures.popitem(last=False)
        if future is not None:
            with uncounted():
                return future.result()
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                if self._futures.get(key) is own_future:
                    del self._futures[key]
            own_future.set_exception(error)
            raise
        own_future.set_result(value)
        return value


# A cap on the tool calls of a whole training batch, which does not depend on how fast tools answer.


class CallBudget:
    """Counts the calls that all episodes of a batch execute. Once ``limit`` are spent, the next round is
    refused its calls.

    Whether there are calls left is decided when a round begins and holds for the whole round: decided call by
    call, the fastest tools would choose who is refused, and one seed would not give one batch. So the last
    round may go over the limit by its own calls. Outside a limited batch nothing is refused.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._whole = limit  # of the batch, where several processes play it
        self.num_executed = 0
        self._limited = False
        self._open = True
        self._lock = threading.Lock()

    def set_share(self, begin: int, end: int, num_groups: int) -> None:
        """From the next batch on, have the part of the limit that is due to the groups ``begin`` to ``end``
        of ``num_groups``, if several processes play one batch; the parts of all groups add up to the limit.
        """
        if self._whole is not None:
            self.limit = self._whole * end // num_groups - self._whole * begin // num_groups

    def resume_batch(self, num_spent: int) -> None:
        """Continue a limited batch of whose part ``num_spent`` calls are spent: by another process, or before
        a process was restarted.
        """
        self._limited = self.limit is not None
        self.num_executed = num_spent
        self.begin_round()

    def begin_batch(self, *, limited: bool) -> None:
        """A new batch has all its calls."""
        self._limited = limited and self.limit is not None
        self.num_executed = 0
        self.begin_round()

    def begin_round(self) -> None:
        """Nobody executes anything now: decide about the next round."""
        self._open = not self._limited or self.limit is None or self.num_executed < self.limit

    @property
    def is_open(self) -> bool:
        """Whether calls of this round are executed."""
        return self._open

    def count(self) -> None:
        """One call was executed."""
        with self._lock:
            self.num_executed += 1
