"""Results of an evaluation on tasks: scores of samples (pass@k, avg@k, majority, tool use), and their file.

A sample that a fault of the infrastructure ended has no score: it is counted by its outcome, and no mean
includes it.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any, Final

from outrider.environments.grading.answers import normalize_answer
from outrider.errors import ConfigError, DataError
from outrider.files import FileLock, append_bytes, parsed, read_lines
from outrider.types import Json, Outcome, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """One sample of one task. ``score`` in [0, 1] is the task set's own metric, and ``success`` is whether
    the task counts as solved. Both are None if the sample could not be scored; ``outcome`` is then a fault
    and ``detail`` describes it. For a sample scored by a judge, ``detail`` is the judge's text.

    ``answered`` is the outcome of the rollout if only the judge failed: the answer is final, and only the
    judge is called again. ``num_tokens`` is None if a server did not report it. ``turns`` has the text of
    each policy turn; None after a fault, and in files of earlier versions that did not store it.
    ``token_ids`` has the token ids of the turns, if the player has them.
    """

    task_key: str
    sample: int
    outcome: Outcome
    answered: Outcome | None = None
    score: float | None = None
    success: bool | None = None
    prediction: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_tool_calls: int = 0
    num_tokens: int | None = 0
    detail: str = ""
    turns: tuple[str, ...] | None = None
    token_ids: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a fault with a score, a score without success, another outcome without score,
        and ``answered`` without a fault of the judge.
        """
        is_scored = self.score is not None
        if is_scored is self.outcome.is_fault or is_scored is not (self.success is not None):
            raise ValueError(
                f"{self.task_key}: outcome {self.outcome}, score {self.score} "
                f"and success {self.success} contradict"
            )
        if self.answered is not None and (is_scored or self.answered.is_fault):
            raise ValueError(
                f"{self.task_key}: answered as {self.answered} and outcome {self.outcome} contradict"
            )
        if not all(math.isfinite(value) for value in (*self.metrics.values(), self.score or 0.0)):
            raise ValueError(f"{self.task_key}: a score or a metric is not finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTasksSummary:
    """Summary of results. Values by task key are ``task_scores`` (avg@k), ``task_passes`` (pass@k by k, of
    tasks with at least k scored samples), ``task_majorities``, and ``task_metrics`` (by name).

    ``metrics`` are means over tasks. ``num_tool_calls`` and ``num_tokens`` are per answer; ``num_tokens``
    excludes the ``num_uncounted`` answers without a token count. Means are NaN if no sample was scored.
    ``outcomes`` counts scored samples by outcome, ``faults`` the others.
    """

    num_scored: int
    metrics: Mapping[str, float]
    num_tool_calls: float
    num_tokens: float
    num_uncounted: int
    tool_usage_rate: float
    tool_productivity: float
    outcomes: Mapping[str, int]
    faults: Mapping[str, int]
    task_scores: Mapping[str, float]
    task_passes: Mapping[int, Mapping[str, float]]
    task_majorities: Mapping[str, float]
    task_metrics: Mapping[str, Mapping[str, float]]


def pass_at_k(*, num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of ``k`` samples drawn without replacement from ``num_samples`` is
    correct: 1 - C(n-c, k) / C(n, k).

    Unbiased (Chen et al. 2021, arXiv 2107.03374, equation 1); exact integers, one division.
    Raises ValueError unless 0 <= num_correct <= num_samples and 1 <= k <= num_samples.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} correct among {num_samples} samples is not defined")
    total = math.comb(num_samples, k)
    return (total - math.comb(num_samples - num_correct, k)) / total


def majority_at_k(labels: Sequence[str], successes: Sequence[bool]) -> float:
    """Success of the most frequent label among k samples. For a tie it is the mean, the expected value of a
    random choice.

    An empty label (no answer) is not a vote; without any vote the result is 0. Samples with the same label
    may differ in success (texts with the same normalised form); their mean counts. Raises ValueError if the
    lengths differ or there is no sample.
    """
    if len(labels) != len(successes) or not labels:
        raise ValueError("majority needs one success a label, and at least one")
    votes = Counter(label for label in labels if label)
    if not votes:
        return 0.0
    max_votes = max(votes.values())
    winners = [label for label, count in votes.items() if count == max_votes]
    winner_rates = [
        fmean(ok for other, ok in zip(labels, successes, strict=True) if other == label) for label in winners
    ]
    return fmean(winner_rates)


def tool_productivity(*, accuracy: float, mean_tool_calls: float) -> float:
    """100 a T / (T + 0.1): accuracy in percent, discounted if tools are rarely used (ARPO's released
    evaluation).

    ``mean_tool_calls`` is T, calls per answer. ARPO's T counts tag pairs, including rejected calls; pass
    executed calls here.
    """
    return 100.0 * accuracy * mean_tool_calls / (mean_tool_calls + 0.1)


def summarise(
    results: Iterable[SampleResult],
    *,
    ks: Sequence[int] = (1,),
    normalize: Callable[[str], str] = normalize_answer,
) -> EvalTasksSummary:
    """Summarize results, independent of their order. ``normalize`` maps predictions to labels for the
    majority vote.

    Raises ValueError for two results of one sample.
    """
    results_by_task: dict[str, list[SampleResult]] = {}
    seen: set[tuple[str, int]] = set()
    faults: Counter[str] = Counter()
    for result in sorted(results, key=lambda entry: (entry.task_key, entry.sample)):
        if (result.task_key, result.sample) in seen:
            raise ValueError(f"two results of {result.task_key}, sample {result.sample}")
        seen.add((result.task_key, result.sample))
        if result.score is None:
            faults[result.outcome.value] += 1
        else:
            results_by_task.setdefault(result.task_key, []).append(result)
    scored = [entry for group in results_by_task.values() for entry in group]
    scores = {key: fmean(entry.score or 0.0 for entry in group) for key, group in results_by_task.items()}
    majorities = {
        key: majority_at_k(
            [normalize(entry.prediction) for entry in group], [entry.success is True for entry in group]
        )
        for key, group in results_by_task.items()
    }
    metrics: dict[str, dict[str, float]] = {}  # only tasks that have the metric
    for key, group in results_by_task.items():
        for name in sorted({name for entry in group for name in entry.metrics}):
            values = [entry.metrics[name] for entry in group if name in entry.metrics]
            metrics.setdefault(name, {})[key] = fmean(values)
    calls = [entry.num_tool_calls for entry in scored]
    task_passes = {
        k: {
            key: pass_at_k(num_samples=len(group), num_correct=sum(e.success is True for e in group), k=k)
            for key, group in results_by_task.items()
            if len(group) >= k
        }
        for k in ks
    }
    return EvalTasksSummary(
        num_scored=len(scored),
        metrics={name: _mean(tasks.values()) for name, tasks in sorted(metrics.items())},
        num_tool_calls=_mean(calls),
        num_tokens=_mean(entry.num_tokens for entry in scored if entry.num_tokens is not None),
        num_uncounted=sum(entry.num_tokens is None for entry in scored),
        tool_usage_rate=_mean(count > 0 for count in calls),
        tool_productivity=tool_productivity(accuracy=_mean(scores.values()), mean_tool_calls=_mean(calls)),
        outcomes=dict(sorted(Counter(entry.outcome.value for entry in scored).items())),
        faults=dict(sorted(faults.items())),
        task_scores=scores,
        task_passes=task_passes,
        task_majorities=majorities,
        task_metrics=dict(sorted(metrics.items())),
    )


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return fmean(numbers) if numbers else math.nan


# The results of an evaluation on disk, append-only, so that a stopped evaluation can be resumed.
#
# A JSONL file. The first line identifies the evaluation, and each further line is a
# :class:`~outrider.evaluation.results.SampleResult`. An incomplete last line is ignored. Scored samples are
# never repeated. Faulted samples are, and the later result replaces the earlier one. If only the judge
# failed, the answer is judged again without a new rollout.


RESULTS: Final = "results.jsonl"  # in the folder of an evaluation, as the next two
SUMMARY: Final = "summary.json"
SETTINGS: Final = "evaluation.toml"  # settings of the last command
FORMAT: Final = "outrider panel 1"
_HEADER_PREFIX: Final = f'{{"format": "{FORMAT}"'.encode()  # start of the first line, whose keys are sorted


class EvalTasksStore:
    """The results of one evaluation. Create it with :meth:`open`. Adding is thread-safe, and the file is
    locked by one process.
    """

    def __init__(self, path: Path, file: FileLock, results: dict[tuple[str, int], SampleResult]) -> None:
        self.path = path
        self._file = file
        self._results = results
        self._lock = Lock()

    @classmethod
    def open(cls, path: Path, *, identity: Mapping[str, Json]) -> "EvalTasksStore":
        """Continue the file or create it. ``identity`` contains everything that results depend on: task hash,
        model, sampling, rules.

        An incomplete last line is removed. Raises ConfigError if the file has another identity or is in use,
        and DataError with the line number if it is damaged.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = FileLock(path, flags=os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except BlockingIOError as error:
            raise ConfigError(f"{path} is in use by another process") from error
        try:
            lines, torn = read_lines(path)
            if not lines and not (torn.startswith(_HEADER_PREFIX) or _HEADER_PREFIX.startswith(torn)):
                raise DataError(f"{path}:1: no results of a panel ({FORMAT})")
            results = _read(path, lines, identity) if lines else {}
            os.ftruncate(file.descriptor, sum(len(line) + 1 for line in lines))
            store = cls(path, file, results)
            if not lines:
                store._append({"format": FORMAT, "identity": dict(identity)})
        except BaseException:
            file.release()
            raise
        return store

    @property
    def results(self) -> list[SampleResult]:
        """The latest result of every sample, faults included, sorted by task key and sample number."""
        with self._lock:
            return [self._results[key] for key in sorted(self._results)]

    @property
    def unjudged(self) -> list[SampleResult]:
        """Answers whose judge failed, sorted by task key and sample number."""
        return [result for result in self.results if result.answered is not None]

    def pending(self, tasks: Sequence[Task], *, num_samples: int) -> list[tuple[Task, int]]:
        """Samples that are missing or have a fault other than the judge's, in the order of ``tasks``."""
        with self._lock:
            return [
                (task, sample)
                for task in tasks
                for sample in range(num_samples)
                if (result := self._results.get((task.key, sample))) is None
                or (result.outcome.is_fault and result.answered is None)
            ]

    def has(self, task_key: str, sample: int) -> bool:
        """Whether there is any result of the sample, a fault included."""
        with self._lock:
            return (task_key, sample) in self._results

    def add(self, result: SampleResult) -> None:
        """Append one result and force it to disk; a failed write leaves the file as it was.

        Raises ValueError for a sample that is finished.
        """
        with self._lock:
            previous = self._results.get((result.task_key, result.sample))
            if previous is not None and not previous.outcome.is_fault:
                raise ValueError(f"{result.task_key}, sample {result.sample} is finished")
            self._append(asdict(result))
            self._results[result.task_key, result.sample] = result

    def close(self) -> None:
        """Close and unlock the file; may be called twice."""
        with self._lock:
            self._file.release()

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, sort_keys=True, allow_nan=False).encode() + b"\n"
        append_bytes(self._file.descriptor, line)


