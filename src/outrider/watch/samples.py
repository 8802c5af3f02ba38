"""Sample rollouts for the report: which ones, and what of them fits on the page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Final, TypeVar

from outrider.errors import DataError
from outrider.types import Origin
from outrider.watch.traces import TraceReader, TraceRow

NUM_SAMPLES: Final = 10
# nats; fixed, so that two reports can be compared
ENTROPY_EDGES: Final = (0.01, 0.1, 0.3, 0.7, 1.2, 2.0, 3.0)
_NUM_STEPS: Final = 3
_LABELS: Final = {
    Origin.PROMPT: "prompt",
    Origin.POLICY: "policy",
    Origin.ENVIRONMENT: "observation",
    Origin.BUFFER: "retrieved step",
    Origin.MEMORY: "tip from memory",
    Origin.DEMONSTRATION: "demonstration",
}

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much of a sample is shown: policy tokens per rollout, characters per node of other origin."""

    num_tokens: int
    num_chars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleToken:
    """One policy token; ``shade`` 0 to 7 is the class of its entropy among ``ENTROPY_EDGES``."""

    text: str
    shade: int
    tooltip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleNode:
    """One node of a sample: tokens (policy) or text (others), each as head and tail around what is not
    shown.
    """

    origin: str
    label: str
    metadata: str
    head: tuple[SampleToken, ...] | str
    num_hidden: int
    tail: tuple[SampleToken, ...] | str

    @property
    def has_tokens(self) -> bool:
        """Whether head and tail are tokens."""
        return not isinstance(self.head, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rollout: the facts of its leaf and the path from the root to it."""

    leaf: TraceRow
    path: tuple[TraceRow, ...]

    @property
    def kind(self) -> str:
        """Whose rollout it is, in the report's words."""
        if any(row.origin is Origin.DEMONSTRATION for row in self.path):
            return "demonstration"
        return "hybrid" if self.leaf.hybrid else "on-policy"

    def nodes(self, budget: Budget) -> tuple[SampleNode, ...]:
        """The nodes as far as the budget goes."""
        num_policy = sum(bool(row.tokens) for row in self.path)
        num_tokens = max(10, budget.num_tokens // max(1, num_policy))
        return tuple(_node(row, num_tokens, budget.num_chars) for row in self.path)


def pick_samples(directory: Path, notes: list[str]) -> tuple[Sample, ...]:
    """Up to ten rollouts from the last, the first and the middle step that can be read, in the order of
    steps.

    Of each step the best and the worst rollout of every kind come first, so that they can be compared.
    """
    ranked_steps: list[list[Sample]] = []
    for rows in _readable_steps(TraceReader(directory), notes):
        ranked_steps.append(_ranked(samples_from_rows(rows, notes)))
    rounds = chain.from_iterable(zip_longest(*ranked_steps))
    chosen = [sample for sample in rounds if sample is not None][:NUM_SAMPLES]
    if not chosen:
        notes.append("traces: no finished rollout to show")
    return tuple(sorted(chosen, key=lambda sample: sample.leaf.step))


def _readable_steps(reader: TraceReader, notes: list[str]) -> Iterator[tuple[TraceRow, ...]]:
    steps = reader.steps()
    preferred = [steps[-1], steps[0], steps[len(steps) // 2]] if steps else []
    num_read = 0
    for step in dict.fromkeys([*preferred, *reversed(steps)]):
        if num_read == _NUM_STEPS:
            return
        try:
            rows = reader.read(step)
        except DataError as error:
            notes.append(f"traces: {error}")
            continue
        num_read += 1
        yield rows


def samples_from_rows(rows: Sequence[TraceRow], notes: list[str]) -> list[Sample]:
    """Every finished rollout with its path; a leaf without a path to a root is left out and noted."""
    nodes = {(row.task_key, row.trace_id, row.node_id): row for row in rows}
    samples: list[Sample] = []
    for leaf in rows:
        if leaf.outcome is None:
            continue
        path = [leaf]
        while path[-1].parent_id != -1 and len(path) <= len(rows):
            parent = nodes.get((leaf.task_key, leaf.trace_id, path[-1].parent_id))
            if parent is None:
                break
            path.append(parent)
        if path[-1].parent_id == -1:
            samples.append(Sample(leaf=leaf, path=tuple(reversed(path))))
        else:
            notes.append(
                f"traces: step {leaf.step} node {leaf.node_id} has no path to a root and was left out"
            )
    return samples


def _ranked(samples: list[Sample]) -> list[Sample]:
    scored = [sample for sample in samples if sample.leaf.episode_return is not None]
    scored.sort(key=lambda sample: sample.leaf.episode_return or 0.0, reverse=True)
    kinds = [
        [sample for sample in scored if sample.kind == kind]
        for kind in ("hybrid", "on-policy", "demonstration")
    ]
    first = [
        *(sample for own in kinds for sample in own[:1]),
        *(sample for own in kinds for sample in own[-1:]),
    ]
    ordered = {id(sample): sample for sample in [*first, *scored, *samples]}
    return list(ordered.values())


def _node(row: TraceRow, num_tokens: int, num_chars: int) -> SampleNode:
    head: tuple[SampleToken, ...] | str
    tail: tuple[SampleToken, ...] | str
    if row.tokens:
        tokens = [_token(*values) for values in zip(row.tokens, row.logprobs, row.entropies, strict=True)]
        first, num_hidden, last = _cut(tokens, num_tokens)
        head, tail = tuple(first), tuple(last)
    else:
        letters, num_hidden, rest = _cut(list(row.text), num_chars)
        head, tail = "".join(letters), "".join(rest)
    metadata = "" if row.metadata in ("", "{}") else row.metadata[:300]
    label = _LABELS[row.origin]
    return SampleNode(
        origin=row.origin.value, label=label, metadata=metadata, head=head, num_hidden=num_hidden, tail=tail
    )


def _token(text: str, logprob: float, entropy: float) -> SampleToken:
    tooltip = f"{text!r}  log-prob {logprob:.3f}  entropy {entropy:.3f} nats"
    return SampleToken(
        text=text or "\u2205", shade=sum(entropy >= edge for edge in ENTROPY_EDGES), tooltip=tooltip
    )


def _cut(items: list[_T], limit: int) -> tuple[list[_T], int, list[_T]]:
    """Two thirds of the limit from the beginning and one third from the end, with the number left out
    between.
    """
    if len(items) <= limit:
        return items, 0, []
    num_tail = limit // 3
    return items[: limit - num_tail], len(items) - limit, items[len(items) - num_tail :]
