"""Records of figures: the contents of ``records/*.json``, and the Markdown generated from them.

A record names the source of its figures (``source``) and the command. Its kind determines its views:

- ``cells``: a recorded table ("" the table, ``notes`` the list below it);
- ``values``: single figures by name, a text or a score with its number of tasks, whose interval is computed;
- ``scores``: scores by seed and name, in the tables of its ``views``;
- ``runs``: runs of a pack, one row each: settings, rewards at the beginning and at the end of training,
  held-out score;
- ``gains``: runs ``METHOD-SEED`` of a pack, with their paired gains over one cold start per seed;
- ``calls``: tool calls until a reward;
- ``toys``, ``factbook``: the tables of ``benchmarks.learning`` from a pack ("" a short table of method, score
  and verdict, with all columns in a folded block; ``all`` all columns, unfolded; ``returns`` of ``factbook``
  the mean returns, if all evaluations have them);
- ``league``: rows of the tables of such records, with their tasks and models ("" all rows, ``readme`` the
  chosen ones).

``cells`` with ``shown`` have a short table of these columns, too.

Packs are in ``records/packs``, and are verified before they are read.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from benchmarks import calls_to_reward
from benchmarks.demo_beside import heads, read_pairs, rows
from benchmarks.learning_methods import TOY_SUITES, Method, factbook_methods
from benchmarks.learning_tables import factbook_notes, factbook_table, returns_table, toy_table
from benchmarks.markdown_table import MethodTable, markdown, short_verdict, with_columns
from outrider.errors import DataError
from outrider.evaluation.compare import Comparison, compare
from outrider.evaluation.packs import read_exact, verify
from outrider.printing import score
from outrider.rollout.evaluate import interval
from outrider.viewer.run_reader import read_records

PACKS: Final = "packs"
MIN_SEEDS: Final = 10
"""Rows of the league with fewer seeds are sketches."""
MAX_README_ROWS: Final = 6


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Record(_Part):
    source: str
    command: str


class Cells(_Record):
    """A table as it was printed."""

    kind: Literal["cells"]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()


class Score(_Part):
    """A share of ``num_tasks`` tasks in percent."""

    percent: float = Field(ge=0, le=100)
    num_tasks: int = Field(ge=1)

    @property
    def text(self) -> str:
        """With Wilson's 95 % interval."""
        num_solved = round(self.percent * self.num_tasks / 100)
        low, high = interval([1.0] * num_solved + [0.0] * (self.num_tasks - num_solved), binary=True)
        return score(self.percent / 100, low, high)


class Values(_Record):
    """Single figures by name."""

    kind: Literal["values"]
    values: dict[str, str | Score]


class View(_Part):
    """``names`` maps columns of the table to scores; ``corner`` is the head of the first column.

    ``seeds`` has a row per seed and their mean, ``intervals`` the same with intervals over tasks and policy
    tokens.
    """

    form: Literal["seeds", "intervals"]
    corner: str
    names: dict[str, str]


class SeedScores(_Part):
    """One seed: scores in percent and policy tokens, by name."""

    label: str
    percent: dict[str, float]
    policy_tokens: dict[str, int] = {}


class Scores(_Record):
    """Recorded scores of ``num_tasks`` tasks."""

    kind: Literal["scores"]
    num_tasks: int = Field(ge=1)
    views: dict[str, View]
    seeds: tuple[SeedScores, ...]


class Toys(_Record):
    """One toy of ``benchmarks.learning`` in a pack; ``methods`` in the order of the table."""

    kind: Literal["toys"]
    pack: str
    toy: str
    methods: tuple[str, ...]
    num_seeds: int = Field(ge=1)


class FactbookRuns(_Record):
    """The Factbook task of ``benchmarks.learning`` in a pack with runs ``METHOD-SEED``.

    If several packs have a run, the first one counts. ``names`` are those of methods that
    ``benchmarks.learning`` does not have.
    """

    kind: Literal["factbook"]
    pack: str | tuple[str, ...]
    methods: tuple[str, ...]
    names: dict[str, str] = {}


class Calls(_Record):
    """Tool calls until a reward (:mod:`benchmarks.calls_to_reward`), of runs of packs."""

    kind: Literal["calls"]
    packs: tuple[str, ...]
    methods: tuple[str, ...]
    levels: tuple[float, ...]


class Runs(_Record):
    """``rows`` maps a run of the pack to cells that describe it; the table has them under ``columns``, then
    its measurements: steps, mean reward of the first and the last ``window`` steps, and the score after
    training.
    """

    kind: Literal["runs"]
    pack: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[str, ...]]
    window: int = Field(3, ge=1)


