"""What an evaluation of a run leaves on file, and what is said of it."""

from collections.abc import Sequence

from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import EnvironmentFault
from outrider.printing import format_mean_return, score
from outrider.rollout.evaluate import Evaluation
from outrider.rollout.faults import fault_line, lost_reasons
from outrider.rollout.paired import gain_over_start
from outrider.trace import Trace
from outrider.train.data.task_checks import kind_of_tasks
from outrider.train.metrics.step_metrics import environment_metrics
from outrider.train.state.run_state import RunState


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """The numbers of an evaluation under their declared names."""
    return {
        "eval/score": evaluation.score,
        "eval/ci_low": evaluation.ci_low,
        "eval/ci_high": evaluation.ci_high,
        "eval/mean_return": evaluation.mean_return,
        "eval/num_tasks": float(evaluation.num_tasks),
        "eval/num_faults": float(evaluation.num_faults),
    }


def record_evaluation(
    state: RunState, evaluation: Evaluation, traces: Sequence[Trace], *, seconds: float
) -> tuple[dict[str, float], list[str]]:
    """Write metrics, traces and the result, which marks the evaluation as done; the metrics, and lines for
    the person who watches. Raises EnvironmentFault where no rollout has a result.
    """
    label, step, run, parts = evaluation.label, evaluation.step, state.run, state.parts
    lost = lost_reasons(traces)
    if not evaluation.num_tasks:
        raise EnvironmentFault(
            f"the evaluation {label!r} has no result, every rollout was lost to a fault: {fault_line(lost)}"
        )
    values = evaluation_metrics(evaluation) | {"time/evaluation": seconds}
    if parts.settings.environment.reports_metrics:
        values |= environment_metrics(traces)
    state.metrics.write(step, "eval", values)
    number = len(run.finished_evaluations())
    state.files.write_evaluation(parts, traces, number=number, step=step)
    # Last, because it marks the evaluation as done.
    run.add_evaluation(
        evaluation,
        split=parts.settings.evaluation.split,
        temperature=parts.settings.evaluation.temperature,
        tasks_hash=hash_tasks(parts.test_tasks),
        num_training_tasks=parts.num_training_tasks,
    )
    repeated = f", {evaluation.num_retries} tries repeated" if evaluation.num_retries else ""
    lines = [
        f"{label}: {score(evaluation.score, evaluation.ci_low, evaluation.ci_high)}"
        f"{format_mean_return(evaluation.score, evaluation.mean_return)} "
        f"on {evaluation.num_tasks} {kind_of_tasks(len(parts.test_tasks), parts.num_training_tasks)}, "
        f"{evaluation.num_faults} "
        f"faults{': ' if lost else ''}{fault_line(lost)}{repeated}"
    ]
    if (gain := gain_over_start(run.finished_evaluations())) is not None:
        lines.append(f"{label}: {gain}")
    return values, lines
