r"""Normal form of mathematical answers before they are compared: one spelling for equal texts, and the unit
separately.

``math-verify`` parses LaTeX. Model answers and data sets also contain ``1e3``, ``x**2``, ``½``, ``10,\!080``,
``1 1/2``, ``18 dollars``, ``3\mathrm{i}``, ``0.\overline{3}`` or what SymPy prints: ``sqrt(3)/2``, ``oo``,
``Interval(0, 1)``.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Final

_HIDDEN: Final = "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\u2061\u2062\u2063\u2064\ufeff\ufe0e\ufe0f"
_SIGNS: Final = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\u2015\ufe63\uff0d", "-")
    | dict.fromkeys(_HIDDEN, None)
    | dict.fromkeys("\u2044\u2215\u29f8", "/")
    | dict.fromkeys("\u2018\u2019\u2032\u02bc", "'")
    | {"\u2217": "*", "\u22c6": "*", "\u2236": ":", "\u201c": '"', "\u201d": '"', "\u2033": "''"}
)
_LATEX_SIGNS: Final = {
    "\u00d7": r"\times ", "\u2a2f": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u2219": r"\cdot ",
    "\u2022": r"\cdot ", "\u00f7": r"\div ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2a7d": r"\le ",
    "\u2265": r"\ge ", "\u2a7e": r"\ge ", "\u2260": r"\ne ", "\u2248": r"\approx ", "\u00b1": r"\pm ",
    "\u2213": r"\mp ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u2209": r"\notin ",
    "\u2205": r"\emptyset ", "\u2216": r"\setminus ", "\u2026": r"\ldots ", "\u22ef": r"\ldots ",
    "\u00b0": r"^\circ ", "\u00ba": r"^\circ ", "\u2103": r"^\circ C", "\u2109": r"^\circ F",
    "\u211d": r"\mathbb{R}", "\u2124": r"\mathbb{Z}",
    "\u2115": r"\mathbb{N}",
    "\u211a": r"\mathbb{Q}", "\u2102": r"\mathbb{C}", "\u2220": r"\angle ", "\u25b3": r"\triangle ",
    "\u03c0": r"\pi ", "\u230a": r"\lfloor ", "\u230b": r"\rfloor ",
    "\u2308": r"\lceil ", "\u2309": r"\rceil ", "\u27e8": r"\langle ", "\u27e9": r"\rangle ",
    "\u2192": r"\to ", "\u21d2": r"\Rightarrow ",
}  # fmt: skip
_LATEX_SIGN: Final = re.compile(f"[{''.join(_LATEX_SIGNS)}]")
_SUPERSCRIPTS: Final = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿⁱ", "0123456789-+ni", strict=True))
_SUPERSCRIPT_RUN: Final = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_SUBSCRIPT_RUN: Final = re.compile("[₀-₉]+")
_VULGAR: Final = re.compile("[¼-¾⅐-⅞]")
_ROOTS: Final = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}

_FUNCTIONS: Final = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "arcsin", "arccos", "arctan",
    "arccot", "arcsec", "arccsc", "arsinh", "arcosh", "artanh", "ln", "log", "exp", "max", "min", "gcd",
    "lcm", "det", "lim", "sup", "inf", "arg",
})  # fmt: skip
_PYTHON_FUNCTIONS: Final = {
    **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
    **{f"a{name}": f"arc{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{f"arc{name}": f"arc{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    "asinh": "arsinh", "acosh": "arcosh", "atanh": "artanh", "ln": "ln", "Max": "max", "Min": "min",
    "max": "max", "min": "min",
}  # fmt: skip
_GREEK: Final = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|upsilon|phi|chi"
    "|psi|omega"
)
_UPRIGHT: Final = re.compile(
    r"\\(text(?:rm|it|bf|normal|sf|tt|up)?|math(?:rm|it|bf|sf|tt|normal)|[mh]box|operatorname\*?|boldsymbol|bm"
    r"|emph|textsc)\s*\{([^{}]*)\}"
)
# Behind a unit; behind the function sec is its argument.
_END_OF_UNIT: Final = re.compile(r"(?:\^\s*(?:\{-?\d\}|\d)\s*)?(?:[/.,$].*|\\cdot.*)?", re.DOTALL)
# \text{ cm^{2}} and \text{ ^\circ C}
_UPRIGHT_POWER: Final = re.compile(r"(\\(?:text|mathrm)\s*\{[^{}]*[A-Za-z])\s*\^\s*(\{-?[123]\})\s*\}")
_UPRIGHT_DEGREES: Final = re.compile(r"\\(?:text|mathrm)\s*\{\s*\^\\circ\s*([CFK])\s*\}")
_UNIT_FRACTION: Final = re.compile(
    r"\\[dt]?frac\s*\{\s*\\(?:text|mathrm)\{([^{}]*)\}\s*\}\s*\{\s*\\(?:text|mathrm)\{([^{}]*)\}(?:\^\{?[23]\}?)?\s*\}"
)
_BARE_FUNCTION: Final = re.compile(
    r"(?<![\\A-Za-z{])((?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log)(?![A-Za-z}])(?=\s*[\d(\\{A-Za-z^_])"
)
_FONT: Final = re.compile(r"\\(?:math(?:rm|it|bf|sf|tt|normal)|boldsymbol|bm)\s*\{")
_SINGLE_UNITS: Final = frozenset("mgshLl")


_POWERS_OF_TEN: Final = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_LARGE: Final = "|".join(_POWERS_OF_TEN)


def _matrix(brackets: str, rows: str) -> str:
    return rf"\begin{{{brackets}matrix}}{rows}\end{{{brackets}matrix}}"


_REWRITES: Final = (
    (re.compile(r"\\(?:displaystyle|textstyle|limits|nolimits|allowbreak|[hv]?phantom\{[^{}]*\})"), " "),
    (re.compile(r"\\[hv]space\*?\{[^{}]*\}"), " "),
    (re.compile(r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?=\s*(?:[\[\](){}|./<>]|\\[{}|a-z]))\s*\.?"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:leq?slant|leqq|leq)(?![A-Za-z])|<=|=<"), r"\\le "),
    (re.compile(r"\\(?:geq?slant|geqq|geq)(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\(?:neq|not\s*=)(?![A-Za-z])|!=|<>"), r"\\ne "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"==+"), "="),
    (re.compile(r"\\[lr]brack(?![A-Za-z])"), lambda match: "[" if match[0][1] == "l" else "]"),
    (re.compile(r"\\([lr])brace(?![A-Za-z])"), lambda match: r"\{" if match[1] == "l" else r"\}"),
    (re.compile(r"\\(?:[lr]?vert|mid)(?![A-Za-z])"), "|"),
    (re.compile(r"\\(?:ldots|cdots|dots[bcmio]?|hdots|dotsb|vdots|ddots)(?![A-Za-z])|\.\.\.+"), r"\\ldots "),
    (re.compile(r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\(?:land|wedge)(?![A-Za-z])"), r"\\text{ and }"),
    (re.compile(r"\\(?:lor|vee)(?![A-Za-z])"), r"\\text{ or }"),
    (re.compile(r"(?<![A-Za-z\\])([A-Za-z])\s+in\s+(?=[\[(\\])"), r"\1\\in "),
    (re.compile(r"(?<=[A-Za-z])_\s*\{(\w)\}(?!\w)"), r"_\1"),
    (re.compile(r"\\bigcup(?![A-Za-z])"), r"\\cup "),
    (re.compile(r"\\ast(?![A-Za-z])"), "*"),
    (re.compile(r"\\colon(?![A-Za-z])"), ":"),
    (re.compile(r"\\mathbb\s+([A-Z])"), r"\\mathbb{\1}"),
    (re.compile(r"\\degree(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"\^\s*\{\s*\\circ\s*\}"), r"^\\circ "),
    (re.compile(r"\^\s*\{?\s*\\prime\s*\}?"), "'"),
    (re.compile(r"\^\s*(?:\{\s*\\(?:top|intercal)\s*\}|\\(?:top|intercal)(?![A-Za-z]))"), "^{T}"),
    (re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:\{\s*,\s*\}|,\\!\s*|\\,)\d{3})+(?!\d|,\d{3}(?!\d))"),
     lambda match: re.sub(r"\D", "", match[0])),
    (re.compile(r"\{\s*,\s*\}|,\\!\s*"), ","),
    (re.compile(r"(?<=\d)\\[,;: ]\s?(?=\d{3}(?!\d))"), ","),
    (re.compile(r"(?<!\\)\\!"), ""),  # a lone ! is a factorial
    (re.compile(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])|\\(?:thinspace|enspace)(?![A-Za-z])"), " "),
    (re.compile(r"(?<![\d.,])(\d{1,3}(?: \d{3})+)(?![\d/]| \d)"), lambda match: match[1].replace(" ", "")),
    (re.compile(r"\\?%|(?<=\d)\s*(?:percent|pct)\b|\\text\s*\{\s*(?:percent|pct|percentage)\s*\}"), r"\\%"),
    (re.compile(r"(?<=[\])])\s*U\s*(?=[\[(])"), r"\\cup "),
    (re.compile(r"(?<![\\A-Za-z])(?:oo|inf|infty|infinity)(?![A-Za-z])"), r"\\infty "),
    (re.compile(rf"(?<![\\A-Za-z{{])({_GREEK})(?![A-Za-z])(?!\s*\()|(?<![\\A-Za-z{{])(pi)(?![A-Za-z])"),
     lambda match: f"\\{match[1] or match[2]} "),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\^\s*-\s*(\d+)"), r"^{-\1}"),
    (re.compile(r"(?<=\d)[eE](?=[+-]?\d)"), "E"),
    (re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)"), r"\\times "),
    (re.compile(r"(?<![A-Za-z\\\d])I(?![A-Za-z\d(])|(?<=\d)I(?![A-Za-z\d(])"), "i"),
    (re.compile(r"(?<=\*)\s*E(?![A-Za-z\d(])|(?<![A-Za-z\\\d])E(?=\s*(?:\^|\*))"), "e"),
    (re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<![\d.])(\d+)\s*\\text\{\s*and\s*\}\s*(\d+)\s*/\s*(\d+)(?![\d.])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\{[^{}]*\})\s*(\d)"), r"\\frac\1{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*(\{)"), r"\\frac{\1}\2"),
    (re.compile(r"\\([dt]?binom)\s*(\d)\s*(\d)"), r"\\\1{\2}{\3}"),
    (re.compile(r"\\sqrt\s*([A-Za-z\d])"), r"\\sqrt{\1}"),
    (re.compile(r"(?<=\d)_(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\[\s*(-\s*\\infty)"), r"(\1"),
    (re.compile(r"(\\infty)\s*\]"), r"\1)"),
    (re.compile(r"(?<![A-Za-z\\])Reals(?![A-Za-z])"), r"\\mathbb{R}"),
    (re.compile(r"\A\s*=\s*"), ""),
    (re.compile(
        rf"(?<=\d)(?:\s*(\\text\s*\{{)\s*|\s+)({_LARGE})(?![A-Za-z])(?(1)(?:\s*\}}|(\s+)))", re.IGNORECASE,
     ),
     lambda match: rf"\times 10^{{{_POWERS_OF_TEN[match[2].lower()]}}}" + (r"\text{ " if match[3] else "")),
    (re.compile(r"\\(?:hat|vec)(?![A-Za-z])\s*(\{)?\s*\\?([ijk])(?:math)?(?![A-Za-z])(?(1)\s*\})"), r" \2"),
    (re.compile(r"\A(-?[^-+]*\d)\s*(?:\\Omega|\u03a9)\s*\Z"), r"\1\\text{ ohm}"),  # an amount, no sum
    (re.compile(
        r"(?<!\\)(?:(\[)|(\()|\|)\s*\\begin\{(array|(?:small)?matrix)\}(?:(?<=array\})\s*\{[^{}]*\})?(.*?)"
        r"\\end\{\3\}\s*(?(1)\]|(?(2)\)|\|))",
        re.DOTALL,
     ), lambda match: _matrix("b" if match[1] else "p" if match[2] else "v", match[4])),
    (re.compile(r"\s+"), " "),
    (re.compile(r"(?<=\})\s+(?=[\])}^])|(?<=[\])])\s+(?=\^)"), ""),
)  # fmt: skip
_REPEATING: Final = re.compile(
    r"(?<![\d.])(\d*)\.(\d*)(?:\\(?:overline|bar|overset\{\.\}|dot)\s*\{\s*(\d+)\s*\}(?:(\d*)\\dot\s*\{\s*(\d)\s*\})?"
    r"|\\(?:bar|dot)\s+(\d)(?!\d)|\((\d+)\)(?=\s*\Z))"
)
_DOTTED_DECIMAL: Final = re.compile(r"(?<![\d.,])(\d+)\.(\d+)\s*\\ldots(?![A-Za-z])")
_AND_OR: Final = re.compile(
    r",?\s*\\text\s*\{\s*,?\s*(and|or)\s*\}|,?(?<![A-Za-z\\{])\s+(and|or)\s+(?![a-z]{2})"
)

_COIN: Final = {
    "$": "dollar",
    "\u00a2": "cent",
    "\u20ac": "euro",
    "\u00a3": "sterling",
    "\u00a5": "yen",
    "\u20b9": "rupee",
}
_BEFORE: Final = re.compile(r"\s*([-+]?)\s*\\?([$\u20ac\u00a3\u00a5\u20b9])\s*(?=[-+]?[\d.\\(])")
_BEHIND: Final = re.compile(r"(?<=[\d})])\s*\\?([$\u00a2\u20ac\u00a3\u00a5\u20b9])\s*\Z")
_DEGREES: Final = re.compile(
    r"(?<=[\d})a-z])\s*\^\s*\\circ\s*(?:\\text\{\s*)?([CFK]|(?i:celsius|fahrenheit|kelvin))?\s*\}?\Z"
)
_SCALES: Final = {"c": "celsius", "f": "fahrenheit", "k": "kelvin"}
_TEXT_UNIT: Final = re.compile(
    r"(?P<amount>.*?[\dA-Za-z)}\]!|])\s*(?P<rate>/?)\s*"
    r"(?P<text>(?:\s*\\text\s*\{[^{}]*\}(?:\s*\^\s*(?:\{-?[123]\}|[23]))?(?:\s*(?:/|\\cdot(?![A-Za-z])))?)+)\s*",
    re.DOTALL,
)
_TEXT_PART: Final = re.compile(r"\\text\s*\{([^{}]*)\}")
_BARE: Final = re.compile(
    r"(?P<amount>.*?[\d)}\]]|.*?\\pi|.*?\s[A-Za-z]|-?\d*[A-Za-z])(?:\s+|(?<=[\d})])(?=[A-Za-z]{3})"
    r"|(?<=\d)(?=(?:mm|cm|dm|km|kg|ft|yd|lb|oz|m[lL]|hr|lbs|hrs)(?:\s*\^\s*(?:\{[23]\}|[23]))?\Z))"
    r"(?P<words>[A-Za-z]+(?:(?:\s+|\s*[./]\s*|(?<=[a-z]{2})-(?=[a-z]{2}))[A-Za-z]+)*)\s*(?P<power>\^\s*(?:\{[23]\}|[23]))?",
    re.DOTALL,
)
# Only in upright type: elsewhere they are letters or products.
_SYMBOLS: Final = {
    "N": "newton", "mN": "millinewton", "MN": "meganewton", "GW": "gigawatt",
    "J": "joule", "V": "volt", "W": "watt", "K": "kelvin", "kJ": "kilojoule",
    "kN": "kilonewton", "kV": "kilovolt", "MJ": "megajoule", "MW": "megawatt", "mW": "milliwatt",
    "mV": "millivolt",
    "mA": "milliampere", "ms": "millisecond", "ns": "nanosecond", "nm": "nanometer", "eV": "electronvolt",
    "keV": "kiloelectronvolt", "MeV": "megaelectronvolt", "kPa": "kilopascal", "MPa": "megapascal",
    "kHz": "kilohertz", "MHz": "megahertz", "GHz": "gigahertz", "kWh": "kilowatt hour", "cal": "calorie",
    "kcal": "kilocalorie",
}  # fmt: skip
MEASURES: Final = frozenset(_SYMBOLS.values()) | frozenset(
    ("mm", "cm", "m", "km", "in", "ft", "g", "kg", "lb", "sec", "min", "hour", "ohm", "pa", "hz", "kw", "mol")
)
"""Units whose products are other units: a newton metre is no newton, while red marbles are marbles."""
_UNITS: Final = {name: name for name in _SYMBOLS.values()} | {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre", "cm centimeter centimetre", "dm decimeter decimetre", "m meter metre",
        "km kilometer kilometre", "in inch inche", "ft foot feet", "yd yard", "mi mile",
        "mg milligram", "g gram gm", "kg kilogram", "lb pound", "oz ounce", "ton tonne",
        "sec s second", "min minute", "hour h hr", "L l liter litre", "mL ml milliliter millilitre",
        "gal gallon", "dollar usd buck", "euro eur", "degree deg", "day", "week", "month", "year yr", "cent",
        "cup", "unit", "person people", "child children", "man men", "woman women", "mouse mice",
        "goose geese", "tooth teeth", "ox oxen", "die dice", "fish", "sheep", "deer", "shrimp", "cattle",
        "loaf loaves",
        "leaf leaves", "yen", "yuan rmb", "won", "rupee", "peso", "acre", "hectare", "newton", "joule",
        "watt",
        "volt", "ohm", "amp ampere", "mol mole",
        "hz Hz hertz", "pa Pa pascal", "kw kW kilowatt",
        "rpm", "bit", "byte", "point pt", "digit", "side", "way",
        "celsius", "fahrenheit", "kelvin",
    )
    for name in names.split()
}  # fmt: skip
_RATES: Final = {"mph": "mi / hour", "kmph": "km / hour", "kph": "km / hour", "kmh": "km / hour"}
_AROUND: Final = frozenset({"per", "square", "sq", "cubic", "cu", "squared", "cubed"})
_BEHIND_UNITS: Final = frozenset({
    "old", "tall", "long", "wide", "high", "deep", "thick", "away", "apart", "later", "ago", "left",
    "remaining",
    "altogether", "total", "each",
})  # fmt: skip
_NO_UNITS: Final = frozenset({
    "times", "plus", "minus", "hundreds", "thousands", "millions", "billions", "trillions", "dozens", "tens",
    "halves", "thirds", "fourths", "fifths", "sixths", "eighths", "tenths", "hundredths", "thousandths",
    "quarters", "hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "quarter",
    "third", "score",
    "or", "and", "more", "less", "least", "most", "than", "not", "no", "none", "pi", "over", "divided",
    "multiplied", "by", "to", "from", "between", "remainder", "mod", "modulo", "if", "where", "when", "for",
    "with", "without", "except", "choose", "factorial", "infinitely", "infinite", "twice", "double", "power",
    "powers", "negative", "positive", "percent", "is", "are", "yes", "base", "cos", "sin", "as", "does",
    "exists",
    "equals", "thus", "hence",
})  # fmt: skip


def normalize_spelling(text: str) -> str:
    """The text in one spelling of LaTeX: Unicode signs, upright letters, repeating decimals and output of
    Python become commands; thin spaces and one final full stop are removed; ``1e3`` becomes ``1E3``.
    """
    text = _VULGAR.sub(_fraction, text.translate(_SIGNS))
    text = _SUPERSCRIPT_RUN.sub(
        lambda run: "^{" + "".join(_SUPERSCRIPTS[sign] for sign in run.group()) + "}", text
    )
    text = _SUBSCRIPT_RUN.sub(lambda run: "_{" + unicodedata.normalize("NFKC", run.group()) + "}", text)
    text = _LATEX_SIGN.sub(lambda sign: _LATEX_SIGNS[sign.group()], text)
    text = unicodedata.normalize("NFKC", text).translate(_SIGNS)
    text = _UPRIGHT_DEGREES.sub(r"^\\circ \1", _UPRIGHT_POWER.sub(r"\1}^\2", text))
    text = _MODULE.sub("", _UNIT_FRACTION.sub(_unit_fraction, _unwrapped(text)))
    text = _upright(text)
    if text.startswith("[[") and text.endswith("]]"):
        text = f"Matrix({text})"
    text = _roots(text)
    text = _python_calls(text)
    text = _BARE_FUNCTION.sub(lambda match: "\\plainlog " if match[1] == "log" else f"\\{match[1]} ", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _AND_OR.sub(lambda match: rf"\text{{ {match[1] or match[2]} }}", text)
    text = _grouped_powers(text)
    text = _REPEATING.sub(_repeating, text)
    text = _DOTTED_DECIMAL.sub(_dotted_decimal, text)
    text = _degrees_to_radians(text).strip()
    return text[:-1].rstrip() if text.endswith((".", ",", ";")) and len(text) > 1 else text


def _fraction(match: re.Match[str]) -> str:
    above, below = unicodedata.normalize("NFKC", match.group()).split("\u2044")
    return rf"\frac{{{above}}}{{{below}}}"


def _unwrapped(text: str) -> str:
    """Remove dollars, brackets, boxes and Markdown around the whole text."""
    for _ in range(4):
        text = text.strip()
        inner = re.fullmatch(
            r"\$\$([^$]+)\$\$\.?|\$([^$]*[^$\\])\$\.?|\\\((.+)\\\)\.?|\\\[(.+)\\\]\.?|\*\*([^*]+)\*\*\.?|`([^`]+)`",
            text, re.DOTALL,
        )  # fmt: skip
        if inner is not None:
            text = next(group for group in inner.groups() if group is not None)
            continue
        boxed = re.match(r"\\(?:boxed|fbox)\s*\{", text)
        if boxed is not None and _closing(text, boxed.end() - 1) == len(text.rstrip(".")) - 1:
            text = text.rstrip(".")[boxed.end() : -1]
            continue
        if text.startswith("{") and _closing(text, 0) == len(text) - 1:
            inside = text[1:-1]
            if re.fullmatch(r"(?:\s*\w+\s*:[^:{}<>=]+(?:,|\Z))+", inside):  # {x: 1, y: 2}
                return inside.replace(":", "=")
            text = inside if "," not in inside else rf"\{{{inside}\}}"
            continue
        break
    return re.sub(r"(?<!\\)\$(?![\d.])|(?<=[A-Za-z})])(?<!\\)\$", "", text) if text.count("$") > 1 else text


def _unit_fraction(match: re.Match[str]) -> str:
    above, below = match[1].strip(), match[2].strip()
    return rf"\text{{{above}/{below}}}" if _is_unit(above) and _is_unit(below) else match[0]


def _upright(text: str) -> str:
    r"""Remove upright and bold type around letters, numbers and functions; words stay in ``\text{}``."""
    text = re.sub(r"\{\s*\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\mathrm{\1}", text)
    position = 0
    while (
        font := _FONT.search(text, position)
    ) is not None:  # around more than a word the font has no meaning
        end, position = _closing(text, font.end() - 1), font.end()
        if end is not None and "{" in text[position:end]:
            text = f"{text[: font.start()]}{text[position:end]}{text[end + 1 :]}"
            position = font.start()
    for _ in range(3):
        text, count = _UPRIGHT.subn(_replace_upright, text)
        if not count or (r"\{" in text and count > 50):
            break
    return text


def _replace_upright(match: re.Match[str]) -> str:
    text, inside = match.string, match[2]
    bare = inside.strip().rstrip(".")
    before, rest = text[: match.start()], text[match.end() :].lstrip()
    # behind a number, or joined with a unit
    is_quantity = re.search(
        r"(?:[\d})]|\\(?:text|mathrm)\s*\{[^{}]*\}\s*(?:/|\\cdot))\s*(?:\\[,;: ]|~|\s)*\Z", before
    ) is not None  # fmt: skip
    is_last = not rest or rest[0] in "^/.,$" or rest.startswith(r"\cdot")
    is_bold = match[1].startswith(("mathbf", "bold", "bm"))
    if bare in ("min", "sec") and is_quantity and _END_OF_UNIT.fullmatch(rest):
        return rf"\text{{{inside}}}"
    product = re.sub(r"\\cdot(?![A-Za-z])|\u00b7|\\[,;: ]|~", " ", inside)
    if product != inside and is_quantity and _unit(product, "", symbols=True):
        return rf"\text{{{product}}}"
    if bare in _FUNCTIONS:
        return f"\\{bare} "
    if len(bare) == 1 and bare.isalpha():
        is_apart = inside[:1].isspace() or before[-1:] in "~,;: /t"
        if (
            is_quantity
            and is_last
            and not is_bold
            and (bare in _SINGLE_UNITS or (bare in _SYMBOLS and is_apart))
        ):
            return rf"\text{{{inside}}}"
        return f" {bare} " if inside.strip() == bare else f" {bare}. "
    if re.fullmatch(r"[\s\d.,:/+*=()<>|-]*", inside) or re.fullmatch(r"\(?[A-Za-z]\)?[\s.:]*", inside):
        return inside
    if re.match(r"\s*[-+]?\s*(?:\\?\$\s*)?\d", inside):  # "5 cm", "2x"
        return f" {inside} "
    if "\\" in inside and not match[1].startswith(("text", "mbox", "hbox", "emph")):
        return inside
    return rf"\text{{{inside}}}"


def _roots(text: str) -> str:
    """Replace the root signs of Unicode, whose argument is a number, a letter or a group."""
    for sign, command in _ROOTS.items():
        while sign in text:
            head, _, tail = text.partition(sign)
            tail = tail.lstrip()
            end = _closing(tail, 0) if tail[:1] in ("(", "{") else None
            if end is not None:
                text = f"{head}{command}{{{tail[1:end]}}}{tail[end + 1 :]}"
                continue
            argument = re.match(r"\d+(?:\.\d+)?|\\[A-Za-z]+\s?|[A-Za-z]|", tail)
            assert argument is not None
            text = f"{head}{command}{{{argument[0]}}}{tail[argument.end() :]}"
    return text


_MODULE: Final = re.compile(r"(?<![A-Za-z\\])(?:np|numpy|math|cmath|sp|sympy|S)\.(?=[A-Za-z])")
_CALL: Final = re.compile(
    r"(?<![\\A-Za-z])(sqrt|cbrt|root|floor|ceil|ceiling|exp|log|abs|Abs|Rational|Fraction|Integer|Float|Matrix|ImmutableMatrix|array"
    r"|S|FiniteSet|binomial|comb|factorial|Interval(?:\.(?:open|Lopen|Ropen))?|Union|Eq|Tuple|set|"
    + "|".join(sorted(_PYTHON_FUNCTIONS, key=len, reverse=True))
    + r")\s*(?=[(\[{])"
)
_MAX_CALLS: Final = 40


def _python_calls(text: str) -> str:
    """Convert output of Python and SymPy, such as ``sqrt(3)/2`` or ``Matrix([[1], [2]])``, to LaTeX."""
    if "\\sqrt" in text or "sqrt" in text:
        text = re.sub(r"(?<![\\A-Za-z])sqrt\s*(\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z(]))", r"\\sqrt{\1}", text)
        text = re.sub(r"\\sqrt\s*\(", "sqrt(", text)
    position = 0
    for _ in range(_MAX_CALLS):
        match = _CALL.search(text, position)
        if match is None:
            return text
        end = _closing(text, match.end())
        if end is None:
            position = match.end()
            continue
        is_index = text[match.end()] == "["
        if is_index and match[1] == "sqrt":
            text = text[: match.start()] + "\\sqrt" + text[match.end() :]
            position = match.start() + 5
            continue
        arguments = [part.strip() for part in split_top(text[match.end() + 1 : end], ",")]
        replacement = None if is_index else _python_call(match[1], arguments)
        if replacement is None:
            position = match.end()
            continue
        text = text[: match.start()] + replacement + text[end + 1 :]
        position = match.start()
    return text


def _python_call(name: str, arguments: Sequence[str]) -> str | None:
    first = arguments[0]
    match name:
        case "sqrt":
            return rf"\sqrt{{{first}}}"
        case "cbrt":
            return rf"\sqrt[3]{{{first}}}"
        case "root" if len(arguments) == 2:
            return rf"\sqrt[{arguments[1]}]{{{first}}}"
        case "exp":
            return rf"e^{{{first}}}"
        case "log" if len(arguments) == 2:
            return rf"\log_{{{arguments[1]}}}({first})"
        case "log":
            return rf"\plainlog({first})"
        case "floor":
            return rf"\lfloor {first}\rfloor "
        case "ceil" | "ceiling":
            return rf"\lceil {first}\rceil "
        case "abs" | "Abs":
            return f"|{first}|"
        case "Rational" | "Fraction" if len(arguments) == 2:
            return rf"\frac{{{first}}}{{{arguments[1]}}}"
        case "Rational" | "Fraction" | "Integer" | "Float" | "set":
            return f"({first})" if "/" in first else first.strip("'\"")
        case "Matrix" | "ImmutableMatrix" | "array":
            rows = [split_top(row.strip()[1:-1], ",") for row in split_top(first.strip()[1:-1], ",")]
            if not all(row.strip().startswith("[") for row in split_top(first.strip()[1:-1], ",")):
                rows = [[entry] for entry in split_top(first.strip()[1:-1], ",")]
            return r"\begin{pmatrix}" + r"\\".join("&".join(row) for row in rows) + r"\end{pmatrix}"
        case "binomial" | "comb" if len(arguments) == 2:
            return rf"\binom{{{first}}}{{{arguments[1]}}}"
        case "factorial":
            return f"{first}!" if first.isalnum() else f"({first})!"
        case "S":
            return first if first.isdigit() else None
        case "FiniteSet":
            return rf"\{{{', '.join(arguments)}\}}"
        case "Tuple":
            return f"({', '.join(arguments)})"
        case "Union":
            return r"\cup ".join(arguments)
        case "Eq" if len(arguments) == 2:
            return f"{first} = {arguments[1]}"
        case _ if name.startswith("Interval") and len(arguments) in (2, 3, 4):
            is_open = [name.endswith((".open", ".Lopen")), name.endswith((".open", ".Ropen"))]
            is_open[0] |= first.replace(" ", "") == "-oo"
            is_open[1] |= arguments[1].strip() == "oo"
            for index, flag in enumerate(arguments[2:]):
                is_open[index] = flag in ("True", "1")
            return f"{'(' if is_open[0] else '['}{first},{arguments[1]}{')' if is_open[1] else ']'}"
        case _ if name in _PYTHON_FUNCTIONS:
            return rf"\{_PYTHON_FUNCTIONS[name]}({', '.join(arguments)})"
    return None


def _grouped_powers(text: str) -> str:
    """``2^(1/3)`` as ``2^{1/3}``."""
    position = 0
    while (index := text.find("^(", position)) >= 0 or (index := text.find("^ (", position)) >= 0:
        start = text.index("(", index)
        end = _closing(text, start)
        if end is None:
            return text
        text = f"{text[:index]}^{{{text[start + 1 : end]}}}{text[end + 1 :]}"
        position = index + 1
    return text


def _repeating(match: re.Match[str]) -> str:
    r"""``0.1\overline{6}`` as a fraction; the digits between two dots repeat."""
    whole, head, repeated, between, last, single, grouped = match.groups()
    period = (repeated or "") + (between or "") + (last or "") or single or grouped
    number = int(whole or "0") * 10 ** (len(head) + len(period)) + int(head + period or "0")
    less = int((whole or "0") + head or "0")
    above, below = number - less, (10 ** len(period) - 1) * 10 ** len(head)
    return rf"\frac{{{above}}}{{{below}}}"


def _dotted_decimal(match: re.Match[str]) -> str:
    r"""``0.333\ldots`` as a fraction if its digits repeat; else its digits."""
    whole, digits = match.groups()
    for length in range(1, len(digits) // 2 + 1):
        period = digits[-length:]
        head = digits
        while head.endswith(period):
            head = head[:-length]
        if len(digits) - len(head) >= max(2 * length, 3 if length == 1 else 4) and set(period) != {"0"}:
            above = int(whole + head + period) - int(whole + head)
            return rf"\frac{{{above}}}{{{(10**length - 1) * 10 ** len(head)}}}"
    return f"{whole}.{digits}"


def _degrees_to_radians(text: str) -> str:
    """Convert degrees in an expression, as in the sine of 30 degrees; after a number they are its unit."""
    if r"^\circ" not in text or not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])", text):
        return text
    return re.sub(
        r"(\d+(?:\.\d+)?|(?<!\\)\b[a-zA-Z]|\\(?:alpha|beta|gamma|theta|phi)\s?)\s*\^\\circ\s?",
        r"(\\frac{\1\\pi}{180})", text,
    )  # fmt: skip


_OPENERS: Final = {"(": ")", "[": "]", "{": "}"}


def _closing(text: str, start: int) -> int | None:
    """Position of the bracket that closes the one at ``start``; other kinds of brackets are ignored."""
    opening = text[start : start + 1]
    closing = _OPENERS.get(opening)
    depth = 0
    position = start
    while position < len(text):
        sign = text[position]
        if sign == "\\" and opening == "{":
            position += 2
            continue
        depth += (sign == opening) - (sign == closing)
        if depth == 0:
            return position
        position += 1
    return None


_TOKEN: Final = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+|\\.|.", re.DOTALL)


def split_top(text: str, separators: str) -> list[str]:
    """The parts between separators that are outside of brackets, braces and environments."""
    parts = [""]
    depth = position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        assert token is not None
        sign = token[0]
        position = token.end()
        if sign in ("(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil") or sign.startswith(r"\begin"):
            depth += 1
        elif sign in (")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil") or sign.startswith(r"\end"):
            depth -= 1
        if depth <= 0 and sign in separators:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def split_unit(text: str, *, symbols: bool = False) -> tuple[str, str]:
    r"""An amount and its unit: for example, ``("5", "m^2")`` for ``5 square meters``. ``(text, "")`` for
    anything else.

    An amount is a number or an expression, such as ``3\pi``. A unit is a known one, a currency, degrees or a
    plural ("apples"), but "2 pi", "5 million" and "5 or more" have none. Letters directly after a number are
    a unit if they are at least three, or two such as "cm": ``5m`` may be five times m. With ``symbols``,
    ``5 N`` and ``5 N*m`` have a unit, too, as in upright type.
    """
    text = text.strip()
    if (coin := _BEFORE.match(text)) is not None:
        amount, more = split_unit(text[coin.end() :])  # "$1.50 per pound"
        return coin[1] + amount, " ".join(dict.fromkeys((_COIN[coin[2]], *more.split())))
    if (coin := _BEHIND.search(text)) is not None:
        return text[: coin.start()].strip(), _COIN[coin[1]]
    if (degrees := _DEGREES.search(text)) is not None and not re.search(r"[,;=<>]", text):
        scale = f" {_SCALES[degrees[1][0].lower()]}" if degrees[1] else ""
        return text[: degrees.start()].strip(), f"degree{scale}"
    bare = text.removesuffix(".")
    match = _TEXT_UNIT.fullmatch(bare)
    if match is not None:
        units = re.sub(r"\\cdot(?![A-Za-z])", " ", match["rate"] + match["text"])
        words = re.sub(r"\^\s*\{?([23])\}?", r" ^\1 ", _TEXT_PART.sub(r" \1 ", units))
        words = re.sub(r"([A-Za-z]+)\s*\^\s*\{?-([123])\}?", lambda part: f" / {part[1]} ^{part[2]} ", words)
        words = words.replace("^1", " ")
        amount = match["amount"]
        power = re.search(r"\^([23])", words)
        words = re.sub(r"\^[23]", " ", words)
    else:
        if symbols:  # products of units
            bare = re.sub(r"(?<=[A-Za-z])\s*(?:\\cdot(?![A-Za-z])|\*)\s*(?=[A-Za-z])", " ", bare)
        match = _BARE.fullmatch(bare)
        if match is None:
            return text, ""
        amount, words, power = match["amount"], match["words"], re.search(r"[23]", match["power"] or "")
    unit = _unit(words, power[0][-1] if power else "", symbols=symbols or "text" in match.groupdict())
    return (amount.strip(), unit) if unit and _is_amount(amount) else (text, "")


def _is_amount(text: str) -> bool:
    """Whether this is a number or an expression without words."""
    bare = re.sub(r"\\(?:begin|end)\s*\{[A-Za-z]+\*?\}|\\[A-Za-z]+", " ", text)
    return (
        bool(text.strip()) and re.search(r"[A-Za-z]{3,}", bare) is None and not text.rstrip().endswith("\\")
    )


def _unit(text: str, exponent: str, *, symbols: bool = False) -> str:
    """The canonical name of a unit; empty if the words are no unit. ``symbols``: also ``N`` and ``kJ``."""
    if symbols:
        text = re.sub(r"[A-Za-z]+", lambda word: _SYMBOLS.get(word[0], word[0]), text)
    words = re.sub(r"(?<=[A-Za-z])\.|(?<=[a-z])-(?=[a-z])", " ", text).replace("/", " / ").split()
    if not words or not all(word == "/" or word.isalpha() for word in words):
        return ""
    if len(words) == 1 and words[0].lower() in _RATES:
        return _RATES[words[0].lower()]
    lowered = [word.lower() for word in words]
    if "of" in lowered[1:]:  # "pieces of candy"
        end = lowered.index("of")
        if any(word in _NO_UNITS for word in lowered[end + 1 :]):
            return ""
        words, lowered = words[:end], lowered[:end]
    if "in" in lowered[1:-1]:  # "hours in total"; a last one is an inch
        end = lowered.index("in", 1)
        words, lowered = words[:end], lowered[:end]
    if lowered[-1] in _BEHIND_UNITS and len(words) > 1:  # "years old"
        words, lowered = words[:-1], lowered[:-1]
    if any(word in _NO_UNITS for word in lowered):
        return ""
    if lowered[0] in ("square", "sq", "cubic", "cu"):
        exponent = "3" if lowered[0].startswith("cu") else "2"
        words, lowered = words[1:], lowered[1:]
    elif lowered[-1] in ("squared", "cubed"):
        exponent = "3" if lowered[-1] == "cubed" else "2"
        words, lowered = words[:-1], lowered[:-1]
    is_rate = any(word in ("per", "/", "a", "an", "each") for word in lowered[1:-1])
    if not words or not (_is_unit(words[-1]) or is_rate):
        return ""
    # Adjectives may precede a unit ("red marbles"), single letters may not ("a b cm").
    if any(len(word) < 3 and not _is_unit(word) and word != "/" for word in words[:-1]) and not is_rate:
        return ""
    return " ".join(map(_singular, words)) + (f"^{exponent}" if exponent else "")


def _is_unit(word: str) -> bool:
    if len(word) > 2 and word.lower().removesuffix("s") in _UNITS:
        return True
    is_plural = len(word) > 3 and word.isalpha() and word.endswith("s") and word.lower() not in _NO_UNITS
    return word in _UNITS or word.lower() in _UNITS or word.lower() in _AROUND or is_plural


def _singular(word: str) -> str:
    if word.lower() in ("per", "/", "a", "an"):
        return "/"
    word = _SYMBOLS.get(word, word)
    if word in _UNITS:
        return _UNITS[word]
    lowered = word.lower() if len(word) >= 3 else word
    return _UNITS.get(lowered) or _UNITS.get(lowered.removesuffix("s")) or lowered.removesuffix("s")
