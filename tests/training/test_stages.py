"""Stages of training: the tasks of a step, their order, and a run that resumes at a border of stages."""

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import api
from outrider.algorithms.base import Algorithm, TaskChoice
from outrider.algorithms.exploration import Empo2Settings
from outrider.algorithms.tips import ModeSchedule
from outrider.config import load_settings, validate
from outrider.environments.base import make_task_set
from outrider.errors import ConfigError, DataError
from outrider.rollout.scheduler import RolloutReport
from outrider.runs import Run
from outrider.smoke import NO_SERVER, smoke_assets, smoke_overrides
from outrider.trace import Trace
from outrider.training.data import (
    TaskOrder,
    count_groups,
    first_group,
    group_starts,
    play_step,
    require_tasks,
    stage_lines,
    stage_tasks,
)
from outrider.training.settings import RunSettings, StageSettings, TrainSettings
from outrider.types import Task
from tests.training.short_runs import records, train
from tests.training.tool_run import write_tool_run

GRPO = "algorithm.type=grpo"
HOUSES = Path(__file__).parents[2] / "recipes" / "house-empo2.toml"
STAGES = 'train.stages=[{tasks=["tasks-[0-3]"],num_steps=2},{tasks=["tasks-4"]}]'


class Asked(Algorithm):
    """Remembers among which tasks it could choose."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def choose_tasks(self, tasks: Sequence[Task], *, step: int, num_groups: int) -> TaskChoice:
        self.asked.append([task.key for task in tasks])
        return TaskChoice(num_groups=num_groups)


class Plays:
    """Rollouts that give the tasks back."""

    def run(self, tasks: Sequence[Task], **named: Any) -> RolloutReport:
        traces = [Trace(task=task, modes=("m",)) for task in tasks]
        return RolloutReport(traces=traces, num_batches=1, num_retries=0)


def played(
    train_settings: TrainSettings, tasks: Sequence[Task], *, seed: int
) -> tuple[list[list[str]], Asked]:
    """The keys of every step's groups, the cursor carried from step to step."""
    algorithm, steps, cursor = Asked(), [], 0
    parts: Any = SimpleNamespace(
        settings=SimpleNamespace(train=train_settings, seed=seed, algorithm=SimpleNamespace(tip_memory=None)),
        train_tasks=tasks,
        algorithm=algorithm,
    )
    for step in range(train_settings.num_steps):
        sampled = play_step(parts, Plays(), step=step, cursor=cursor)  # type: ignore[arg-type]
        cursor = sampled.cursor
        steps.append([trace.task.key for trace in sampled.traces])
    return steps, algorithm


@given(
    drawn=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=4),
    nums=st.tuples(*[st.integers(1, 7)] * 3),
    size=st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_every_stage_plays_its_own_tasks_from_the_beginning_of_its_own_order(
    drawn: list[tuple[str, int]], nums: tuple[int, int, int], size: int, seed: int
) -> None:
    """Also one of fewer tasks than a step has groups: then all of them, each once."""
    every = {
        letter: [Task(key=f"{letter}/{n}", question="") for n in range(num)]
        for letter, num in zip("abc", nums, strict=True)
    }
    tasks = [task for own in every.values() for task in own]
    stages = [StageSettings(tasks=(f"{letter}/*",), num_steps=length) for letter, length in drawn]
    stages[-1] = StageSettings(tasks=stages[-1].tasks)
    num_steps = sum(length for _, length in drawn)
    chosen = TrainSettings(num_steps=num_steps, tasks_per_step=size, stages=tuple(stages))
    steps, algorithm = played(chosen, tasks, seed=seed)
    begin = 0
    for number, (letter, length) in enumerate(drawn):
        own = every[letter]
        order, cursor = TaskOrder(tasks=own, tasks_per_step=size, seed=seed, stage=number), 0
        for step in range(begin, begin + length):
            expected, cursor = order.draw(size, cursor=cursor)
            assert steps[step] == [task.key for task in expected]
            assert len(set(steps[step])) == min(size, len(own))
            assert algorithm.asked[step] == [task.key for task in own]
        begin += length


