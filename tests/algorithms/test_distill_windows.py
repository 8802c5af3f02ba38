"""Help in window contexts, in which every turn has a prompt of its own."""

import pytest

from outrider.algorithms.distill_help import HELPED, FileText, HelpHook, help_metrics
from outrider.trace import split_contexts, with_help, without_memory, without_open_prompt
from outrider.types import Origin
from tests.algorithms.test_distill_help import distill
from tests.rollout.test_window_rollouts import RENDERER, play

HELP = "\n\nWhat is known here:\nlook in the hall"


def hook_for(**options: object) -> HelpHook:
    return HelpHook(
        distill(**options),
        count_tokens=RENDERER.count_tokens,
        texts=[FileText(text="look in the hall", task=None, match={})],
        renderer=RENDERER,
        context_length=8192,
    )


@pytest.mark.parametrize("place", ["first", "turn"])
def test_every_prompt_has_the_help_once(place: str) -> None:
    """Of rollouts that see it, and of the teacher; without it, the prompts are the same."""
    bare, _ = play()
    plain, _ = play(hooks=(hook_for(place=place),))
    shown, _ = play(hooks=(hook_for(place=place, plays="helped", form="likelihood"),), mode=HELPED)
    [(_, bare_path)], [(_, path)], [(_, seen)] = bare.rollouts(), plain.rollouts(), shown.rollouts()
    trained, seen = without_open_prompt(path), without_open_prompt(seen)
    helped = with_help(trained, plain.help[0])
    for own in (helped, seen):
        assert len(split_contexts(own)) == len(split_contexts(trained)) == 4
        for context in split_contexts(own):
            ids = [token for node in context for token in node.token_ids]
            assert RENDERER.tokenizer.decode(ids).count(HELP) == 1
    assert [n.token_ids for n in without_memory(seen) if n.trainable] == [
        n.token_ids for n in trained if n.trainable
    ]
    ids = [[t for n in c for t in n.token_ids] for c in split_contexts(without_memory(seen))]
    assert ids == [[t for n in c for t in n.token_ids] for c in split_contexts(trained)]
    ids = [[t for n in c for t in n.token_ids] for c in split_contexts(seen)]
    assert ids == [[t for n in c for t in n.token_ids] for c in split_contexts(helped)]
    assert [n.token_ids for n in path] == [n.token_ids for n in bare_path]
    assert sum(n.origin is Origin.MEMORY for n in seen) == len(plain.help[0]) == 4
    size = len(plain.help[0][0].token_ids)
    for trace in (plain, shown):
        assert help_metrics([trace])["distill/help_tokens"] == size
