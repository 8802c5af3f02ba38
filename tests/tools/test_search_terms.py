"""The shortcuts of the search are exact: for ASCII text, and for the best of many scores."""

import re
import unicodedata

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.tools.search import _top, query_terms, terms


@given(st.text(st.characters(max_codepoint=127)))
def test_terms_of_ascii_are_those_of_normalized_text(text: str) -> None:
    words = re.findall(r"[^\W_]+", unicodedata.normalize("NFKD", text).casefold())
    assert terms(text) == query_terms(text) == words
    assert terms(f"{text} \u00e9") == [*words, "e"]  # not ASCII


@given(st.lists(st.sampled_from((-1.0, 0.0, 0.5, 1.0, 2.0)), min_size=1), st.integers(1, 100))
def test_the_best_positive_scores_come_first_and_ties_in_corpus_order(
    scores: list[float], top_k: int
) -> None:
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    assert _top(np.array(scores, dtype=np.float32), top_k) == [i for i in order if scores[i] > 0][:top_k]
