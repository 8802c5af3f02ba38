"""The search tool against an independent BM25, and what a user can get wrong."""

import json
import math
import threading
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import DataError
from outrider.tools.search import (
    EMPTY_QUERY,
    NO_HITS,
    Passage,
    SearchConfig,
    SearchTool,
    corpus_hash,
    load_passages,
    terms,
)

WORDS = ["red", "green", "blue", "sky", "sea"]


def passage(number: int, text: str, title: str = "") -> Passage:
    return Passage(passage_id=str(number), title=title or f"p{number}", text=text)


def reference_scores(
    documents: list[list[str]], query: list[str], k1: float = 1.5, b: float = 0.75
) -> list[float]:
    """BM25 as Lucene computes it, straight from its formula, in float64."""
    average = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        counts, score = Counter(document), 0.0
        for word in query:
            num_with = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - num_with + 0.5) / (num_with + 0.5))
            score += idf * counts[word] / (counts[word] + k1 * (1 - b + b * len(document) / average))
        scores.append(score)
    return scores


@given(
    st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=8), min_size=1, max_size=8),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_ranking_and_ties_agree_with_an_independent_bm25(
    documents: list[list[str]], query: list[str], weight: int
) -> None:
    tool = SearchTool(
        [passage(i, " ".join(d)) for i, d in enumerate(documents)], SearchConfig(top_k=4, title_weight=weight)
    )
    result = tool.run(" ".join(query))
    expected = reference_scores([[f"p{i}"] * weight + d for i, d in enumerate(documents)], query)
    order = sorted(range(len(documents)), key=lambda i: (-round(expected[i], 5), i))
    hits = [i for i in order if expected[i] > 0][:4]
    assert [int(p.passage_id) for p in result.passages] == hits
    assert result.scores == pytest.approx([expected[i] for i in hits], rel=1e-4)


def test_equal_passages_are_in_corpus_order_for_every_word_order() -> None:
    tool = SearchTool([passage(i, "red sky blue sea", title="same") for i in range(6)], SearchConfig(top_k=3))
    for query in ("red sky blue", "blue red sky", "sea"):
        assert [p.passage_id for p in tool.run(query).passages] == ["0", "1", "2"]


def test_terms_fold_case_and_accents() -> None:
    assert terms("C\u00f4te d'Ivoire, S\u00c3O_TOM\u00c9 .td") == ["cote", "d", "ivoire", "sao", "tome", "td"]


def test_an_empty_query_and_no_hits_are_reported() -> None:
    tool = SearchTool([passage(0, "red")])
    for query in ("", "  ", "?!"):
        assert (tool.run(query).text, tool.run(query).passages) == (EMPTY_QUERY, ())
    assert (tool.run("violet").text, tool.run("violet").passages) == (NO_HITS, ())
    assert tool.run_text("red").text == "p0: red"


def test_long_passages_are_cut_at_a_word_and_counted() -> None:
    tool = SearchTool(
        [passage(0, "red  sky\n\n" * 30), passage(1, "red")], SearchConfig(top_k=2, max_chars=40)
    )
    result = tool.run("red")
    lines = result.text.split("\n")
    assert result.num_cut == 1
    assert len(lines) == 2 and all(len(line) <= 40 for line in lines)
    assert "p1: red" in lines
    cut = next(line for line in lines if line != "p1: red")
    assert cut.endswith("...") and cut.removesuffix("...").split()[-1] in ("red", "sky")


def test_a_text_without_spaces_is_cut_within_the_limit() -> None:
    line = SearchTool([passage(0, "red " + "x" * 300)], SearchConfig(max_chars=50)).run("red").text
    assert len(line) == 50 and line.endswith("x...")


def test_the_cached_index_returns_the_same_hits(tmp_path: Path) -> None:
    passages = [passage(i, f"{WORDS[i % 5]} {WORDS[i % 3]}") for i in range(20)]
    config = SearchConfig(cache_dir=tmp_path / "cache")
    built, loaded, plain = (SearchTool(passages, c).run("red sea") for c in (config, config, SearchConfig()))
    assert built == loaded == plain
    assert len(list((tmp_path / "cache").iterdir())) == 1
    SearchTool(passages[:-1], config)
    SearchTool(passages, SearchConfig(cache_dir=tmp_path / "cache", title_weight=1))
    assert len(list((tmp_path / "cache").iterdir())) == 3
    assert corpus_hash(passages) != corpus_hash(passages[::-1])


def test_searching_starts_no_threads_and_works_from_several() -> None:
    before = threading.active_count()
    tool = SearchTool([passage(i, " ".join(WORDS[: 1 + i % 5])) for i in range(50)])
    expected = tool.run("sea blue")
    assert threading.active_count() == before
    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(tool.run("sea blue"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


@pytest.mark.parametrize(
    ("passages", "message"),
    [
        ([], "no passages"),
        ([passage(0, "a"), passage(0, "b")], "duplicate passage id '0'"),
        ([Passage(passage_id="0", title="?", text="!")], "no passage has a word"),
    ],
)
def test_a_corpus_that_cannot_be_searched_is_refused(passages: list[Passage], message: str) -> None:
    with pytest.raises(DataError, match=message):
        SearchTool(passages)


def test_passages_load_from_jsonl_and_parquet(tmp_path: Path) -> None:
    rows = [{"id": "a", "title": "A", "text": "red"}, {"id": "b", "title": "B", "text": "blue"}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    expected = [
        Passage(passage_id="a", title="A", text="red"),
        Passage(passage_id="b", title="B", text="blue"),
    ]
    assert load_passages(tmp_path / "c.jsonl") == load_passages(tmp_path / "c.parquet") == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"id": "a", "title": "A", "text": "x"}\n{"id": "a", "title": "B", "text": "y"}\n',
            r"c\.jsonl:2: duplicate passage id 'a'",
        ),
        ('{"id": "a", "title": "A"}\n', r"c\.jsonl:1: no column 'text'"),
        ('{"id": "a", "title": "A", "text": " "}\n', r"c\.jsonl:1: column 'text' must hold a string"),
    ],
)
def test_a_bad_corpus_file_names_the_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "c.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load_passages(tmp_path / "c.jsonl")


def test_ids_are_optional() -> None:
    """Within the limit of a passage, and never part of the index."""
    config = SearchConfig(show_ids=True, max_chars=20)
    tool = SearchTool([passage(7, "red sky over the sea")], config)
    assert tool.run("red").text == "[7] p7: red sky..."
    assert tool.run("7").passages == ()
