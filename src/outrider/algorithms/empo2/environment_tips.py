"""Tips in the environment's own words: what it answered to an action (``memory.writer = "environment"``).

No model writes anything: a record is an action and the first line of the answer, be it what was found or why
nothing was done.
"""

from collections.abc import Callable, Sequence

from outrider.trace import Node, policy_turns
from outrider.types import Origin


def answered_actions(path: Sequence[Node], ending: str) -> list[tuple[str, str]]:
    """(what the policy said, what the environment answered) of every action of an episode.

    Text that could not be read as an action tells nothing of the world, and is left out.

    ``ending`` is what the environment said as it ended the episode, which is in no node; where the loop cut
    the episode behind an answer, that answer is the path's last node.
    """
    # a retrieved step that was done is nobody's action here, nor the answer to one
    turns = policy_turns([node for node in path if node.origin is not Origin.BUFFER])
    answers = [turn.observation for turn in turns[1:]]
    last = path[-1] if path else None
    answers.append(last.message.content if last is not None and last.origin is Origin.ENVIRONMENT else ending)
    return [
        (turn.node.message.content, answer)
        for turn, answer in zip(turns, answers, strict=True) if not turn.node.metadata.get("invalid")
    ]  # fmt: skip


def environment_tip(action: str, answer: str, *, max_tokens: int, num_tokens: Callable[[str], int]) -> str:
    """``action: answer`` within ``max_tokens``; the answer's first line with text, whose last words go first.
    Empty without an answer.
    """
    line = next((line.strip() for line in answer.splitlines() if line.strip()), "")
    words = line.split()
    while words:
        text = f"{action}: {' '.join(words)}"
        if num_tokens(text) <= max_tokens:
            return text
        words.pop()
    return ""