class Gains(_Record):
    """Runs of the demo in a pack (:mod:`benchmarks.demo_beside`)."""

    kind: Literal["gains"]
    pack: str


class LeagueTask(_Part):
    """``record`` has the methods of the task, ``page`` its evidence. ``readme`` are names of its methods for
    README, ``elsewhere`` those that only the task's page shows.
    """

    task: str
    model: str
    record: str
    page: str
    readme: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()


class League(_Record):
    """Methods, tasks and models in one table."""

    kind: Literal["league"]
    tasks: tuple[LeagueTask, ...]


Record = Annotated[
    Cells | Values | Scores | Runs | Gains | Toys | FactbookRuns | Calls | League,
    Field(discriminator="kind"),
]
_RECORD: TypeAdapter[Any] = TypeAdapter(Record)


def render_all(records: Path) -> dict[str, str]:
    """Every figure of every record by name: ``RECORD`` or ``RECORD/VIEW``. Raises DataError naming the file,
    and PackError.
    """
    figures: dict[str, str] = {}
    for file in sorted(records.glob("*.json")):
        try:
            record = _RECORD.validate_json(file.read_bytes())
            rendered = _RENDER[record.kind](record, records / PACKS)
        except ValidationError as error:
            first = error.errors()[0]
            raise DataError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        except KeyError as error:
            raise DataError(f"{file}: there is no {error}") from error
        figures |= {f"{file.stem}/{view}" if view else file.stem: text for view, text in rendered.items()}
    return figures


def _cells(record: Cells, packs: Path) -> dict[str, str]:
    notes = "\n".join(f"- {note}" for note in record.notes)
    return {"": with_columns(record.columns, record.rows, record.shown, notes), "notes": notes}


def _values(record: Values, packs: Path) -> dict[str, str]:
    return {name: value if isinstance(value, str) else value.text for name, value in record.values.items()}


def _scores(record: Scores, packs: Path) -> dict[str, str]:
    return {name: _seeds_table(record, view) for name, view in record.views.items()}


def _seeds_table(record: Scores, view: View) -> str:
    def cell(one: SeedScores, name: str) -> str:
        if view.form == "seeds":
            return f"{one.percent[name]:.1f}"
        told = Score(percent=one.percent[name], num_tasks=record.num_tasks).text.replace(" %", "")
        return f"{told} ({one.policy_tokens[name]:,})" if name in one.policy_tokens else told

    rows = [(one.label, *(cell(one, name) for name in view.names)) for one in record.seeds]
    means = [math.fsum(one.percent[name] for one in record.seeds) / len(record.seeds) for name in view.names]
    return markdown(
        (view.corner, *view.names.values()), [*rows, ("mean", *(f"{mean:.1f}" for mean in means))]
    )


def _runs(record: Runs, packs: Path) -> dict[str, str]:
    tables = verify(packs / record.pack).tables
    ends = {row["run"]: row for row in tables["evaluations"] if row["step"] > 0}
    columns = (
        *record.columns,
        "steps",
        f"reward, first {record.window} steps",
        f"last {record.window}",
        "held-out score %",
    )
    table = []
    for name, cells in record.rows.items():
        lines = read_records(packs / record.pack / "runs" / name / "metrics.jsonl")
        rewards = [line["reward/mean"] for line in lines if line["kind"] == "train"]
        around = (
            math.fsum(part) / len(part) for part in (rewards[: record.window], rewards[-record.window :])
        )
        told = Score(percent=100 * ends[name]["score"], num_tasks=ends[name]["num_tasks"]).text.replace(
            " %", ""
        )
        table.append((*cells, str(len(rewards)), *(f"{mean:.2f}" for mean in around), told))
    return {"": markdown(columns, table)}


def _gains(record: Gains, packs: Path) -> dict[str, str]:
    verify(packs / record.pack)
    pairs = read_pairs(packs / record.pack / "runs")
    return {"": markdown(heads(pairs), rows(pairs))}


def _toys(record: Toys, packs: Path) -> dict[str, str]:
    table = _toy_table(record, packs)
    return {"": table.short(), "all": table.text}


