"""Retrieval (RAPO, arXiv 2603.03078): the reward of retrieved steps, what it does to advantages and ratios
(Eq. 2 and 5-10), and the hook that retrieves (Eq. 3-4, Algorithm 1).
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from outrider.algorithms.advantages import (
    Float64Array,
    RolloutAdvantages,
    group_normalized_advantages_per_rollout,
)
from outrider.config import Settings
from outrider.environments.base import StepResult
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.memory.step_store import Hit, StepFilter, StepRecord, history_text
from outrider.rollout.hooks import (
    HYBRID,
    Attempt,
    EpisodeState,
    Hook,
    Splice,
    format_retrieved,
    has_part,
    join_observation,
)
from outrider.trace import Node, Trace
from outrider.types import Origin, Step

_SHARPNESS = 2.0  # of the gain g = tanh(2 * change)
_ENTROPY_FLOOR = (
    1e-3  # nats; a change between two near-zero entropies stays near zero, and H_b = 0 is defined
)
# float32 log-softmax can leave an entropy of zero slightly negative; more than this is a fault of the engine
_ENTROPY_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalReward:
    """The retrieval reward ``value`` (Z_ret) of one rollout, and what it was made from.

    ``gains`` and ``rewards`` hold g and Z of every scored retrieval, in order. ``num_without_after``
    retrievals had no on-policy step after them (the budget ran out) and are left out of the mean; for
    ``num_floored`` scored ones the entropy before was under the floor, so their relative change is damped.
    """

    value: float
    gains: tuple[float, ...]
    rewards: tuple[float, ...]
    num_without_after: int
    num_floored: int


def step_entropy_per_step(token_entropies: Sequence[float] | Float64Array) -> float:
    """Mean token entropy in nats over the tokens that the policy generated in one step (Eq. 2).

    Raises ValueError for a step without tokens and for entropies that are negative or not finite.
    """
    if len(token_entropies) == 0:
        raise ValueError("a step without generated tokens has no entropy")
    return math.fsum(_checked_entropy(float(entropy)) for entropy in token_entropies) / len(token_entropies)


def retrieval_reward_per_rollout(
    *,
    entropies_before: Sequence[float],
    entropies_after: Sequence[float | None],
    quality: bool = True,
    timing: Literal["entropy", "inverse_entropy", "none"] = "entropy",
    sign: Literal["decrease", "increase"] = "decrease",
) -> RetrievalReward:
    """Mean of ``Z = g * H_b`` over the retrievals of one rollout (Eq. 5-7).

    The gain ``g = tanh(2 * (H_b - H_a) / H_b)`` is positive if the step entropy falls across the retrieval.
    ``entropies_before`` and ``entropies_after`` [R] are those of the on-policy steps around each retrieval;
    None or NaN after it if the rollout was cut. A rollout without a scored retrieval gets 0. Ablations:
    ``quality=False`` sets g to 1; ``timing`` replaces the factor H_b by 1/H_b (floored) or by 1;
    ``sign="increase"`` rewards a rise.
    """
    gains: list[float] = []
    rewards: list[float] = []
    num_without_after = num_floored = 0
    for raw_before, raw_after in zip(entropies_before, entropies_after, strict=True):
        if raw_after is None or math.isnan(raw_after):
            # left out and not 0: a budget that ran out says nothing about the retrieval
            num_without_after += 1
            continue
        before, after = _checked_entropy(raw_before), _checked_entropy(raw_after)
        num_floored += before < _ENTROPY_FLOOR
        change = (before - after) / max(before, _ENTROPY_FLOOR)
        gain = math.tanh(_SHARPNESS * (change if sign == "decrease" else -change))
        factors = {"entropy": before, "inverse_entropy": 1.0 / max(before, _ENTROPY_FLOOR), "none": 1.0}
        gains.append(gain)
        rewards.append((gain if quality else 1.0) * factors[timing])
    return RetrievalReward(
        value=math.fsum(rewards) / len(rewards) if rewards else 0.0,
        gains=tuple(gains),
        rewards=tuple(rewards),
        num_without_after=num_without_after,
        num_floored=num_floored,
    )


def combined_advantages_per_rollout(
    *, outcome: RolloutAdvantages, rewards: Sequence[float | None] | Float64Array, weight: float = 0.2
) -> tuple[RolloutAdvantages, Float64Array]:
    """``A = (1 + a * A_ret) * A_acc`` [N] (Eq. 10), and the factors; ``weight`` 0 switches them off exactly.

    ``A_ret`` normalises the retrieval ``rewards`` [N] over the whole group, zeros of on-policy rollouts
    included (Eq. 9); None marks the rollouts that the outcome cannot score either. The sum of A over the
    group is in general not 0. A factor below 0 turns the outcome's sign. With the sample std this needs
    (N - 1) / sqrt(N) > 1 / a, that is N >= 27 at a = 0.2; it is not clamped, but counted.
    """
    retrieval = group_normalized_advantages_per_rollout(returns=rewards)
    factors = np.asarray(1.0 + weight * retrieval.values, dtype=np.float64)
    return replace(outcome, values=factors * outcome.values), factors


def _checked_entropy(entropy: float) -> float:
    if not -_ENTROPY_ROUNDING <= entropy < math.inf:
        raise ValueError(f"not an entropy: {entropy}")
    return max(entropy, 0.0)


class RetrievalAdvantageSettings(Settings):
    """``num_hybrid`` of the group's rollouts may retrieve; ``advantage_weight`` is a of Eq. 10,
    ``ratio_weight`` m of Eq. 8 (0 switches either off). ``quality``, ``timing`` and ``sign`` are the
    parts of the reward.
    """

    num_hybrid: int = Field(4, ge=0)
    advantage_weight: float = Field(0.2, ge=0)
    ratio_weight: float = Field(0.05, ge=0)
    quality: bool = True
    timing: Literal["entropy", "inverse_entropy", "none"] = "entropy"
    sign: Literal["decrease", "increase"] = "decrease"

    @model_validator(mode="after")
    def _rewards_something(self) -> "RetrievalAdvantageSettings":
        if not self.quality and self.timing == "none":
            raise ValueError(
                "quality = false with timing = none leaves no retrieval reward: "
                "set advantage_weight = 0 instead"
            )
        if not self.quality and self.sign == "increase":
            raise ValueError("sign acts on the quality term, which is off")
        return self


def retrieval_advantages(
    trace: Trace, outcome: RolloutAdvantages, settings: RetrievalAdvantageSettings
) -> tuple[RolloutAdvantages, list[float], dict[str, list[float]]]:
    """Shape a group's outcome advantages by its retrievals.

    Returns ``(1 + a A_ret) A_acc`` of every rollout (Eq. 10), the scales ``1 + m F_ret`` of the importance
    ratios (Eq. 8), and raw values of the metrics, which the trainer averages over the step.
    """
    rollouts = list(trace.rollouts())
    rewards = [retrieval_reward(path, settings) for _, path in rollouts]
    scored = [
        # None for rollouts without an outcome: both advantages have to span the same rollouts
        None if leaf.episode_return is None else reward.value
        for (leaf, _), reward in zip(rollouts, rewards, strict=True)
    ]
    advantages, factors = combined_advantages_per_rollout(
        outcome=outcome, rewards=scored, weight=settings.advantage_weight
    )
    shares = [retrieved_share(path) for _, path in rollouts]
    scales = [1.0 + settings.ratio_weight * share for share in shares]
    around = [pair for _, path in rollouts for pair in entropies_around_retrievals(path)]
    retrieved = [node for _, path in rollouts for node in path if node.origin is Origin.BUFFER]
    measurements = {
        "retrieval/z_mean": [z for reward in rewards for z in reward.rewards],
        "retrieval/g_mean": [g for reward in rewards for g in reward.gains],
        "retrieval/entropy_before_mean": [before for before, _ in around],
        "retrieval/entropy_after_mean": [after for _, after in around if after is not None],
        "retrieval/share_g_positive": [float(g > 0) for reward in rewards for g in reward.gains],
        "retrieval/token_share": [share for share in shares if share > 0],
        "retrieval/similarity_mean": [
            s for node in retrieved if not math.isnan(s := float(node.metadata["similarity"]))
        ],
        "retrieval/num_unscored": [float(reward.num_without_after) for reward in rewards],
        "retrieval/num_floored": [float(reward.num_floored) for reward in rewards],
        "retrieval/share_factor_negative": [float(factor < 0) for factor in factors.tolist()],
    }
    return advantages, scales, measurements


def retrieval_reward(path: Sequence[Node], settings: RetrievalAdvantageSettings) -> RetrievalReward:
    """Z_ret of one rollout (Eq. 5-7) from the entropies of the policy nodes around each retrieved node."""
    around = entropies_around_retrievals(path)
    return retrieval_reward_per_rollout(
        entropies_before=[before for before, _ in around],
        entropies_after=[after for _, after in around],
        quality=settings.quality,
        timing=settings.timing,
        sign=settings.sign,
    )


def entropies_around_retrievals(path: Sequence[Node]) -> list[tuple[float, float | None]]:
    """(H_b, H_a) of every retrieval: the policy steps before and after it; None where the rollout was cut.

    Several retrieved nodes in a row (trajectory-level retrieval) are one retrieval.
    """
    entropies: list[tuple[float, float | None]] = []
    before: float | None = None
    waiting = False
    for node in path:
        if node.origin is Origin.BUFFER and not waiting and before is not None:
            entropies.append((before, None))
            waiting = True
        elif node.trainable and node.entropies:
            entropy = step_entropy_per_step(node.entropies)
            if waiting:
                entropies[-1] = (entropies[-1][0], entropy)
                waiting = False
            before = entropy
    return entropies


def retrieved_share(path: Sequence[Node]) -> float:
    """``F_ret``: retrieved tokens over all response tokens of a rollout, the prompt not counted (Eq. 8).

    Tips are no part of the response: an update without them weighs the rollout the same.
    """
    response = [node for node in path if node.origin not in (Origin.PROMPT, Origin.MEMORY)]
    num_retrieved = sum(len(node.token_ids) for node in response if node.origin is Origin.BUFFER)
    num_response = sum(len(node.token_ids) for node in response)
    return num_retrieved / num_response if num_response else 0.0


class RetrievalSettings(Settings):
    """When and what a hybrid rollout retrieves.

    ``probability`` before every turn but the first, moving to ``final_probability`` by ``schedule`` over the
    run. ``scope``: the whole buffer, the same task's trajectories, or all others. ``noise``: the share of
    retrievals that take a random step instead of the nearest. ``mode`` "execute" replays the step's action in
    the live environment and shows the real observation. ``level`` "trajectory" inserts the retrieved step
    with all non-terminal steps that followed it, "segment" with a random number of them (none to all, equally
    likely). ``form`` "tags" shows it inside ``<retrieve>`` (the paper); "turn" as the policy's own turns
    look, for the tag protocol alone (docs/algorithms/rapo.md). ``min_similarity`` (None: the nearest step
    however far) is the least cosine of the history and a step's key: near 1, a step is only shown to a
    rollout that stands where the step was taken.
    """

    probability: float = Field(0.5, ge=0, le=1)
    final_probability: float | None = Field(None, ge=0, le=1)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    scope: Literal["all", "same_task", "other_tasks"] = "all"
    include_terminal: bool = False
    noise: float = Field(0.0, ge=0, le=1)
    mode: Literal["context", "execute"] = "context"
    level: Literal["step", "segment", "trajectory"] = "step"
    form: Literal["tags", "turn"] = "tags"
    min_similarity: float | None = Field(None, ge=-1, le=1)

    @model_validator(mode="after")
    def _validate(self) -> "RetrievalSettings":
        if self.mode == "execute" and self.level != "step":
            raise ValueError(f"mode = execute replays one action: level = {self.level} has no meaning there")
        if (self.schedule == "constant") != (self.final_probability is None):
            raise ValueError("final_probability belongs to schedule = linear or cosine and to no other")
        return self


def scheduled_probability(settings: RetrievalSettings, training_step: int, num_training_steps: int) -> float:
    """The retrieval probability of a training step (0-based) of ``num_training_steps``."""
    if settings.final_probability is None or num_training_steps <= 1:
        return settings.probability
    progress = min(1.0, training_step / (num_training_steps - 1))
    if settings.schedule == "cosine":
        progress = 0.5 - 0.5 * math.cos(math.pi * progress)
    return settings.probability + (settings.final_probability - settings.probability) * progress


class RetrievalHook(Hook):
    """Before every turn of a hybrid rollout but its first, maybe splices a retrieved step; a policy turn
    always follows.
    """

    def __init__(
        self, settings: RetrievalSettings, *, buffer: StepTraceBuffer, num_training_steps: int
    ) -> None:
        self.settings = settings
        self.buffer = buffer
        self.num_training_steps = num_training_steps
        self.counts: Counter[str] = Counter()

    def before_turn(self, state: EpisodeState) -> Sequence[Splice | Attempt]:
        """A retrieved step or nothing. Step 0 is always on-policy."""
        if not has_part(state.mode, HYBRID) or state.turn == 0:
            return ()
        # A retry of the rollout draws the same: the stream is named by step, task, rollout and turn.
        random = state.stream("retrieval")
        self.counts["opportunities"] += 1
        if random.random() >= scheduled_probability(
            self.settings, state.training_step, self.num_training_steps
        ):
            return ()
        hit = self._find(state, random_step=random.random() < self.settings.noise)
        if hit is None:
            self.counts["empty"] += 1
            return ()
        self.counts["retrievals"] += 1
        return [self._execute(hit) if self.settings.mode == "execute" else self._show(state, hit)]

    def _find(self, state: EpisodeState, *, random_step: bool) -> Hit | None:
        """The step whose key is nearest to the history of the rollout's own steps, or a random one, that it
        was not shown yet.
        """
        inserted = _inserted_step_ids(state)
        seen = self._record_texts(inserted)
        allowed = StepFilter(
            scope=self.settings.scope,
            task_key=state.task.key,
            include_terminal=self.settings.include_terminal,
            exclude=inserted,
        )
        if random_step:
            return self._draw(allowed, seen, state.stream("retrieval noise"))
        vectors = self.buffer.embedder.embed([history_text(state.task.question, state.steps)])
        num_hits, least = 1, self.settings.min_similarity
        while True:
            hits = self.buffer.query_vectors(vectors, [allowed], k=num_hits)[0]
            similar = [hit for hit in hits if hit.similarity >= (-math.inf if least is None else least)]
            fresh = next((hit for hit in similar if _text_pair(hit.record) not in seen), None)
            if fresh is not None or len(similar) < num_hits:
                return fresh
            # Equal words may lie under many ids, so excluding the ids that were shown is not enough.
            num_hits *= 4

    def _draw(
        self, allowed: StepFilter, seen: Collection[tuple[str, str]], random: np.random.Generator
    ) -> Hit | None:
        while (record := self.buffer.sample(allowed, random)) is not None:
            if _text_pair(record) not in seen:
                # Nobody measured it; the mean over similarities leaves NaN out.
                return Hit(record=record, similarity=float("nan"))
            allowed = replace(allowed, exclude=allowed.exclude | {record.step_id})
        return None

    def _record_texts(self, step_ids: Collection[int]) -> set[tuple[str, str]]:
        return {_text_pair(record) for record in self.buffer.steps(sorted(step_ids))}

    def _show(self, state: EpisodeState, hit: Hit) -> Splice:
        """Mode ``context``: the stored observation stands in, no tool is called. It does not join the
        history: it did not happen.
        """
        records = [hit.record, *self._later_steps(state, hit.record)]
        text = "".join(join_observation(record.text, record.observation) for record in records)
        saved = sum(bool(record.observation) for record in records)
        return Splice(
            origin=Origin.BUFFER,
            text=self._format(text),
            metadata=self._metadata(hit, [record.step_id for record in records], num_calls_saved=saved),
        )

    def _later_steps(self, state: EpisodeState, first: StepRecord) -> list[StepRecord]:
        """The steps of its trajectory that are shown with ``first``, as ``level`` has it."""
        if self.settings.level == "step":
            return []
        records: list[StepRecord] = []
        seen = self._record_texts(_inserted_step_ids(state)) | {_text_pair(first)}
        for record in self.buffer.trajectory(first.trajectory_id)[first.step_index + 1 :]:
            if (self.settings.include_terminal or not record.is_terminal) and _text_pair(record) not in seen:
                records.append(record)
                seen.add(_text_pair(record))
        if self.settings.level == "segment":
            del records[int(state.stream("retrieval length").integers(len(records) + 1)) :]
        return records

    def _execute(self, hit: Hit) -> Attempt:
        """Mode ``execute``: do the retrieved action; when the environment refuses it, go on on-policy and
        count that.
        """

        def then(result: StepResult) -> Splice | None:
            if not result.carried_out:
                self.counts["refused"] += 1
                return None
            observation = result.text
            metadata = self._metadata(hit, [hit.record.step_id], num_calls_saved=0) | {
                "num_tool_calls": result.num_tool_calls
            }
            step = Step(text=hit.record.text, observation=observation, is_terminal=result.done)
            text = self._format(join_observation(hit.record.text, observation))
            return Splice(origin=Origin.BUFFER, text=text, step=step, metadata=metadata)

        return Attempt(action=hit.record.text, then=then)

    def _metadata(self, hit: Hit, step_ids: list[int], *, num_calls_saved: int) -> dict[str, object]:
        return {
            "step_ids": step_ids,
            "similarity": hit.similarity,
            "agent": hit.record.agent,
            "source_task": hit.record.task_key,
            "source": f"{hit.record.trajectory_id}#{hit.record.step_index}",
            "num_calls_saved": num_calls_saved,
            "memory_version": self.buffer.revision,
        }

    def _format(self, text: str) -> str:
        return format_retrieved(text) if self.settings.form == "tags" else text

    def snapshot(self) -> int:
        """The buffer's revision: a copy reads the same file."""
        return self.buffer.revision

    def restore(self, snapshot: int) -> None:
        """Show the buffer as it was at that revision, and count from 0. Raises CheckpointError where the file
        does not hold it.
        """
        if self.buffer.revision != snapshot:
            old = self.buffer
            self.buffer = StepTraceBuffer(old.path, old.embedder, mode="read", revision=snapshot)
            old.close()
        self.counts = Counter()

    def gathered(self) -> dict[str, int]:
        """The counts."""
        return dict(self.counts)

    def absorb(self, gathered: Mapping[str, int]) -> None:
        """Count what a copy has counted."""
        self.counts.update(gathered)


def _inserted_step_ids(state: EpisodeState) -> frozenset[int]:
    """Steps that the rollout has been shown already."""
    nodes = [node for node in state.trace.path(state.last_node.node_id) if node.origin is Origin.BUFFER]
    return frozenset(step_id for node in nodes for step_id in node.metadata["step_ids"])


def _text_pair(record: StepRecord) -> tuple[str, str]:
    """Identity of a step by its texts: a buffer holds equal steps of sibling trajectories."""
    return record.text, record.observation
