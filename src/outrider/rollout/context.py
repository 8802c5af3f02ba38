"""What the policy did not write is appended to its context here, within the rollout's budgets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.engines.base import FinishReason, Request
from outrider.environments.base import EpisodeResult, StepResult, prompt_tools
from outrider.environments.conversations import OwnConversations
from outrider.errors import ConfigError, EngineFault
from outrider.rollout.base import Limits
from outrider.rollout.batching import RoundBatcher, StreamBatcher
from outrider.rollout.external_agent import Seen, next_context, require_room
from outrider.rollout.hooks import EpisodeState, Hook, Splice
from outrider.tokens import ChatRenderer
from outrider.trace import Node
from outrider.types import Message, Origin, ToolSchema

# A text that is longer than its budget loses its middle, because the end closes what the start opens. The
# cut is marked.


CUT_MARK = " [...] "
_NUM_END_TOKENS = 24  # tokens: they close tags and messages and open the assistant's turn


def render_bridge(
    context: Sequence[int], messages: Sequence[Message], limit: int, *, renderer: ChatRenderer
) -> tuple[tuple[int, ...], int]:
    """At most ``limit`` ids that put the messages behind the context, and how many were cut.

    Of several messages each loses its own middle, so that the template's words between them stay.
    """
    if len(messages) > 1:
        messages, num_lost = cut_messages(context, messages, limit, renderer=renderer)
    else:
        num_lost = 0
    token_ids, num_cut = truncate_ids(renderer.bridge(context, messages), limit, renderer=renderer)
    return token_ids, num_lost + num_cut


def cut_messages(
    context: Sequence[int], messages: Sequence[Message], limit: int, *, renderer: ChatRenderer
) -> tuple[Sequence[Message], int]:
    """The messages with texts so short that at most ``limit`` ids put them behind the context, and how many
    tokens they lost. Every one has an equal share of what there is.
    """
    ids = renderer.bridge(context, messages)
    if len(ids) <= limit:
        return messages, 0
    lengths = [len(renderer.bridge((), [Message(role="inline", content=m.content)])) for m in messages]
    share = max(0, limit - (len(ids) - sum(lengths))) // len(messages)
    cut = [replace(m, content=truncate_text(m.content, share, renderer=renderer)) for m in messages]
    return cut, sum(max(0, length - share) for length in lengths)


def truncate_ids(ids: tuple[int, ...], limit: int, *, renderer: ChatRenderer) -> tuple[tuple[int, ...], int]:
    """At most ``limit`` ids, and how many were cut."""
    if len(ids) <= limit:
        return ids, 0
    num_end = min(_NUM_END_TOKENS, limit // 2)
    mark = renderer.bridge((), [Message(role="inline", content=CUT_MARK)])
    if num_end + len(mark) >= limit:
        # A budget too small for the mark: the node's count alone tells of the cut.
        mark = ()
    num_start = limit - num_end - len(mark)
    return (*ids[:num_start], *mark, *ids[len(ids) - num_end :]), len(ids) - num_start - num_end


def truncate_text(text: str, limit: int, *, renderer: ChatRenderer) -> str:
    """The text of at most ``limit`` ids; as it is where it fits."""
    token_ids, num_cut = truncate_ids(
        renderer.bridge((), [Message(role="inline", content=text)]), limit, renderer=renderer
    )
    return renderer.template.continuation.decode(token_ids) if num_cut else text


# Conversations that are rendered again before every turn, as servers do (``history_thinking = "strip"``):
# earlier turns without their thinking.
#
# Where the new rendering begins with the context so far, it only goes on; else the context begins anew, and
# the rollout becomes one sample more.


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """What the policy sees next. ``token_ids`` are added, or are all there is where ``restarts``.

    ``num_observed`` are the tokens of the observations alone, and ``num_cut`` what they lost.
    """

    conversation: tuple[Message, ...]
    token_ids: tuple[int, ...]
    restarts: bool
    num_observed: int
    num_cut: int


def require_no_rerendering(renderer: ChatRenderer) -> None:
    """For text of a hook, which is no message. Raises ConfigError where conversations are rendered again: it
    would be gone with the next observation.
    """
    if renderer.history_thinking == "strip":
        raise ConfigError(
            "model.history_thinking = strip leaves out what a hook puts between messages: use keep"
        )


def rerender(
    context: Sequence[int],
    conversation: Sequence[Message],
    response: str,
    observations: Sequence[Message],
    *,
    tools: Sequence[ToolSchema],
    limit: int,
    renderer: ChatRenderer,
) -> Continued:
    """The conversation with a turn and its observations, which have at most ``limit`` tokens."""
    cut, num_cut = cut_messages(context, observations, limit, renderer=renderer)
    whole = (*conversation, renderer.parse_message(response, tools), *cut)
    token_ids = renderer.prompt(whole, tools)
    extends_context = token_ids[: len(context)] == tuple(context)
    return Continued(
        conversation=whole,
        token_ids=token_ids[len(context) :] if extends_context else token_ids,
        restarts=not extends_context,
        num_observed=len(renderer.bridge(context, cut)),
        num_cut=num_cut,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Appends to a rollout. Every method is False where it would leave the policy no room: nothing was
    appended then.
    """

    renderer: ChatRenderer
    limits: Limits
    context_length: int

    def num_tokens_left(self, state: EpisodeState) -> int:
        """Tokens that the rollout may still add."""
        # The prompt and tips count here: the context holds them, whatever the budget of the response says.
        used = len(state.trace.token_ids(state.last_node.node_id))
        return min(
            self.limits.max_response_tokens - state.num_response_tokens,
            self.context_length - used,
        )

    def append(
        self,
        state: EpisodeState,
        origin: Origin,
        messages: Sequence[Message],
        limit: int,
        metadata: dict[str, object],
        *,
        room: int = 1,
    ) -> bool:
        """Append tokens that the policy did not write; False when they would leave it less than ``room``
        tokens.

        A cut at the limit is marked in the text and on the node; it is never silent.
        """
        context = state.trace.token_ids(state.last_node.node_id)
        token_ids, num_cut = render_bridge(context, messages, limit, renderer=self.renderer)
        if len(token_ids) > self.num_tokens_left(state) - room:
            return False
        metadata |= {"num_tokens_cut": num_cut, "rollout": state.rollout} | message_parts(messages)
        state.last_node = state.trace.append(
            parent=state.last_node.node_id, origin=origin, token_ids=token_ids,
            message=join_messages(messages),
            metadata=metadata,
        )  # fmt: skip
        state.num_response_tokens += len(token_ids)
        return True

    def append_rerendered(self, state: EpisodeState, observations: Sequence[Message], limit: int) -> bool:
        """As :meth:`append`, with the conversation rendered again: its context may begin anew."""
        context = state.trace.token_ids(state.last_node.node_id)
        seen = rerender(
            context, state.conversation, state.last_node.message.content, observations,
            tools=prompt_tools(state.environment), limit=limit, renderer=self.renderer,
        )  # fmt: skip
        if not self._append_seen(
            state,
            seen.token_ids,
            observations,
            seen.restarts,
            num_new=seen.num_observed,
            num_cut=seen.num_cut,
        ):
            return False
        state.conversation = seen.conversation
        return True

    def next_request(self, state: EpisodeState, environment: OwnConversations) -> Seen | None:
        """What a program asks next, as the policy will see it; None where the rollout's budget ends here.
        Nothing of it is cut: the policy sees what a server would show it.

        Raises Unanswerable for what the template refuses and for what the context cannot hold.
        """
        seen = next_context(environment.request, state.exchanges, state.trace, self.renderer)
        if self.limits.max_response_tokens - state.num_response_tokens - seen.num_new < 1:
            return None
        before = 0 if seen.restarts else len(state.trace.token_ids(state.last_node.node_id))
        require_room(before + len(seen.token_ids), self.context_length)
        return seen

    def append_request(self, state: EpisodeState, seen: Seen, result: StepResult) -> bool:
        """Append what a program asks."""
        return self._append_seen(
            state, seen.token_ids, result.observations, seen.restarts, seen.num_new, num_cut=0
        )

    def _append_seen(
        self,
        state: EpisodeState,
        token_ids: tuple[int, ...],
        observations: Sequence[Message],
        restarts: bool,
        num_new: int,
        *,
        num_cut: int,
    ) -> bool:
        """Append what the environment says, behind the context or as a new one."""
        context = 0 if restarts else len(state.trace.token_ids(state.last_node.node_id))
        remaining = self.limits.max_response_tokens - state.num_response_tokens - num_new
        if min(remaining, self.context_length - context - len(token_ids)) < 1:
            return False
        metadata = {"num_tokens_cut": num_cut, "rollout": state.rollout} | message_parts(observations)
        state.last_node = state.trace.append(
            parent=state.last_node.node_id, origin=Origin.ENVIRONMENT, token_ids=token_ids,
            message=join_messages(observations), restarts=restarts,
            metadata=metadata | ({"restarts": True} if restarts else {}),
        )  # fmt: skip
        state.num_response_tokens += num_new
        return True


