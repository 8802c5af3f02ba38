"""``outrider critic``: recorded trajectories, and a critic that is trained on them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch

from outrider.algorithms.retrospex import CriticSettings, encode_turns
from outrider.algorithms.retrospex_critic import Critic, train
from outrider.errors import DataError
from outrider.files import readable
from outrider.memory.chat_files import import_trajectories
from outrider.memory.embedders import load_embedder
from outrider.printing import plural, print_lines
from outrider.types import Message, Origin, Step, Trajectory
from outrider.viewer.records import TraceReader, TraceRow, last_episode, whole_rollouts

_ACTION_ORIGINS = (Origin.POLICY, Origin.DEMONSTRATION)


def recorded_trajectories(source: Path, *, held_out: bool = False) -> list[Trajectory]:
    """Read trajectories. From a run, these are all rollouts with a return: those of training, and those of
    evaluations on the split ``train``, or on any split if ``held_out``. Raises DataError.
    """
    if not source.is_dir():
        return list(import_trajectories(source).trajectories)
    if not (source / "config.toml").is_file():
        raise DataError(f"{source} is no run directory: it has no config.toml")
    left_out: list[str] = []
    files = _files(source, held_out=held_out, left_out=left_out)
    trajectories = [trajectory for name, rows in files for trajectory in build_trajectories(rows, name=name)]
    if not trajectories and left_out:
        raise DataError(
            f"{source} has rollouts of held-out tasks alone (split {left_out[0]}): record others with "
            "evaluation.split=train, or take these with --held-out"
        )
    if not trajectories:
        raise DataError(f"{source} has no trace of a rollout with a return")
    return trajectories


def _files(run: Path, *, held_out: bool, left_out: list[str]) -> Iterator[tuple[str, Sequence[TraceRow]]]:
    """Yield files and rows; append the split of every skipped evaluation to ``left_out``."""
    reader = TraceReader(run / "traces")
    for step in reader.steps():
        yield f"{run.name}/{step}", reader.read(step)
    file = run / "evaluations.jsonl"
    for number, line in readable(file) if file.is_file() else ():
        if not reader.has_evaluation(number - 1):
            continue
        split = "unknown" if line is None else str(line.get("split", "unknown"))
        if split == "train" or held_out:
            yield f"{run.name}/evaluation-{number - 1}", reader.read_evaluation(number - 1)
        else:
            left_out.append(split)


def build_trajectories(rows: Sequence[TraceRow], *, name: str) -> list[Trajectory]:
    """Build one trajectory per leaf, in order; shared nodes are repeated in each. ``name`` prefixes the
    ids."""
    return [
        _trajectory(path, name=name) for path in whole_rollouts(rows) if path[-1].episode_return is not None
    ]


def _trajectory(path: Sequence[TraceRow], *, name: str) -> Trajectory:
    """Actions of the policy, a demonstrator or a retrieved step, each with the last observation after it. The
    end of a message after a tip is a node without text, which is no observation. Of several episodes, the
    last one is used.
    """
    leaf = path[-1]
    prompt, steps = "", list[Step]()
    for row in last_episode(path):
        if row.origin is Origin.PROMPT:
            prompt = prompt or row.text
        elif row.origin in _ACTION_ORIGINS:
            steps.append(Step(text=row.text, observation=""))
        elif row.origin is Origin.BUFFER and "action" in (metadata := json.loads(row.metadata)):
            steps.append(Step(text=metadata["action"], observation=metadata["observation"]))
        elif row.origin is Origin.ENVIRONMENT and row.text and steps:
            steps[-1] = Step(text=steps[-1].text, observation=row.text)
    return Trajectory(
        trajectory_id=f"{name}/{leaf.trace_id}/{leaf.node_id}",
        task_key=leaf.task_key,
        agent="policy",
        prompt=(Message(role="user", content=prompt),),
        steps=tuple(steps),
        reward=leaf.episode_return or 0.0,
    )


_NUM_PROGRESS_LINES = 20  # lines of progress in the whole


class _LossPrinter:
    """Prints the mean losses of each part of the updates."""

    def __init__(self, num_updates: int) -> None:
        self._num_updates, self._every = num_updates, max(1, num_updates // _NUM_PROGRESS_LINES)
        self._losses: list[tuple[float, float]] = []

    def __call__(self, number: int, value_loss: float, quality_loss: float) -> None:
        self._losses.append((value_loss, quality_loss))
        if number % self._every == 0 or number == self._num_updates:
            values, qualities = (fmean(part) for part in zip(*self._losses, strict=True))
            progress = f"{number} of {plural(self._num_updates, 'update')}"
            print_lines(f"critic: {progress}, loss of V {values:.3g}, of Q {qualities:.3g}")
            self._losses.clear()


def train_critic(
    sources: Sequence[Path], *, out: Path, settings: CriticSettings, held_out: bool = False
) -> int:
    """Train a critic and return the exit status 0. ``held_out``: also use evaluations on splits other than
    ``train``. Training uses one thread, because such small layers do not benefit from more and the results
    depend on the number of threads bit by bit.

    Raises DataError and ModelError before training, and DataError for values that are not finite.
    """
    embedder = load_embedder(settings.embedder)
    trajectories = [
        trajectory for source in sources for trajectory in recorded_trajectories(source, held_out=held_out)
    ]
    turns = encode_turns(trajectories, embedder)
    mean = fmean(trajectory.reward for trajectory in trajectories)
    print_lines(
        f"critic: {plural(len(trajectories), 'trajectory', 'trajectories')}, "
        f"{plural(len(turns.rewards_N), 'turn')}, mean return {mean:.3g}"
    )
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        networks = train(turns, settings, on_update=_LossPrinter(settings.num_updates))
    finally:
        torch.set_num_threads(num_threads)
    Critic(networks, embedder, settings).save(out)
    print_lines(f"{out}: use it with engine.type=retrospex engine.critic={out}")
    return 0
