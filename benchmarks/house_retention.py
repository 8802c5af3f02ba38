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
(``model.trained_layers=30``, in another folder) are tried once. Stage 1 is the pilot, stage 2 the comparison.
One process of one thread runs at a time. You can stop the command at any time and repeat it to continue.
"""

import argparse
import json
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from benchmarks.comparison import train
from benchmarks.markdown_table import markdown
from benchmarks.tips_counterfactual import ReadOnlyTips, memory_of, play_panel
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
SHARED: Final = ("num_threads=1", "evaluation.temperature=1.0", "evaluation.num_tasks=48")
# experts of the cold start show the contents of their houses, so these are other houses
COLD: Final = (
    "environment.house_seed=1",
    "train.num_steps=0",
    "evaluation.at_start=false",
    "evaluation.num_tasks=12",
)
HOUSES: Final = ("environment.num_train=8", "environment.num_test=8", "cold_start.num_examples=0")
SEEDS: Final = {0: (100, 1), 1: (100, 2), 2: (0, 5)}
"""First seed and number of seeds by stage: settings are chosen with seeds that the comparison never uses."""
NUM_DRAWS: Final = 4
NUM_HELPED: Final = 16
EPOCHS: Final = (1, 2, 4, 8)
CEILING: Final = 0.25
SEARCH: Final = 1 / 3

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
    ledger = Ledger.open(study.out / f"ceiling-{seed}.json", study.identity())
    memory = study.out / f"memory-{seed}.npz"
    last = f"epoch {EPOCHS[-1]}"
    if all(f"{last}: {panel}" in ledger.entries for panel in ("A", "A+", "B")):
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
                for panel in ("A", "A+", "B") if epoch == EPOCHS[-1] else ("A",):
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


def ceiling_table(ledgers: Mapping[int, Ledger]) -> str:
    """Success in percent: a row per seed and epoch, with the mean loss of the epoch."""
    rows = []
    for seed, ledger in ledgers.items():
        for label in ("cold", *(f"epoch {epoch}" for epoch in EPOCHS)):
            loss = ledger.entries.get(f"{label}: loss")
            scores = (ledger.entries.get(f"{label}: {panel}") for panel in ("A", "A+", "B"))
            cells = ("-" if one is None else f"{100 * fmean(one.values()):.1f}" for one in scores)
            rows.append([str(seed), label, "-" if loss is None else f"{loss:.3f}", *cells])
    return markdown(("seed", "after", "loss, nats per token", "A %", "A+ %", "B %"), rows)


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
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parsed = parser.parse_intermixed_args(arguments)
    study = Study(recipe=parsed.recipe, out=parsed.out.resolve(), overrides=tuple(parsed.overrides))
    study.out.mkdir(parents=True, exist_ok=True)
    try:
        first, number = SEEDS[parsed.stage]
        first = first if parsed.first_seed is None else parsed.first_seed
        seeds = range(first, first + (parsed.seeds or number))
        ledgers = {seed: ceiling(study, seed, _note) for seed in seeds}
    except OutriderError as error:
        print(f"benchmarks.house_retention: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("benchmarks.house_retention: interrupted; repeat the command to continue", file=sys.stderr)
        return 130
    print(ceiling_table(ledgers))
    return 0


def _note(text: str) -> None:
    print(time.strftime("%H:%M:%S", time.gmtime()), text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
