"""Requests with one deadline for the whole answer: connection, headers and body. By httpx2, whose own limits
are those of one read.

The requests run on an event loop in a thread of their own, where a deadline can end them wherever they wait:
a server that sends a byte now and then stalls too. Redirects are not followed, since they would carry a key
to another host.
"""

import asyncio
import json
import os
import re
import ssl
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

import anyio
import h11  # noqa: F401
import httpcore2  # noqa: F401
import httpx2
from pydantic import Field, field_validator

from outrider.config import Settings
from outrider.errors import ConfigError, EngineFault, ModelError
from outrider.printing import one_line
from outrider.seeding import stream
from outrider.tokens.call_formats import find_call_error, sanitize_call
from outrider.tokens.template import CallShape
from outrider.tokens.tool_calls import call_id, parse_call, split_thinking
from outrider.types import Message, ToolCall, ToolSchema

_MAX_BYTES = 16 << 20
_MAX_ERROR_BYTES = 1 << 14
# shorter than servers keep an idle connection (uvicorn: 5 s), so that none is found closed
_KEEPALIVE_S = 2.0

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """``reason`` is the server's own word for its status. ``content`` is raw: no encoding was asked for. Of
    an error it is what came in time, at most 16 KiB.
    """

    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes

    @property
    def is_error(self) -> bool:
        """Anything but success; a redirect too."""
        return not 200 <= self.status < 300


class AnswerTooLarge(httpx2.RemoteProtocolError):
    """A successful answer of more bytes than were asked for."""


class HttpClient:
    """Safe to use from several threads, and in a forked child. ``transport`` takes the place of the network
    in tests. ``is_bare``: no answer changes what a later request says (cookies), and no variable of the
    environment where it goes (proxies).
    """

    def __init__(self, transport: httpx2.AsyncBaseTransport | None = None, *, is_bare: bool = False) -> None:
        self._transport = transport
        self._is_bare = is_bare
        self._lock = threading.Lock()
        self._loops: dict[int, _Loop] = {}  # by process: threads do not outlive a fork

    def request(
        self,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        max_bytes: int = _MAX_BYTES,
        server_name: str | None = None,
    ) -> HttpAnswer:
        """POST with a body, GET without one. ``server_name``: whose certificate is asked for where the url
        holds a number in place of the name.

        Raises TimeoutError at the deadline, httpx2.HTTPError for a broken connection or an answer that is no
        HTTP, and httpx2.InvalidURL or ValueError for an address that cannot be.
        """
        with self._lock:
            loop = self._loops.get(os.getpid())
            if loop is None:
                loop = self._loops[os.getpid()] = _Loop(self._transport, self._is_bare)
                weakref.finalize(self, loop.stop)
        extensions = {} if server_name is None else {"sni_hostname": server_name}
        work = _exchange(loop.client, url, body, headers, timeout_s, max_bytes, extensions)
        return loop.run(work)


