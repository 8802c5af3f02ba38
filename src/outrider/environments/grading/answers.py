"""Extracting an answer from a text and comparing it: boxes, normalisation, exact match, token F1.

Source: ARPO (arXiv 2507.19849), section 3, and the behaviour of its released scoring code. If that behaviour
equates different answers or separates equal ones, this code differs on purpose;
``docs/tasks/tools_and_rewards.md`` lists every difference.
"""

import html
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Final

from outrider.tokens.tool_calls import without_thoughts
from outrider.tools.search import stream_safe

_DASHES: Final = "\u2010\u2011\u2012\u2013\u2014\u2015\u2043\u2212\ufe58\ufe63\uff0d\u2e3a\u2e3b\u058a\u1806"
_SINGLE_QUOTES: Final = (
    "\u2018\u2019\u201a\u201b\u2039\u203a\u2032\u2035\u02bc\u02b9\u02bb\u02bd\u02c8\u00b4\u0060\uff07\ua78c"
)
_DOUBLE_QUOTES: Final = (
    "\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033\u2036\u301d\u301e\u301f\u300c\u300d\u300e\u300f\u300a\u300b"
    "\u3008\u3009\u3010\u3011\uff02\u275d\u275e"
)
_HIDDEN: Final = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180e\u200b\u200c\u200d\u200e\u200f"
    "\u202a\u202b\u202c\u202d\u202e\u2060\u2061\u2062\u2063\u2064\u2066\u2067\u2068\u2069\ufeff\u3164"
    + "".join(map(chr, range(0xFE00, 0xFE10)))
)
# Compatible forms of letters, digits and signs (NFKC): full-width, subscripts, ligatures, mathematical
# alphabets, Roman numerals, squared units, "\u2026", "\u2103", "\u2116".
_COMPATIBLE: Final = re.compile(
    "[\u00bc-\u00be\u2024-\u2026\u2080-\u208e\u2100-\u214f\u2150-\u217f\u3000\u3300-\u33ff\ufb00-\ufb06\uff01-\uff5e\uffe0-\uffe6"
    "\U0001d400-\U0001d7ff]+"
)
_NOT_SEEN: Final = str.maketrans(dict.fromkeys(_HIDDEN))
_SAME: Final = str.maketrans(
    dict.fromkeys(_DASHES, "-")
    | dict.fromkeys(_SINGLE_QUOTES, "'")
    | dict.fromkeys(_DOUBLE_QUOTES, '"')
    | {
        "\u3001": ",",
        "\u3002": ".",
        "\u30fb": "\u00b7",
        "\u2044": "/",
        "\u2215": "/",
        "\u2028": " ",
        "\u2029": " ",
    }
)
_SUPERSCRIPT: Final = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207b]+")
_FRACTION: Final = re.compile("(?<=[0-9])(?=[\u00bc-\u00be\u2150-\u215e])")
_TEXT_COMMAND: Final = re.compile(
    r"\\(?:text(?:it|bf|rm|sf|tt|sc|up|sl|md|normal)?|math(?:rm|bf|it|sf|tt|normal)|[mhf]box|emph|underline|boxed"
    r"|operatorname\*?|boldsymbol|bm|uline|enquote|small|large)\s*\{((?:[^{}\\]|\\.)*)\}"
)
_ACCENTS: Final = {"'": "\u0301", "`": "\u0300", "^": "\u0302", '"': "\u0308", "~": "\u0303", "=": "\u0304",
                   ".": "\u0307", "c": "\u0327", "v": "\u030c", "H": "\u030b", "u": "\u0306", "k": "\u0328",
                   "r": "\u030a"}  # fmt: skip
