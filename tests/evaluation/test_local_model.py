"""``outrider eval --tasks`` with a model in this process: the same bits, also after an interruption."""

import gc
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from outrider.config import load_settings, to_toml
from outrider.engines.base import Generation, Request
from outrider.engines.local.model import load_model
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import StepResult
from outrider.environments.scienceworld.environment import ScienceWorldConfig
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import CheckpointError, EnvironmentFault
from outrider.evaluation.grading import Grader, Scorer, find_variant
from outrider.evaluation.report import build_report
from outrider.evaluation.results import EvalTasksStore, SampleResult
from outrider.evaluation.run import (
    LocalPlayer,
    play_eval_tasks,
    resolve_settings,
    run_evaluation,
    weights_hash,
)
from outrider.evaluation.tasks import BENCHMARKS, EvalSetup, EvalTasks, EvalTasksSettings
from outrider.rollout.settings import Limits
from outrider.training.checkpoint import save_checkpoint
from outrider.training.policy import Policy
from outrider.training.settings import ModelSettings, OptimizerSettings, RunSettings
from outrider.training.setup import load_frozen
from outrider.types import Outcome, Task
from outrider.viewer.progress import Progress
from tests.evaluation.eval_tasks import evaluate, results, summary
from tests.rollout.fakes import TOKENIZER, Factory, Fake
from tests.tiny import save_tiny_model
from tests.training.tool_run import start_outrider, write_tool_run

