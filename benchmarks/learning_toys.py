"""The toy suite: RAPO's lock, ARPO's corridor and EMPO²'s hidden object (tests/toys*.py) with every method,
an expedition that needs two methods in one run and a quest that needs all three.

Each toy, method and seed has a result file. Files are written atomically, and finished trainings are skipped.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.toy_result import Result
from tests.toys import LEARNING_RATE, Toy, ToyRun, expert_trajectory
from tests.toys_branching import DEPTH as CORRIDOR_DEPTH
from tests.toys_branching import CorridorRun, CorridorToy
from tests.toys_demonstrated import Demonstrated, expert_paths
from tests.toys_expedition import ExpeditionRun, expedition
from tests.toys_memory import DEPTH as HIDDEN_DEPTH
from tests.toys_memory import HiddenRun, HiddenToy
from tests.toys_quest import QuestRun, QuestToy

from benchmarks.learning_jobs import Job
from benchmarks.learning_methods import IMITATION, TOY_SUITES, Method
from outrider.algorithms.grpo import GrpoSettings
from outrider.algorithms.luffy import Luffy, LuffySettings
from outrider.config import Settings, validate
from outrider.environments.webshop.environment import WebShopConfig
from outrider.errors import ConfigError, DataError
from outrider.rollout.experts import play_experts
from outrider.rollout.settings import Limits
from outrider.training.cold_start import cold_start, successful_paths
from outrider.training.settings import AlgorithmSettings, ColdStartSettings, RunSettings, TrainSettings
from outrider.training.setup import make_algorithm
from outrider.types import Task

NUM_PASSES: Final = 100  # of imitation of the single rollout of the expert


class _Assembled(ToyRun):
    """A toy that runs any algorithm that the trainer can build from settings."""

    def _algorithm(self, settings: Any) -> Any:
        if isinstance(settings, LuffySettings):
            return Luffy(settings, paths=expert_paths(self))
        run = RunSettings(
            seed=self.toy.seed,
            # a simulator: actions change its state, so retrieved ones are executed
            environment=WebShopConfig(),
            algorithm=settings,
            train=TrainSettings(num_steps=1, tasks_per_step=1),
        )
        actions = len(self.model.action_ids)
        return make_algorithm(run, self.buffer, vocabulary_size=actions, stateful=True, count_tokens=len)

    def scheduler(self, *, training: bool) -> Any:
        """Return the scheduler. LUFFY's demonstrations are rollouts of the expert; evaluations have none."""
        own = super().scheduler(training=training)
        return (
            Demonstrated(own, self, self.algorithm.paths)
            if training and isinstance(self.algorithm, Luffy)
            else own
        )


class _Lock(_Assembled):
    """RAPO's toy."""


class _Corridor(_Assembled, CorridorRun):
    """ARPO's toy."""


class _Hidden(_Assembled, HiddenRun):
    """EMPO²'s toy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """One toy. ``max_policy_tokens`` is every method's budget."""

    name: str
    title: str
    run: type[ToyRun]
    toy: Callable[[int], Toy]
    max_policy_tokens: int

    def methods(self) -> tuple[Method, ...]:
        """The toy's suite, then its ablations."""
        return TOY_SUITES[self.name].methods(self.toy(0).num_turns)

    def settings(self, method: Method) -> AlgorithmSettings:
        """Return the settings of the method for this toy. Raises ConfigError for an invalid table."""
        return validate(_Chosen, {"algorithm": method.table(TOY_SUITES[self.name].shared)}).algorithm


class _Chosen(Settings):
    algorithm: AlgorithmSettings


ARENAS: Final = (
    Arena(
        name="lock", title="The lock (RAPO's toy): four doors, twenty actions each, six turns", run=_Lock,
        toy=lambda seed: Toy(seed=seed), max_policy_tokens=6000,
    ),
    Arena(
        name="corridor",
        title="The corridor (ARPO's toy): nine rooms that the policy knows, a vault of twenty actions",
        run=_Corridor,
        toy=lambda seed: CorridorToy(seed=seed, depth=CORRIDOR_DEPTH + 1, num_turns=CORRIDOR_DEPTH + 1),
        max_policy_tokens=1500,
    ),
    Arena(
        name="hidden",
        title="The hidden object (EMPO²'s toy): three rooms, and a policy that gives up at once",
        run=_Hidden,
        toy=lambda seed: HiddenToy(seed=seed, num_turns=HIDDEN_DEPTH), max_policy_tokens=12_000,
    ),
    Arena(
        name="expedition",
        title="The expedition (RAPO's and EMPO²'s): two locks that experts open, two places that they miss",
        run=ExpeditionRun, toy=expedition, max_policy_tokens=16_000,
    ),
    Arena(
        name="quest",
        title="The quest (of all three): a march, a lock, a crossroads, a hidden place and a vault",
        run=QuestRun, toy=lambda seed: QuestToy(seed=seed), max_policy_tokens=64_000,
    ),
)  # fmt: skip


def play(arena: Arena, method: Method, *, seed: int, max_policy_tokens: int) -> Result:
    """One training in a folder of its own."""
    settings: Any = GrpoSettings() if method.key == IMITATION else arena.settings(method)
    with TemporaryDirectory() as folder:
        run = arena.run(arena.toy(seed), settings, folder=Path(folder))
        try:
            return imitate(run) if method.key == IMITATION else run.train(max_policy_tokens=max_policy_tokens)
        finally:
            run.buffer.close()


