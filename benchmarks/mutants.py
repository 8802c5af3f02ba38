"""The mutants of a source file: mutmut's operators over the whole file, one change a mutant.

mutmut's own runner changes undecorated functions only. Here constants, class bodies, defaults and decorated
functions are changed as well. Left out by rule, because no test could or should tell the difference:
annotations, decorators, docstrings, type aliases, the texts of errors (everything in a ``raise``),
``strict=`` of ``zip`` (an assertion), and upper or lower case of SQL.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

_SQL = re.compile(r"^[\"'](select|insert|update|delete|pragma|create|begin)\b", re.IGNORECASE)
_SKIPPED = (cst.Annotation, cst.Decorator, cst.Raise, cst.Import, cst.ImportFrom)
_TYPES = m.Subscript(value=m.Name("Literal") | m.Name("tuple") | m.Name("Callable"))
_STRICT = m.Arg(keyword=m.Name("strict"))


@dataclass(frozen=True, eq=False)
class Mutant:
    """One change of one file.

    ``function`` is the outermost function around it, None in a class body, a default or a module.
    ``lines`` are those of the changed statement: a test that runs none of them cannot notice.
    """

    file: Path
    module: cst.Module
    node: cst.CSTNode
    changed: cst.CSTNode
    operator: str
    function: str | None
    lines: range

    @cached_property
    def source(self) -> str:
        """The whole file with the change."""
        tree = self.module.deep_replace(self.node, self.changed)
        return tree.code if isinstance(tree, cst.Module) else ""

    @cached_property
    def difference(self) -> tuple[str, str]:
        """The lines that differ, before and after, without their indentation."""
        old, new = self.module.code.splitlines(), self.source.splitlines()
        begin = _num_equal(old, new)
        end = min(_num_equal(old[::-1], new[::-1]), min(len(old), len(new)) - begin)
        before, after = old[begin : len(old) - end], new[begin : len(new) - end]
        return " ".join(line.strip() for line in before), " ".join(line.strip() for line in after)

    @cached_property
    def key(self) -> str:
        """Of this change in this version of the file."""
        text = (self.file.name, self.function, self.operator, self.lines.start, self.difference)
        return hashlib.sha256(repr(text).encode()).hexdigest()[:16]


class _Collector(cst.CSTVisitor):
    def __init__(self, file: Path, module: cst.Module, positions: dict[cst.CSTNode, CodeRange]) -> None:
        super().__init__()
        self.file, self.module, self.positions = file, module, positions
        self.found: list[Mutant] = []
        self._stack: list[cst.CSTNode] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, _SKIPPED) or m.matches(node, _TYPES | _STRICT):
            return False
        if self._is_type_alias(node) or _is_docstring(node):
            return False
        self._stack.append(node)
        for kind, operator in mutation_operators:
            name = operator.__name__.removeprefix("operator_")
            changes = operator(node) if isinstance(node, kind) else ()
            self.found += [self._mutant(node, new, name) for new in changes if not _is_left_out(node, new)]
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if self._stack and self._stack[-1] is original_node:
            self._stack.pop()

    def _mutant(self, node: cst.CSTNode, changed: cst.CSTNode, operator: str) -> Mutant:
        return Mutant(self.file, self.module, node, changed, operator, self._function(), self._lines())

    def _is_type_alias(self, node: cst.CSTNode) -> bool:
        if m.matches(node, m.AnnAssign(annotation=m.Annotation(m.Name("TypeAlias")))):
            return True
        return m.matches(node, m.Assign(value=_TYPES | m.Call(func=m.Name("TypeVar"))))

    def _function(self) -> str | None:
        names: list[str] = []
        for outer, inner in zip(self._stack, [*self._stack[1:], None], strict=True):
            if isinstance(outer, cst.ClassDef):
                names.append(outer.name.value)
            if isinstance(outer, cst.FunctionDef):
                return ".".join([*names, outer.name.value]) if inner is outer.body else None
        return None

    def _lines(self) -> range:
        """Of the innermost statement; of a compound one, from its first line to the change."""
        last = self.positions.get(self._stack[-1])
        for node in reversed(self._stack):
            last = last or self.positions.get(node)
            if isinstance(node, cst.SimpleStatementLine):
                where = self.positions[node]
                return range(where.start.line, where.end.line + 1)
            if isinstance(node, cst.BaseCompoundStatement) and last is not None:
                return range(self.positions[node].start.line, last.end.line + 1)
        return range(last.start.line, last.end.line + 1) if last is not None else range(0)


def mutants_of(file: Path) -> list[Mutant]:
    """All of a file, in its order; the same on every call."""
    module = cst.parse_module(file.read_text())
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    collector = _Collector(file, module, dict(wrapper.resolve(PositionProvider)))
    module.visit(collector)
    return collector.found


def _num_equal(one: Sequence[str], other: Sequence[str]) -> int:
    """Lines at the beginning that are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))


def _is_docstring(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Expr) and isinstance(node.value, cst.SimpleString | cst.ConcatenatedString)


def _is_left_out(node: cst.CSTNode, changed: cst.CSTNode) -> bool:
    if isinstance(node, cst.SimpleString) and isinstance(changed, cst.SimpleString):
        return bool(_SQL.match(node.value)) and changed.value.lower() == node.value.lower()
    if isinstance(node, cst.Call) and isinstance(changed, cst.Call) and m.matches(node.func, m.Name("zip")):
        strict = [arg for arg in node.args if m.matches(arg, _STRICT)]
        return any(all(arg is not kept for kept in changed.args) for arg in strict)
    return False
