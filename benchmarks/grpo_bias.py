"""How far group advantages are from the true policy gradient, measured exactly on a tree small enough to
enumerate.

Run ``python benchmarks/grpo_bias.py``. Nothing is sampled: the expected gradient of each estimator is a sum
over all groups (as multisets) of two to four rollouts, and the true gradient a sum over all paths. The tree
has depth 3 and branching 3 with a tabular softmax policy; at some nodes the environment chooses, with fixed
probabilities and without gradient. For RAPO, those nodes represent retrieved steps, and the entropies around
them are those of the policy. In the ragged tree, the environment has all nodes below the first child and the
last ones below the second: rollouts have one, two or three trained steps.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.algorithms.advantages import (
    RolloutAdvantages,
    group_normalized_advantages_per_rollout,
    leave_one_out_advantages_per_rollout,
)
from outrider.algorithms.retrieval import combined_advantages_per_rollout, retrieval_reward_per_rollout

Float64Array: TypeAlias = NDArray[np.float64]
Credit: TypeAlias = Callable[[Sequence[int]], RolloutAdvantages]
Mean: TypeAlias = Literal["none", "rollout", "group"]

BRANCHING, DEPTH = 3, 3
NUM_NODES = 1 + BRANCHING + BRANCHING**2
ENVIRONMENT_NODES = (2, 6, 11)  # one in the middle of the paths, two just before the leaves
RAGGED_NODES = (1, 4, 5, 6, 7, 8, 9)  # all below the first child, and the nodes after the second


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeMdp:
    """A tabular tree. Shapes: P = 27 paths, S = 13 inner nodes, B = 3 children.

    ``logits`` [S, B]; ``path_nodes`` and ``path_actions`` [P, 3]; ``returns`` [P]. ``environment_nodes`` use
    their logits as fixed transition probabilities.
    """

    logits: Float64Array
    returns: Float64Array
    path_nodes: NDArray[np.int64]
    path_actions: NDArray[np.int64]
    environment_nodes: tuple[int, ...] = ENVIRONMENT_NODES

    @property
    def probabilities(self) -> Float64Array:
        """Action probabilities [S, B]."""
        weights = np.exp(self.logits - self.logits.max(axis=1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    @property
    def path_probabilities(self) -> Float64Array:
        """Probability of every path [P], the environment's choices included."""
        return np.asarray(self.probabilities[self.path_nodes, self.path_actions].prod(axis=1))

    @property
    def is_trainable(self) -> NDArray[np.bool_]:
        """Whether the policy chose at a step of a path [P, 3]."""
        return ~np.isin(self.path_nodes, self.environment_nodes)

    @property
    def scores(self) -> Float64Array:
        """``d log p(path) / d logits`` [P, S, B]; zero rows for the environment's nodes."""
        scores = np.zeros((self.returns.size, NUM_NODES, BRANCHING))
        for path, (nodes, actions) in enumerate(zip(self.path_nodes, self.path_actions, strict=True)):
            for node, action in zip(nodes, actions, strict=True):
                if node not in self.environment_nodes:
                    scores[path, node] = -self.probabilities[node]
                    scores[path, node, action] += 1.0
        return scores

    def policy_gradient(self) -> Float64Array:
        """The exact gradient of the expected return [S, B], summed over all paths."""
        return np.tensordot(self.path_probabilities * self.returns, self.scores, axes=1)

    def retrieval_rewards(self) -> Float64Array:
        """RAPO's Z_ret of every path [P], an environment node counting as a retrieved step."""
        entropies = -(self.probabilities * np.log(self.probabilities)).sum(axis=1)
        rewards = []
        for nodes in self.path_nodes:
            at = [step for step in range(DEPTH) if nodes[step] in self.environment_nodes]
            rewards.append(
                retrieval_reward_per_rollout(
                    entropies_before=[float(entropies[nodes[step - 1]]) for step in at],
                    entropies_after=[
                        float(entropies[nodes[step + 1]]) if step + 1 < DEPTH else None for step in at
                    ],
                ).value
            )
        return np.array(rewards)


def make_tree(
    *, seed: int, success_share: float | None = None, environment_nodes: tuple[int, ...] = ENVIRONMENT_NODES
) -> TreeMdp:
    """A random tree with normal logits; returns uniform in [0, 1), or 1 on about ``success_share`` of the
    paths and else 0.
    """
    generator = np.random.default_rng(seed)
    actions = np.array(list(itertools.product(range(BRANCHING), repeat=DEPTH)))
    nodes = np.stack(
        [np.zeros(len(actions), int), 1 + actions[:, 0], 4 + BRANCHING * actions[:, 0] + actions[:, 1]],
        axis=1,
    )
    logits = generator.normal(size=(NUM_NODES, BRANCHING))
    uniform = generator.random(len(actions))
    returns = uniform if success_share is None else (uniform < success_share).astype(np.float64)
    return TreeMdp(
        logits=logits,
        returns=returns,
        path_nodes=nodes,
        path_actions=actions,
        environment_nodes=environment_nodes,
    )


