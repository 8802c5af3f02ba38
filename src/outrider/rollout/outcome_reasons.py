"""Why rollouts ended without success, counted, with the settings of the limits that cut them."""

from collections import Counter
from collections.abc import Mapping, Sequence

from outrider.errors import ConfigError
from outrider.rollout.limits import Limits
from outrider.trace import Leaf, Node, Trace, split_contexts
from outrider.types import Origin, Outcome

CUT = "cut by "


def limiting_setting(leaf: Leaf, path: Sequence[Node], limits: Limits, *, context_length: int) -> str | None:
    """The setting of the limit that cut the rollout, or a turn of it, with its value; None if none did."""
    turns = [node for node in path if node.receives_advantages]
    shortened = [node for node in turns if node.metadata.get("finish") == "length"]
    if any(len(node.token_ids) >= limits.max_turn_tokens for node in shortened):
        return f"rollout.max_turn_tokens = {limits.max_turn_tokens}"
    if leaf.outcome is Outcome.TRUNCATED_TURNS:
        if len(turns) >= limits.max_turns:
            return f"rollout.max_turns = {limits.max_turns}"
        return "the environment's own limit of moves"
    if leaf.outcome is not Outcome.TRUNCATED_TOKENS and not shortened:
        return None
    num_response = sum(len(node.token_ids) for node in path if node.origin is not Origin.PROMPT)
    left = limits.max_response_tokens - num_response
    room = context_length - sum(len(node.token_ids) for node in split_contexts(path)[-1])
    if leaf.outcome is not Outcome.TRUNCATED_TOKENS and min(left, room) > 0:
        return None  # a program's own limit of a turn
    if room <= left:
        return f"the context of {context_length} tokens (model.context_length)"
    return f"rollout.max_response_tokens = {limits.max_response_tokens}"


def failure_reasons(traces: Sequence[Trace], limits: Limits, *, context_length: int) -> Counter[str]:
    """Why the rollouts without success ended, in a few words each. Faults are left out."""
    reasons: Counter[str] = Counter()
    for trace in traces:
        for leaf, path in trace.scored_rollouts():
            if leaf.success:
                continue
            limit = limiting_setting(leaf, path, limits, context_length=context_length)
            if limit is not None:
                reasons[f"{CUT}{limit}"] += 1
            elif leaf.outcome is Outcome.INVALID:
                reasons["ended with a turn that the environment cannot read"] += 1
            else:
                reasons["ended without success"] += 1
    return reasons


def reasons_line(reasons: Mapping[str, int]) -> str:
    """The reasons with their counts, the most frequent first; empty without any."""
    ordered = sorted(reasons.items(), key=lambda entry: (-entry[1], entry[0]))
    return ", ".join(f"{num} {reason}" for reason, num in ordered)


def cut_line(cut: Mapping[str, int]) -> str:
    """How many rollouts each limit cut: ``3 by rollout.max_turn_tokens = 256``."""
    ordered = sorted(cut.items(), key=lambda entry: (-entry[1], entry[0]))
    return ", ".join(f"{num} by {limit}" for limit, num in ordered)


def count_cut(traces: Sequence[Trace], limits: Limits, *, context_length: int) -> Counter[str]:
    """How many rollouts each limit cut, also those that were solved all the same."""
    limits_by_rollout = (
        limiting_setting(leaf, path, limits, context_length=context_length)
        for trace in traces
        for leaf, path in trace.scored_rollouts()
    )
    return Counter(limit for limit in limits_by_rollout if limit is not None)


def has_no_room(leaf: Leaf, path: Sequence[Node]) -> bool:
    """Whether the prompt left the policy no room for a single token."""
    return (
        leaf.outcome is Outcome.TRUNCATED_TOKENS
        and bool(path)
        and all(node.origin is Origin.PROMPT for node in path)
    )


def require_room(traces: Sequence[Trace], *, context_length: int) -> list[str]:
    """A line about prompts that leave the policy no room, if there are any.

    Raises ConfigError if no prompt leaves room: nothing can be generated then.
    """
    rollouts = [(trace.task.key, leaf, path) for trace in traces for leaf, path in trace.scored_rollouts()]
    lengths = {
        key: sum(len(node.token_ids) for node in path)
        for key, leaf, path in rollouts
        if has_no_room(leaf, path)
    }
    if not lengths:
        return []
    num = sum(has_no_room(leaf, path) for _, leaf, path in rollouts)
    key = min(lengths, key=lambda task_key: lengths[task_key])
    room = f"model.context_length: the context has {context_length} tokens"
    if num == len(rollouts):
        raise ConfigError(
            f"no prompt leaves the policy room to write; {room}, the shortest prompt ({key}) has "
            f"{lengths[key]}"
        )
    longest = max(lengths.values())
    return [
        f"{num} of {len(rollouts)} rollouts have a prompt that leaves the policy no room; {room}, the "
        f"longest prompt has {longest}"
    ]
