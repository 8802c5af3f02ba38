"""Does the gain of tips stay when the tips are gone? Houses whose facts a policy can keep in its weights.

    python -m benchmarks.house_retention --out DIR --stage {0,1,2} [--seeds N] [--first-seed N]
                                         [--status] [--records FILE.json] [section.field=value ...]

A house has six pieces of furniture, and an episode has the moves to open two of them: a search without
knowledge of the house finds 33.3 % of the things. All arms of a seed start from one cold start, which
imitates experts in *other* houses, and train on the 48 tasks of eight houses. Panels, four draws per task at
temperature 1, the same for all arms of a seed:

- A: the trained tasks without tips;
- A+: the same with tips of a memory that two rounds of the cold start's policy fill;
- B: the 48 tasks of eight new houses without tips.

Stage 0 is the ceiling: supervised training on the successes of 16 episodes with tips per task, rendered
without their tips, for up to eight epochs with the rate of the cold start. It passes if A reaches 25 % after
one, two, four or eight epochs; otherwise a model of this size cannot hold the facts, and all layers
(``model.trained_layers=30``, in another folder) are tried once. Stage 1 is the pilot, stage 2 the comparison;
without a stage 0 in DIR, the pilot of the recipe relies on the recorded one.
One process of one thread runs at a time. You can stop the command at any time and repeat it to continue.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest import mock

import numpy as np

from benchmarks.comparison import policy_tokens, train
from benchmarks.house_verdict import (
    CEILING,
    PREDICTION,
    Panels,
    Scores,
    best_arm,
    passes_pilot,
    table,
)
from benchmarks.markdown_table import markdown
from benchmarks.tips_counterfactual import ReadOnlyTips, memory_of, play_panel
from outrider.__main__ import program
from outrider.algorithms import tips
from outrider.algorithms.tips import PLAIN, TIPS_ON, TipHook
from outrider.config import load_settings
from outrider.errors import ConfigError, OutriderError
from outrider.files import replace_file
from outrider.memory.embedders import load_embedder
from outrider.memory.tips import TipMemory
from outrider.trace import Node, without_memory
from outrider.training.cold_start import cold_start, successful_paths
from outrider.training.components import Components
from outrider.training.learner import LocalLearner
from outrider.training.packing import RolloutPath
from outrider.training.settings import RunSettings
from outrider.training.setup import build
from outrider.types import Message, Origin

RECIPE: Final = Path("recipes/house-empo2.toml")
CEILING_RECORD: Final = Path(__file__).parents[1] / "records/house-ceiling.json"
COMMAND: Final = "python -m benchmarks.house_retention --out runs/retention --stage {stage}"
SHARED: Final = ("num_threads=1", "evaluation.temperature=1.0", "evaluation.num_tasks=48")
# experts of the cold start show the contents of their houses, so these are other houses
COLD: Final = (
    "environment.house_seed=1",
    "train.num_steps=0",
    "evaluation.at_start=false",
    "evaluation.num_tasks=12",
)
NUM_HOUSES: Final = 8
HOUSES: Final = (f"environment.num_train={NUM_HOUSES}", "environment.num_test=8", "cold_start.num_examples=0")
SEEDS: Final = {0: (100, 1), 1: (100, 2), 2: (0, 5)}
"""First seed and number of seeds by stage: settings are chosen with seeds that the comparison never uses."""
PANELS: Final = ("A", "A+", "B")
NUM_DRAWS: Final = 4
NUM_HELPED: Final = 16
EPOCHS: Final = (1, 2, 4, 8)
Note = Callable[[str], None]
"""Prints a line of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """``out`` is absolute; ``overrides`` are the caller's, for all runs."""

    recipe: Path
    out: Path
    overrides: Sequence[str]

    def cold(self, seed: int) -> Path:
        """The run with the cold start of a seed."""
        return self.out / f"cold-{seed}"

    def arguments(self, seed: int, *overrides: str) -> list[str]:
        """The recipe and the overrides of a run."""
        return [str(self.recipe), *SHARED, *overrides, *self.overrides, f"seed={seed}"]

    def identity(self) -> dict[str, Any]:
        """The settings that all stored results share. No defaults, which later versions extend."""
        recipe = tomllib.loads(self.recipe.read_text(encoding="utf-8"))
        return {"recipe": recipe, "overrides": [*SHARED, *self.overrides]}

    def memory(self, seed: int) -> Path:
        """The memory that the policy of the cold start fills."""
        return self.out / f"memory-{seed}.npz"

    def ledger(self, name: str) -> "Ledger":
        """Open a file of results."""
        return Ledger.open(self.out / f"{name}.json", self.identity())

    def settings(self, seed: int, checkpoint: Path) -> RunSettings:
        """The settings of a policy that plays in the trained houses."""
        recipe, *overrides = self.arguments(
            seed, *HOUSES, f"model.initial_checkpoint={checkpoint}", "train.num_steps=1"
        )
        return load_settings(RunSettings, file=Path(recipe), overrides=overrides)