# \'e in a word, \'{e} anywhere, \c{c}; otherwise \" is an escaped quotation mark.
_ACCENT: Final = re.compile(
    r"(?<=[^\W\d_])\\(['`^\"~=.])([A-Za-z])|\\(['`^\"~=.]|[cvHukr](?=\s*\{))\s*\{\\?([A-Za-z])\}"
)
_LETTERS: Final = {r"\ss": "\u00df", r"\o": "\u00f8", r"\O": "\u00d8", r"\l": "\u0142", r"\L": "\u0141",
                   r"\ae": "\u00e6", r"\AE": "\u00c6", r"\oe": "\u0153", r"\OE": "\u0152", r"\aa": "\u00e5",
                   r"\AA": "\u00c5"}  # fmt: skip
_LETTER: Final = re.compile(r"(\\(?:ss|o|O|l|L|ae|AE|oe|OE|aa|AA))(?:\{\}|\s+|(?![A-Za-z]))")
_REWRITES: Final = (
    (re.compile(r"\\(?:left|right|displaystyle|limits|bigl?|bigr?|Bigl?|Bigr?)(?![A-Za-z])"), ""),
    (re.compile(r"(?<=\d)(?:\\[,!:;]|\{,\}|\\,\s?|,\\!)\s?(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\!|\\(?:text)?color\s*\{[^{}]*\}"), ""),
    (re.compile(r"\\[,:; ]|\\(?:q?quad|enspace|thinspace)(?![A-Za-z])|\\\\(?!\w)"), " "),
    (re.compile(r"(?<=[^\s~])~(?=[^\s~])"), " "),
    (re.compile(r"\s?\^\s?(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])"), "\u00b0"),
    (re.compile(r"\\[lc]?dots(?![A-Za-z])"), "..."),
    (re.compile(r"\\text(?:endash|emdash)(?![A-Za-z])|(?<=\w)---?(?=\w)"), "-"),
    (re.compile(r"\[([^\[\]]+)\]\((?:https?://|www\.|/)[^)\s\[]*\)"), r"\1"),
    (re.compile(r"</?(?:b|i|u|em|strong|su[bp]|span|code|small|mark|p|br|a|q)(?:\s[^<>]*)?/?>", re.I), ""),
)  # fmt: skip
_BRACED_INDEX: Final = re.compile(
    r"(?<=[A-Za-z)\]}])\s?([_^])\s?\{\s*([+-]?\w+[+-]?)\s*\}(?!\d|\s*[-+*/])", re.ASCII
)
_DEGREES: Final = re.compile("(?<=[0-9])\\s?\u00b0\\s?(?=[CFK]\\b)")
_ENTITY: Final = re.compile(r"&(?:#\d{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z]{2,8});")
_MAX_NESTED: Final = 8


def plain_words(text: str) -> str:
    """One spelling for words that look the same: without markup (LaTeX, Markdown, HTML) and invisible
    characters, in Unicode's composed form, with ASCII dashes and quotes. No visible letter, digit or sign is
    dropped.
    """
    text = text.translate(_NOT_SEEN)
    if "&" in text:
        text = _ENTITY.sub(lambda match: html.unescape(match.group()), text)
    text = _BRACED_INDEX.sub(r"\1\2", text)
    if "\\" in text:
        text = _ACCENT.sub(_accented, text)
        text = _LETTER.sub(lambda match: _LETTERS[match[1]], text)
        for _ in range(_MAX_NESTED):
            text, count = _TEXT_COMMAND.subn(r"\1", text)
            if not count:
                break
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _SUPERSCRIPT.sub(
        lambda run: "^" + unicodedata.normalize("NFKC", run.group()), text.translate(_SAME)
    )
    text = _COMPATIBLE.sub(lambda run: unicodedata.normalize("NFKC", run.group()), _FRACTION.sub(" ", text))
    return _DEGREES.sub(" \u00b0", unicodedata.normalize("NFC", text).translate(_SAME))


