"""Two things that a memory needs from the loop: tips inside the newest user message, and a reflection after
the end (EMPO²).
"""

from dataclasses import replace

from outrider.engines.base import FinishReason, Request
from outrider.environments.base import EpisodeResult
from outrider.errors import EngineFault
from outrider.rollout.batcher import RoundBatcher
from outrider.rollout.hooks import EpisodeState, Reflector, Splice
from outrider.rollout.stream_batcher import StreamBatcher
from outrider.rollout.truncation import truncate_text
from outrider.tokens import ChatRenderer
from outrider.trace import Node
from outrider.types import Message, Origin


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
    hook: Reflector,
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
    hook: Reflector,
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
