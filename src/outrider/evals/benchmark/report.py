"""The report of a panel from its results, whoever played them and whenever they were graded."""

from collections.abc import Mapping, Sequence
from typing import Final

from outrider.evals.benchmark.extraction import Scorer, find_variant
from outrider.evals.benchmark.scores import SampleResult, summarise
from outrider.evals.benchmark.settings import EvalTasksSettings
from outrider.evals.benchmark.table import EvalTasksReport
from outrider.evals.benchmark.task_sets import EvalTasks
from outrider.types import Json

_MAX_FAULTS_SHOWN: Final = 3


def build_report(
    settings: EvalTasksSettings,
    eval_tasks: EvalTasks,
    *,
    scorer: Scorer | None,
    identity: Mapping[str, Json],
    results: Sequence[SampleResult],
) -> EvalTasksReport:
    """``scorer`` is None where the environment's own record is the score; samples beyond ``num_samples`` do
    not count.
    """
    rules = find_variant(settings.rules)
    requested = requested_samples(results, settings.num_samples)
    powers = {2**power for power in range(settings.num_samples.bit_length())}
    faults = [result for result in requested if result.outcome.is_fault]
    return EvalTasksReport(
        name=eval_tasks.benchmark.name,
        panel_hash=eval_tasks.panel_hash,
        num_tasks=len(eval_tasks.tasks),
        num_left_out=eval_tasks.num_left_out,
        num_samples=settings.num_samples,
        num_requested=len(eval_tasks.tasks) * settings.num_samples,
        num_unjudged=sum(result.answered is not None for result in faults),
        scorer=scorer,
        has_tools=settings.tools != "off"
        and settings.environment is not None
        and settings.environment.calls_tools,
        identity=identity,
        deviations=() if scorer is None else rules.deviations,
        summary=summarise(requested, ks=sorted({*powers, settings.num_samples}), normalize=rules.normalize),
        first_faults=tuple(faults[:_MAX_FAULTS_SHOWN]),
    )


def requested_samples(results: Sequence[SampleResult], num_samples: int) -> list[SampleResult]:
    """Without samples of an earlier call that asked for more."""
    return [result for result in results if result.sample < num_samples]
