r"""Normal form of mathematical answers before they are compared: one spelling for what means the same, and
the unit apart.

``math-verify`` reads LaTeX. Model answers and data sets also have ``1e3``, ``x**2``, ``½``, ``10,\!080``, ``1
1/2`` or ``18 dollars``.
"""

import re
import unicodedata
from typing import Final

_SIGNS: Final = str.maketrans({"\u2212": "-", "\u2013": "-", "\u2010": "-", "\u2011": "-", "\u2044": "/"})
_SUPERSCRIPTS: Final = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True))
_SUPERSCRIPT_RUN: Final = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_VULGAR: Final = re.compile("[¼-¾⅐-⅞]")
_REWRITES: Final = (
    (re.compile(r",\\!\s*"), ","),
    (re.compile(r"\\[!,;:]"), ""),  # thin spaces; a lone ! is a factorial
    (re.compile(r"√\s*(\d+(?:\.\d+)?|[A-Za-z]|\([^()]*\))"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\A-Za-z])sqrt\s*(?:\(([^()]*)\)|\{([^{}]*)\})"), r"\\sqrt{\1\2}"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\^\s*-\s*(\d+)"), r"^{-\1}"),
    (re.compile(r"(?<=\d)[eE](?=[+-]?\d)"), "E"),
    (re.compile(r"\\(?:mbox|textrm|textit|mathrm|mathit)(?=\s*\{)"), r"\\text"),
    (re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])"), r"\1\\frac{\2}{\3}"),
)
_NUMBER: Final = r"[-+]?\s*(?:\\?\$\s*)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:E[+-]?\d+)?"
_QUANTITY: Final = re.compile(
    rf"((?:{_NUMBER}(?:\s*/\s*\d+)?"
    r"|-?\\d?frac\s*\{[^{}]*\}\s*\{[^{}]*\}"
    rf"|{_NUMBER}\\d?frac\{{\d+\}}\{{\d+\}}))"
    r"\s*(?:\\text\s*\{([^{}]*)\}|\s([A-Za-z]+(?:\s[A-Za-z]+)*)|([A-Za-z]{3,}))\s*(\^\s*(?:\d|\{\d\}))?\s*\.?"
)
_UNITS: Final = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre",
        "in inch inche", "ft foot feet", "yd yard", "mi mile",
        "mg milligram", "g gram", "kg kilogram", "lb pound", "oz ounce",
        "sec s second", "min minute", "hour h hr", "L l liter litre", "mL ml milliliter millilitre",
        "dollar usd", "degree deg", "day", "week", "month", "year", "cent", "cup", "unit", "percent",
    )
    for name in names.split()
}  # fmt: skip
_AROUND: Final = frozenset({"per", "square", "sq", "cubic"})
_NO_UNITS: Final = frozenset({
    "times", "plus", "minus", "hundreds", "thousands", "millions", "billions", "trillions", "dozens",
    "halves", "thirds", "tenths",
})  # fmt: skip


def one_spelling(text: str) -> str:
    """Unicode fractions, powers, roots and minus signs as LaTeX; thin spaces and one final full stop gone;
    ``1e3`` as ``1E3``.
    """
    text = _VULGAR.sub(_fraction, text.translate(_SIGNS))
    text = _SUPERSCRIPT_RUN.sub(
        lambda run: "^{" + "".join(_SUPERSCRIPTS[sign] for sign in run.group()) + "}", text
    )
    text = unicodedata.normalize("NFKC", text).translate(_SIGNS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip()
    return text[:-1].rstrip() if text.endswith((".", ",")) and len(text) > 1 else text


def _fraction(match: re.Match[str]) -> str:
    above, below = unicodedata.normalize("NFKC", match.group()).split("\u2044")
    return rf"\frac{{{above}}}{{{below}}}"


def split_unit(text: str) -> tuple[str, str]:
    """A number and what it counts, ``5 square meters`` as ``("5", "m^2")``; ``(text, "")`` for anything else.

    A unit is a known one or a plural ("apples"): "2 pi", "5 million" and "5 or more" are more than their
    number. Letters directly behind a number are a unit from three on: ``5m`` may be five times m.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        return text, ""
    number, *names, power = match.groups()
    name = next(name for name in names if name is not None)
    words = name.replace(".", "").split()
    return (number, _unit(name, power)) if words and all(map(_is_unit, words)) else (text, "")


def _is_unit(word: str) -> bool:
    is_plural = len(word) > 3 and word.isalpha() and word.endswith("s") and word.lower() not in _NO_UNITS
    return word in _UNITS or word.lower() in _UNITS or word.lower() in _AROUND or is_plural


def _unit(name: str, power: str | None) -> str:
    words = re.sub(r"\bper\b", "/", name).replace(".", "").split()
    exponent = re.sub(r"\D", "", power or "")
    if words and words[0].lower() in ("square", "sq", "cubic"):
        exponent = "3" if words[0].lower() == "cubic" else "2"
        words = words[1:]
    singular = [word if word in _UNITS or len(word) < 3 else word.lower().removesuffix("s") for word in words]
    return " ".join(_UNITS.get(word, word) for word in singular) + (f"^{exponent}" if exponent else "")
