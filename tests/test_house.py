"""The house rules that can be measured (CONTRIBUTING.md): short files, short functions, words for what is
public.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

import outrider

SOURCE = Path(outrider.__file__).parent
MODULES = [path for path in sorted(SOURCE.rglob("*.py")) if path.stat().st_size]
LONGEST_FILE, MEDIAN_FILE, LONGEST_FUNCTION = 400, 120, 50
SHARE_WITH_WORDS = 0.99

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def long_functions(tree: ast.AST) -> list[str]:
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
    ]


def public(node: ast.AST) -> Iterator[ast.ClassDef | Function]:
    """Classes, functions and methods whose name, and that of all around them, has no underscore in front."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | Function) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public(child)


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


def test_files_are_short() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert len(lengths) > 250
    assert {name: num for name, num in lengths.items() if num > LONGEST_FILE} == {}
    assert median(lengths.values()) <= MEDIAN_FILE


def test_functions_are_short(trees: dict[str, ast.Module]) -> None:
    found = {f"{name}: {function}" for name, tree in trees.items() for function in long_functions(tree)}
    assert found == set()


def test_what_is_public_has_words(trees: dict[str, ast.Module]) -> None:
    things = {name: [tree, *public(tree)] for name, tree in trees.items()}
    without = [
        f"{name}: {getattr(thing, 'name', 'the module')}"
        for name, members in things.items()
        for thing in members
        if ast.get_docstring(thing) is None
    ]
    num = sum(map(len, things.values()))
    assert num > 1500 and len(without) <= (1 - SHARE_WITH_WORDS) * num, without


def test_the_measures_find_what_is_too_long() -> None:
    """Decorators are not counted, the last line is."""
    body = "\n".join(["    pass"] * LONGEST_FUNCTION)
    shorter = body.removesuffix("\n    pass")
    assert long_functions(ast.parse(f"@a\n@b\ndef one():\n{body}")) == ["one"]
    assert long_functions(ast.parse(f"@a\n@b\nasync def one():\n{shorter}")) == []
    tree = ast.parse("class A:\n  def b(self): ...\n  def _c(self): ...\nclass _D:\n  def e(self): ...")
    assert [one.name for one in public(tree)] == ["A", "b"]
