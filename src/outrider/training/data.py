"""The tasks of a run: its stages (``train.stages``), the tasks of each step, and the rollouts of a step.

The stage depends on the step only, so there is no state to save.
"""

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Final

from outrider.algorithms.base import ExpertPaths, TaskChoice
from outrider.algorithms.distill_help import episode_lines, find_help_hook, with_helped_mode
from outrider.config import Settings
from outrider.environments.base import TaskSet, listed_tasks, split_tasks
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import ConfigError, DataError, OutriderError
from outrider.printing import plural
from outrider.rollout.faults import count_cut, cut_line, fault_line, lost_reasons
from outrider.rollout.scheduler import RolloutReport, Rollouts, largest
from outrider.rollout.settings import EvaluationSettings
from outrider.seeding import stream
from outrider.trace import Trace
from outrider.training.cold_start import expert_rollouts
from outrider.training.components import Components, EvaluationTasks
from outrider.training.experts import request_expert_paths
from outrider.training.settings import RunSettings, StageSettings, TrainSettings
from outrider.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStep:
    """``traces`` are all groups of a step, ``selected`` those for the update: all, or if the step
    ``is_filtered`` those that passed the algorithm's filter.

    ``faults``, ``fault_reasons`` and ``loop_lag_s`` cover all rounds
    (:class:`~outrider.rollout.scheduler.RolloutReport`).
    """

    is_filtered: bool
    traces: list[Trace]
    selected: list[Trace]
    faults: Counter[str]
    fault_reasons: tuple[str, ...]
    num_extra_batches: int
    cursor: int
    loop_lag_s: float | None = None

    def metrics(self, num_groups: int) -> dict[str, float]:
        """Metrics of dynamic sampling; ``num_groups`` groups make a step."""
        return {
            "group/num_dropped": float(len(self.traces) - len(self.selected)),
            "group/num_missing": float(num_groups - len(self.selected)),
            "group/num_extra_batches": float(self.num_extra_batches),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedStep:
    """The rollouts of a step that is not trained on yet. ``counts`` are the algorithm's before these
    rollouts, ``seconds`` their duration if they were generated during an earlier update, else 0.
    """

    sampled: SampledStep
    counts: Sequence[Mapping[str, int]]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder:
    """An endless order of the training tasks: a new permutation every epoch, keyed by the seed and the
    number of the ``stage``, if there is one. A cursor counts the tasks that were drawn.
    """

    tasks: Sequence[Task]
    tasks_per_step: int
    seed: int
    stage: int | None = None

    def draw(self, num: int, *, cursor: int, seen: Set[str] = frozenset()) -> tuple[list[Task], int]:
        """Return up to ``num`` tasks from ``cursor`` on whose keys are not in ``seen``, and the cursor after
        the last one.

        A step contains no task twice, because both groups would draw the same random numbers; if there are
        too few tasks, it gets fewer. An epoch leaves out the tasks that would not fill a step, unless there
        are no others.
        """
        size = max(1, min(self.tasks_per_step, len(self.tasks)))
        per_epoch = len(self.tasks) // size * size
        names = ("task order",) if self.stage is None else ("task order", "stage", self.stage)
        num_tasks = min(num, len({task.key for task in self.tasks} - seen))
        selected: dict[str, Task] = {}
        while len(selected) < num_tasks:
            epoch, start = divmod(cursor, per_epoch)
            order = stream(self.seed, *names, epoch).permutation(len(self.tasks))
            for index in order[start:per_epoch]:
                task = self.tasks[index]
                cursor += 1
                if task.key not in seen:
                    selected.setdefault(task.key, task)
                if len(selected) == num_tasks:
                    break
        return list(selected.values()), cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Groups of a step that are rolled out together. ``cursor`` is the position in the order of tasks after
    them; ``is_continued``: further groups of a step, which share its limit on tool calls. ``lost`` are the
    reasons of the experts that have failed in the step so far.
    """

    tasks: Sequence[Task]
    modes: Sequence[Sequence[str]]
    cursor: int
    is_continued: bool = False
    lost: Sequence[str] = ()


Rounds = Generator[Round, RolloutReport, SampledStep]


def play_step(parts: Components, rollouts: Rollouts, *, step: int, cursor: int) -> SampledStep:
    """Roll out the groups of a training step; ``cursor`` is the position in the order of tasks after the
    step before.
    """
    rounds = sample_rounds(parts, step=step, cursor=cursor)
    report: RolloutReport | None = None
    while True:
        try:
            now = next(rounds) if report is None else rounds.send(report)
        except StopIteration as end:
            sampled: SampledStep = end.value
            return sampled
        report = rollouts.run(
            now.tasks, modes=now.modes.__getitem__, training_step=step, continued=now.is_continued
        )


def demonstrate_tasks(parts: Components, tasks: Sequence[Task]) -> list[str]:
    """Let the experts solve tasks whose demonstrations are help (``algorithm.distill``), each task once per
    run. A task that the expert does not solve has none.

    Returns the reasons of experts that failed. They are requested again when their task is sampled again, as
    in a resumed run: checkpoints do not contain the demonstrations.
    """
    hook = find_help_hook(parts.algorithm)
    if hook is None or "demonstration" not in hook.settings.help:
        return []
    new = {task.key: task for task in tasks if task.key not in hook.demonstrations}
    # The initial states are those of the first step, so that a resumed run has the same demonstrations.
    paths, reasons = request_expert_paths(parts.task_set, list(new.values()), parts.settings, training_step=0)
    known = [task for task in new.values() if paths.get(task.key)]
    traces = expert_rollouts(parts, known, lambda task: paths[task.key], training_step=0) if known else []
    lost = {trace.task.key for trace in traces if lost_reasons([trace])}
    hook.demonstrations |= {key: () for key in paths if key not in lost} | {
        trace.task.key: tuple(episode_lines(path))
        for trace in traces
        for leaf, path in trace.scored_rollouts()
        if leaf.success
    }
    return [*reasons, *(f"the expert of {reason}" for reason in lost_reasons(traces))]


def plan_step(
    parts: Components, *, step: int, cursor: int, choice: TaskChoice | None = None
) -> tuple[TaskOrder, int, TaskChoice]:
    """Return the order of a step's tasks, the cursor at which the step begins, and the algorithm's
    choice, unless it is given. ``cursor`` is the position after the step before.
    """
    settings, tasks = parts.settings, parts.train_tasks
    size, stages, number = settings.train.tasks_per_step, settings.train.stages, None
    if stages:
        number = _stage_number(step, stages)
        tasks = stage_tasks(stages[number], tasks)
        # Each stage has an order of its own.
        cursor = 0 if step == _stage_starts(stages)[number] else cursor
    order = TaskOrder(tasks=tasks, tasks_per_step=size, seed=settings.seed, stage=number)
    return order, cursor, choice or parts.algorithm.choose_tasks(tasks, step=step, num_groups=size)


def sample_rounds(
    parts: Components,
    *,
    step: int,
    cursor: int,
    choice: TaskChoice | None = None,
    lost_before: Sequence[str] = (),
) -> Rounds:
    """Yield the chosen tasks of a training step; with a filter, also as many further tasks as groups were
    dropped, up to its limit of rounds. Every round is answered by its report; the step is returned.

    ``choice`` replaces the algorithm's choice of tasks. Before a round, the experts are requested for the
    help and the prefixes of its groups. A group that replaces a dropped one has its number in the schedule of
    help, so that the groups that are trained have exact shares.

    ``lost_before`` are the reasons of failed experts of a step that begins again after a kill. Those that do
    not fail again are counted too, because groups that have ended were sampled without them.
    """
    settings, algorithm = parts.settings, parts.algorithm
    order, cursor, choice = plan_step(parts, step=step, cursor=cursor, choice=choice)
    help_hook = find_help_hook(algorithm)
    help_settings = None if help_hook is None else help_hook.settings
    first = 0 if help_hook is None else first_group(group_starts(settings.train, parts.train_tasks), step)
    traces: list[Trace] = []
    selected: list[Trace] = []
    faults: Counter[str] = Counter()
    reasons: list[str] = []
    all_lost: list[str] = []
    recovered: list[str] = []
    lags: list[float | None] = []
    num_batches = 0
    filtered = choice.group_filter if choice.tasks is None else None
    num_groups = choice.num_groups if choice.tasks is None else len(choice.tasks)
    open_numbers = list(range(num_groups))  # without a selected group
    max_extra_batches = filtered.max_extra_batches if filtered else 0
    while num_batches <= max_extra_batches and (choice.tasks is not None or len(selected) < num_groups):
        tasks = choice.tasks
        if tasks is None:  # otherwise nothing is drawn from the order of tasks
            # Only what is missing, and no task twice: groups of one key would share their random streams.
            seen = {trace.task.key for trace in traces}
            tasks, cursor = order.draw(num_groups - len(selected), cursor=cursor, seen=seen)
            if not tasks:
                break
        modes = [  # groups are numbered on through the rounds of a step
            with_helped_mode(
                algorithm.modes_of(step, len(traces) + number),
                help_settings,
                group=first + open_numbers[number],
                seed=settings.seed,
                has_tips=settings.algorithm.tip_memory is not None,
            )
            for number in range(len(tasks))
        ]
        play = StepExperts(parts=parts, step=step)
        lost = demonstrate_tasks(parts, tasks)
        lost += algorithm.prepare(tasks, modes, step=step, play=play) or ()
        all_lost += lost
        recovered = list((Counter(lost_before) - Counter(all_lost)).elements())
        report = yield Round(
            tasks=tasks,
            modes=modes,
            cursor=cursor,
            is_continued=num_batches > 0,
            lost=(*all_lost, *recovered),
        )
        traces += report.traces
        chosen = report.traces if filtered is None else filtered.select(report.traces)
        selected += chosen
        selected_ids = {id(trace) for trace in chosen}
        sampled = dict(zip(open_numbers, report.traces, strict=False))
        open_numbers = [number for number in open_numbers if id(sampled.get(number)) not in selected_ids]
        faults += report.faults + Counter(expert=len(lost))
        reasons += [*report.fault_reasons, *lost]
        lags.append(report.loop_lag_s)
        num_batches += 1
    return SampledStep(
        is_filtered=filtered is not None,
        traces=traces,
        selected=selected,
        faults=faults + Counter(expert=len(recovered)),
        fault_reasons=(*reasons, *recovered),
        num_extra_batches=max(0, num_batches - 1),
        cursor=cursor,
        loop_lag_s=largest(lags),
    )


# Off-policy data that joins a step before the update: rollouts that the algorithm adds, or that experts
# generate.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExperts:
    """The experts of a training step, for an algorithm that plays them
    (:class:`~outrider.algorithms.base.StepPlay`).
    """

    parts: Components
    step: int
    rollouts: list[Trace] = field(default_factory=list)

    def request_expert_paths(self, tasks: Sequence[Task]) -> tuple[ExpertPaths, list[str]]:
        """Return the experts' steps by task key, and the reasons of experts that failed."""
        return request_expert_paths(self.parts.task_set, tasks, self.parts.settings, training_step=self.step)

    def play_experts(self, tasks: Sequence[Task], paths: ExpertPaths) -> list[Trace]:
        """Return one rollout per task, from the initial state of its group."""
        traces = expert_rollouts(self.parts, tasks, lambda task: paths[task.key], training_step=self.step)
        self.rollouts.extend(traces)
        return traces


def add_off_policy_groups(
    parts: Components, traces: Sequence[Trace], *, step: int, note: Callable[[str], None]
) -> tuple[list[Trace], dict[str, float]]:
    """Return off-policy groups that already have advantages, and the metrics of the mix.

    Rollouts that the algorithm adds to ``traces`` in place get their advantages later. ``note`` reports why
    rollouts were lost.
    """
    experts = StepExperts(parts=parts, step=step)
    added = parts.algorithm.augment(traces, step=step, play=experts)
    if added.lost:
        note(
            f"step {step + 1}: "
            f"{plural(len(added.lost), 'demonstration was', 'demonstrations were')} lost to faults: "
            f"{fault_line(added.lost)}"
        )
    cut = count_cut(experts.rollouts, parts.settings.limits, context_length=parts.engine.context_length)
    if not cut:
        return added.groups, added.metrics
    note(
        f"step {step + 1}: limits cut {cut.total()} of {plural(len(experts.rollouts), 'demonstration')}: "
        f"{cut_line(cut)}"
    )
    return added.groups, added.metrics | {"rollout/num_demonstrations_cut": float(cut.total())}


def interleave(fresh: Sequence[Trace], replayed: Sequence[Trace]) -> list[Trace]:
    """Merge both in their order and evenly, so that every mini-batch gets its share of each."""
    placed = [
        ((i + 0.5) / len(source), number, trace)
        for number, source in enumerate((fresh, replayed))
        for i, trace in enumerate(source)
    ]
    return [trace for _, _, trace in sorted(placed, key=lambda entry: entry[:2])]


# Stages (``train.stages``).


def stage_tasks(stage: StageSettings, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks whose keys match the stage, in order."""
    return [task for task in tasks if any(fnmatchcase(task.key, pattern) for pattern in stage.tasks)]


def require_tasks(settings: TrainSettings, tasks: Sequence[Task]) -> None:
    """Raises DataError where a pattern of a stage fits no training task."""
    for number, stage in enumerate(settings.stages, start=1):
        for pattern in stage.tasks:
            if not any(fnmatchcase(task.key, pattern) for task in tasks):
                raise DataError(
                    f"train.stages: {pattern!r} of stage {number} fits no training task; "
                    f"the first one is {tasks[0].key!r}"
                )


def group_starts(settings: TrainSettings, tasks: Sequence[Task]) -> tuple[tuple[int, int], ...]:
    """Return the first step of every stage, or of the run, with the number of groups in its steps: no task
    comes twice in a step.
    """
    size = settings.tasks_per_step
    if not settings.stages:
        return ((0, min(size, len(tasks))),)
    begins = _stage_starts(settings.stages)
    nums = [len(stage_tasks(stage, tasks)) for stage in settings.stages]
    return tuple((begin, min(size, num)) for begin, num in zip(begins, nums, strict=True))


def first_group(starts: Sequence[tuple[int, int]], step: int) -> int:
    """Return the number of groups before a training step; ``starts`` are :func:`group_starts`."""
    ends = [*(begin for begin, _ in starts[1:]), step]
    return sum(max(0, min(end, step) - begin) * num for (begin, num), end in zip(starts, ends, strict=True))


def count_groups(settings: TrainSettings, tasks: Sequence[Task]) -> list[tuple[int, int]]:
    """Return pairs of the number of groups of the whole run and the number of tasks that they are drawn
    from: one pair for the run, or one per stage, where stages with the same patterns count as one.
    """
    size = settings.tasks_per_step
    if not settings.stages:
        return [(settings.num_steps * size, len(tasks))]
    begins = [*_stage_starts(settings.stages), settings.num_steps]
    counts: dict[tuple[str, ...], tuple[int, int]] = {}
    for stage, begin, end in zip(settings.stages, begins[:-1], begins[1:], strict=True):
        num_tasks = len(stage_tasks(stage, tasks))
        before, _ = counts.get(stage.tasks, (0, num_tasks))
        counts[stage.tasks] = before + max(0, end - begin) * min(size, num_tasks), num_tasks
    return list(counts.values())


def stage_metrics(settings: TrainSettings, *, step: int) -> dict[str, float]:
    """The metric with the number of a step's stage, from 1; empty if there are no stages."""
    return {"stage/number": 1.0 + _stage_number(step, settings.stages)} if settings.stages else {}


def stage_lines(settings: TrainSettings, tasks: Sequence[Task]) -> list[str]:
    """Return lines that describe the tasks of each stage and name stages with too few tasks for a step.

    Empty if the run takes no step, for example when it only evaluates a recipe.
    """
    if not settings.num_steps:
        return []
    size, lines = settings.tasks_per_step, list[str]()
    begins = [*_stage_starts(settings.stages), settings.num_steps]
    for number, stage in enumerate(settings.stages):
        num = len(stage_tasks(stage, tasks))
        few = (
            f"; a step has {plural(num, 'group')} there, not {size}: no task comes twice"
            if num < size
            else ""
        )
        lines.append(
            f"stage {number + 1} of {len(settings.stages)}: steps {begins[number] + 1} to "
            f"{begins[number + 1]} on {plural(num, 'task')} ({', '.join(stage.tasks)}){few}"
        )
    return lines


def _stage_number(step: int, stages: Sequence[StageSettings]) -> int:
    return max(number for number, begin in enumerate(_stage_starts(stages)) if begin <= step)


def _stage_starts(stages: Sequence[StageSettings]) -> list[int]:
    return [0, *accumulate(stage.num_steps or 0 for stage in stages[:-1])]


# Warnings about the tasks of a run: evaluation tasks that are also training tasks, repeated questions, and
# questions with different answers.
#
# Tasks with answers are compared by question and metadata, other tasks by key too, because the first
# observation of a simulator may be equal for many tasks.


_LONGEST: Final = 60  # characters of a question in a message


def shared_tasks(train: Sequence[Task], evaluation: Sequence[Task]) -> list[Task]:
    """Return the evaluation tasks that are training tasks: those with equal data, and those with the question
    and an answer of a training task, because rows of two files may differ in other columns.
    """
    known = {_identity(task) for task in train} | {pair for task in train for pair in _answered(task)}
    return [task for task in evaluation if not known.isdisjoint((_identity(task), *_answered(task)))]


def kind_of_tasks(num_tasks: int, num_training: int) -> str:
    """Describe evaluation tasks: ``held-out tasks`` if none of them is a training task."""
    if not num_training:
        return "held-out tasks"
    if num_training >= num_tasks:
        return "training tasks"
    return f"tasks, {num_training} of them training tasks"


def train_overlap_lines(shared: Sequence[Task], num_tasks: int, split: str) -> list[str]:
    """One line if evaluation tasks are training tasks (``shared``), else none."""
    if not shared:
        return []
    which = "all" if len(shared) == num_tasks else f"{len(shared)} of the"
    example = "" if split == "train" else f", for example {_cut(shared[0].question)!r}"
    return [
        f"EVALUATION ON TRAINING TASKS: {which} {num_tasks} evaluation tasks (split {split}) are training "
        f"tasks{example}; a score on them does not measure generalization"
    ]


def repetition_lines(tasks: Sequence[Task], split: str) -> list[str]:
    """One line for questions that occur more than once, and one for those of them with different answers."""
    groups: dict[tuple[str, ...], list[Task]] = {}
    for task in tasks:
        if task.answers:
            groups.setdefault(_identity(task), []).append(task)
    repeated = [group for group in groups.values() if len(group) > 1]
    several = [
        group for group in repeated if len({frozenset(map(_normal, task.answers)) for task in group}) > 1
    ]
    equal = [group for group in repeated if group not in several]
    lines = []
    if equal:
        count = sum(map(len, equal))
        lines.append(
            f"{split}: {plural(len(equal), 'question occurs', 'questions occur')} more than once "
            f"({count} of {plural(len(tasks), 'task')}), "
            f"for example {_cut(equal[0][0].question)!r}"
        )
    if several:
        answers = " and ".join(repr(task.answers[0]) for task in several[0][:2])
        lines.append(
            f"{split}: {plural(len(several), 'question occurs', 'questions occur')} with different answers, "
            f"for example {_cut(several[0][0].question)!r} with {answers}"
        )
    return lines


def task_notes(
    family: TaskSet, settings: RunSettings, train: Sequence[Task], evaluation: Sequence[Task]
) -> tuple[int, list[str]]:
    """Return how many of the evaluation tasks are training tasks, and lines about that and about repeated
    questions.
    """
    split = settings.evaluation.sets[0].split
    known = tasks_to_compare(family, settings, train, split)
    shared = shared_tasks(known, evaluation)
    lines = train_overlap_lines(shared, len(evaluation), split) + repetition_lines(train, "train")
    return len(shared), lines + (repetition_lines(evaluation, split) if split != "train" else [])


def read_other_sets(
    task_set: TaskSet, settings: RunSettings, train: Sequence[Task]
) -> tuple[list[EvaluationTasks], list[str]]:
    """Read the evaluation sets after the main one. Returns also lines about training tasks in them.

    Raises the errors of :func:`read_eval_tasks`, and ConfigError for a set without tasks.
    """
    others: list[EvaluationTasks] = []
    lines: list[str] = []
    for number, chosen in enumerate(settings.evaluation.panels[1:], start=1):
        tasks = read_eval_tasks(task_set, settings.evaluation, number)
        shared = shared_tasks(tasks_to_compare(task_set, settings, train, chosen.split), tasks)
        overlap = train_overlap_lines(shared, len(tasks), chosen.split)
        lines += [f"evaluation set {chosen.name}: {line}" for line in overlap]
        others.append(
            EvaluationTasks(name=chosen.name, split=chosen.split, tasks=tasks, num_training_tasks=len(shared))
        )
        if not tasks:
            raise ConfigError(f"the evaluation set {chosen.name!r} has no tasks: see evaluation.panels")
    return others, lines


def training_tasks(task_set: TaskSet, settings: RunSettings) -> Sequence[Task]:
    """The training tasks; empty if nothing is trained. Raises DataError if they do not fill a step."""
    num_steps, size = settings.train.num_steps, settings.train.tasks_per_step
    tasks = split_tasks(task_set, "train") if num_steps or settings.cold_start.num_examples else ()
    if num_steps and len(tasks) < size:
        raise DataError(
            f"{plural(len(tasks), 'training task is', 'training tasks are')} fewer than "
            f"train.tasks_per_step = {size}"
        )
    if num_steps:
        require_tasks(settings.train, tasks)
    return tasks


def read_eval_tasks(task_set: TaskSet, settings: EvaluationSettings, number: int = 0) -> Sequence[Task]:
    """The tasks of evaluation set ``number``: the first ``num_tasks`` of its split or list. Raises DataError
    if they are not the tasks whose hash the recipe has, and ConfigError if the default of ``num_tasks`` would
    leave out tasks of a list.
    """
    chosen = settings.sets[number]
    tasks = split_tasks(task_set, chosen.split)
    if chosen.task_list is not None:
        tasks = listed_tasks(tasks, chosen.task_list, split=chosen.split)
        if len(tasks) > chosen.num_tasks and "num_tasks" not in chosen.model_fields_set:
            raise ConfigError(
                f"{chosen.task_list} lists {plural(len(tasks), 'task')}, and num_tasks of the evaluation set "
                f"{chosen.name!r} is {chosen.num_tasks} by default: set num_tasks = {len(tasks)} to use all"
            )
    tasks = tasks[: chosen.num_tasks]
    tasks_hash = hash_tasks(tasks)
    if chosen.sha256 is not None and tasks_hash != chosen.sha256:
        key = f"the sha256 of the evaluation set {chosen.name!r}" if chosen.name else "evaluation.panel"
        raise DataError(
            f"the {len(tasks)} tasks of the split {chosen.split!r} are not the panel of the recipe: "
            f"{key} is {chosen.sha256}, theirs is {tasks_hash} "
            f"({'remove sha256 to take any' if chosen.name else 'evaluation.panel=none takes any'})"
        )
    return tasks


def require_some_tasks(train: Sequence[Task], evaluation: Sequence[Task], settings: RunSettings) -> None:
    """Raise ConfigError for a run that neither trains nor evaluates."""
    if not train and not evaluation:
        split = settings.evaluation.sets[0].split
        raise ConfigError(f"the split {split!r} has no tasks to evaluate on: set evaluation.split")


def tasks_to_compare(
    task_set: TaskSet, settings: RunSettings, train: Sequence[Task], split: str
) -> Sequence[Task]:
    """Return the training tasks to compare tasks of ``split`` with: those of the run or, in an evaluation
    without training, those of the recipe if it has a file of them.
    """
    if train or split == "train":
        return train or split_tasks(task_set, "train")
    dataset = getattr(settings.environment, "train", None)
    path = getattr(dataset, "path", None)
    if not isinstance(dataset, Settings) or path is None or not path.is_file():
        return ()
    try:
        return split_tasks(task_set, "train")
    except OutriderError:  # an evaluation does not need them
        return ()


def _identity(task: Task) -> tuple[str, ...]:
    metadata = json.dumps(dict(task.metadata), sort_keys=True, default=str)
    return (_normal(task.question), metadata) if task.answers else (task.key, task.question, metadata)


def _answered(task: Task) -> list[tuple[str, ...]]:
    return [("answered", _normal(task.question), _normal(answer)) for answer in task.answers]


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(" ?.!")


def _cut(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 1]}…"
