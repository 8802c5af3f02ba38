"""Whether two expressions have one value, by ``math-verify``. Runs in a grading process only: nothing bounds
its time or memory.
"""

import re

from math_verify import parse, verify

_TUPLE = re.compile(r"(?:\\left)?\((.*?)(?:\\right)?\)", re.DOTALL)


def is_same_value(left: str, right: str) -> bool:
    """The comparison of math-verify depends on the side, ours does not. A tuple has an order: it is no set,
    and a bare list is read in its order.
    """
    pair = [left.strip(), right.strip()]
    is_tuple = [(match := _TUPLE.fullmatch(text)) is not None and "," in match.group(1) for text in pair]
    if is_tuple[0] != is_tuple[1]:
        other = is_tuple.index(False)
        if pair[other].startswith(("\\{", "\\left\\{")):
            return False
        if "," in pair[other] and not pair[other].startswith(("[", "\\left[")):
            pair[other] = f"({pair[other]})"
    parsed = [_parse(text) for text in pair]
    return bool(verify(parsed[1], parsed[0], timeout_seconds=None)) or bool(
        verify(parsed[0], parsed[1], timeout_seconds=None)
    )


def _parse(text: str) -> list[object]:
    return list(parse(f"${text.strip().strip('$')}$", parsing_timeout=None))
