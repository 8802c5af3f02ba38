"""What a reader of a table by task must know of its runs, beside the numbers."""

from collections.abc import Mapping, Sequence

from outrider.evals.compare.compare import unfinished
from outrider.evals.compare.runs import Run
from outrider.evals.compare.tables import CONDITIONS


def about_run(run: Run) -> list[str]:
    """What could not be read of it, what is missing, and what was lost to faults."""
    said = [f"{run.name}: {note}" for note in run.notes if not _is_known(run, note)]
    if not run.evaluations:
        return [*said, f"{run.name} has no evaluation"]
    last = run.evaluations[-1]
    said += [*unfinished(run), *_cut(run)]
    if not last.task_returns:  # earlier versions wrote none
        said.append(f"{run.name} is in no row: its last evaluation has no returns of single tasks")
    if last.num_faults:
        said.append(
            f"{run.name}: {last.num_faults} rollout(s) of the last evaluation ended in a fault "
            "and are in no score"
        )
    return said


def about_cells(methods: Sequence[str], cells: Mapping[tuple[str, str], Sequence[Run]]) -> list[str]:
    """Which cells, by (task, method), have fewer runs than others of their column, and conditions of the test
    that are not the same in a row.
    """
    said = []
    for method in methods:
        sizes = {row: len(runs) for (row, of), runs in cells.items() if of == method}
        most = max(sizes.values(), default=0)
        if fewer := [f"{num} on {row}" for row, num in sizes.items() if num < most]:
            said.append(f"{method} has {most} runs on a task, but {', '.join(fewer)}")
    if differ := _other_conditions(cells):
        said.append(
            f"methods of one row were tested under different conditions ({', '.join(differ)}): "
            "their scores are not of one test"
        )
    return said


def keeps_all_solved(run: Run) -> bool:
    """Whether a run that adapts has ended because nothing was left to solve; one with tips plays on."""
    return run.config.get("evaluation.memory") == "reflexion" and run.trials[-1].score >= 1.0


def _is_known(run: Run, note: str) -> bool:
    """A run that adapts takes no step, and has no metrics of any."""
    return bool(run.trials) and note == "metrics.jsonl is missing"


def _cut(run: Run) -> list[str]:
    """That trials are missing."""
    wanted = run.config.get("evaluation.num_trials", "0")
    found = len(run.trials)
    if not found or not wanted.isdecimal() or found >= int(wanted) or keeps_all_solved(run):
        return []
    return [f"{run.name} was cut: {found} of {wanted} trials"]


def _other_conditions(cells: Mapping[tuple[str, str], Sequence[Run]]) -> list[str]:
    first: dict[str, dict[str, str]] = {}
    found: set[str] = set()
    for (row, _), runs in cells.items():
        own = {key: value for key, value in runs[0].config.items() if key.startswith(CONDITIONS)}
        others = first.setdefault(row, own)
        found |= {key for key in own.keys() | others if own.get(key) != others.get(key)}
    return sorted(found)
