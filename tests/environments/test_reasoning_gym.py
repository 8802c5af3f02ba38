"""Tasks of reasoning-gym: splits without common questions, and verifiers in a sandbox."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")

from outrider.environments.base import Env, EpisodeFactory, TaskSet  # noqa: E402
from outrider.environments.reasoning_gym import environment as reasoning_gym
from outrider.environments.reasoning_gym.environment import (
    ReasoningGymConfig,
    ReasoningGymEnvironment,
    SandboxedVerifier,
)
from outrider.environments.reasoning_gym.items import make_rows
from outrider.errors import ConfigError, DataError, ToolFault  # noqa: E402
from outrider.tools.python import sandbox  # noqa: E402
from outrider.types import Message, Step, Task  # noqa: E402

locked = pytest.mark.skipif(bool(sandbox.problems()), reason="this kernel lacks the sandbox's locks")
MIXED: dict[str, Any] = {
    "datasets": ["chain_sum", {"name": "countdown", "options": {"max_numbers": 4}}, "spiral_matrix"],
    "num_train": 6,
    "num_valid": 2,
    "num_test": 4,
}


@pytest.fixture(scope="module")
def task_set() -> TaskSet:
    return ReasoningGymEnvironment.build(ReasoningGymConfig(**MIXED))


@pytest.fixture(scope="module")
def factory(task_set: TaskSet) -> Iterator[EpisodeFactory]:
    made = task_set.make()  # loads the package within the sandbox: seconds
    yield made
    made.close()


@pytest.fixture(scope="module")
def verifier(factory: EpisodeFactory) -> SandboxedVerifier:
    environment = factory(Task(key="x", question="")).environment
    assert isinstance(environment, ReasoningGymEnvironment)
    return environment.shared.verifier  # type: ignore[no-any-return]


def play(factory: EpisodeFactory, task: Task, text: str) -> tuple[float, bool, float]:
    environment: Env = factory(task)
    environment.reset(0)
    last = environment.step(Message(role="assistant", content=text))
    record = environment.result()
    assert last.done and last.reward == record.episode_return
    return record.episode_return, record.success, record.metrics["num_undecided_answers"]


def rows(datasets: Any, seed: int = 0, **sizes: int) -> dict[str, list[dict[str, Any]]]:
    """The rows of the splits, made in this process: importing the package takes seconds."""
    config = ReasoningGymConfig(datasets=datasets, seed=seed)
    splits = {split: (size, config.first_seed(split)) for split, size in sizes.items()}  # type: ignore[arg-type]
    return make_rows({"datasets": config.model_dump(mode="json")["datasets"], "splits": splits})


def test_data_sets_alternate_and_more_tasks_keep_the_first() -> None:
    first = rows(MIXED["datasets"], train=6)["train"]
    assert [row["dataset"] for row in first] == ["chain_sum", "countdown", "spiral_matrix"] * 2
    more = rows(MIXED["datasets"], train=9)["train"]
    assert [(row["key"], row["question"]) for row in more[:6]] == [
        (row["key"], row["question"]) for row in first
    ]
    other = rows(MIXED["datasets"], seed=1, train=6)["train"]
    assert not {row["question"] for row in other} & {row["question"] for row in first}


def test_no_question_is_in_two_splits() -> None:
    few: Any = [{"name": "gcd", "options": {"max_numbers": 2, "max_value": 9}}]
    splits = [{row["question"] for row in made} for made in rows(few, train=8, valid=4, test=8).values()]
    assert [len(questions) for questions in splits] == [8, 4, 8] and len(set.union(*splits)) == 20
    with pytest.raises(DataError, match=r"gcd has \d+ new questions for train, not 300"):
        rows(few, train=300)


def test_a_data_set_that_is_named_twice_has_two_sets_of_keys() -> None:
    twice: Any = [{"name": "gcd", "options": {"max_value": size}} for size in (50, 5000)]
    made = rows(twice, train=8)["train"]
    assert len({row["key"] for row in made}) == 8
    assert [row["options"] for row in made[:2]] == [dataset["options"] for dataset in twice]


def test_an_unknown_data_set_or_option_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot make 'gcd'.*no_such"):
        rows([{"name": "gcd", "options": {"no_such": 1}}], train=1)
    unknown = ReasoningGymConfig(datasets=("no_such",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="reasoning-gym cannot make 'no_such'"):
        ReasoningGymEnvironment.tasks(unknown, "train")


@locked
def test_the_verifier_decides(task_set: TaskSet, factory: EpisodeFactory) -> None:
    total, count, _ = task_set.tasks("train")[:3]
    assert play(factory, total, f"<answer>{total.answers[0]}</answer>") == (1.0, True, 0.0)
    assert play(factory, total, "<answer>no number</answer>") == (0.0, False, 0.0)
    assert play(factory, total, "no tag at all") == (0.0, False, 0.0)
    way = f"0 + ({count.answers[0]})"
    assert play(factory, count, f"<answer>{count.answers[0]}</answer>") == (1.0, True, 0.0)
    assert 0 < play(factory, count, f"<answer>{way}</answer>")[0] < 1


@locked
def test_an_answer_that_is_a_program_cannot_leave_the_sandbox(
    task_set: TaskSet, verifier: SandboxedVerifier, tmp_path: Path
) -> None:
    """``spiral_matrix`` evaluates the answer, which must not write, print a score or run for ever."""
    task = task_set.tasks("train")[2]
    target = tmp_path / "written"
    assert verifier(task, str(task.answers[0])) == 1
    assert verifier(task, f"[open({str(target)!r}, 'w').write('x')]") == 0 and not target.exists()
    assert verifier(task, "[print('1.0'), __import__('os')._exit(0)]") is None
    assert verifier(task, "[__import__('sys').exit(3)]") is None  # caused by the answer, so no fault
    assert verifier(task, "[9**9**9]") is None


UNSTEADY: Any = ("list_functions", "isomorphic_strings")


@locked
def test_items_are_the_same_in_every_process(
    monkeypatch: pytest.MonkeyPatch, verifier: SandboxedVerifier
) -> None:
    """Some data sets iterate over sets of strings or draw from the global generators."""
    config = ReasoningGymConfig(datasets=UNSTEADY, num_train=8, num_valid=0, num_test=0)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    tasks = ReasoningGymEnvironment.build(config).tasks("train")
    reasoning_gym._run_generator.cache_clear()
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert ReasoningGymEnvironment.build(config).tasks("train") == tasks
    assert [verifier(task, task.answers[0]) for task in tasks] == [1.0] * 8
    other = replace(tasks[0], key="other", question="another one")
    with pytest.raises(ToolFault, match="its item here is not the task's"):
        verifier(other, "1")


@locked
def test_a_verifier_that_raises_decides_nothing(verifier: SandboxedVerifier) -> None:
    [row] = rows(["prime_factorization"], train=1)["train"]
    metadata = {name: row[name] for name in ("dataset", "options", "seed", "size", "index")}
    task = Task(key=row["key"], question=row["question"], answers=tuple(row["answers"]), metadata=metadata)
    assert verifier(task, task.answers[0]) == 1 and verifier(task, "no factors") is None
    broken = Task(key="x", question="", metadata={**task.metadata, "dataset": "no_such"})
    with pytest.raises(ToolFault, match="the verifier of no_such"):
        verifier(broken, "1")


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        ({}, "<answer>{}</answer>"),
        ({"require_boxed": True}, "<answer>\\boxed{{{}}}</answer>"),
        ({"require_think": True}, None),
    ],
)
def test_the_expert_follows_the_format_or_is_none(reward: dict[str, Any], text: str | None) -> None:
    config = ReasoningGymConfig(reward=reward)  # type: ignore[arg-type]
    environment = ReasoningGymEnvironment(config)
    environment.task = Task(key="x", question="1 + 1", answers=("2",))
    found = environment.expert()
    assert (found is not None) is config.has_experts is (text is not None)
    assert text is None or (found is not None and found[0].text == text.format("2"))


def test_an_expert_starts_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sandbox(*_: Any, **__: Any) -> None:
        raise AssertionError("a sandbox was started")

    monkeypatch.setattr(reasoning_gym, "SandboxedVerifier", no_sandbox)
    task = Task(key="x", question="1 + 1", answers=("2",))
    step = Step(text="<answer>2</answer>", observation="", is_terminal=True)
    assert ReasoningGymEnvironment.build(ReasoningGymConfig()).expert(task, 0) == [step]

    class Own(ReasoningGymEnvironment):
        def expert(self) -> Any:
            raise NotImplementedError

    with pytest.raises(AssertionError, match="a sandbox was started"):  # its own expert may need one
        Own.build(ReasoningGymConfig()).expert(task, 0)


def test_the_time_limit_of_a_step_includes_the_verdicts_of_others() -> None:
    assert ReasoningGymConfig().waiting_s(64) == 5 * 64
    assert ReasoningGymConfig(tools=("python",)).waiting_s(64) == 5 * 64 + 10 * 64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"datasets": ["codeio"]}, "differ from process to process"),
        ({"datasets": []}, "at least 1"),
        ({"tools": ["python", "python"]}, "each once"),
        ({"reward": {"answer": "judge", "judge": {"endpoint": {"base_url": "http://x"}}}}, "no judge"),
    ],
)
def test_impossible_settings_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ReasoningGymConfig(**settings)


def test_other_environments_have_no_verifier() -> None:
    from outrider.environments.factbook.environment import FactbookConfig

    with pytest.raises(ValidationError, match="no verifier of their own"):
        FactbookConfig(reward={"answer": "verifier"})  # type: ignore[arg-type]
