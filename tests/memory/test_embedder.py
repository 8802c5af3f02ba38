"""Embedders: unit rows, the same bits in any company, the end of a long text, the cache."""

import math
import pickle
import threading

import numpy as np
import pytest

from outrider.errors import ConfigError, ModelError
from outrider.memory.embedders import (
    CachedEmbedder,
    Embedder,
    HashEmbedder,
    MiniLmEmbedder,
    SentenceTransformerEmbedder,
    Vectors,
    load_embedder,
    replace_surrogates,
)

ODD_TEXTS = [
    "",
    "   ",
    "plain words",
    "bad \udce9 bytes",
    "nul \x00 inside",
    "漢字 и кириллица",
    "word " * 3000,
]


@pytest.fixture(scope="module")
def minilm() -> MiniLmEmbedder:
    pytest.importorskip("onnxruntime")
    try:
        return MiniLmEmbedder()
    except ModelError as error:
        pytest.skip(str(error))


class Recorder:
    """Counts what reaches the model behind a cache."""

    name = "recorder"
    dim = 4

    def __init__(self) -> None:
        self.seen: list[str] = []

    def embed(self, texts: list[str]) -> Vectors:
        self.seen += texts
        rows = np.array([[len(text), 1, 2, 3] for text in texts], np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def check_contract(embedder: Embedder) -> None:
    together = embedder.embed(ODD_TEXTS)
    assert together.dtype == np.float32 and together.shape == (len(ODD_TEXTS), embedder.dim)
    np.testing.assert_allclose(np.linalg.norm(together.astype(np.float64), axis=1), 1.0, atol=1e-6)
    for row, text in enumerate(ODD_TEXTS):
        assert np.array_equal(embedder.embed([text])[0], together[row])
    assert embedder.embed([]).shape == (0, embedder.dim)


@pytest.mark.parametrize("row", [[math.nan] * 4, [3.0, 0, 0, 0], [1.0, 0, 0], [0.0] * 4, []])
def test_vectors_that_no_search_could_use_are_an_error(row: list[float]) -> None:
    class Broken(Recorder):
        def embed(self, texts: list[str]) -> Vectors:
            return [row, [1.0]] if row == [] else np.array([row] * len(texts), np.float32)  # type: ignore[return-value]

    with pytest.raises(ModelError, match="recorder did not return 1 vectors of 4 numbers and length 1"):
        CachedEmbedder(Broken(), 8).embed(["a"])


def test_hash_embedder_keeps_the_contract() -> None:
    check_contract(HashEmbedder())


def test_minilm_keeps_the_contract(minilm: MiniLmEmbedder) -> None:
    check_contract(minilm)


def test_hash_vectors_are_pinned() -> None:
    """Python's own hash() differs from run to run; positions must not. A change here invalidates every stored
    buffer.
    """
    vector = HashEmbedder(64).embed(["red red blue"])[0]
    assert {int(i): round(float(vector[i]), 4) for i in np.flatnonzero(vector)} == {35: 0.4472, 59: 0.8944}


def test_minilm_vectors_have_meaning(minilm: MiniLmEmbedder) -> None:
    paris, also_paris, cake = minilm.embed(
        [
            "The capital of France is Paris.",
            "Paris is the capital city of France.",
            "A chocolate cake needs flour and sugar.",
        ]
    )
    assert paris @ also_paris > 0.9 > 0.3 > paris @ cake


def test_minilm_agrees_with_float32_reference(minilm: MiniLmEmbedder) -> None:
    """Values of the float32 all-MiniLM-L6-v2 under sentence-transformers; int8 weights move a cosine by under
    0.01.
    """
    texts = ["The capital of France is Paris.", "How do I fix a null pointer exception in C?", "le chat dort"]
    vectors = minilm.embed(texts)
    similarities = vectors @ vectors.T
    for (i, j), reference in {(0, 1): 0.0769, (0, 2): 0.2342, (1, 2): 0.0968}.items():
        assert similarities[i, j] == pytest.approx(reference, abs=0.01)


def test_minilm_keeps_the_end_of_a_long_text(minilm: MiniLmEmbedder) -> None:
    filler = "the agent walks north and looks around " * 200
    end = "then it opens the red door with the brass key " * 60
    a, b, c = minilm.embed(
        [f"apples {filler} {end}", f"submarines {filler} {end}", f"{filler} {end} submarines"]
    )
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


def test_truncation_is_part_of_the_name(minilm: MiniLmEmbedder) -> None:
    assert MiniLmEmbedder(128).name != minilm.name
    with pytest.raises(ConfigError, match="max_tokens is 513"):
        MiniLmEmbedder(513)


def test_threads_get_the_same_vectors(minilm: MiniLmEmbedder) -> None:
    texts = [f"room {i} has a door" for i in range(8)]
    expected = minilm.embed(texts)
    results: list[Vectors] = []
    threads = [threading.Thread(target=lambda: results.append(minilm.embed(texts))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(np.array_equal(result, expected) for result in results)


def test_pickled_embedder_is_the_same(minilm: MiniLmEmbedder) -> None:
    copy = pickle.loads(pickle.dumps(CachedEmbedder(minilm, 5)))
    assert copy.name == minilm.name and copy.size == 5
    assert np.array_equal(copy.embed(["a door"]), minilm.embed(["a door"]))


def test_cache_embeds_a_text_once() -> None:
    inner = Recorder()
    cache = CachedEmbedder(inner, 10)
    first = cache.embed(["a", "bb", "a"])
    second = cache.embed(["bb", "ccc", "a"])
    assert inner.seen == ["a", "bb", "ccc"]
    assert np.array_equal(first, Recorder().embed(["a", "bb", "a"]))
    assert np.array_equal(second, Recorder().embed(["bb", "ccc", "a"]))


def test_cache_forgets_the_least_recently_used() -> None:
    inner = Recorder()
    cache = CachedEmbedder(inner, 2)
    for texts in (["a"], ["bb"], ["a"], ["ccc"], ["a"], ["bb"]):
        cache.embed(texts)
    assert inner.seen == ["a", "bb", "ccc", "bb"]


def test_cached_vectors_cannot_be_changed_from_outside() -> None:
    cache = CachedEmbedder(Recorder(), 2)
    cache.embed(["a"])[:] = 9.0
    cache.embed(["a"])[:] = 9.0
    assert np.array_equal(cache.embed(["a"]), Recorder().embed(["a"]))


def test_cache_larger_call_than_size() -> None:
    cache = CachedEmbedder(Recorder(), 2)
    texts = [("x" * n) for n in range(1, 9)]
    assert np.array_equal(cache.embed(texts), Recorder().embed(texts))


def test_surrogates_are_replaced() -> None:
    assert replace_surrogates("a\udce9b") == "a\ufffdb"
    assert replace_surrogates("\ud83d\ude00") == "\U0001f600"
    assert replace_surrogates("naïve") == "naïve"


def test_missing_extra_is_named() -> None:
    try:
        import sentence_transformers  # noqa: F401
    except ImportError:
        with pytest.raises(ModelError, match="extra 'sentence-transformers'"):
            load_embedder("some/model")
    else:
        with pytest.raises(ModelError, match="cannot be loaded"):
            SentenceTransformerEmbedder("./no/such/folder")
