r"""Comparison of mathematical answers part by part: lists, tuples, sets, intervals, unions, matrices, ratios
and sums with dots. A computer algebra system (``math-verify``) compares the parts, which contain none of
these.

The algebra system parses a list with ``\ldots``, a ``\pm`` in a tuple or a chain ``1:2:3`` only in part, and
ignores the rest. Here every part of one answer must match a part of the other.

The comparison runs in a grading process only, because its time and memory are not limited here.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Final, Literal

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.math_normalization import normalize_latex
from math_verify import verify
from sympy.core.function import AppliedUndef

from outrider.environments.grading.math_normal_form import MEASURES, split_top, split_unit

_DOTS: Final = r"\ldots"
_CLOSERS: Final = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle"}
_MATRIX: Final = re.compile(
    r"\\begin\{([pbBvVs]?(?:small)?matrix|array|cases)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL
)
RELATION: Final = re.compile(r"\\(?:le|ge|ne|approx|in|notin|subset|subseteq|equiv|sim)(?![A-Za-z])|[<>=]")
_NAME: Final = re.compile(
    r"\s*(?:[A-Za-z]|\\[A-Za-z]+)(?:_(?:\{[^{}]*\}|\w))?'*\s*(?:\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\))?\s*"
    r"|\s*\\(?:overrightarrow|overline|vec|hat|bar|widehat)\s*\{[^{}]*\}\s*|\s*(?:[A-Za-z]\s*){2,4}|\s*\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\)\s*|\s*\\angle\s*[A-Z]+\s*|\s*\|[A-Z]+\|\s*"
)
_BUILDER: Final = re.compile(
    r"\\\{\s*\(?([A-Za-z])\)?\s*(?:\\in\s*\\mathbb\{R\}|\\in\s*R)?\s*[|:]\s*(.+?)\s*(?:,\s*\1\s*\\in\s*\\mathbb\{R\}\s*)?\\\}",
    re.DOTALL,
)
_BASED: Final = re.compile(r"([0-9A-Fa-f]+)_(?:\{(\d{1,2})\}|(\d{1,2}))")
_THOUSANDS: Final = re.compile(r"[-+]?\s*\\?\$?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?!\d)")
# A number with commas that is neither an index nor all arguments of a function.
_GROUPED: Final = re.compile(
    r"(?<![\d.,_^])(?<!_\{)(?:(?<!\()|(?=[\d,]+(?![\d,)])))[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\S)"
)
_AMBIGUOUS: Final = "a number with a comma"
_CURRENCIES: Final = frozenset({"dollar", "euro", "sterling", "yen", "rupee", "cent"})
_BOUND: Final = re.compile(r"([^<>=]+?)(<|>|\\le(?![a-z])|\\ge(?![a-z]))([^<>=]+)")
_VARIABLE: Final = re.compile(r"[A-Za-z]|\\[A-Za-z]+")
_MIRRORED: Final = {">": "<", "<": ">", r"\ge": r"\le", r"\le": r"\ge"}
_MAX_SIGNS: Final = 3
_MAX_MEMBERS: Final = 40


@dataclass(frozen=True, slots=True)
class _Parts:
    """An answer in its parts.

    Attributes:
        kind: a single expression, a list without brackets, or one with brackets.
        members: the parts.
        brackets: the brackets.
        word: the word between the parts of a list.
    """

    kind: Literal["one", "list", "bracketed"]
    members: tuple[str, ...]
    brackets: tuple[str, str] = ("", "")
    word: str = ","


def is_same_value(left: str, right: str) -> bool:
    """Whether two answers are equal in all their parts; symmetric."""
    left, right = _bare(left), _bare(right)
    if _packed(left) == _packed(right) and not re.search(r"\d\s+\d", left + right):
        return True
    if not left or not right:
        return False
    readings = [_readings(text) for text in (left, right)]
    return any(_is_same_parts(reading, other) for reading, other in product(*readings))


def _is_same_parts(left: _Parts, right: _Parts) -> bool:
    if left.kind == "one" and right.kind == "one":
        return _is_same_single(left.members[0], right.members[0])
    if (left.kind == "list") != (right.kind == "list"):
        bare, other = (left, right) if left.kind == "list" else (right, left)
        if (condition := _as_condition(bare)) is not None:
            return is_same_value(condition, _written(other))
    if left.kind == "one" or right.kind == "one":
        single, other = (left, right) if left.kind == "one" else (right, left)
        return _is_same_mixed(single.members[0], other)
    if left.kind == right.kind == "list":
        # of conditions and of formulas of logic; solutions may be joined by either
        is_logic = any(re.search(r"[<>]|\\[lg]e(?![a-z])", member) for member in left.members) or not any(
            re.search(r"[\d=]", member) for member in left.members
        )
        if is_logic and {left.word, right.word} == {"and", "or"}:
            return False
        return _is_same_members(left.members, right.members, is_ordered=False)
    if left.kind == "list" or right.kind == "list":
        bare, other = (left, right) if left.kind == "list" else (right, left)
        if bare.word == _AMBIGUOUS:
            return False
        if other.brackets == (r"\{", r"\}"):
            return _is_same_members(bare.members, other.members, is_ordered=False)
        if other.brackets == ("(", ")") or (other.brackets == ("[", "]") and len(other.members) > 2):
            return _is_same_members(bare.members, other.members, is_ordered=True)
        if other.brackets == ("[", "]") and all(_bracketed(member) for member in other.members):
            return _is_same_members(bare.members, other.members, is_ordered=False)
        return other.brackets == ("[", "]") and len(other.members) == 1 == len(bare.members)
    if left.brackets != right.brackets:
        is_vector = {left.brackets, right.brackets} == {("(", ")"), (r"\langle", r"\rangle")}
        is_long = len(left.members) > 2 and {left.brackets, right.brackets} == {("(", ")"), ("[", "]")}
        if not (is_vector or is_long):
            return False
    return _is_same_members(left.members, right.members, is_ordered=left.brackets[0] != r"\{")


def _is_same_members(left: Sequence[str], right: Sequence[str], *, is_ordered: bool) -> bool:
    if len(left) != len(right) or len(left) > _MAX_MEMBERS:
        return False
    if is_ordered or any(_is_dots(member) for member in (*left, *right)):
        return all(
            _is_dots(item) == _is_dots(other) and (_is_dots(item) or is_same_value(item, other))
            for item, other in zip(left, right, strict=True)
        )
    rest = list(right)
    for item in left:  # the same text first, which is cheap
        match = next((other for other in rest if _packed(other) == _packed(item)), None)
        if match is None:
            match = next((other for other in rest if is_same_value(item, other)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _is_same_mixed(single: str, other: _Parts) -> bool:
    """Compare an expression with several parts: a condition may describe an interval, and a list of one
    member equals that member.
    """
    if len(other.members) == 1 and other.brackets in (("", ""), (r"\{", r"\}"), ("[", "]"), ("(", ")")):
        return other.brackets[0] != "[" and is_same_value(single, other.members[0])
    name, _, value = _assigned(single)
    if name and _readings(_bare(value))[0].kind != "one":
        return is_same_value(value, _written(other))
    is_condition = bool(re.search(r"[<>]|\\(?:le|ge|ne|cup|cap|setminus|mathbb|infty)(?![a-z])", single))
    return is_condition and other.kind == "bracketed" and _is_same_expression(single, _written(other))


def _is_same_single(left: str, right: str) -> bool:
    (left, its_unit), (right, unit) = split_unit(left), split_unit(right)
    if not is_same_unit(its_unit, unit):
        return False
    is_percentage = [text.endswith(r"\%") for text in (left, right)]
    if any(is_percentage):
        if its_unit or unit:
            return False
        if all(is_percentage):
            return is_same_value(left.removesuffix(r"\%"), right.removesuffix(r"\%"))
        amount, other = (left, right) if is_percentage[0] else (right, left)
        amount = amount.removesuffix(r"\%")
        if not RELATION.search(amount):  # "12 percent" may be written as 12 or as 0.12
            is_sum = len(split_top(amount[1:], "+-")) > 1  # only its last term is in percent
            share = left if is_percentage[0] else right
            share = share if is_sum else rf"\frac{{{amount}}}{{100}}"
            return is_same_value(amount, other) or _is_same_expression(share, other)
    for split in (
        _compare_unions,
        _compare_matrices,
        _compare_times,
        _compare_ratios,
        _compare_relations,
    ):
        verdict = split(left, right)
        if verdict is not None:
            return verdict
    if _DOTS in left or _DOTS in right:
        return _packed(left) == _packed(right)
    bases = [_BASED.fullmatch(text.strip()) for text in (left, right)]
    if bases[0] and bases[1]:
        return _based_value(bases[0]) == _based_value(bases[1]) is not None
    if any(bases):  # only one of them has a base: compare the digits
        digits = [
            match[1] if match else text.strip() for match, text in zip(bases, (left, right), strict=True)
        ]
        return digits[0] == digits[1]
    return _is_same_expression(left, right)


def _compare_unions(left: str, right: str) -> bool | None:
    parts = [split_top(re.sub(r"\\cup(?![A-Za-z])", "\x00", text), "\x00") for text in (left, right)]
    if all(len(part) > 1 for part in parts):
        return _is_same_members(*parts, is_ordered=False) or _is_same_expression(left, right)
    return None


def _compare_matrices(left: str, right: str) -> bool | None:
    matrices = [_MATRIX.fullmatch(text.strip()) for text in (left, right)]
    if matrices[0] is None or matrices[1] is None:
        return None
    rows = [
        [split_top(row, "&") for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2]) if row.strip()]
        for match in matrices
        if match is not None
    ]
    if "cases" in (matrices[0][1], matrices[1][1]):
        lists = [["&".join(map(_packed, row)) for row in matrix] for matrix in rows]
        return _is_same_members(lists[0], lists[1], is_ordered=False)
    if "v" in (matrices[0][1][0].lower() + matrices[1][1][0].lower()) and matrices[0][1] != matrices[1][1]:
        return None  # a determinant is a number
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    entries = [[entry for row in matrix for entry in row] for matrix in rows]
    return _is_same_members(entries[0], entries[1], is_ordered=True)


_TIME = re.compile(
    r"(\d{1,2}):([0-5]\d)\s*(?:\\text\s*\{\s*|\\,\s*)*(?:([ap])\.?\s*m\.?)?[\s}]*", re.IGNORECASE
)


def _compare_times(left: str, right: str) -> bool | None:
    """Two times of day, which are no ratios: one has am or pm, or an hour or minutes with a leading zero."""
    times = [time for text in (left, right) if (time := _TIME.fullmatch(text.strip()))]
    if len(times) < 2 or not any(time[3] or "0" in (time[1][0], time[2][0]) for time in times):
        return None
    first, second = map(_minutes, times)
    if first == second or (times[0][3] is None) == (times[1][3] is None):
        return first == second
    bare = first if times[0][3] is None else second
    return 60 <= bare < 13 * 60 and first % 720 == second % 720  # 2:00 may be 2:00 PM, and 0:30 may not


def _minutes(time: re.Match[str]) -> int:
    hour = int(time[1])
    if time[3]:
        hour = hour % 12 + 12 * (time[3] in "pP")
    return 60 * hour + int(time[2])


def _compare_ratios(left: str, right: str) -> bool | None:
    parts = [split_top(text, ":") for text in (left, right)]
    if max(map(len, parts)) < 2 or (min(map(len, parts)) == 1 and max(map(len, parts)) == 2):
        return None
    if len(parts[0]) != len(parts[1]) or not all(part.strip() for part in (*parts[0], *parts[1])):
        return False
    if any(_is_dots(part) for part in (*parts[0], *parts[1])):
        return _is_same_members(*parts, is_ordered=True)
    first, second = parts
    return all(
        _is_same_expression(rf"\frac{{{term}}}{{{first[0]}}}", rf"\frac{{{other}}}{{{second[0]}}}")
        for term, other in zip(first[1:], second[1:], strict=True)
    )


def _compare_relations(left: str, right: str) -> bool | None:
    """``x = 5`` equals 5. Two names must be equal."""
    relations = [_assigned(text) for text in (left, right)]
    if relations[0][0] and relations[1][0]:
        if relations[0][0] == relations[1][0] and relations[0][1] == relations[1][1]:
            return is_same_value(relations[0][2], relations[1][2]) or None
        return None
    if relations[0][0] or relations[1][0]:
        index = 0 if relations[0][0] else 1
        other = (left, right)[1 - index]
        if not RELATION.search(other) or (
            relations[index][1] == r"\in" and RELATION.search(relations[index][2]) is None
        ):
            return is_same_value(relations[index][2], other)
    return None


def is_same_unit(left: str, right: str) -> bool:
    """Whether the units of two amounts agree: one has none, they are equal, or one is more precise ("red
    marbles", "dollars per pound"), but no product of the other with a further measure ("newton metres").
    """
    if not left or not right or left == right:
        return True
    fewer, more = sorted((set(left.split()), set(right.split())), key=len)
    if fewer == more and "/" not in more:  # a product in another order
        return True
    measures = {word for word in more if word.partition("^")[0] in MEASURES}
    is_product = fewer <= measures and bool(measures - fewer)
    return fewer < more and not is_product and ("/" not in more or bool(fewer & _CURRENCIES))


def _bare(text: str) -> str:
    """Remove blanks, and brackets around a single member."""
    text = text.strip().rstrip(".;").strip() if not text.strip().endswith(r"\.") else text.strip()
    if r"\approx" in text:  # the exact value, or that of a name
        first, *rest = split_top(text.replace(r"\approx", "\x00"), "\x00")
        text = rest[-1].strip() if rest and (not first.strip() or _NAME.fullmatch(first)) else first.strip()
    builder = _BUILDER.fullmatch(text)
    if builder is not None and RELATION.search(builder[2]):
        return builder[2]
    while text.startswith(("(", "{")):
        inner = _inside(text, text[0], {"(": ")", "{": "}"}[text[0]])
        if inner is None or len(split_top(inner, ",;")) > 1 or not inner.strip():
            break
        text = inner.strip()
    return text


def _inside(text: str, opening: str, closing: str) -> str | None:
    """The content of brackets around the whole text."""
    if not (text.startswith(opening) and text.endswith(closing)) or len(text) < len(opening) + len(closing):
        return None
    inner = text[len(opening) : len(text) - len(closing)]
    depth = 0
    for token in re.finditer(r"\\[A-Za-z]+|\\.|.", inner, re.DOTALL):
        depth += token[0] in ("(", "[", "{", r"\{", r"\langle")
        depth -= token[0] in (")", "]", "}", r"\}", r"\rangle")
        if depth < 0:
            return None
    return inner if depth == 0 else None


def _readings(text: str) -> list[_Parts]:
    """The possible interpretations of an answer; several only with a number like ``3,125``, which is one
    number or two (``3,025`` is one).
    """
    readings = _plain_readings(text)
    # In brackets, commas without a blank separate numbers only if no comma with one does.
    if not _THOUSANDS.fullmatch(text) and (_bracketed(text) is None or re.search(r"[,;]\s", text)):
        joined = _GROUPED.sub(lambda number: number[0].replace(",", ""), text)
        readings += _plain_readings(joined) if joined != text else []
    return readings


def _plain_readings(text: str) -> list[_Parts]:
    variants = _signed(text)
    if len(variants) > 1:
        return [_Parts("list", tuple(variants))]
    readings: list[_Parts] = []
    if _THOUSANDS.fullmatch(text):
        readings.append(_Parts("one", (text.replace(",", ""),)))
        if ",0" in text:
            return readings
    brackets = _bracketed(text)
    if brackets is not None:
        return [brackets]
    word, members = _listed(text)
    word = _AMBIGUOUS if readings else word
    return [*readings, _Parts("list", members, word=word) if len(members) > 1 else _Parts("one", (text,))]


def _bracketed(text: str) -> _Parts | None:
    half_open = re.fullmatch(r"([\[\]])([^\[\]()]+)([\[\]])", text)
    if half_open is not None and half_open[1] + half_open[3] in ("][", "]]", "[["):  # ]0,1[ is (0,1)
        members = _members(half_open[2])
        brackets = ("(" if half_open[1] == "]" else "[", ")" if half_open[3] == "[" else "]")
        return _Parts("bracketed", members, brackets) if len(members) == 2 else None
    for opening in _CLOSERS:
        for closing in _CLOSERS.values():
            is_pair = _CLOSERS[opening] == closing or {opening, closing} <= {"(", "[", ")", "]"}
            if is_pair and (inner := _inside(text, opening, closing)) is not None:
                members = _members(inner)
                if len(members) > 1 or opening in (r"\{", "["):
                    return _Parts("bracketed", members if inner.strip() else (), (opening, closing))
    return None


def _members(text: str) -> tuple[str, ...]:
    """The members in brackets: every comma separates, except in ``1,000``."""
    parts = split_top(text, ",;")
    joined = [parts[0]]
    for part in parts[1:]:
        if re.fullmatch(r"0\d\d(?:\.\d+)?\s*", part) and re.search(r"(?<![\d.])\d{1,3}\Z", joined[-1]):
            joined[-1] += part
        else:
            joined.append(part)
    return tuple(replaced for part in joined for replaced in _signed(part.strip()))


def _listed(text: str) -> tuple[str, tuple[str, ...]]:
    """The members of a bare list and the word between them. ``1,000, 2,000`` is two numbers."""
    words = set(re.findall(r"\\text\{ (and|or) \}", text))
    marked = re.sub(r"\\text\{ (?:and|or) \}", "\x00", text)
    separators = ",;\x00"
    if re.search(r"[,;\x00]\s|\x00", marked) or ";" in marked:
        masked = re.sub(r"(?<=\d),(?=\d{3}(?!\d))(?!\d{3}\.\d+,)", "\x01", marked)
    else:
        masked = marked
    parts = [part.replace("\x01", "") for part in split_top(masked, separators)]
    parts = [part.strip() for part in parts if part.strip()]
    return (words.pop() if len(words) == 1 else ","), tuple(
        signed for part in parts for signed in _signed(part)
    )


def _signed(text: str) -> list[str]:
    r"""Both values of an expression with ``\pm``; all combinations of several, unless ``\mp`` links them."""
    text = text.replace(r"\pm", "\x02").replace(r"\mp", "\x03")
    num_signs = text.count("\x02") + text.count("\x03")
    if num_signs == 0 or num_signs > _MAX_SIGNS:
        return [text.replace("\x02", r"\pm").replace("\x03", r"\mp")]
    if len(split_top(text, ",;")) > 1:
        return [text.replace("\x02", r"\pm").replace("\x03", r"\mp")]
    if "\x03" in text:
        return [text.replace("\x02", value).replace("\x03", other) for value, other in ("+-", "-+")]
    first, *rest = text.split("\x02")
    signed = [
        first + "".join(sign + part for sign, part in zip(signs, rest, strict=True))
        for signs in product("+-", repeat=num_signs)
    ]
    return [re.sub(r"(\A|[=(\[{,])\s*\+", r"\1", value) for value in signed]


def _assigned(text: str) -> tuple[str, str, str]:
    r"""Name, sign and value of ``x = 5``, ``x \in [0, 1]`` or a chain of equations; else empty texts."""
    parts = split_top(re.sub(r"\\in(?![A-Za-z])", "\x00", text), "=\x00")
    if len(parts) == 2 and "\x00" not in text and _NAME.fullmatch(parts[1]) and not _NAME.fullmatch(parts[0]):
        parts.reverse()  # 2x + 3 = y
    if (
        len(parts) < 2
        or not _NAME.fullmatch(parts[0])
        or re.search(r"[<>]|\\(?:le|ge|ne)(?![a-z])", text.partition("\\mathbb")[0].partition("|")[0])
    ):
        return "", "", ""
    sign = r"\in" if "\x00" in re.sub(r"\\in(?![A-Za-z])", "\x00", text) else "="
    return _packed(parts[0]), sign, parts[-1].strip()


def _as_condition(parts: _Parts) -> str | None:
    r"""Two bounds of one variable as one condition: for example, ``0 \le x \le 1`` for "x >= 0 and x <= 1",
    and a union of intervals for "or". None for anything else.
    """
    bounds = [_BOUND.fullmatch(member) for member in parts.members]
    if len(bounds) != 2 or parts.word not in ("and", "or", ","):
        return None
    names, limits = set(), {}
    for bound in bounds:
        if bound is None:
            return None
        left, sign, right = bound[1].strip(), bound[2], bound[3].strip()
        if _VARIABLE.fullmatch(right):
            left, sign, right = right, _MIRRORED[sign], left
        if not _VARIABLE.fullmatch(left):
            return None
        names.add(left)
        limits["<" if sign in ("<", r"\le") else ">"] = sign, right
    if len(names) != 1 or len(limits) != 2:
        return None
    (below, largest), (above, smallest) = limits["<"], limits[">"]
    if parts.word == "or":
        closing, opening = ("]" if below != "<" else ")"), ("[" if above != ">" else "(")
        return rf"(-\infty,{largest}{closing}\cup {opening}{smallest},\infty)"
    return f"{smallest} {_MIRRORED[above]} {names.pop()} {below} {largest}"


def _written(parts: _Parts) -> str:
    return parts.brackets[0] + ",".join(parts.members) + parts.brackets[1]


def _is_dots(text: str) -> bool:
    return text.strip() == _DOTS


def _packed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _based_value(based: re.Match[str]) -> int | None:
    """The value of digits in a base; None if they are invalid in it."""
    digits, base = based[1], int(based[2] or based[3])
    try:
        return int(digits, base) if 2 <= base <= 16 else None
    except ValueError:
        return None


# Units, boxes and words were handled before; anything removed here would be lost.
_NORMALIZATION: Final = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
# The parser ignores a part of these, or misinterprets them.
_UNREADABLE: Final = re.compile(
    r"(?<![_\d])\d+\s+\.?\d|\d\.\d+\.\d|\d_|\\ldots|\\approx|\\p?mod|\\overline\{\d|\\dot|\\bar\s*\{?\d|\\sim|\\equiv|\\ne\b.*="
)
# The parser drops the exponent T of a transposition, and evaluates it only for a written matrix.
_TRANSPOSED: Final = re.compile(
    r"(?<!matrix\})(?<!array\})(?<!(?:matrix|.array)\}[\])}])\^\s*(?:T|\{\s*T\s*\})"
)
_CLOSE: Final = 1e-6


def _is_same_expression(left: str, right: str) -> bool:
    if re.fullmatch(r"[A-Z]{2}", left.strip()) and re.fullmatch(r"[A-Z]{2}", right.strip()):
        return left.strip() == right.strip()  # HT and TH, or products of matrices
    if r"\plainlog" in left or r"\plainlog" in right:  # natural in Python, decimal in school
        return any(
            _is_same_expression(left.replace(r"\plainlog", name), right.replace(r"\plainlog", name))
            for name in (r"\ln", r"\log")
        )
    for text, other in ((left, right), (right, left)):
        # A power of letters that commute might cancel, as in (A^T A)^{-1} A^T b.
        if _TRANSPOSED.search(text) and "t" not in _letters(other).lower():
            return False
    is_cased = any(
        letter.swapcase() in text for text in (left, right) for letter in re.findall(r"[A-Z]", _letters(text))
    )
    is_complex = any(re.search(r"(?<![A-Za-z\\])i(?![A-Za-z])", _letters(text)) for text in (left, right))
    parsed = [_parse(text, is_cased, is_complex) for text in (left, right)]
    if parsed[0] is None or parsed[1] is None:
        return False
    if not _is_verified(parsed[0], parsed[1]) and not _is_verified(parsed[1], parsed[0]):
        return is_complex and _is_zero_difference(*parsed)
    return _is_close(*parsed)


def _letters(text: str) -> str:
    return re.sub(r"\\[A-Za-z]+", " ", text)


@lru_cache(maxsize=64)
def _parse(text: str, is_cased: bool, is_complex: bool) -> Any:
    """The whole text as an expression; None if the parser cannot parse all of it."""
    if _UNREADABLE.search(text):
        return None
    text = re.sub(r"('+)", lambda run: r"^{\prime" + " \\prime" * (len(run[1]) - 1) + "}", text)
    text = _TRANSPOSED.sub("^{{T}}", text)  # an ordinary power
    latex = normalize_latex(_ordered(text), _NORMALIZATION)
    config = ConversionConfig(lowercase_symbols=not is_cased)
    try:
        expression = latex2sympy(
            latex,
            is_real=not is_complex,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=config,
        )
    except Exception:  # the parser raises all kinds of exceptions
        return None
    if isinstance(expression, sympy.Basic):
        # dy/dx of plain symbols, which sympy would evaluate to 0
        derivatives = [
            item
            for item in expression.atoms(sympy.Derivative)
            if item.expr.is_Symbol and item.expr not in item.variables
        ]
        expression = expression.xreplace({item: sympy.Symbol(f"derivative {item}") for item in derivatives})
    return expression if isinstance(expression, (sympy.Basic, sympy.MatrixBase)) else None


def _ordered(text: str) -> str:
    """A chain of inequalities with the smallest part first."""
    parts = re.split(r"(<|>|\\le(?![a-z])|\\ge(?![a-z]))", text)
    if len(parts) < 5 or not all(sign in (">", r"\ge") for sign in parts[1::2]):
        return text
    return " ".join(_MIRRORED.get(part, part) for part in reversed(parts))


def _is_verified(gold: Any, answer: Any) -> bool:
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq):
        return _is_same_equation(gold, answer)
    equations = [
        equation
        for side in (gold, answer)
        for equation in (side.args if isinstance(side, sympy.And) else (side,))
        if isinstance(equation, sympy.Eq)
    ]
    if equations and _is_relation(gold) != _is_relation(answer) and not all(map(_states_value, equations)):
        return False
    return bool(verify(gold, answer, timeout_seconds=None))


def _is_relation(expression: Any) -> bool:
    return isinstance(expression, (sympy.Eq, sympy.And))


def _states_value(equation: sympy.Eq) -> bool:
    """Whether the right side is the value of the left one, as in ``m + n = 15``.

    If the left side contains a number or a power, the equation may describe a curve or be a step of the
    solution (``2x = 12``): its right side is no answer.
    """
    symbols = {symbol.name for symbol in equation.lhs.free_symbols}
    if not symbols:
        return not equation.rhs.free_symbols  # 2 + 3 = 5
    return _is_quantity(equation.lhs) or (symbols == {"i"} and _is_zero_difference(*equation.args))


def _is_quantity(expression: Any) -> bool:
    """Whether this is a name or a function, a product or quotient of these, or a sum of such products."""
    if expression.is_number:
        return bool(expression == -1)
    if isinstance(expression, sympy.Mul):
        factors = [
            factor.base if isinstance(factor, sympy.Pow) and factor.exp == -1 else factor
            for factor in expression.args
        ]
        return all(map(_is_quantity, factors))
    if isinstance(expression, sympy.Add):
        is_plain = not expression.has(sympy.Pow) and not any(term.is_number for term in expression.args)
        return is_plain and all(map(_is_quantity, expression.args))
    if isinstance(expression, sympy.Pow):  # the inverse of a function
        return expression.exp == -1 and isinstance(expression.base, AppliedUndef)
    return not isinstance(expression, sympy.exp)


def _is_same_equation(left: sympy.Eq, right: sympy.Eq) -> bool:
    """Whether one is a multiple of the other. Two equations are not equal because both have no solution."""
    if left == right or (left.lhs == right.rhs and left.rhs == right.lhs):
        return True
    if left.free_symbols != right.free_symbols or not left.free_symbols:
        return False
    try:
        differences = [sympy.sympify(equation.lhs - equation.rhs).doit() for equation in (left, right)]
        ratio = sympy.simplify(differences[0] / differences[1])
        if ratio.is_number:
            return bool(ratio.is_finite and not ratio.is_zero)
        solutions = [sympy.solve(equation, equation.free_symbols) for equation in (left, right)]
    except Exception:
        return False
    return bool(solutions[0]) and bool(solutions[1]) and bool(verify(left, right, timeout_seconds=None))


def _is_zero_difference(left: Any, right: Any) -> bool:
    """Whether the difference is 0 with ``i`` as the imaginary unit."""
    try:
        unit = {
            symbol: sympy.I for side in (left, right) for symbol in side.free_symbols if symbol.name == "i"
        }
        return bool(sympy.simplify((left - right).subs(unit).doit()).is_zero)
    except Exception:
        return False


def _is_close(left: Any, right: Any) -> bool:
    """The library compares a fixed number of decimals, with which all small numbers would be equal."""
    try:
        if (
            isinstance(left, (sympy.MatrixBase, sympy.Set, sympy.Tuple))
            or left.free_symbols
            or right.free_symbols
        ):
            return True
        values = [_number(side) for side in (left, right)]
    except Exception:
        return True
    size = max(map(abs, values))
    if size >= 1e-3 or size == 0:
        return True
    return abs(values[0] - values[1]) <= _CLOSE * size


def _number(expression: Any) -> complex:
    """The value; 0 for parts that cancel, for which the library evaluates no digit (``1 - 1`` is
    ``0.e-125``).
    """
    real, imaginary = (
        0.0 if getattr(part, "_prec", 53) == 1 else float(part) for part in sympy.N(expression).as_real_imag()
    )
    return complex(real, imaginary)
