"""Rollouts of external programs (:mod:`outrider.environments.conversations`) that manage the conversation.

Each request contains a whole conversation. Messages that an earlier context contains reuse its token ids,
without tips; the rest is rendered after them. A request that continues after the last turn is appended to the
context. Any other request, for example a rewritten history, the conversation of another agent or a second
sample for the same request, starts a new context, and the rollout yields one more training sample.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from operator import eq
from typing import Any, Final, Self

from outrider.engines.base import FinishReason, Generation
from outrider.environments.base import Episode, ExternalEpisode, StepResult
from outrider.environments.conversations import Conversation, Refusal, SampledTurn
from outrider.errors import ConfigError, EnvironmentFault, ModelError
from outrider.rollout.episode import EpisodeRunner
from outrider.rollout.faults import LIMIT
from outrider.rollout.hooks import EpisodeState
from outrider.tokens import ChatRenderer, Tokenizer, decode_text
from outrider.trace import REBUILT, Node, Trace, split_contexts, without_memory
from outrider.types import Message, Outcome, Task, ToolSchema

_FOLLOW_UP_ROLES = ("user", "tool")  # rendered after a turn independently of what precedes it
MAX_REFUSALS: Final = 64  # per program: one that repeats a refused request would never end


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request and the policy's response.

    Attributes:
        request: the program's request.
        response: the message that the program received.
        context: the node before the turn.
        turn: the node of the turn.
        is_whole: False if a stop string of the program truncated the response.
    """

    request: Conversation
    response: Message
    context: Node
    turn: Node
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The next context of the policy.

    Attributes:
        token_ids: the appended ids or, if ``restarts``, the whole context.
        restarts: whether a new context starts.
        num_new: number of ids that no earlier context of the rollout contains.
        num_cut: number of ids that a :class:`~outrider.environments.conversations.PromptLimit` cut.
    """

    token_ids: tuple[int, ...]
    restarts: bool
    num_new: int
    num_cut: int = 0


class Unanswerable(Exception):
    """Raised for a request of a program that the policy cannot respond to."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


@contextmanager
def _refusals() -> Iterator[None]:
    """Convert errors of the chat template to Unanswerable, which is reported to the program."""
    try:
        yield
    except (ModelError, RecursionError) as error:
        reason = str(error).removeprefix("the tokenizer has no usable chat template: ")
        words = f"the policy's chat template cannot render these messages: {reason}"
        raise Unanswerable(Refusal(reason=words)) from error


@dataclass(kw_only=True)
class ExternalAgentState(EpisodeState):
    """``seen`` is the context of the pending request; None if the rollout's budget is exhausted."""

    episode: ExternalEpisode
    exchanges: list[Exchange] = field(default_factory=list)
    seen: Seen | None = None

    def snapshot(self) -> Self:
        twin = super().snapshot()
        twin.exchanges = list(self.exchanges)
        return twin


