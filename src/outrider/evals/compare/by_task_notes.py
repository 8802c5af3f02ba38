"""What a reader of a table by task must know of its runs, beside the numbers."""

from collections.abc import Mapping, Sequence

from outrider.evals.compare.compare import unfinished
from outrider.evals.compare.runs import Run
from outrider.evals.compare.tables import CONDITIONS


def run_notes(run: Run) -> list[str]:
    """What could not be read of it, what is missing, and what was lost to faults."""
    notes = [f"{run.name}: {note}" for note in run.notes if not _is_known(run, note)]
    if not run.evaluations:
        return [*notes, f"{run.name} has no evaluation"]
    last = run.evaluations[-1]
    notes += [*unfinished(run), *_missing_trials(run)]
    if not last.task_returns:  # earlier versions wrote none
        notes.append(f"{run.name} is in no row: its last evaluation has no returns of single tasks")
    if last.num_faults:
        notes.append(
            f"{run.name}: {last.num_faults} rollout(s) of the last evaluation ended in a fault "
            "and are in no score"
        )
    return notes


def cell_notes(methods: Sequence[str], cells: Mapping[tuple[str, str], Sequence[Run]]) -> list[str]:
    """Which cells, by (task, method), have fewer runs than others of their column, and conditions of the test
    that are not the same in a row.
    """
    notes = []
    for method in methods:
        sizes = {row: len(runs) for (row, cell_method), runs in cells.items() if cell_method == method}
        most = max(sizes.values(), default=0)
        if fewer := [f"{num} on {row}" for row, num in sizes.items() if num < most]:
            notes.append(f"{method} has {most} runs on a task, but {', '.join(fewer)}")
    if differ := _other_conditions(cells):
        notes.append(
            f"methods of one row were tested under different conditions ({', '.join(differ)}): "
            "their scores are not of one test"
        )
    return notes


def has_solved_all(run: Run) -> bool:
    """Whether a run that adapts has ended because nothing was left to solve; one with tips plays on."""
    return run.config.get("evaluation.memory") == "reflexion" and run.trials[-1].score >= 1.0


def _is_known(run: Run, note: str) -> bool:
    """A run that adapts takes no step, and has no metrics of any."""
    return bool(run.trials) and note == "metrics.jsonl is missing"


def _missing_trials(run: Run) -> list[str]:
    """That trials are missing."""
    expected = run.config.get("evaluation.num_trials", "0")
    num_trials = len(run.trials)
    if not num_trials or not expected.isdecimal() or num_trials >= int(expected) or has_solved_all(run):
        return []
    return [f"{run.name} was cut: {num_trials} of {expected} trials"]


def _other_conditions(cells: Mapping[tuple[str, str], Sequence[Run]]) -> list[str]:
    first: dict[str, dict[str, str]] = {}
    differing: set[str] = set()
    for (row, _), runs in cells.items():
        own = {key: value for key, value in runs[0].config.items() if key.startswith(CONDITIONS)}
        others = first.setdefault(row, own)
        differing |= {key for key in own.keys() | others if own.get(key) != others.get(key)}
    return sorted(differing)
