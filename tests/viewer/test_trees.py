"""The tree of a branching group: every leaf once, forks where they were, nothing for a run that never
branched.
"""

import json
from pathlib import Path

from outrider.types import Origin, Outcome
from outrider.viewer.records import SCHEMA, StepFiles, TraceRow, step_file
from outrider.viewer.report_parts import Branch, pick_trees


def row(
    node: int, parent: int, rollout: int, origin: Origin, *, leaf: float | None = None, **metadata: float
) -> TraceRow:
    policy = origin is Origin.POLICY
    return TraceRow(
        step=1, task_key="t", trace_id="1/0", node_id=node, parent_id=parent, rollout=rollout, origin=origin,
        text=f"text {node}", tokens=("a", "b") if policy else (), logprobs=(-1.0, -1.0) if policy else (),
        entropies=(0.2, 0.4) if policy else (), outcome=None if leaf is None else Outcome.FINISHED,
        episode_return=leaf, advantage=leaf, hybrid=None if leaf is None else False,
        metadata=json.dumps(metadata),
    )  # fmt: skip


def written(folder: Path, rows: list[TraceRow]) -> Path:
    StepFiles(folder).write_rows(step_file(1), rows, SCHEMA)
    return folder


GROUP = [
    row(0, -1, 0, Origin.PROMPT),
    row(1, 0, 0, Origin.POLICY),
    row(2, 1, 0, Origin.ENVIRONMENT),
    row(3, 2, 0, Origin.POLICY, leaf=1.0, num_forks=1, entropy_change=0.25),
    row(4, 2, 1, Origin.POLICY),
    row(5, 4, 1, Origin.ENVIRONMENT),
    row(6, 5, 1, Origin.POLICY, leaf=0.0),
    row(7, 0, 2, Origin.POLICY, leaf=0.0),
]


def leaves(branch: Branch) -> list[int]:
    own = [branch.leaf.node_id] if branch.leaf else []
    return own + [leaf for child in branch.children for leaf in leaves(child)]


def test_the_tree_holds_every_leaf_once_and_the_fork_where_it_was(tmp_path: Path) -> None:
    notes: list[str] = []
    [tree] = pick_trees(written(tmp_path, GROUP), notes)
    first, second = tree.roots
    assert (first.rollout, second.rollout) == (0, 2) and not notes
    assert sorted(leaves(first) + leaves(second)) == [3, 6, 7]
    assert [turn.text for turn in first.turns] == ["text 1"] and first.leaf is None
    parent, child = first.children
    assert parent.turns[0].num_forks == 1 and parent.turns[0].entropy_change == 0.25
    assert parent.turns[0].num_tokens == 2 and abs(parent.turns[0].entropy - 0.3) < 1e-12
    assert child.rollout == 1 and [turn.text for turn in child.turns] == ["text 4", "text 6"]


def test_a_run_without_forks_or_traces_has_no_tree(tmp_path: Path) -> None:
    plain = [one for one in GROUP if one.node_id in (0, 7)]
    assert pick_trees(written(tmp_path / "a", plain), []) == ()
    assert pick_trees(tmp_path / "none", []) == ()
