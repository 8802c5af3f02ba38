r"""One spelling for words that read the same: dashes, quotation marks, characters that are not visible,
widths of characters, and the markup around words (LaTeX, Markdown, HTML).

No letter, digit or sign that a reader sees is dropped.
"""

import html
import re
import unicodedata
from typing import Final

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
# \'e in a word, \'{e} anywhere, \c{c}: elsewhere \" is an escaped quotation mark.
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
_ENTITY: Final = re.compile(r"&(?:#\d{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z]{2,8});")
_MAX_NESTED: Final = 8


def plain_words(text: str) -> str:
    """The text in one spelling: without markup, in Unicode's composed form, with ASCII dashes and quotes."""
    text = text.translate(_NOT_SEEN)
    if "&" in text:
        text = _ENTITY.sub(lambda match: html.unescape(match.group()), text)
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
    return unicodedata.normalize("NFC", text).translate(_SAME)


def _accented(match: re.Match[str]) -> str:
    accent, letter = (match[1], match[2]) if match[1] else (match[3], match[4])
    return unicodedata.normalize("NFC", letter + _ACCENTS[accent])
