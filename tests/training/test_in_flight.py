"""Groups of several steps in progress at once, with random delays: tokens are never too old, and every
group is trained on once, in the order of its tasks, also if the run is killed and resumed.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.base import GroupFilter, TaskChoice
from outrider.algorithms.entropy_branching import BranchHook, BranchSettings
from outrider.config import validate
from outrider.errors import ConfigError, EngineFault
from outrider.rollout.hooks import StatelessHook
from outrider.rollout.scheduler import RolloutReport
from outrider.trace import Leaf, Trace
from outrider.training.async_rollouts import (
    AsyncRolloutQueue,
    GroupName,
    GroupResult,
    PendingStep,
    QueueSnapshot,
    read_snapshot,
    write_snapshot,
)
from outrider.training.data import QueuedStep, TaskOrder
from outrider.training.settings import RunSettings, StageSettings
from outrider.training.step_metrics import staleness_metrics
from outrider.types import Message, Origin, Outcome, Task

TASKS = [Task(key=f"t{number}", question="?", answers=("!",)) for number in range(7)]
SIZE, TURNS = 3, 3


class Counts(StatelessHook):
    """What copies have gathered, and the groups seen, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.sum = 0

    def absorb(self, gathered: Any) -> None:
        self.sum += gathered

    def after_group(self, trace: Trace) -> None:
        self.seen.append(trace.task.key)


@dataclass
class Plain:
    """An algorithm that plays ``SIZE`` rollouts a task."""

    hooks: tuple[Any, ...]
    choice: TaskChoice | None = None

    def choose_tasks(self, tasks: Sequence[Task], *, step: int, num_groups: int) -> TaskChoice:
        return self.choice or TaskChoice(num_groups=num_groups)

    def modes_of(self, step: int, group: int) -> Sequence[str]:
        return [f"mode {step}.{group}"] * SIZE

    def counts(self) -> list[dict[str, int]]:
        return [{"sum": hook.sum} for hook in self.hooks]


@dataclass
class Running:
    step: PendingStep
    number: int
    trace: Trace
    begun_with: int
    at: list[int | None] = field(default_factory=lambda: [None] * SIZE)
    turns: list[int] = field(default_factory=lambda: [0] * SIZE)


class RandomPlayer:
    """Plays a few turns whenever it is looked at; which ones, ``draw`` decides. A turn has the version of its
    moment.
    """

    def __init__(self, draw: Any) -> None:
        self.draw, self.version = draw, 0
        self.running: list[Running] = []
        self.done: dict[GroupName, GroupResult] = {}
        self.num_again = 0
        self.is_cancelled = False

    def begin(self, step: PendingStep, groups: Sequence[int], *, is_again: bool) -> None:
        self.num_again += len(groups) if is_again else 0
        for number in groups:
            trace = Trace(task=step.tasks[number], modes=step.modes[number])
            trace.append(parent=None, origin=Origin.PROMPT, token_ids=(1,), message=message())
            self.running.append(Running(step, number, trace, self.version))

    def pass_time(self, *, at_least: int) -> None:
        for _ in range(at_least + self.draw(0, 6)):
            if not self.running:
                return
            one = self.running[self.draw(0, len(self.running) - 1)]
            open_ = [rollout for rollout, num in enumerate(one.turns) if num < TURNS]
            rollout = open_[self.draw(0, len(open_) - 1)]
            node = one.trace.append(
                parent=one.at[rollout] or 0, origin=Origin.POLICY, token_ids=(2, 3), message=message(),
                logprobs=(-0.5, -0.25), entropies=(0.5, 0.25), weight_version=self.version,
            )  # fmt: skip
            one.at[rollout], one.turns[rollout] = node.node_id, one.turns[rollout] + 1
            if one.turns[rollout] == TURNS:
                one.trace.finish(
                    Leaf(node_id=node.node_id, rollout=rollout, outcome=Outcome.FINISHED, episode_return=1.0)
                )
            if min(one.turns) == TURNS:
                self.running.remove(one)
                report = RolloutReport(traces=[one.trace], num_batches=1, num_retries=0)
                played = GroupResult(report=report, gathered=[1], seconds=0.5)
                self.done[one.step.step, one.number] = played

    def poll(self, *, waits: bool) -> Mapping[GroupName, GroupResult]:
        self.pass_time(at_least=int(waits))
        done, self.done = self.done, {}
        return done

    def cancel(self) -> None:
        self.is_cancelled = True


def message() -> Message:
    return Message(role="assistant", content="a")


