"""A buffer that grows while the agent trains: its own successful rollouts join the off-policy steps (RAPO,
future work).
"""

from collections.abc import Sequence

from outrider.memory.steps.buffer import StepTraceBuffer
from outrider.memory.steps.history import TokenCounter
from outrider.rollout.expert import to_trajectory
from outrider.trace import Trace
from outrider.train.settings import BufferSettings


def evolve_buffer(
    buffer: StepTraceBuffer,
    traces: Sequence[Trace],
    *,
    settings: BufferSettings,
    step: int,
    count_tokens: TokenCounter,
) -> dict[str, float]:
    """Offer this step's successful rollouts where ``settings.evolve`` says so; the buffer's metrics either
    way.
    """
    if not settings.evolve:
        return {"buffer/num_steps": float(len(buffer))}
    trajectories = [
        to_trajectory(
            trace,
            leaf.rollout,
            agent="self",
            trajectory_id=f"self/{step}/{trace.task.key}/{leaf.rollout}",
            count_tokens=count_tokens,
        )
        for trace in traces
        for leaf, _ in trace.rollouts()
        if leaf.success
    ]
    report = buffer.add_trajectories(
        [trajectory for trajectory in trajectories if trajectory is not None],
        keep_best=settings.keep_best,
        min_reward=settings.min_reward,
        count_tokens=count_tokens,
        questions={trace.task.key: trace.task.question for trace in traces},
    )
    return {
        "buffer/num_added": float(report.num_inserted),
        "buffer/num_removed": float(report.num_removed),
        "buffer/num_rejected": float(report.num_outranked + report.num_below_min_reward),
        "buffer/num_steps": float(len(buffer)),
    }
