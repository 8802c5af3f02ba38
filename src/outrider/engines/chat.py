"""Client of OpenAI-compatible chat servers: off-policy trajectories and evaluation, never training.

Chat servers take and return text, without ids and log-probs, so this is no
:class:`~outrider.engines.base.Engine`. The tag protocol continues one assistant message after a result, which
plain chat servers cannot do. With ``continues_messages`` (vLLM's ``continue_final_message``) the open message
is sent to be continued, exactly as in training; without it every result is sent as a user message after the
turn that it answers.
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
from outrider.printing import one_line, plural
from outrider.seeding import stream
from outrider.tokens.call_formats import find_call_error, sanitize_call
from outrider.tokens.template import CallShape
from outrider.tokens.tool_calls import call_id, parse_call, split_thinking
from outrider.types import Message, ToolCall, ToolSchema

_MAX_BYTES = 16 << 20
_MAX_ERROR_BYTES = 1 << 14
# Shorter than the time after which servers close an idle connection (uvicorn: 5 s).
_KEEPALIVE_S = 2.0
_MAX_LINE = 300
_REASONING: Final = ("reasoning", "reasoning_content")  # a turn's thinking: newer vLLMs, other servers
_TOO_LONG = re.compile(
    r"context[ _](?:length|window|size)|maximum context|too many tokens"
    r"|(?:prompt|input)\w* (?:is|are) too long",
    re.IGNORECASE,
)
_NEWER_LIMIT: Final = "max_completion_tokens"
# Finish reasons, in lower case. Any other one says that the server gave up: abort, content_filter,
# insufficient_system_resource (DeepSeek), network_error (Zhipu).
_TRUNCATED: Final = frozenset({
    "length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"
})  # fmt: skip
_FINISHED: Final = _TRUNCATED | {
    "", "null", "stop", "stop_sequence", "eos", "eos_token", "end_turn", "tool_calls", "tool_use",
    "function_call", "complete", "completed", "repetition",
}  # fmt: skip
_TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
_HOPELESS_STATUS = frozenset({401, 403, 404})

ResultT = TypeVar("ResultT")


# --- HTTP with one deadline for the whole response ---


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """A response. ``reason`` is the server's text for its status. ``content`` is raw; for an error it is what
    arrived in time, at most 16 KiB.
    """

    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes

    @property
    def is_error(self) -> bool:
        """Whether this is no success; a redirect is an error too."""
        return not 200 <= self.status < 300


class AnswerTooLarge(httpx2.RemoteProtocolError):
    """A successful response is longer than ``max_bytes``."""


class HttpClient:
    """Sends requests with one deadline for connection, headers and body; thread-safe, also in a forked child.

    The time limits of httpx2 are those of one read, so that a server that sends a byte now and then would
    never time out. Requests therefore run on an event loop in a thread, where a deadline can cancel them at
    any point. Redirects are not followed, because they would send the key to another host.

    Tests replace the network by ``transport``. With ``is_bare``, cookies and the environment's proxies are
    ignored.
    """

    def __init__(self, transport: httpx2.AsyncBaseTransport | None = None, *, is_bare: bool = False) -> None:
        self._transport = transport
        self._is_bare = is_bare
        self._lock = threading.Lock()
        self._loops: dict[int, _Loop] = {}  # by process id: threads do not survive a fork

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
        """POST with a body, GET without one.

        ``server_name`` is the host of the TLS certificate if the url contains an address instead. Raises
        TimeoutError at the deadline, httpx2.HTTPError for a broken connection or an invalid response, and
        httpx2.InvalidURL or ValueError for an invalid url.
        """
        loop = self.loop()
        # a few compressed bytes could unpack to gigabytes
        sent = {**headers, "Accept-Encoding": "identity"}
        extensions = {} if server_name is None else {"sni_hostname": server_name}

        async def exchange() -> HttpAnswer:
            content = bytearray()
            response: httpx2.Response | None = None
            method = "GET" if body is None else "POST"
            ends = asyncio.get_running_loop().time() + timeout_s
            try:
                async with (
                    asyncio.timeout_at(ends),
                    loop.client.stream(
                        method, url, content=body, headers=sent, extensions=extensions
                    ) as response,
                ):
                    async for chunk in response.aiter_raw():
                        content += chunk
                        # available chunks are read without waiting, so that the timeout alone would never
                        # fire
                        if asyncio.get_running_loop().time() >= ends:
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

        return loop.run(exchange())

    def loop(self) -> "_Loop":
        """The event loop of this process, started at the first call."""
        with self._lock:
            loop = self._loops.get(os.getpid())
            if loop is None:
                loop = self._loops[os.getpid()] = _Loop(self._transport, self._is_bare)
                weakref.finalize(self, loop.stop)
            return loop


class _Loop:
    """An event loop in a thread, and its client."""

    def __init__(self, transport: httpx2.AsyncBaseTransport | None, is_bare: bool = False) -> None:
        policy = DefaultCookiePolicy(allowed_domains=() if is_bare else None)
        self.client = httpx2.AsyncClient(
            transport=transport,
            verify=ssl.create_default_context(),
            timeout=None,
            limits=httpx2.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S),
            follow_redirects=False,
            cookies=CookieJar(policy),
            trust_env=not is_bare,
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, name="outrider-http", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine on the loop and wait for it. An interrupted wait cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the thread, without waiting for it."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _serve(self) -> None:
        try:
            # httpx2 imports its network stack (the unused imports above, and anyio's part for asyncio) at its
            # first request, which would count towards the deadline of that request.
            self._loop.run_until_complete(anyio.sleep(0))
            self._loop.run_forever()
            self._loop.run_until_complete(self.client.aclose())
        finally:
            self._loop.close()


# --- The format of requests and responses ---


class Transient(Exception):
    """A failure that is retried. ``kind`` is counted; ``wait_s`` is the wait that the server requested."""

    def __init__(self, kind: str, text: str, *, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.kind = kind
        self.wait_s = wait_s


class Refusal(Exception):
    """An error status that does not change if the request is repeated."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status

    @property
    def is_too_long(self) -> bool:
        """Whether the conversation exceeds the server's context length, which is no fault of the server."""
        return self.status in (400, 413, 422) and _TOO_LONG.search(str(self)) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCalls:
    """Tool calls that the server parsed out of a turn.

    ``calls`` are valid. ``problems`` and ``unread`` are the errors and the texts of the others. ``forwarded``
    are all calls, as a program that uses the server directly would receive them.
    """

    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    forwarded: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """One completion.

    ``text`` includes the stop string that ended it. ``finish`` is the server's finish reason, or None.
    ``num_tokens`` and ``num_context_tokens`` are the server's counts, or 0. ``reasoning`` and ``served`` are
    what the server parsed out of the text; calls are only parsed for a request with tools.
    """

    text: str
    finish: str | None = None
    num_tokens: int = 0
    num_context_tokens: int = 0
    reasoning: str = ""
    served: ServedCalls = ServedCalls()

    @property
    def truncated(self) -> bool:
        """Whether the token limit ended it."""
        return self.finish == "length"