def message_parts(messages: Sequence[Message]) -> dict[str, object]:
    """What :func:`join_messages` loses, for the node's metadata: where each message of several ends, whose it
    is, and the id of the call that it answers.
    """
    if len(messages) == 1 and not messages[0].tool_call_id:
        return {}
    parts = [
        {"role": message.role, "num_chars": len(message.content), "call_id": message.tool_call_id}
        for message in messages
    ]
    return {"messages": parts}


def join_messages(messages: Sequence[Message]) -> Message:
    """Several messages as their node holds them."""
    text = "\n".join(message.content for message in messages)
    return Message(role=messages[0].role, content=text)


# Two things that a memory needs from the loop: tips inside the newest user message, and a reflection after
# the end (EMPO²).


def show_tip(
    state: EpisodeState, splice: Splice, *, renderer: ChatRenderer, context_length: int, reserve: int
) -> bool:
    """Put a tip at the end of the newest user message, or inside the assistant's where that goes on; False
    without room.

    The message's node is split there: what the template writes behind the text becomes a node behind the tip.
    So the path without its memory nodes is, token by token, what a rollout without tips has. ``reserve`` are
    the tokens that the rollout may still add: a tip that would leave fewer is not shown, and tips count in no
    other budget, so that no episode ends because of them.
    """
    ids = renderer.bridge((), [Message(role="inline", content=splice.text)])
    newest, trace = state.last_node, state.trace
    if len(trace.token_ids(newest.node_id)) + len(ids) + reserve > context_length:
        return False
    parent = newest
    rest: tuple[int, ...] = ()
    opening = renderer.opening
    if (
        newest.origin in (Origin.PROMPT, Origin.ENVIRONMENT)
        and opening
        and newest.token_ids[-len(opening) :] == opening
    ):
        parent, rest = _without_end(state, len(opening)), opening
    metadata = dict(splice.metadata) | {"rollout": state.rollout, "num_tokens_cut": 0}
    message = Message(role="user" if rest else "inline", content=splice.text)
    state.last_node = trace.append(
        parent=parent.node_id, origin=Origin.MEMORY, token_ids=ids, message=message, metadata=metadata
    )
    if rest:
        state.last_node = trace.append(
            parent=state.last_node.node_id,
            origin=parent.origin,
            token_ids=rest,
            message=Message(role="user", content=""),
            metadata={"rollout": state.rollout},
        )
    return True


