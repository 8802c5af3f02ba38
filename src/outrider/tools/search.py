"""The plug-in ``search``: BM25 search over a local corpus; deterministic, offline, thread-safe."""

import hashlib
import importlib
import json
import re
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from pydantic import Field

from outrider.config import Settings
from outrider.errors import DataError, ToolUnavailable
from outrider.files import first_folder
from outrider.records import read_rows
from outrider.tools.base import ToolContext, ToolOutput
from outrider.types import Json

if TYPE_CHECKING:
    import bm25s


_MOST_MARKS: Final = 30  # in a row, of one letter: the limit of the Stream-Safe Text Format (UAX #15)


def stream_safe(text: str) -> str:
    """Remove all marks after the 30th of a letter, which no language writes.

    Unicode normalization sorts the marks of a letter in quadratic time and would hold the interpreter's lock
    for minutes for a text of many marks.
    """
    if len(text) <= 10 * _MOST_MARKS or text.isascii():
        return text
    characters: list[str] = []
    num_marks = 0
    for character in text:
        num_marks = num_marks + 1 if unicodedata.combining(character) else 0
        if num_marks <= _MOST_MARKS:
            characters.append(character)
    return "".join(characters) if len(characters) < len(text) else text


EMPTY_QUERY = "The search query is empty."
NO_HITS = "No search results."
_CUT_MARK = "..."
# Part of the cache key: increase it if terms() or the BM25 parameters change.
_INDEX_FORMAT = 4
# Thai, Lao, Tibetan, Burmese, Hangul, Khmer, Tai scripts, Balinese, Japanese, Chinese, Yi, Javanese.
_BLOCKS = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u1b00-\u1b7f"
    "\u3005-\u3007\u303b\u3040-\u318f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf\ua960-\ua9df"
    "\ua9e0-\ua9ff\uaa60-\uaadf\uac00-\ud7ff\uf900-\ufaff\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