SAMPLING = (
    "--samples", "3", "--temperature", "1", "--seed", "5", "batch_size=4", "num_threads=1",
    "model.precision=float32", "rollout.max_turn_tokens=12", "rollout.max_response_tokens=200",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that knows the tags, six questions and a corpus."""
    folder = tmp_path_factory.mktemp("local")
    write_tool_run(folder)
    return folder


def arguments(root: Path, *more: str) -> list[str]:
    return ["--model", str(root / "model"), "--tasks", f"hotpotqa={root / 'tasks.jsonl'}", *SAMPLING, *more]


def tools(root: Path) -> list[str]:
    corpus = f"environment.corpus={root / 'corpus.jsonl'}"
    return [
        "--tools",
        "on",
        corpus,
        'environment.tools=["search"]',
        "environment.prompt=none",
        "environment.search.top_k=1",
    ]


def files(run: Path) -> tuple[bytes, bytes]:
    return (run / "results.jsonl").read_bytes(), (run / "summary.json").read_bytes()


@pytest.fixture(scope="module")
def whole(root: Path) -> Path:
    """An evaluation with tools that nobody stopped."""
    run = root / "whole"
    assert evaluate(run, *arguments(root, *tools(root))) == 0
    return run


def test_two_runs_agree_exactly(root: Path, whole: Path) -> None:
    assert evaluate(root / "again", *arguments(root, *tools(root))) == 0
    assert files(root / "again") == files(whole)
    found = summary(whole)
    assert found["num_scored"] == 18 and found["faults"] == {} and found["num_tokens"] > 1
    assert found["num_tool_calls"] > 0 and 0 < found["scores"]["pass@3"]["value"] < 1


def test_tools_off_calls_no_tool(root: Path) -> None:
    assert evaluate(root / "off", *arguments(root)) == 0
    assert (summary(root / "off")["num_tool_calls"], summary(root / "off")["num_scored"]) == (0, 18)


@pytest.mark.parametrize(
    "share", [0.62, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.0, 0.15, 0.4, 0.99))]
)
def test_a_truncated_results_file_is_completed_to_the_same_bytes(
    root: Path, whole: Path, tmp_path: Path, share: float
) -> None:
    """Also where it cut a batch, whose results are then on file in part."""
    raw = (whole / "results.jsonl").read_bytes()
    first = raw.index(b"\n") + 1
    (tmp_path / "results.jsonl").write_bytes(raw[: first + int(share * (len(raw) - first))])
    assert evaluate(tmp_path, *arguments(root, *tools(root))) == 0
    assert files(tmp_path) == files(whole)


@pytest.mark.long
def test_a_killed_run_continues_to_the_same_numbers(root: Path, whole: Path) -> None:
    run = root / "killed"
    process = start_outrider("eval", "--run", run, "--progress", "none", *arguments(root, *tools(root)))
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if (run / "results.jsonl").exists() and (run / "results.jsonl").read_bytes().count(b"\n") > 1:
            break
        time.sleep(0.001)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL  # it was in the middle
    assert (run / "results.jsonl").read_bytes().count(b"\n") > 1
    assert evaluate(run, *arguments(root, *tools(root))) == 0
    assert files(run) == files(whole)


def test_more_samples_keep_the_first_ones(root: Path, whole: Path, tmp_path: Path) -> None:
    for samples in ("2", "3"):
        assert evaluate(tmp_path / "run", *arguments(root, *tools(root), "--samples", samples)) == 0
    assert summary(tmp_path / "run") == summary(whole)
    assert evaluate(tmp_path / "run", *arguments(root, *tools(root), "--samples", "1")) == 0
    assert summary(tmp_path / "run")["num_scored"] == 6 and len(results(tmp_path / "run")) == 18


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--seed", "6"), "seed was 5 and is 6"),
        (("--temperature", "0.5"), "temperature was 1"),
        (("--limit", "2"), "panel_hash"),
    ],
)
def test_other_settings_need_a_new_folder(
    root: Path, whole: Path, more: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(whole)
    assert evaluate(whole, *arguments(root, *tools(root), *more)) == 2
    assert says in capsys.readouterr().err and files(whole) == before


def test_other_weights_need_a_new_folder(
    root: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny_model(tmp_path / "other", seed=1)
    assert evaluate(whole, *arguments(root, *tools(root), "--model", str(other))) == 2
    assert "weights was" in capsys.readouterr().err


def test_a_run_or_a_checkpoint_is_a_model(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    settings = load_settings(RunSettings, file=root / "recipe.toml")
    (run / "config.toml").write_text(to_toml(settings.model_dump(mode="json")))
    base = load_model(str(root / "model"), precision="float32")
    untrained = weights_hash(base)
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        resolve_settings(ModelSettings(name=str(run)))
    policy = Policy(base, OptimizerSettings())
    hashes = []
    for step in (2, 10):
        with torch.no_grad():
            for master in policy.masters.values():
                master.add_(0.01)
        save_checkpoint(run / "checkpoints" / f"step-{step:06d}", policy, {})
        hashes.append(weights_hash(base))
    chosen = resolve_settings(ModelSettings(name=str(run), context_length=99))
    assert (chosen.name, chosen.precision, chosen.context_length) == (str(root / "model"), "float32", 99)
    assert weights_hash(load_frozen(chosen)) == hashes[1]
    checkpoint = run / "checkpoints" / "step-000002"
    assert weights_hash(load_frozen(resolve_settings(ModelSettings(name=str(checkpoint))))) == hashes[0]
    given = ModelSettings(name=str(root / "model"), precision="float32", initial_checkpoint=str(checkpoint))
    assert resolve_settings(given) == given and weights_hash(load_frozen(given)) == hashes[0]
    assert len({untrained, *hashes}) == 3
    made: list[weakref.ref[Policy]] = []

    class Seen(Policy):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(weakref.ref(self))

    monkeypatch.setattr("outrider.training.setup.Policy", Seen)
    loaded = load_frozen(chosen)
    gc.collect()
    assert made[0]() is None  # with its masters
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    (run / "config.toml").unlink()
    with pytest.raises(CheckpointError, match="is not in a run directory"):
        resolve_settings(ModelSettings(name=str(checkpoint)))


class RecordedProgress(Progress):
    """Records its updates."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, dict[str, object]]] = []

    def advance(self, done: int, **fields: object) -> None:
        self.reports.append((done, fields))


def test_progress_shows_tokens_of_a_running_batch(root: Path, tmp_path: Path) -> None:
    display = RecordedProgress()
    asked = [
        "model.name=" + str(root / "model"),
        f"tasks=hotpotqa={root / 'tasks.jsonl'}",
        "batch_size=4",
        "temperature=1",
    ]
    settings = load_settings(
        EvalTasksSettings, file=None, overrides=[*asked, "rollout.max_turn_tokens=12", "num_threads=1"]
    )
    report, notes = run_evaluation(settings, tmp_path / "run", display=display)
    tokens = [
        (done, int(str(fields["generated"]))) for done, fields in display.reports if "generated" in fields
    ]
    assert tokens[0] == (0, 4) and {done for done, _ in tokens} == {0, 4} and notes == []
    # a stop string's last tokens are cut off
    assert tokens[-1][1] >= report.summary.num_tokens * report.num_tasks > 0


class Batches(ScriptedEngine):
    """Answers every question with its number, and remembers which tasks came together."""

    def __init__(self) -> None:
        super().__init__(
            tokenizer=TOKENIZER, script=lambda request, text: "\\boxed{" + request.request_id[5] + "}"
        )
        self.batches: list[list[str]] = []

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.batches.append([request.request_id.split("/")[0] for request in requests])
        return super().generate(requests)


TASKS = tuple(Task(key=f"task-{i}", question=f"q{i}", answers=(str(i),)) for i in range(5))


def factory(broken: Callable[[str], bool]) -> Factory:
    def make(task: Task, number: int) -> Fake:
        def act(step: int, text: str) -> StepResult:
            if broken(task.key):
                raise EnvironmentFault("the simulator died")
            return StepResult(message=None, done=True)

        return Fake(on_step=act, question=task.question)

    return Factory(make)


def fake_setup(tasks: tuple[Task, ...], environments: Factory, *, scorer: Scorer) -> EvalSetup:
    return EvalSetup(
        eval_tasks=EvalTasks(benchmark=BENCHMARKS["hotpotqa"], tasks=tasks, panel_hash=hash_tasks(tasks)),
        factory=environments, stop=(), limits=Limits(step_timeout_s=60), scorer=scorer, tools=(),
        identity={"panel": 1},
    )  # fmt: skip


def play(
    path: Path,
    engine: Batches,
    environments: Factory,
    *,
    max_retries: int = 0,
    notes: list[str] | None = None,
) -> dict[str, object]:
    settings = EvalTasksSettings(
        tasks="hotpotqa",
        model=ModelSettings(),
        batch_size=2,
        max_retries=max_retries,
        num_samples=2,
        temperature=1.0,
    )
    setup = fake_setup(TASKS, environments, scorer="f1")
    player = LocalPlayer(engine=engine, identity={"model": "fake"}, settings=settings)
    store = EvalTasksStore.open(path, identity={"panel": 1})
    grader = Grader(rules=find_variant("default"), kind="qa", scorer="f1")
    try:
        play_eval_tasks(setup, player, grader, store, num_samples=2, display=Progress())
        if notes is not None:
            notes += player.notes()
        identity = {**setup.identity, **player.identity}
        report = build_report(
            settings, setup.eval_tasks, scorer=setup.scorer, identity=identity, results=store.results
        )
        return report.as_json()  # type: ignore[return-value]
    finally:
        store.close()


def test_only_faulted_samples_are_repeated(tmp_path: Path) -> None:
    engine = Batches()
    broken = play(tmp_path / "r.jsonl", engine, factory(lambda key: key in ("task-1", "task-2")))
    assert engine.batches == [["task-0", "task-1"], ["task-2", "task-3"], ["task-4"]] * 2
    assert (broken["faults"], broken["num_scored"]) == ({"environment_fault": 4}, 6)
    assert broken["scores"]["em"]["value"] == 1.0  # type: ignore[index]
    engine.batches.clear()
    mended = play(tmp_path / "r.jsonl", engine, factory(lambda key: False))
    assert engine.batches == [["task-1"], ["task-2"]] * 2
    assert mended == play(tmp_path / "clean.jsonl", Batches(), factory(lambda key: False))
    assert (mended["num_scored"], mended["faults"]) == (10, {})


@pytest.mark.parametrize(("success_at", "is_marked"), [("full", False), ("positive", True)])
def test_a_weaker_success_rule_is_below_the_table(success_at: str, is_marked: bool) -> None:
    environment = ScienceWorldConfig.model_validate({"success_at": success_at})
    settings = EvalTasksSettings(tasks="scienceworld", model=ModelSettings(), environment=environment)
    eval_tasks = fake_setup(TASKS, factory(lambda key: False), scorer="f1").eval_tasks
    report = build_report(settings, eval_tasks, scorer=None, identity={}, results=[])
    mark = 'success_at = "positive": any score above 0 is a success'
    console = Console(file=StringIO(), width=100)
    console.print(report.table())
    assert (mark in " ".join(console.file.getvalue().split())) == is_marked  # type: ignore[attr-defined]
    assert report.as_json().get("score_mark") == (mark if is_marked else None)


def test_retries_are_reported(tmp_path: Path) -> None:
    failed: set[str] = set()

    def first_time(key: str) -> bool:
        is_first = key in ("task-1", "task-4") and key not in failed
        failed.add(key)
        return is_first

    notes: list[str] = []
    clean = play(tmp_path / "clean.jsonl", Batches(), factory(lambda key: False), notes=notes)
    assert notes == []
    assert clean == play(tmp_path / "r.jsonl", Batches(), factory(first_time), max_retries=1, notes=notes)
    assert notes == [
        "tries repeated after a fault: 2",
        "all faults, also of repeated tries: environment_fault in task-1, rollout 0: the simulator died "
        "(and 1 more)",
    ]
    failed.clear()
    notes.clear()  # one that a second try saves, and two samples of a task that are lost
    play(
        tmp_path / "lost.jsonl", Batches(), factory(lambda key: key == "task-4" or first_time(key)),
        max_retries=1, notes=notes,
    )  # fmt: skip
    assert notes == [
        "tries repeated after a fault: 3",
        "all faults, also of repeated tries: environment_fault in task-1, rollout 0: the simulator died "
        "(and 4 more)",
    ]


def test_an_interrupted_batch_is_repeated_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    play(path, Batches(), factory(lambda key: False))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]))  # tasks 0, 1 and 2 of the first sample
    engine = Batches()
    play(path, engine, factory(lambda key: False))
    assert engine.batches == [
        ["task-2", "task-3"],
        ["task-4"],
        ["task-0", "task-1"],
        ["task-2", "task-3"],
        ["task-4"],
    ]
    assert path.read_bytes() == b"".join(lines)


