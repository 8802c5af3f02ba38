"""The C library's memory: one arena for all threads of a process."""

import contextlib
import ctypes
import os
import sys
from typing import Final

_ARENA_MAX: Final = -8  # M_ARENA_MAX of glibc's malloc.h


def share_one_arena() -> None:
    """Have all threads allocate from one arena, unless ``MALLOC_ARENA_MAX`` is set.

    glibc gives threads arenas of their own, up to eight a core, and each keeps what its threads have needed.
    Every call of an environment is a thread of its own, so a run would fill one arena after another
    (docs/portability.md has both ways measured). Another C library is left as it is.
    """
    if sys.platform != "linux" or "MALLOC_ARENA_MAX" in os.environ:
        return
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)
