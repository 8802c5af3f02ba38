"""Names of the shapes that ``benchmarks.gpu`` measures; without torch, which may be missing."""

from typing import Final

KNOWN: Final = {
    "demo": "smollm2-135m-instruct",
    "1.5B": "Qwen/Qwen2.5-1.5B-Instruct",
    "7B": "Qwen/Qwen2.5-7B-Instruct",
}
"""By what ``outrider plan`` calls them."""
TINY: Final = "tiny"
SHAPES: Final = (*KNOWN, TINY)
