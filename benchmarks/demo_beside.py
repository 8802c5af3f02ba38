"""Compares the run of the demo with the recorded ones: RAPO, and GRPO from the same cold starts at the same
number of policy tokens, by seed.

    python -m benchmarks.demo_beside [--run runs/demo] [--runs records/packs/demo.pack/runs]
                                     [--out runs/demo/beside.html]

Prints the held-out scores with paired gains over the cold start, and writes a page with two charts: rewards
during training, and scores before and after. ``make demo`` ends with it; ``make demo-compare`` creates new
runs.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.errors import DataError
from outrider.files import replace_file
from outrider.printing import points, score
from outrider.rollout.evaluate import PairedGain, paired_gain
from outrider.viewer.report_parts import Chart, Point, Series, svg_chart
from outrider.viewer.run_reader import read_records

METHODS: Final = {"rapo": "RAPO", "grpo": "GRPO"}
_PAGE: Final = Markup(
    """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">\
<title>Outrider: the demo beside its recorded seeds</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>:root {{ color-scheme: light; }}
body {{ margin: 0 auto; padding: 1.5rem; max-width: 62rem; \
font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; }}
svg {{ width: 30rem; max-width: 100%; }} \
svg text {{ fill: #57606a; font: 11px system-ui, sans-serif; }} \
.title {{ font-weight: 600; }}
.grid {{ stroke: #d0d7de; stroke-width: .6; }} .axis {{ stroke: #57606a; }} \
.line {{ fill: none; stroke-width: 2; }}
.s0 {{ stroke: #0072b2; }} .s1 {{ stroke: #d55e00; }} .s2 {{ stroke: #007a5a; }} \
.line.s1 {{ stroke-dasharray: 6 3; }}
.dot.s0 {{ fill: #0072b2; }} .dot.s1 {{ fill: #d55e00; }} .dot.s2 {{ fill: #007a5a; }} \
.raw {{ opacity: .35; }}</style></head>
<body><h1>The demo beside its recorded seeds</h1><p>{}</p>{}{}</body></html>
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Data of one training in a run directory or pack. ``start`` and ``end`` are lines of
    ``evaluations.jsonl``.
    """

    rewards: tuple[float, ...]
    tokens: tuple[float, ...]
    start: dict[str, Any] | None
    end: dict[str, Any]


def read_training(run: Path) -> Training:
    """Raise DataError if the run has no evaluation after training."""
    steps = [line for line in read_records(run / "metrics.jsonl") if line["kind"] == "train"]
    evaluations = read_records(run / "evaluations.jsonl")
    ends = [one for one in evaluations if one["step"] > 0]
    if not ends:
        raise DataError(f"{run}: no evaluation after training")
    starts = [one for one in evaluations if one["step"] == 0]
    return Training(
        rewards=tuple(step["reward/mean"] for step in steps),
        tokens=tuple(step["tokens/policy_total"] for step in steps),
        start=starts[-1] if starts else None,
        end=ends[-1],
    )


def read_pairs(runs: Path) -> dict[int, dict[str, Training]]:
    """Return trainings by seed and method from folders ``METHOD-SEED``, without methods that lack a seed.

    If RAPO started from the weights of another run, ``sft-SEED``, as in ``benchmarks.learning``, the
    evaluation of that run is its start.
    """
    seeds = sorted(int(one.name.rpartition("-")[2]) for one in runs.glob("rapo-*"))
    methods = [method for method in METHODS if all((runs / f"{method}-{seed}").is_dir() for seed in seeds)]
    pairs = {seed: {method: read_training(runs / f"{method}-{seed}") for method in methods} for seed in seeds}
    for seed, by_method in pairs.items():
        if by_method["rapo"].start is None:
            cold = read_records(runs / f"sft-{seed}" / "evaluations.jsonl")[-1]
            by_method["rapo"] = replace(by_method["rapo"], start=cold)
    return pairs


def heads(pairs: dict[int, dict[str, Training]]) -> tuple[str, ...]:
    """What the columns of :func:`rows` are."""
    first = next(iter(pairs.values()))
    return (
        "seed",
        "cold start [95 %]",
        *(head for method in first for head in (f"{METHODS[method]} [95 %]", "gain [95 %]")),
    )


def gain(training: Training, start: dict[str, Any]) -> PairedGain:
    """Return the gain over the cold start ``start`` on the same tasks and draws. Raises DataError if there
    are none.
    """
    found = paired_gain(start, training.end)
    if found is None:
        raise DataError("the evaluations before and after training are not of the same tasks")
    return found


def rows(pairs: dict[int, dict[str, Training]]) -> list[tuple[str, ...]]:
    """Seed, score of the cold start, then score and paired gain of each method."""
    table = []
    for seed, by_method in pairs.items():
        start = by_method["rapo"].start
        assert start is not None  # RAPO's run has the cold start in it
        cells = [_score(start)]
        for training in by_method.values():
            one = gain(training, start)
            cells += [_score(training.end), points(one.difference, one.ci_low, one.ci_high)]
        table.append((str(seed), *cells))
    return table


def _score(evaluation: dict[str, Any]) -> str:
    found = evaluation["metric"]["score"]
    return score(found["value"], found.get("ci_low", math.nan), found.get("ci_high", math.nan))


def charts(pairs: dict[int, dict[str, Training]], own: Training | None) -> list[Chart]:
    """Return charts of the mean reward over the policy tokens, and of held-out scores before and after: means
    over seeds, with bars from the lowest to the highest.
    """
    methods = next(iter(pairs.values()))
    trainings = {METHODS[method]: [by_method[method] for by_method in pairs.values()] for method in methods}
    starts = [by_method["rapo"].start for by_method in pairs.values()]
    reward, solved = [], []
    for name, several in trainings.items():
        reward.append(_curve(name, several))
        ends = [_value(one.end) for one in several]
        tokens = _mean([one.tokens[-1] for one in several])
        solved.append(
            Series(label=name, points=(_bar(0.0, [_value(one) for one in starts]), _bar(tokens, ends)))
        )
    if own is not None:
        reward.append(_curve("this run", [own]))
        if own.start is not None:
            solved.append(
                Series(
                    label="this run",
                    points=(_bar(0, [_value(own.start)]), _bar(own.tokens[-1], [_value(own.end)])),
                )
            )
    titles = ("Rewarded rollouts while training, all kinds", "Held-out questions solved, without retrieval")
    return [
        Chart(title=title, x_label="policy tokens", y_label="%", series=tuple(series), is_share=True)
        for title, series in zip(titles, (reward, solved), strict=True)
    ]


def _curve(name: str, several: Sequence[Training]) -> Series:
    length = min(len(one.rewards) for one in several)
    places = (
        Point(
            x=_mean([one.tokens[step] for one in several]),
            value=_mean([one.rewards[step] for one in several]),
        )
        for step in range(length)
    )
    return Series(label=name, points=tuple(places))


def _bar(x: float, values: Sequence[float]) -> Point:
    return Point(x=x, value=_mean(values), low=min(values), high=max(values))


def _value(evaluation: dict[str, Any] | None) -> float:
    return math.nan if evaluation is None else float(evaluation["metric"]["score"]["value"])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="a run of your own to draw in")
    parser.add_argument("--runs", type=Path, default=Path("records/packs/demo.pack/runs"))
    parser.add_argument("--out", type=Path, default=Path("runs/demo/beside.html"))
    arguments = parser.parse_args()
    pairs = read_pairs(arguments.runs)
    own = read_training(arguments.run) if arguments.run else None
    table = Table(*heads(pairs), title="held-out score, paired gain over the cold start")
    for row in rows(pairs):
        table.add_row(*map(Text, row))
    Console().print(table)
    names = " and ".join(METHODS[method] for method in next(iter(pairs.values())))
    told = f"{len(pairs)} recorded seeds of {names}: means, lowest and highest."
    drawn = Markup("").join(svg_chart(chart) for chart in charts(pairs, own))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(arguments.out, str(_PAGE.format(told, drawn, "")).encode())
    print(f"open {arguments.out}")


if __name__ == "__main__":
    main()