def test_within_an_epoch_of_a_stage_every_task_comes_once() -> None:
    tasks = [Task(key=f"{letter}/{n}", question="") for letter in "ab" for n in range(6)]
    stages = (StageSettings(tasks=("a/*",), num_steps=4), StageSettings(tasks=("b/*",)))
    steps, _ = played(TrainSettings(num_steps=7, tasks_per_step=2, stages=stages), tasks, seed=1)
    assert sorted(key for step in steps[:3] for key in step) == [f"a/{n}" for n in range(6)]
    # The fourth step began another epoch of the first stage: the second one begins anew all the same.
    assert sorted(key for step in steps[4:] for key in step) == [f"b/{n}" for n in range(6)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tool_run(tmp_path_factory.mktemp("stages"))
    path.write_text(path.read_text().replace('type = "rapo"\ngroup_size = 4\nnum_hybrid = 2', ""))
    return path


def test_a_run_that_was_killed_at_a_border_or_was_shorter_ends_in_the_same_bits(recipe: Path) -> None:
    """The newest checkpoint is that of the border; the last stage lasts as long as the run."""
    options = [GRPO, "algorithm.group_size=2", STAGES, "train.checkpoint_every=1", "train.keep_checkpoints=9"]
    run = train(recipe, "whole", *options, "train.num_steps=4")
    steps = records(run)
    assert [one["stage/number"] for one in steps] == [1, 1, 2, 2]
    assert [one["group/num"] for one in steps] == [2, 2, 1, 1]
    keys = {step: set(Run.from_path(run).traces(step)["task_key"].to_pylist()) for step in (1, 2, 3, 4)}
    assert keys[1] | keys[2] == {f"tasks-{n}" for n in range(4)} and keys[3] == keys[4] == {"tasks-4"}
    killed = Path(shutil.copytree(run, recipe.parent / "killed"))
    for step in (3, 4):
        shutil.rmtree(killed / "checkpoints" / f"step-{step:06d}")
    api.train(resume=killed)
    grown = train(recipe, "grown", *options, "train.num_steps=3")
    api.train(resume=grown, overrides=["train.num_steps=4"])
    last = Path("checkpoints") / "step-000004"
    for other in (killed, grown):
        for name in ("masters.safetensors", "optimizer.safetensors"):
            assert (run / last / name).read_bytes() == (other / last / name).read_bytes(), (other.name, name)
        states = [json.loads((one / last / "state.json").read_text()) for one in (run, other)]
        if other is grown:  # which has the evaluation at its former end too
            assert states[1].pop("num_evaluations") == states[0].pop("num_evaluations") + 1
            for state in states:
                del state["own_checksum"], state["num_metric_records"]
        assert states[0] == states[1]
        assert [one["stage/number"] for one in records(other)] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ('[{tasks=["a"],num_steps=1},{tasks=["b"],num_steps=1}]', "lasts until train.num_steps are done"),
        ('[{tasks=["a"]},{tasks=["b"]}]', "every one of train.stages but the last needs num_steps"),
        ('[{tasks=["a"],num_steps=10},{tasks=["b"]}]', "would begin at step 10"),
        ("[{tasks=[]}]", "tasks"),
    ],
)
def test_stages_that_cannot_be_are_refused(recipe: Path, stages: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_settings(RunSettings, file=recipe, overrides=[GRPO, f"train.stages={stages}"])


def test_an_evaluation_of_a_recipe_with_stages_has_no_stage(recipe: Path) -> None:
    chosen = load_settings(RunSettings, file=recipe, overrides=[GRPO, STAGES, "train.num_steps=0"])
    assert len(chosen.train.stages) == 2 and stage_lines(chosen.train, ()) == []


def test_groups_are_counted_by_the_tasks_that_they_come_from() -> None:
    """So that EMPO² says that a stage shows no tips where that stage plays no task twice, and only there."""
    tasks = [
        Task(key=f"{letter}/{n}", question="") for letter, num in (("a", 3), ("b", 9)) for n in range(num)
    ]
    assert count_groups(TrainSettings(num_steps=5, tasks_per_step=4), tasks) == [(20, 12)]
    stages = tuple(StageSettings(tasks=(f"{one}/*",), num_steps=n) for one, n in (("a", 1), ("b", 2)))
    chosen = TrainSettings(num_steps=5, tasks_per_step=4, stages=(*stages, StageSettings(tasks=("a/*",))))
    assert count_groups(chosen, tasks) == [
        (3 * 3, 3),
        (8, 9),
    ]  # three steps of three groups on a, in two stages
    empo2 = validate(Empo2Settings, {})
    said = [empo2.warnings(num_groups=groups, num_tasks=num) for groups, num in count_groups(chosen, tasks)]
    assert [len(one) for one in said] == [0, 1] and "8 groups play none of the 9 tasks twice" in said[1][0]


def test_a_pattern_without_tasks_is_an_error_and_a_small_stage_is_reported(recipe: Path) -> None:
    tasks = [Task(key=f"tasks-{n}", question="") for n in range(6)]
    wanted = load_settings(RunSettings, file=recipe, overrides=[GRPO, STAGES]).train
    require_tasks(wanted, tasks)
    assert len(stage_tasks(wanted.stages[0], tasks)) == 4
    first, second = stage_lines(wanted, tasks)
    assert first == "stage 1 of 2: steps 1 to 2 on 4 tasks (tasks-[0-3])"
    assert second.startswith("stage 2 of 2: steps 3 to 10 on 1 task (tasks-4); a step has 1 group there")
    with pytest.raises(DataError, match=r"'taks-\*' of stage 1 fits no training task"):
        require_tasks(wanted.model_copy(update={"stages": (StageSettings(tasks=("taks-*",)),)}), tasks)


@pytest.mark.parametrize("num_steps", [2, 0])
def test_a_smoke_run_has_the_tasks_of_every_stage(num_steps: int) -> None:
    """Two houses, as without stages, would be none of the second stage's."""
    stages = 'train.stages=[{tasks=["house/*/train/[0-3]/*"],num_steps=1},{tasks=["house/*/train/[4-7]/*"]}]'
    overrides = [stages, f"train.num_steps={num_steps}", "environment.num_train=8"]
    chosen = load_settings(RunSettings, file=HOUSES, overrides=overrides)
    smaller = smoke_overrides(chosen, smoke_assets(), server=NO_SERVER)
    shrunk = load_settings(RunSettings, file=HOUSES, overrides=[*overrides, *smaller])
    assert shrunk.train.num_steps == num_steps
    if num_steps:
        require_tasks(shrunk.train, make_task_set(shrunk.environment).tasks("train"))
    else:
        assert shrunk.environment.model_dump()["num_train"] == 2


def test_a_smoke_run_on_a_stand_in_has_stages_of_all_its_tasks(recipe: Path, tmp_path: Path) -> None:
    gone = recipe.read_text().replace('path = "', f'path = "{tmp_path}/gone/')
    (moved := tmp_path / "recipe.toml").write_text(gone)
    chosen = load_settings(RunSettings, file=moved, overrides=[GRPO, STAGES])
    smaller = smoke_overrides(chosen, smoke_assets(), server=NO_SERVER)
    shrunk = load_settings(RunSettings, file=moved, overrides=[GRPO, STAGES, *smaller])
    assert [one.tasks for one in shrunk.train.stages] == [("*",), ("*",)]
    assert [one.num_steps for one in shrunk.train.stages] == [1, None] and shrunk.train.num_steps == 2


def test_groups_are_counted_by_stage() -> None:
    """Modes of EMPO², prefixes and help have exact proportions also in a stage of few tasks."""
    tasks = [Task(key=f"{kind}/{number}", question="?") for kind in "ab" for number in range(5)]
    stages = [
        {"num_steps": 2, "tasks": ["a/*"]}, {"num_steps": 3, "tasks": ["b/1", "b/2"]}, {"tasks": ["*"]},
    ]  # fmt: skip
    settings = TrainSettings.model_validate({"tasks_per_step": 4, "num_steps": 9, "stages": stages})
    starts = group_starts(settings, tasks)
    assert starts == ((0, 4), (2, 2), (5, 4))
    assert [first_group(starts, step) for step in range(8)] == [0, 4, 8, 10, 12, 14, 18, 22]
    plain = TrainSettings(tasks_per_step=4, num_steps=9)
    assert [first_group(group_starts(plain, tasks), step) for step in range(3)] == [0, 4, 8]
    assert [first_group(group_starts(plain, tasks[:3]), step) for step in range(3)] == [0, 3, 6]
    schedule = ModeSchedule(
        memory_probability=0.25, off_policy_probability=0.0, seed=0, first_group=partial(first_group, starts)
    )
    numbers = [(step, group) for step in range(200) for group in range(2 if 2 <= step < 5 else 4)]
    assert [schedule.mode_of(*number) for number in numbers] == [
        schedule.mode(number) for number in range(len(numbers))
    ]
