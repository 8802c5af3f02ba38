"""Runs a question of records/questions.toml, and prints its verdict.

    python -m benchmarks.question NAME --out DIR [--processes N]   run what is missing, then print the result
    python -m benchmarks.question NAME --out DIR --status          run nothing, print the progress
    python -m benchmarks.question NAME --out DIR --verdict         run nothing, print the result

Runs are those of ``python -m benchmarks.learning factbook`` with the recipe, methods, seeds and budget of the
question, one process of one thread each. You can stop the command at any time and repeat it to continue.

The result follows the rules that are written in the file of questions. It compares the two named methods and
no others, so nothing is corrected for further comparisons. It is a verdict only if every seed is finished and
there are at least ten; otherwise it is marked as "so far" or "sketch". It is also written to DIR/NAME.md.
"""

import argparse
import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import stdev
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

import outrider
from benchmarks.calls_to_reward import run_calls
from benchmarks.calls_to_reward import table as calls_table
from benchmarks.learning import choose_methods, run_jobs, with_one_thread
from benchmarks.learning_factbook import Plan, factbook_jobs
from benchmarks.learning_jobs import read_journal
from benchmarks.learning_methods import IMITATION, Method
from benchmarks.learning_tables import (
    factbook_notes,
    factbook_table,
    method_labels,
    returns_table,
    seed_scores,
)
from benchmarks.markdown_table import MethodTable, markdown
from benchmarks.student import student_interval
from outrider.errors import ConfigError, OutriderError
from outrider.evaluation.compare import compare
from outrider.evaluation.statistics import ALPHA, DECIMALS, Estimate, mcnemar_p, student_p
from outrider.files import replace_file
from outrider.training.resume import read_commit

MIN_SEEDS: Final = 10
TIE: Final = 0.08
"""Half of the width of the interval in which methods are tied: a share of the tasks, or a return of at most
1.
"""


