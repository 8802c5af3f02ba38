"""What the local engine computes, copies and keeps: every beginning once, no more look-ups than rows, no slot
for nothing.
"""

from itertools import count, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engines.base import Request
from outrider.engines.local.engine import LocalEngine, Prefixes
from outrider.engines.local.model import LanguageModel
from tests.tiny import tiny_model

Ids = tuple[int, ...]
contexts = st.lists(st.lists(st.integers(5, 7), min_size=1, max_size=6).map(tuple), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_model(num_layers=1)


def named(contexts: list[Ids], **options: int) -> list[Request]:
    settings = {"max_tokens": 1} | options
    return [
        Request(request_id=str(i), token_ids=ids, seed=i, cache_key=str(i), **settings)
        for i, ids in enumerate(contexts)
    ]


def shared(one: Ids, other: Ids) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@given(contexts, contexts, st.lists(st.integers(5, 7), max_size=6).map(tuple))
def test_the_longest_beginning_is_that_of_a_search_through_all(
    before: list[Ids], after: list[Ids], wanted: Ids
) -> None:
    prefixes = Prefixes(enumerate(before))
    for number, (old, new) in enumerate(zip(before, after, strict=False)):
        prefixes.replace(number, old, new)
    for number in range(len(before), len(after)):
        prefixes.add(number, after[number])
    stored = dict(enumerate([*after, *before[len(after) :]]))
    length, number = prefixes.longest(wanted)
    assert length == max(shared(ids, wanted) for ids in stored.values())
    assert number is None if length == 0 else shared(stored[number], wanted) == length


def test_nothing_stored_shares_nothing() -> None:
    assert Prefixes([(3, ())]).longest((1, 2)) == (0, None)


@settings(max_examples=15)
@given(asked=contexts.map(set).map(sorted), prefill_tokens=st.integers(1, 12))
def test_every_beginning_is_computed_once(
    model: LanguageModel, asked: list[Ids], prefill_tokens: int
) -> None:
    generations = LocalEngine(model, prefill_tokens=prefill_tokens).generate(named(asked))
    beginnings = {ids[:end] for ids in asked for end in range(1, len(ids) + 1)}
    assert sum(one.num_prefilled_tokens for one in generations) == len(beginnings)


FLAT = [(5, 5, ending, 6) for ending in range(6, 90)]
TREE = [(5, *ending) for ending in product((6, 7, 8), repeat=4)]


@pytest.mark.parametrize(("asked", "branchings"), [(FLAT, 1), (TREE, 4)])
def test_a_waiting_row_is_looked_up_once_a_branching_however_many_wait(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, asked: list[Ids], branchings: int
) -> None:
    """With a budget of a few rows, looking at every waiting row in every round would take n * n / 6
    look-ups.
    """
    lookups, plain = count(), Prefixes.longest
    monkeypatch.setattr(Prefixes, "longest", lambda self, ids: (next(lookups), plain(self, ids))[1])
    LocalEngine(model, prefill_tokens=12).generate(named(asked))
    assert 2 * len(asked) <= next(lookups) <= 2 * (branchings + 2) * len(asked)


def test_unnamed_requests_take_no_more_slots_than_rows(model: LanguageModel) -> None:
    requests = [
        Request(request_id=str(i), token_ids=(5, 6, 7 + i), max_tokens=1 + i % 5, seed=i) for i in range(40)
    ]
    engine = LocalEngine(model, max_rows=4)
    ours, theirs = engine.generate(requests), LocalEngine(model).generate(requests)
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
    assert engine._cache.num_slots <= 5  # it grows by a quarter
    assert engine.generate(requests[:1])[0].num_prefilled_tokens == 3, "an unnamed request keeps nothing"


def test_a_kept_rollout_survives_unnamed_ones_in_its_place(model: LanguageModel) -> None:
    engine = LocalEngine(model, max_rows=2)
    kept = named([(5, 6, 7, 8), (9, 8, 7)], max_tokens=3)
    first = engine.generate(kept)
    engine.generate(
        [Request(request_id=f"u{i}", token_ids=(10 + i, 6), max_tokens=4, seed=i) for i in range(7)]
    )
    again = named(
        [(*one.token_ids, *was.token_ids, 20) for one, was in zip(kept, first, strict=True)], max_tokens=4
    )
    generations = engine.generate(again)
    assert all(one.num_prefilled_tokens <= 2 for one in generations)
    assert [one.token_ids for one in generations] == [
        one.token_ids for one in LocalEngine(model).generate(again)
    ]
