"""Retrieval (RAPO, arXiv 2603.03078): the reward of retrieved steps, its effect on advantages and ratios
(Eq. 2 and 5-10), and the retrieval hook (Eq. 3-4, Algorithm 1).
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
from outrider.memory.step_store import Hit, StepFilter, StepRecord, history_text, question_key
from outrider.memory.tips import SIMILARITY_DIGITS
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
from outrider.trace import Node, Trace, without_retrieved
from outrider.types import Origin, Step, Task

_SHARPNESS = 2.0  # the factor 2 in the gain g = tanh(2 * change)
_ENTROPY_FLOOR = (
    1e-3  # nats; lower bound of the denominator: defines H_b = 0 and damps changes between tiny entropies
)
# float32 log-softmax can return a slightly negative entropy; a larger deviation is an engine fault
_ENTROPY_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalReward:
    """The retrieval reward ``value`` (Z_ret) of one rollout, and its components.

    ``gains`` and ``rewards`` are g and Z of every scored retrieval, in order. ``num_without_after`` counts
    retrievals without a later on-policy step (the budget was exhausted), which the mean excludes.
    ``num_floored`` counts scored retrievals whose entropy before was below the floor, so that their relative
    change is damped.
    """

    value: float
    gains: tuple[float, ...]
    rewards: tuple[float, ...]
    num_without_after: int
    num_floored: int


def step_entropy_per_step(token_entropies: Sequence[float] | Float64Array) -> float:
    """Return the mean entropy in nats over the tokens that the policy sampled in one step (Eq. 2).

    Raises:
        ValueError: if the step has no tokens, or an entropy is negative or not finite.
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
    """Return the mean of ``Z = g * H_b`` over the retrievals of one rollout (Eq. 5-7).

    The gain ``g = tanh(2 * (H_b - H_a) / H_b)`` is positive if the step entropy falls across the retrieval. A
    rollout without a scored retrieval gets 0.

    Args:
        entropies_before: [R] entropies of the on-policy step before each retrieval.
        entropies_after: [R] entropies of the on-policy step after it; None or NaN if the rollout was cut.
        quality: False sets g to 1 (ablation).
        timing: replaces the factor H_b by 1/H_b (floored) or by 1 (ablations).
        sign: ``increase`` rewards a rise of the entropy (ablation).
    """
    gains: list[float] = []
    rewards: list[float] = []
    num_without_after = num_floored = 0
    for raw_before, raw_after in zip(entropies_before, entropies_after, strict=True):
        if raw_after is None or math.isnan(raw_after):
            # excluded instead of scored 0: an exhausted budget is no evidence about the retrieval
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
    """Return ``A = (1 + a * A_ret) * A_acc`` [N] (Eq. 10), and the factors [N].

    ``A_ret`` normalises the retrieval rewards over the whole group, including the zeros of on-policy rollouts
    (Eq. 9). The sum of A over the group is in general not 0. A negative factor flips the sign of the outcome
    advantage. With the sample std, this requires (N - 1) / sqrt(N) > 1 / a, for example N >= 27 at a = 0.2.
    Factors are not clamped; the metric ``retrieval/share_factor_negative`` reports negative ones.

    Args:
        outcome: the outcome advantages A_acc.
        rewards: [N] retrieval rewards; None for rollouts without an outcome.
        weight: a of Eq. 10; with 0 all factors are exactly 1.
    """
    retrieval = group_normalized_advantages_per_rollout(returns=rewards)
    factors = np.asarray(1.0 + weight * retrieval.values, dtype=np.float64)
    turns = outcome.turns
    if turns is not None:
        turns = tuple(factor * own for factor, own in zip(factors, turns, strict=True))
    return replace(outcome, values=factors * outcome.values, turns=turns), factors


def _checked_entropy(entropy: float) -> float:
    if not -_ENTROPY_ROUNDING <= entropy < math.inf:
        raise ValueError(f"not an entropy: {entropy}")
    return max(entropy, 0.0)