def _accented(match: re.Match[str]) -> str:
    accent, letter = (match[1], match[2]) if match[1] else (match[3], match[4])
    return unicodedata.normalize("NFC", letter + _ACCENTS[accent])


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
    r"""The content of the last closed ``\boxed{...}`` (with matching braces; ``\{`` is no brace) or ``\boxed
    x$``; None if there is none.

    An unclosed box and a box in the model's thoughts are skipped, and ``\fbox`` is no box. The time is linear
    in the length of the text.
    """
    text = without_thoughts(text)
    closings = _closings(text)
    span: tuple[int, int] | None = None
    position, mark = 0, -1  # ``mark``: the first of $, { and } at or after ``position``
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
    """From the position of every opening brace to that of its closing brace, in one pass."""
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
    """The answer of a whole output: the last box in the last ``<answer>`` pair, or the pair's text; without a
    pair the last box. Empty if there is none of these. Thoughts are ignored.
    """
    text = without_thoughts(text)
    pair: str | None = None
    for part in reversed(text.split("</answer>")[:-1]):
        # From the first opening tag after the previous closing tag.
        _, opening, inside = part.partition("<answer>")
        if opening:
            pair = inside
            break
    boxed = last_boxed(text if pair is None else pair)
    if boxed is not None:
        return unwrap_text(boxed)
    return "" if pair is None else pair.strip()


def normalize_answer(text: str) -> str:
    """Lower case without markup (:func:`plain_words`), punctuation, articles and repeated blanks; numbers
    keep their sign and decimal point.

    For example, ``1,000`` becomes ``1000`` and ``12.0`` becomes ``12``. If nothing would be left (the choice
    ``A``, a single ``%``), articles or punctuation do not change.
    """
    lowered = " ".join(plain_words(stream_safe(text)).lower().split())
    lowered = re.sub(r"-\s*([$\u00a3\u20ac])\s*(?=\d)", r"\1-", lowered)
    # Punctuation around numbers is removed; between two digits it becomes a blank, because 1/2 is not 12.
    parted = _BETWEEN_DIGITS.sub(" ", lowered)
    words: list[str] = []
    position = 0
    for match in _NUMBER.finditer(lowered):
        words += [parted[position : match.start()].translate(_DELETE_PUNCTUATION), _canonical(match.group())]
        position = match.end()
    words.append(parted[position:].translate(_DELETE_PUNCTUATION))
    collapsed = " ".join("".join(words).split())
    return " ".join(_without_articles(collapsed).split()) or collapsed or lowered or text.strip()


def _without_articles(text: str) -> str:
    """Remove articles; an "a" among the letters at the end is a choice or a name ("A, C", "vitamin A")."""
    start = len(text)  # of the last words that are letters, or join letters
    for word in reversed(text.split(" ")):
        if not (len(word) == 1 and word.isalpha()) and word not in ("and", "or"):
            break
        start -= len(word) + 1

    def replaced(match: re.Match[str]) -> str:
        is_letter = match[0] == "a" and match.start() > start
        is_before_letter = match[0] != "a" and text[match.end() :] == " a"
        return match[0] if is_letter or is_before_letter else " "

    return _ARTICLES.sub(replaced, text)


def _canonical(number: str) -> str:
    mantissa, _, power = number.replace(",", "").partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = fraction.rstrip("0")
    whole = "0" if whole == "" else "-0" if whole == "-" else whole
    value = f"{whole}.{fraction}" if fraction else "0" if whole == "-0" else whole
    if not power:
        return value
    digits = power.lstrip("+-").lstrip("0") or "0"
    return f"{value}e{'-' if power[0] == '-' and digits != '0' else ''}{digits}"


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Whether the normalised prediction equals a normalised answer. An empty prediction matches nothing."""
    predicted = normalize_answer(prediction)
    return bool(predicted) and any(predicted == normalize_answer(answer) for answer in answers)


def contains_answer(prediction: str, answers: Sequence[str]) -> bool:
    """Whether the normalised prediction contains a normalised answer as whole words."""
    predicted = f" {normalize_answer(prediction)} "
    return any(f" {normalize_answer(answer)} " in predicted for answer in answers)


def f1_score(prediction: str, answers: Sequence[str]) -> float:
    """Bag-of-words F1 in [0, 1], the maximum over the answers. Yes, no and "noanswer" match only equals."""
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
