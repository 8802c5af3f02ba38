"""Advice when a step teaches nothing or retrieves nothing: the reason, from what its rollouts counted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from outrider.rollout.modes import HYBRID, has_part
from outrider.rollout.outcome_reasons import CUT, failure_reasons, reasons_line
from outrider.trace import Trace
from outrider.train.settings import RunSettings
from outrider.types import Outcome

_EVERY: Final = 10
"""Steps after which the same advice is repeated."""
_COLD_START: Final = "a cold start (cold_start.num_examples, cold_start.demonstrations)"


@dataclass(slots=True, kw_only=True)
class Advice:
    """Alarms of a run about steps without a learning signal and without retrieval. The same kind is repeated
    only every few steps.
    """

    settings: RunSettings
    context_length: int
    stop: Sequence[str]  # strings that end a turn
    _last: dict[str, int] = field(default_factory=dict)

    def lines(self, traces: Sequence[Trace], *, step: int, values: Mapping[str, float]) -> list[str]:
        """After a training step with the metrics ``values``."""
        if values.get("rollout/num_masked") == values.get("rollout/num"):
            return []  # faults have an alarm of their own
        texts = {
            "signal": self._without_signal(traces, values),
            "retrieval": self._without_retrieval(traces, values),
        }
        lines = []
        for kind, text in texts.items():
            if not text:
                self._last.pop(kind, None)
            elif step - self._last.get(kind, -_EVERY) >= _EVERY:
                self._last[kind] = step
                lines.append(f"ALARM: step {step}: {text}")
        return lines

    def _without_signal(self, traces: Sequence[Trace], values: Mapping[str, float]) -> str:
        if values.get("group/fraction_without_signal") != 1.0:
            return ""
        rollouts = [(leaf, path) for trace in traces for leaf, path in trace.scored_rollouts()]
        num = len(rollouts)
        begin = "no group has a learning signal: "
        if not num or len(traces[0].modes) == 1:
            return f"{begin}a group of one rollout has nothing to compare with; raise algorithm.group_size"
        if all(leaf.success for leaf, _ in rollouts):
            return f"{begin}all {num} rollouts solved their tasks; train on harder tasks"
        reasons = failure_reasons(traces, self.settings.limits, context_length=self.context_length)
        summary = f"{begin}of {num} rollouts {reasons_line(reasons)}"
        num_unclosed = self._num_unclosed(traces)
        if num_unclosed > num / 2:
            return (
                f"{begin}{num_unclosed} of {num} rollouts ended without a closing tag; {_COLD_START} "
                "teaches the format" + (f" ({reasons_line(reasons)})" if reasons else "")
            )
        num_invalid = sum(leaf.outcome is Outcome.INVALID for leaf, _ in rollouts)
        if num_invalid > num / 2:
            return f"{summary}; {_COLD_START} teaches the format"
        if sum(count for reason, count in reasons.items() if reason.startswith(CUT)) > num / 2:
            return f"{summary}; raise the limit, or teach shorter answers by a cold start"
        return (
            f"{summary} and all rollouts of a group have the same return; train on easier tasks, begin with "
            f"{_COLD_START}, or raise algorithm.group_size"
        )

    def _num_unclosed(self, traces: Sequence[Trace]) -> int:
        """Rollouts whose last turn has none of the tags that end a turn."""
        tags = tuple(tag for tag in self.stop if tag.startswith("</"))
        if not tags:
            return 0
        last = [
            next((node for node in reversed(path) if node.trainable), None)
            for trace in traces
            for _, path in trace.scored_rollouts()
        ]
        return sum(node is not None and not any(tag in node.message.content for tag in tags) for node in last)

    def _without_retrieval(self, traces: Sequence[Trace], values: Mapping[str, float]) -> str:
        if values.get("retrieval/num_inserted") != 0.0:
            return ""
        hybrid = [
            (leaf, path)
            for trace in traces
            for leaf, path in trace.scored_rollouts()
            if has_part(trace.modes[leaf.rollout], HYBRID)
        ]
        if not hybrid:
            return ""
        begin = f"none of {len(hybrid)} hybrid rollouts got a retrieved step: "
        num_short = sum(sum(node.trainable for node in path) <= 1 for _, path in hybrid)
        if "retrieval/rate" not in values:
            reasons = failure_reasons(traces, self.settings.limits, context_length=self.context_length)
            why = f" ({reasons_line(reasons)})" if reasons else ""
            return (
                f"{begin}steps are retrieved from the second turn on, and {num_short} of them ended in their "
                f"first turn{why}; a cold start teaches the format, or the limits are too small"
            )
        if values.get("retrieval/num_refused"):
            return f"{begin}the environment refused {values['retrieval/num_refused']:.0f} retrieved actions"
        if values.get("retrieval/num_dropped"):
            return (
                f"{begin}{values['retrieval/num_dropped']:.0f} steps found no room: raise "
                f"rollout.max_response_tokens (now {self.settings.rollout.max_response_tokens}) or lower "
                "rollout.max_turn_tokens"
            )
        if values.get("retrieval/num_no_candidate"):
            return (
                f"{begin}the buffer held no step for {values['retrieval/num_no_candidate']:.0f} retrievals; "
                "look at the retrieval's scope, min_similarity and include_terminal, and at the tasks of the "
                "buffer (outrider buffer stats)"
            )
        return f"{begin}no turn drew a retrieval; raise the retrieval's probability"
