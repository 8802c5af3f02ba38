"""Counting of passes with drafts, on texts whose passes are known."""

from benchmarks.draft_acceptance import LENGTHS, Index, num_passes, passes_of_step

from outrider.types import Origin
from outrider.viewer.records import TraceRow


def index_of(text: str) -> Index:
    index = Index()
    index.add(list(text), 0)
    return index


def test_a_draft_continues_the_longest_known_text() -> None:
    index = index_of("abcd-xbcy")
    assert index.draft(list("abc"), 2) == ["d", "-"]
    assert index.draft(list("qbc"), 2) == ["y"]  # the newest of two places
    assert index.draft(list("q"), 2) == [] and index.draft([], 2) == []


def test_a_pass_yields_the_right_start_of_a_draft_and_one_token() -> None:
    index = index_of("abcdefgh")
    assert num_passes(list("a"), "bcdefgh", index, 2) == 3  # bc d, ef g, h
    assert num_passes(list("a"), "bcdefgh", index, 4) == 2
    assert num_passes(list("a"), "bxyz", index, 4) == 3  # b x, y, z
    assert num_passes(list("z"), "yy", Index(), 4) == 2
    assert num_passes(list("a"), "", index, 4) == 0


def test_turns_that_siblings_finished_are_known_and_those_beside_are_not() -> None:
    def node(number: int, parent: int, text: str, origin: Origin) -> TraceRow:
        values = (0.0,) * (len(text) if origin is Origin.POLICY else 0)
        return TraceRow(
            step=1, task_key="", trace_id="1/0", node_id=number, parent_id=parent, rollout=0, origin=origin,
            text=text, tokens=tuple(text) if values else (), logprobs=values, entropies=values,
        )  # fmt: skip

    class Letters:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [ord(letter) for letter in text]

        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    rows = [
        node(0, -1, "?", Origin.PROMPT),
        node(1, 0, "abcde", Origin.POLICY),
        node(2, 0, "abcde", Origin.POLICY),  # generated beside the first
        node(3, 2, ":", Origin.ENVIRONMENT),
        node(4, 3, "abcde", Origin.POLICY),  # a is new after a colon
    ]
    tokens, passes = passes_of_step(rows, Letters(), Index())  # type: ignore[arg-type]
    assert tokens == 15 and LENGTHS == (1, 2, 4)
    assert [passes[length] for length in LENGTHS] == [5 + 5 + 3, 5 + 5 + 3, 5 + 5 + 2]
