"""Cold start: supervised fine-tuning on expert rollouts, in exactly the ids that rollouts have."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from outrider.algorithms.losses import weighted_loss
from outrider.algorithms.tips import PLAIN, TIPS_ON, TipHook
from outrider.errors import DataError
from outrider.memory.embedders import load_embedder
from outrider.printing import plural
from outrider.rollout.experts import ExpertSource, play_experts
from outrider.rollout.faults import (
    count_cut,
    cut_line,
    failure_reasons,
    fault_line,
    lost_reasons,
    reasons_line,
    require_room,
)
from outrider.seeding import stream
from outrider.trace import Trace, without_open_prompt
from outrider.training.components import Components
from outrider.training.experts import request_expert_paths
from outrider.training.packing import RolloutPath
from outrider.training.policy import Policy, pack_for_rank, padded_micro_batches
from outrider.training.settings import ColdStartSettings
from outrider.types import Step, Task
from outrider.viewer.records import EXPERTS_FILE


def successful_paths(traces: Sequence[Trace]) -> list[RolloutPath]:
    """Return the expert rollouts that solved their tasks, with weight 1 on every policy token. Raises
    DataError if there is none.
    """
    paths: list[RolloutPath] = []
    for trace in traces:
        for leaf, path in trace.rollouts():
            if not leaf.success:
                continue
            for node in path:
                if node.trainable:
                    node.credit = (1.0,) * len(node.token_ids)
            paths.append(
                RolloutPath(nodes=without_open_prompt(path), rollout_index=len(paths), group=len(paths))
            )
    if not paths:
        raise DataError("no expert rollout solved its task: there is nothing to imitate")
    return paths


def cold_start(
    policy: Policy,
    paths: Sequence[RolloutPath],
    settings: ColdStartSettings,
    *,
    run_seed: int,
    max_tokens: int,
    on_step: Callable[[int, int, dict[str, float]], None],
) -> int:
    """Minimize the negative log-likelihood, mean over the tokens of a batch; the learning rate decays
    linearly to a tenth. A batch that is skipped because its gradient is not finite advances neither the
    warm-up nor the decay.

    ``on_step(done, total, metrics)`` is called after every optimizer step. Returns the number of steps.
    """
    size = settings.batch_size
    orders = [
        stream(run_seed, "cold start order", epoch).permutation(len(paths))
        for epoch in range(settings.num_epochs)
    ]
    batches = [
        [paths[i] for i in order[start : start + size]]
        for order in orders
        for start in range(0, len(order), size)
    ]
    num_skipped = 0
    for number, batch in enumerate(batches):
        num_applied = number - num_skipped
        warm = min(1.0, (num_applied + 1) / max(1, settings.warmup_steps))
        rate = settings.learning_rate * warm * (1.0 - 0.9 * num_applied / len(batches))
        values = _step(policy, batch, rate, max_tokens)
        num_skipped += int(values["grad/num_skipped"])
        on_step(number + 1, len(batches), values)
    return len(batches)


def _step(
    policy: Policy, batch: Sequence[RolloutPath], learning_rate: float, max_tokens: int
) -> dict[str, float]:
    num_tokens = sum(len(node.token_ids) for path in batch for node in path.nodes if node.credit is not None)
    total = 0.0
    ranks = policy.ranks
    for micro in padded_micro_batches(pack_for_rank(ranks.share(batch), ranks, max_tokens=max_tokens), ranks):
        if micro is None:
            policy.dummy_forward().backward()
            continue
        scores = policy.score(micro)
        micro = micro.like(scores.logprobs_T)
        weights = torch.full_like(
            micro.advantages_T, 1.0 / num_tokens
        )  # of the batch, not of the micro-batch
        loss = weighted_loss(losses=-scores.logprobs_T * micro.advantages_T, weights=weights)
        loss.backward()
        total += float(loss.detach())
    total = sum(ranks.gather(total))
    norm = policy.step(learning_rate=learning_rate)
    return {
        "sft/loss": total,
        "sft/num_tokens": float(num_tokens),
        "sft/num_examples": float(len(batch)),
        "grad/norm": norm,
        "grad/num_skipped": float(not math.isfinite(norm)),
    }


# The cold start of a run: experts play training tasks through the rollout loop, and the policy imitates the
# rollouts that solved their tasks.


_MAX_LISTED: Final = 3  # demonstrations with another return in a note
_STEP: Final = 0  # the training step whose initial states the experts get


def expert_rollouts(
    parts: Components, tasks: Sequence[Task], expert: ExpertSource, *, training_step: int, **options: Any
) -> list[Trace]:
    """Return one rollout of ``expert`` on every task, in order, in the policy's environment and within
    its limits. ``options`` are those of :func:`~outrider.rollout.experts.play_experts`.
    """
    settings = parts.settings
    return play_experts(
        tasks=tasks,
        expert=expert,
        factory=parts.factory,
        tokenizer=parts.renderer.tokenizer,
        renderer=parts.renderer,
        limits=settings.limits,
        stop=parts.task_set.stop,
        run_seed=settings.seed,
        context_length=parts.engine.context_length,
        max_concurrent=settings.num_concurrent,
        max_retries=settings.train.max_retries,
        training_step=training_step,
        rollout_status=parts.rollout_status,
        **options,
    )


def replay_with_tips(parts: Components, traces: Sequence[Trace], expert: ExpertSource) -> list[Trace]:
    """Return the expert rollouts, a random ``cold_start.tip_share`` of them rolled out again with the tips of
    all.

    The memory belongs to the cold start: training begins with an empty one.
    """
    share, memory = parts.settings.cold_start.tip_share, parts.settings.algorithm.tip_memory
    if not share or memory is None:
        return list(traces)
    hook = TipHook(
        memory,
        embedder=load_embedder(memory.embedder),
        count_tokens=parts.renderer.count_tokens,
        seed=parts.settings.seed,
    )
    tasks = [trace.task for trace in traces]
    # in this mode the hook writes tips and shows none
    expert_rollouts(parts, tasks, expert, training_step=_STEP, hooks=(hook,), mode=PLAIN)
    chosen = stream(parts.settings.seed, "cold start tips").permutation(len(tasks))[
        : round(share * len(tasks))
    ]
    replayed = expert_rollouts(
        parts, [tasks[i] for i in sorted(chosen)], expert, training_step=_STEP, hooks=(hook,), mode=TIPS_ON
    )
    replayed_by_key = {trace.task.key: trace for trace in replayed}
    return [replayed_by_key.get(trace.task.key, trace) for trace in traces]


def imitate_experts(
    parts: Components,
    *,
    stage: Callable[[str, int], None],
    note: Callable[[str], None],
    on_step: Callable[[int, dict[str, float]], None],
    on_done: Callable[[int], None] = lambda num_done: None,
    on_rollouts: Callable[[Sequence[Trace]], None] = lambda traces: None,
) -> None:
    """Fine-tune on the experts of the first ``cold_start.num_examples`` training tasks; the optimiser starts
    afresh after it.

    ``stage(name, size)``, ``on_done(done)`` and ``on_step(done, metrics)`` feed the display, ``on_rollouts``
    gets the expert rollouts for the record. Raises DataError with the reasons when no expert solved its task,
    ConfigError when no prompt fits the context.
    """
    settings = parts.settings
    tasks, steps, reasons = _expert_paths(parts, stage=stage, on_done=on_done)  # before all rollouts
    if len(tasks) < (num := settings.cold_start.num_examples):
        source = "demonstrations" if parts.demonstrations is not None else "training tasks"
        note(f"cold start: there are {source} for {len(tasks)} of cold_start.num_examples = {num}")
    known = [task for task in tasks if steps.get(task.key)]
    stage("cold start: expert rollouts", len(known))
    traces = expert_rollouts(
        parts,
        known,
        lambda task: steps[task.key],
        retrieve_share=settings.cold_start.retrieve_share,
        training_step=_STEP,
        on_finished=lambda done, total: on_done(done),
    )
    for line in contradicted_claims(parts, traces):
        note(f"cold start: {line}")
    traces = replay_with_tips(parts, traces, lambda task: steps[task.key])
    on_rollouts(traces)
    for line in require_room(traces, context_length=parts.engine.context_length):
        note(f"cold start: {line}")
    if lost := [*reasons, *lost_reasons(traces)]:
        note(
            f"cold start: {len(lost)} of "
            f"{plural(len(tasks), 'expert rollout was', 'expert rollouts were')} lost to faults: "
            f"{fault_line(lost)}"
        )
    limits, length = settings.limits, parts.engine.context_length
    failure_counts = failure_reasons(traces, limits, context_length=length)
    if missing := len(tasks) - len(known) - len(reasons):
        failure_counts["had no expert"] = missing
    if not any(leaf.success for trace in traces for leaf in trace.leaves.values()):
        reason_text = reasons_line(failure_counts | ({"lost to faults": len(lost)} if lost else {}))
        raise DataError(
            "no expert rollout solved its task: there is nothing to imitate (of "
            f"{plural(len(tasks), 'task')}: "
            f"{reason_text or 'none has an expert'}); the rollouts are in rollouts/{EXPERTS_FILE}"
            + (f"; {fault_line(lost)}" if lost else "")
        )
    paths = successful_paths(traces)
    reason_text = f"; the others: {reasons_line(failure_counts)}" if failure_counts else ""
    note(f"cold start: {len(paths)} of {plural(len(tasks), 'expert rollout')} solved their task{reason_text}")
    failed = [
        call
        for path in paths
        if (call := next((one for node in path.nodes for one in node.tool_calls if one.is_failed), None))
    ]
    if failed:
        note(
            f"cold start: in {len(failed)} of these rollouts a tool call failed, and they are imitated "
            f"anyway; check the demonstrations ({failed[0].name}: {failed[0].arguments})"
        )
    cut = count_cut(traces, limits, context_length=length)
    if cut:
        note(
            f"cold start: limits cut {cut.total()} of {plural(len(traces), 'expert rollout')}: "
            f"{cut_line(cut)}"
        )
    extra_metrics = {"sft/num_examples_cut": float(cut.total())} if cut else {}
    stage(
        "cold start: fine-tuning",
        settings.cold_start.num_epochs * -(-len(paths) // settings.cold_start.batch_size),
    )
    parts.learner.fit(paths, on_step=lambda done, _, values: on_step(done, values | extra_metrics))
    parts.engine.load(parts.engine.weight_version + 1)


def contradicted_claims(parts: Components, traces: Sequence[Trace]) -> list[str]:
    """Describe the demonstrations of a file whose replayed return is not the reward that the file claims."""
    if parts.demonstrations is None:
        return []
    different = [
        f"{trace.task.key}: {claimed:g} claimed, {leaf.episode_return:g} replayed"
        for trace in traces
        for leaf in trace.leaves.values()
        if leaf.episode_return is not None
        and not math.isclose(
            claimed := parts.demonstrations[trace.task.key].reward, leaf.episode_return, abs_tol=1e-6
        )
    ]
    if not different:
        return []
    listed = "; ".join(different[:_MAX_LISTED]) + ("; ..." if len(different) > _MAX_LISTED else "")
    return [
        f"{len(different)} of {plural(len(traces), 'demonstration')} replay to another return than "
        "their file claims "
        f"({listed}); only those that solve their task here are imitated"
    ]


def _expert_paths(
    parts: Components, *, stage: Callable[[str, int], None], on_done: Callable[[int], None]
) -> tuple[Sequence[Task], Mapping[str, Sequence[Step] | None], list[str]]:
    """Return the tasks of the cold start, the experts' steps by task key, and reasons of failed experts."""
    size, demonstrations = parts.settings.cold_start.num_examples, parts.demonstrations
    if demonstrations is not None:
        steps_by_key = {key: trajectory.steps for key, trajectory in demonstrations.items()}
        return [task for task in parts.train_tasks if steps_by_key.get(task.key)][:size], steps_by_key, []
    tasks = parts.train_tasks[:size]
    stage("cold start: expert paths", len(tasks))
    steps, reasons = request_expert_paths(
        parts.task_set, tasks, parts.settings, training_step=_STEP, on_task_done=on_done
    )
    return tasks, steps, reasons
