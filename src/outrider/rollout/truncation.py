"""A text that is longer than its budget loses its middle, because the end closes what the start opens. The
cut is marked.
"""

from collections.abc import Sequence
from dataclasses import replace

from outrider.tokens import ChatRenderer
from outrider.types import Message

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