class RetrievalAdvantageSettings(Settings):
    """Effect of retrieval on advantages and ratios.

    ``num_hybrid`` rollouts of a group may retrieve. ``advantage_weight`` is a of Eq. 10 and ``ratio_weight``
    m of Eq. 8; 0 disables either. ``quality``, ``timing`` and ``sign`` configure the retrieval reward.
    """

    num_hybrid: int = Field(4, ge=0)
    """Number of rollouts of a group that may retrieve."""
    advantage_weight: float = Field(0.2, ge=0)
    """Weight a of the retrieval reward in the advantage (Eq. 10; 0: off)."""
    ratio_weight: float = Field(0.05, ge=0)
    """Weight m of the retrieved share in the ratio (Eq. 8; 0: off)."""
    quality: bool = True
    """Whether the retrieval reward depends on the change of the entropy (Eq. 6)."""
    timing: Literal["entropy", "inverse_entropy", "none"] = "entropy"
    """Factor of the retrieval reward: the entropy before the retrieval, its inverse, or 1 (ablations)."""
    sign: Literal["decrease", "increase"] = "decrease"
    """Whether a decrease or an increase of the entropy is rewarded (ablation)."""

    @model_validator(mode="after")
    def _rewards_something(self) -> "RetrievalAdvantageSettings":
        if not self.quality and self.timing == "none":
            raise ValueError(
                "quality = false with timing = none is no retrieval reward: set advantage_weight = 0 instead"
            )
        if not self.quality and self.sign == "increase":
            raise ValueError("sign changes the quality term, and quality = false: remove sign")
        return self