def _toy_table(record: Toys, packs: Path) -> MethodTable:
    from tests.toy_result import Result

    verify(packs / record.pack)
    # their names are wanted, not their settings
    methods = {method.key: method for method in TOY_SUITES[record.toy].methods(1)}
    results: dict[str, dict[int, Any]] = {key: {} for key in record.methods}
    for row in read_exact(packs / record.pack).values():
        if row.toy == record.toy and row.method in results:
            results[row.method][row.seed] = Result(**row.result)
    chosen = [methods[key] for key in record.methods]
    return toy_table(chosen, results, toy=record.toy, num_seeds=record.num_seeds)


def _factbook(record: FactbookRuns, packs: Path) -> dict[str, str]:
    chosen, comparison = _factbook_runs(record, packs)
    notes = "\n".join(f"- {note}" for note in factbook_notes(chosen, comparison))
    table = factbook_table(chosen, comparison)
    views = {"": table.short(notes), "all": table.text}
    if all(run.evaluations[-1].mean_return is not None for group in comparison.groups for run in group.runs):
        views["returns"] = returns_table(chosen, comparison)
    return views


def _factbook_runs(record: FactbookRuns, packs: Path) -> tuple[list[Method], Comparison]:
    """The methods and their compared runs."""
    # their names are wanted, not their settings
    names = {method.key: method.name for method in factbook_methods(2, 1)} | record.names
    runs: dict[str, Path] = {}
    for pack in (record.pack,) if isinstance(record.pack, str) else record.pack:
        manifest = verify(packs / pack).manifest
        own = [name for name in manifest.runs if name.rpartition("-")[0] in record.methods]
        runs = {name: packs / pack / "runs" / name for name in own} | runs
    chosen = [Method(key=key, name=names[key], algorithm={}) for key in record.methods]
    return chosen, compare([runs[name] for name in sorted(runs)])


def _league(record: League, packs: Path) -> dict[str, str]:
    header = (
        "task", "model", "method", "score [95 %]", "seeds", "policy tokens", "tool calls", "against GRPO",
    )  # fmt: skip
    every, readme = [], []
    for entry in record.tasks:
        source = _RECORD.validate_json((packs.parent / f"{entry.record}.json").read_bytes())
        if not isinstance(source, Toys | FactbookRuns):
            raise DataError(f"{entry.record}.json has no methods of a pack")
        is_toy = isinstance(source, Toys)
        if isinstance(source, Toys):
            table = _toy_table(source, packs)
        else:
            table = factbook_table(*_factbook_runs(source, packs))
        if missing := {*entry.readme, *entry.elsewhere} - {cells[0] for cells in table.rows}:
            raise DataError(f"{entry.record}.json has no method {min(missing)}")
        score_column = "interquartile mean" if is_toy else "interquartile mean %"
        base_seeds = next((int(cells[1]) for cells in table.rows if cells[0] == "GRPO"), 0)
        for cells in table.rows:
            row = dict(zip(table.header, cells, strict=True))
            if not row[score_column] or row["method"] in entry.elsewhere:  # or not defined on this task
                continue
            is_sketch = min(int(row["seeds"]), base_seeds) < MIN_SEEDS
            shown = (
                row["method"], row[score_column] if is_toy else _percent(row[score_column]), row["seeds"],
                row["policy tokens"], row.get("executed tool calls", ""),
                "sketch" if is_sketch else short_verdict(cells, is_scored=True),
            )  # fmt: skip
            every.append((f"[{entry.task}]({entry.page})", entry.model, *shown))
            if row["method"] in entry.readme:
                if is_sketch:
                    raise DataError(f"{entry.record}: a row of README needs at least {MIN_SEEDS} seeds")
                readme.append((f"[{entry.task}](docs/{entry.page})", entry.model, *shown))
    if len(readme) > MAX_README_ROWS:
        raise DataError(f"README has at most {MAX_README_ROWS} rows of the league, not {len(readme)}")
    return {"": markdown(header, every), "readme": markdown(header, readme)}


def _percent(cell: str) -> str:
    number, _, rest = cell.partition(" ")
    return f"{number} % {rest}"


def _calls(record: Calls, packs: Path) -> dict[str, str]:
    for pack in record.packs:
        verify(packs / pack)
    folders = [packs / pack / "runs" for pack in record.packs]
    return {
        "": calls_to_reward.table(
            calls_to_reward.read_calls(folders, record.methods, record.levels), record.levels
        )
    }


_RENDER: Final[Mapping[str, Callable[[Any, Path], dict[str, str]]]] = {
    "cells": _cells, "values": _values, "scores": _scores, "runs": _runs, "gains": _gains, "toys": _toys,
    "factbook": _factbook, "calls": _calls, "league": _league,
}  # fmt: skip
