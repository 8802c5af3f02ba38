"""The hybrid-policy rollout of RAPO (Eq. 3-4, Algorithm 1) as a hook of the one loop."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field, model_validator

from outrider.config import Settings
from outrider.environments.base import StepResult
from outrider.environments.families import is_inline, is_stateful
from outrider.memory.steps.buffer import StepTraceBuffer
from outrider.memory.steps.history import history_text
from outrider.memory.steps.records import Hit, StepFilter, StepRecord
from outrider.rollout.hooks import Attempt, EpisodeState, Splice, format_retrieved, join_observation
from outrider.rollout.modes import HYBRID, has_part
from outrider.trace import Trace
from outrider.types import Origin, Step

if TYPE_CHECKING:
    from outrider.train.settings import RunSettings


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


def require_showable(retrieval: RetrievalSettings, run: "RunSettings") -> None:
    """Raises ValueError for retrieved steps that the environment cannot take, or show."""
    if retrieval.mode == "execute" and not is_stateful(run.environment):
        raise ValueError(
            "retrieval.mode = execute needs a stateful environment "
            "(scienceworld, webshop, textworld, house, alfworld)"
        )
    if retrieval.form == "turn" and not is_inline(run.environment):
        raise ValueError(
            "retrieval.form = turn needs the tag protocol (factbook, tools): elsewhere results are messages"
        )


def scheduled_probability(settings: RetrievalSettings, training_step: int, num_training_steps: int) -> float:
    """The retrieval probability of a training step (0-based) of ``num_training_steps``."""
    if settings.final_probability is None or num_training_steps <= 1:
        return settings.probability
    progress = min(1.0, training_step / (num_training_steps - 1))
    if settings.schedule == "cosine":
        progress = 0.5 - 0.5 * math.cos(math.pi * progress)
    return settings.probability + (settings.final_probability - settings.probability) * progress


class RetrievalHook:
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

    def after_turn(self, state: EpisodeState) -> None:
        """Nothing to do."""

    def after_group(self, trace: Trace) -> None:
        """Nothing to do: the trainer feeds an evolving buffer, so that it can be rolled back with a
        checkpoint.
        """

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
