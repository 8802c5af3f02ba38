"""What joins a step's rollouts before the update: demonstrations inside their groups (LUFFY), stored groups beside them (RolloutReplay)."""

from collections.abc import Callable, Mapping, Sequence

from outrider.algorithms.luffy import Luffy
from outrider.algorithms.rollout_replay import RolloutReplay
from outrider.rollout.demonstrations import join_demonstration
from outrider.trace import Trace
from outrider.train.alarms import fault_line, lost_reasons
from outrider.train.components import Components
from outrider.train.experts import ask_experts
from outrider.train.imitation import expert_rollouts
from outrider.types import Step


def mix_in(
    parts: Components, traces: Sequence[Trace], *, step: int, note: Callable[[str], None]
) -> tuple[list[Trace], dict[str, float]]:
    """Groups of earlier steps, with credit, to train on beside ``traces``; the metrics of what was mixed in.

    Demonstrations join ``traces`` themselves, which get their credit later. Nothing happens for other algorithms. ``note`` is told why
    demonstrations were lost.
    """
    algorithm = parts.algorithm
    if isinstance(algorithm, Luffy) and algorithm.settings.num_demonstrations:
        return [], demonstrate(parts, algorithm, traces, step=step, note=note)
    if isinstance(algorithm, RolloutReplay):
        replayed, metrics = algorithm.replay(traces, step=step)
        for trace in replayed:
            algorithm.credit(trace)
        return replayed, metrics
    return [], {}


def interleaved(fresh: Sequence[Trace], replayed: Sequence[Trace]) -> list[Trace]:
    """Both in their own order and evenly spread, so that every mini-batch holds its share of either."""
    placed = [
        ((i + 0.5) / len(one), number, trace) for number, one in enumerate((fresh, replayed)) for i, trace in enumerate(one)
    ]
    return [trace for _, _, trace in sorted(placed, key=lambda entry: entry[:2])]


def demonstrate(
    parts: Components, algorithm: Luffy, traces: Sequence[Trace], *, step: int, note: Callable[[str], None]
) -> dict[str, float]:
    """Play the demonstrations of these groups in the states that the groups began in, and let them join. The counts.

    A group whose task has no demonstration stays as it is.
    """
    reasons: list[str] = []
    paths: Mapping[str, Sequence[Step] | None] = algorithm.paths  # of a file, read when the run began
    if algorithm.settings.asks_experts:  # in every step anew: a task that comes back is reset with another seed
        paths, reasons = ask_experts(parts.family, [trace.task for trace in traces], parts.settings, training_step=step)
    shown = [trace for trace in traces if paths.get(trace.task.key)]
    played = expert_rollouts(parts, [trace.task for trace in shown], lambda task: paths[task.key], training_step=step)
    for trace, one in zip(shown, played, strict=True):
        join_demonstration(trace, one)
    reasons += lost_reasons(played)
    if reasons:
        note(f"step {step + 1}: {len(reasons)} demonstrations were lost to faults: {fault_line(reasons)}")
    return {"luffy/num_groups_without": float(len(traces) - len(shown)), "luffy/num_faults": float(len(reasons))}