def test_without_a_scored_sample_there_is_no_number(tmp_path: Path) -> None:
    nothing = play(tmp_path / "r.jsonl", Batches(), factory(lambda key: True))
    assert (nothing["num_scored"], nothing["scores"], nothing["num_tokens"]) == (0, {}, None)


class InterruptedGrader(Grader):
    """Ctrl-C while an answer is judged."""

    def judge_answer(self, task: Task, answer: SampleResult) -> SampleResult:
        if task.key == "task-3":
            raise KeyboardInterrupt
        return SampleResult(task_key=task.key, sample=0, outcome=Outcome.FINISHED, score=1.0, success=True)


def test_verdicts_are_stored_when_judging_is_interrupted(tmp_path: Path) -> None:
    tasks = tuple(Task(key=f"task-{i}", question=f"q{i}", answers=(str(i),)) for i in range(40))
    store = EvalTasksStore.open(tmp_path / "r.jsonl", identity={})
    for task in tasks:
        store.add(SampleResult(task_key=task.key, sample=0, outcome=Outcome.ENGINE_FAULT,
                               answered=Outcome.FINISHED, prediction="x"))  # fmt: skip
    setup = fake_setup(tasks, factory(lambda key: False), scorer="judge")
    grader = InterruptedGrader(rules=find_variant("default"), kind="qa", scorer="judge")
    settings = EvalTasksSettings(tasks="hotpotqa", model=ModelSettings())
    player = LocalPlayer(engine=Batches(), identity={}, settings=settings)
    with pytest.raises(KeyboardInterrupt):
        play_eval_tasks(setup, player, grader, store, num_samples=1, display=Progress())
    store.close()
    again = EvalTasksStore.open(tmp_path / "r.jsonl", identity={})
    kept = [result.task_key for result in again.results if result.score is not None]
    # answers are judged in this order
    assert kept == [key for key in sorted(task.key for task in tasks) if key < "task-3"]
    again.close()


