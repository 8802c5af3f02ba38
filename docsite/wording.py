"""Prints how often some words occur in README and the documents, per 10,000 words.

python -m docsite.wording

Code blocks, tables that are generated from records, and the generated page of metrics are left out.
"""

import re
import sys
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[1]
_GENERATED: Final = {"metrics.md", "models.md"}
_LEFT_OUT: Final = re.compile(
    r"^```.*?^```$|<!-- figures: .*?<!-- /figures -->|^(?: {4}|\t).*?$|`[^`\n]*`", re.MULTILINE | re.DOTALL
)
PATTERNS: Final = {
    "for example": r"\bfor example\b",
    "you, your": r"\byour?\b",
    "headless what/who/where": r"(?:^|[.:;|] )\s*(?:What|Whoever|Where) [^?\n]*?\b(?:is|was|are|it)\b",
    "told, tells, said, asked": r"\b(?:told|tells?|said|asks?|asked)\b",
}  # fmt: skip


def text_of(root: Path = _ROOT) -> str:
    """Return the prose of README and of all pages that are written by hand."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return "\n".join(
        _LEFT_OUT.sub(" ", page.read_text(encoding="utf-8"))
        for page in pages
        if page.name not in _GENERATED and "settings" not in page.parts
    )


def counts(text: str) -> dict[str, float]:
    """Return the number of matches per 10,000 words, by pattern."""
    num_words = len(re.findall(r"\b\w+\b", text))
    flags = re.IGNORECASE | re.MULTILINE
    return {
        name: 1e4 * len(re.findall(pattern, text, flags)) / num_words for name, pattern in PATTERNS.items()
    }


if __name__ == "__main__":
    prose = text_of()
    sys.stdout.write(f"{len(re.findall(r'[^ ]+', prose))} words of prose\n")
    for label, rate in counts(prose).items():
        sys.stdout.write(f"{rate:6.1f} {label}\n")