class Question(BaseModel):
    """An entry of the file of questions. ``method`` is compared with ``baseline``; ``levels`` are training
    rewards whose tool calls are compared, too. With ``pairs_seeds``, the test is over the differences of the
    two runs of a seed, which start from the same cold start: of their success, or with ``measure = "return"``
    of the mean return of their last evaluations. With ``measure = "calls"``, the verdict is that of the sign
    test over the tool calls to the one reward in ``levels``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    question: str
    expected: str
    written: date
    code: str
    recipe: Path
    overrides: tuple[str, ...] = ()
    policy_tokens: int = Field(ge=1)
    first_seed: int = Field(0, ge=0)
    num_seeds: int = Field(ge=1)
    methods: tuple[str, ...]
    method: str
    baseline: str
    levels: tuple[float, ...] = ()
    pairs_seeds: bool = False
    measure: Literal["success", "return", "calls"] = "success"
    remarks: tuple[str, ...] = ()

    @field_validator("overrides")
    @classmethod
    def _leaves_seeds_and_budget(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        own = ("seed=", "train.max_policy_tokens=", "model.initial_checkpoint=")
        if wrong := [override for override in value if override.startswith(own)]:
            raise ValueError(f"{wrong[0]} is set by the question")
        return value

    @model_validator(mode="after")
    def _tests_returns_by_seed(self) -> "Question":
        if self.measure == "return" and not self.pairs_seeds:
            raise ValueError('measure = "return" needs pairs_seeds = true')
        if self.measure == "calls" and not (self.pairs_seeds and len(self.levels) == 1):
            raise ValueError('measure = "calls" needs pairs_seeds = true and one level')
        return self


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a run failed or there is no verdict, 2 bad configuration, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.question", description="Run a question and print its verdict."
    )
    parser.add_argument("name", metavar="NAME", help="a table of the file of questions")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="trainings at a time")
    parser.add_argument("--records", type=Path, default=Path("records/questions.toml"), metavar="FILE")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--status", action="store_true", help="run nothing, print the progress")
    only.add_argument("--verdict", action="store_true", help="run nothing, print the result")
    parsed = parser.parse_args(arguments)
    try:
        if parsed.processes < 1:
            raise ConfigError("--processes must be at least 1")
        question = read_question(parsed.records, parsed.name)
        plan = make_plan(question, parsed.out)
        methods = choose_methods(plan.methods(), question.methods)
        failed = False
        if not parsed.verdict:
            jobs = factbook_jobs(plan, methods)
            if not parsed.status:
                require_clean_checkout()
            failed = run_jobs(parsed, jobs)
        if parsed.status:
            return 0
        text, is_verdict = report(question, plan, name=parsed.name, records=parsed.records)
        replace_file(plan.out / f"{parsed.name}.md", f"{text}\n".encode())
        print(text)
        return int(failed or not is_verdict)
    except OutriderError as error:
        print(f"benchmarks.question: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("benchmarks.question: interrupted; repeat the command to continue", file=sys.stderr)
        return 130


def read_question(records: Path, name: str) -> Question:
    """Raises ConfigError for a missing file or entry and for a malformed one."""
    try:
        entries = tomllib.loads(records.read_text(encoding="utf-8"))
        question = Question.model_validate(entries[name])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{records} cannot be read: {error}") from error
    except KeyError as error:
        raise ConfigError(f"{records} has no question {name}; it has {', '.join(entries)}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{records}: {name}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if question.method == question.baseline or not {question.method, question.baseline} <= {
        *question.methods
    }:
        raise ConfigError(f"{records}: {name}: method and baseline must be two of methods")
    return question


def make_plan(question: Question, out: Path) -> Plan:
    """The runs of the question."""
    return Plan(
        recipe=question.recipe,
        out=out.resolve(),
        seeds=range(question.first_seed, question.first_seed + question.num_seeds),
        policy_tokens=question.policy_tokens,
        overrides=with_one_thread(question.overrides),
    )


def require_clean_checkout() -> None:
    """Raise ConfigError if runs could not state the commit of their code."""
    root = Path(outrider.__file__).parents[2]
    commit = read_commit(root)
    if not commit or commit.endswith("-dirty"):
        raise ConfigError(
            f"{root} {'has changes that are not committed' if commit else 'is no git repository'}, so its "
            "runs could not state the commit of their code: run the question from a clone without changes"
        )


def report(question: Question, plan: Plan, *, name: str, records: Path) -> tuple[str, bool]:
    """Return the result in Markdown, and whether it is a verdict. Only seeds that both methods have finished
    are compared. Raises OutriderError if there are none, and ConfigError for a run with other settings.
    """
    by_key = {method.key: method for method in plan.methods()}
    method, baseline = by_key[question.method], by_key[question.baseline]
    pair = (baseline, method)
    done = {job.name for job in factbook_jobs(plan, pair) if job.is_done()}
    seeds = [seed for seed in plan.seeds if {f"factbook/{one.key}-{seed}" for one in pair} <= done]
    if not seeds:
        raise OutriderError(f"{plan.out}: no seed of {name} is finished with both methods")
    comparison = compare([plan.folder(one, seed) for seed in seeds for one in pair])
    if len(comparison.groups) != 2:
        raise OutriderError(f"{plan.out}: runs of one method have different settings")
    labels, [tested] = method_labels(comparison), comparison.pairs
    is_complete = len(seeds) == question.num_seeds
    commits, problems = origin(plan, seeds, pair, name=name, records=records)
    problems += tested.verdict.missing
    is_verdict = is_complete and len(seeds) >= MIN_SEEDS and not problems
    names = {label: by_key[key].name for key, label in labels.items()}
    factor, unit, digits = (1, "", 3) if question.measure == "return" else (100, " points", 1)
    if question.pairs_seeds:
        scored = "return" if question.measure == "return" else "success"
        own, base = (seed_scores(comparison, labels[one.key], scored) for one in (method, baseline))
        differences = [own[seed] - base[seed] for seed in seeds]
        difference, p = paired_difference(differences)
        higher = labels[method.key if difference.value > 0 else baseline.key]
        winner = higher if p < ALPHA else None
        means = "mean returns" if question.measure == "return" else "means"
        compared = f"{means} over seeds, paired"
        deviation = factor * (stdev(differences) if len(differences) > 1 else 0.0)
        tests = f"; t test of the differences by seed: p = {p:.3g}"
        tests += f", standard deviation {deviation:.{digits}f}{unit}"
    else:
        difference, winner, compared = tested.difference, tested.verdict.winner, "interquartile means"
        if tested.first != labels[method.key]:
            difference = Estimate(value=-difference.value, low=-difference.high, high=-difference.low)
        reasons = [re.sub(r"^.*(?= has \d+ seed)", lambda label: names.get(label[0], label[0]), one)
                   for one in tested.verdict.reasons]  # fmt: skip
        tests = f"; {'; '.join(reasons) or 'all tests name the same winner'}"
    calls = {
        one.key: {seed: run_calls(plan.folder(one, seed), question.levels) for seed in seeds} for one in pair
    }
    has_calls = any(
        number for by_seed in calls.values() for one in by_seed.values() for number in one.values()
    )
    if question.measure == "calls":
        [level] = question.levels
        fewer, more, p = sign_test(
            *([calls[one.key][seed][level] for seed in seeds] for one in (method, baseline))
        )
        result = "undecided" if p >= ALPHA else "win" if fewer > more else "loss"
    else:
        result = outcome(winner, difference, method=labels[method.key])
    if problems:
        state = f"No verdict: {'; '.join(problems)}."
    elif not is_complete:
        state = f"So far, {len(seeds)} of {question.num_seeds} seeds: no verdict, and no result to quote."
    elif not is_verdict:
        state = f"Sketch: {len(seeds)} seeds, at least {MIN_SEEDS} are needed for a verdict."
    else:
        what = f" in tool calls to a reward of {question.levels[0]:g}" if question.measure == "calls" else ""
        state = f"Verdict: **{result}** of {method.name} against {baseline.name}{what}."
    value, low, high = (
        f"{factor * part:+.{digits}f}" for part in (difference.value, difference.low, difference.high)
    )
    scores = factbook_table(pair, comparison)
    if question.pairs_seeds or not is_verdict:  # one rule, and no conclusion from incomplete results
        scores = MethodTable(scores.header[:-1], [row[:-1] for row in scores.rows])
    parts = [
        f"# {name}: {question.question}",
        f"Expected: {question.expected}",
        state,
        scores.text,
        *([returns_table(pair, comparison)] if question.measure == "return" else []),
        f"{method.name} minus {baseline.name}, {compared}: {value}{unit}"
        + (f" [{low}, {high}]" if difference.has_interval else "")
        + f"{tests if is_verdict else ''}.",
        *(_calls(question, calls, pair, is_verdict=is_verdict) if has_calls else []),
        seconds_table(question, plan, by_key),
        "\n".join(f"- {note}" for note in [
            *factbook_notes(pair, comparison), f"commit of the runs: {', '.join(commits) or 'unknown'}"
        ]),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part), is_verdict


def outcome(winner: str | None, difference: Estimate, *, method: str) -> str:
    """Return ``win``, ``loss``, ``tie`` or ``undecided`` from the winner that the tests name, if they name
    one, and the interval of the difference.
    """
    if winner is not None:
        return "win" if winner == method else "loss"
    is_tied = difference.has_interval and difference.low >= -TIE and difference.high <= TIE
    return "tie" if is_tied else "undecided"


def paired_difference(differences: Sequence[float]) -> tuple[Estimate, float]:
    """Return the mean of differences with its 95 % interval, and the two-sided p, by Student's paired t test;
    fewer than two have neither. If all are equal, p is that of the test over their signs.
    """
    differences = [round(difference, DECIMALS) for difference in differences]
    estimate = student_interval(differences)
    if not estimate.has_interval:
        return estimate, 1.0
    error = stdev(differences) / math.sqrt(len(differences))
    if not error:
        return estimate, 2.0 ** (1 - len(differences)) if estimate.value else 1.0
    return estimate, student_p(estimate.value / error, len(differences) - 1)


def sign_test(first: Sequence[float], second: Sequence[float]) -> tuple[int, int, float]:
    """Return how often the first method needs fewer calls, how often more, and the two-sided p of the sign
    test over the seeds that differ. Negative numbers are calls of a run that never reached the level.
    """
    pairs = [tuple(one if one > 0 else math.inf for one in both) for both in zip(first, second, strict=True)]
    fewer, more = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    return fewer, more, mcnemar_p(fewer, more)


def _calls(
    question: Question,
    calls: Mapping[str, Mapping[int, Mapping[float, float]]],
    pair: Sequence[Method],
    *,
    is_verdict: bool,
) -> list[str]:
    table = calls_table(calls, question.levels)
    if not is_verdict:
        return [table]
    lines = []
    for level in question.levels:
        base, own = ([one[level] for one in calls[method.key].values()] for method in pair)
        fewer, more, p = sign_test(own, base)
        result = (
            f"{pair[1 if fewer > more else 0].name} needs fewer" if p < ALPHA else "no difference is shown"
        )
        lines.append(
            f"- Calls until {level:g}: {pair[1].name} needs fewer on {fewer} seeds and more on {more}, "
            f"sign test p = {p:.3g}: {result}."
        )
    many = f"{len(lines)} tests, not corrected for each other:\n\n" if len(lines) > 1 else ""
    return [table, many + "\n".join(lines)]


def seconds_table(question: Question, plan: Plan, by_key: Mapping[str, Method]) -> str:
    """Processor seconds of every run, from the journal; wall-clock time if it is older."""
    spent: dict[str, float] = {}
    ends = [event for event in read_journal(plan.out) if "seconds" in event]
    is_wall = any("cpu_seconds" not in event for event in ends)
    for event in ends:
        seconds = event["seconds" if is_wall else "cpu_seconds"]
        spent[event["job"]] = spent.get(event["job"], 0.0) + seconds
    keys = list(dict.fromkeys([*([IMITATION] if plan.has_cold_start else []), *question.methods]))
    rows = [[spent.get(f"factbook/{key}-{seed}", 0.0) for key in keys] for seed in plan.seeds]
    totals = [math.fsum(column) for column in zip(*rows, strict=True)]
    table = markdown(
        ("seed", *(by_key[key].name for key in keys)),
        [(label, *(f"{value:,.0f}" if value else "" for value in values))
         for label, values in zip([*map(str, plan.seeds), "all"], [*rows, totals], strict=True)],
    )  # fmt: skip
    kind = "Wall-clock seconds (some have no record of processor time)" if is_wall else "Processor seconds"
    return f"{kind}, {math.fsum(totals):,.0f} in all:\n\n{table}"


def origin(
    plan: Plan, seeds: Sequence[int], pair: Sequence[Method], *, name: str, records: Path
) -> tuple[list[str], list[str]]:
    """The commits of the compared runs and of their cold starts, and what speaks against a verdict: runs of
    several or unknown commits, changes that were not committed, or a commit without this question.
    """
    cold = [method for method in plan.methods() if method.key == IMITATION and plan.has_cold_start]
    commits: set[str] = set()
    for run in (plan.folder(method, seed) for seed in seeds for method in [*cold, *pair]):
        notes = run / "notes.jsonl"
        text = notes.read_text(encoding="utf-8") if notes.exists() else ""
        commits.update(re.findall(r"outrider \S+ \(commit ([0-9a-f]+(?:-dirty)?)\)", text) or ["unknown"])
    problems = [] if len(commits) == 1 else [f"the runs are of {len(commits)} commits"]
    if "unknown" in commits:
        problems.append("a run does not state its commit")
    entry = tomllib.loads(records.read_text(encoding="utf-8"))[name]
    for commit in sorted(commits - {"unknown"}):
        if commit.endswith("-dirty"):
            problems.append(f"runs of {commit} had changes that were not committed")
        written = _entries_at(commit.removesuffix("-dirty"), records)
        if written is None or written.get(name) != entry:
            problems.append(f"{records.name} of commit {commit} does not have this question as it is now")
    return sorted(commits), problems


def _entries_at(commit: str, records: Path) -> dict[str, Any] | None:
    """The questions at a commit, none if the file did not exist; None without a repository."""

    def git(*words: str) -> "subprocess.CompletedProcess[str] | None":
        command = ["git", "-C", str(records.resolve().parent), *words]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.SubprocessError):
            return None

    top = git("rev-parse", "--git-dir")
    if top is None or top.returncode:
        return None
    shown = git("show", f"{commit}:./{records.name}")
    return {} if shown is None or shown.returncode else tomllib.loads(shown.stdout)


if __name__ == "__main__":
    sys.exit(main())
