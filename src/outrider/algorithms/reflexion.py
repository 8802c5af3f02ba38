"""Reflexion (arXiv 2303.11366): a failed episode writes a plan, and the next try of the same task begins with
the last three.

No weights change. A baseline of EMPO² that runs in the same loop: a hook, played by
:mod:`outrider.training.adaptation`.
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
    """Plans by task and rollout number: every sample of a task learns from its own failures only."""

    retries_failures = True

    def __init__(self, *, max_plan_tokens: int = 64) -> None:
        self.max_reflection_tokens = max_plan_tokens
        self.plans: dict[tuple[str, int], list[str]] = {}

    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        """The last plans, once, in front of the first turn."""
        plans = self.plans.get((state.task.key, state.rollout), [])[-NUM_SHOWN:]
        if state.turn or not plans:
            return ()
        text = "\n\n" + "\n".join([HEADING, *(f"- {plan}" for plan in plans)])
        return [Splice(origin=Origin.MEMORY, text=text, metadata={"num_plans": len(plans)})]

    def closing_message(self, state: EpisodeState, result: EpisodeResult) -> Message | None:
        """Asked after failures only, behind what the environment said last."""
        if result.success:
            return None
        return Message(role="user", content=last_words(state) + REQUEST.format(score=result.episode_return))

    def after_group(self, trace: Trace) -> None:
        """Keep what the failed ones wrote."""
        for leaf, _ in trace.rollouts():
            plan = clean_reflection(leaf.reflection)
            if leaf.episode_return is not None and not leaf.success and plan:
                self.plans.setdefault((trace.task.key, leaf.rollout), []).append(plan)