# Vowel signs of Thaana and Indic scripts: marks that are no accents, and no variation selectors. They are not
# in \w.
_SIGNS = "".join(
    c
    for c in map(chr, range(0x0780, 0x20000))
    if unicodedata.category(c) in ("Mn", "Mc")
    and not unicodedata.combining(c)
    and not "\ufe00" <= c <= "\ufe0f"
)
# The lookahead skips the large set, which is slow, after words of other scripts.
_WORD = re.compile(rf"[^\W_]+(?:(?=[^\0-\u077f])[{_SIGNS}]+[^\W_]*)*")
# Invisible inside words (UAX #29, WB4). The non-joiner of Persian separates parts like a blank.
_INVISIBLE = re.compile("[\u00ad\u200d\u2060\ufeff]|(?<=[\u0900-\u0dff])\u200c")
_UNSPACED = re.compile(f"[{_BLOCKS}][{_BLOCKS}\u200b-\u200d\u2060\ufeff\u00ad]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One searchable text. ``passage_id`` is unique within a corpus; its title is indexed, too."""

    passage_id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Hits of one query, best first, and their text. ``num_cut`` is the number of truncated passages."""

    passages: tuple[Passage, ...]
    scores: tuple[float, ...]
    text: str
    num_cut: int = 0


class SearchConfig(Settings):
    """Number and length of the passages that a query returns."""

    top_k: int = Field(default=5, ge=1, le=100)
    """Maximum number of passages per query."""
    max_chars: int = Field(default=1000, ge=20)
    """Maximum characters of a passage (title and text); longer ones are truncated at a word."""
    title_weight: int = Field(default=2, ge=1, le=5)
    """How often the words of a title count in the index; more finds passages by their subject more often."""
    show_ids: bool = False
    """Put the id of a passage in brackets before its title; the tool ``browser`` can open pages by id."""
    cache_dir: Path | None = None
    """Folder for built indices, by the hash of the corpus; None to build in memory each time."""


class SearchTool:
    """BM25 search of a text collection.

    Hits with equal scores are in corpus order; a passage without any query term is no hit.
    """

    name = "search"
    usage = "Write <search>a query</search> to search a text collection."
    description = "Search a text collection."
    argument = "query"

    def __init__(self, passages: Sequence[Passage], config: SearchConfig | None = None) -> None:
        if not passages:
            raise DataError("search corpus: no passages")
        seen: set[str] = set()
        for passage in passages:
            if passage.passage_id in seen:
                raise DataError(f"search corpus: duplicate passage id {passage.passage_id!r}")
            seen.add(passage.passage_id)
        self._passages = tuple(passages)
        self._config = config or SearchConfig()
        self._index = _load_or_build(self._passages, self._config)

    @classmethod
    def build(cls, settings: Settings, context: ToolContext) -> "SearchTool":
        """Build over the environment's ``corpus`` with its section ``search``. Raises ToolUnavailable."""
        if context.environment.corpus is None:
            raise ToolUnavailable("search: no corpus is configured")
        try:
            return cls(load_passages(context.environment.corpus), context.environment.search)
        except DataError as error:
            raise ToolUnavailable(f"search: {error}") from error

    def run(self, query: str) -> SearchResult:
        """Search once. For an empty query or a query without hits, the text reports that."""
        words = query_terms(query)
        if not words:
            return SearchResult(passages=(), scores=(), text=EMPTY_QUERY)
        # If no passage has the words, search for their single characters.
        ids = self._known(words) or self._known(terms(query))
        if not ids:
            return SearchResult(passages=(), scores=(), text=NO_HITS)
        scores = self._index.get_scores_from_ids(ids)
        hits = _top(scores, self._config.top_k)
        passages = tuple(self._passages[i] for i in hits)
        rendered = [render_passage(passage, self._config) for passage in passages]
        return SearchResult(
            passages=passages,
            scores=tuple(float(scores[i]) for i in hits),
            text="\n".join(text for text, _ in rendered),
            num_cut=sum(cut for _, cut in rendered),
        )

    def _known(self, words: Sequence[str]) -> list[int]:
        vocabulary = self._index.vocab_dict
        # Sorted, so that float32 sums and therefore ties do not depend on the order of the words.
        return sorted(vocabulary[word] for word in words if word in vocabulary)

    def run_text(self, text: str) -> ToolOutput:
        """Search and return only the text."""
        result = self.run(text)
        return ToolOutput(text=result.text, status="ok" if result.passages else "empty")

    def close(self) -> None:
        """Nothing to release."""


def load_passages(path: Path) -> list[Passage]:
    """Load a JSONL or Parquet file with the columns ``id``, ``text`` and optionally ``title``, which may be
    null or empty. Raises DataError.
    """
    passages: dict[str, Passage] = {}
    for row in read_rows(path):
        if row.get("id") is None:
            raise DataError(f"{row.location}: column 'id' is null")
        title = row_title(row.values.get("title"))
        passage = Passage(passage_id=str(row.get("id")), title=title, text=row.text("text"))
        if passage.passage_id in passages:
            raise DataError(f"{row.location}: duplicate passage id {passage.passage_id!r}")
        passages[passage.passage_id] = passage
    return list(passages.values())


def row_title(value: Json) -> str:
    """The title in a row; "" for null, a blank string or NaN, the missing value of a data frame."""
    is_missing = value is None or value != value
    return "" if is_missing or not str(value).strip() else str(value)


def terms(text: str) -> list[str]:
    """Index terms: runs of letters, vowel signs and digits without accents, case folded. Stop words
    are kept because their weight is near zero.

    For scripts without blanks between words, and for Korean, whose words contain particles, the terms are all
    characters and all pairs of neighbors.
    """
    return _terms(text, lambda run: [*run, *(a + b for a, b in pairwise(run))])


def query_terms(text: str) -> list[str]:
    """Terms of a query: :func:`terms` with single characters only if they have no neighbors."""
    return _terms(text, lambda run: [a + b for a, b in pairwise(run)] or run)


def _terms(text: str, split_run: Callable[[list[str]], list[str]]) -> list[str]:
    if text.isascii():  # most of a corpus, and several times faster
        return _WORD.findall(text.lower())
    text = stream_safe(text)
    composed = unicodedata.normalize("NFKC", text)
    result: list[str] = []
    end = 0
    for match in _UNSPACED.finditer(composed):
        result += _words(composed[end : match.start()])
        end = match.end()
        for run in _runs(match[0]):
            result += split_run(run)
    return result + _words(composed[end:] if end else text)


def _words(text: str) -> list[str]:
    folded = _INVISIBLE.sub("", unicodedata.normalize("NFKD", text).casefold())
    return _WORD.findall("".join(c for c in folded if not unicodedata.combining(c)))


def _runs(text: str) -> Iterator[list[str]]:
    """Split at punctuation into runs of letters with their marks."""
    run: list[str] = []
    for character in text:
        kind = unicodedata.category(character)
        if kind[0] in "LN":
            run.append(character)
        elif kind[0] == "M" and run:
            run[-1] += character
        elif kind != "Cf" and kind[0] != "M":  # Cf: a permitted line break inside a word
            if run:
                yield run
            run = []
    if run:
        yield run


def corpus_hash(passages: Sequence[Passage]) -> str:
    """SHA-256 (hex) over ids, titles and texts in order."""
    digest = hashlib.sha256()
    for passage in passages:
        digest.update(json.dumps([passage.passage_id, passage.title, passage.text]).encode() + b"\n")
    return digest.hexdigest()


def _top(scores: npt.NDArray[np.float32], top_k: int) -> list[int]:
    """Indices of the best positive scores; ties are in corpus order."""
    candidates = np.flatnonzero(scores > 0)
    if len(candidates) > top_k:
        threshold = np.partition(scores[candidates], -top_k)[-top_k]
        candidates = candidates[scores[candidates] >= threshold]
    order = np.argsort(-scores[candidates], kind="stable")[:top_k]
    return [int(i) for i in candidates[order]]


def render_passage(passage: Passage, config: SearchConfig) -> tuple[str, bool]:
    """Return ``title: text`` on one line and whether it was truncated."""
    max_chars = config.max_chars
    shown_id = f"[{passage.passage_id}] " if config.show_ids else ""
    title = f"{passage.title}: " if passage.title.strip() else ""
    line = " ".join(f"{shown_id}{title}{passage.text}".split())
    if len(line) <= max_chars:
        return line, False
    head = line[: max_chars - len(_CUT_MARK)]
    # Truncate at a word, unless that would drop most of a text without spaces.
    boundary = head.rfind(" ")
    return (head[:boundary] if boundary > max_chars // 2 else head) + _CUT_MARK, True


_IMPORT_LOCK: Final = threading.Lock()


def import_bm25s() -> ModuleType:
    """Import bm25s without JAX, which it would start if it is installed: JAX reserves most of a GPU's memory,
    and the index does not use it.
    """
    with _IMPORT_LOCK:  # rollouts call tools in threads
        if "bm25s" not in sys.modules:
            modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
            hidden = {"jax": modules["jax"]} if "jax" in modules else {}
            modules["jax"] = None  # importing it raises ImportError
            try:
                importlib.import_module("bm25s")
            finally:
                del modules["jax"]
                modules.update(hidden)
    return importlib.import_module("bm25s")  # waits for a thread that imports it without this function


def _build(passages: Sequence[Passage], title_weight: int) -> "bm25s.BM25":
    bm25s = import_bm25s()
    vocabulary: dict[str, int] = {}
    ids = [
        [
            vocabulary.setdefault(word, len(vocabulary))
            for word in terms(p.title) * title_weight + terms(p.text)
        ]
        for p in passages
    ]
    if not vocabulary:
        raise DataError("search corpus: no passage has a word in it")
    # The numpy backends start no threads and compile nothing.
    index = bm25s.BM25(backend="numpy", csc_backend="numpy")
    index.index((ids, vocabulary), create_empty_token=False, show_progress=False)
    return index


def _load_or_build(passages: Sequence[Passage], config: SearchConfig) -> "bm25s.BM25":
    bm25s = import_bm25s()
    cache_dir = config.cache_dir
    if cache_dir is None:
        return _build(passages, config.title_weight)
    folder = (
        cache_dir
        / f"bm25-{_INDEX_FORMAT}-{bm25s.__version__}-{config.title_weight}-{corpus_hash(passages)[:32]}"
    )
    if not folder.is_dir():
        index = _build(passages, config.title_weight)
        with first_folder(folder) as scratch:
            index.save(scratch, show_progress=False)
    return bm25s.BM25.load(folder, show_progress=False)
