"""The record of an episode of moves, whose return is the sum of what somebody else's environment gave."""

import math
from dataclasses import dataclass
from typing import Final

from outrider.environments.base import EpisodeResult, StepResult
from outrider.environments.seeds import SeedSettings
from outrider.errors import EnvironmentFault
from outrider.types import Message

MAX_EXPERT_TURNS: Final = 10_000
"""An expert may give turns without an end, of which an episode takes those that it needs."""


@dataclass(slots=True, kw_only=True)
class MoveRecord:
    """Counts of one episode. ``name`` is the environment's, for messages."""

    name: str
    settings: SeedSettings
    episode_return: float = 0.0
    num_moves: int = 0
    num_turns: int = 0
    num_invalid: int = 0
    success: bool | None = None
    """What the environment said last, where ``success_key`` asks for it."""
    done: bool = False

    def unread(self, problem: str) -> StepResult:
        """A turn that held no action: nothing happened, and ``problem`` says why."""
        self.num_invalid += 1
        return StepResult(message=Message(role="user", content=problem), invalid=True)

    def moved(
        self, text: str, reward: float, *, terminated: bool, truncated: bool = False, success: bool | None
    ) -> StepResult:
        """A turn whose action was done. Raises :class:`EnvironmentFault` for a reward that is no number."""
        if not math.isfinite(reward):
            raise EnvironmentFault(f"{self.name} gave the reward {reward}")
        self.num_moves += 1
        self.episode_return += reward
        self.success = success
        # GEM's games say both where the last turn won as well as where it was only the last one.
        limit = self.settings.max_moves
        cut = not terminated and (truncated or (limit is not None and self.num_moves >= limit))
        self.done = terminated or cut
        return StepResult(
            message=Message(role="user", content=text or "Nothing is seen."),
            reward=reward,
            done=self.done,
            truncated=cut,
        )

    def result(self) -> EpisodeResult:
        """The sum of rewards so far."""
        reached = self.episode_return >= self.settings.success_at
        return EpisodeResult(
            episode_return=self.episode_return,
            success=(reached if self.success is None else self.success) and self.num_moves > 0,
            metrics={
                "num_moves": float(self.num_moves),
                "num_turns": float(self.num_turns),
                "num_invalid": float(self.num_invalid),
            },
        )


def opening_message(settings: SeedSettings, instructions: str, text: str) -> Message:
    """The prompt of an episode: how to act, and what is seen first."""
    prompt = instructions if settings.prompt is None else settings.prompt
    return Message(role="user", content="\n\n".join(part for part in (prompt, text) if part))
