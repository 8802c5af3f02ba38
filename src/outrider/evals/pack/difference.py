"""The first place where two trees of plain data differ, to within the rounding of another library."""

import math
from typing import Any, Final

from outrider.watch.run_directory import finite

_CLOSE: Final = 1e-9  # the same sums by another numpy


def first_difference(written: Any, computed: Any, path: str = "") -> str | None:
    """Where two trees differ, in words; None where they do not, to within the rounding of another library."""
    if isinstance(written, dict) and isinstance(computed, dict):
        if other := sorted(written.keys() ^ computed.keys()):
            return f"{path}.{other[0]} is in one of the two only"
        pairs = [(f"{path}.{key}" if path else key, written[key], computed[key]) for key in written]
    elif isinstance(written, list) and isinstance(computed, list):
        if len(written) != len(computed):
            return f"{path} has {len(written)} entries and not {len(computed)}"
        pairs = [
            (f"{path}[{number}]", *both) for number, both in enumerate(zip(written, computed, strict=True))
        ]
    else:
        same = written == computed and isinstance(written, bool) == isinstance(computed, bool)
        return (
            None
            if same or _is_close(written, computed)
            else f"{path} is {written!r}, and the results give {computed!r}"
        )
    return next(
        (
            difference
            for subpath, a, b in pairs
            if (difference := first_difference(a, b, subpath)) is not None
        ),
        None,
    )


def _is_close(written: Any, computed: Any) -> bool:
    first, second = finite(written), finite(computed)
    return (
        first is not None
        and second is not None
        and math.isclose(first, second, rel_tol=_CLOSE, abs_tol=_CLOSE)
    )