def wire_messages(messages: Sequence[Message], *, continues: bool) -> tuple[list[dict[str, Any]], bool]:
    """Convert messages to the server's format; also returns whether the last one is to be continued.

    With ``continues``, inline text is appended to the open assistant message; without, it becomes a user
    message. A tool message that answers no call of the previous turn becomes a user message too. Separate
    thinking is sent under both names that servers know.
    """
    wire: list[dict[str, Any]] = []
    called: set[str] = set()
    for message in messages:
        joins = continues and message.role in ("assistant", "inline")
        if joins and wire and wire[-1]["role"] == "assistant":
            wire[-1]["content"] += message.content
        elif message.role == "assistant" or joins:
            assistant: dict[str, Any] = {"role": "assistant", "content": message.content}
            if message.tool_calls:
                shape = CallShape(arguments_are_text=True)
                assistant = shape.message(message.tool_calls, message.content)
            wire.append(assistant | {key: message.reasoning for key in _REASONING if message.reasoning})
            called = {call.call_id for call in message.tool_calls}
        elif message.role == "tool" and message.tool_call_id in called:
            wire.append({"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content})
        else:
            role = "system" if message.role == "system" else "user"
            wire.append({"role": role, "content": message.content})
    return wire, continues and bool(messages) and messages[-1].role == "inline"


def _without_thinking(messages: Sequence[Message]) -> list[Message]:
    """Strip the thinking from the text of every completed turn.

    If the turn calls tools, its thinking becomes separate ``reasoning``: as in training, the chat template
    decides how much of it a chain of calls contains.
    """
    stripped = []
    next_roles = [*(message.role for message in messages[1:]), None]
    for message, next_role in zip(messages, next_roles, strict=True):
        if message.role == "assistant" and next_role not in ("inline", None):
            thinking, words, _ = split_thinking(message.content)
            reasoning = thinking if message.tool_calls and thinking else message.reasoning
            message = replace(message, content=words, reasoning=reasoning)
        stripped.append(message)
    return stripped


def reply_text(text: str, stop: Sequence[str], choice: Mapping[str, object]) -> str:
    """Return a turn's text up to and including the first stop string, as local engines do.

    Servers omit the stop string. vLLM reports it as ``stop_reason``. For other servers, if ``</name>`` is a
    stop string and ``<name>`` was opened last, we assume that it ended the turn (an end of turn inside an
    open tag looks the same).
    """
    ends = [text.index(end) + len(end) for end in stop if end in text]
    if ends:
        return text[: min(ends)]
    if str(choice.get("finish_reason")).lower() in _TRUNCATED:
        return text
    if "stop_reason" in choice:
        reason = choice["stop_reason"]
        return text + reason if isinstance(reason, str) and reason in stop else text
    opened = [(text.rfind(f"<{end[2:]}"), end) for end in stop if end.startswith("</")]
    position, last = max(opened, default=(-1, ""))
    return text + last if position >= 0 else text


def served_calls(message: Mapping[str, Any], tools: Sequence[ToolSchema]) -> ServedCalls:
    """Read the calls of a response, with the server's ids if they are unique.

    Errors of the model are listed as problems; raises Transient for errors of the server.
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
                raise Transient("garbage", "a tool call of the response has no name")
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


def _read_reply(answer: Any, stop: Sequence[str], tools: Sequence[ToolSchema]) -> ChatReply:
    """Read the completion of a response; raises Transient if there is none."""
    match answer:
        case {"choices": [{"finish_reason": str(reason)}, *_]} if reason.lower() not in _FINISHED:
            # sent with status 200
            raise Transient("aborted", f"the server ended the answer: {reason}"[:200])
        case {"choices": [{"message": dict(message)} as choice, *_]}:
            finish, content = choice.get("finish_reason"), message.get("content")
            if str(finish).lower() in _TRUNCATED:
                finish = "length"
            reasoning = [text for key in _REASONING if isinstance(text := message.get(key), str) and text]
            if isinstance(content, list):
                content, thoughts = _join_parts(content)
                reasoning += [thoughts] if thoughts else []
            has_other = bool(reasoning or message.get("tool_calls"))
            if content is None and ((isinstance(finish, str) and finish != "function_call") or has_other):
                content = ""  # an empty turn, or only thinking or calls
            if isinstance(content, str):
                usage = answer.get("usage")
                counts = usage if isinstance(usage, dict) else {}
                num_tokens, num_context_tokens = (
                    count if isinstance(count := counts.get(name), int) and count > 0 else 0
                    for name in ("completion_tokens", "prompt_tokens")
                )
                return ChatReply(
                    text=reply_text(content, stop, choice),
                    finish=finish if isinstance(finish, str) else None,
                    num_tokens=num_tokens,
                    num_context_tokens=num_context_tokens,
                    reasoning=next(iter(reasoning), ""),
                    served=served_calls(message, tools) if tools else ServedCalls(),
                )
    error = answer.get("error") if isinstance(answer, dict) else None
    words = f": {json.dumps(error)}"[:200] if error else ""
    raise Transient("garbage", f"the response has no completion{words}")


def _join_parts(parts: Sequence[Any]) -> tuple[str, str]:
    """Return text and thinking of a content in parts (Mistral). Raises Transient for other parts."""
    texts, thoughts = [], []
    for part in parts:
        match part:
            case str(text) | {"type": "text" | "output_text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)} | {"type": "reasoning", "text": str(text)}:
                thoughts.append(text)
            case {"type": "thinking", "thinking": list(inner)}:
                thoughts.append(_join_parts(inner)[0])
            case _:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise Transient("garbage", f"the response has a part of the type {one_line(str(kind))[:40]}")
    return "".join(texts), "\n".join(thoughts)


def _read_models(answer: Any) -> dict[str, str]:
    """Served models and their owners, in the server's order; empty for a response of another form."""
    match answer:
        case {"data": list(entries)}:
            return {
                entry["id"]: str(entry.get("owned_by"))
                for entry in entries
                # names are printed
                if isinstance(entry, dict) and isinstance(entry.get("id"), str) and entry["id"].isprintable()
            }
    return {}


# --- The endpoint ---


class EndpointSettings(Settings):
    """Address of a chat server, and how long to wait for it. Times are in seconds."""

    base_url: str
    """Address including the version, for example ``http://127.0.0.1:8000/v1``."""
    model: str = "default"
    """Name on the server; ``default`` is the first model that it serves (:meth:`ChatEndpoint.discovered`)."""
    api_key_variable: str = "OUTRIDER_API_KEY"
    """Environment variable with the key; no key is sent if it is unset or empty."""
    timeout_s: float = Field(120.0, gt=0)
    """Time limit of a whole response."""
    max_retries: int = Field(5, ge=0)
    """Number of retries of a request after a transient error."""
    backoff_s: float = Field(1.0, ge=0)
    """Wait before the first retry. It doubles with each retry, and half of it is random (a named stream)."""
    max_backoff_s: float = Field(30.0, ge=0)
    """Longest wait between two tries."""
    continues_messages: bool = False
    """The server accepts ``continue_final_message`` (vLLM)."""
    seed: int = 0
    """Seed of the random part of the waits."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the server's chat template, sent as ``chat_template_kwargs`` (vLLM, SGLang) together with
    ``history_thinking``. For example ``{enable_thinking = false}``.
    """
    history_thinking: Literal["keep", "strip"] = "keep"
    """Whether earlier turns are sent with the thinking in their text; use the setting with which the model
    was trained (``model.history_thinking`` of its run). Thinking that the server returned separately is sent
    separately, and its template decides.
    """

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, base_url: str) -> str:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(f"{base_url!r} is no http or https address")
        if not base_url.isascii() or not base_url.isprintable() or " " in base_url:
            raise ValueError(f"{base_url!r} has characters that an address cannot have")
        return base_url.rstrip("/")


class ChatEndpoint:
    """Client of one model of one server; thread-safe.

    429, 5xx, refused and lost connections, timeouts and invalid responses are retried; after the last attempt
    :class:`EngineFault` is raised. Another error status raises EngineFault at once. 401, 403 and 404 mean
    that no request will ever succeed: :class:`ModelError`. No error message contains the key. ``retries``
    counts retries by reason.
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
        self._limit_key = "max_tokens"
        self._key = os.environ.get(settings.api_key_variable, "").strip()
        if not self._key.isascii() or not (self._key.isprintable() or not self._key):
            raise ConfigError(
                f"the key in ${settings.api_key_variable} has characters that a header cannot have"
            )

    def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        temperature: float,
        stop: Sequence[str] = (),
        seed: int = 0,
        tools: Sequence[ToolSchema] = (),
        top_p: float | None = None,
        top_k: int | None = None,
    ) -> ChatReply:
        """Request the assistant's next turn, or the next piece of its open message after an ``inline``
        result.

        The model may call ``tools`` natively; a server that parses calls returns them separately. ``top_p``
        and ``top_k`` (vLLM, SGLang) are only sent if they are set.
        """
        settings = self.settings
        if settings.history_thinking == "strip":
            messages = _without_thinking(messages)
        wire, is_continued = wire_messages(messages, continues=settings.continues_messages)
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": wire,
            self._limit_key: max_tokens,
            "temperature": temperature,
            "seed": seed % 2**31,
        }
        if stop:
            body["stop"] = list(stop)
        if top_p is not None:
            body["top_p"] = top_p
        if top_k is not None:
            body["top_k"] = top_k
        if is_continued:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if tools:
            body["tools"] = [{"type": "function", "function": dict(tool)} for tool in tools]
        # not every server accepts the field, so it is only sent if it differs from the default
        if settings.template_kwargs or settings.history_thinking != "keep":
            history = {"history_thinking": settings.history_thinking}
            body["chat_template_kwargs"] = history | settings.template_kwargs

        def read(answer: Any) -> ChatReply:
            return _read_reply(answer, stop, tools)

        try:
            return self.request("chat/completions", body, read, seed)
        except EngineFault as error:
            # OpenAI's reasoning models refuse the older name
            if _NEWER_LIMIT in body or not (
                isinstance(error.__cause__, Refusal)
                and _NEWER_LIMIT in str(error.__cause__)
                and not error.__cause__.is_too_long
            ):
                raise
            body[_NEWER_LIMIT] = body.pop("max_tokens")
            reply = self.request("chat/completions", body, read, seed)
            self._limit_key = _NEWER_LIMIT
            return reply

    def discovered(self) -> EndpointSettings:
        """Complete the settings by the server's list of models: the name for ``default``, and
        ``continues_messages`` for vLLM.

        If the server has no such list, the settings are unchanged. Raises EngineFault if it does not respond,
        and ModelError if the list lacks the model.
        """
        try:
            served = self.request("models", None, _read_models, 0)
        except ModelError as error:
            if isinstance(error.__cause__, Refusal) and error.__cause__.status == 404:
                return self.settings
            raise
        name = next(iter(served), "default") if self.settings.model == "default" else self.settings.model
        if served and name not in served:
            raise ModelError(
                f"{self.settings.base_url} serves {self._to_line(', '.join(served))}, not {name}"
            )
        continues = self.settings.continues_messages or served.get(name) == "vllm"
        return self.settings.model_copy(update={"model": name, "continues_messages": continues})

    def request(
        self, path: str, body: Mapping[str, Any] | None, read: Callable[[Any], ResultT], key: int
    ) -> ResultT:
        """Send a request until ``read``, which raises Transient, accepts the response. ``key`` selects the
        random stream of the waits. Raises EngineFault, and ModelError if the server will never answer.
        """
        url = f"{self.settings.base_url}/{path}"
        for attempt in range(self.settings.max_retries + 1):
            try:
                return read(self._send(url, body))
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
                        f"{url}: gave up after {plural(attempt + 1, 'try', 'tries')}, the last: {problem}"
                    ) from problem
                with self._lock:
                    self.retries[problem.kind] += 1
                # exponential back-off, half of it random; at least the wait that the server requested
                draw = float(stream(self.settings.seed, "endpoint back-off", key, attempt).random())
                backoff_s = self.settings.backoff_s * 2.0**attempt * (0.5 + 0.5 * draw)
                self._sleep(min(self.settings.max_backoff_s, max(backoff_s, problem.wait_s)))
        raise AssertionError("unreachable: the last attempt raises")

    def _send(self, url: str, body: Mapping[str, Any] | None) -> Any:
        """Send one request and parse the response as JSON. Raises Transient or Refusal."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        sent = None if body is None else json.dumps(body).encode()
        try:
            answer = self._client.request(url, sent, headers, timeout_s=self.settings.timeout_s)
        except TimeoutError as error:
            raise Transient("timeout", f"no answer within {self.settings.timeout_s:g} s") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            # the message of h11 may quote the whole response
            reason = str(error).partition(": bytearray(")[0] or type(error).__name__
            raise Transient("connection", f"no connection: {self._to_line(reason)}") from error
        content = answer.content.decode("utf-8", "replace") if answer.is_error else answer.content
        try:
            parsed = json.loads(content)
        except (ValueError, RecursionError) as error:
            if not answer.is_error:
                begin = answer.content[:100].decode("utf-8", "replace")
                hint = ", it is a stream" if begin.startswith("data:") else ""
                raise Transient("garbage", f"the answer is no JSON{hint}: {self._to_line(begin)}") from error
            parsed = None
        if not answer.is_error:
            return parsed
        words = answer.content.decode("utf-8", "replace")
        match parsed:
            case {"error": {"message": str(text)}} | {"error": str(text)} | {"message": str(text)}:
                words = text
        words = " ".join(words.split())
        line = self._to_line(f"status {answer.status} {answer.reason}" + (f": {words}" if words else ""))
        if answer.status not in _TRANSIENT_STATUS and answer.status < 500:
            raise Refusal(answer.status, line)
        retry_after = answer.headers.get("Retry-After", "")
        wait_s = float(retry_after) if retry_after.isascii() and retry_after.isdecimal() else 0.0
        raise Transient(f"status {answer.status}", line, wait_s=wait_s)

    def _to_line(self, text: str) -> str:
        """Format a server's text as one short line, without the key and control characters."""
        if key := self._key:
            # also as repr() would quote it
            for secret in (key, repr(key)[1:-1], key.replace("\\", r"\\").replace("'", r"\'")):
                text = text.replace(secret, "***")
        return " ".join(one_line(text).split())[:_MAX_LINE]
