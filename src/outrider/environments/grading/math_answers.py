"""Comparison of mathematical answers, as strings and by ``math-verify`` in processes of its own.

Expressions that clearly explode (power towers, high powers of groups, huge powers of ten, integrals,
factorials) are not evaluated, which saves the time until the limit; they are compared as strings, and
undecided if they differ. This is no protection: one short answer can keep a computer algebra system busy in
one call for years. The processes, which are killed at their limits, are.
"""

import contextlib
import functools
import json
import math
import os
import re
import select
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

from outrider.environments.grading.answers import exact_match, unwrap_text
from outrider.environments.grading.math_comparison import RELATION, is_same_unit
from outrider.environments.grading.math_normal_form import normalize_spelling, split_top, split_unit
from outrider.environments.grading.math_worker import ALIVE, STALL_SECONDS
from outrider.errors import EnvironmentFault
from outrider.tools.base import FairPool, SingleFlightCache, uncounted
from outrider.tools.python.tool import ONE_THREAD, SOURCE

_DROPPED: Final = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""),
    ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
)  # fmt: skip


def strings_equal(first: str | None, second: str | None) -> bool:
    r"""Equality after the rewriting of strings in MATH (arXiv 2103.03874), without evaluation: ``1/2`` equals
    ``\frac{1}{2}``, but 12 does not equal 12.0.

    Two missing texts are equal. If the rewriting fails for a text, the texts themselves are compared.
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
    r"""Add the missing braces of ``\frac12`` and ``\frac1{72}``; None for a command without operands."""
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


# Grading processes. One starts only if all others are busy.
_NUM_PROCESSES = max(2, min(8, (os.cpu_count() or 1) // 4))
_MAX_VERDICTS = 65_536
_CPU_SECONDS = 5  # of a pair; the slowest pair of the test vectors takes 0.3
_START_SECONDS = 300.0  # a cold disk
# The worker must come from the same source tree as this module, even if another one is installed.
_BOOT = """
import sys
sys.path.insert(0, sys.argv[2])
from outrider.environments.grading.math_worker import main
main(int(sys.argv[1]), int(sys.argv[3]))
"""


def math_pool() -> "MathPool":
    """The pool of this process, shared by all threads; a forked child gets its own."""
    return _process_pool(os.getpid())


@functools.cache
def _process_pool(_: int) -> "MathPool":
    return MathPool()


class MathPool:
    """Evaluates pairs of expressions, each with limits of time and memory (see ``math_worker``)."""

    def __init__(self, num_processes: int = _NUM_PROCESSES, cpu_seconds: int = _CPU_SECONDS) -> None:
        self._num_processes = num_processes
        self._workers = FairPool([_Worker(cpu_seconds) for _ in range(num_processes)])
        self._verdicts: SingleFlightCache[bool | None] = SingleFlightCache(_MAX_VERDICTS)

    def same_values(self, pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
        """For every pair, whether its values are equal; None if this cannot be decided within the limits.

        Equal pairs are evaluated once. Neither the wait nor the evaluation, which has limits of its own,
        counts in the time limit of an environment's call. Raises EnvironmentFault if a process cannot be
        started or is lost twice in a row.
        """
        return [self._verdicts.get(pair, functools.partial(self._evaluate, pair)) for pair in pairs]

    def _evaluate(self, pair: tuple[str, str]) -> bool | None:
        worker = self._workers.acquire()
        try:
            with uncounted():
                try:
                    return worker.evaluate(pair)
                except (OSError, ValueError):
                    return worker.evaluate(pair)
        except (OSError, ValueError) as error:
            raise EnvironmentFault(f"math grading: the process was lost twice: {error}") from error
        finally:
            self._workers.release(worker)

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        workers = [self._workers.acquire() for _ in range(self._num_processes)]
        for worker in workers:
            worker.stop()
            self._workers.release(worker)


class _Worker:
    """A grading process, started at the first call and after a loss. Not thread-safe."""

    def __init__(self, cpu_seconds: int) -> None:
        self._cpu_seconds = cpu_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def evaluate(self, pair: tuple[str, str]) -> bool | None:
        """Raises OSError or ValueError if the process is lost; it is then killed."""
        try:
            process = self._started()
            assert process.stdin is not None
            process.stdin.write(json.dumps([pair]).encode() + b"\n")
            process.stdin.flush()
            while (verdicts := _line(process, 2 * STALL_SECONDS)) == ALIVE:
                pass
        except BaseException:
            # Also if this thread was interrupted: a late answer must not become that of the next call.
            self.stop()
            raise
        verdict: bool | None = verdicts[0]
        return verdict

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(os.getpid()), SOURCE, str(self._cpu_seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | ONE_THREAD,
                start_new_session=True,  # Ctrl-C is for the trainer
            )
            _line(self._process, _START_SECONDS)
        return self._process

    def stop(self) -> None:
        """Kill the process; the kernel then kills its child."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):  # data that could not be sent
                        stream.close()
        self._process = None