def imitate(run: ToyRun) -> Result:
    """Run the cold start of the library on the rollouts of the expert, without policy tokens."""

    def expert(task: Task) -> Any:
        return expert_trajectory(task, run.factory(task)).steps

    traces = play_experts(
        tasks=run.tasks,
        expert=expert,
        factory=run.factory,
        tokenizer=run.renderer.tokenizer,
        limits=Limits(max_turns=run.toy.num_turns, max_turn_tokens=1),
        stop=(),
        run_seed=run.toy.seed,
        context_length=run.engine.context_length,
    )
    chosen = ColdStartSettings(
        num_examples=len(run.tasks),
        num_epochs=NUM_PASSES,
        batch_size=len(run.tasks),
        learning_rate=LEARNING_RATE,
    )
    num_steps = cold_start(
        run.policy,
        successful_paths(traces),
        chosen,
        run_seed=run.toy.seed,
        max_tokens=100_000,
        on_step=lambda done, total, values: None,
    )
    run.engine.load(run.engine.weight_version + 1)
    return Result(
        expected_return=run.expected_return(), sampled_return=run.sampled_return(), num_policy_tokens=0,
        num_rollouts=0, num_steps=num_steps, num_on_policy_rewards=0, num_hybrid_rewards=0,
    )  # fmt: skip


def result_path(out: Path, arena: Arena, method: Method, seed: int) -> Path:
    """Return the result file of one training."""
    return out / "toys" / arena.name / f"{method.key}-{seed}.json"


def load_result(
    out: Path, arena: Arena, method: Method, seed: int, *, max_policy_tokens: int
) -> Result | None:
    """Return a finished training, or None.

    Raises ConfigError if the file is that of other settings or another budget, and DataError if it cannot be
    read.
    """
    path = result_path(out, arena, method, seed)
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        result = Result(**record.pop("result"))
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is no result of this benchmark: {error}") from error
    wanted = _identity(arena, method, seed, max_policy_tokens)
    if record != wanted:
        differing = sorted(key for key in {*record, *wanted} if record.get(key) != wanted.get(key))
        raise ConfigError(
            f"{path} is the result of another run ({', '.join(differing)} differ): give another --out"
        )
    return result


def save_result(
    out: Path, arena: Arena, method: Method, seed: int, result: Result, *, max_policy_tokens: int
) -> None:
    """Write a result with its settings."""
    path = result_path(out, arena, method, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    record = _identity(arena, method, seed, max_policy_tokens) | {"result": asdict(result)}
    temporary.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def play_all(
    out: Path,
    arena: Arena,
    chosen: Sequence[Method],
    *,
    seeds: Sequence[int],
    max_policy_tokens: int,
    only_load: bool = False,
    note: Callable[[str], None],
) -> dict[str, dict[int, Result]]:
    """Return the results by method and seed, and run missing ones unless ``only_load``. Undefined methods
    have none.
    """
    results: dict[str, dict[int, Result]] = {}
    for method in chosen:
        results[method.key] = {}
        for seed in seeds if arena.name not in method.undefined else ():
            result = load_result(out, arena, method, seed, max_policy_tokens=max_policy_tokens)
            if result is None and not only_load:
                result = play(arena, method, seed=seed, max_policy_tokens=max_policy_tokens)
                save_result(out, arena, method, seed, result, max_policy_tokens=max_policy_tokens)
                note(f"{arena.name}: {method.name}, seed {seed}: {result.expected_return:.3f}")
            if result is not None:
                results[method.key][seed] = result
    return results


def toy_jobs(
    out: Path, arena: Arena, chosen: Sequence[Method], *, seeds: Sequence[int], max_policy_tokens: int
) -> list[Job]:
    """Return the trainings of :func:`play_all` as jobs. The seeds of a method share a process, which takes
    longer to start than a seed to train.
    """
    defined = [method for method in chosen if arena.name not in method.undefined]
    return [_job(out, arena, method, seeds, max_policy_tokens) for method in defined]


def _job(out: Path, arena: Arena, method: Method, seeds: Sequence[int], max_policy_tokens: int) -> Job:
    asked = [
        "--out",
        out,
        "--toys",
        arena.name,
        "--methods",
        method.key,
        "--first-seed",
        seeds[0],
        "--seeds",
        len(seeds),
    ]
    tokens = ["--policy-tokens", max_policy_tokens, "--no-report"]
    name = f"toys/{arena.name}/{method.key}"

    def is_done() -> bool:
        found = [load_result(out, arena, method, seed, max_policy_tokens=max_policy_tokens) for seed in seeds]
        return all(one is not None for one in found)

    command = [sys.executable, "-m", "benchmarks.learning", "toys", *map(str, asked + tokens)]
    return Job(name=name, kind=name, command=lambda: command, is_done=is_done)


def _identity(arena: Arena, method: Method, seed: int, max_policy_tokens: int) -> dict[str, Any]:
    """Return the settings that determine a result, as JSON values. Imitation uses no policy tokens."""
    settings: Any = None if method.key == IMITATION else arena.settings(method)
    identity = {
        "toy": arena.name,
        "method": method.key,
        "seed": seed,
        "settings": {"num_passes": NUM_PASSES} if settings is None else settings.model_dump(mode="json"),
        "max_policy_tokens": 0 if settings is None else max_policy_tokens,
    }
    found: dict[str, Any] = json.loads(json.dumps(identity))
    return found
