"""The runs of a table of tasks and methods, and how each is started, continued or skipped."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from benchmarks.comparison import evaluations, is_after_training, require_same
from outrider import cli
from outrider.api import evaluation_settings, run_settings
from outrider.errors import OutriderError

_GRPO: Final = ("algorithm.memory_probability=0", "algorithm.intrinsic_coefficient=0")
METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "naive": (), "reflexion": ("evaluation.num_samples=1",), "retrospex": ("engine.type=retrospex",),
    "grpo": _GRPO, "empo2": (),
}  # fmt: skip
"""What each sets beside the recipe; the first three change no weights."""
TRAINED: Final = ("grpo", "empo2")
_OF_TRAINING: Final = ("train.num_steps=", "cold_start.num_examples=", "evaluation.at_start=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One run: its arguments without ``--run``, and its column in the table. ``options`` are those of
    ``outrider eval``.
    """

    run: Path
    column: str
    command: Literal["train", "eval"]
    recipe: Path
    overrides: tuple[str, ...]
    options: Mapping[str, str]

    @property
    def arguments(self) -> list[str]:
        """Of the command line."""
        options = [word for name, value in self.options.items() for word in (f"--{name}", value)]
        return [self.command, str(self.recipe), *options, *self.overrides]

    @property
    def is_begun(self) -> bool:
        """Return whether the run has files; an evaluation must be complete."""
        return (self.run / "config.toml").exists()

    @property
    def is_done(self) -> bool:
        """Return whether the last evaluation is recorded."""
        if self.command == "eval":
            return self.is_begun
        return any(map(is_after_training, evaluations(self.run)))

    def require_same(self) -> None:
        """Raise ConfigError if the existing run has other settings."""
        if self.command == "train":
            wanted = run_settings(self.recipe, overrides=self.overrides)
        else:
            num_trials = int(self.options["adapt"]) if "adapt" in self.options else None
            wanted = evaluation_settings(
                self.recipe, overrides=self.overrides, checkpoint=self.options.get("checkpoint"),
                num_trials=num_trials, method=self.options.get("method", "tips"),
            )  # fmt: skip
        require_same(self.run, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All runs of a table. ``setting`` contains ``{task}`` in place of a task's name."""

    recipe: Path
    out: Path
    tasks: Sequence[str]
    methods: Sequence[str]
    seeds: Sequence[int]
    num_trials: int
    transfers: Sequence[tuple[str, str]]
    setting: str
    critic: Path | None
    overrides: Sequence[str]

    def pieces(self) -> Iterator[Piece]:
        """Yield the runs in an order that satisfies their dependencies: those of the table first."""
        yield from self.table()
        named = {piece.run for piece in self.table()}
        for method, task, _, seed in self._adapting():
            if (piece := self._trained(method, task, seed)).run not in named:
                named.add(piece.run)
                yield piece
        yield from self.adaptations()

    def table(self) -> Iterator[Piece]:
        """Yield the runs of the table: one per seed if the method trains, otherwise one."""
        for task in self.tasks:
            for method in self.methods:
                if method in TRAINED:
                    yield from (self._trained(method, task, seed) for seed in self.seeds)
                else:
                    yield self._untrained(method, task)

    def adaptations(self) -> Iterator[Piece]:
        """Trials on another task than the weights were trained on."""
        for method, task, other, seed in self._adapting():
            checkpoints = self._trained(method, task, seed).run / "checkpoints"
            last = sorted(checkpoints.glob("step-*"))
            yield Piece(
                run=self._folder(f"{method}-{task}-to-{other}-{seed}"),
                column=f"{method}, from {task}",
                command="eval",
                recipe=self.recipe,
                overrides=(f"seed={seed}", *self._untaught(method, other)),
                options={"checkpoint": str(last[-1] if last else checkpoints), "adapt": str(self.num_trials)},
            )

    def _adapting(self) -> Iterator[tuple[str, str, str, int]]:
        for task, other in self.transfers:
            for method in (one for one in self.methods if one in TRAINED):
                yield from ((method, task, other, seed) for seed in self.seeds)

    def _trained(self, method: str, task: str, seed: int) -> Piece:
        return Piece(
            run=self._folder(f"{method}-{task}-{seed}"), column=method, command="train", recipe=self.recipe,
            overrides=(f"seed={seed}", *self._shared(method, task)), options={},
        )  # fmt: skip

    def _untrained(self, method: str, task: str) -> Piece:
        critic = (f"engine.critic={self.critic}",) if method == "retrospex" else ()
        tries = {"adapt": str(self.num_trials), "method": "reflexion"} if method == "reflexion" else {}
        return Piece(
            run=self._folder(f"{method}-{task}"), column=method, command="eval", recipe=self.recipe,
            overrides=(*self._untaught(method, task), *critic), options=tries,
        )  # fmt: skip

    def _shared(self, method: str, task: str) -> tuple[str, ...]:
        named = self.setting.replace("{task}", task)
        return (*self.overrides, named, "evaluation.panel=none", *METHODS[method])

    def _untaught(self, method: str, task: str) -> tuple[str, ...]:
        """Return the overrides without those of the amount of training, which an evaluation refuses."""
        return tuple(one for one in self._shared(method, task) if not one.startswith(_OF_TRAINING))

    def _folder(self, name: str) -> Path:
        return self.out / re.sub(r"[^\w.-]+", "_", name)


def play(piece: Piece) -> None:
    """Start or continue a run in its own process, or skip a finished one.

    Raises OutriderError if it failed or was stopped, and ConfigError if it was started with other settings.
    """
    if piece.is_begun:
        piece.require_same()
    _play(piece, _in_a_process, more=())


def play_smoke(piece: Piece) -> None:
    """The same in smoke size, in this process."""
    _play(piece, cli.main, more=("--smoke",))


def _play(piece: Piece, outrider: Callable[[Sequence[str]], int], *, more: Sequence[str]) -> None:
    if piece.is_done:
        return
    if piece.command == "eval":
        _play_whole(piece, outrider, more)
        return
    begin = [*piece.arguments, *more, "--run", str(piece.run)]
    _require_success(piece, outrider(["train", "--resume", str(piece.run)] if piece.is_begun else begin))
    if not piece.is_done:
        raise OutriderError(f"{piece.run} was stopped before its end: the same command continues it")


def _play_whole(piece: Piece, outrider: Callable[[Sequence[str]], int], more: Sequence[str]) -> None:
    """Run an evaluation, which has no checkpoint, under a temporary name until it is complete."""
    partial = piece.run.with_name(f"{piece.run.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    _require_success(piece, outrider([*piece.arguments, *more, "--run", str(partial)]))
    partial.rename(piece.run)


def _require_success(piece: Piece, status: int) -> None:
    if status:
        raise OutriderError(f"{piece.run} ended with status {status}: {' '.join(piece.arguments)}")


def _in_a_process(arguments: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "outrider", *arguments], check=False).returncode