def _line(process: "subprocess.Popen[bytes]", seconds: float) -> Any:
    """The next line of the process. Raises TimeoutError, or ValueError if the process has ended."""
    assert process.stdout is not None
    ready = select.poll()
    ready.register(process.stdout, select.POLLIN)
    if not ready.poll(1000 * seconds):
        raise TimeoutError(f"no answer within {seconds:g} s")
    return json.loads(process.stdout.readline())


MAX_CHARS = 200
_MAX_SPELLED = 1000  # characters; a longer answer is compared without normalisation
_MAX_EXPONENT = 1000
_MAX_GROUP_EXPONENT = 30
_MAX_TERMS = 2000  # of the expanded power of a group, by the number of symbols in it
_POWER = r"(?:\^|\*\*)\s*"
_NESTED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_EXPONENT = re.compile(_POWER + rf"({_NESTED}|\([^()]*\)|-?\d+(?:\.\d+)?|-?[A-Za-z]|\\[A-Za-z]+)")
_REFUSED = (
    re.compile(
        r"\d{4,}\s*!|[}\]!]\s*!|!\s*\)\s*!|\([^()A-Za-z]*\)\s*!|\\(?:i*int|oint|sum|prod|lim|choose)(?![A-Za-z])|\\[dt]?binom\{?[^{}]*\d{4}"
    ),
    re.compile(r"\d\.?\s*E\s*[+-]?\s*\d{4,}"),
    # Nested functions and towers of powers, with or without braces.
    re.compile(r"(?:\\(?:sin|cos|tan|exp|log|ln)(?![A-Za-z])[\s({]*){3}", re.DOTALL),
    re.compile(_EXPONENT.pattern + r"\s*(?:\^|\*\*)"),
)
# "Answer: 5", "\text{Area} = 5"
_LABEL = re.compile(
    r"(?:\\text\s*\{\s*[A-Za-z][A-Za-z ]*\}\s*[:=]|\\text\s*\{[A-Za-z\s]+[:=]\s*\}"
    r"|(?=[A-Za-z ]{0,28}[A-Za-z]{3})[A-Za-z][A-Za-z ]{2,30}[:=]"
    r"|(?:\\text\s*\{)?\s*(?:the )?(?:final )?answer is:?\s*\}?)\s*(?=\S)",
    re.IGNORECASE,
)
# "x = ", "v_{\text{avg}} = ", "\operatorname{Var}(X) = ", "\angle ABC = ", "[ABC] = ", "a:b = "
_SUBSCRIPT: Final = r"(?:_\s*(?:\{(?:[^{}=]|\\text\s*\{[^{}]*\})*\}|\\text\s*\{[^{}]*\}|\w))?"
_ARGUMENTS: Final = r"(?:\(\s*(?:[A-Za-z]|-?\d+)(?:\s*,\s*(?:[A-Za-z]|-?\d+))*\s*\))?"
_NAME: Final = re.compile(
    rf"(?:(?:[A-Za-z]|\\(?!text)[A-Za-z]+){_SUBSCRIPT}'*\s*{_ARGUMENTS}|[A-Z]\s*\^\s*(?:\{{\s*(?:-1|T)\s*\}}|T)"
    r"|[fghFGHPE](?:\([^()=<>]*\)|\[[^\[\]=<>]*\])"
    rf"|\\text\s*\{{[A-Za-z ]+\}}{_SUBSCRIPT}\s*(?:\([^()=<>]*\))?|(?:m\s*)?\\(?:angle|triangle)\s*[A-Z]+"
    r"|\[[A-Z]{3,}\]|[A-Za-z](?:\s*:\s*[A-Za-z])+)\s*"
)
_SIGN: Final = re.compile(r"[<>]|\\(?:le|ge|ne|approx|in|notin|subset|subseteq|equiv|sim)(?![A-Za-z])")
# A hyphen between two words is no operator.
_OPERATOR = re.compile(r"[+*/^_<>=]|(?<![A-Za-z]{2})-|-(?![A-Za-z]{2})")


