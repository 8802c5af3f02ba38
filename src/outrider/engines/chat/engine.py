"""Client for any OpenAI-compatible chat server: off-policy trajectories and evaluation, never training.

Chat servers take text and return text, so this is no :class:`~outrider.engines.base.Engine`: no ids, no
log-probs.

The tag protocol continues one assistant message after a result, which plain chat servers cannot do. With
``continues_messages`` (vLLM's ``continue_final_message``) the open message is sent to be continued, exactly
as in training; without it every result goes as a user message behind the turn it answers.
"""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import Field, field_validator

from outrider.config import Settings
from outrider.engines.chat.http_client import HttpAnswer, HttpClient
from outrider.engines.chat.native_calls import (
    NO_CALLS,
    ServedCalls,
    served_calls,
    served_reasoning,
    wire_tools,
)
from outrider.engines.chat.wire import (
    Refusal,
    Transient,
    refusal_line,
    reply_text,
    shown,
    wire_messages,
    without_thinking,
)
from outrider.errors import ConfigError, EngineFault, ModelError
from outrider.seeding import stream
from outrider.types import Message, ToolSchema

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
