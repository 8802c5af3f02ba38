"""The protocol of tools, and time limits, pools, caches and call budgets for tools."""

import contextlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

from outrider.config import Settings
from outrider.errors import InvalidResult, ToolFault, unwrap_group
from outrider.tokens.tool_calls import Arguments, accepted_values, resolve_reference
from outrider.types import CallRecord, CallStatus, Json, ToolCall, ToolSchema

# The tool protocol.


class ToolSettings(Settings):
    """Base class of settings of tools whose calls may wait for each other."""

    def waiting_s(self, num_concurrent: int) -> float:
        """Seconds that a call may wait for the calls of ``num_concurrent`` other episodes."""
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutput:
    """Result of one executed call.

    ``failed``: the call reported an error that the caller caused, for example a Python exception, and the
    text describes it. Errors of the infrastructure are ToolFault exceptions instead. ``status`` is for the
    records; None: ``error`` if it failed, ``empty`` if the text is blank, otherwise ``ok``.
    """

    text: str
    failed: bool = False
    status: CallStatus | None = field(default=None, compare=False)

    @property
    def call_status(self) -> CallStatus:
        """The status of the call."""
        return self.status or ("error" if self.failed else "ok" if self.text.strip() else "empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """Context for building a tool: ``environment`` are the settings of the environment that uses it."""

    environment: Any


class Tool(Protocol):
    """A tool that the policy calls by writing ``<name>input</name>``. Called from several threads at once.

    A plug-in is a class with the attributes ``name``, its tag, and ``usage``, a line of the system prompt
    that explains the tag to the policy. For native calls it may define ``description`` and ``argument``, the
    name of its one argument. A Python function can also be a plug-in (:mod:`outrider.tools.functions`).
    """

    @property
    def name(self) -> str:
        """The tag name in lower case."""
        ...

    def run_text(self, text: str) -> ToolOutput:
        """Execute one call. Raises ToolFault if the infrastructure fails, never for invalid input."""
        ...

    def close(self) -> None:
        """Release resources; may be called twice."""
        ...


@runtime_checkable
class SchemaTool(Tool, Protocol):
    """A tool with named arguments."""

    @property
    def schema(self) -> ToolSchema:
        """Name, description and JSON schema of the arguments."""
        ...

    def run_call(self, arguments: Mapping[str, Json]) -> ToolOutput:
        """Execute one native call whose arguments match the top level of the schema.

        Raises the errors of :meth:`run_text`.
        """
        ...


class ToolGroup(ABC):
    """A plug-in that provides several tools depending on its settings, for example those of an MCP server."""

    @classmethod
    @abstractmethod
    def lines(cls, settings: Any) -> Mapping[str, str]:
        """Return the line of the system prompt of every tool, by tag name. May query a server.

        Raises ToolUnavailable if the lines cannot be determined.
        """

    @classmethod
    def names(cls, settings: Any) -> tuple[str, ...]:
        """Return only the tag names. Override it if the settings alone determine them."""
        return tuple(cls.lines(settings))

    @property
    @abstractmethod
    def tools(self) -> Sequence[Tool]:
        """The tools, in the order of :meth:`lines`. The environment that uses them closes them."""


# Descriptions of tools for the system prompt, and arguments for trial calls, both from the schema.


_TRIAL_VALUES: Final[Mapping[str, tuple[Json, ...]]] = {
    "string": ("...", "", "1"),
    "integer": (1, 0, -1),
    "number": (1.5, 0, -1),
    "boolean": (True, False),
    "array": ([],),
    "object": ({},),
    "null": (None,),
}
"""Example values of a JSON type; the first one appears in descriptions."""
_MAX_DEPTH: Final = 8  # levels of a schema: a model in a list has three


def usage_line(schema: ToolSchema) -> str:
    """Describe a tool for the system prompt: what to write, its purpose and its arguments."""
    name, spec = schema["name"], Arguments.from_schema(schema)
    first = spec.alternatives[0] if spec.alternatives else None
    omitted = set() if first is None else {key for item in spec.alternatives for key in item} - {*first}
    example_arguments = {
        key: _examples(spec.schema(key), spec.root)[0] for key in spec.properties if key not in omitted
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
    """Return the name of a tool's argument if there is only one and it is a text, otherwise None."""
    spec = Arguments.from_schema(schema)
    only = next(iter(spec.properties)) if len(spec.properties) == 1 else None
    accepted = None if only is None else spec.accepted(only)
    if accepted is None or set(accepted.types) - {"string"}:
        return None
    return only if all(isinstance(choice, str) for choice in accepted.choices) else None


def trial_arguments(schema: ToolSchema) -> list[dict[str, Json]]:
    """Return argument sets that match the schema: only the required arguments, and all of them with several
    values.
    """
    spec = Arguments.from_schema(schema)
    values = {key: _examples(spec.schema(key), spec.root) for key in spec.properties}
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
    """Join lines and end with a period."""
    return " ".join(text.split()).rstrip(".") + "."


def _examples(schema: Any, root: Mapping[str, Any]) -> list[Json]:
    return _values(schema, root) or ["..."]  # a schema that requires itself has no value


def _values(
    schema: Any, root: Mapping[str, Any], depth: int = 0, above: frozenset[str] = frozenset()
) -> list[Json]:
    """Return example values of a schema, the simplest one first; none for a reference to one of the schemas
    ``above`` and for what requires one, so that a recursive model ends with another branch of a union, an
    empty list or without the property.
    """
    if isinstance(schema, Mapping) and depth < _MAX_DEPTH:
        if isinstance(reference := schema.get("$ref"), str):
            if reference in above:
                return []
            return _values(resolve_reference(reference, root), root, depth + 1, above | {reference})
        branches = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(branches, list) and not schema.keys() & {"type", "enum", "const"}:
            return [value for branch in branches for value in _values(branch, root, depth, above)]
    accepted = accepted_values(schema, root)
    if accepted is None:
        return ["..."]
    values: list[Json] = list(accepted.choices)
    for kind in accepted.types:
        can_nest = depth < _MAX_DEPTH
        if can_nest and kind == "array" and isinstance(parts := schema.get("prefixItems"), list):
            entries = [_values(part, root, depth + 1, above)[:1] for part in parts]
            if all(entries):
                values.append([value for (value,) in entries])
        elif can_nest and kind == "array" and isinstance(items := schema.get("items"), Mapping):
            values.append([*_values(items, root, depth + 1, above)[:1]])
        elif can_nest and kind == "object" and isinstance(inner := schema.get("properties"), Mapping):
            found = {key: _values(item, root, depth + 1, above)[:1] for key, item in inner.items()}
            if all(found.get(key, True) for key in schema.get("required", ())):
                values.append({key: first[0] for key, first in found.items() if first})
        else:
            values += _TRIAL_VALUES[kind]
    return values


# The tools of one environment, for calls by tag and native calls.


_INPUT = "input"


class Toolset:
    """Tools by name, each called with text (a tag's inside) or with named arguments (a native call).

    A tool without a schema has one text argument. Its class may define the argument's name (``argument``) and
    the tool's ``description``.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self.names: tuple[str, ...] = tuple(self._tools)

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """The schemas of all tools, in order."""
        return tuple(tool_schema(tool) for tool in self._tools.values())

    def run_text(self, name: str, text: str) -> ToolOutput:
        """Execute one call by tag. Raises ToolFault if the infrastructure fails."""
        return self._tools[name].run_text(text)

    def run_call(self, call: ToolCall) -> ToolOutput:
        """Execute one native call whose arguments were validated against the schema.

        Raises ToolFault if the infrastructure fails.
        """
        tool = self._tools[call.name]
        if isinstance(tool, SchemaTool):
            return tool.run_call(call.arguments)
        text = str(call.arguments[argument_name(tool)])
        if not text.strip():
            return ToolOutput(text=f"The argument {argument_name(tool)!r} is empty.", failed=True)
        return tool.run_text(text)

    def call_key(self, call: ToolCall) -> tuple[str, str]:
        """Return a key that is equal for equal native calls."""
        return call.name, json.dumps(dict(call.arguments), sort_keys=True)

    def close(self) -> None:
        """Close the tools, also if one of them raises; may be called twice."""
        with contextlib.ExitStack() as opened:
            for tool in reversed(self._tools.values()):
                opened.callback(tool.close)


def recorded_call(run: Callable[[], ToolOutput], name: str, arguments: str) -> tuple[ToolOutput, CallRecord]:
    """Execute a call of the tool ``name``, and return its output and its record.

    A ToolFault is raised again with the record. It is a new one, because calls that wait for the same result
    share the exception. For a time-out of the step and for other exceptions, the clock of the step has the
    record (:attr:`CallClock.tool_calls`).
    """
    clock: CallClock | None = getattr(_THREAD, "clock", None)
    tool_calls = [] if clock is None else clock.tool_calls
    record = CallRecord(name=name, arguments=arguments, status="timeout")
    tool_calls.append(record)  # replaced at the end of the call, unless the step's limit is reached before
    start = time.perf_counter()

    def ended(status: CallStatus) -> CallRecord:
        tool_calls[-1] = replace(record, status=status, seconds=round(time.perf_counter() - start, 3))
        return tool_calls[-1]

    try:
        output = run()
    except BaseException as raised:
        fault = unwrap_group(raised, ToolFault)
        if not isinstance(fault, ToolFault):
            ended("error")
            raise
        error = ToolFault(str(fault))
        error.tool_calls = (ended("timeout" if is_timeout(fault) else "error"),)
        raise error from fault
    return output, ended(output.call_status)


def is_timeout(error: BaseException | None) -> bool:
    """Whether a time-out is the error or its cause."""
    return error is not None and (isinstance(error, TimeoutError) or is_timeout(error.__cause__))


def argument_name(tool: Tool) -> str:
    """Return the name of the argument of a tool without a schema."""
    return str(getattr(tool, "argument", _INPUT))


def plain_schema(schema: ToolSchema) -> ToolSchema:
    """Return a schema of a function, also if it is inside of ``{"type": "function", "function": ...}``, as
    OpenAI's API and Transformers write it. Raises InvalidResult for a schema without a name.
    """
    inner = schema.get("function") if schema.get("type") == "function" else None
    found: ToolSchema = inner if isinstance(inner, Mapping) else schema
    if not isinstance(found.get("name"), str):
        raise InvalidResult(f"the schema of a tool needs a name: {json.dumps(found, default=str)[:200]}")
    return found


def tool_schema(tool: Tool) -> ToolSchema:
    """Return the tool's schema, or one with a single text argument."""
    if isinstance(tool, SchemaTool):
        return plain_schema(tool.schema)
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


# Time limits of environment calls.


class CallAbandoned(Exception):
    """Raised in a waiting call after its caller stopped waiting for it."""


class CallClock:
    """The time limit of one call that runs in its own thread. Thread-safe.

    The clock is paused while the call waits for calls of other episodes, and during work with its own
    limit (grading, code in the sandbox). Otherwise a slow call of one rollout would cause a fault in another.

    ``tool_calls`` are the records of the tool calls that were started, for a call that fails.
    """

    def __init__(self, limit_s: float) -> None:
        self.tool_calls: list[CallRecord] = []
        self._lock = threading.Lock()
        self._left_s = limit_s
        self._num_pauses = 0
        self._since = time.monotonic()
        self.is_abandoned = False
        """Whether the caller has stopped waiting for the call."""
        self._wake_ups: list[Callable[[], None]] = []

    def seconds_left(self) -> float:
        """Return the seconds until the limit; 0 or less if it is reached."""
        with self._lock:
            return self._left_s - (0.0 if self._num_pauses else time.monotonic() - self._since)

    def abandon(self) -> None:
        """Mark the call as abandoned and wake it up in the queues where it waits, so that it leaves them."""
        with self._lock:
            self.is_abandoned = True
            wake_ups = list(self._wake_ups)
        for wake_up in wake_ups:
            wake_up()

    @contextlib.contextmanager
    def paused(self, wake_up: Callable[[], None]) -> Iterator[None]:
        """Pause the clock inside the block; ``wake_up`` is called if the call is abandoned meanwhile."""
        with self._lock:
            if not self._num_pauses:
                self._left_s -= time.monotonic() - self._since
            self._num_pauses += 1
            self._wake_ups.append(wake_up)
            is_abandoned = self.is_abandoned
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
        """Make this the clock of the calling thread inside the block."""
        _THREAD.clock = self
        try:
            yield
        finally:
            _THREAD.clock = None


_THREAD = threading.local()


@contextlib.contextmanager
def uncounted(wake_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Pause the clock of this thread's call, if it has one; see :meth:`CallClock.paused`."""
    clock: CallClock | None = getattr(_THREAD, "clock", None)
    if clock is None:
        yield
        return
    with clock.paused(wake_up):
        yield


def is_abandoned() -> bool:
    """Whether the caller has stopped waiting for this thread's call."""
    clock: CallClock | None = getattr(_THREAD, "clock", None)
    return clock is not None and clock.is_abandoned


# Fair pools of shared items.


ItemT = TypeVar("ItemT")


class FairPool(Generic[ItemT]):
    """A pool of items that threads acquire first come, first served.

    Of several idle items, the most recently used one is preferred because its caches are warm.
    ``queue.Queue`` is not fair: a thread that returns an item and requests one again can take it before the
    thread that was woken for it.
    """

    def __init__(self, items: Iterable[ItemT]) -> None:
        self._idle = list(items)
        self._waiting: deque[_Turn[ItemT]] = deque()
        self._lock = threading.Lock()

    def acquire(self) -> ItemT:
        """Wait for an item and return it for exclusive use. Return it to the pool with :meth:`release`.

        The wait does not count towards the time limit of an environment's call.

        Raises:
            CallAbandoned: if the caller has stopped waiting for that call.
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
        """Pass the item to the thread that has waited longest, or mark it as idle if no thread waits."""
        with self._lock:
            if not self._waiting:
                self._idle.append(item)
                return
            turn = self._waiting.popleft()
            turn.item.append(item)
        turn.ready.set()


class _Turn(Generic[ItemT]):
    """A waiting thread of a pool."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.item: list[ItemT] = []


# A bounded cache that computes every value once.


ValueT = TypeVar("ValueT")


class SingleFlightCache(Generic[ValueT]):
    """A thread-safe LRU cache of ``size`` values that concurrent requests for one key compute only once.

    Exceptions are not cached.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._futures: OrderedDict[Hashable, Future[ValueT]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._futures)

    def get(self, key: Hashable, make: Callable[[], ValueT]) -> ValueT:
        """Return the value of a key. The first thread that requests it computes it with ``make``.

        Other threads wait for the value or exception; their wait does not count towards the time limit of an
        environment's call. If the call of the first thread is abandoned, another thread computes the value.
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


# The budget of tool calls of a training batch.


class CallBudget:
    """Limits the number of tool calls that all episodes of a batch execute.

    After ``limit`` calls, the calls of later rounds are rejected. The decision is made at the start of a
    round and applies to the whole round: if it were made per call, the speed of tools would determine which
    calls are rejected, and the batch would not be reproducible. The last round may therefore exceed the
    limit. Outside of a limited batch, no call is rejected.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit  # a rollout worker sets the share of its group
        self.num_executed = 0
        self._limited = False
        self.is_open = True
        """Whether calls of this round are executed."""
        self._lock = threading.Lock()

    def begin_batch(self, *, limited: bool) -> None:
        """Reset the count for a new batch."""
        self._limited = limited and self.limit is not None
        self.num_executed = 0
        self.begin_round()

    def begin_round(self) -> None:
        """Decide whether the next round may execute calls. Call this while no call is running."""
        self.is_open = not self._limited or self.limit is None or self.num_executed < self.limit

    def count(self) -> None:
        """Count one executed call."""
        with self._lock:
            self.num_executed += 1
