"""Which rank computes which rollouts: whole groups by cost, the longest first to the lightest rank.

A group's cost is ``6 P U + 12 L d C`` floating-point operations: P parameters, U its unique tokens, L layers
of attention width d, C the sum of the tokens that each of them attends to. All ranks compute the same
placement.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from outrider.train.update.pack import RolloutPath

_TOLERANCE: Final = 1.10  # heaviest rank over the mean
_MAX_CUTS: Final = 64

Cost = Callable[[Sequence[RolloutPath]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model that decide what a token costs."""

    num_parameters: int
    num_layers: int
    attention_width: int

    @classmethod
    def from_config(cls, config: Any, *, num_parameters: int) -> "Shape":
        """From a model's configuration."""
        text = config.get_text_config()
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            num_parameters=num_parameters,
            num_layers=text.num_hidden_layers,
            attention_width=head * text.num_attention_heads,
        )

    def cost(self, paths: Sequence[RolloutPath]) -> float:
        """Of rollouts that share their beginnings; a beginning that they share counts once."""
        num_tokens = sum_of_contexts = 0
        seen: set[tuple[int, ...]] = set()
        for path in paths:
            prefix: tuple[int, ...] = ()
            position = 0
            for node in path.nodes:
                if node.restarts:
                    prefix, position = (), 0
                size = len(node.token_ids)
                prefix = (hash((prefix, node.token_ids)),)
                if prefix not in seen:
                    seen.add(prefix)
                    num_tokens += size
                    sum_of_contexts += size * position + size * (size + 1) // 2
                position += size
        return 6.0 * self.num_parameters * num_tokens + (
            12.0 * self.num_layers * self.attention_width * sum_of_contexts
        )


def assign_to_ranks(paths: Sequence[RolloutPath], *, num_ranks: int, cost: Cost) -> list[list[RolloutPath]]:
    """The rollouts of every rank, in the order of ``paths``: each is in exactly one list.

    Groups stay whole, because a beginning is computed once; where the heaviest rank is more than 10 % above
    the mean, its largest group is cut between rollouts, as long as that makes it lighter.
    """
    groups: dict[int, list[RolloutPath]] = {}
    for path in paths:
        groups.setdefault(path.group, []).append(path)
    placed = _lightest(list(groups.values()), num_ranks, cost)
    for _ in range(_MAX_CUTS):
        loads = [sum(cost(unit) for unit in units) for units in placed]
        heaviest = max(range(num_ranks), key=lambda rank: loads[rank])
        if loads[heaviest] <= _TOLERANCE * sum(loads) / num_ranks:
            break
        largest = max(placed[heaviest], key=cost)
        if len(largest) == 1:
            break
        every = [unit for units in placed for unit in units if unit is not largest]
        middle = len(largest) // 2
        cut = _lightest([*every, largest[:middle], largest[middle:]], num_ranks, cost)
        if max(sum(cost(unit) for unit in units) for units in cut) >= loads[heaviest]:
            break
        placed = cut
    order = {id(path): number for number, path in enumerate(paths)}
    return [
        sorted((path for unit in units for path in unit), key=lambda path: order[id(path)])
        for units in placed
    ]


def _lightest(
    units: Sequence[list[RolloutPath]], num_ranks: int, cost: Cost
) -> list[list[list[RolloutPath]]]:
    """Longest first to the rank with the least; ties go to the lower number."""
    placed: list[list[list[RolloutPath]]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    costs = [cost(unit) for unit in units]
    for number in sorted(range(len(units)), key=lambda number: (-costs[number], number)):
        rank = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        placed[rank].append(units[number])
        loads[rank] += costs[number]
    return placed
