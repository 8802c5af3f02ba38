"""Reflexion (arXiv 2303.11366): the policy writes a plan after a failed episode, and the next trial of the
task begins with the last three plans.

No weights change. It is a baseline of EMPO², implemented as a hook that runs in the same rollout loop
(:mod:`outrider.training.adaptation`).
"""

from collections.abc import Sequence

from outrider.algorithms.tips import clean_reflection, last_words
from outrider.environments.base import EpisodeResult
from outrider.rollout.hooks import EpisodeState, Hook, Splice
from outrider.trace import Trace
from outrider.types import Message, Origin

NUM_SHOWN = 3
HEADING = "Your plans from earlier attempts at this task, which failed:"
REQUEST = (
    "The attempt is over, with a score of {score:.3g}, and the task was not completed. "
    "In one or two sentences: what went wrong, and what is your new plan? Write only the plan."
)


class ReflexionHook(Hook):
    """Stores plans by task and rollout number: each sample of a task learns from its own failures only."""

    retries_failures = True

    def __init__(self, *, max_plan_tokens: int = 64) -> None:
        self.max_reflection_tokens = max_plan_tokens
        self.plans: dict[tuple[str, int], list[str]] = {}

    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        """Insert the last plans once, before the first turn."""
        plans = self.plans.get((state.task.key, state.rollout), [])[-NUM_SHOWN:]
        if state.turn or not plans:
            return ()
        text = "\n\n" + "\n".join([HEADING, *(f"- {plan}" for plan in plans)])
        return [Splice(origin=Origin.MEMORY, text=text, metadata={"num_plans": len(plans)})]

    def closing_message(self, state: EpisodeState, result: EpisodeResult) -> Message | None:
        """Request a plan after failures only, following the environment's last message."""
        if result.success:
            return None
        return Message(role="user", content=last_words(state) + REQUEST.format(score=result.episode_return))

    def after_group(self, trace: Trace) -> None:
        """Store the plans of the failed rollouts."""
        for leaf, _ in trace.rollouts():
            plan = clean_reflection(leaf.reflection)
            if leaf.episode_return is not None and not leaf.success and plan:
                self.plans.setdefault((trace.task.key, leaf.rollout), []).append(plan)
