"""The shortcuts of the search are exact: for ASCII text, and for the best of many scores."""

import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
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


@pytest.mark.parametrize("is_imported", [False, True])
def test_bm25s_does_not_start_jax(tmp_path: Path, is_imported: bool) -> None:
    """JAX would reserve most of a GPU's memory."""
    package = tmp_path / "jax"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "lax.py").write_text("def top_k(*given):\n    raise SystemExit('JAX was started')\n")
    program = "import jax\n" if is_imported else ""
    program += "from outrider.tools.search import import_bm25s\nimport_bm25s()\nimport jax.lax\nimport bm25s"
    subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": f"{tmp_path}"}, check=True
    )


def test_threads_may_import_bm25s_at_once() -> None:
    program = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from outrider.tools.search import import_bm25s\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    list(pool.map(lambda _: import_bm25s().BM25, range(8)))\n"
        "import sys\n"
        "assert 'jax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
