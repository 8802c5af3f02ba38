r"""Taking an answer out of text and comparing it: boxes, normalisation, exact match, token F1.

Source: ARPO (arXiv 2507.19849), section 3 and the released scoring code's behaviour. Where that behaviour
equates different answers or parts equal ones, this differs on purpose; ``docs/environments.md`` lists every
difference.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

from outrider.environments.grading.words import plain_words
from outrider.tokens.thoughts import without_thoughts
from outrider.tools.stream_safe import stream_safe

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
# A number: optional sign that does not follow a word or another number ("2020-25" is a range), optional
# thousands commas and power of ten; letters may follow ("2.5km").
_NUMBER = re.compile(
    r"(?<![\w.)])-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?!\d|\.\d)(?:e[+-]?\d+(?!\w|\.\d))?",
    re.ASCII,
)
_CLOSED_ANSWERS = ("yes", "no", "noanswer")
_BETWEEN_DIGITS = re.compile(r"(?<=\d)[!-/:-@\[-`{-~](?=[-.(\[{$]*\d)|(?<=[!-/:-@\[-`{-~])[(\[{$](?=\d)")
_BOX = re.compile(r"\\boxed\s*\{|\\boxed (?=[^${}])")
_BOX_END = re.compile(r"[${}]")
_BRACE = re.compile(r"\\[{}\\]|[{}]")
_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)


def last_boxed(text: str) -> str | None:
    r"""The inside of the last closed ``\boxed{...}`` (braces matched, ``\{`` is no brace) or ``\boxed x$``;
    None if none.

    An unclosed box is skipped rather than an error, and ``\fbox`` is not a box. A box in the model's thoughts
    is skipped too. The time grows in proportion to the text, whatever is in it.
    """
    text = without_thoughts(text)
    closings = _closings(text)
    span: tuple[int, int] | None = None
    position, mark = 0, -1  # the first of $, { and } from ``position`` on; found again only once it is passed
    while (match := _BOX.search(text, position)) is not None:
        position = match.end()
        if match.group().endswith("{"):
            end = closings.get(position - 1)
            span = span if end is None else (position, end)
            continue
        if mark < position:
            box_end = _BOX_END.search(text, position)
            mark = len(text) if box_end is None else box_end.start()
        if mark == len(text) or text[mark] == "$":
            span = (position, mark)
            position = mark + 1
    return None if span is None else text[slice(*span)].strip()


def _closings(text: str) -> dict[int, int]:
    """Where every brace that is closed is closed, in one pass."""
    opened: list[int] = []
    closings: dict[int, int] = {}
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            closings[opened.pop()] = match.start()
    return closings


def unwrap_text(answer: str) -> str:
    r"""``\text{Paris}`` becomes ``Paris``; anything else stays."""
    match = re.fullmatch(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", answer.strip())
    return match.group(1).strip() if match else answer.strip()


def extract_answer(text: str) -> str:
    """The answer of a whole output: last ``<answer>`` pair, its last box, else its text; without a pair the
    last box.

    Empty when there is none of these. Thoughts are no part of the output.
    """
    text = without_thoughts(text)
    pair = _last_pair(text)
    boxed = last_boxed(text if pair is None else pair)
    if boxed is not None:
        return unwrap_text(boxed)
    return "" if pair is None else pair.strip()


def _last_pair(text: str) -> str | None:
    """The inside of the last answer pair: from the first opening tag behind the closing tag before; None
    without any.
    """
    for part in reversed(text.split("</answer>")[:-1]):
        _, opening, inside = part.partition("<answer>")
        if opening:
            return inside
    return None


def normalize_answer(text: str) -> str:
    """Lower case without markup (:func:`plain_words`), punctuation and articles, blanks collapsed; numbers
    keep their sign and decimal point.

    ``1,000`` becomes ``1000`` and ``12.0`` becomes ``12``. A text that would vanish (the choice ``A``, a lone
    ``%``) keeps its articles, or its punctuation.
    """
    lowered = " ".join(plain_words(stream_safe(text)).lower().split())
    lowered = re.sub(r"-\s*([$\u00a3\u20ac])\s*(?=\d)", r"\1-", lowered)
    # Around numbers punctuation goes; between two digits it becomes a blank, one for one: 1/2 is not 12.
    parted = _BETWEEN_DIGITS.sub(" ", lowered)
    words: list[str] = []
    position = 0
    for match in _NUMBER.finditer(lowered):
        words += [parted[position : match.start()].translate(_DELETE_PUNCTUATION), _canonical(match.group())]
        position = match.end()
    words.append(parted[position:].translate(_DELETE_PUNCTUATION))
    collapsed = " ".join("".join(words).split())
    return " ".join(_ARTICLES.sub(" ", collapsed).split()) or collapsed or lowered or text.strip()


def _canonical(number: str) -> str:
    mantissa, _, power = number.replace(",", "").partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = fraction.rstrip("0")
    whole = "0" if whole == "" else "-0" if whole == "-" else whole
    value = f"{whole}.{fraction}" if fraction else "0" if whole == "-0" else whole
    return f"{value}e{power.removeprefix('+')}" if power else value


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Whether the normalised prediction equals any normalised answer. An empty prediction matches nothing."""
    predicted = normalize_answer(prediction)
    return bool(predicted) and any(predicted == normalize_answer(answer) for answer in answers)


def contains_answer(prediction: str, answers: Sequence[str]) -> bool:
    """Whether any normalised answer stands in the normalised prediction, as whole words."""
    predicted = f" {normalize_answer(prediction)} "
    return any(f" {normalize_answer(answer)} " in predicted for answer in answers)


def f1_score(prediction: str, answers: Sequence[str]) -> float:
    """Bag-of-words F1 in [0, 1], the best over the answers. Yes, no and "noanswer" only match themselves."""
    return max(
        (_f1(normalize_answer(prediction), normalize_answer(answer)) for answer in answers), default=0.0
    )


def _f1(predicted: str, gold: str) -> float:
    if predicted != gold and (predicted in _CLOSED_ANSWERS or gold in _CLOSED_ANSWERS):
        return 0.0
    predicted_words, gold_words = predicted.split(), gold.split()
    num_shared = sum((Counter(predicted_words) & Counter(gold_words)).values())
    if num_shared == 0:
        return 0.0
    precision, recall = num_shared / len(predicted_words), num_shared / len(gold_words)
    return 2 * precision * recall / (precision + recall)
