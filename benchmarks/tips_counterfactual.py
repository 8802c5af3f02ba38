"""Do tips help because of their contents? One policy, the same tasks and draws, with its tips, with tips of
other worlds, and without tips.

    python -m benchmarks.tips_counterfactual --out DIR [--seeds 5] [--first-seed 0] [--rounds 2]
                                                       [section.field=value ...]

For each seed: the cold start of the recipe, then ``--rounds`` rounds over the evaluation tasks without tips,
in which only the memory learns, then three evaluations with that memory: with tips, with tips of another
world (of another task if there is one memory per task), and without tips. The memory does not change
meanwhile, so that the three differ only in the tips. A gain that remains with tips of other worlds does not
come from the contents of tips.

Results are stored in DIR by seed, and a second call runs the missing ones. Prints Markdown: scores, and
paired differences with 95 % intervals over tasks.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.markdown_table import markdown
from outrider.algorithms.exploration import Empo2Settings
from outrider.algorithms.tips import PLAIN, TIPS_ON, MemorySettings, TipHook
from outrider.config import load_settings
from outrider.environments.base import EpisodeResult
from outrider.errors import ConfigError, OutriderError
from outrider.memory.embedders import Embedder, load_embedder
from outrider.memory.tips import TipMemory
from outrider.rollout.episode import Sampling
from outrider.rollout.evaluate import Evaluation, difference_interval, evaluate
from outrider.rollout.hooks import EpisodeState
from outrider.rollout.scheduler import Scheduler
from outrider.trace import Trace
from outrider.training.cold_start import imitate_experts
from outrider.training.components import Components
from outrider.training.settings import RunSettings
from outrider.training.setup import build
from outrider.types import Message, Origin, Task

REMOVED, SHUFFLED, KEPT = "no tips", "tips of other worlds", "tips"
LINES: Final = (REMOVED, SHUFFLED, KEPT)
PAIRS: Final = ((KEPT, REMOVED), (KEPT, SHUFFLED), (SHUFFLED, REMOVED))
Scores = Mapping[str, Mapping[str, float]]


class ReadOnlyTips(TipHook):
    """Inserts tips of a memory that other rollouts filled, and writes none. ``exchanged`` maps a task to the
    buffer that it reads instead of its own.
    """

    def __init__(
        self, settings: MemorySettings, *, memory: TipMemory, exchanged: Mapping[str, str], **others: Any
    ) -> None:
        super().__init__(settings, **others)
        self.memory = memory
        self._exchanged = exchanged

    def task_key(self, task: Task) -> str:
        own = super().task_key(task)
        return self._exchanged.get(own, own)

    def after_turn(self, state: EpisodeState) -> None:
        """Record nothing."""

    def closing_message(self, state: EpisodeState, result: EpisodeResult) -> Message | None:
        """Request no reflection."""
        return None

    def after_group(self, trace: Trace) -> None:
        """Nothing is stored."""


def shifted(buffers: Sequence[str]) -> dict[str, str]:
    """Map every buffer to the next one. Raises ConfigError if there is only one."""
    names = sorted(set(buffers))
    if len(names) < 2:
        raise ConfigError(
            "tips cannot be exchanged: all tasks of the panel read one buffer (algorithm.memory.scope)"
        )
    return dict(zip(names, names[1:] + names[:1], strict=True))


@dataclass(slots=True, kw_only=True)
class Play:
    """One seed's policy and memory."""

    parts: Components
    embedder: Embedder
    num_rounds: int

    @property
    def memory(self) -> MemorySettings:
        """That of the recipe."""
        return memory_of(self.parts.settings)

    def run(self) -> dict[str, Any]:
        """Return scores by line and task, and the number of tips."""
        others: dict[str, Any] = {
            "embedder": self.embedder, "count_tokens": self.parts.renderer.count_tokens,
            "seed": self.parts.settings.seed
        }  # fmt: skip
        writer = TipHook(self.memory, **others)
        exchanged = shifted([writer.task_key(task) for task in self.parts.test_tasks])
        scores: dict[str, dict[str, float]] = {}
        imitate_experts(
            self.parts,
            stage=lambda name, size: _note(f"{name}: {size}"),
            note=_note,
            on_step=lambda done, metrics: None,
        )
        for number in range(self.num_rounds):
            found, _ = self._panel((writer,), PLAIN, stream_step=-2 - number)
            _note(f"round {number + 1}: {100 * fmean(found.values()):.1f} %, {len(writer.memory)} tips")
        own, other = (
            ReadOnlyTips(self.memory, memory=writer.memory, exchanged=map_, **others)
            for map_ in ({}, exchanged)
        )
        scores[REMOVED], _ = self._panel((own,), PLAIN)
        scores[SHUFFLED], num_others = self._panel((other,), TIPS_ON)
        scores[KEPT], num_own = self._panel((own,), TIPS_ON)
        shown = {KEPT: num_own, SHUFFLED: num_others}
        return {"scores": scores, "num_tips": len(writer.memory), "shown_an_episode": shown}

    def _panel(
        self, hooks: Sequence[TipHook], mode: str, *, stream_step: int = -1
    ) -> tuple[dict[str, float], float]:
        num_samples = self.parts.settings.evaluation.num_samples
        evaluation, traces = play_panel(
            self.parts, self.parts.test_tasks, hooks, mode, num_samples=num_samples, stream_step=stream_step
        )
        paths = [path for trace in traces for _, path in trace.rollouts()]
        num_shown = sum(
            len(n.metadata["tip_ids"]) for path in paths for n in path if n.origin is Origin.MEMORY
        )
        return dict(evaluation.task_scores), num_shown / len(paths)


