"""Results of ``outrider eval --tasks`` in a pack: every score of ``summary.json`` computed again from
``results.jsonl``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from outrider.errors import OutriderError, PackError
from outrider.evals.benchmark.extraction import Scorer, find_variant
from outrider.evals.benchmark.scores import SampleResult, summarise
from outrider.evals.benchmark.store import RESULTS, SUMMARY, read_results, write_results
from outrider.evals.benchmark.table import EvalTasksReport
from outrider.evals.pack.difference import first_difference
from outrider.evals.pack.format import read_json

_SCORERS: Final[Mapping[str, Scorer]] = {"em": "em", "f1": "f1", "math": "math", "judge": "judge"}


def eval_tasks_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """One row a score of the summary. Raises PackError where the samples give another one."""
    location = f"runs/{name}/{SUMMARY}"
    summary = read_json(folder / SUMMARY)
    try:
        written: dict[str, Any] = summary["scores"]
        panel_hash, num_samples = str(summary["panel_hash"]), int(summary["num_samples"])
        identity, results = read_results(folder / RESULTS)
        report = _report(
            summary, identity, [item for item in results if item.sample < num_samples], num_samples
        )
        computed = {
            item.name: {
                "value": item.value,
                "ci_low": item.low,
                "ci_high": item.high,
                "num_tasks": item.num_tasks,
            }
            for item in report.scores
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PackError(
            f"{location} is no summary of an evaluation: {type(error).__name__}: {error}"[:300]
        ) from error
    except OutriderError as error:
        raise PackError(f"runs/{name}: {error}".replace(f"{folder}/", "")) from error
    if difference := first_difference(written, computed):
        raise PackError(f"{location}: {difference}"[:300])
    return [
        {"run": name, "score": key, "panel_hash": panel_hash, **values} for key, values in computed.items()
    ]


def write_eval_tasks_run(source: Path, target: Path) -> None:
    """Copy an evaluation's results and summary, without what a judge or a fault said and without the replies:
    of some task sets no text may be published.
    """
    identity, results = read_results(source / RESULTS)
    write_results(
        target / RESULTS,
        identity,
        [replace(result, detail="", turns=None, token_ids=None) for result in results],
    )
    (target / SUMMARY).write_bytes((source / SUMMARY).read_bytes())


def _report(
    summary: Mapping[str, Any], identity: Mapping[str, Any], results: Sequence[SampleResult], num_samples: int
) -> EvalTasksReport:
    """The report as ``outrider eval`` made it, as far as scores need it."""
    metric = identity["metric"]
    normalize = find_variant(identity["rules"]).normalize
    powers = {2**power for power in range(num_samples.bit_length())}
    return EvalTasksReport(
        name=str(summary["tasks"]),
        panel_hash=str(summary["panel_hash"]),
        num_tasks=int(summary["num_tasks"]),
        num_left_out=int(summary["num_left_out"]),
        num_samples=num_samples,
        num_requested=int(summary["num_owed"]),
        num_unjudged=int(summary["num_unjudged"]),
        scorer=None if metric is None else _SCORERS[metric],
        has_tools=False,
        identity=identity,
        deviations=(),
        summary=summarise(results, ks=sorted({*powers, num_samples}), normalize=normalize),
    )