class _Loop:
    """An event loop in a thread, and its client."""

    def __init__(self, transport: httpx2.AsyncBaseTransport | None, is_bare: bool = False) -> None:
        policy = DefaultCookiePolicy(allowed_domains=() if is_bare else None)
        limits = httpx2.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S)
        self.client = httpx2.AsyncClient(
            transport=transport,
            verify=ssl.create_default_context(),
            timeout=None,
            limits=limits,
            follow_redirects=False,
            cookies=CookieJar(policy),
            trust_env=not is_bare,
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, name="outrider-http", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run on the loop and wait. An interrupted wait ends the work."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the thread; not waited for."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _serve(self) -> None:
        try:
            # httpx2 imports its network (those above, and what anyio needs of asyncio) at its first request,
            # within its deadline.
            self._loop.run_until_complete(anyio.sleep(0))
            self._loop.run_forever()
            self._loop.run_until_complete(self.client.aclose())
        finally:
            self._loop.close()


async def _exchange(
    client: httpx2.AsyncClient,
    url: str,
    body: bytes | None,
    headers: Mapping[str, str],
    timeout_s: float,
    max_bytes: int = _MAX_BYTES,
    extensions: Mapping[str, Any] | None = None,
) -> HttpAnswer:
    content = bytearray()
    response: httpx2.Response | None = None
    method = "GET" if body is None else "POST"
    request_headers = {**headers, "Accept-Encoding": "identity"}  # a few bytes could unpack to gigabytes
    try:
        async with (
            asyncio.timeout(timeout_s) as deadline,
            client.stream(
                method, url, content=body, headers=request_headers, extensions=dict(extensions or {})
            ) as response,
        ):
            async for chunk in response.aiter_raw():
                content += chunk
                if _is_past(deadline):  # chunks that have come already are read without waiting
                    raise TimeoutError
                if not response.is_success and len(content) > _MAX_ERROR_BYTES:
                    break
                if len(content) > max_bytes:
                    raise AnswerTooLarge(f"an answer of more than {max_bytes} bytes")
    except (TimeoutError, httpx2.HTTPError):
        if response is None or response.is_success:
            raise
    assert response is not None
    return HttpAnswer(
        status=response.status_code,
        reason=response.reason_phrase,
        headers=response.headers,
        content=bytes(content[: max_bytes if response.is_success else _MAX_ERROR_BYTES]),
    )


def _is_past(deadline: asyncio.Timeout) -> bool:
    when = deadline.when()
    return when is not None and asyncio.get_running_loop().time() >= when


# Requests to a chat server, and the meaning of its answers.


_MAX_LINE = 300
REASONING: Final = ("reasoning", "reasoning_content")
"""What servers call a turn's thinking: newer vLLMs, and the others."""


class Transient(Exception):
    """A failure worth another try. ``kind`` is counted; ``wait_s`` is what the server asks for, in
    seconds.
    """

    def __init__(self, kind: str, text: str, *, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.kind = kind
        self.wait_s = wait_s


_TOO_LONG = re.compile(
    (
        r"context[ _](?:length|window|size)|maximum context|too many tokens"
        r"|(?:prompt|input)\w* (?:is|are) too long"
    ),
    re.IGNORECASE,
)


class Refusal(Exception):
    """A status that the same request will get again."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status

    @property
    def is_too_long(self) -> bool:
        """Whether the conversation does not fit the server's context: the agent's end, and no fault of the
        server.
        """
        return self.status in (400, 413, 422) and _TOO_LONG.search(str(self)) is not None


def wire_messages(messages: Sequence[Message], *, continues: bool) -> tuple[list[dict[str, Any]], bool]:
    """Messages in the server's form, and whether the last one is an open assistant message to be continued.

    With ``continues``, inline text joins the assistant message that it continues; without, it becomes a user
    message. So does a tool's message that answers no call of the turn before it. Thinking that stands apart
    has both names that servers know.
    """
    wire: list[dict[str, Any]] = []
    called: set[str] = set()
    for message in messages:
        joins = continues and message.role in ("assistant", "inline")
        if joins and wire and wire[-1]["role"] == "assistant":
            wire[-1]["content"] += message.content
        elif message.role == "assistant" or joins:
            wire.append(_assistant(message))
            called = {call.call_id for call in message.tool_calls}
        elif message.role == "tool" and message.tool_call_id in called:
            wire.append({"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content})
        else:
            role = "system" if message.role == "system" else "user"
            wire.append({"role": role, "content": message.content})
    return wire, continues and bool(messages) and messages[-1].role == "inline"


def _assistant(message: Message) -> dict[str, Any]:
    thinking = {key: message.reasoning for key in REASONING if message.reasoning}
    if not message.tool_calls:
        return {"role": "assistant", "content": message.content} | thinking
    return CallShape(arguments_are_text=True).message(message.tool_calls, message.content) | thinking


def without_thinking(messages: Sequence[Message]) -> list[Message]:
    """The messages with the thinking cut from the text of every turn that is over; an open turn keeps its
    own.

    Of a turn that calls tools it stands apart then: as in training, the template says how much of it a chain
    of calls shows.
    """
    next_roles = [*(message.role for message in messages[1:]), None]
    return [
        _cut(message) if message.role == "assistant" and role not in ("inline", None) else message
        for message, role in zip(messages, next_roles, strict=True)
    ]


def _cut(message: Message) -> Message:
    thinking, words, _ = split_thinking(message.content)
    apart = thinking if message.tool_calls and thinking else message.reasoning
    return replace(message, content=words, reasoning=apart)


def reply_text(text: str, stop: Sequence[str], choice: Mapping[str, object]) -> str:
    """A turn's text up to and with the first stop string, as local engines keep it.

    Servers leave the stop string out. vLLM names it in ``stop_reason``. For others, where ``</name>`` is a
    stop string and ``<name>`` was opened last, the turn is taken to have ended there (an end-of-turn inside
    an open tag looks the same).
    """
    ends = [text.index(end) + len(end) for end in stop if end in text]
    if ends:
        return text[: min(ends)]
    if choice.get("finish_reason") == "length":
        return text
    if "stop_reason" in choice:
        reason = choice["stop_reason"]
        return text + reason if isinstance(reason, str) and reason in stop else text
    opened = [(text.rfind(f"<{end[2:]}"), end) for end in stop if end.startswith("</")]
    position, last = max(opened, default=(-1, ""))
    return text + last if position >= 0 else text


def refusal_line(answer: HttpAnswer) -> str:
    """Status and the server's own words. They may be long, and hold anything."""
    raw = answer.content.decode("utf-8", "replace")
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError):
        parsed = None
    match parsed:
        case {"error": {"message": str(text)}} | {"error": str(text)} | {"message": str(text)}:
            raw = text
    words = " ".join(raw.split())
    return f"status {answer.status} {answer.reason}" + (f": {words}" if words else "")


def shown(text: str, key: str) -> str:
    """Words of a server, or about it, as one line for people: without the key, without control characters,
    not too long.
    """
    if key:
        # as a library quotes it
        for secret in (key, repr(key)[1:-1], key.replace("\\", r"\\").replace("'", r"\'")):
            text = text.replace(secret, "***")
    return " ".join(one_line(text).split())[:_MAX_LINE]


# Tools and native calls in a chat server's form.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCalls:
    """The calls that a server has read out of a turn: those that the tools take, what was wrong with the
    others, and those as they were written. ``forwarded`` are all of them, as a program that asked the server
    itself would get them.
    """

    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    forwarded: tuple[ToolCall, ...] = ()


NO_CALLS: Final = ServedCalls()


def wire_tools(tools: Sequence[ToolSchema]) -> list[dict[str, Any]]:
    """What a request tells of the tools."""
    return [{"type": "function", "function": dict(tool)} for tool in tools]


def served_calls(message: Mapping[str, Any], tools: Sequence[ToolSchema]) -> ServedCalls:
    """The calls of an answer's message, with the server's ids where it gives each its own.

    What the model wrote is a problem in words; raises Transient for what only a server writes.
    """
    entries = message.get("tool_calls") or []
    calls: dict[str, ToolCall] = {}
    problems: list[str] = []
    unread: list[str] = []
    forwarded: list[ToolCall] = []
    for number, entry in enumerate(entries if isinstance(entries, list) else [None]):
        match entry:
            case {"function": {"name": str(name)} as function}:
                written = function.get("arguments")
            case _:
                raise Transient("garbage", "the answer holds no tool call where one should be")
        call = parse_call({"name": name, "arguments": written}, number, keys=("arguments",))
        if not isinstance(call, str) and isinstance(whole := sanitize_call(call), ToolCall):
            forwarded.append(whole)
        problem = f"The call: {call}." if isinstance(call, str) else find_call_error(call, tools)
        if isinstance(call, str) or problem:
            problems.append(problem)
            unread.append(f"{name} {written if isinstance(written, str) else json.dumps(written)}")
            continue
        ids = (entry.get("id"), *(call_id(free) for free in range(number, len(entries) + number)))
        own = next(name for name in ids if isinstance(name, str) and name and name not in calls)
        calls[own] = replace(call, call_id=own)
    return ServedCalls(
        calls=tuple(calls.values()),
        problems=tuple(problems),
        unread=tuple(unread),
        forwarded=tuple(forwarded),
    )


def served_reasoning(message: Mapping[str, Any]) -> str:
    """Thinking that the server took out of a turn, under either of the names that servers give it."""
    return next((text for key in REASONING if isinstance(text := message.get(key), str) and text), "")


# Client for any OpenAI-compatible chat server: off-policy trajectories and evaluation, never training.
#
# Chat servers take text and return text, so this is no :class:`~outrider.engines.base.Engine`: no ids, no
# log-probs.
#
# The tag protocol continues one assistant message after a result, which plain chat servers cannot do. With
# ``continues_messages`` (vLLM's ``continue_final_message``) the open message is sent to be continued, exactly
# as in training; without it every result goes as a user message behind the turn it answers.


_TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
_HOPELESS_STATUS = frozenset({401, 403, 404})

ReadT = TypeVar("ReadT")


class EndpointSettings(Settings):
    """Where the server is and how long to be patient with it. Seconds."""

    base_url: str
    """Up to and with the version, such as ``http://127.0.0.1:8000/v1``."""
    model: str = "default"
    """Name on the server; ``default`` takes the first that it serves (:meth:`ChatEndpoint.discovered`)."""
    api_key_variable: str = "OUTRIDER_API_KEY"
    """Environment variable that holds the key; unset or empty sends none."""
    timeout_s: float = Field(120.0, gt=0)
    """For each answer as a whole, so a server that sends a byte now and then stalls too."""
    max_retries: int = Field(5, ge=0)
    backoff_s: float = Field(1.0, ge=0)
    """First wait before a retry; it doubles every time, and half of it is drawn from a named random
    stream.
    """
    max_backoff_s: float = Field(30.0, ge=0)
    continues_messages: bool = False
    """The server takes ``continue_final_message`` (vLLM)."""
    seed: int = 0
    """Of the stream that spreads retries."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the server's chat template, sent as ``chat_template_kwargs`` (vLLM, SGLang), such as
    ``{enable_thinking = false}``, with ``history_thinking`` beside them.
    """
    history_thinking: Literal["keep", "strip"] = "keep"
    """Whether earlier turns are sent with the thinking that stands in their text; as the model was trained
    (``model.history_thinking`` of its run). Thinking that the server gave apart goes back apart: its template
    decides.
    """

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, base_url: str) -> str:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(f"{base_url!r} is no http or https address")
        if not base_url.isascii() or not base_url.isprintable() or " " in base_url:
            raise ValueError(f"{base_url!r} holds characters that an address cannot have")
        return base_url.rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """One answer. ``text`` keeps the stop string that ended it; ``finish`` is the server's word for why it
    ended, None where it gives none.

    ``num_tokens`` and ``num_context_tokens`` are the server's own counts; 0 where it gives none.
    ``reasoning`` and ``served`` are what a server took out of the text, where it did; only a request with
    tools asks for calls.
    """

    text: str
    finish: str | None = None
    num_tokens: int = 0
    num_context_tokens: int = 0
    reasoning: str = ""
    served: ServedCalls = NO_CALLS

    @property
    def truncated(self) -> bool:
        """Whether the token limit ended it."""
        return self.finish == "length"


