"""The step-trace buffer: off-policy steps, retrieved by the history before them, with a reward-aware filter
(RAPO, arXiv 2603.03078, section 3.1 and Eq. 3), and the exact search by cosine over unit vectors in memory.

Shape letters: N rows of the index, Q queries, D dimensions.
"""

import math
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CheckpointError, ConfigError, DataError
from outrider.memory.embedders import Embedder, Vectors, replace_surrogates
from outrider.memory.step_store import (
    BufferStats,
    BuildReport,
    Hit,
    NewTrajectory,
    StepFilter,
    StepRecord,
    StepStore,
    TokenCounter,
    history_text,
    prompt_question,
    select_best,
)
from outrider.types import Step, Trajectory

Rows: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

_QUERY_BLOCK = 32  # bounds the score matrix: 32 x 169,489 float32 are 22 MB
_RESCORE_BLOCK = 4096
_SPARSE = 8  # with under one row in eight allowed, gathering them costs less than scoring all


# Rows and cosines of a query, best first.
Matches: TypeAlias = tuple[Rows, NDArray[np.float64]]


class GrowingMatrix:
    """Append-only rows; owns ``rows_ND``. Earlier views remain valid and unchanged."""

    def __init__(self, rows_ND: NDArray[Any]) -> None:
        self._rows = rows_ND
        self._length = len(rows_ND)

    def append(self, rows_ND: NDArray[Any]) -> None:
        """Add rows at the end; amortised constant time per row."""
        end = self._length + len(rows_ND)
        if end > len(self._rows):
            shape = (max(end, len(self._rows) * 3 // 2), self._rows.shape[1])
            grown = np.empty(shape, self._rows.dtype)
            grown[: self._length] = self._rows[: self._length]
            self._rows = grown
        self._rows[self._length : end] = rows_ND
        self._length = end

    def view(self) -> NDArray[Any]:
        """Return the rows so far, ``[N, D]``, without a copy."""
        return self._rows[: self._length]


def search(
    vectors_ND: NDArray[np.float32],
    queries_QD: NDArray[np.float32],
    allowed: Sequence[Mask | None],
    *,
    k: int = 1,
) -> list[Matches]:
    """Return the ``k`` rows with the highest cosine for every query. Exact; the lower row wins ties.

    Rows and queries must be unit vectors. ``allowed`` is one boolean mask ``[N]`` per query (None: all rows).
    Float32 products only select candidates. Those within rounding error of the k-th best are scored again in
    float64, so the result depends neither on the BLAS library nor on which queries share a call.
    """
    if len(allowed) != len(queries_QD):
        raise ValueError(f"{len(queries_QD)} queries but {len(allowed)} masks")
    if k < 1:
        raise ValueError(f"k is {k}, must be at least 1")
    results: dict[int, Matches] = {}
    dense: list[int] = []
    for query, mask in enumerate(allowed):
        if mask is not None and np.count_nonzero(mask) * _SPARSE < len(vectors_ND):
            rows = np.flatnonzero(mask)
            results[query] = _best(
                vectors_ND, queries_QD[query], vectors_ND[rows] @ queries_QD[query], rows, k
            )
        else:
            dense.append(query)
    for start in range(0, len(dense), _QUERY_BLOCK):
        block = dense[start : start + _QUERY_BLOCK]
        for query, scores_N in zip(block, queries_QD[block] @ vectors_ND.T, strict=True):
            mask = allowed[query]
            if mask is not None:
                # Mask after the product, so that one product serves all queries of a block.
                scores_N[~mask] = -np.inf
            results[query] = _best(vectors_ND, queries_QD[query], scores_N, None, k)
    return [results[query] for query in range(len(queries_QD))]


def _best(
    vectors_ND: NDArray[np.float32],
    query_D: NDArray[np.float32],
    scores: NDArray[np.float32],
    rows: Rows | None,
    k: int,
) -> Matches:
    """Select the best ``k`` of approximately scored rows.

    ``rows`` None: score i belongs to row i. A score of -inf marks a row that is not allowed.
    """
    if not len(scores):
        return np.empty(0, np.int64), np.empty(0)
    if k == 1:
        threshold = float(scores.max())
    elif k < len(scores):
        threshold = float(np.partition(scores, len(scores) - k)[len(scores) - k])
    else:
        threshold = -np.inf
    # |fl(a.b) - a.b| <= D u |a||b| with u = 2**-24. Twice that, for the errors of the k-th best and of the
    # candidate, plus a margin for norms that are not exactly 1.
    margin = 2.5 * len(query_D) * 2.0**-24
    candidates = np.flatnonzero((scores >= threshold - margin) & (scores > -np.inf))
    if rows is not None:
        candidates = rows[candidates]
    exact = np.empty(len(candidates), np.float64)
    for start in range(0, len(candidates), _RESCORE_BLOCK):
        block = vectors_ND[candidates[start : start + _RESCORE_BLOCK]].astype(np.float64)
        exact[start : start + _RESCORE_BLOCK] = (block * query_D.astype(np.float64)).sum(axis=1)
    # Break ties by row, so that equal scores give the same hits in every run.
    order = np.lexsort((candidates, -exact))[:k]
    return candidates[order], exact[order]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The decision for one task: trajectories to add, the keys of their steps, rows to remove, and counts
    named as in :class:`~outrider.memory.step_store.BuildReport`.
    """

    added: tuple[NewTrajectory, ...]
    histories: tuple[tuple[str, ...], ...]
    removed: tuple[int, ...]
    counts: Counter[str]


def check_trajectories(
    trajectories: Iterable[Trajectory], store: StepStore
) -> tuple[dict[str, list[Trajectory]], int]:
    """Group offered trajectories by task in order of arrival, and count repeated ids.

    Raises :class:`~outrider.errors.DataError` for a reward that is not finite, a negative token count, a key
    or id that is not valid text, and an id that belongs to two tasks.
    """
    task_trajectories: dict[str, list[Trajectory]] = {}
    known: dict[str, Trajectory] = {}
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
        first = known.get(trajectory.trajectory_id)
        for owner in [*owners, first.task_key if first else trajectory.task_key]:
            if owner != trajectory.task_key:
                raise DataError(f"{name}: belongs to task {owner!r} and to task {trajectory.task_key!r}")
        if first is not None:
            if (trajectory.steps, trajectory.reward) != (first.steps, first.reward):
                raise DataError(f"{name}: two trajectories with other steps or rewards have this id")
            num_duplicate += 1
            continue
        known[trajectory.trajectory_id] = trajectory
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
    """Rank the offered trajectories of one task together with the stored ones and select the best."""
    task_key = offered[0].task_key
    stored = store.live_trajectories(task_key=task_key)
    known = {trajectory.trajectory_id for trajectory in stored}
    fresh = [trajectory for trajectory in offered if trajectory.trajectory_id not in known]
    filled = [trajectory for trajectory in fresh if trajectory.steps]
    good = [trajectory for trajectory in filled if min_reward is None or trajectory.reward >= min_reward]
    prepared = [_prepare(trajectory, questions, count_tokens) for trajectory in good]
    # Stored trajectories first, by row; new ones get rows in the same order, so ties are stable.
    candidates = [(t.reward, t.num_tokens) for t in stored]
    candidates += [(item.reward, item.num_tokens) for item, _, _ in prepared]
    retained = select_best(candidates, num_best)
    entering = [entry for order, entry in enumerate(prepared, start=len(stored)) if order in retained]
    added = tuple(item for item, _, _ in entering)
    removed = tuple(t.row for order, t in enumerate(stored) if order not in retained)
    return Selection(
        added=added,
        histories=tuple(histories for _, histories, _ in entering),
        removed=removed,
        counts=Counter(
            num_inserted=len(added),
            num_steps_inserted=sum(len(item.steps) for item in added),
            num_present=len(offered) - len(fresh),
            num_empty=len(fresh) - len(filled),
            num_below_min_reward=len(filled) - len(good),
            num_outranked=len(prepared) - len(entering),
            num_removed=len(removed),
            num_repaired_texts=sum(num_repaired for _, _, num_repaired in entering),
        ),
    )


def _prepare(
    trajectory: Trajectory, questions: Mapping[str, str] | None, count_tokens: TokenCounter | None
) -> tuple[NewTrajectory, tuple[str, ...], int]:
    """Return a trajectory with valid texts, the keys of its steps, and the number of repaired texts."""
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
    histories = tuple(history_text(after[0], steps[:index]) for index in range(len(steps)))
    return item, histories, sum(a != b for a, b in zip(before, after, strict=True))


Mode = Literal["read", "write"]

_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """Index that queries search. Each batch replaces it as a whole, so that a query sees one revision."""

    rows: NDArray[np.void]
    vectors_ND: Vectors
    tasks: Mapping[str, int]
    live: Mask
    revision: int
    generation: int


class StepTraceBuffer:
    """Off-policy steps in a file, with their keys in memory.

    ``mode="write"`` opens the file as its only writer and creates it if it is missing; ``mode="read"`` never
    changes it. A reader with ``revision`` sees the buffer as of that revision. Queries may run in any number
    of threads, also while a writer adds. After a rollback, queries of other buffer objects raise; open these
    buffers again. Pickling stores path and embedder: the copy is a reader, pinned if the original was.

    Raises :class:`~outrider.errors.DataError` (no buffer there, unreadable, unwritable),
    :class:`~outrider.errors.BufferCorrupt` (damaged; nothing is changed),
    :class:`~outrider.errors.ConfigError` (built with another embedder, a second writer) and
    :class:`~outrider.errors.CheckpointError` (the file does not contain the revision).
    """

    def __init__(
        self, path: str | Path, embedder: Embedder, *, mode: Mode, revision: int | None = None
    ) -> None:
        if mode == "write" and revision is not None:
            raise ConfigError(
                "a writer works on the newest revision; use rollback to return to an earlier one"
            )
        self.path = Path(path)
        self.embedder = embedder
        self._pinned = revision
        self._writable = mode == "write"
        self._add_lock = threading.Lock()
        self._store = StepStore(self.path, embedder=embedder.name, dim=embedder.dim, writable=self._writable)
        try:
            if revision is not None:
                self._store.require(revision)
            self._view = self._load()
            if self._writable:
                self._store.clear_lost_batch()
        except BaseException:
            self._store.close()
            raise

    def __reduce__(self) -> tuple[object, tuple[Path, Embedder, int | None]]:
        return _reopen, (self.path, self.embedder, self._pinned)

    def __enter__(self) -> "StepTraceBuffer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Return the number of steps that queries can see (including terminal ones)."""
        return int(np.count_nonzero(self._view.live))

    @property
    def lost_batch(self) -> bool:
        """Whether the last writer died during a batch. The buffer does not contain it; add it again."""
        return self._store.lost_batch

    @property
    def revision(self) -> int:
        """The revision that queries see; store it in checkpoints."""
        return self._view.revision

    def digest(self) -> str:
        """Return a digest of everything that queries can see, independent of the file's location. Buffers
        with equal digests return equal hits.
        """
        return self._store.digest(self.revision)

    def close(self) -> None:
        """Release the file; may be called twice."""
        self._store.close()

    def check(self, trajectories: Iterable[Trajectory]) -> None:
        """Raise the errors that :meth:`add_trajectories` would raise for these trajectories, without
        writing.
        """
        check_trajectories(trajectories, self._store)

    def add_trajectories(
        self,
        trajectories: Iterable[Trajectory],
        *,
        keep_best: int | None = 5,
        min_reward: float | None = None,
        questions: Mapping[str, str] | None = None,
        count_tokens: TokenCounter | None = None,
        batch_steps: int = 512,
    ) -> BuildReport:
        """Filter, embed and store trajectories. Call it again with the same trajectories to resume, or with
        new ones during training.

        Per task, the ``keep_best`` best of the old and new trajectories remain (see
        :func:`~outrider.memory.step_store.select_best`). A batch contains whole tasks and at least
        ``batch_steps`` steps, and is one transaction and one revision.

        Args:
            min_reward: drop offered trajectories with a lower reward.
            questions: the question of each task key, which must be the one that queries use; by default
                :func:`~outrider.memory.step_store.prompt_question` of the prompt.
            count_tokens: counts the tokens of a step, and breaks ties if ``Trajectory.num_tokens`` is 0.

        Raises:
            DataError: before anything is written, for a reward that is not finite or an id used by another
                task; or if the file cannot be written (earlier batches remain).
        """
        self._require_writer()
        if batch_steps < 1 or (keep_best is not None and keep_best < 1):
            raise ConfigError("keep_best and batch_steps must be at least 1")
        with self._add_lock:
            offered, num_duplicate = check_trajectories(trajectories, self._store)
            counts: Counter[str] = Counter()
            pending: list[Selection] = []
            for task in offered.values():
                selection = select(
                    task,
                    self._store,
                    num_best=keep_best,
                    min_reward=min_reward,
                    questions=questions,
                    count_tokens=count_tokens,
                )
                counts.update(selection.counts)
                pending += [selection] if selection.added or selection.removed else []
                if sum(chosen.counts["num_steps_inserted"] for chosen in pending) >= batch_steps:
                    self._write(pending)
                    pending = []
            if pending:
                self._write(pending)
        names = [field.name for field in fields(BuildReport)]
        counts["num_duplicate"] = num_duplicate
        counts["num_offered"] = sum(map(len, offered.values())) + num_duplicate
        counts["revision"] = self.revision
        return BuildReport(**{name: counts[name] for name in names})

    def query(self, history: str, step_filter: StepFilter | None = None, *, k: int = 1) -> list[Hit]:
        """Return the ``k`` steps whose keys are nearest to ``history`` (from
        :func:`~outrider.memory.step_store.history_text`).
        """
        return self.query_batch([history], [step_filter or StepFilter()], k=k)[0]

    def query_batch(
        self, histories: Sequence[str], filters: Sequence[StepFilter], *, k: int = 1
    ) -> list[list[Hit]]:
        """Return one list of hits per history, best first; the lower step id wins ties. A list is shorter
        than ``k`` if fewer steps pass the filter.
        """
        return self.query_vectors(self.embedder.embed(histories), filters, k=k)

    def query_vectors(
        self, vectors_QD: Vectors, filters: Sequence[StepFilter], *, k: int = 1
    ) -> list[list[Hit]]:
        """Like :meth:`query_batch`, for unit vectors from the buffer's embedder."""
        view = self._view
        if vectors_QD.ndim != 2 or vectors_QD.shape[1] != view.vectors_ND.shape[1]:
            raise ValueError(
                f"queries have shape {vectors_QD.shape}, must be [Q, {view.vectors_ND.shape[1]}]"
            )
        matches = search(
            view.vectors_ND, vectors_QD, [_mask(view, step_filter) for step_filter in filters], k=k
        )
        hits = []
        for rows, cosines in matches:
            records = self._store.records(view.rows["step_id"][rows], generation=view.generation)
            hits.append([Hit(record=r, similarity=float(s)) for r, s in zip(records, cosines, strict=True)])
        return hits

    def sample(self, step_filter: StepFilter, generator: np.random.Generator) -> StepRecord | None:
        """Draw a step that passes the filter uniformly (retrieval noise); None if there is none."""
        view = self._view
        allowed = np.flatnonzero(_mask(view, step_filter))
        if not len(allowed):
            return None
        drawn = view.rows["step_id"][allowed[generator.integers(len(allowed))]]
        return self._store.records([drawn], generation=view.generation)[0]

    def steps(self, step_ids: Iterable[int]) -> list[StepRecord]:
        """Return the records of these steps, in the given order. Raises
        :class:`~outrider.errors.DataError` if a step does not exist.
        """
        return self._store.records(step_ids, generation=self._view.generation)

    def trajectory(self, trajectory_id: str) -> list[StepRecord]:
        """Return all steps of a trajectory that queries can see, including terminal ones, in order; empty if
        the trajectory does not exist.
        """
        view = self._view
        return self._store.records(
            self._store.step_ids(trajectory_id, revision=view.revision), generation=view.generation
        )

    def flush(self) -> None:
        """Force all additions to disk, so that a checkpoint remains valid after a power failure."""
        self._require_writer()
        self._store.flush()

    def pin(self, revision: int) -> None:
        """Set this reader to the revision of a checkpoint, independent of later additions by a writer.

        Raises :class:`~outrider.errors.CheckpointError` if the file does not contain the revision, and for a
        writer.
        """
        if self._writable:
            raise CheckpointError(
                f"{self.path}: the buffer is at revision {self.revision}, the checkpoint used {revision}"
            )
        self._store.require(revision)
        self._pinned = revision
        self._view = self._load()

    def rollback(self, revision: int) -> tuple[int, int]:
        """Permanently restore the revision of a checkpoint; later additions reuse the step ids. Returns the
        numbers of trajectories that were dropped and restored.
        """
        self._require_writer()
        with self._add_lock:
            counts = self._store.rollback(revision)
            self._view = self._load()
        return counts

    def stats(self) -> BufferStats:
        """Return counts and quantiles over the steps that queries see."""
        view = self._view
        facts = self._store.trajectory_facts(view.revision)
        steps_by_agent: Counter[str] = Counter()
        for _, agent, _, num_steps, _ in facts:
            steps_by_agent[agent] += num_steps
        terminal = view.rows["terminal"][view.live]
        return BufferStats(
            num_tasks=len({fact[0] for fact in facts}),
            num_trajectories=len(facts),
            num_steps=sum(steps_by_agent.values()),
            num_tokens=sum(fact[4] for fact in facts),
            num_trajectories_by_agent=dict(sorted(Counter(fact[1] for fact in facts).items())),
            num_steps_by_agent=dict(sorted(steps_by_agent.items())),
            share_terminal=float(terminal.mean()) if len(terminal) else float("nan"),
            steps_per_trajectory_quantiles=_quantiles([fact[3] for fact in facts]),
            reward_quantiles=_quantiles([fact[2] for fact in facts]),
        )

    def _write(self, selections: Sequence[Selection]) -> None:
        """Write one batch: embed, commit, then make it visible to queries."""
        # In a separate transaction, so that the file records a process that dies while it embeds.
        self._store.announce_batch()
        added = [item for chosen in selections for item in chosen.added]
        histories = [history for chosen in selections for keys in chosen.histories for history in keys]
        removed = [row for chosen in selections for row in chosen.removed]
        vectors = self.embedder.embed(histories)
        new = self._store.write_batch(added, vectors, removed)
        view = self._view
        tasks = dict(view.tasks)
        new["task"] = [tasks.setdefault(item.task_key, len(tasks)) for item in added for _ in item.steps]
        rows = np.concatenate([view.rows, new])
        revision = view.revision + 1
        # `rows` is a copy, because running queries still use the old revision.
        rows["removed"][: len(view.rows)][np.isin(view.rows["trajectory"], removed)] = revision
        self._matrix.append(vectors)
        # A single assignment at the end: a query has either the old view or the new one.
        self._view = _View(
            rows=rows,
            vectors_ND=self._matrix.view(),
            tasks=tasks,
            live=_live(rows, revision),
            revision=revision,
            generation=view.generation,
        )

    def _load(self) -> _View:
        loaded = self._store.load()
        revision = loaded.revision if self._pinned is None else self._pinned
        self._matrix = GrowingMatrix(loaded.vectors)
        return _View(
            rows=loaded.rows,
            vectors_ND=self._matrix.view(),
            tasks=loaded.tasks,
            live=_live(loaded.rows, revision),
            revision=revision,
            generation=loaded.generation,
        )

    def _require_writer(self) -> None:
        if not self._writable:
            raise DataError(f"{self.path}: opened for reading")


def _reopen(path: Path, embedder: Embedder, revision: int | None) -> StepTraceBuffer:
    return StepTraceBuffer(path, embedder, mode="read", revision=revision)


def _live(rows: NDArray[np.void], revision: int) -> Mask:
    live: Mask = (rows["added"] <= revision) & (rows["removed"] > revision)
    return live


def _mask(view: _View, step_filter: StepFilter) -> Mask:
    """Return which rows pass a filter, ``[N]``."""
    # A copy, because all queries share the view.
    mask = view.live.copy()
    if not step_filter.include_terminal:
        mask &= ~view.rows["terminal"]
    if step_filter.scope != "all":
        keys = (step_filter.task_key or "", step_filter.other_key or "")
        same = np.isin(view.rows["task"], [view.tasks.get(key, -1) for key in keys])
        mask &= same if step_filter.scope == "same_task" else ~same
    if step_filter.min_reward is not None:
        mask &= view.rows["reward"] >= step_filter.min_reward
    if step_filter.exclude:
        # Rows are in order of step id.
        excluded = np.array(sorted(step_filter.exclude), np.int64)
        step_ids = view.rows["step_id"]
        positions = np.searchsorted(step_ids, excluded)
        positions = positions[positions < len(step_ids)]
        mask[positions[np.isin(step_ids[positions], excluded)]] = False
    return mask


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    """Interpolate linearly without overflow: the difference of two rewards may exceed the largest float."""
    if not values:
        return (float("nan"),) * len(_QUANTILES)
    largest = max(map(abs, values))
    scale = 0.25 if largest > sys.float_info.max / 4 else 1.0
    quantiles = np.quantile([value * scale for value in values], _QUANTILES)
    return tuple(float(quantile) / scale for quantile in quantiles)
