"""Tips leave the ids of an episode without a trace, also where a tokenizer would merge their end with what
follows.

The released code looks for the ids of a tip's end; four newlines behind it are one id with its last
character, so that the tip stays.
"""

from collections.abc import Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any, ClassVar

from outrider.algorithms.tips import render_tips
from outrider.environments.base import StepResult
from outrider.rollout.episode import Sampling
from outrider.rollout.hooks import EpisodeState, Hook, Splice
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.trace import Node, without_memory
from outrider.types import Origin
from tests.rollout.fakes import Factory, Fake, RawEngine, say, tasks
from tests.vectors import load_vector

GIVEN, EXPECTED = load_vector("empo2", "tip_strip_tokens")
START, END, MERGED = (
    tuple(GIVEN[name])
    for name in ("start_ids_of_tip_tag", "end_ids_pattern", "end_ids_when_two_more_newlines_follow")
)  # fmt: skip
INSTRUCTION = "\n\n\n\nOne line."


class MergingTokenizer:
    """The longest piece first, as Qwen2.5's does here; its ids for the tag, one id a character for all
    else.
    """

    PIECES: ClassVar = {
        "<": START[0],
        "tip": START[1],
        ">": START[2],
        "</": END[0],
        ">\n\n": END[2],
        ">\n\n\n\n": MERGED[2],
    }
    eos_token_id = 1
    added_tokens_decoder = {1: SimpleNamespace(special=False)}  # noqa: RUF012

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = []
        while text:
            piece = max((one for one in self.PIECES if text.startswith(one)), key=len, default=text[0])
            ids.append(self.PIECES[piece] if piece in self.PIECES else 50_000 + ord(piece))
            text = text[len(piece) :]
        return ids

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        texts = {number: piece for piece, number in self.PIECES.items()}
        return "".join(texts[i] if i in texts else chr(i - 50_000) for i in token_ids)

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        said = [
            f"[{m['role']}]{m['content']}{INSTRUCTION if m['role'] == 'user' else '[end]'}"
            for m in conversation
        ]  # every user message ends in an instruction
        return "".join(said) + ("[assistant]" if add_generation_prompt else "")


TOKENIZER = MergingTokenizer()
TIP = render_tips(["look first"])


class Shows(Hook):
    """One tip before every turn."""

    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        return [Splice(origin=Origin.MEMORY, text=TIP, metadata={"tip_ids": [0]})]


def episode(hooks: Sequence[Any]) -> list[Node]:
    """Three user turns, each answered."""
    engine = RawEngine(TOKENIZER, lambda request: TOKENIZER.encode("go", add_special_tokens=False))

    def step(number: int, said: str) -> StepResult:
        return say(f"seen {number}", "user") if number < 2 else StepResult(message=None, done=True)

    runs = Scheduler(
        engine=engine, renderer=ChatRenderer(TOKENIZER),
        factory=Factory(lambda task, number: Fake(on_step=step)),
        limits=Limits(max_turns=4, max_turn_tokens=2, step_timeout_s=60), sampling=Sampling(), run_seed=0,
        hooks=hooks,
    )  # fmt: skip
    ((_, path),) = runs.run(tasks(1), modes=("tips_on",), training_step=0).traces[0].rollouts()
    return path


def holds(ids: Sequence[int], pattern: Sequence[int]) -> bool:
    return any(tuple(ids[i : i + len(pattern)]) == tuple(pattern) for i in range(len(ids)))


def stripped(ids: list[int]) -> list[int]:
    """The released way: from every opening tag to the next closing pattern, if there is one."""
    for first in range(len(ids)):
        if tuple(ids[first : first + 3]) == START:
            ends = [i + 3 for i in range(first, len(ids)) if tuple(ids[i : i + 3]) == END]
            return stripped([*ids[:first], *ids[ends[0] :]]) if ends else ids
    return ids


def test_the_released_code_leaves_the_tips_of_the_current_turn() -> None:
    block = TIP + "\n\n"
    for separator, expected in (
        ("\n\n", "tips_left_by_released_code"),
        ("", "tips_left_by_revisions_with_empty_separator"),
    ):
        turns = [f"[user]q{block}[assistant]go"] * 2 + [f"[user]q{block}{separator}One line."]
        encoded = [TOKENIZER.encode(turn, add_special_tokens=False) for turn in turns]
        assert [holds(ids, MERGED) for ids in encoded] == [False, False, bool(separator)]
        assert [holds(stripped(ids), START) for ids in encoded] == EXPECTED[expected]


def test_removing_memory_nodes_leaves_a_plain_rollout() -> None:
    tipped, plain = episode([Shows()]), episode([])
    turns = [list(nodes) for acted, nodes in groupby(tipped, key=lambda node: node.trainable) if not acted]
    assert [holds([i for node in turn for i in node.token_ids], START) for turn in turns] == [True] * 3
    bare = [[i for node in without_memory(turn) for i in node.token_ids] for turn in turns]
    assert [holds(ids, START) or holds(ids, END[:2]) for ids in bare] == EXPECTED["tips_left_required"]
    assert [i for node in without_memory(tipped) for i in node.token_ids] == [
        i for node in plain for i in node.token_ids
    ]