def read_results(path: Path) -> tuple[dict[str, Json], list[SampleResult]]:
    """Identity of a closed file, and its results sorted by task key and sample number. Raises DataError with
    the line number.
    """
    lines = read_lines(path)[0] or [b""]
    recorded = _parse_line(path, 1, lines[0]).get("identity")
    identity = recorded if isinstance(recorded, dict) else {}
    results = _read(path, lines, identity)
    return identity, [results[key] for key in sorted(results)]


def write_results(path: Path, identity: Mapping[str, Json], results: Sequence[SampleResult]) -> None:
    """Write a new results file that :meth:`EvalTasksStore.open` can continue."""
    with closing(EvalTasksStore.open(path, identity=identity)) as store:
        for result in results:
            store.add(result)


def _read(
    path: Path, lines: Sequence[bytes], identity: Mapping[str, Json]
) -> dict[tuple[str, int], SampleResult]:
    _check_identity(path, _parse_line(path, 1, lines[0]), identity)
    results: dict[tuple[str, int], SampleResult] = {}
    for number, line in enumerate(lines[1:], start=2):
        record = _parse_line(path, number, line)
        try:
            answered = record.get("answered")
            outcomes = {
                "outcome": Outcome(str(record.get("outcome"))),
                "answered": None if answered is None else Outcome(str(answered)),
            }
            result = SampleResult(**{**record, **outcomes, **_reply(record)})
        except (TypeError, ValueError) as error:
            raise DataError(f"{path}:{number}: no result of a sample: {error}") from error
        previous = results.get((result.task_key, result.sample))
        if previous is None or previous.outcome.is_fault:
            results[result.task_key, result.sample] = result
    return results