class Verdict(StrEnum):
    """Result of a comparison. ``undecided``: the strings differ, and there is no value within the limits."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


_EVALUATED = {True: Verdict.EQUAL, False: Verdict.DIFFERENT, None: Verdict.UNDECIDED}


def compare_math(prediction: str, gold: str) -> Verdict:
    r"""Compare two LaTeX or plain expressions; for example, ``\frac{1}{2}`` equals ``0.5``.

    Two numbers with different units are different; if one of them has no unit, only the numbers are compared.
    Answers with a word are compared as text and sign by sign, because as products of letters "Paris" and
    "pairs" would be equal. An answer that is too slow to evaluate is undecided. Raises EnvironmentFault if
    the grading processes fail, and never because of an answer.
    """
    return compare_all(prediction, (gold,))[0]


def compare_all(prediction: str, golds: Sequence[str]) -> list[Verdict]:
    """:func:`compare_math` with each of several accepted answers."""
    results = [_compare_text(prediction, gold) for gold in golds]
    pairs = [result for result in results if isinstance(result, tuple)]
    same = iter(math_pool().same_values(pairs) if pairs else [])
    return [_EVALUATED[next(same)] if isinstance(result, tuple) else result for result in results]


def _compare_text(prediction: str, gold: str) -> Verdict | tuple[str, str]:
    """The verdict if the texts determine it; else the pair to evaluate."""
    if not prediction.strip() or not gold.strip():
        return Verdict.DIFFERENT
    predicted, expected = (
        normalize_spelling(text) if len(text) <= _MAX_SPELLED else text.strip() for text in (prediction, gold)
    )
    if _is_same_text(predicted, expected):
        return Verdict.EQUAL
    labels = [_LABEL.match(text) for text in (predicted, expected)]
    if labels[0] and not labels[1]:
        predicted = predicted[labels[0].end() :]
    elif labels[1] and not labels[0]:
        expected = expected[labels[1].end() :]
    values = [_assigned_value(text) for text in (predicted, expected)]
    if values[0] and not values[1] and not RELATION.search(expected):
        predicted = values[0]
    elif values[1] and not values[0] and not RELATION.search(predicted):
        expected = values[1]
    (predicted, its_unit), (expected, unit) = (
        split_unit(text) if len(text) <= _MAX_SPELLED else (text, "") for text in (predicted, expected)
    )
    if unit and not its_unit:
        predicted, its_unit = _with_short_unit(predicted, unit)
    elif its_unit and not unit:
        expected, unit = _with_short_unit(expected, its_unit)
    is_other_unit = (its_unit and expected.endswith(r"\%")) or (unit and predicted.endswith(r"\%"))
    if is_other_unit or not is_same_unit(its_unit, unit):
        return Verdict.DIFFERENT
    if _is_same_text(predicted, expected):
        return Verdict.EQUAL
    words = [sorted(_words(text)) for text in (predicted, expected)]
    if any(words) and _is_same_wording(predicted, expected):
        return Verdict.EQUAL
    if words[0] != words[1]:
        return Verdict.DIFFERENT
    return (predicted, expected) if _is_safe(predicted) and _is_safe(expected) else Verdict.UNDECIDED


def _assigned_value(text: str) -> str:
    """The value of a name, before its words are compared and its size is checked; empty for anything else."""
    if len(text) > _MAX_SPELLED:
        return ""
    name, *values = split_top(text, "=")
    if not values or _NAME.fullmatch(name.strip()) is None or _SIGN.search(text):
        return ""
    is_list = len(values) > 1 and (len(split_top(text, ",;")) > 1 or r"\text{ " in text)
    return "" if is_list else values[-1].strip()


def _with_short_unit(text: str, unit: str) -> tuple[str, str]:
    """``5m`` as ``("5", "m")`` if ``m`` is the unit of the other answer, and ``5 N`` as an amount; else
    ``(text, "")``.
    """
    amount = text.removesuffix(unit)
    is_unit = unit in ("m", "g") and amount != text and amount[-1:].isdigit()
    if is_unit or len(text) > _MAX_SPELLED:
        return (amount, unit) if is_unit else (text, "")
    return split_unit(text, symbols=True)


def _is_same_text(left: str, right: str) -> bool:
    """Equality up to blanks, except for one between two digits."""
    if "".join(left.split()) == "".join(right.split()) and not re.search(r"\d\s+\d", left + " | " + right):
        return True
    return " ".join(left.split()) == " ".join(right.split())


def _is_same_wording(left: str, right: str) -> bool:
    bare = [unwrap_text(text) for text in (left, right)]
    return _OPERATOR.findall(bare[0]) == _OPERATOR.findall(bare[1]) and exact_match(bare[0], (bare[1],))


def _words(text: str) -> list[str]:
    """The words of at least three letters that are neither a command nor the name of an environment."""
    bare = re.sub(r"\\(?:begin|end)\s*\{[A-Za-z]+\*?\}|\\text\{ (?:and|or) \}", " ", text)
    return re.findall(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", " ", bare))


def _is_safe(text: str) -> bool:
    if len(text) > MAX_CHARS or any(pattern.search(text) for pattern in _REFUSED):
        return False
    exponents = _EXPONENT.findall(text)
    towers = [exponent for exponent in exponents if "^" in exponent]
    if text.count("^") != len(exponents) + sum(exponent.count("^") for exponent in towers):
        return False
    # An exponent that is a power itself, such as that of e^{-x^2}, must contain a letter; else it may be
    # huge.
    for exponent in towers:
        bare = re.sub(r"\\(?:frac|cdot|times|pi)(?![A-Za-z])", " ", exponent)
        is_large = any(len(digits) > 1 for digits in re.findall(r"\d+", exponent))
        if is_large or re.search(r"[A-Za-z]", bare) is None:
            return False
    sizes = [
        max((int(digits[:6]) for digits in re.findall(r"\d+", exponent)), default=1) for exponent in exponents
    ]
    product = math.prod(max(size, 1) for size in sizes)
    is_group_power = re.search(r"[)}\]]\s*(?:\^|\*\*)", text) is not None
    if not is_group_power:
        is_small = "=" not in text and max(sizes, default=1) <= _MAX_GROUP_EXPONENT  # a sum of small powers
        return is_small or product <= (_MAX_GROUP_EXPONENT if "=" in text else _MAX_EXPONENT)
    num_symbols = len(set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", text))))
    return product <= _MAX_GROUP_EXPONENT and math.comb(product + num_symbols, num_symbols) <= _MAX_TERMS
