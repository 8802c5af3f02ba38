"""RAPO (arXiv 2603.03078): GRPO whose hybrid rollouts reason on over retrieved steps of other agents.

Equation -> function: Eq. 2, 5-10 in :mod:`outrider.algorithms.rapo.formulas`; Eq. 8's ratio in
:mod:`outrider.algorithms.common.ratios`; Eq. 3-4 and Algorithm 1 in :mod:`outrider.algorithms.rapo.hook`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from outrider.algorithms.algorithm import Algorithm
from outrider.algorithms.arpo.hook import BranchHook, BranchSettings, require_countable
from outrider.algorithms.base import GroupCredit, ObjectiveSettings, outcome_advantages, write_credit
from outrider.algorithms.common.loss_settings import ClipLoss, LossSettings, needs_whole_rollouts
from outrider.algorithms.context import AlgorithmContext
from outrider.algorithms.rapo.formulas import (
    RetrievalReward,
    combined_advantages_per_rollout,
    retrieval_advantages_per_rollout,
    retrieval_factors_per_rollout,
    retrieval_ratio_scale,
    retrieval_reward_per_rollout,
    retrieved_token_share,
    step_entropy_per_step,
)
from outrider.algorithms.rapo.hook import RetrievalHook, RetrievalSettings
from outrider.environments.families import is_inline, is_stateful
from outrider.memory.steps.buffer import StepTraceBuffer
from outrider.rollout.hooks import Hook
from outrider.trace import Leaf, Node, Trace
from outrider.types import Origin

if TYPE_CHECKING:
    from outrider.train.settings import RunSettings


class RapoSettings(ObjectiveSettings):
    """RAPO's own settings; every ablation of the paper is one of them (spec section 10).

    ``advantage_weight`` is a of Eq. 10, ``ratio_weight`` m of Eq. 8 (0 switches either off); ``num_hybrid``
    of the group's rollouts may retrieve; ``branch`` lets rollouts branch as well. Defaults are the paper's
    where it gives one.
    """

    details: ClassVar[frozenset[str]] = frozenset({"quality", "timing", "sign"})

    type: Literal["rapo"] = "rapo"
    loss: LossSettings = ClipLoss(clip_low=0.28, clip_high=0.28)
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length"
    ] = "sequence_mean_token_mean"
    num_hybrid: int = Field(4, ge=0)
    advantage_weight: float = Field(0.2, ge=0)
    ratio_weight: float = Field(0.05, ge=0)
    quality: bool = True
    timing: Literal["entropy", "inverse_entropy", "none"] = "entropy"
    sign: Literal["decrease", "increase"] = "decrease"
    retrieval: RetrievalSettings = RetrievalSettings()
    branch: BranchSettings | None = None

    def idle(self) -> frozenset[str]:
        """How to retrieve where nobody does, and the parts of a retrieval reward that has no weight."""
        parts = set() if self.advantage_weight and self.num_hybrid else {"quality", "timing", "sign"}
        rest = set() if self.num_hybrid else {"retrieval", "advantage_weight", "ratio_weight"}
        return super().idle() | parts | rest

    @property
    def depends_on_num_steps(self) -> bool:
        """Where the probability of a retrieval runs to its last value at the last step."""
        return self.retrieval.final_probability is not None

    @property
    def executes_retrieved(self) -> bool:
        """By ``retrieval.mode``."""
        return self.retrieval.mode == "execute"

    @model_validator(mode="after")
    def _possible(self) -> "RapoSettings":
        if self.num_hybrid > self.group_size:
            raise ValueError(f"num_hybrid {self.num_hybrid} exceeds group_size {self.group_size}")
        if self.loss.type != "clip" and self.ratio_weight > 0:
            raise ValueError(
                f"loss.type = {self.loss.type} does not know RAPO's ratio: "
                "set ratio_weight = 0 or loss.type = clip"
            )
        if not self.quality and self.timing == "none":
            raise ValueError(
                "quality = false with timing = none leaves no retrieval reward: "
                "set advantage_weight = 0 instead"
            )
        if not self.quality and self.sign == "increase":
            raise ValueError("sign acts on the quality term, which is off")
        if self.branch is not None:
            self._can_branch(self.branch)
        return self

    def require_possible(self, run: "RunSettings") -> None:
        """Retrieved steps that the environment can take, or show."""
        if self.retrieval.mode == "execute" and not is_stateful(run.environment):
            raise ValueError(
                "retrieval.mode = execute needs a stateful environment "
                "(scienceworld, webshop, textworld, house, alfworld)"
            )
        if self.retrieval.form == "turn" and not is_inline(run.environment):
            raise ValueError(
                "retrieval.form = turn needs the tag protocol (factbook, tools): elsewhere results are "
                "messages"
            )

    @property
    def retrieves(self) -> bool:
        """Whether any rollout may."""
        return self.num_hybrid > 0

    @property
    def forks_by_replay(self) -> bool:
        """Where rollouts branch as well."""
        return self.branch is not None

    def _can_branch(self, branch: BranchSettings) -> None:
        if branch.first_wave >= self.group_size and not branch.pre_monitor:
            raise ValueError(
                f"branch.first_wave {branch.first_wave} leaves no place for forks "
                f"in group_size {self.group_size}"
            )
        if branch.attribution == "hard" and self.ratio_weight > 0:
            raise ValueError(
                "branch.attribution = hard needs ratio_weight = 0: leaves "
                "of one token would scale its ratio differently"
            )
        require_countable(
            branch.attribution,
            self.aggregation,
            whole_rollouts=needs_whole_rollouts(self.loss, self.sampler_correction, self.sampler_rejection),
            positive_nll=self.positive_nll,
        )


class Rapo(Algorithm):
    """Pure on-policy rollouts first, hybrid ones after them; credit aware of the retrievals."""

    Settings = RapoSettings

    def __init__(
        self,
        settings: RapoSettings,
        *,
        buffer: StepTraceBuffer | None,
        num_training_steps: int,
        vocabulary_size: int = 2,
        every_action: bool = False,
    ) -> None:
        self.settings = settings
        self.objective: ObjectiveSettings = settings
        num_on_policy = settings.group_size - settings.num_hybrid
        self.modes = ("on_policy",) * num_on_policy + ("hybrid",) * settings.num_hybrid
        branching = settings.branch and BranchHook(
            settings.branch,
            group_size=settings.group_size,
            vocabulary_size=vocabulary_size,
            every_action=every_action,
        )
        retrieves = settings.num_hybrid > 0 and buffer is not None
        self._retrieval: tuple[RetrievalHook, ...] = (
            (RetrievalHook(settings.retrieval, buffer=buffer, num_training_steps=num_training_steps),)
            if retrieves and buffer
            else ()
        )
        self.hooks: tuple[Hook, ...] = (*self._retrieval, *((branching,) if branching else ()))

    @classmethod
    def build(cls, settings: RapoSettings, context: AlgorithmContext) -> "Rapo":
        """For a run."""
        return cls(
            settings,
            buffer=context.buffer,
            num_training_steps=context.num_training_steps,
            vocabulary_size=context.vocabulary_size,
            every_action=context.is_stateful,
        )

    @property
    def label(self) -> str:
        """Without hybrid rollouts and branches it is GRPO, bit for bit."""
        return self.objective.label if self.hooks else "grpo"

    def counts(self) -> list[dict[str, int]]:
        """Counts of the retrieval hook."""
        return [dict(hook.counts) for hook in self._retrieval]

    def restore_counts(self, saved: Sequence[Mapping[str, int]]) -> None:
        """Back to what :meth:`counts` gave."""
        for hook, counts in zip(self._retrieval, saved, strict=True):
            hook.counts = Counter(counts)

    def credit(self, trace: Trace) -> GroupCredit:
        """``A = (1 + a A_ret) A_acc`` (Eq. 10) and the ratio scale ``1 + m F_ret`` (Eq. 8)."""
        outcome = outcome_advantages(trace, self.objective.advantage)
        rollouts = list(trace.rollouts())
        rewards = [self.retrieval_reward(path) for _, path in rollouts]
        scored = [
            # The rollouts that the outcome cannot score: both advantages have to span the same ones.
            None if leaf.episode_return is None else reward.value
            for (leaf, _), reward in zip(rollouts, rewards, strict=True)
        ]
        factors = retrieval_factors_per_rollout(
            retrieval=retrieval_advantages_per_rollout(rewards=scored), weight=self.settings.advantage_weight
        )
        advantages = combined_advantages_per_rollout(outcome=outcome, factors=factors)
        shares = [_retrieved_share(path) for _, path in rollouts]
        weight = self.settings.ratio_weight
        scales = [retrieval_ratio_scale(retrieved_token_share=share, weight=weight) for share in shares]
        write_credit(
            trace,
            advantages,
            scales,
            attribution=self.settings.branch.attribution if self.settings.branch else None,
        )
        return GroupCredit(
            advantages=advantages, measurements=_measure(rollouts, rewards, shares, factors.tolist())
        )

    def retrieval_reward(self, path: Sequence[Node]) -> RetrievalReward:
        """Z_ret of one rollout (Eq. 5-7) from the entropies of the policy nodes around each retrieved
        node.
        """
        around = entropies_around_retrievals(path)
        return retrieval_reward_per_rollout(
            entropies_before=[before for before, _ in around],
            entropies_after=[after for _, after in around],
            quality=self.settings.quality,
            timing=self.settings.timing,
            sign=self.settings.sign,
        )


def entropies_around_retrievals(path: Sequence[Node]) -> list[tuple[float, float | None]]:
    """(H_b, H_a) of every retrieval: the policy steps before and after it; None where the rollout was cut.

    Several retrieved nodes in a row (trajectory-level retrieval) are one retrieval.
    """
    found: list[tuple[float, float | None]] = []
    before: float | None = None
    waiting = False
    for node in path:
        if node.origin is Origin.BUFFER and not waiting and before is not None:
            found.append((before, None))
            waiting = True
        elif node.trainable and node.entropies:
            entropy = step_entropy_per_step(token_entropies=node.entropies)
            if waiting:
                found[-1] = (found[-1][0], entropy)
                waiting = False
            before = entropy
    return found


def _retrieved_share(path: Sequence[Node]) -> float:
    response = [node for node in path if node.origin is not Origin.PROMPT]
    return retrieved_token_share(
        num_retrieved_tokens=sum(len(node.token_ids) for node in response if node.origin is Origin.BUFFER),
        num_response_tokens=sum(len(node.token_ids) for node in response),
    )


def _measure(
    rollouts: Sequence[tuple[Leaf, list[Node]]],
    rewards: Sequence[RetrievalReward],
    shares: Sequence[float],
    factors: Sequence[float],
) -> dict[str, list[float]]:
    """Raw values behind the metrics of spec section 12; the trainer averages them over the step."""
    around = [entropies_around_retrievals(path) for _, path in rollouts]
    retrieved = [node for _, path in rollouts for node in path if node.origin is Origin.BUFFER]
    return {
        "retrieval/z_mean": [z for reward in rewards for z in reward.rewards],
        "retrieval/g_mean": [g for reward in rewards for g in reward.gains],
        "retrieval/entropy_before_mean": [before for found in around for before, _ in found],
        "retrieval/entropy_after_mean": [
            after for found in around for _, after in found if after is not None
        ],
        "retrieval/share_g_positive": [float(g > 0) for reward in rewards for g in reward.gains],
        "retrieval/token_share": [share for share in shares if share > 0],
        "retrieval/similarity_mean": [
            s for node in retrieved if not math.isnan(s := float(node.metadata["similarity"]))
        ],
        "retrieval/num_unscored": [float(reward.num_without_after) for reward in rewards],
        "retrieval/num_floored": [float(reward.num_floored) for reward in rewards],
        "retrieval/share_factor_negative": [float(factor < 0) for factor in factors],
    }