def _without_end(state: EpisodeState, length: int) -> Node:
    """The newest message's node without its last ids: shortened where it is this rollout's own, a shared one
    of the group if the prompt.
    """
    node, trace = state.last_node, state.trace
    token_ids = node.token_ids[:-length]
    if node.parent is not None:
        node.token_ids = token_ids  # it was appended for this turn: nothing hangs under it yet
        return node
    for other in trace.nodes:
        if other.parent is None and other.token_ids == token_ids:
            return other
    return trace.append(parent=None, origin=node.origin, token_ids=token_ids, message=node.message)


async def request_reflection(
    state: EpisodeState,
    hook: Hook,
    result: EpisodeResult,
    *,
    batcher: RoundBatcher | StreamBatcher,
    renderer: ChatRenderer,
    max_ending_tokens: int,
    seed: int,
) -> tuple[str, int] | None:
    """The policy's reflection and its number of tokens; None where the hook asks nothing.

    ("", 0) where that cannot be: a reflection is never worth an episode, so an engine's fault or a full
    context leaves the rollout as it is.
    """
    room = batcher.engine.context_length - hook.max_reflection_tokens
    prompt_ids = _reflection_prompt(
        state, hook, result, renderer=renderer, room=room, max_ending_tokens=max_ending_tokens
    )
    if prompt_ids is None or len(prompt_ids) > room:
        return None if prompt_ids is None else ("", 0)
    request = Request(
        request_id=f"{state.task.key}/{state.rollout:04d}/{state.turn:03d}/reflection",
        token_ids=prompt_ids,
        max_tokens=hook.max_reflection_tokens,
        seed=seed,
        temperature=1.0,
        cache_key=f"{state.task.key}/{state.rollout}",
    )
    try:
        generation = await batcher.generate(request)
    except EngineFault:
        return "", 0
    # with the block of thinking that the template has opened: of one that was cut, nothing is a reflection
    is_closed = generation.finish_reason is FinishReason.EOS
    text = renderer.turn_text(generation.token_ids, context=prompt_ids, is_closed=is_closed)
    return text, len(generation.token_ids)


def _reflection_prompt(
    state: EpisodeState,
    hook: Hook,
    result: EpisodeResult,
    *,
    renderer: ChatRenderer,
    room: int,
    max_ending_tokens: int,
) -> tuple[int, ...] | None:
    """Ids of the episode and of what the hook asks; None where it asks nothing.

    The hook sees the environment's last message within the budget of an observation, and within what ``room``
    leaves: it loses its middle and at last goes, so that it costs no reflection that there is room for
    without it.
    """
    context = state.trace.token_ids(state.last_node.node_id)
    limit = max_ending_tokens
    while True:
        state_with_ending, num_ending_tokens = _with_ending(state, limit, renderer=renderer)
        message = hook.closing_message(state_with_ending, result)
        if message is None:
            return None
        ids = (*context, *renderer.bridge(context, [message]))
        if len(ids) <= room or num_ending_tokens == 0:
            return ids
        # And measured again: a shorter text need not have as many tokens fewer as were cut.
        limit = max(0, num_ending_tokens - (len(ids) - room))


def _with_ending(state: EpisodeState, limit: int, *, renderer: ChatRenderer) -> tuple[EpisodeState, int]:
    """The state with at most ``limit`` tokens of the environment's last message, and how many are left of
    it.
    """
    last = state.last_result
    if last is None or not last.done or not last.observations:
        return state, 0
    text = truncate_text(last.text, limit, renderer=renderer)
    message = replace(last.observations[0], content=text) if text else None
    num_ending_tokens = min(limit, len(renderer.bridge((), [Message(role="inline", content=text)])))
    return replace(state, last_result=replace(last, message=message, messages=())), num_ending_tokens
