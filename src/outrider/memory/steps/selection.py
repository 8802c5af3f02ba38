"""Which offered trajectories enter the buffer, and which leave it (the reward-aware filter of RAPO, section
3.1).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.errors import DataError
from outrider.memory.embedder import replace_surrogates
from outrider.memory.steps.history import Candidate, TokenCounter, history_text, prompt_question, select_best
from outrider.memory.steps.records import BuildReport
from outrider.memory.steps.store import NewTrajectory, StepStore
from outrider.types import Step, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The decision for one task: what to add (with the keys of its steps), rows to remove, and why others
    stay out.
    """

    added: tuple[NewTrajectory, ...]
    histories: tuple[tuple[str, ...], ...]
    removed: tuple[int, ...]
    num_present: int
    num_empty: int
    num_below_min_reward: int
    num_outranked: int
    num_repaired_texts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A trajectory with well-formed texts and the keys of its steps."""

    item: NewTrajectory
    histories: tuple[str, ...]
    num_repaired_texts: int


def build_report(
    selections: Sequence[Selection], num_different: int, *, num_duplicate: int, revision: int
) -> BuildReport:
    """Sums up the decisions for all offered tasks."""
    return BuildReport(
        num_offered=num_different + num_duplicate,
        num_inserted=sum(len(chosen.added) for chosen in selections),
        num_steps_inserted=sum(len(item.steps) for chosen in selections for item in chosen.added),
        num_present=sum(chosen.num_present for chosen in selections),
        num_duplicate=num_duplicate,
        num_empty=sum(chosen.num_empty for chosen in selections),
        num_below_min_reward=sum(chosen.num_below_min_reward for chosen in selections),
        num_outranked=sum(chosen.num_outranked for chosen in selections),
        num_removed=sum(len(chosen.removed) for chosen in selections),
        num_repaired_texts=sum(chosen.num_repaired_texts for chosen in selections),
        revision=revision,
    )


def check_trajectories(
    trajectories: Iterable[Trajectory], store: StepStore
) -> tuple[dict[str, list[Trajectory]], int]:
    """Offered trajectories by task in order of arrival, and the number of ids that came twice.

    Raises :class:`~outrider.errors.DataError` for a reward that is not finite, a negative token count, a key
    or id that is not valid text, and an id that belongs to two tasks.
    """
    task_trajectories: dict[str, list[Trajectory]] = {}
    task_keys: dict[str, str] = {}
    num_duplicate = 0
    for trajectory in trajectories:
        name = f"trajectory {trajectory.trajectory_id!r}"
        if not math.isfinite(trajectory.reward):
            raise DataError(f"{name}: reward is {trajectory.reward}, must be finite")
        if not 0 <= trajectory.num_tokens < 2**63:
            raise DataError(f"{name}: num_tokens is {trajectory.num_tokens}, must be a count")
        for text in (trajectory.trajectory_id, trajectory.task_key, trajectory.agent):
            if replace_surrogates(text) != text:
                raise DataError(f"{name}: {text!r} is not valid text")
        owners = [
            stored.task_key for stored in store.live_trajectories(trajectory_id=trajectory.trajectory_id)
        ]
        first = task_keys.get(trajectory.trajectory_id)
        for owner in [*owners, first or trajectory.task_key]:
            if owner != trajectory.task_key:
                raise DataError(f"{name}: belongs to task {owner!r} and to task {trajectory.task_key!r}")
        if first is not None:
            num_duplicate += 1
            continue
        task_keys[trajectory.trajectory_id] = trajectory.task_key
        task_trajectories.setdefault(trajectory.task_key, []).append(trajectory)
    return task_trajectories, num_duplicate


def select(
    offered: Sequence[Trajectory],
    store: StepStore,
    *,
    num_best: int | None,
    min_reward: float | None,
    questions: Mapping[str, str] | None,
    count_tokens: TokenCounter | None,
) -> Selection:
    """Rank the offered trajectories of one task together with the stored ones and keep the best."""
    task_key = offered[0].task_key
    stored = store.live_trajectories(task_key=task_key)
    known = {trajectory.trajectory_id for trajectory in stored}
    fresh = [trajectory for trajectory in offered if trajectory.trajectory_id not in known]
    filled = [trajectory for trajectory in fresh if trajectory.steps]
    good = [trajectory for trajectory in filled if min_reward is None or trajectory.reward >= min_reward]
    prepared = [_prepare(trajectory, questions, count_tokens) for trajectory in good]
    # Stored ones come first in the order, by row; rows are given in the same order to those that enter.
    candidates = [
        Candidate(reward=t.reward, num_tokens=t.num_tokens, order=order) for order, t in enumerate(stored)
    ]
    candidates += [
        Candidate(reward=p.item.reward, num_tokens=p.item.num_tokens, order=order)
        for order, p in enumerate(prepared, start=len(stored))
    ]
    retained = select_best(candidates, num_best)
    entering = [p for order, p in enumerate(prepared, start=len(stored)) if order in retained]
    return Selection(
        added=tuple(p.item for p in entering),
        histories=tuple(p.histories for p in entering),
        removed=tuple(t.row for order, t in enumerate(stored) if order not in retained),
        num_present=len(offered) - len(fresh),
        num_empty=len(fresh) - len(filled),
        num_below_min_reward=len(filled) - len(good),
        num_outranked=len(prepared) - len(entering),
        num_repaired_texts=sum(p.num_repaired_texts for p in entering),
    )


def _prepare(
    trajectory: Trajectory, questions: Mapping[str, str] | None, count_tokens: TokenCounter | None
) -> _Prepared:
    known_question = None if questions is None else questions.get(trajectory.task_key)
    question = prompt_question(trajectory.prompt) if known_question is None else known_question
    before = [question, *(text for step in trajectory.steps for text in (step.text, step.observation))]
    after = [replace_surrogates(text) for text in before]
    steps = tuple(
        Step(text=text, observation=observation, is_terminal=step.is_terminal)
        for step, text, observation in zip(trajectory.steps, after[1::2], after[2::2], strict=True)
    )
    counts = tuple(
        count_tokens(step.text) + count_tokens(step.observation) if count_tokens else 0 for step in steps
    )
    written = sum(count_tokens(step.text) for step in steps) if count_tokens else 0
    item = NewTrajectory(
        trajectory_id=trajectory.trajectory_id,
        task_key=trajectory.task_key,
        agent=trajectory.agent,
        question=after[0],
        reward=trajectory.reward,
        num_tokens=trajectory.num_tokens or written,
        steps=steps,
        step_num_tokens=counts,
    )
    return _Prepared(
        item=item,
        histories=tuple(history_text(after[0], steps[:index]) for index in range(len(steps))),
        num_repaired_texts=sum(a != b for a, b in zip(before, after, strict=True)),
    )