class Run:
    """The order of calls of a trainer, without an update; a checkpoint is a folder and numbers."""

    def __init__(
        self,
        draw: Any,
        *,
        staleness: int,
        num_steps: int,
        per_step: int,
        stages: Sequence[StageSettings] = (),
    ) -> None:
        self.stages = stages
        self.draw, self.staleness, self.num_steps, self.per_step = draw, staleness, num_steps, per_step
        self.step = self.version = self.cursor = 0
        self.trained: list[QueuedStep] = []
        self.hook = Counts()
        self.begin(None)

    def begin(self, kept: QueueSnapshot | None) -> None:
        train = SimpleNamespace(tasks_per_step=self.per_step, num_steps=self.num_steps, stages=self.stages)
        self.parts: Any = SimpleNamespace(
            settings=SimpleNamespace(train=train, seed=5), algorithm=Plain((self.hook,)), train_tasks=TASKS
        )
        self.player = RandomPlayer(self.draw)
        self.player.version = self.version
        self.flight = AsyncRolloutQueue(
            self.parts, self.player, step=self.step, cursor=self.cursor, snapshot=kept
        )

    @property
    def newest(self) -> int:
        return min(self.step + self.staleness, self.num_steps - 1)

    def train_step(self) -> None:
        self.flight.begin(self.newest)
        lines: list[str] = []
        played = self.flight.collect(self.step, on_tick=lines.append)
        staleness_metrics(played.sampled.traces, version=self.version, limit=self.staleness)  # or raises
        self.player.pass_time(at_least=0)  # beside the update
        self.version += 1
        self.player.version = self.version
        self.step, self.cursor = self.step + 1, played.sampled.cursor
        self.flight.begin(self.newest)
        self.trained.append(played)
        self.flight.on_step_recorded()

    def save(self, folder: Path) -> dict[str, Any]:
        kept = self.flight.snapshot()
        write_snapshot(folder, kept)
        seen = (list(self.hook.seen), self.hook.sum)
        return {"step": self.step, "version": self.version, "cursor": self.cursor, "seen": seen,
                "groups": {(one.step, number) for one in kept.steps for number in one.results}}  # fmt: skip

    def kill_and_resume(self, folder: Path, saved: dict[str, Any]) -> None:
        self.step, self.version, self.cursor = saved["step"], saved["version"], saved["cursor"]
        self.hook = Counts()
        self.hook.seen, self.hook.sum = list(saved["seen"][0]), saved["seen"][1]
        del self.trained[self.step :]
        kept = read_snapshot(folder)
        assert kept is not None
        found = {(one.step, number) for one in kept.steps for number in one.results}
        assert found == saved["groups"]
        num_open = sum(len(one.tasks) for one in kept.steps)
        self.begin(kept)
        assert self.flight.num_restarted_groups == self.player.num_again == num_open - len(found)


@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3))
def test_nothing_is_too_old_lost_or_out_of_order(
    data: st.DataObject, staleness: int, num_steps: int, per_step: int
) -> None:
    def draw(least: int, most: int) -> int:
        return data.draw(st.integers(least, most))

    run = Run(draw, staleness=staleness, num_steps=num_steps, per_step=per_step)
    with TemporaryDirectory() as name:
        folder = Path(name)
        saved = run.save(folder)
        kills = data.draw(st.integers(0, 2))
        while run.step < num_steps:
            run.train_step()
            if data.draw(st.booleans()):
                saved = run.save(folder)
            if kills and data.draw(st.booleans()):
                kills -= 1
                run.kill_and_resume(folder, saved)
    order, cursor = TaskOrder(tasks=TASKS, tasks_per_step=per_step, seed=5), 0
    for step, played in enumerate(run.trained):
        tasks, cursor = order.draw(per_step, cursor=cursor)
        sampled = played.sampled
        assert [trace.task for trace in sampled.traces] == tasks and sampled.selected == sampled.traces
        assert sampled.cursor == cursor and (sampled.num_extra_batches, sampled.is_filtered) == (0, False)
        for number, trace in enumerate(sampled.traces):
            assert sorted(trace.leaves) == list(range(SIZE))
            assert list(trace.modes) == [f"mode {step}.{number}"] * SIZE
            for _, path in trace.rollouts():
                versions = [node.weight_version for node in path if node.trainable]
                assert len(versions) == TURNS and versions == sorted(versions)  # type: ignore[type-var]
    # hooks have seen every group once, and what was gathered of it
    everything = [trace.task.key for played in run.trained for trace in played.sampled.traces]
    assert sorted(run.hook.seen) == sorted(everything) and run.hook.sum == len(everything)
    counted = [played.counts[0]["sum"] for played in run.trained] + [run.hook.sum]
    assert counted == sorted(counted)
    assert not run.player.running and not run.player.done


def first(least: int, most: int) -> int:
    """In the place of draws: the first of everything, and nothing more than is asked for."""
    return least


def test_an_episode_spans_versions_and_a_token_none() -> None:
    run = Run(random.Random(0).randint, staleness=2, num_steps=6, per_step=2)
    for _ in range(6):
        run.train_step()
    paths = [
        [node.weight_version for node in path if node.trainable]
        for played in run.trained
        for trace in played.sampled.traces
        for _, path in trace.rollouts()
    ]
    assert any(len(set(versions)) > 1 for versions in paths)


