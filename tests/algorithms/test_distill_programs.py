"""Help in the rollouts of agent programs, whose conversations begin anew."""

from collections.abc import Sequence

import pytest

from outrider.algorithms.distill_help import HELPED, FileText, HelpHook
from outrider.rollout.hooks import EpisodeState, Splice
from outrider.trace import Node, Trace, split_contexts, with_help, without_memory
from outrider.types import Origin
from tests.algorithms.test_distill_help import distill
from tests.rollout.test_conversing import WORDS, play, renderer_of

RENDERER = renderer_of("qwen2.5")
HELP = "\n\nWhat is known here:\nlook in the hall"
OPERATIONS = [["new", "append", "new"], ["append", "back", "append"], ["again", "rewrite", "drop", "stop"]]


class Shown(HelpHook):
    """The hook for rollouts whose mode is not that of the test's scheduler."""

    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        state.mode = HELPED
        return super().before_turn(state)


def hook_for(kind: type[HelpHook] = HelpHook, **options: object) -> HelpHook:
    return kind(
        distill(**options),
        count_tokens=RENDERER.count_tokens,
        texts=[FileText(text="look in the hall", task="t", match={})],
        renderer=RENDERER,
        context_length=1 << 16,
    )


def decoded(nodes: Sequence[Node]) -> list[str]:
    """The text of every context."""
    return [
        RENDERER.tokenizer.decode(
            [token for node in sample for token in node.token_ids], skip_special_tokens=False
        )
        for sample in split_contexts(nodes)
    ]


def path_of(trace: Trace) -> list[Node]:
    [(_, path)] = trace.rollouts()
    return path


@pytest.mark.parametrize("operations", OPERATIONS, ids=str)
@pytest.mark.parametrize("place", ["first", "turn"])
def test_rollouts_that_are_sampled_with_help_see_it_in_every_context(
    operations: list[str], place: str
) -> None:
    options = {"plays": "helped", "form": "likelihood", "place": place}
    trace, _, seen = play(operations, RENDERER, WORDS, hooks=(hook_for(Shown, **options),))
    bare, _, _ = play(operations, RENDERER, WORDS)
    path = path_of(trace)
    assert len(seen) == len(operations) + 1 and all(HELP in text for text in seen)
    if place == "first":
        assert all(text.count(HELP) == 1 for text in seen)
    assert len(split_contexts(path)) > 1
    assert all(any(node.origin is Origin.MEMORY for node in sample) for sample in split_contexts(path))
    assert HELP not in "".join(decoded(without_memory(path)))
    policy = [node.token_ids for node in without_memory(path) if node.trainable]
    assert policy == [node.token_ids for node in path_of(bare) if node.trainable]


@pytest.mark.parametrize("operations", OPERATIONS, ids=str)
@pytest.mark.parametrize("place", ["first", "turn"])
def test_the_teacher_reads_help_in_every_context(operations: list[str], place: str) -> None:
    trace, _, _ = play(operations, RENDERER, WORDS, hooks=(hook_for(place=place),))
    path = path_of(trace)
    helped = with_help(path, trace.help[0])
    for plain, text in zip(decoded(path), decoded(helped), strict=True):
        assert HELP not in plain and text.replace(HELP, "") == plain and HELP in text
        assert text.count(HELP) == 1 or place == "turn"
    turns = [node for node in path if node.trainable]
    assert len(trace.help[0]) == (len(turns) if place == "turn" else len(split_contexts(path)))
