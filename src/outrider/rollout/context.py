"""What the policy did not write is appended to its context here, within the rollout's budgets."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.environments.base import StepResult, prompt_tools
from outrider.environments.conversing import OwnConversations
from outrider.rollout.conversing import Seen, next_context, require_room
from outrider.rollout.hooks import EpisodeState
from outrider.rollout.limits import Limits
from outrider.rollout.rerendering import rerender
from outrider.rollout.truncation import render_bridge
from outrider.tokens import ChatRenderer
from outrider.types import Message, Origin


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
            parent=state.last_node.node_id, origin=origin, token_ids=token_ids, message=join_messages(messages),
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
    """What :func:`join_messages` loses, for the node's metadata: where each message of several ends, whose it is,
    and the id of the call that it answers.
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
