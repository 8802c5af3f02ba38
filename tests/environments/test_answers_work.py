r"""Extraction and normalisation in one pass: the results of the plain definitions, at a cost that grows with
the text alone.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.environments.grading import answers
from outrider.environments.grading.answers import (
    extract_answer,
    last_boxed,
    normalize_answer,
    plain_words,
    unwrap_text,
)


def plain_boxed(text: str) -> str | None:
    """Every box from left to right, each with a search of its own for its closing brace."""
    found: str | None = None
    for match in re.finditer(r"\\boxed\s*\{|\\boxed ([^${}]+)(?:\$|$)", text):
        inside = match.group(1) if match.group(1) is not None else plain_matched(text[match.end() :])
        found = inside.strip() if inside is not None else found
    return found


def plain_matched(text: str) -> str | None:
    depth = 1
    for match in re.finditer(r"\\[{}\\]|[{}]", text):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return text[: match.start()]
    return None


def plain_extracted(text: str) -> str:
    pairs = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    boxed = plain_boxed(pairs[-1] if pairs else text)
    if boxed is not None:
        return unwrap_text(boxed)
    return str(pairs[-1]).strip() if pairs else ""


def plain_normalized(text: str) -> str:
    """Punctuation between digits is looked for anew in front of every number."""
    lowered = " ".join(plain_words(text).lower().split())
    lowered = re.sub(r"-\s*([$\u00a3\u20ac])\s*(?=\d)", r"\1-", lowered)
    words: list[str] = []
    position = 0
    for match in answers._NUMBER.finditer(lowered):
        if match.group().strip("-"):
            words += [plain_between(lowered, position, match.start()), answers._canonical(match.group())]
            position = match.end()
    words.append(plain_between(lowered, position, len(lowered)))
    kept = " ".join("".join(words).split())
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", kept).split()) or kept or lowered or text.strip()


def plain_between(text: str, start: int, end: int) -> str:
    mark = r"(?<=\d)[!-/:-@\[-`{-~](?=[-.(\[{$]*\d)|(?<=[!-/:-@\[-`{-~])[(\[{$](?=\d)"
    return re.sub(mark, " ", text)[start:end].translate(
        str.maketrans("", "", "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    )


TAGS = [
    "<answer>",
    "</answer>",
    "\\boxed{",
    "\\boxed ",
    "\\boxed  {",
    "\\boxed",
    "{",
    "}",
    "\\{",
    "\\}",
    "\\\\",
    "\\",
    "$",
    "\n",
    " ",
]
OUTPUTS = st.lists(st.sampled_from([*TAGS, "a", "7", "\\text{b}"]), max_size=24).map("".join)
NUMBERS = st.text(alphabet="0123456789.,-+/:()[]{}$\u20ac%'\u2212 ae\u00e9\u0301\u0663x", max_size=40)


@given(OUTPUTS)
@example("\\boxed a \\boxed b$ \\boxed{")
@example("<answer>1<answer>2</answer></answer> <answer>")
@example("\\boxed 5\n")
@example("\\\\boxed{\\\\}")
def test_extraction_gives_what_the_definition_gives(output: str) -> None:
    assert last_boxed(output) == plain_boxed(output)
    assert extract_answer(output) == plain_extracted(output)


@given(NUMBERS | st.text(max_size=40))
@example("1/2 3:4 5,6 -$7 1.2.3 4 5")
def test_normalisation_gives_what_the_definition_gives(text: str) -> None:
    assert normalize_answer(text) == plain_normalized(text)


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
