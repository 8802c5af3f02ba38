"""Trees that grow in rounds: a finished chain first, then expansions that leave it, or one another, in front
of any turn.

Where :mod:`outrider.rollout.branch` decides in the middle of an episode, a round is drawn once all rollouts
of its tree have ended (Tree-GRPO, arXiv 2509.21240). The points that they passed are kept until then, as the
same forks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.rollout.branch import Copies, Enqueue, Fork
from outrider.rollout.hooks import EpisodeState, Forgetful, Splice
from outrider.seeding import stream
from outrider.trace import Node, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion(Forgetful):
    """The shape of a group, as a hook that says it to the scheduler: ``num_trees`` M, ``num_expansions`` N in
    each of ``num_rounds`` L.

    ``num_trained_leaves`` K of the 1 + N L leaves of a tree are trained on. Rollouts are numbered tree by tree, the
    chain first.
    """

    num_trees: int
    num_expansions: int
    num_rounds: int
    num_trained_leaves: int

    @property
    def tree_size(self) -> int:
        """Leaves of a tree before pruning."""
        return 1 + self.num_expansions * self.num_rounds

    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        """Nothing to do."""
        return ()

    def after_turn(self, state: EpisodeState) -> None:
        """Nothing to do: the scheduler keeps the points."""

    def after_group(self, trace: Trace) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """In front of ``turn`` of a rollout; ``turn_node`` is the node of that turn."""

    fork: Fork
    turn_node: Node


class ExpansionScheduler:
    """Counts what has begun and ended in every tree, and keeps the points for expansions. Draws depend on the
    trees alone, not on who was fast.
    """

    def __init__(
        self, expansion: Expansion, *, run_seed: int, training_step: int, enqueue: Enqueue, copies: Copies
    ) -> None:
        """Every point of a tree is kept in ``copies`` until the tree is whole."""
        self._expansion = expansion
        self._enqueue = enqueue
        self._copies = copies
        self._key = (run_seed, training_step)
        self._points: dict[tuple[str, int], dict[int, _Point]] = {}
        self._num_finished: Counter[tuple[str, int]] = Counter()
        self.first: Sequence[int] = [tree * expansion.tree_size for tree in range(expansion.num_trees)]

    def on_turn_start(self, state: EpisodeState, *, is_known: bool) -> bool:
        """A later round may leave anywhere but in front of the first turn, where a fresh rollout does the
        same.
        """
        return not is_known and state.turn > 0

    def on_turn_end(self, state: EpisodeState, fork: Fork | None) -> None:
        """A rollout has written a turn, and ``fork`` is the point in front of it. A retry comes by again: its
        own points count.
        """
        if fork is None:
            return
        points = self._points.setdefault((state.task.key, state.rollout), {})
        self._drop_points(points, [turn for turn in points if turn >= state.turn])
        points[state.turn] = _Point(fork=fork, turn_node=state.last_node)
        self._copies.add(fork)

    def on_rollout_end(self, trace: Trace, rollout: int) -> None:
        """A rollout has its outcome: the expansions that are owed now begin at the prompt or at a fork."""
        shape, key = self._expansion, trace.task.key
        tree = rollout // shape.tree_size
        self._drop_failed_points(trace, rollout)
        self._num_finished[key, tree] += 1
        num_finished = self._num_finished[key, tree]
        if num_finished == shape.tree_size:
            trace.pruned |= self._pruned(key, tree)
            for number in range(tree * shape.tree_size, (tree + 1) * shape.tree_size):
                points = self._points.pop((key, number), {})
                self._drop_points(points, list(points))
            return
        # The chain, then N rollouts per round: 0 inside means that all that were drawn so far have ended.
        number, inside = divmod(num_finished - 1, shape.num_expansions)
        for expansion, fork in self._expand(key, tree, number) if inside == 0 else ():
            self._enqueue(trace, expansion, fork)

    def _drop_points(self, points: dict[int, _Point], turns: Sequence[int]) -> None:
        for turn in turns:
            self._copies.drop(points.pop(turn).fork)

    def _drop_failed_points(self, trace: Trace, rollout: int) -> None:
        """Forget the points of a try that failed, which the retry need not have passed: their turns are in no
        rollout.
        """
        points = self._points.get((trace.task.key, rollout), {})
        leaf = trace.leaves[rollout].node_id
        own = set() if leaf is None else {node.node_id for node in trace.path(leaf)}
        self._drop_points(
            points, [turn for turn, point in points.items() if point.turn_node.node_id not in own]
        )

    def _expand(self, key: str, tree: int, number: int) -> list[tuple[int, Fork | None]]:
        """Round ``number``: N nodes, uniformly and with replacement, among the root and the turns that
        another turn follows.
        """
        size = self._expansion.tree_size
        rollouts = range(tree * size, (tree + 1) * size)
        # By rollout and turn, not by arrival: a draw has to mean the same point in every run.
        points = [
            point for rollout in rollouts for _, point in sorted(self._points.get((key, rollout), {}).items())
        ]
        draws = self._stream("tree", key, tree, number).integers(
            1 + len(points), size=self._expansion.num_expansions
        )
        first = tree * size + 1 + number * self._expansion.num_expansions
        return [
            (first + i, None if draw == 0 else _mark_fork(points[draw - 1]))
            for i, draw in enumerate(int(value) for value in draws)
        ]

    def _pruned(self, key: str, tree: int) -> frozenset[int]:
        shape = self._expansion
        order = self._stream("tree leaves", key, tree).permutation(shape.tree_size)
        return frozenset(tree * shape.tree_size + int(leaf) for leaf in order[shape.num_trained_leaves :])

    def _stream(self, purpose: str, key: str, *numbers: int) -> np.random.Generator:
        run_seed, training_step = self._key
        return stream(run_seed, purpose, training_step, key, *numbers)


def _mark_fork(point: _Point) -> Fork:
    """The fork, with what the report shows on the turn in front of which it leaves."""
    metadata = point.turn_node.metadata
    num_forks = metadata.get("num_forks", 0) + 1
    metadata |= {
        "num_forks": num_forks,
        "num_forks_wanted": num_forks,
        "is_replayed": point.fork.environment is None,
    }
    return point.fork
