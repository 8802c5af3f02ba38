"""Trials without a change of weights: memory that fills, plans after failures only, a curve on file."""

import json
from pathlib import Path

import pytest

from outrider.algorithms.reflexion import NUM_SHOWN, ReflexionHook
from outrider.cli import main
from outrider.environments.base import EpisodeResult, StepResult
from outrider.environments.tool_qa.environment import ToolEnvironment
from outrider.errors import EnvironmentFault
from outrider.rollout.settings import Limits
from outrider.runs import Run
from outrider.trace import Trace
from outrider.training import adaptation
from outrider.types import Origin, Task
from outrider.viewer.progress import PlainProgress
from tests.log_lines import messages
from tests.rollout.fakes import Factory, Fake, scheduler, scripted, tasks
from tests.training.tool_run import write_tool_run

MEMORY = (
    "algorithm.type=empo2", "algorithm.memory.embedder=hash", "algorithm.memory.min_similarity=0.1",
    "algorithm.memory.max_shown_tokens=120", "algorithm.memory.max_tip_tokens=24", "model.context_length=512",
)  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tool_run(tmp_path_factory.mktemp("adaptation"))
    path.write_text(path.read_text().replace("num_hybrid = 2\n", ""))
    return path


def evaluations(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", ["tips", "reflexion"])
def test_a_curve_over_trials_is_written(
    recipe: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recipe.parent / method
    assert main(["eval", str(recipe), *MEMORY, "--run", str(run), "--adapt", "3", "--method", method]) == 0
    records = evaluations(run)
    assert [one["label"] for one in records] == [f"{method}, trial {n}" for n in range(1, len(records) + 1)]
    assert len(records) == 3 or method == "reflexion"
    assert all(one["num_faults"] == 0 and one["task_scores"] for one in records)
    if method == "reflexion":  # solved stays solved
        scores = [one["metric"]["score"]["value"] for one in records]  # type: ignore[index]
        assert scores == sorted(scores) and all(one["num_tasks"] == 3 for one in records)
    for number, one in enumerate(records):
        alone = one["trial"]
        rows = Run.from_path(run).evaluation_traces(number).to_pylist()
        played = {row["task_key"]: row["episode_return"] for row in rows if row["episode_return"] is not None}
        assert alone["task_returns"] == played  # type: ignore[index]
        assert alone["task_scores"].keys() == played.keys()  # type: ignore[index]
        if method == "tips" or number == 0:
            assert alone["task_returns"] == one["task_returns"]  # type: ignore[index]
        else:  # what was solved is not played again
            before = records[number - 1]["task_scores"]
            assert played.keys() == {key for key, solved in before.items() if not solved}  # type: ignore[attr-defined]
    assert "no weight update" in capsys.readouterr().out


def test_the_weights_do_not_move_and_one_seed_gives_one_curve(recipe: Path) -> None:
    curves = []
    for name in ("one", "other"):
        run = recipe.parent / name
        main(["eval", str(recipe), *MEMORY, "--run", str(run), "--adapt", "2"])
        curves.append(evaluations(run))
        assert not list(run.rglob("*.safetensors"))
    assert curves[0] == curves[1]


def test_a_trial_shows_its_tokens_and_without_any_result_it_is_an_error(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recipe.parent / "shown"
    monkeypatch.setattr(adaptation, "make_progress", lambda mode: PlainProgress(heartbeat_s=0.0))
    options = [*MEMORY, "--adapt", "2", "--progress", "plain"]
    assert main(["eval", str(recipe), *options, "--run", str(run)]) == 0
    output = capsys.readouterr().out
    assert (
        "tips, trial 1: start, 3 to do" in output and "generated" in output and "tips, trial 2 3/3" in output
    )
    trials = [line.partition(":")[0] for line in messages(output) if " on 3 tasks, 0 faults" in line]
    assert trials == ["tips, trial 1", "tips, trial 2"]

    def refuse(environment: ToolEnvironment, task: Task, seed: int) -> None:
        raise EnvironmentFault("no simulator today")

    monkeypatch.setattr(ToolEnvironment, "reset", refuse)
    assert main(["eval", str(recipe), *options, "--run", str(recipe.parent / "lost")]) == 1
    assert "'tips, trial 1' has no result, every rollout was lost to a fault: " in capsys.readouterr().err
    assert not (recipe.parent / "lost" / "evaluations.jsonl").exists()


def test_no_trial_is_a_clear_error(recipe: Path) -> None:
    run = recipe.parent / "zero"
    with pytest.raises(SystemExit):
        main(["eval", str(recipe), *MEMORY, "--run", str(run), "--adapt", "0"])
    many = ["evaluation.num_samples=2", "--run", str(run), "--adapt", "2", "--method", "reflexion"]
    assert main(["eval", str(recipe), *MEMORY, *many]) == 2 and not run.exists()


class Fails(Fake):
    """Solves nothing until its third try."""

    def result(self) -> EpisodeResult:
        return EpisodeResult(episode_return=0.0, success=self.question == "solved")


def test_plans_come_from_failures_and_only_the_last_are_shown() -> None:
    hook = ReflexionHook()
    traces: list[Trace] = []
    for trial in range(5):
        question = "solved" if trial == 4 else "q"
        factory = Factory(
            lambda task, number, q=question: Fails(
                on_step=lambda n, t: StepResult(message=None, done=True), question=q
            )
        )  # type: ignore[misc]
        engine = scripted(
            lambda request, text, t=trial: f"plan {t}." if request.request_id.endswith("reflection") else "a."
        )  # type: ignore[misc]
        runs = scheduler(engine, factory, hooks=(hook,), limits=Limits(step_timeout_s=60))
        traces += runs.run(tasks(1), modes=("m",) * 2, training_step=-1 - trial).traces
    shown = [
        [n.message.content for _, path in trace.rollouts() for n in path if n.origin is Origin.MEMORY]
        for trace in traces
    ]
    assert shown[0] == [] and len(shown[1]) == 2
    assert all(
        text.count("plan ") == min(trial, NUM_SHOWN) for trial, texts in enumerate(shown) for text in texts
    )
    assert "plan 0" not in shown[4][0] and "plan 3" in shown[4][0]
    # the solved trial wrote none
    assert hook.plans["task 0", 0] == ["plan 0.", "plan 1.", "plan 2.", "plan 3."]
