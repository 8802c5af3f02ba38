"""Print identifiers of the source that use a word outside of the field's vocabulary, and the
reason why it stays: ``python -m benchmarks.names``.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).parents[1] / "src" / "outrider"
WORDS: Final = re.compile(
    r"told|tell|tells|said|says|say|asked|asks|ask|credit|credits|credited|whereabouts|"
    r"elsewhere|spread|ahead|beside|flight|owed|owe|played|foreign|acting|panel|keeper|sealed|"
    r"settle|discard|forget|found|given|kept|wanted|one|place|family"
)
REASONS: Final = {
    "ahead": "a key of recipes",
    "asks": "a key of recipes",
    "credit": "a field of trace nodes that files and checkpoints store by this name",
    "panel": "keys and hashes of files and recipes that keep their name",
    "discard": "a method of algorithms that plug-ins override",
    "family": "a family of models or of addresses",
    "flight": "a key of recipes; single flight is the name of the pattern",
    "kept": "a stored column or a key of recipes",
    "one": "part of a term (one line, leave one out)",
    "spread": "the spread of values in a group",
}


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Names that are bound: functions, classes, arguments, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words(name: str) -> set[str]:
    """The words of ``snake_case`` or ``CamelCase`` in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def main() -> None:
    """Print every word with the names that have it."""
    names_by_word: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in identifiers(ast.parse(path.read_text(encoding="utf-8"))):
            for word in words(name):
                if WORDS.fullmatch(word):
                    names_by_word[word][name] += 1
    for word, names in sorted(names_by_word.items()):
        listed = ", ".join(f"{name} ({number})" for name, number in names.most_common())
        print(f"{word}: {sum(names.values())}; {REASONS.get(word, 'no reason')}: {listed}")
    print(f"{sum(sum(names.values()) for names in names_by_word.values())} of the words in bound names")


if __name__ == "__main__":
    main()