class ExternalAgentRunner(EpisodeRunner):
    """Runs rollouts whose conversation an external program manages."""

    async def _open(
        self, task: Task, trace: Trace, episode: Episode, rollout: int, mode: str
    ) -> EpisodeState:
        """Create the state at the first request that the policy can respond to, and refuse those before it.

        If the program ends after a request that is too long, that request is the prompt of a rollout without
        turns.

        Raises:
            EnvironmentFault: if the program ends without a request that can be rendered.
        """
        assert isinstance(episode, ExternalEpisode)
        ids: tuple[int, ...] = ()
        num_cut = 0
        tools = episode.tools  # read now: the program may end after its first request
        while True:
            request, problem = episode.request, ""
            try:
                ids, num_cut = cut_prompt(opening_ids(request, self.renderer), request)
                self._require_room(len(ids), request)
            except Unanswerable as error:
                result = await self._refuse(episode, error.refusal)
                if result is not None and not result.done:
                    continue
                if not ids:
                    raise EnvironmentFault(
                        f"the program ended without a request that can be served; the last: {error}"
                    ) from error
                problem = error.refusal.reason
            state = self._new_state(ExternalAgentState, task, trace, episode, rollout, mode, ids, tools)
            if num_cut:
                state.last_node.metadata["num_tokens_cut"] = num_cut
            if problem:  # no turn follows, although the context may have room for one
                state.num_response_tokens = self.limits.max_response_tokens
                if request.prompt_limit is not None:
                    state.last_node.metadata[LIMIT] = f"environment.window: {problem}"
            return state

    async def _sample(
        self, state: EpisodeState, *, max_tokens: int, stop: tuple[str, ...]
    ) -> tuple[Generation, str]:
        """Sample within the limits of the request, and pass log-probs and token bytes to the environment."""
        assert isinstance(state, ExternalAgentState)
        request = state.episode.request
        max_tokens, stop = min(max_tokens, request.max_tokens or max_tokens), (*stop, *request.stop)
        generation, text = await super()._sample(state, max_tokens=max_tokens, stop=stop)
        context = state.trace.token_ids(state.last_node.node_id)
        state.episode.set_sampled(sampled_turn(generation, context, self.renderer))
        return generation, text

    async def _act(self, state: EpisodeState, text: str, turn: Message | None = None) -> StepResult:
        """Respond to the request, then refuse requests until one can be rendered or the program ends."""
        assert isinstance(state, ExternalAgentState)
        request = state.episode.request
        result = await super()._act(state, text, turn)
        if turn is None:  # an action of a hook
            return result
        node = state.last_node
        assert node.parent is not None  # a policy turn follows its prompt
        is_whole = node.metadata["finish"] != FinishReason.STOP.value
        exchange = Exchange(
            request=request,
            response=turn,
            context=state.trace.nodes[node.parent],
            turn=node,
            is_whole=is_whole,
        )
        state.exchanges.append(exchange)
        state.seen = None
        while not result.done:
            try:
                state.seen = self._next_seen(state)
                break
            except Unanswerable as error:
                next_result = await self._refuse(state.episode, error.refusal)
                if next_result is None and request.prompt_limit is not None:
                    node.metadata[LIMIT] = f"environment.window: {error.refusal.reason}"
            if next_result is None:
                break
            result = next_result
        return result

    async def _refuse(self, episode: ExternalEpisode, refusal: Refusal) -> StepResult | None:
        """Refuse the pending request.

        Returns the program's next request or its end, or None if the rollout is truncated.
        """
        require_shorter(episode.request, refusal)
        num_before = len(episode.refusals)
        if num_before == MAX_REFUSALS:
            if refusal.is_too_long:
                return None
            raise EnvironmentFault(
                f"the program sent more than {num_before} requests that were refused; the last: "
                f"{refusal.reason}"
            )
        return await self._run_guarded(episode.refuse, refusal)

    def _next_seen(self, state: ExternalAgentState) -> Seen | None:
        """Render the next request, or return None if the rollout's budget is exhausted.

        Nothing is truncated unless the request has a limit of its own, because a server would not truncate it
        either.

        Raises:
            Unanswerable: if the template fails or the conversation exceeds the context.
        """
        request = state.episode.request
        if request.prompt_limit is not None:
            with _refusals():
                ids, num_cut = cut_prompt(self.renderer.prompt(request.messages, request.tools), request)
            self._require_room(len(ids), request)
            state.num_response_tokens = 0  # the budget is that of a context
            return Seen(token_ids=ids, restarts=True, num_new=0, num_cut=num_cut)
        seen = next_context(request, state.exchanges, state.trace, self.renderer)
        if self.limits.max_response_tokens - state.num_response_tokens - seen.num_new < 1:
            return None
        before = 0 if seen.restarts else len(state.trace.token_ids(state.last_node.node_id))
        self._require_room(before + len(seen.token_ids), request)
        return seen

    def _require_room(self, num_tokens: int, request: Conversation) -> None:
        """Raise Unanswerable if a context is longer than its limit or leaves the policy no room."""
        length, limit = self._context_length, request.prompt_limit
        if limit is not None and num_tokens > limit.max_tokens:
            reason = (
                f"the prompt has {num_tokens} tokens, more than environment.window.max_prompt_tokens = "
                f"{limit.max_tokens}"
            )
            raise Unanswerable(Refusal(reason=reason, is_too_long=True))
        if num_tokens >= length:
            reason = (
                f"This model's maximum context length is {length} tokens, and the messages have "
                f"{num_tokens} tokens: send a shorter conversation"
            )
            raise Unanswerable(Refusal(reason=reason, is_too_long=True))

    def _observe(self, state: EpisodeState, result: StepResult, finish: FinishReason) -> Outcome | None:
        assert isinstance(state, ExternalAgentState)
        seen = state.seen
        if seen is None or not self._append_seen(
            state, seen.token_ids, result.observations, seen.restarts, seen.num_new, num_cut=seen.num_cut
        ):
            return Outcome.TRUNCATED_TOKENS
        if state.episode.request.prompt_limit is not None:
            state.last_node.metadata[REBUILT] = True
        return None


