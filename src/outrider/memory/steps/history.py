"""From trajectories to keys: the history text, and the reward-aware filter (RAPO, arXiv 2603.03078, section
3.1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from outrider.memory.embedder import replace_surrogates
from outrider.types import Message, Step

TokenCounter: TypeAlias = Callable[[str], int]

HISTORY_FORMAT = 1
"""Raise it with any change of :func:`history_text`: stored vectors belong to the old rendering."""


def history_text(question: str, steps: Sequence[Step]) -> str:
    """The retrieval key of the step that follows ``steps``: question, then every step and its observation.

    Used for building *and* for querying, so that the two never differ. Surrounding white space is dropped
    because agents differ in it; lone surrogates become U+FFFD.
    """
    parts = [question]
    for step in steps:
        parts += (step.text, step.observation)
    return replace_surrogates("\n".join(stripped for part in parts if (stripped := part.strip())))


def prompt_question(prompt: Sequence[Message]) -> str:
    """The question in a prompt, for trajectories of unknown tasks: all user messages, or every message if
    there is none.
    """
    user_texts = [message.content for message in prompt if message.role == "user"]
    return "\n".join(user_texts or [message.content for message in prompt])


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A trajectory in the ranking of its task. ``num_tokens`` 0 is unknown; ``order`` is unique: earlier is
    smaller.
    """

    reward: float
    num_tokens: int
    order: int


def select_best(candidates: Sequence[Candidate], num_best: int | None) -> set[int]:
    """The ``order`` of the ``num_best`` best (None: all): higher reward, then fewer tokens, then earlier.

    Those of unknown length come first among equals: they may be short, and nothing that is known to be long
    displaces them. The ranking is a total order, so filtering in portions keeps the same trajectories as
    filtering everything at once.
    """
    ranked = sorted(candidates, key=lambda c: (-c.reward, c.num_tokens, c.order))
    return {candidate.order for candidate in ranked[:num_best]}
