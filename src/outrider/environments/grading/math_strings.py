r"""Equality of mathematical answers as strings, by the rules of MATH (arXiv 2103.03874): nothing is
evaluated.
"""

import re
from typing import Final

_DROPPED: Final = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""),
    ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
)  # fmt: skip


def strings_equal(first: str | None, second: str | None) -> bool:
    r"""Equality after MATH's rewriting of strings; nothing is evaluated: ``1/2`` is ``\frac{1}{2}``, but 12
    is not 12.0.

    Two missing texts are equal. A text that the rewriting cannot read makes it plain equality.
    """
    if first is None or second is None:
        return first is second
    left, right = _rewritten(first), _rewritten(second)
    return first == second if left is None or right is None else left == right


def _rewritten(text: str) -> str | None:
    for old, new in _DROPPED:
        text = text.replace(old, new)
    text, *unit = text.split("\\text{ ")
    if len(unit) > 1:
        return None
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = f"0{text}" if text.startswith(".") else text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    if re.search(r"\\sqrt(?=\\sqrt|$)", text):
        return None
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    fractions = _braced_fractions(text)
    if fractions == "0.5":
        return "\\frac{1}{2}"
    whole = re.fullmatch(r"(0|-?[1-9]\d*)/(0|-?[1-9]\d*)", fractions or "", flags=re.ASCII)
    return f"\\frac{{{whole[1]}}}{{{whole[2]}}}" if whole else fractions


def _braced_fractions(text: str) -> str | None:
    r"""``\frac12`` and ``\frac1{72}`` with all their braces; None for a command without operands."""
    head, *tails = text.split("\\frac")
    braced = [head]
    for tail in tails:
        if not tail:
            return None
        if len(tail) < 2 and tail != "{":
            return text
        second = tail[1:] if tail[1:2] == "{" else f"{{{tail[1:2]}}}{tail[2:]}"
        braced.append(tail if tail.startswith("{") else f"{{{tail[0]}}}{second}")
    return "\\frac".join(braced)