@dataclass(slots=True)
class Ledger:
    """The results of one part of the study, stored after each of them with its processor seconds."""

    path: Path
    entries: dict[str, Any]

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, Any]) -> "Ledger":
        """Read the stored results. Raises ConfigError if they belong to other settings."""
        if not path.exists():
            return cls(path, {"identity": dict(identity), "cpu_s": {}})
        entries = json.loads(path.read_text(encoding="utf-8"))
        if entries["identity"] != dict(identity):
            raise ConfigError(f"{path} has other settings: choose another --out")
        return cls(path, entries)

    def complete(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return a stored result, or compute and store it."""
        if name not in self.entries:
            began = time.process_time()
            value = compute()
            self.entries["cpu_s"][name] = round(time.process_time() - began, 1)
            self.entries[name] = value
            replace_file(self.path, (json.dumps(self.entries, indent=1) + "\n").encode())
        return self.entries[name]


@contextmanager
def opened(settings: RunSettings, note: Note) -> Iterator[Components]:
    """The components of a run that stores nothing."""
    with TemporaryDirectory() as folder:
        parts = build(
            settings,
            buffer_path=Path(folder) / "buffer.sqlite",
            resumed=False,
            on_tokens=lambda number: None,
            note=note,
        )
        try:
            yield parts
        finally:
            parts.factory.close()


def hook_arguments(parts: Components) -> dict[str, Any]:
    """The arguments of a tip hook besides its settings."""
    return {
        "embedder": load_embedder(memory_of(parts.settings).embedder),
        "count_tokens": parts.renderer.count_tokens,
        "seed": parts.settings.seed,
    }


def fill_memory(parts: Components, file: Path) -> int:
    """Fill a memory in two rounds over the trained tasks, and write it. Returns the number of tips."""
    hook = TipHook(memory_of(parts.settings), **hook_arguments(parts))
    for stream_step in (-2, -3):
        play_panel(parts, parts.train_tasks, (hook,), PLAIN, num_samples=1, stream_step=stream_step)
    state, arrays = hook.memory.snapshot()
    state.pop("changes", None)
    file.with_suffix(".json").write_text(json.dumps(state), encoding="utf-8")
    np.savez(file, **arrays)
    return len(hook.memory)


def reader(parts: Components, file: Path) -> ReadOnlyTips:
    """Return a hook that shows the tips of :func:`fill_memory` and stores none."""
    settings = memory_of(parts.settings)
    memory = TipMemory(capacity=settings.capacity, eviction=settings.eviction, seed=parts.settings.seed)
    with np.load(file) as arrays:
        memory.restore(json.loads(file.with_suffix(".json").read_text(encoding="utf-8")), dict(arrays))
    return ReadOnlyTips(settings, memory=memory, exchanged={}, **hook_arguments(parts))


def play(parts: Components, panel: str, memory: Path) -> dict[str, float]:
    """Return the success of every task of panel ``A``, ``A+`` or ``B``."""
    tasks = parts.test_tasks if panel == "B" else parts.train_tasks
    hooks = (reader(parts, memory),) if panel == "A+" else ()
    evaluation, _ = play_panel(
        parts, tasks, hooks, TIPS_ON if panel == "A+" else PLAIN, num_samples=NUM_DRAWS
    )
    return dict(evaluation.task_scores)


# Stage 0: the ceiling


def helped_successes(parts: Components, memory: Path) -> dict[str, Any]:
    """Play every trained task ``NUM_HELPED`` times with tips. Returns the scores by task, and the successes
    that saw tips, rendered without them: origins and token ids of their nodes, by task.
    """
    evaluation, traces = play_panel(
        parts,
        parts.train_tasks,
        (reader(parts, memory),),
        TIPS_ON,
        num_samples=NUM_HELPED,
        stream_step=-4,
    )
    helped = [
        path for path in successful_paths(traces) if any(node.origin is Origin.MEMORY for node in path.nodes)
    ]
    groups = {id(node): number for number, trace in enumerate(traces) for node in trace.nodes}
    rollouts = [
        [groups[id(path.nodes[0])], [[str(n.origin), list(n.token_ids)] for n in without_memory(path.nodes)]]
        for path in helped
    ]
    return {"scores": dict(evaluation.task_scores), "rollouts": rollouts}


def stored_paths(rollouts: Sequence[tuple[int, Sequence[tuple[str, Sequence[int]]]]]) -> list[RolloutPath]:
    """Return the rollouts of :func:`helped_successes` with weight 1 on every token of the policy."""
    paths = []
    for index, (group, pieces) in enumerate(rollouts):
        nodes = []
        for number, (origin, ids) in enumerate(pieces):
            node = Node(
                node_id=number,
                parent=number - 1 if number else None,
                origin=Origin(origin),
                token_ids=tuple(ids),
                message=Message(role="user", content=""),
            )
            if node.trainable:
                node.logprobs = node.credit = (1.0,) * len(ids)
            nodes.append(node)
        paths.append(RolloutPath(nodes=nodes, rollout_index=index, group=group, succeeded=True))
    return paths


def ceiling(study: Study, seed: int, note: Note) -> Ledger:
    """Run stage 0 for one seed: what the weights can hold."""
    cold_run(study, seed)
    settings = study.settings(seed, checkpoint(study.cold(seed)))
    ledger, memory = study.ledger(f"ceiling-{seed}"), study.memory(seed)
    last = f"epoch {EPOCHS[-1]}"
    if all(f"{last}: {panel}" in ledger.entries for panel in PANELS):
        return ledger
    with opened(settings, note) as parts:
        if not isinstance(parts.learner, LocalLearner):
            raise ConfigError("the ceiling trains in one process: remove the section [cluster]")

        def measure(label: str, panel: str) -> None:
            scores = ledger.complete(f"{label}: {panel}", lambda: play(parts, panel, memory))
            note(f"{label}: {panel} {100 * fmean(scores.values()):.1f} %")

        measure("cold", "A")
        note(f"memory: {ledger.complete('tips', lambda: fill_memory(parts, memory))} tips")
        helped = ledger.complete("helped", lambda: helped_successes(parts, memory))
        paths = stored_paths(helped["rollouts"])
        note(f"with tips: {100 * fmean(helped['scores'].values()):.1f} %, {len(paths)} successes with tips")
        measure("cold", "B")
        options = settings.cold_start.model_copy(update={"num_epochs": EPOCHS[-1]})
        num_batches = -(-len(paths) // options.batch_size)
        losses: list[float] = []

        def after_step(done: int, total: int, values: Mapping[str, float]) -> None:
            losses.append(values["sft/loss"])
            epoch, rest = divmod(done, num_batches)
            if rest:
                return
            note(f"epoch {epoch}: loss {fmean(losses[-num_batches:]):.3f} nats a token")
            ledger.complete(f"epoch {epoch}: loss", lambda: fmean(losses[-num_batches:]))
            if epoch in EPOCHS:
                parts.engine.load(parts.engine.weight_version + 1)
                for panel in PANELS if epoch == EPOCHS[-1] else ("A",):
                    measure(f"epoch {epoch}", panel)

        cold_start(
            parts.learner.policy,
            paths,
            options,
            run_seed=seed,
            max_tokens=settings.update.max_tokens,
            on_step=after_step,
        )
    return ledger


def cold_run(study: Study, seed: int) -> None:
    """Train the cold start of a seed unless it is finished."""
    train(study.cold(seed), study.arguments(seed, *COLD), last_label="after cold start")


def checkpoint(run: Path) -> Path:
    """The newest checkpoint of a run."""
    return max((run / "checkpoints").glob("step-*"))


def ceiling_table(ledgers: Mapping[int, Ledger]) -> tuple[list[str], list[list[str]]]:
    """Success in percent: a row per seed and epoch, with the mean loss of the epoch."""
    rows = []
    for seed, ledger in ledgers.items():
        for label in ("cold", *(f"epoch {epoch}" for epoch in EPOCHS)):
            loss = ledger.entries.get(f"{label}: loss")
            scores = (ledger.entries.get(f"{label}: {panel}") for panel in PANELS)
            cells = ("-" if one is None else f"{100 * fmean(one.values()):.1f}" for one in scores)
            rows.append([str(seed), label, "-" if loss is None else f"{loss:.3f}", *cells])
    return ["seed", "after", "loss, nats per token", "A %", "A+ %", "B %"], rows


def ceiling_note(seed: int, ledger: Ledger) -> str:
    """What the training read, and whether the ceiling is reached."""
    entries = ledger.entries
    scores = {epoch: entries.get(f"epoch {epoch}: A") for epoch in EPOCHS}
    reached = {epoch: fmean(one.values()) for epoch, one in scores.items() if one is not None}
    best = max(reached, key=lambda epoch: reached[epoch], default=None)
    helped = entries.get("helped")
    parts = [f"seed {seed}: {sum(entries['cpu_s'].values()):.0f} s of CPU after the cold start"]
    if helped is not None:
        share = 100 * fmean(helped["scores"].values())
        parts.append(f"{share:.1f} % of {NUM_HELPED} episodes per task succeed with tips")
        num_tasks = len({group for group, _ in helped["rollouts"]})
        num_different = len({json.dumps(rollout) for rollout in helped["rollouts"]})
        parts.append(
            f"{len(helped['rollouts'])} successes with tips ({num_different} different) on {num_tasks} tasks "
            "are trained on"
        )
    if best is None:
        parts.append("no epoch is measured")
    else:
        outcome = "passes" if reached[best] >= CEILING else "does not pass"
        is_open = reached[best] < CEILING and len(reached) < len(EPOCHS)
        parts.append(
            f"best A {100 * reached[best]:.1f} % after epoch {best}, which {outcome} the line of 25 %"
        )
        if is_open:
            parts.append("later epochs are not measured")
    return "; ".join(parts) + "."


# Stages 1 and 2: the arms


GRPO: Final = ("algorithm.memory_probability=0", "algorithm.intrinsic_coefficient=0")
WEIGHTS: Final = (0.3, 1.0)
TITLES: Final = {
    "cold": "cold start",
    "grpo": "GRPO",
    "empo2": "EMPO², centred",
    "empo2-student": "EMPO², student denominator",
    "divergence": "forward KL, played without tips",
    "likelihood": "likelihood of successes with tips",
    "sdar": "SDAR as released",
    "echo": "ECHO, weight 0.1",
    "control": "control: tips of another house",
}
TOKENS: Final = {1: 88_000, 2: 147_000}
"""Policy tokens of every run by stage: about 60 and 100 steps of GRPO."""
DISTILLED: Final = ("divergence", "likelihood")


def arm_overrides(arm: str, weight: float) -> tuple[str, ...]:
    """The settings in which an arm differs from the recipe."""
    options = {
        "divergence": f"weight = {weight}",
        "likelihood": f'weight = {weight}, form = "likelihood", plays = "helped", where = "succeeded", '
        "policy_weight = 0",
        "sdar": 'preset = "sdar-released", help = "tips"',
    }
    if arm == "empo2":
        return ()
    if arm == "empo2-student":
        return ("algorithm.old_context=student",)
    if arm == "likelihood":
        # all groups with tips are trained without them; the others are plain
        changes: tuple[str, ...] = ("algorithm.off_policy_probability=1", GRPO[1])
    elif arm == "echo":
        changes = (*GRPO, "algorithm.observation_nll=0.1")
    else:
        changes = GRPO
    return (*changes, f"algorithm.distill={{{options[arm]}}}") if arm in options else changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One training: ``name`` is that of its results, ``key`` that of its settings."""

    name: str
    key: str
    weight: float = 1.0
    is_control: bool = False


def pilot_arms() -> list[Arm]:
    """The arms of stage 1: those with a weight at both of its values."""
    weighted = [
        Arm(name=f"{key}-{weight:g}", key=key, weight=weight) for key in DISTILLED for weight in WEIGHTS
    ]
    return [Arm(name="grpo", key="grpo"), Arm(name="empo2", key="empo2"), *weighted]


def final_arms(pilot: Scores) -> list[Arm]:
    """The arms of stage 2. The pilot selects the weights and the arm that the control repeats with tips of
    another house.
    """
    names = {key: [f"{key}-{weight:g}" for weight in WEIGHTS] for key in DISTILLED}
    chosen = {key: best_arm(pilot, names[key]) for key in DISTILLED}
    weights = {key: WEIGHTS[names[key].index(chosen[key])] for key in DISTILLED}
    better = max(DISTILLED, key=lambda key: best_arm(pilot, list(chosen.values())) == chosen[key])
    return [
        *(Arm(name=key, key=key) for key in ("grpo", "empo2", "empo2-student")),
        *(Arm(name=key, key=key, weight=weights[key]) for key in DISTILLED),
        Arm(name="sdar", key="sdar"),
        Arm(name="echo", key="echo"),
        Arm(name="control", key=better, weight=weights[better], is_control=True),
    ]


class ShiftedMemory(TipMemory):
    """Stores the tips of a house for the next one, so that every house reads the tips of another one."""

    def add(self, task_key: str, *arguments: Any, **options: Any) -> bool:
        """Store a record for the next house."""
        return super().add(next_house(task_key), *arguments, **options)


def next_house(world: str) -> str:
    """The world of the next trained house."""
    houses, _, index = world.rpartition("/")
    return f"{houses}/{(int(index) + 1) % NUM_HOUSES}"


def train_control() -> None:
    """``outrider train`` with tips of other houses, for the process of the control."""
    sys.argv[1:1] = ["train"]
    with mock.patch.object(tips, "TipMemory", ShiftedMemory):
        program()


def run_arm(study: Study, arm: Arm, seed: int, stage: int, note: Note) -> Ledger:
    """Train an arm unless it is finished, and play its panels."""
    ledger = study.ledger(f"panels-{stage}-{arm.name}-{seed}")
    if all(panel in ledger.entries for panel in PANELS):
        return ledger
    run = study.out / f"{stage}-{arm.name}-{seed}"
    arguments = study.arguments(
        seed,
        *HOUSES,
        f"model.initial_checkpoint={checkpoint(study.cold(seed))}",
        *arm_overrides(arm.key, arm.weight),
        f"train.max_policy_tokens={TOKENS[stage]}",
        "train.num_steps=1000",
        "train.keep_checkpoints=1",
        "evaluation.split=train",
        "evaluation.at_start=false",
        "evaluation.every=20",
    )
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    if arm.is_control:
        code = "from benchmarks.house_retention import train_control; train_control()"
        train(run, arguments, program=("-c", code))
    else:
        train(run, arguments)
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began
    ledger.complete("training_cpu_s", lambda: round(seconds, 1))  # of the last call, if it was stopped
    ledger.complete("policy_tokens", lambda: policy_tokens(run))
    play_panels(study, ledger, seed, checkpoint(run), f"{arm.name}-{seed}", note)
    return ledger


def play_panels(study: Study, ledger: Ledger, seed: int, weights: Path, name: str, note: Note) -> None:
    """Play the missing panels of a checkpoint, with the memory of the cold start."""
    if all(panel in ledger.entries for panel in PANELS):
        return
    if not study.memory(seed).exists():  # also if the panels of the cold start are those of another machine
        with opened(study.settings(seed, checkpoint(study.cold(seed))), note) as cold:
            fill_memory(cold, study.memory(seed))
    with opened(study.settings(seed, weights), note) as parts:
        for panel in PANELS:
            scores = ledger.complete(panel, partial(play, parts, panel, study.memory(seed)))
            note(f"{name}: {panel} {100 * fmean(scores.values()):.1f} %")


def run_stage(study: Study, stage: int, seeds: Sequence[int], note: Note) -> None:
    """Train and measure every arm of every seed.

    Raises ConfigError if the stage before did not pass.
    """
    arms = stage_arms(study, stage)
    for seed in seeds:
        cold_run(study, seed)
        cold = study.ledger(f"panels-{stage}-cold-{seed}")
        play_panels(study, cold, seed, checkpoint(study.cold(seed)), f"cold-{seed}", note)
        for arm in arms:
            run_arm(study, arm, seed, stage, note)
        note(markdown(*table(read_scores(study, stage), TITLES)))


def stage_arms(study: Study, stage: int) -> list[Arm]:
    """The arms of a stage. Raises ConfigError if the stage before did not pass."""
    if stage == 1:
        reached = [
            fmean(scores.values())
            for file in study.out.glob("ceiling-*.json")
            for name, scores in study.ledger(file.stem).entries.items()
            if name.startswith("epoch") and name.endswith(": A")
        ]
        if not reached and study.recipe == RECIPE and not study.overrides:
            reached = recorded_ceiling()
        if max(reached, default=0.0) < CEILING:
            raise ConfigError(f"stage 1 needs a stage 0 that reached {100 * CEILING:g} % on panel A")
        return pilot_arms()
    pilot = read_scores(study, 1)
    names = [arm.name for arm in pilot_arms()]
    if any(len(pilot.get(name, ())) < SEEDS[1][1] for name in names):
        raise ConfigError(f"stage 2 needs a finished pilot of {SEEDS[1][1]} seeds: run --stage 1")
    if not passes_pilot(pilot, [arm.name for arm in pilot_arms() if arm.key in DISTILLED]):
        raise ConfigError("no arm passed the pilot: the result is a no, and stage 2 is not run")
    return final_arms(pilot)


def recorded_ceiling() -> list[float]:
    """Success on panel A after every epoch of the committed stage 0, so that another machine can go on."""
    record = json.loads(CEILING_RECORD.read_text(encoding="utf-8"))
    label, score = record["columns"].index("after"), record["columns"].index("A %")
    return [float(row[score]) / 100 for row in record["rows"] if row[label].startswith("epoch")]


def read_scores(study: Study, stage: int) -> dict[str, dict[int, Panels]]:
    """The finished panels of a stage, the cold start first."""
    scores: dict[str, dict[int, Panels]] = {"cold": {}}
    for file in sorted(study.out.glob(f"panels-{stage}-*.json")):
        arm, _, seed = file.stem.removeprefix(f"panels-{stage}-").rpartition("-")
        entries = study.ledger(file.stem).entries
        if all(panel in entries for panel in PANELS):
            means = (fmean(entries[panel].values()) for panel in PANELS)
            trained, helped, new = means
            scores.setdefault(arm, {})[int(seed)] = Panels(trained=trained, helped=helped, new=new)
    return {arm: by_seed for arm, by_seed in scores.items() if by_seed}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a run failed, 2 bad configuration, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.house_retention", description="Does the gain of tips stay?"
    )
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2), required=True)
    parser.add_argument("--seeds", type=int, help="number of seeds (default: those of the stage)")
    parser.add_argument("--first-seed", type=int)
    parser.add_argument("--status", action="store_true", help="run nothing, print what is finished")
    parser.add_argument("--records", type=Path, help="file of the record to write")
    parser.add_argument("--source", default="", help="machine and commit, for the record")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parsed = parser.parse_intermixed_args(arguments)
    study = Study(recipe=parsed.recipe, out=parsed.out.resolve(), overrides=tuple(parsed.overrides))
    first, number = SEEDS[parsed.stage]
    first = first if parsed.first_seed is None else parsed.first_seed
    seeds = range(first, first + (parsed.seeds or number))
    try:
        if not parsed.status:
            study.out.mkdir(parents=True, exist_ok=True)
            if parsed.stage:
                run_stage(study, parsed.stage, seeds, _note)
            else:
                for seed in seeds:
                    ceiling(study, seed, _note)
        header, rows, notes = results(study, parsed.stage)
    except (OutriderError, subprocess.CalledProcessError) as error:
        print(f"benchmarks.house_retention: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("benchmarks.house_retention: interrupted; repeat the command to continue", file=sys.stderr)
        return 130
    print("\n\n".join([markdown(header, rows), *notes]))
    if parsed.records:
        record = {"kind": "cells", "source": parsed.source, "command": COMMAND.format(stage=parsed.stage),
                  "columns": header, "rows": rows, "notes": notes}  # fmt: skip
        content = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        parsed.records.write_text(content, encoding="utf-8")
    return 0


def results(study: Study, stage: int) -> tuple[list[str], list[list[str]], list[str]]:
    """Header, rows and notes of the finished results of a stage."""
    if stage:
        header, rows = table(read_scores(study, stage), TITLES)
        return header, rows, [f"Predicted order on A: {PREDICTION}."]
    ledgers = {
        int(file.stem.rpartition("-")[2]): study.ledger(file.stem)
        for file in sorted(study.out.glob("ceiling-*.json"))
    }
    header, rows = ceiling_table(ledgers)
    return header, rows, [ceiling_note(seed, ledger) for seed, ledger in ledgers.items()]


def _note(text: str) -> None:
    print(time.strftime("%H:%M:%S", time.gmtime()), text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