def cut_prompt(ids: tuple[int, ...], request: Conversation) -> tuple[tuple[int, ...], int]:
    """Cut the ids of a prompt whose limit has the overflow ``left`` or ``right``.

    Returns the ids and the number of ids that were cut.
    """
    limit = request.prompt_limit
    if limit is None or limit.overflow not in ("left", "right") or len(ids) <= limit.max_tokens:
        return ids, 0
    num_cut = len(ids) - limit.max_tokens
    return (ids[num_cut:] if limit.overflow == "left" else ids[: limit.max_tokens]), num_cut


def require_shorter(request: Conversation, refusal: Refusal) -> None:
    """Raise ConfigError if a prompt that is too long must stop the run (overflow ``error``)."""
    limit = request.prompt_limit
    if limit is not None and limit.overflow == "error" and refusal.is_too_long:
        raise ConfigError(
            f"{refusal.reason}: raise environment.window.max_prompt_tokens, show fewer steps or commands, or "
            "set environment.window.overflow to another value than error"
        )


def sampled_turn(generation: Generation, context: Sequence[int], renderer: ChatRenderer) -> SampledTurn:
    """Return log-probs and token bytes of a turn, which the response to the program may include."""
    opened = renderer.opened(context)
    text = renderer.turn_text(generation.token_ids, context=context, is_closed=False).removeprefix(opened)
    return SampledTurn(
        token_bytes=token_bytes(renderer.tokenizer, generation.token_ids, visible_text=text),
        logprobs=generation.logprobs,
        finish=generation.finish_reason.value,
        num_context_tokens=len(context),
        opened=opened,
    )


# Token ids of requests.


def opening_ids(request: Conversation, renderer: ChatRenderer) -> tuple[int, ...]:
    """Return the token ids of a first request. Raises Unanswerable if the template fails."""
    with _refusals():
        return renderer.prompt(request.messages, request.tools)


def next_context(
    request: Conversation, exchanges: Sequence[Exchange], trace: Trace, renderer: ChatRenderer
) -> Seen:
    """Return the context of a later request. Raises Unanswerable if the template fails."""
    with _refusals():
        ids = _request_ids(request, exchanges, trace, renderer)
    before = trace.token_ids(exchanges[-1].turn.node_id)
    known = [before, *(_seen_ids(trace, item.turn) for item in exchanges)]
    num_new = len(ids) - max(sum(1 for _ in takewhile(bool, map(eq, ids, item))) for item in known)
    # An equal context is a second sample for the same request and must restart.
    extends = len(ids) > len(before) and ids[: len(before)] == before
    return Seen(token_ids=ids[len(before) :] if extends else ids, restarts=not extends, num_new=num_new)