def expected_gradient(tree: TreeMdp, credit: Credit, *, group_size: int, mean: Mean = "none") -> Float64Array:
    """Return ``E[1/G sum_i A_i score_i]`` [S, B] over all groups of ``group_size`` independent paths.

    ``credit`` maps the path numbers of a group to advantages. ``mean`` "rollout" divides the score of each
    rollout by its number of trained steps (``sequence_mean_token_mean``); "group" divides the whole group by
    its number of trained steps instead of by G (``token_mean`` if the mini-batch is one group); with "none",
    steps are summed.
    """
    log_probabilities = np.log(tree.path_probabilities)
    num_steps = tree.is_trainable.sum(axis=1)
    weights = np.zeros(tree.returns.size)
    for group in itertools.combinations_with_replacement(range(tree.returns.size), group_size):
        num_orders = math.factorial(group_size)
        for path in set(group):
            num_orders //= math.factorial(group.count(path))
        probability = num_orders * math.exp(log_probabilities[list(group)].sum())
        divisor = num_steps[list(group)].sum() if mean == "group" else group_size
        np.add.at(weights, list(group), probability / divisor * credit(group).values)
    if mean == "rollout":
        weights = weights / num_steps
    return np.tensordot(weights, tree.scores, axes=1)


def leave_one_out(tree: TreeMdp) -> Credit:
    """RLOO credit of a group of paths."""
    return lambda group: leave_one_out_advantages_per_rollout(returns=tree.returns[list(group)])


def normalized(tree: TreeMdp, *, std_ddof: int = 1, normalize_std: bool = True) -> Credit:
    """GRPO credit of a group of paths; without ``normalize_std`` that of Dr. GRPO."""
    return lambda group: group_normalized_advantages_per_rollout(
        returns=tree.returns[list(group)], std_ddof=1 if std_ddof else 0, normalize_std=normalize_std
    )


def retrieval_shaped(tree: TreeMdp, *, weight: float = 0.2) -> Credit:
    """RAPO credit of a group of paths: GRPO times the retrieval factor."""
    retrieval, outcome = tree.retrieval_rewards(), normalized(tree)

    def credit(group: Sequence[int]) -> RolloutAdvantages:
        advantages, _ = combined_advantages_per_rollout(
            outcome=outcome(group), rewards=retrieval[list(group)], weight=weight
        )
        return advantages

    return credit


def deviation(estimate: Float64Array, truth: Float64Array) -> tuple[float, float, float]:
    """Cosine, relative deviation, and relative deviation after the best rescaling of the estimate."""
    cosine = float((estimate * truth).sum() / (np.linalg.norm(estimate) * np.linalg.norm(truth)))
    relative = float(np.linalg.norm(estimate - truth) / np.linalg.norm(truth))
    return cosine, relative, math.sqrt(max(0.0, 1.0 - cosine**2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """One row of the table: the credit, over which steps it is averaged, and whether it reads the
    environment's nodes as retrievals.
    """

    name: str
    credit: Callable[[TreeMdp], Credit]
    mean: Mean = "none"
    retrieves: bool = False


ESTIMATORS = (
    Estimator(name="leave-one-out", credit=leave_one_out),
    Estimator(name="leave-one-out, token mean", credit=leave_one_out, mean="group"),
    Estimator(name="leave-one-out, sequence mean", credit=leave_one_out, mean="rollout"),
    Estimator(name="Dr. GRPO", credit=lambda tree: normalized(tree, normalize_std=False)),
    Estimator(name="GRPO, token sum", credit=normalized),
    Estimator(name="GRPO, population std", credit=lambda tree: normalized(tree, std_ddof=0)),
    Estimator(name="GRPO, token mean", credit=normalized, mean="group"),
    Estimator(name="GRPO, sequence mean", credit=normalized, mean="rollout"),
    Estimator(name="RAPO a=0.2, token sum", credit=retrieval_shaped, retrieves=True),
)


def measure(trees: Sequence[TreeMdp], estimator: Estimator, *, group_size: int) -> tuple[float, float, float]:
    """:func:`deviation` of an estimator over tasks of equal weight, each with parameters of its own."""
    estimates = [
        expected_gradient(tree, estimator.credit(tree), group_size=group_size, mean=estimator.mean)
        for tree in trees
    ]
    return deviation(np.concatenate(estimates), np.concatenate([tree.policy_gradient() for tree in trees]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Exact bias of group credit on an enumerable tree.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[2, 3, 4])
    arguments = parser.parse_args()
    print(
        f"{'returns':8} {'G':>2} {'credit':28} {'cosine':>9} {'rel. deviation':>15} {'after rescaling':>16}"
    )
    binary = make_tree(seed=arguments.seed, success_share=0.25)
    settings = {
        "binary": [binary],
        "uniform": [make_tree(seed=arguments.seed)],
        "ragged": [make_tree(seed=arguments.seed, environment_nodes=RAGGED_NODES)],
        "2 tasks": [binary, make_tree(seed=arguments.seed + 1, success_share=0.05)],
    }
    for setting, trees in settings.items():
        for group_size in arguments.group_sizes:
            for estimator in (one for one in ESTIMATORS if not (one.retrieves and setting == "ragged")):
                cosine, relative, rescaled = measure(trees, estimator, group_size=group_size)
                print(
                    f"{setting:8} {group_size:2d} {estimator.name:28} {cosine:9.6f} "
                    f"{relative:15.6f} {rescaled:16.6f}"
                )


if __name__ == "__main__":
    main()