DATA = Path(__file__).parents[3] / "shared" / "data"
FILES = {"gsm8k": "math/gsm8k.jsonl", "hotpotqa": "qa/hotpotqa.jsonl"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_two_runs_of_a_language_model_agree_exactly(name: str, tmp_path: Path) -> None:
    file = DATA / FILES[name]
    if not file.exists():
        pytest.skip("the evaluation files are not here")
    asked = [
        "--model", "smollm2-135m-instruct", "--tasks", f"{name}={file}", "--limit", "6", "--samples", "1",
        "--seed", "3", "batch_size=2", "num_threads=1", "model.precision=float32",
        "rollout.max_turn_tokens=48", "rollout.max_response_tokens=64",
    ]  # fmt: skip
    for run in ("once", "again"):
        assert evaluate(tmp_path / run, *asked) == 0
    whole = (tmp_path / "once" / "results.jsonl").read_bytes()
    assert (tmp_path / "again" / "results.jsonl").read_bytes() == whole
    found = summary(tmp_path / "once")
    assert (found["num_scored"], found["faults"]) == (6, {}) and found["num_tokens"] > 10  # an answer
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "results.jsonl").write_bytes(whole[: len(whole) // 2])
    assert evaluate(cut, *asked) == 0
    assert (cut / "results.jsonl").read_bytes() == whole
    assert (cut / "summary.json").read_bytes() == (tmp_path / "once" / "summary.json").read_bytes()
