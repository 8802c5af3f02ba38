"""The cold start of a run: experts play training tasks through the rollout loop, and the policy imitates those who solved."""

from collections.abc import Callable, Sequence
from typing import Final

from outrider.rollout.expert import ExpertSource, play_experts
from outrider.trace import Trace
from outrider.train.alarms import fault_line, lost_reasons
from outrider.train.components import Components
from outrider.train.experts import ask_experts
from outrider.train.sft import cold_start, successful_paths
from outrider.types import Task

_STEP: Final = 0  # whose initial states the cold start is played in


def expert_rollouts(
    parts: Components, tasks: Sequence[Task], expert: ExpertSource, *, training_step: int, retrieve_share: float = 0.0
) -> list[Trace]:
    """One rollout of ``expert`` on every task, in order, in the environment and within the limits that the policy has."""
    settings = parts.settings
    return play_experts(
        tasks=tasks,
        expert=expert,
        factory=parts.factory,
        tokenizer=parts.renderer.tokenizer,
        limits=settings.limits,
        stop=parts.family.stop,
        run_seed=settings.seed,
        context_length=parts.engine.context_length,
        retrieve_share=retrieve_share,
        max_concurrent=settings.num_concurrent,
        max_retries=settings.train.max_retries,
        training_step=training_step,
        whereabouts=parts.whereabouts,
    )


def imitate_experts(
    parts: Components,
    *,
    stage: Callable[[str, int], None],
    note: Callable[[str], None],
    on_step: Callable[[int, dict[str, float]], None],
) -> None:
    """Fine-tune on the experts of the first ``cold_start.num_examples`` training tasks; the optimiser starts afresh after it.

    ``stage(name, size)`` and ``on_step(done, metrics)`` feed the display. Raises DataError when no expert solved its task.
    """
    settings = parts.settings
    tasks = parts.train_tasks[: settings.cold_start.num_examples]
    stage("cold start: expert rollouts", len(tasks))
    steps, reasons = ask_experts(parts.family, tasks, settings, training_step=_STEP)  # before all rollouts
    traces = expert_rollouts(
        parts,
        [task for task in tasks if steps.get(task.key)],
        lambda task: steps[task.key],
        retrieve_share=settings.cold_start.retrieve_share,
        training_step=_STEP,
    )
    if lost := [*reasons, *lost_reasons(traces)]:
        note(f"cold start: {len(lost)} of {len(tasks)} expert rollouts were lost to faults: {fault_line(lost)}")
    paths = successful_paths(traces)
    note(f"cold start: {len(paths)} of {len(tasks)} expert rollouts solved their task")
    stage("cold start: fine-tuning", settings.cold_start.num_epochs * -(-len(paths) // settings.cold_start.batch_size))
    cold_start(
        parts.policy,
        paths,
        settings.cold_start,
        run_seed=settings.seed,
        max_tokens=settings.update.max_tokens,
        on_step=lambda done, _, values: on_step(done, values),
    )
    parts.policy.fresh_optimizer()
    parts.engine.weights_changed()