def _request_ids(
    request: Conversation, exchanges: Sequence[Exchange], trace: Trace, renderer: ChatRenderer
) -> tuple[int, ...]:
    if renderer.history_thinking == "strip":
        return renderer.prompt(request.messages, request.tools)
    newest_first = exchanges[::-1]
    for exchange in newest_first:
        if request.messages == exchange.request.messages and request.tools == exchange.request.tools:
            return _seen_ids(trace, exchange.context)
    longest = max(
        (exchange for exchange in newest_first if _follows(request, exchange, renderer)),
        key=lambda exchange: len(exchange.request.messages),
        default=None,
    )
    if longest is None:
        return renderer.prompt(request.messages, request.tools)
    # The newest context is continued and keeps its tips. An older one restarts, without tips.
    is_newest = longest is exchanges[-1]
    ids = trace.token_ids(longest.turn.node_id) if is_newest else _seen_ids(trace, longest.turn)
    rest = request.messages[len(longest.request.messages) + 1 :]
    has_tools = bool(request.tools) or any(message.role == "tool" for message in request.messages)
    return (*ids, *renderer.with_tools(has_tools).bridge(ids, rest))


def _seen_ids(trace: Trace, node: Node) -> tuple[int, ...]:
    """Return the token ids of the context up to a node, without tips."""
    sample = split_contexts(trace.path(node.node_id))[-1]
    return tuple(token for sample_node in without_memory(sample) for token in sample_node.token_ids)


def _follows(request: Conversation, exchange: Exchange, renderer: ChatRenderer) -> bool:
    """Whether a request continues after the response of ``exchange``.

    The request may contain the response as the program received it, or in a form that renders to the same
    text.
    """
    known = (*exchange.request.messages, exchange.response)
    prefix, rest = request.messages[: len(known)], request.messages[len(known) :]
    if not exchange.is_whole or request.tools != exchange.request.tools or not rest:
        return False
    if any(message.role not in _FOLLOW_UP_ROLES for message in rest):
        return False
    original = [replace(message, reasoning="", problems=()) for message in known]
    sent = [replace(message, reasoning="", problems=()) for message in prefix]
    return original == sent or _renders_identically(original, sent, request.tools, renderer)


def _renders_identically(
    original: Sequence[Message], sent: Sequence[Message], tools: Sequence[ToolSchema], renderer: ChatRenderer
) -> bool:
    """Whether two conversations render to the same text: templates trim contents, and few render call ids."""
    if [_bare(message) for message in original] != [_bare(message) for message in sent]:
        return False  # rendering is slow, and these cannot render to the same text
    try:
        written = [renderer.whole_text(messages, tools, opened=False) for messages in (original, sent)]
    except ModelError:
        return False
    return written[0] == written[1]


def _bare(message: Message) -> Message:
    """Strip surrounding white space and remove call ids."""
    calls = tuple(replace(call, call_id="") for call in message.tool_calls)
    return replace(message, content=message.content.strip(), tool_calls=calls, tool_call_id="")


# Bytes of single tokens, including parts of characters.


_FALLBACK: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK: Final = "\u2581"  # SentencePiece's spelling of a blank
_LOST: Final = "\ufffd"


def token_bytes(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, visible_text: str | None = None
) -> tuple[bytes, ...]:
    """Return the bytes of every token of a turn.

    Joined, they are the UTF-8 of the turn's text with its special tokens, even if a character is spread over
    several tokens. Vocabularies spell bytes in one of two ways: byte-level BPE as one letter per byte,
    SentencePiece as ``<0xE4>``. For other vocabularies, all bytes of a character belong to the token that
    completes it.

    Args:
        tokenizer: the policy's tokenizer.
        token_ids: the ids of the turn.
        visible_text: the turn's text as the program receives it. If given, additional leading white space is
            removed: SentencePiece writes a blank before a first word, and templates write white space before
            a response.
    """
    text = decode_text(tokenizer, token_ids, skip_special_tokens=False)
    pieces = _vocabulary_bytes(tokenizer, token_ids)
    if pieces is not None:
        shorter = [pieces[0][1:], *pieces[1:]] if pieces and pieces[0].startswith(b" ") else pieces
        if _matches_text(pieces, text) or _matches_text(shorter, text):
            if visible_text is not None:
                return _without_lead(pieces, visible_text)
            return tuple(pieces if _matches_text(pieces, text) else shorter)
    pieces = _decode_pieces(tokenizer, token_ids)
    return tuple(pieces) if visible_text is None else _without_lead(pieces, visible_text)


