"""What is counted as to do is what the training loop then does."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from outrider.config import validate
from outrider.training.settings import RunSettings
from outrider.training.step_metrics import remaining_work
from outrider.training.trainer import Trainer
from outrider.viewer.progress import RemainingWork, RunPace
from tests.train.short_runs import begin, interrupted, resume
from tests.train.tool_run import write_tool_run


def ahead(
    step: int, *, every: int = 0, saves: int = 10, budget: int | None = None, **state: Any
) -> RemainingWork:
    """Of a run of ten steps."""
    train = {
        "num_steps": 10,
        "checkpoint_every": saves,
        "max_policy_tokens": "none" if budget is None else budget,
    }
    tree = {
        "environment": {"type": "factbook"},
        "algorithm": {"type": "grpo"},
        "train": train,
        "evaluation": {"every": every},
    }
    known = {
        "saved_step": 0,
        "num_policy_tokens": 100 * step,
        "is_evaluated": False,
        "ends_evaluated": False,
        **state,
    }
    return remaining_work(validate(RunSettings, tree), step=step, **known)


def test_a_token_budget_ends_the_run_at_the_pace_of_its_tokens() -> None:
    assert ahead(4, budget=650).step == 3
    assert ahead(4, budget=100_000).step == 6
    assert ahead(0, budget=5).step == 10  # nothing is known yet
    assert ahead(4, budget=400).step == 0


def test_what_is_on_file_is_not_to_do() -> None:
    assert ahead(4, every=4) == RemainingWork(step=6, evaluation=3, checkpoint=1)
    assert ahead(4, every=4, is_evaluated=True) == RemainingWork(step=6, evaluation=2, checkpoint=1)
    assert ahead(10, saved_step=10) == RemainingWork(evaluation=1)
    assert ahead(10, saved_step=10, ends_evaluated=True) == RemainingWork()
    assert ahead(9, saves=3, saved_step=6).checkpoint == 2


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_run(tmp_path_factory.mktemp("made") / "data")


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RemainingWork, Counter[str]]]:
    """At every look ahead: what was counted, and what had been done until then."""
    looks: list[tuple[RemainingWork, Counter[str]]] = []
    done: Counter[str] = Counter()
    timed, look = RunPace.timed, Trainer._update_remaining_work

    def counted(self: RunPace, kind: Any) -> Any:
        done[kind] += 1
        return timed(self, kind)

    def looked(self: Trainer) -> None:
        look(self)
        looks.append((self.pace.remaining, Counter(done)))

    monkeypatch.setattr(RunPace, "timed", counted)
    monkeypatch.setattr(Trainer, "_update_remaining_work", looked)
    looks.append((RemainingWork(), done))  # in the end: all that was done
    return looks


@pytest.mark.parametrize(
    ("every", "saves"),
    [(2, 3), (0, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 1), (3, 10), (5, 5)))],
)
def test_at_every_moment_the_rest_is_what_is_then_done(
    every: int, saves: int, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = watched(monkeypatch)
    begin(
        recipe,
        tmp_path / "run",
        "train.num_steps=5",
        f"evaluation.every={every}",
        f"train.checkpoint_every={saves}",
    )
    (_, done), *others = looks
    assert len(others) >= 6
    for rest, before in others:
        assert {
            kind: rest.count(kind)  # type: ignore[arg-type]
            for kind in ("step", "evaluation", "checkpoint")
        } == {kind: done[kind] - before[kind] for kind in ("step", "evaluation", "checkpoint")}


def test_after_a_resume_too_and_with_the_pace_of_its_records(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = interrupted(begin(recipe, tmp_path / "run"))
    paces: list[RunPace] = []
    look = Trainer._update_remaining_work

    def looked(self: Trainer) -> None:
        look(self)
        paces.append(self.pace)

    monkeypatch.setattr(Trainer, "_update_remaining_work", looked)
    told: list[float | None] = []
    step = Trainer._train_step

    def stepped(self: Trainer) -> dict[str, float]:
        told.extend([self.pace.seconds("evaluation"), self.pace.seconds("checkpoint"), self.pace.left])
        return step(self)

    monkeypatch.setattr(Trainer, "_train_step", stepped)
    resume(killed)
    evaluation, checkpoint, left = told
    assert (
        evaluation is not None
        and evaluation > 0
        and checkpoint is not None
        and checkpoint > 0
        and left is None
    )
    assert paces[-1].remaining == RemainingWork(evaluation=1)