class ChatEndpoint:
    """Asks one model of one server; safe to use from several threads.

    429, 5xx, refused and lost connections, stalls and answers that are no completion are retried. After the
    last try :class:`EngineFault` is raised; a request that the server refuses for good raises it at once.
    401, 403 and 404 mean that no request will ever work: :class:`ModelError`. No error message holds the key.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        *,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self.settings = settings
        self.retries: Counter[str] = Counter()
        self._sleep = sleep
        self._lock = threading.Lock()
        self._client = HttpClient(transport)
        self._key = os.environ.get(settings.api_key_variable, "").strip()
        if not self._key.isascii() or not (self._key.isprintable() or not self._key):
            raise ConfigError(
                f"the key in ${settings.api_key_variable} holds characters that a header cannot have"
            )

    @property
    def num_retries(self) -> int:
        """Requests that were sent again; ``retries`` tells why."""
        return self.retries.total()

    def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        temperature: float,
        stop: Sequence[str] = (),
        seed: int = 0,
        tools: Sequence[ToolSchema] = (),
    ) -> ChatReply:
        """The assistant's next turn, or the next piece of its open message after an ``inline`` result.

        A server that leaves out the stop string it met gets it appended (see ``wire.reply_text``). ``tools``
        may be called natively: a server that reads calls gives them apart.
        """
        if self.settings.history_thinking == "strip":
            messages = without_thinking(messages)
        wire, is_continued = wire_messages(messages, continues=self.settings.continues_messages)
        body: dict[str, Any] = {
            "model": self.settings.model,
            "messages": wire,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed % 2**31,
        }
        if stop:
            body["stop"] = list(stop)
        if is_continued:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if tools:
            body["tools"] = wire_tools(tools)
        if variables := self._variables():
            body["chat_template_kwargs"] = variables
        return self._patiently("chat/completions", body, lambda answer: _reply(answer, stop, tools), seed)

    def _variables(self) -> dict[str, Any]:
        """Of the chat template. ``history_thinking`` is a variable as well, which a template may know; where
        nothing is asked of it nothing is sent, since not every server takes the field.
        """
        chosen = self.settings.history_thinking
        if not self.settings.template_kwargs and chosen == "keep":
            return {}
        return {"history_thinking": chosen} | self.settings.template_kwargs

    def discovered(self) -> EndpointSettings:
        """The settings with what the server's list of models tells: the name behind ``default``, and whether
        it is vLLM.

        A server without such a list leaves them as they are. Raises EngineFault when nothing answers, and
        ModelError when the list lacks the model.
        """
        try:
            served = self._patiently("models", None, _models, 0)
        except ModelError as error:
            if isinstance(error.__cause__, Refusal) and error.__cause__.status == 404:
                return self.settings
            raise
        name = next(iter(served), "default") if self.settings.model == "default" else self.settings.model
        if served and name not in served:
            raise ModelError(
                f"{self.settings.base_url} serves {shown(', '.join(served), self._key)}, not {name}"
            )
        continues = self.settings.continues_messages or served.get(name) == "vllm"
        return self.settings.model_copy(update={"model": name, "continues_messages": continues})

    def _patiently(
        self, path: str, body: Mapping[str, Any] | None, read: Callable[[Any], ReadT], key: int
    ) -> ReadT:
        """Ask until there is an answer that ``read`` accepts, or until the tries are spent."""
        url = f"{self.settings.base_url}/{path}"
        for attempt in range(self.settings.max_retries + 1):
            try:
                return read(self._send_request(url, body))
            except Refusal as refusal:
                if refusal.status not in _HOPELESS_STATUS:
                    raise EngineFault(f"{url}: {refusal}") from refusal
                hint = (
                    f" (is ${self.settings.api_key_variable} set to a valid key?)"
                    if refusal.status in (401, 403)
                    else ""
                )
                raise ModelError(f"{url}: {refusal}{hint}") from refusal
            except Transient as problem:
                if attempt == self.settings.max_retries:
                    raise EngineFault(
                        f"{url}: gave up after {attempt + 1} tries, the last: {problem}"
                    ) from problem
                with self._lock:
                    self.retries[problem.kind] += 1
                self._sleep(self._wait_s(attempt, key, problem.wait_s))
        raise AssertionError("unreachable: the last attempt raises")

    def _wait_s(self, attempt: int, key: int, server_wait_s: float) -> float:
        """Exponential back-off, half of it jitter; at least what the server asks for, never more than the
        maximum.
        """
        full = self.settings.backoff_s * 2.0**attempt
        jittered = full * (
            0.5 + 0.5 * float(stream(self.settings.seed, "endpoint back-off", key, attempt).random())
        )
        return min(self.settings.max_backoff_s, max(jittered, server_wait_s))

    def _send_request(self, url: str, body: Mapping[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        sent = None if body is None else json.dumps(body).encode()
        try:
            answer = self._client.request(url, sent, headers, timeout_s=self.settings.timeout_s)
        except TimeoutError as error:
            raise Transient("timeout", f"no answer within {self.settings.timeout_s:g} s") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            # what was no HTTP may be anything
            reason = str(error).partition(": bytearray(")[0] or type(error).__name__
            raise Transient("connection", f"no connection: {shown(reason, self._key)}") from error
        if answer.is_error:
            raise self._to_error(answer)
        try:
            return json.loads(answer.content)
        except (ValueError, RecursionError) as error:
            raise Transient("garbage", "the answer is no JSON") from error

    def _to_error(self, answer: HttpAnswer) -> Exception:
        line = shown(refusal_line(answer), self._key)
        if answer.status not in _TRANSIENT_STATUS and answer.status < 500:
            return Refusal(answer.status, line)
        retry_after = answer.headers.get("Retry-After", "")
        wait_s = float(retry_after) if retry_after.isascii() and retry_after.isdecimal() else 0.0
        return Transient(f"status {answer.status}", line, wait_s=wait_s)


def _reply(answer: Any, stop: Sequence[str], tools: Sequence[ToolSchema]) -> ChatReply:
    """The completion in an answer; raises Transient when there is none."""
    match answer:
        case {
            "choices": [{"finish_reason": "abort" | "error" | "content_filter" as reason}, *_]
        }:  # the server's doing, status 200
            raise Transient("aborted", f"the server ended the answer: {reason}")
        case {"choices": [{"message": dict(message)} as choice, *_]} if isinstance(
            content := _content(message, choice), str
        ):
            finish = choice.get("finish_reason")
            return ChatReply(
                text=reply_text(content, stop, choice),
                finish=finish if isinstance(finish, str) else None,
                num_tokens=_counted(answer, "completion_tokens"),
                num_context_tokens=_counted(answer, "prompt_tokens"),
                reasoning=served_reasoning(message),
                served=served_calls(message, tools) if tools else NO_CALLS,
            )
    raise Transient("garbage", "the answer holds no completion")


def _counted(answer: Mapping[str, Any], name: str) -> int:
    usage = answer.get("usage")
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and count > 0 else 0


def _content(message: Mapping[str, Any], choice: Mapping[str, Any]) -> object:
    """Nothing said is a turn where the model ended it itself, or wrote elsewhere (reasoning, a native tool
    call).
    """
    content = message.get("content")
    return (
        "" if content is None and choice.get("finish_reason") in ("stop", "length", "tool_calls") else content
    )


def _models(answer: Any) -> dict[str, str]:
    """Served models and who owns them, in the server's order; empty for an answer of another form."""
    match answer:
        case {"data": list(entries)}:
            return {
                entry["id"]: str(entry.get("owned_by"))
                for entry in entries
                # it is shown to people
                if isinstance(entry, dict) and isinstance(entry.get("id"), str) and entry["id"].isprintable()
            }
    return {}