def play_panel(
    parts: Components,
    tasks: Sequence[Task],
    hooks: Sequence[TipHook],
    mode: str,
    *,
    num_samples: int,
    stream_step: int = -1,
) -> tuple[Evaluation, list[Trace]]:
    """Play ``num_samples`` rollouts of every task in one mode of tips, at the evaluation's temperature."""
    settings = parts.settings
    scheduler = Scheduler(
        engine=parts.engine,
        renderer=parts.renderer,
        factory=parts.factory,
        limits=settings.limits,
        sampling=Sampling(temperature=settings.evaluation.temperature, stop=parts.task_set.stop),
        run_seed=settings.seed,
        hooks=tuple(hooks),
        max_concurrent=settings.num_concurrent,
        max_retries=settings.train.max_retries,
    )
    return evaluate(
        scheduler,
        tasks,
        num_samples=num_samples,
        label=mode,
        step=0,
        mode=mode,
        stream_step=stream_step,
    )


def play_seed(settings: RunSettings, *, num_rounds: int) -> dict[str, Any]:
    """Run one seed from the model of the recipe."""
    with TemporaryDirectory() as folder:
        parts = build(
            settings,
            buffer_path=Path(folder) / "buffer.sqlite",
            resumed=False,
            on_tokens=lambda number: None,
            note=_note,
        )
        try:
            embedder = load_embedder(memory_of(settings).embedder)
            return Play(parts=parts, embedder=embedder, num_rounds=num_rounds).run()
        finally:
            parts.factory.close()


def memory_of(settings: RunSettings) -> MemorySettings:
    """Return the memory of the recipe. Raises ConfigError if it has none."""
    if not isinstance(settings.algorithm, Empo2Settings):
        raise ConfigError("tips need algorithm.type = empo2")
    return settings.algorithm.memory


def completed_seed(out: Path, settings: RunSettings, *, num_rounds: int) -> Scores:
    """Return the recorded scores, or run the seed. Raises ConfigError if the file has other settings."""
    file = out / f"seed-{settings.seed}.json"
    identity = {
        "settings": settings.model_dump(mode="json", exclude={"num_threads"}),
        "num_rounds": num_rounds,
    }
    if file.exists():
        held: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if held["identity"] != identity:
            raise ConfigError(f"{file} has other settings: choose another --out")
    else:
        memory_of(settings)  # refused before a model is loaded
        held = {"identity": identity, **play_seed(settings, num_rounds=num_rounds)}
        out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
    return {line: held["scores"][line] for line in LINES}


def score_table(seeds: Mapping[int, Scores]) -> str:
    """Success in percent, a row a seed and their mean."""
    rows = [
        [str(seed), *(100 * fmean(scores[line].values()) for line in LINES)] for seed, scores in seeds.items()
    ]
    means = ["mean", *(fmean(float(row[i]) for row in rows) for i in range(1, len(LINES) + 1))]
    shown = [[str(row[0]), *(f"{float(value):.1f}" for value in row[1:])] for row in [*rows, means]]
    return markdown(("seed", *LINES), shown)


def gain_table(seeds: Mapping[int, Scores]) -> str:
    """Paired differences in points: every seed over its tasks, and all seeds together, each task with its
    mean over seeds.
    """
    rows = [
        [str(seed), *(_gain(differences(scores, *pair)) for pair in PAIRS)] for seed, scores in seeds.items()
    ]
    together = []
    for pair in PAIRS:
        each = [differences(scores, *pair) for scores in seeds.values()]
        together.append(_gain({task: fmean(one[task] for one in each if task in one) for task in each[0]}))
    return markdown(("seed", *(f"{one}, less {other}" for one, other in PAIRS)), [*rows, ["all", *together]])


def differences(scores: Scores, one: str, other: str) -> dict[str, float]:
    """By task, of tasks that both have."""
    return {task: value - scores[other][task] for task, value in scores[one].items() if task in scores[other]}


def _gain(found: Mapping[str, float]) -> str:
    low, high = difference_interval(list(found.values()))
    return f"{100 * fmean(found.values()):+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a seed failed, 2 bad configuration."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tips_counterfactual", description="Do tips help?"
    )
    parser.add_argument("--recipe", type=Path, default=Path("recipes/house-empo2.toml"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of the panel that fill the memory")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parsed = parser.parse_intermixed_args(arguments)
    seeds = range(parsed.first_seed, parsed.first_seed + parsed.seeds)
    try:
        each = {
            seed: load_settings(
                RunSettings, file=parsed.recipe, overrides=[*parsed.overrides, f"seed={seed}"]
            )
            for seed in seeds
        }
        played = {}
        for seed, settings in each.items():
            played[seed] = completed_seed(parsed.out, settings, num_rounds=parsed.rounds)
            _note(score_table({seed: played[seed]}))
    except OutriderError as error:
        print(f"benchmarks.tips_counterfactual: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print("\n\n".join([score_table(played), gain_table(played)]))
    return 0


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
