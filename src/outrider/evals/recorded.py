"""Trajectories of a run directory's traces, or of a file of chats."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from outrider.errors import DataError
from outrider.json_lines import whole_lines
from outrider.memory.steps.sources import import_trajectories
from outrider.types import Message, Origin, Step, Trajectory
from outrider.watch.traces import TraceReader, TraceRow

_DONE = (Origin.POLICY, Origin.DEMONSTRATION)


def recorded_trajectories(source: Path) -> list[Trajectory]:
    """Of a run all rollouts with a return, of training and of evaluations. Raises DataError."""
    if not source.is_dir():
        return list(import_trajectories(source).trajectories)
    if not (source / "config.toml").is_file():
        raise DataError(f"{source} is no run directory: it has no config.toml")
    found = [one for name, rows in _files(source) for one in trajectories_of(rows, name=name)]
    if not found:
        raise DataError(f"{source} has no trace of a rollout with a return")
    return found


def _files(run: Path) -> Iterator[tuple[str, Sequence[TraceRow]]]:
    reader, evaluations = TraceReader(run / "traces"), run / "evaluations.jsonl"
    for step in reader.steps():
        yield f"{run.name}/{step}", reader.read(step)
    num = sum(1 for _ in whole_lines(evaluations)) if evaluations.exists() else 0
    for number in range(num):
        if reader.has_evaluation(number):
            yield f"{run.name}/evaluation-{number}", reader.read_evaluation(number)


def trajectories_of(rows: Sequence[TraceRow], *, name: str) -> list[Trajectory]:
    """One a leaf, in order; what several rollouts share is in each. ``name`` is in front of their ids."""
    groups: dict[str, dict[int, TraceRow]] = {}
    for row in rows:
        groups.setdefault(row.trace_id, {})[row.node_id] = row
    return [
        _trajectory(nodes, leaf, name=name)
        for nodes in groups.values()
        for leaf in nodes.values()
        if leaf.episode_return is not None
    ]


def _trajectory(nodes: Mapping[int, TraceRow], leaf: TraceRow, *, name: str) -> Trajectory:
    """Turns of the policy or a demonstrator, and the newest words of the environment behind each."""
    path, at = [], leaf.node_id
    while at != -1:
        path.append(nodes[at])
        at = nodes[at].parent_id
    prompt, steps = "", list[Step]()
    for row in reversed(path):
        if row.origin is Origin.PROMPT:
            prompt = prompt or row.text
        elif row.origin in _DONE:
            steps.append(Step(text=row.text, observation=""))
        elif row.origin is Origin.ENVIRONMENT and steps:
            steps[-1] = Step(text=steps[-1].text, observation=row.text)
    return Trajectory(
        trajectory_id=f"{name}/{leaf.trace_id}/{leaf.node_id}",
        task_key=leaf.task_key,
        agent="policy",
        prompt=(Message(role="user", content=prompt),),
        steps=tuple(steps),
        reward=leaf.episode_return or 0.0,
    )
