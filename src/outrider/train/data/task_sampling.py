"""Which tasks a step plays, and which of the groups it trains on (DAPO's dynamic sampling)."""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial

from outrider.algorithms.algorithm import TaskChoice
from outrider.rollout.loop_lag import largest
from outrider.rollout.scheduler import RolloutReport, Rollouts
from outrider.seeding import stream
from outrider.trace import Trace
from outrider.train.components import Components
from outrider.train.data.stages import find_stage
from outrider.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder:
    """An endless order of the training tasks: a fresh permutation every epoch, keyed by the seed and, where
    there is one, the number of the ``stage``. A cursor counts what was taken.
    """

    tasks: Sequence[Task]
    tasks_per_step: int
    seed: int
    stage: int | None = None

    def draw(self, num: int, *, cursor: int, seen: Set[str] = frozenset()) -> tuple[list[Task], int]:
        """Up to ``num`` tasks from ``cursor`` on whose keys are not in ``seen``, and the cursor behind the
        last one.

        A step plays no task twice, because both plays would draw the same random numbers: fewer come where
        none is left. An epoch leaves out the tasks that would not fill a step, unless they are all that
        there is.
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
class SampledStep:
    """``traces`` are all groups that were played, ``trained`` those that the update gets: all, or where the
    step ``is_filtered`` those that the algorithm's filter kept.

    ``faults`` and ``fault_reasons`` are those of all rounds
    (:class:`~outrider.rollout.scheduler.RolloutReport`), and so is ``loop_lag_s``.
    """

    is_filtered: bool
    traces: list[Trace]
    trained: list[Trace]
    faults: Counter[str]
    fault_reasons: tuple[str, ...]
    num_extra_batches: int
    cursor: int
    loop_lag_s: float | None = None

    def metrics(self, num_groups: int) -> dict[str, float]:
        """Metrics of dynamic sampling; ``num_groups`` groups make a step."""
        return {
            "group/num_dropped": float(len(self.traces) - len(self.trained)),
            "group/num_missing": float(num_groups - len(self.trained)),
            "group/num_extra_batches": float(self.num_extra_batches),
        }


def play_step(parts: Components, rollouts: Rollouts, *, step: int, cursor: int) -> SampledStep:
    """The groups of a training step, by the run's settings; ``cursor`` is where the step before left the
    order of tasks.
    """
    order, cursor, choice = plan_step(parts, step=step, cursor=cursor)
    modes = partial(parts.algorithm.modes_of, step)
    return sample_step(rollouts, order, cursor=cursor, choice=choice, modes=modes, step=step)


def plan_step(parts: Components, *, step: int, cursor: int) -> tuple[TaskOrder, int, TaskChoice]:
    """The order of a step's tasks, where in it the step begins, and what the algorithm chooses; ``cursor`` is
    where the step before left.
    """
    settings, tasks = parts.settings, parts.train_tasks
    size = settings.train.tasks_per_step
    stage = find_stage(step, settings=settings.train, tasks=tasks)
    if stage is not None:
        tasks = stage.tasks
        # An order of its own, from its beginning on.
        cursor = 0 if step == stage.begin else cursor
    number = None if stage is None else stage.number
    order = TaskOrder(tasks=tasks, tasks_per_step=size, seed=settings.seed, stage=number)
    return order, cursor, parts.algorithm.choose_tasks(tasks, step=step, num_groups=size)


def sample_step(
    rollouts: Rollouts,
    order: TaskOrder,
    *,
    cursor: int,
    choice: TaskChoice,
    modes: Callable[[int], Sequence[str]],
    step: int,
) -> SampledStep:
    """Play what was chosen; with a filter, as many further tasks as groups were left out, until none is
    missing or its bound.
    """
    if choice.tasks is not None:
        report = rollouts.run(choice.tasks, modes=modes, training_step=step)
        return _unfiltered_step(report, cursor=cursor)
    traces: list[Trace] = []
    trained: list[Trace] = []
    faults: Counter[str] = Counter()
    reasons: list[str] = []
    lags: list[float | None] = []
    num_batches = 0
    filtered, num_groups = choice.groups, choice.num_groups
    while len(trained) < num_groups and num_batches <= (filtered.max_extra_batches if filtered else 0):
        tasks, cursor = order.draw(
            # Only what is missing, and no task twice: groups of one key would share their random streams.
            num_groups - len(trained),
            cursor=cursor,
            seen={trace.task.key for trace in traces},
        )
        if not tasks:
            break
        numbered = partial(_offset_modes, modes, len(traces))
        report = rollouts.run(tasks, modes=numbered, training_step=step, continued=num_batches > 0)
        traces += report.traces
        trained += report.traces if filtered is None else filtered.select(report.traces)
        faults += report.faults
        reasons += report.fault_reasons
        lags.append(report.loop_lag_s)
        num_batches += 1
    return SampledStep(
        is_filtered=filtered is not None,
        traces=traces,
        trained=trained,
        faults=faults,
        fault_reasons=tuple(reasons),
        num_extra_batches=max(0, num_batches - 1),
        cursor=cursor,
        loop_lag_s=largest(lags),
    )


def _unfiltered_step(report: RolloutReport, *, cursor: int) -> SampledStep:
    """A step whose tasks the algorithm named: all of its groups are trained, and the order of tasks stands
    still.
    """
    return SampledStep(
        is_filtered=False,
        traces=report.traces,
        trained=report.traces,
        faults=report.faults,
        fault_reasons=report.fault_reasons,
        num_extra_batches=0,
        cursor=cursor,
        loop_lag_s=report.loop_lag_s,
    )


def _offset_modes(modes: Callable[[int], Sequence[str]], num_before: int, group: int) -> Sequence[str]:
    """Groups are numbered on through a step's rounds."""
    return modes(num_before + group)
