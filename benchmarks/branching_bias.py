"""How far ARPO's credit is from the true policy gradient, measured exactly on trees small enough to
enumerate.

Run ``python benchmarks/branching_bias.py``. Nothing is sampled: a rollout writes two turns of one of three
actions, a tool result between them, and the expected estimate is a sum over all groups. Decisions are those
of :mod:`outrider.algorithms.entropy_branching`, in the order of the rollouts' numbers; credit is
leave-one-out with soft attribution, where a shared token has every leaf's advantage.

Shapes: A = 3 actions; a gradient is [1 + A, A], the logits of the first turn and of the second after each
first one.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.algorithms.advantages import leave_one_out_advantages_per_rollout
from outrider.algorithms.entropy_branching import branch_probability, branches, segment_entropy

Float64Array: TypeAlias = NDArray[np.float64]
Rule: TypeAlias = Callable[[float], float]  # change of entropy -> probability of a fork

ACTIONS: Final = 3
RULES: Final[Mapping[str, Rule]] = {
    "coin (w = 0)": lambda change: branch_probability(change=change, base=0.5, weight=0.0),
    "Bernoulli (default)": lambda change: branch_probability(change=change, base=0.5, weight=0.2),
    "threshold": lambda change: float(
        branches(0.5, change=change, base=0.5, weight=0.2, decision="threshold")
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tree:
    """``first`` [A] and ``second`` [A, A] are action probabilities, ``returns`` [A, A] the returns of the
    paths.
    """

    first: Float64Array
    second: Float64Array
    returns: Float64Array

    def exact_gradient(self) -> Float64Array:
        """Of the expected return in the logits."""
        values = (self.second * self.returns).sum(axis=1)
        top = self.first * (values - self.first @ values)
        below = self.first[:, None] * self.second * (self.returns - values[:, None])
        return np.vstack([top, below])

    def change(self, action: int) -> float:
        """Return the entropy of the second turn minus that of the first turn, normalised as in the hook."""
        after, before = (
            segment_entropy([float(-(p * np.log(p)).sum())], vocabulary_size=ACTIONS)
            for p in (self.second[action], self.first)
        )
        return after - before

    def score(self, path: tuple[int, int]) -> Float64Array:
        """``d log p(path) / d logits``."""
        score = np.zeros((1 + ACTIONS, ACTIONS))
        score[0] = np.eye(ACTIONS)[path[0]] - self.first
        score[1 + path[0]] = np.eye(ACTIONS)[path[1]] - self.second[path[0]]
        return score


def make_tree(seed: int) -> Tree:
    """Uniform over the simplex, normal returns."""
    draw = np.random.Generator(np.random.PCG64(seed))
    first, second = draw.dirichlet(np.ones(ACTIONS)), draw.dirichlet(np.ones(ACTIONS), size=ACTIONS)
    return Tree(first=first, second=second, returns=draw.normal(size=(ACTIONS, ACTIONS)))


def shapes(
    tree: Tree, tops: Sequence[int], rule: Rule, *, leaves: int, num_children: int
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield the first actions of all leaves with their probability: forks of ``tops`` in order, then new
    rollouts.
    """
    tries = [top for top in tops for _ in range(num_children)]
    forks = [rule(tree.change(top)) for top in tries]
    for wanted in product((False, True), repeat=len(tries)):
        chance = math.prod(p if does else 1.0 - p for p, does in zip(forks, wanted, strict=True))
        left = [top for top, does in zip(tries, wanted, strict=True) if does][: leaves - len(tops)]
        num_fresh = leaves - len(tops) - len(left)
        for fresh in product(range(ACTIONS), repeat=num_fresh) if chance else ():
            yield chance * float(np.prod(tree.first[list(fresh)])), (*tops, *left, *fresh)


def expected_gradient(
    tree: Tree, rule: Rule, *, leaves: int, first_wave: int, num_children: int = 1
) -> Float64Array:
    """``E[1/M sum_i A_i score_i]`` over all groups of ``leaves`` M, ``first_wave`` N of them from the
    prompt.
    """
    total = np.zeros((1 + ACTIONS, ACTIONS))
    scores = {path: tree.score(path) for path in product(range(ACTIONS), repeat=2)}
    for tops in product(range(ACTIONS), repeat=first_wave):
        begun = float(np.prod(tree.first[list(tops)]))
        for chance, firsts in shapes(tree, tops, rule, leaves=leaves, num_children=num_children):
            for seconds in product(range(ACTIONS), repeat=leaves):
                paths = list(zip(firsts, seconds, strict=True))
                weight = begun * chance * math.prod(float(tree.second[path]) for path in paths) / leaves
                advantages = leave_one_out_advantages_per_rollout(
                    returns=[float(tree.returns[path]) for path in paths]
                )
                for path, advantage in zip(paths, advantages.values, strict=True):
                    total += weight * float(advantage) * scores[path]
    return total


def cosine(estimate: Float64Array, truth: Float64Array) -> float:
    """Of the angle between two gradients."""
    return float((estimate * truth).sum() / (np.linalg.norm(estimate) * np.linalg.norm(truth)))


def lowest_cosines(rule: Rule, *, num_trees: int, leaves: int, first_wave: int) -> tuple[float, float, float]:
    """Return the lowest cosines over random trees: first turn, second turns and the whole vector."""
    found = []
    for tree in map(make_tree, range(num_trees)):
        estimate, truth = (
            expected_gradient(tree, rule, leaves=leaves, first_wave=first_wave),
            tree.exact_gradient(),
        )
        found.append(
            (cosine(estimate[0], truth[0]), cosine(estimate[1:], truth[1:]), cosine(estimate, truth))
        )
    # three columns
    return tuple(min(column) for column in zip(*found, strict=True))  # type: ignore[return-value]


def one_first_turn(*, num_trees: int) -> tuple[float, float]:
    """Return the largest entries of the gradient of the first turn if three leaves share it: expected and
    exact.
    """
    trees = [make_tree(seed) for seed in range(num_trees)]
    found = [
        expected_gradient(tree, lambda change: 1.0, leaves=3, first_wave=1, num_children=2)[0]
        for tree in trees
    ]
    exact = [tree.exact_gradient()[0] for tree in trees]
    return float(np.abs(found).max()), float(np.abs(exact).max())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Exact bias of ARPO's credit on enumerable trees.")
    parser.add_argument("--trees", type=int, default=60)
    arguments = parser.parse_args()
    print(
        f"lowest cosine to the exact gradient, {arguments.trees} random trees, "
        "M = 3, N = 2, soft, leave-one-out"
    )
    print(f"{'rule':20} {'first turn':>11} {'second turn':>12} {'whole vector':>13}")
    for name, rule in RULES.items():
        first, second, whole = lowest_cosines(rule, num_trees=arguments.trees, leaves=3, first_wave=2)
        print(f"{name:20} {first:11.4f} {second:12.4f} {whole:13.4f}")
    found, exact = one_first_turn(num_trees=arguments.trees)
    print("N = 1, both forks leave it: largest entry of the first turn's gradient, over the same trees")
    print(f"expected {found:.4f}, exact {exact:.4f}")


if __name__ == "__main__":
    main()
