"""Which groups act with tips, and which of those are trained without them (EMPO², arXiv 2602.23008, section
4.2).
"""

import math
from typing import Final, Literal

from outrider.rollout.modes import has_part
from outrider.seeding import stream

TipMode = Literal["plain", "tips_on", "tips_off"]
PLAIN: Final[TipMode] = "plain"
TIPS_ON: Final[TipMode] = "tips_on"
TIPS_OFF: Final[TipMode] = "tips_off"

MODES: Final[tuple[TipMode, ...]] = (PLAIN, TIPS_ON, TIPS_OFF)

_WINDOW: Final = 24  # groups whose modes are shuffled together


def tip_mode(mode: str) -> TipMode:
    """What a rollout's mode says about tips; plain where it says nothing."""
    return next((candidate for candidate in MODES if has_part(mode, candidate)), PLAIN)


def mode_of_draw(u: float, *, memory_probability: float, off_policy_probability: float) -> TipMode:
    """The mode for a uniform draw in [0, 1): below p q tips-off, below p tips-on, else plain."""
    if u < memory_probability * off_policy_probability:
        return TIPS_OFF
    return TIPS_ON if u < memory_probability else PLAIN


class ModeSchedule:
    """The mode of every group of a run, by its number: exact proportions, not their expectation.

    Of the first n groups, n a multiple of the window, p n act with tips and p q n of those are trained
    without, each rounded to the nearest whole number. The order inside a window is drawn from the run's seed.
    It is a function of the number: there is no state to save.
    """

    def __init__(self, *, memory_probability: float, off_policy_probability: float, seed: int) -> None:
        self._memory = memory_probability
        self._off_policy = off_policy_probability
        self._seed = seed

    def mode(self, group: int) -> TipMode:
        """The mode of group number ``group``, counted from 0 over the whole run."""
        window, position = divmod(group, _WINDOW)
        with_tips = self._num_with_tips(window)
        without = self._num_off(window)
        modes: list[TipMode] = (
            [TIPS_OFF] * without + [TIPS_ON] * (with_tips - without) + [PLAIN] * (_WINDOW - with_tips)
        )
        return modes[int(stream(self._seed, "tip modes", window).permutation(_WINDOW)[position])]

    def _num_with_tips(self, window: int) -> int:
        # A difference of rounded totals: rounding does not add up over windows.
        return _rounded((window + 1) * _WINDOW * self._memory) - _rounded(window * _WINDOW * self._memory)

    def _num_off(self, window: int) -> int:
        before, after = (_rounded(n * _WINDOW * self._memory) for n in (window, window + 1))
        return _rounded(after * self._off_policy) - _rounded(before * self._off_policy)


def _rounded(value: float) -> int:
    # Python's round takes halves to the even side, which would depend on the window.
    return math.floor(value + 0.5)