def retrieval_advantages(
    trace: Trace, outcome: RolloutAdvantages, settings: RetrievalAdvantageSettings
) -> tuple[RolloutAdvantages, list[float], dict[str, list[float]]]:
    """Apply the retrieval reward to the outcome advantages of a group.

    Returns:
        ``(1 + a A_ret) A_acc`` of every rollout (Eq. 10), the scales ``1 + m F_ret`` of the importance ratios
        (Eq. 8), and raw values of the metrics, which the trainer averages over the step.
    """
    rollouts = list(trace.rollouts())
    rewards = [retrieval_reward(path, settings) for _, path in rollouts]
    scored = [
        # None for rollouts without an outcome, so that both advantages are normalised over the same rollouts
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
    """Return Z_ret of one rollout (Eq. 5-7) from the policy entropies around each retrieved node."""
    around = entropies_around_retrievals(path)
    return retrieval_reward_per_rollout(
        entropies_before=[before for before, _ in around],
        entropies_after=[after for _, after in around],
        quality=settings.quality,
        timing=settings.timing,
        sign=settings.sign,
    )


def entropies_around_retrievals(path: Sequence[Node]) -> list[tuple[float, float | None]]:
    """Return (H_b, H_a) of every retrieval: the entropies of the policy steps before and after it.

    H_a is None if the rollout was cut. Consecutive retrieved nodes (trajectory-level retrieval) count as one
    retrieval.
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
    """Return ``F_ret``: retrieved tokens over all response tokens of a rollout, without the prompt (Eq. 8).

    The environment's answer to an executed step counts as retrieved.
    Tips are not part of the response, so the scale is the same whether the update is with or without tips.
    """
    response = [node for node in path if node.origin not in (Origin.PROMPT, Origin.MEMORY)]
    num_response = sum(len(node.token_ids) for node in response)
    num_own = sum(len(node.token_ids) for node in without_retrieved(response))
    return (num_response - num_own) / num_response if num_response else 0.0


class RetrievalSettings(Settings):
    """When and what a hybrid rollout retrieves.

    ``probability``: probability of a retrieval before every turn except the first. It changes to
    ``final_probability`` over the run, by ``schedule``. ``scope``: retrieve from the whole buffer, the
    trajectories of the same task, or those of all other tasks. ``noise``: share of retrievals that use a
    random step instead of the nearest. ``mode`` "execute" replays the action of the step in the live
    environment and inserts the real observation. ``level`` "trajectory" inserts the retrieved step with all
    non-terminal steps after it, "segment" with a uniformly random number of them (including none and all).
    ``form`` "tags" inserts it inside ``<retrieve>`` (the paper), "turn" as if the policy had written it, for
    the tag protocol and for execution (docs/algorithms/rapo.md). ``min_similarity``: minimum cosine
    between the history and the key of a step (None: no minimum). For example, close to 1 a rollout only
    retrieves steps that were taken in a situation like its own.
    """

    probability: float = Field(0.5, ge=0, le=1)
    final_probability: float | None = Field(None, ge=0, le=1)
    """Probability at the end of the run, which ``schedule`` approaches."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the probability changes from ``probability`` to ``final_probability`` over the run."""
    schedule_steps: int | None = Field(None, ge=1)
    """Number of training steps of the schedule (None: ``train.num_steps``); later steps have
    ``final_probability``. Set it if ``train.max_policy_tokens`` ends the run earlier.
    """
    scope: Literal["all", "same_task", "other_tasks"] = "all"
    include_terminal: bool = False
    """Whether the last step of a trajectory, which contains the answer, can be retrieved."""
    noise: float = Field(0.0, ge=0, le=1)
    mode: Literal["context", "execute"] = "context"
    level: Literal["step", "segment", "trajectory"] = "step"
    form: Literal["tags", "turn"] = "tags"
    min_similarity: float | None = Field(None, ge=-1, le=1)

    @model_validator(mode="after")
    def _validate(self) -> "RetrievalSettings":
        if self.mode == "execute" and self.level != "step":
            raise ValueError("mode = execute replays one action: set level = step")
        if (self.schedule == "constant") != (self.final_probability is None):
            raise ValueError("final_probability belongs to schedule = linear or cosine and to no other")
        if self.schedule == "constant" and self.schedule_steps is not None:
            raise ValueError("schedule_steps belongs to schedule = linear or cosine and to no other")
        return self


def scheduled_probability(settings: RetrievalSettings, training_step: int, num_training_steps: int) -> float:
    """Return the retrieval probability of a training step (0-based)."""
    num_training_steps = settings.schedule_steps or num_training_steps
    if settings.final_probability is None:
        return settings.probability
    progress = min(1.0, training_step / max(num_training_steps - 1, 1))
    if settings.schedule == "cosine":
        progress = 0.5 - 0.5 * math.cos(math.pi * progress)
    return settings.probability + (settings.final_probability - settings.probability) * progress


class RetrievalHook(Hook):
    """Inserts a retrieved step, with the scheduled probability, before every turn of a hybrid rollout except
    the first. A policy turn follows unless the step ends the rollout.
    """

    def __init__(
        self, settings: RetrievalSettings, *, buffer: StepTraceBuffer, num_training_steps: int
    ) -> None:
        self.settings = settings
        self.buffer = buffer
        self.num_training_steps = num_training_steps
        self.counts: Counter[str] = Counter()
        # The newest turn and the counts of the current try of every rollout of the groups in progress.
        self._tries: dict[tuple[int, str, int], tuple[int, Counter[str]]] = {}

    def before_turn(self, state: EpisodeState) -> Sequence[Splice | Attempt]:
        """Return a retrieved step or nothing. Step 0 is always on-policy."""
        if not has_part(state.mode, HYBRID):
            return ()
        self._begin_turn(state)
        if state.turn == 0:
            return ()
        # The random stream depends on step, task, rollout and turn only: a retried rollout draws the same.
        random = state.stream("retrieval")
        self._count(state, "opportunities")
        if random.random() >= scheduled_probability(
            self.settings, state.training_step, self.num_training_steps
        ):
            return ()
        hit = self._find(state, random_step=random.random() < self.settings.noise)
        if hit is None:
            self._count(state, "empty")
            return ()
        self._count(state, "retrievals")
        return [self._execute(state, hit) if self.settings.mode == "execute" else self._show(state, hit)]

    def _begin_turn(self, state: EpisodeState) -> None:
        """Take back what an earlier try of the rollout counted, if a fault ended it: its turns begin anew."""
        key = (state.training_step, state.task.key, state.rollout)
        newest, counted = self._tries.get(key, (-1, Counter()))
        if state.turn <= newest:
            self.counts -= counted
            counted = Counter()
        self._tries[key] = (state.turn, counted)

    def _count(self, state: EpisodeState, name: str) -> None:
        self.counts[name] += 1
        self._tries[state.training_step, state.task.key, state.rollout][1][name] += 1

    def after_group(self, trace: Trace) -> None:
        """Forget the tries of the group's rollouts."""
        self._tries = {key: value for key, value in self._tries.items() if key[1] != trace.task.key}

    def _find(self, state: EpisodeState, *, random_step: bool) -> Hit | None:
        """Return the nearest step to the history of the rollout's own steps, or a random step. Steps that the
        rollout has already seen are excluded.
        """
        inserted = _inserted_step_ids(state)
        if random_step:
            allowed, seen = self._filter(state.task, inserted), self._record_texts(inserted)
            return self._draw(allowed, seen, state.stream("retrieval noise"))
        return self._nearest(state.task, state.steps, inserted)

    def _filter(self, task: Task, excluded: frozenset[int]) -> StepFilter:
        return StepFilter(
            scope=self.settings.scope,
            task_key=task.key,
            other_key=question_key(task.question),  # that of imported chats without keys
            include_terminal=self.settings.include_terminal,
            exclude=excluded,
        )

    def nearest_steps(self, task: Task, steps: Sequence[Step], shown: Collection[int]) -> list[StepRecord]:
        """Return what mode ``context`` inserts after ``steps``, without ``probability`` and ``noise``. With
        ``level`` "segment", these are all later steps. ``shown`` are the ids of earlier results.
        """
        excluded = frozenset(shown)
        hit = self._nearest(task, steps, excluded)
        return [] if hit is None else [hit.record, *self._later_steps(hit.record, excluded)]

    def _nearest(self, task: Task, steps: Sequence[Step], excluded: frozenset[int]) -> Hit | None:
        seen, allowed = self._record_texts(excluded), self._filter(task, excluded)
        vectors = self.buffer.embedder.embed([history_text(task.question, steps)])
        num_hits, least = 1, self.settings.min_similarity
        # equal situations have a cosine of 1 up to rounding only
        least = -math.inf if least is None else least - 10**-SIMILARITY_DIGITS
        while True:
            hits = self.buffer.query_vectors(vectors, [allowed], k=num_hits)[0]
            similar = [hit for hit in hits if hit.similarity >= least]
            fresh = next((hit for hit in similar if _text_pair(hit.record) not in seen), None)
            if fresh is not None or len(similar) < num_hits:
                return fresh
            # Different ids may have equal text, so excluding the ids that were shown is not enough.
            num_hits *= 4

    def _draw(
        self, allowed: StepFilter, seen: Collection[tuple[str, str]], random: np.random.Generator
    ) -> Hit | None:
        while (record := self.buffer.sample(allowed, random)) is not None:
            if _text_pair(record) not in seen:
                # A random step has no similarity; the metric's mean excludes NaN.
                return Hit(record=record, similarity=float("nan"))
            allowed = replace(allowed, exclude=allowed.exclude | {record.step_id})
        return None

    def _record_texts(self, step_ids: Collection[int]) -> set[tuple[str, str]]:
        return {_text_pair(record) for record in self.buffer.steps(sorted(step_ids))}

    def _show(self, state: EpisodeState, hit: Hit) -> Splice:
        """Mode ``context``: insert the stored observation without calling a tool. The step does not become
        part of the history, because it did not happen in this episode.
        """
        later = self._later_steps(hit.record, _inserted_step_ids(state))
        if self.settings.level == "segment":
            del later[int(state.stream("retrieval length").integers(len(later) + 1)) :]
        records = [hit.record, *later]
        text = "".join(join_observation(record.text, record.observation) for record in records)
        saved = sum(bool(record.observation) for record in records)
        return Splice(
            origin=Origin.BUFFER,
            text=self._format(text),
            metadata=self._metadata(hit, [record.step_id for record in records], num_calls_saved=saved),
        )

    def _later_steps(self, first: StepRecord, excluded: Collection[int]) -> list[StepRecord]:
        """Return the later steps of the trajectory that ``level`` may insert with ``first``."""
        if self.settings.level == "step":
            return []
        records: list[StepRecord] = []
        seen = self._record_texts(excluded) | {_text_pair(first)}
        for record in self.buffer.trajectory(first.trajectory_id)[first.step_index + 1 :]:
            if (self.settings.include_terminal or not record.is_terminal) and _text_pair(record) not in seen:
                records.append(record)
                seen.add(_text_pair(record))
        return records

    def _execute(self, state: EpisodeState, hit: Hit) -> Attempt:
        """Mode ``execute``: execute the retrieved action. If the environment rejects it, continue on-policy
        and count the rejection.
        """

        def then(result: StepResult) -> Splice | None:
            if not result.carried_out:
                self._count(state, "refused")
                return None
            observation = result.text
            metadata = self._metadata(hit, [hit.record.step_id], num_calls_saved=0) | {
                "num_tool_calls": result.num_tool_calls
            }
            step = Step(text=hit.record.text, observation=observation, is_terminal=result.done)
            text = self._format(join_observation(hit.record.text, observation))
            return Splice(origin=Origin.BUFFER, text=text, step=step, metadata=metadata)

        return Attempt(action=hit.record.text, then=then, as_turn=self.settings.form == "turn")

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
        """Return the buffer's revision. A copy in another process reads the same file."""
        return self.buffer.revision

    def restore(self, snapshot: int) -> None:
        """Set the buffer to that revision and reset the counts.

        Raises:
            CheckpointError: if the buffer's file does not contain the revision.
        """
        if self.buffer.revision != snapshot:
            old = self.buffer
            self.buffer = StepTraceBuffer(old.path, old.embedder, mode="read", revision=snapshot)
            old.close()
        self.counts = Counter()
        self._tries = {}

    def gathered(self) -> dict[str, int]:
        """Return the counts."""
        return dict(self.counts)

    def absorb(self, gathered: Mapping[str, int]) -> None:
        """Add the counts of a copy."""
        self.counts.update(gathered)


def _inserted_step_ids(state: EpisodeState) -> frozenset[int]:
    """Return the ids of the steps that the rollout has already been shown."""
    nodes = [node for node in state.trace.path(state.last_node.node_id) if node.origin is Origin.BUFFER]
    return frozenset(step_id for node in nodes for step_id in node.metadata["step_ids"])


def _text_pair(record: StepRecord) -> tuple[str, str]:
    """Identify a step by its texts: sibling trajectories in a buffer have equal steps under different ids."""
    return record.text, record.observation
