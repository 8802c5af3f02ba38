"""The trace: a tree of nodes for one task, in which every root-to-leaf path is a rollout.

A node stores only the tokens that it adds. Token ids are only appended; text is never tokenized twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

from outrider.types import CallRecord, Message, Origin, Outcome, Task


@dataclass(frozen=True, slots=True)
class Share:
    """One rollout's share of a node: its credit per token and the scale of its importance ratio."""

    credit: tuple[float, ...]
    ratio_scale: float = 1.0

    def scaled(self, factors: Sequence[float]) -> "Share":
        """Multiply the advantages by a factor per token."""
        return Share(
            tuple(value * factor for value, factor in zip(self.credit, factors, strict=True)),
            self.ratio_scale,
        )


DESCRIBED_TOOLS: Final = "described_tools"
"""Key of a prompt node's metadata: names of tools that are described in its ids, but not in its message."""
BODY: Final = "body"
"""Key of an environment node's metadata: ``[start, end)`` positions of the tokens of the environment's text,
without those of the chat template. Written only if the update trains on these tokens (``observation_nll``).
"""

NUM_NEW: Final = "num_new"
"""Key of an environment node's metadata, if its ids restart the context: the number of ids that the context
did not have before.
"""
REBUILT: Final = "rebuilt"
"""Key of an environment node's metadata: its ids are a whole prompt, built anew for this turn. The message is
the observation in it. The rollout's budget of tokens starts again behind it.
"""


