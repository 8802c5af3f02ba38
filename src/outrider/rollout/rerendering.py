"""Conversations that are rendered again before every turn, as servers do (``history_thinking = "strip"``):
earlier turns without their thinking.

Where the new rendering begins with the context so far, it only goes on; else the context begins anew, and the
rollout becomes one sample more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.rollout.truncation import cut_messages
from outrider.tokens import ChatRenderer
from outrider.types import Message, ToolSchema


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