def _reply(record: Mapping[str, Any]) -> dict[str, tuple[Any, ...] | None]:
    """Parse ``turns`` and ``token_ids``. Raises TypeError unless they have a text or a list of ids per
    turn."""
    turns, ids = record.get("turns"), record.get("token_ids")
    has_texts = turns is None or (isinstance(turns, list) and all(isinstance(turn, str) for turn in turns))
    has_ids = ids is None or (
        isinstance(ids, list)
        and all(isinstance(turn, list) and all(type(token) is int for token in turn) for turn in ids)
    )
    if not has_texts or not has_ids:
        raise TypeError("the reply is malformed")
    return {
        "turns": None if turns is None else tuple(turns),
        "token_ids": None if ids is None else tuple(map(tuple, ids)),
    }


def _check_identity(path: Path, header: Mapping[str, Any], identity: Mapping[str, Json]) -> None:
    recorded = header.get("identity")
    if header.get("format") != FORMAT or not isinstance(recorded, dict):
        raise DataError(f"{path}:1: no results of a panel ({FORMAT})")
    expected = json.loads(json.dumps(dict(identity)))
    different = sorted(key for key in {*recorded, *expected} if recorded.get(key) != expected.get(key))
    if different:
        changes = "; ".join(
            f"{key} was {recorded.get(key)!r} and is {expected.get(key)!r}" for key in different
        )
        raise ConfigError(
            f"{path} has the results of another evaluation: {changes}; name another directory (--run)"
        )


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return parsed(line)
    except ValueError as error:
        raise DataError(f"{path}:{number}: malformed JSON: {error}") from error
