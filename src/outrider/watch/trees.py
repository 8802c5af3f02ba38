"""Groups whose rollouts branched, as trees for the report: where they left, with which entropies, and what
every leaf got.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.errors import DataError
from outrider.types import Origin
from outrider.watch.run_directory import finite
from outrider.watch.traces import TraceReader, TraceRow, parse_metadata

NUM_TREES: Final = 3
_TEXT: Final = 90
_MAX_ROWS: Final = 600  # a larger group is left out: the page must stay small
_MAX_DEPTH: Final = 40  # forks behind each other; the page's template calls itself for each
_MOST_FORKS: Final = 10**6  # of one node; more is no count


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """One policy turn: its text, the mean entropy of its tokens (nats), and how many rollouts left in front
    of it.
    """

    text: str
    num_tokens: int
    entropy: float
    num_forks: int
    entropy_change: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Turns without a fork between them, then the branches that go on; ``leaf`` where a rollout ends here."""

    rollout: int
    turns: tuple[TreeNode, ...]
    leaf: TraceRow | None
    children: tuple["Branch", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """One group."""

    step: int
    task_key: str
    roots: tuple[Branch, ...]


def pick_trees(directory: Path, notes: list[str]) -> tuple[Tree, ...]:
    """The groups with most forks of the newest step that has any; empty for a run that never branched."""
    reader = TraceReader(directory)
    for step in reversed(reader.steps()):
        try:
            rows = reader.read(step)
        except DataError as error:
            notes.append(f"traces: {error}")
            continue
        groups: dict[str, list[TraceRow]] = {}
        for row in rows:
            groups.setdefault(row.trace_id, []).append(row)
        groups = {name: _drop_faulted(group) for name, group in groups.items()}
        branched = [
            (num, group) for group in groups.values() if (num := _num_forks(group)) and _fits(group, notes)
        ]
        if branched:
            branched.sort(key=lambda pair: -pair[0])
            return tuple(_tree(group) for _, group in branched[:NUM_TREES])
    return ()


def _drop_faulted(rows: Sequence[TraceRow]) -> list[TraceRow]:
    """Without what a fault left behind, which leads to no leaf."""
    parents = {row.node_id: row.parent_id for row in rows}
    retained: set[int] = set()
    for row in rows:
        node_id = row.node_id if row.outcome is not None else -1
        while node_id in parents and node_id not in retained:
            retained.add(node_id)
            node_id = parents[node_id]
    return [row for row in rows if row.node_id in retained]


def _num_forks(rows: Sequence[TraceRow]) -> int:
    return sum(_count(parse_metadata(row).get("num_forks")) for row in rows)


def _fits(rows: Sequence[TraceRow], notes: list[str]) -> bool:
    """Whether the group is a tree that the page can hold; a page nests as deeply as its branches do."""
    if len(rows) > _MAX_ROWS:
        return False
    children: dict[int, list[TraceRow]] = {}
    for row in rows:
        children.setdefault(row.parent_id, []).append(row)
    level, depth = [(row, 0) for row in children.get(-1, ())], 0
    if len({row.node_id for row in rows}) < len(rows):
        notes.append(f"traces: a group of {rows[0].task_key!r} is no tree and was left out")
        return False
    while level:  # every node has one parent, so this ends
        depth = max(depth, *(number for _, number in level))
        level = [
            (child, number + (len(node_children) > 1 or row.outcome is not None))
            for row, number in level
            for node_children in [children.get(row.node_id, [])]
            for child in node_children
        ]
    if depth > _MAX_DEPTH:
        notes.append(
            f"traces: a group of {rows[0].task_key!r} with {depth} forks behind each other was left out"
        )
    return depth <= _MAX_DEPTH


def _count(value: object) -> int:
    return int(number) if (number := finite(value)) is not None and 0 <= number < _MOST_FORKS else 0


def _tree(rows: Sequence[TraceRow]) -> Tree:
    children: dict[int, list[TraceRow]] = {}
    for row in rows:
        children.setdefault(row.parent_id, []).append(row)
    roots = tuple(branch for root in children.get(-1, ()) for branch in _branches(root, children))
    return Tree(step=rows[0].step, task_key=rows[0].task_key, roots=roots)


def _branches(row: TraceRow, children: dict[int, list[TraceRow]]) -> Iterator[Branch]:
    """One branch for every child of ``row``."""
    for child in children.get(row.node_id, ()):
        turns = [_turn(child)] if child.origin is Origin.POLICY else []
        tip = child
        while len(next_rows := children.get(tip.node_id, [])) == 1 and tip.outcome is None:
            tip = next_rows[0]
            turns += [_turn(tip)] if tip.origin is Origin.POLICY else []
        yield Branch(
            rollout=child.rollout,
            turns=tuple(turns),
            leaf=tip if tip.outcome is not None else None,
            children=tuple(_branches(tip, children)),
        )


def _turn(row: TraceRow) -> TreeNode:
    metadata = parse_metadata(row)
    text = " ".join(row.text.split())
    return TreeNode(
        text=text if len(text) <= _TEXT else text[:_TEXT] + " …",
        num_tokens=len(row.tokens),
        entropy=sum(row.entropies) / len(row.entropies) if row.entropies else 0.0,
        num_forks=_count(metadata.get("num_forks")),
        entropy_change=finite(metadata.get("entropy_change")),
    )
