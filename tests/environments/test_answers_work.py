r"""Extraction and normalisation in one pass: the results of the plain definitions, at a cost that grows with
the text alone.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider.environments.grading import answers
from outrider.environments.grading.answers import extract_answer, last_boxed, normalize_answer


class Counting:
    """A pattern that adds up the characters it was let loose on."""

    num_read = 0

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def search(self, text: str, position: int = 0) -> re.Match[str] | None:
        found = self._pattern.search(text, position)
        Counting.num_read += (len(text) if found is None else found.end()) - position
        return found

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        Counting.num_read += len(text)
        return self._pattern.finditer(text)

    def sub(self, by: str, text: str) -> str:
        Counting.num_read += len(text)
        return self._pattern.sub(by, text)


HOSTILE: list[tuple[Callable[[str], Any], Callable[[int], str]]] = [
    (normalize_answer, lambda n: "1 " * n),
    (normalize_answer, lambda n: "1/" * n),
    (last_boxed, lambda n: "\\boxed{" * n),
    (last_boxed, lambda n: "\\boxed{" * n + "}" * n),
    (last_boxed, lambda n: "\\boxed " * n + "{"),
    (last_boxed, lambda n: "\\boxed x$" * n),
    (extract_answer, lambda n: "<answer>\\boxed{" * n),
    (extract_answer, lambda n: "</answer>" * n + "\\boxed{"),
    (extract_answer, lambda n: "<answer>\\boxed{</answer>" * n),
]


@pytest.mark.parametrize(("function", "text"), HOSTILE)
def test_twice_the_text_is_twice_the_reading(
    function: Callable[[str], Any], text: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_NUMBER", "_BETWEEN_DIGITS", "_ARTICLES", "_BOX", "_BOX_END", "_BRACE"):
        monkeypatch.setattr(answers, name, Counting(getattr(answers, name)))
    num_read = []
    for size in (200, 400):
        Counting.num_read = 0
        function(text(size))
        num_read.append(Counting.num_read)
        assert 0 < Counting.num_read <= 4 * len(text(size))
    assert num_read[1] <= 2.1 * num_read[0]