def test_a_step_that_is_further_than_the_bound_has_not_begun() -> None:
    run = Run(first, staleness=2, num_steps=9, per_step=2)
    for step in range(4):
        run.train_step()
        assert max(one.step.step for one in run.player.running) == step + 3  # that of version step + 1
        assert all(one.begun_with >= one.step.step - 2 for one in run.player.running)


def test_steps_that_begin_ahead_are_of_their_own_stage() -> None:
    """A step is begun while an earlier stage is trained on: it plays its own stage's tasks all the same."""
    half = len(TASKS) // 2
    stages = [
        StageSettings(tasks=tuple(task.key for task in TASKS[:half]), num_steps=2),
        StageSettings(tasks=tuple(task.key for task in TASKS[half:])),
    ]
    run = Run(first, staleness=2, num_steps=4, per_step=2, stages=stages)
    played = []
    for _ in range(4):
        run.train_step()
        played.append({trace.task.key for trace in run.trained[-1].sampled.traces})
    keys = [set(stage.tasks) for stage in stages]
    assert all(played[step] <= keys[step // 2] for step in range(4))


def test_a_token_that_is_too_old_is_a_fault() -> None:
    """What the bound forbids would be noticed: nothing is trained on, and nothing thrown away in silence."""
    run = Run(first, staleness=1, num_steps=3, per_step=1)
    run.version = 5  # as if weights had moved without their groups
    with pytest.raises(EngineFault, match="takes none older than 1 versions"):
        run.train_step()


def test_a_checkpoint_holds_groups_to_the_last_bit(tmp_path: Path) -> None:
    run = Run(first, staleness=2, num_steps=9, per_step=2)
    run.train_step()
    run.player.pass_time(at_least=SIZE * TURNS)
    run.save(tmp_path)
    before = run.flight.snapshot()
    found = read_snapshot(tmp_path)
    assert found is not None and found.counts == before.counts == [{"sum": 2}]
    for one, other in zip(before.steps, found.steps, strict=True):
        assert (one.step, list(one.tasks), list(one.modes), one.cursor) == (
            other.step, list(other.tasks), list(other.modes), other.cursor)  # fmt: skip
        assert one.results.keys() == other.results.keys()
        for number, group in one.results.items():
            [trace], [again] = group.report.traces, other.results[number].report.traces
            assert (trace.nodes, trace.leaves) == (again.nodes, again.leaves)
    assert sum(len(one.results) for one in found.steps) == 1
    assert json.loads((tmp_path / "queue.jsonl").read_text().splitlines()[0])["steps"][0]["step"] == 1


def test_groups_in_progress_are_cancelled_at_the_end() -> None:
    run = Run(first, staleness=1, num_steps=2, per_step=1)
    run.train_step()
    run.flight.cancel()
    assert run.player.is_cancelled
    run = Run(first, staleness=1, num_steps=1, per_step=1)
    run.train_step()
    run.flight.cancel()
    assert not run.player.is_cancelled  # nothing was


def test_an_algorithm_that_cannot_be_is_named() -> None:
    run = Run(first, staleness=1, num_steps=2, per_step=1)
    keep = GroupFilter(select=list, max_extra_batches=1)
    run.parts.algorithm.choice = TaskChoice(num_groups=1, group_filter=keep)
    with pytest.raises(ConfigError, match="leaves groups out"):
        run.flight.begin(0)
    run.parts.algorithm.hooks = (BranchHook(BranchSettings(), vocabulary_size=9, group_size=8),)
    with pytest.raises(ConfigError, match="rollouts that branch"):
        AsyncRolloutQueue(run.parts, run.player, step=0, cursor=0, snapshot=None)


FLIES = {"weights": "store", "batching": "stream", "in_flight": True, "max_staleness": 2}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"cluster": {"in_flight": False}}, "max_staleness above 1 needs in_flight"),
        ({"cluster": {"max_staleness": 0}}, "needs max_staleness of at least 1, and batching = stream"),
        ({"cluster": {"batching": "rounds"}}, "needs max_staleness of at least 1, and batching = stream"),
        ({"algorithm": {"type": "arpo"}}, "goes without rollouts that branch"),
        ({"algorithm": {"type": "tree_grpo"}}, "goes without rollouts that branch"),
        ({"algorithm": {"preset": "dapo-paper"}}, "goes without algorithm.dynamic_sampling"),
        ({"environment": {"max_batch_calls": 9}}, "which environment.max_batch_calls counts"),
        ({"buffer": {"evolve": True}, "algorithm": {"type": "rapo"}}, "goes without buffer.evolve"),
        ({"algorithm": {"sampler_correction": None}}, "max_staleness needs algorithm.sampler_correction"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_read(changed: dict[str, Any], reason: str) -> None:
    recipe: dict[str, Any] = {
        "environment": {"type": "factbook"}, "algorithm": {"type": "grpo"}, "cluster": FLIES,
    }  # fmt: skip
    validate(RunSettings, recipe)
    with pytest.raises(ConfigError, match=reason):
        validate(RunSettings, {**recipe, **{key: recipe.get(key, {}) | one for key, one in changed.items()}})
