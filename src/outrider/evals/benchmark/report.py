"""The report of a panel from its results, whoever played them and whenever they were graded."""

from collections.abc import Mapping, Sequence
from typing import Final

from outrider.evals.benchmark.extraction import Scorer, find_variant
from outrider.evals.benchmark.scores import SampleResult, summarise
from outrider.evals.benchmark.settings import PanelSettings
from outrider.evals.benchmark.table import PanelReport
from outrider.evals.benchmark.task_sets import Panel
from outrider.types import Json

_SHOWN_FAULTS: Final = 3


def report_of(
    settings: PanelSettings,
    panel: Panel,
    *,
    scorer: Scorer | None,
    identity: Mapping[str, Json],
    results: Sequence[SampleResult],
) -> PanelReport:
    """``scorer`` is None where the environment's own record is the score; samples beyond ``num_samples`` do
    not count.
    """
    rules = find_variant(settings.rules)
    counted = wanted(results, settings.num_samples)
    powers = {2**power for power in range(settings.num_samples.bit_length())}
    faults = [result for result in counted if result.outcome.is_fault]
    return PanelReport(
        name=panel.task_set.name,
        panel_hash=panel.panel_hash,
        num_tasks=len(panel.tasks),
        num_left_out=panel.num_left_out,
        num_samples=settings.num_samples,
        num_owed=len(panel.tasks) * settings.num_samples,
        num_unjudged=sum(result.answered is not None for result in faults),
        scorer=scorer,
        has_tools=settings.tools != "off"
        and settings.environment is not None
        and settings.environment.calls_tools,
        identity=identity,
        deviations=() if scorer is None else rules.deviations,
        summary=summarise(counted, ks=sorted({*powers, settings.num_samples}), normalize=rules.normalize),
        first_faults=tuple(faults[:_SHOWN_FAULTS]),
    )


def wanted(results: Sequence[SampleResult], num_samples: int) -> list[SampleResult]:
    """Without samples of an earlier call that asked for more."""
    return [result for result in results if result.sample < num_samples]
