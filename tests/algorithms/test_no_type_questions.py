"""Nobody outside of its own package asks whether an object is of a concrete algorithm, environment or engine
class.

What differs between them is a member that each of them has: an installed package could not add itself to a
list of classes.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "outrider"
PACKAGES = ("algorithms", "environments", "engines")
NO_KIND = ("Protocol", "StrEnum", "Exception")
# What a contract is written in may be asked for by everybody.
CONTRACTS = {"Algorithm", "ObjectiveSettings", "StepResult"}


def concrete() -> dict[str, Path]:
    """Class name to file, of all that a recipe may choose between; protocols are what everybody may ask
    for.
    """
    found = {}
    for package in PACKAGES:
        for path in (SOURCE / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not any(
                    getattr(base, "id", "") in NO_KIND for base in node.bases
                ):
                    found[node.name] = path
    return found


def questions(source: str) -> Iterator[str]:
    """The class names of every ``isinstance``, ``issubclass``, ``type(x) is`` and class pattern."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                yield from _names(kinds)
            case ast.Compare(left=ast.Call(func=ast.Name(id="type")), comparators=compared):
                yield from (name for one in compared for name in _names(one))
            case ast.MatchClass(cls=kind):
                yield from _names(kind)


def imported(source: str) -> set[str]:
    """Names that come from another module of the library."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom))
    return {
        one.asname or one.name
        for node in nodes
        if (node.module or "").startswith("outrider.")
        for one in node.names
    }


def _names(node: ast.expr) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Name | ast.Attribute):
            yield one.id if isinstance(one, ast.Name) else one.attr


def found_questions() -> dict[str, set[str]]:
    """File to the classes that it asks for and that live in another folder."""
    kinds = concrete()
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text()
        asked = imported(source) & set(questions(source)) - CONTRACTS
        asked = {name for name in asked if kinds.get(name, path).parent != path.parent}
        if asked:
            found[str(path.relative_to(SOURCE))] = asked
    return found


def test_nobody_asks_for_a_concrete_class_of_another_package() -> None:
    assert found_questions() == {}


def test_the_walk_sees_every_way_to_ask() -> None:
    ways = (
        "isinstance(x, Rapo)",
        "issubclass(kind, (int, algorithms.Rapo))",
        "isinstance(x, Grpo | Rapo)",
        "type(x) is Rapo",
        "type(x) in (Rapo, Grpo)",
        "match x:\n    case Rapo():\n        pass",
    )
    for way in ways:
        assert "Rapo" in set(questions(way)), way
    assert not set(questions("Rapo(x)")) and "Rapo" in concrete() and "Engine" not in concrete()