@dataclass(slots=True, kw_only=True)
class Node:
    """One piece of the conversation.

    ``logprobs`` and ``entropies`` have one value per token on policy nodes (natural log; nats over the whole
    vocabulary, or lower bounds if ``entropies_are_bounds``) and are empty on others. ``credit`` are the
    advantages per token, None until an algorithm assigns them: unassigned is not zero. On a node shared by
    several rollouts, ``shares`` has the advantages of each leaf (soft attribution), or ``owner`` is the
    rollout that counts the node, whose ``credit`` applies to all of its leaves (hard attribution). ``kl`` is
    log policy - log reference per token on policy nodes, if the algorithm subtracts a KL from the reward.
    ``ratio_scale`` multiplies the importance ratio of the node's tokens (RAPO Eq. 8). ``restarts``: a new
    context starts here (the conversation was rendered again); earlier nodes are in no later context.
    ``tool_calls`` are the calls whose results the node contains, or those of a turn that ended the episode.
    ``metadata`` is plain data for metrics and the viewer, for example the similarity of a retrieved step.
    """

    node_id: int
    parent: int | None
    origin: Origin
    token_ids: tuple[int, ...]
    message: Message
    logprobs: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    entropies_are_bounds: bool = False
    weight_version: int | None = None
    reward: float = 0.0
    kl: tuple[float, ...] = ()
    credit: tuple[float, ...] | None = None
    ratio_scale: float = 1.0
    shares: dict[int, Share] | None = None
    owner: int | None = None
    restarts: bool = False
    tool_calls: tuple[CallRecord, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def trainable(self) -> bool:
        """Whether the policy wrote these tokens."""
        return self.origin is Origin.POLICY

    @property
    def is_prompt(self) -> bool:
        """Whether the tokens are a prompt: that of an episode, or one that was built anew for a turn."""
        return self.origin is Origin.PROMPT or REBUILT in self.metadata

    @property
    def num_response_tokens(self) -> int:
        """Number of tokens that belong to the rollout's response: none of a prompt, and none that a context
        rendered anew repeats.
        """
        return 0 if self.is_prompt else int(self.metadata.get(NUM_NEW, len(self.token_ids)))

    @property
    def receives_advantages(self) -> bool:
        """Whether an update may train on these tokens: those of the policy or of a demonstrator."""
        return self.origin is Origin.POLICY or self.origin is Origin.DEMONSTRATION

    @property
    def is_observation(self) -> bool:
        """Whether the text describes the environment's state: observations, and retrieved steps that were
        executed.

        Tips and retrieved steps that were only shown describe another state.
        """
        if self.trainable or self.origin is Origin.MEMORY or not self.message.content:
            return False
        return self.origin is not Origin.BUFFER or "num_tool_calls" in self.metadata

    @property
    def body_positions(self) -> frozenset[int]:
        """Positions of the tokens of the environment's text, if they were recorded (:data:`BODY`)."""
        if self.origin is not Origin.ENVIRONMENT:
            return frozenset()
        return frozenset(at for start, end in self.metadata.get(BODY, ()) for at in range(start, end))

    @property
    def mean_entropy(self) -> float:
        """Step entropy: mean over the generated tokens, in nats (RAPO Eq. 2)."""
        return sum(self.entropies) / len(self.entropies)


@dataclass(slots=True, kw_only=True)
class Leaf:
    """The end of one rollout.

    ``episode_return`` and ``node_id`` are None after an infrastructure fault; partial nodes stay in the tree,
    but belong only to rollouts that had branched off. ``detail`` is the fault, or why a finished rollout has
    no reflection. ``advantage`` is assigned by the algorithm.
    ``reflection`` is the policy's answer to a hook about the episode; it is in no node and never trained on.
    ``intrinsic`` is a reward of the algorithm, separate from the return. ``is_demonstration``: a demonstrator
    acted. ``grade`` explains the return: columns of the rollout's record.
    """

    node_id: int | None
    rollout: int
    outcome: Outcome
    episode_return: float | None
    success: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    advantage: float | None = None
    reflection: str = ""
    num_reflection_tokens: int = 0
    intrinsic: float = 0.0
    is_demonstration: bool = False
    grade: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Insertion:
    """Help that only the teacher of self-distillation reads: no rollout was sampled with it.

    It stands in front of token ``offset`` of the node ``node_id``, a message that the policy did not write
    (for a user message: before the tokens that the template writes after the text). ``source`` is the kind of
    help, for example ``sibling``.
    """

    node_id: int
    offset: int
    token_ids: tuple[int, ...]
    text: str
    source: str


class Trace:
    """All rollouts of one task in one training step (one group).

    ``modes`` has the mode of every rollout. ``without_memory``: the update renders the rollouts without their
    memory nodes (EMPO²'s off-policy update). ``is_replayed``: an earlier policy generated the group
    (RolloutReplay). ``pruned`` rollouts get no advantages and are not trained on (Tree-GRPO). ``help`` has
    by rollout what the teacher of self-distillation reads in addition.
    """

    def __init__(self, *, task: Task, modes: Sequence[str] = ()) -> None:
        self.task = task
        self.modes = tuple(modes)
        self.without_memory = False
        self.is_replayed = False
        self.pruned: frozenset[int] = frozenset()
        self.help: dict[int, tuple[Insertion, ...]] = {}
        self.nodes: list[Node] = []
        self.leaves: dict[int, Leaf] = {}

    def append(
        self,
        *,
        parent: int | None,
        origin: Origin,
        token_ids: tuple[int, ...],
        message: Message,
        **fields: Any,
    ) -> Node:
        """Add a node under ``parent`` (None: a root).

        Raises ValueError if log-probs or entropies do not match the tokens, or are not on a policy node.
        """
        node = Node(
            node_id=len(self.nodes),
            parent=parent,
            origin=origin,
            token_ids=token_ids,
            message=message,
            **fields,
        )
        expected = len(token_ids) if node.trainable else 0
        if len(node.logprobs) != expected or len(node.entropies) != expected:
            raise ValueError(
                f"a {origin} node of {len(token_ids)} tokens needs {expected} log-probs and entropies"
            )
        if parent is not None and not 0 <= parent < len(self.nodes):
            raise ValueError(f"parent {parent} is not in the trace")
        if node.restarts and (parent is None or node.receives_advantages):
            raise ValueError(
                "a new context needs a parent and must start with a node that the policy did not write"
            )
        self.nodes.append(node)
        return node

    def finish(self, leaf: Leaf) -> None:
        """Record the outcome of a rollout; a second one is an error."""
        if leaf.rollout in self.leaves:
            raise ValueError(f"rollout {leaf.rollout} already ended as {self.leaves[leaf.rollout].outcome}")
        if leaf.outcome.is_fault != (leaf.episode_return is None):
            raise ValueError(
                f"outcome {leaf.outcome} with return {leaf.episode_return}: only faults have no return"
            )
        self.leaves[leaf.rollout] = leaf

    def path(self, node_id: int) -> list[Node]:
        """Return the nodes from the root to ``node_id``."""
        nodes: list[Node] = []
        cursor: int | None = node_id
        while cursor is not None:
            nodes.append(self.nodes[cursor])
            cursor = self.nodes[cursor].parent
        return nodes[::-1]

    def token_ids(self, node_id: int) -> tuple[int, ...]:
        """Return the context of an engine after ``node_id``: all ids from the root or the last restart."""
        return tuple(token for node in split_contexts(self.path(node_id))[-1] for token in node.token_ids)

    def number_by_rollout(self) -> None:
        """Renumber the nodes as if rollouts had run one after the other.

        While rollouts run concurrently, nodes are numbered in order of arrival, which depends on the speed of
        tools. Nodes left behind by a fault come last, ordered by the rollout in their metadata.
        """
        owned = {node.node_id: None for _, path in self.rollouts() for node in path}
        lost = [node for node in self.nodes if node.node_id not in owned]
        lost.sort(key=lambda node: int(node.metadata.get("rollout", -1)))
        order = [self.nodes[node_id] for node_id in owned] + lost
        numbers: dict[int | None, int | None] = {None: None} | {
            node.node_id: number for number, node in enumerate(order)
        }
        for number, node in enumerate(order):
            node.node_id, node.parent = number, numbers[node.parent]
        for leaf in self.leaves.values():
            leaf.node_id = numbers[leaf.node_id]
        self.help = {
            rollout: tuple(replace(part, node_id=numbers[part.node_id] or 0) for part in parts)
            for rollout, parts in self.help.items()
        }
        self.nodes = order

    def rollouts(self) -> Iterator[tuple[Leaf, list[Node]]]:
        """Yield finished rollouts with their paths, by rollout number."""
        for rollout in sorted(self.leaves):
            leaf = self.leaves[rollout]
            yield leaf, [] if leaf.node_id is None else self.path(leaf.node_id)

    def scored_rollouts(self) -> Iterator[tuple[Leaf, list[Node]]]:
        """Yield the rollouts with a return, i.e. without faults."""
        return ((leaf, path) for leaf, path in self.rollouts() if leaf.episode_return is not None)

    def own_rollouts(self) -> Iterator[tuple[Leaf, list[Node]]]:
        """Yield the rollouts without demonstrations."""
        return ((leaf, path) for leaf, path in self.rollouts() if not leaf.is_demonstration)


def without_memory(path: Sequence[Node]) -> list[Node]:
    """Return the path without tips."""
    return [node for node in path if node.origin is not Origin.MEMORY]


def without_open_prompt(path: Sequence[Node]) -> Sequence[Node]:
    """Return the path without a prompt at its end that was built for a turn that did not follow."""
    return path[:-1] if path and REBUILT in path[-1].metadata else path


def with_help(path: Sequence[Node], insertions: Sequence[Insertion]) -> list[Node]:
    """Return the path with help: the nodes in which it stands are split in the returned list only.

    Raises ValueError for help in a node that the policy or a demonstrator wrote, or that is not on the path.
    """
    by_node: dict[int, list[Insertion]] = {}
    for insertion in insertions:
        by_node.setdefault(insertion.node_id, []).append(insertion)
    nodes: list[Node] = []
    for node in path:
        parts = sorted(by_node.pop(node.node_id, ()), key=lambda part: part.offset)  # stable
        if not parts:
            nodes.append(node)
            continue
        if node.receives_advantages or not 0 <= parts[0].offset <= parts[-1].offset <= len(node.token_ids):
            raise ValueError(f"help cannot stand in node {node.node_id} ({node.origin})")
        pieces: list[Node] = []
        start = 0
        for part in parts:
            pieces.append(replace(node, token_ids=node.token_ids[start : part.offset]))
            message = Message(role="inline", content=part.text)
            pieces.append(replace(node, origin=Origin.MEMORY, token_ids=part.token_ids, message=message))
            start = part.offset
        pieces.append(replace(node, token_ids=node.token_ids[start:]))
        first, *rest = (piece for piece in pieces if piece.token_ids)
        nodes += [first, *(replace(piece, restarts=False) for piece in rest)]
    if by_node:
        raise ValueError(f"help in nodes {sorted(by_node)}, which are not on the path")
    return nodes


def split_contexts(path: Sequence[Node]) -> list[Sequence[Node]]:
    """Split a path at restarts into its contexts, which are the samples of an update; statistics count the
    rollout once.
    """
    # The first node starts a context in any case; in a part of a rollout it may be a restart.
    starts = [0, *(number for number, node in enumerate(path) if node.restarts and number), len(path)]
    return [path[begin:end] for begin, end in pairwise(starts)] if len(starts) > 2 else [path]


EPISODE: Final = "episode"
"""Key of a prompt node's metadata: the number of the episode that it starts, if the rollout has earlier ones.
"""
EARLIER_RETURN: Final = "earlier_return"
"""Key of the same metadata: the return of the episode before."""
REFLECTION: Final = "reflection"
"""Key of the metadata of a reflection that is a turn of the rollout, and of the message that requests it."""


def split_episodes(path: Sequence[Node]) -> list[Sequence[Node]]:
    """Split a path into its episodes. A reflection belongs to the episode before it."""
    starts = [0, *(number for number, node in enumerate(path) if EPISODE in node.metadata), len(path)]
    return [path[begin:end] for begin, end in pairwise(starts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTurn:
    """One policy turn of a path: the observation before it, and its node."""

    observation: str
    node: Node


def without_retrieved(path: Sequence[Node]) -> list[Node]:
    """Return the path without retrieved steps and the environment's answers to them."""
    kept: list[Node] = []
    is_inside = False
    for node in path:
        if node.origin is Origin.BUFFER or node.receives_advantages:
            is_inside = node.origin is Origin.BUFFER
        if not (is_inside and node.origin in (Origin.BUFFER, Origin.ENVIRONMENT)):
            kept.append(node)
    return kept


def policy_turns(path: Sequence[Node]) -> list[PolicyTurn]:
    """Return the policy's turns, each with the newest observation before it."""
    turns: list[PolicyTurn] = []
    observation = ""
    for node in path:
        if node.trainable:
            turns.append(PolicyTurn(observation=observation, node=node))
        elif node.is_observation:
            observation = node.message.content
    return turns