def _without_lead(pieces: Sequence[bytes], visible_text: str) -> tuple[bytes, ...]:
    """Remove the leading white space that ``visible_text`` does not have."""
    num_more = _num_blanks(b"".join(pieces)) - _num_blanks(visible_text.encode())
    left: list[bytes] = []
    for piece in pieces:
        left.append(piece[max(0, num_more) :])
        num_more -= len(piece)
    return tuple(left)


def _num_blanks(text: bytes) -> int:
    return len(text) - len(text.lstrip())


def _matches_text(pieces: Sequence[bytes], text: str) -> bool:
    """Whether the bytes are those of the text up to the first replacement character.

    Decoders replace an incomplete character, and some also replace the bytes before it.
    """
    joined = b"".join(pieces)
    head, lost, _ = text.partition(_LOST)
    return joined.startswith(head.encode()) if lost else joined == text.encode()


def _vocabulary_bytes(tokenizer: Any, token_ids: Sequence[int]) -> list[bytes] | None:
    """Return every token's bytes as the vocabulary spells them, or None if it is not accessible."""
    names = getattr(tokenizer, "convert_ids_to_tokens", None)
    if names is None:
        return None
    added = tokenizer.added_tokens_decoder
    is_byte_level = _is_byte_level(tokenizer)
    pieces: list[bytes] = []
    for number, name in zip(token_ids, names(list(token_ids)), strict=True):
        if number in added:
            pieces.append(str(added[number]).encode())
        elif isinstance(name, bytes):  # tokenizers based on tiktoken
            pieces.append(name)
        elif not isinstance(name, str):
            return None
        elif is_byte_level:
            pieces.append(_from_letters(name))
        elif match := _FALLBACK.fullmatch(name):
            pieces.append(bytes([int(match[1], 16)]))
        else:
            pieces.append(name.replace(_BLANK, " ").encode())
    return pieces


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether the vocabulary is byte-level BPE, with one letter per byte."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is not None:
        try:
            return "ByteLevel" in _types(json.loads(decoder.__getstate__()))
        except (AttributeError, TypeError, ValueError):
            pass
    return hasattr(tokenizer, "byte_decoder")  # pure Python tokenizers, for example GPT-2's


def _types(decoder: Any) -> set[str]:
    if not isinstance(decoder, Mapping):
        return set()
    inner = decoder.get("decoders")
    names = {str(decoder.get("type"))}
    return names.union(*map(_types, inner)) if isinstance(inner, list) else names


def _from_letters(name: str) -> bytes:
    try:
        return bytes(_letters()[letter] for letter in name)
    except KeyError:  # an added token that added_tokens_decoder does not list
        return name.encode()


@cache
def _letters() -> Mapping[str, int]:
    """Map letters of byte-level BPE to bytes: printable Latin-1 to itself, U+0100 and up to the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _decode_pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[bytes]:
    """Return the bytes that every token adds to the text.

    Decoding starts a few tokens earlier, since many decoders treat the first token of a text differently.
    """

    def text(first: int, last: int) -> str:
        return decode_text(tokenizer, token_ids[first:last], skip_special_tokens=False)

    pieces: list[bytes] = []
    start = read = 0
    for end in range(1, len(token_ids) + 1):
        before, whole = text(start, read), text(start, end)
        is_open = whole.endswith(_LOST) and end < len(token_ids)
        if is_open or not whole.startswith(before):
            pieces.append(b"")
            continue
        pieces.append(whole[len(before) :].encode())
        start, read = read, end
    return pieces
