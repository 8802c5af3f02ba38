"""Reasoning-gym's tasks: splits that share no question, and verifiers that a hostile answer cannot leave."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")

from outrider.environments.base import Env, TaskSet  # noqa: E402
from outrider.environments.environment import EpisodeFactory
from outrider.environments.reasoning_gym import environment as reasoning_gym
from outrider.environments.reasoning_gym.environment import (
    ReasoningGymConfig,
    ReasoningGymEnvironment,
    SandboxedVerifier,
)
from outrider.errors import ConfigError, DataError, ToolFault  # noqa: E402
from outrider.tools.python import sandbox  # noqa: E402
from outrider.types import Message, Task  # noqa: E402

locked = pytest.mark.skipif(bool(sandbox.problems()), reason="this kernel lacks the sandbox's locks")
MIXED: dict[str, Any] = {
    "datasets": ["chain_sum", {"name": "countdown", "options": {"max_numbers": 4}}, "spiral_matrix"],
    "num_train": 6,
    "num_valid": 2,
    "num_test": 4,
}


@pytest.fixture(scope="module")
def family() -> TaskSet:
    return ReasoningGymEnvironment.build(ReasoningGymConfig(**MIXED))


@pytest.fixture(scope="module")
def factory(family: TaskSet) -> Iterator[EpisodeFactory]:
    made = family.make()  # loads the package within the sandbox: seconds
    yield made
    made.close()


@pytest.fixture(scope="module")
def verifier(factory: EpisodeFactory) -> SandboxedVerifier:
    environment = factory(Task(key="x", question="")).environment
    assert isinstance(environment, ReasoningGymEnvironment)
    return environment.shared.verifier  # type: ignore[no-any-return]


def played(factory: EpisodeFactory, task: Task, text: str) -> tuple[float, bool, float]:
    environment: Env = factory(task)
    environment.reset(0)
    last = environment.step(Message(role="assistant", content=text))
    record = environment.result()
    assert last.done and last.reward == record.episode_return
    return record.episode_return, record.success, record.metrics["num_undecided_answers"]


def test_data_sets_take_turns_and_more_tasks_keep_the_first(family: TaskSet) -> None:
    tasks = family.tasks("train")
    assert [task.metadata["dataset"] for task in tasks] == ["chain_sum", "countdown", "spiral_matrix"] * 2
    more = ReasoningGymEnvironment.build(ReasoningGymConfig(**{**MIXED, "num_train": 9})).tasks("train")
    assert [(one.key, one.question) for one in more[:6]] == [(one.key, one.question) for one in tasks]
    other = ReasoningGymEnvironment.build(ReasoningGymConfig(**{**MIXED, "seed": 1})).tasks("train")
    assert not {one.question for one in other} & {one.question for one in tasks}


def test_no_question_is_in_two_splits() -> None:
    """Also where a data set has few: what there was is passed over, and where nothing is left is told."""
    few: dict[str, Any] = {"datasets": [{"name": "gcd", "options": {"max_numbers": 2, "max_value": 9}}]}
    found = ReasoningGymEnvironment.build(ReasoningGymConfig(**few, num_train=8, num_valid=4, num_test=8))
    splits = [{task.question for task in found.tasks(split)} for split in ("train", "valid", "test")]
    assert [len(one) for one in splits] == [8, 4, 8] and len(set.union(*splits)) == 20
    with pytest.raises(DataError, match=r"gcd has \d+ new questions for train, not 300"):
        ReasoningGymEnvironment.build(ReasoningGymConfig(**few, num_train=300)).tasks("train")


@locked
def test_the_verifier_decides(family: TaskSet, factory: EpisodeFactory) -> None:
    """A right answer, a wrong one, none, and one that the verifier gives a part of the score."""
    total, count, _ = family.tasks("train")[:3]
    assert played(factory, total, f"<answer>{total.answers[0]}</answer>") == (1.0, True, 0.0)
    assert played(factory, total, "<answer>no number</answer>") == (0.0, False, 0.0)
    assert played(factory, total, "no tag at all") == (0.0, False, 0.0)
    way = f"0 + ({count.answers[0]})"
    assert played(factory, count, f"<answer>{count.answers[0]}</answer>") == (1.0, True, 0.0)
    assert 0 < played(factory, count, f"<answer>{way}</answer>")[0] < 1


@locked
def test_an_answer_that_is_a_program_is_locked_in(
    family: TaskSet, verifier: SandboxedVerifier, tmp_path: Path
) -> None:
    """``spiral_matrix`` evaluates the answer. It cannot write, print a score of its own, or take for ever."""
    task = family.tasks("train")[2]
    target = tmp_path / "written"
    assert verifier(task, str(task.answers[0])) == 1
    assert verifier(task, f"[open({str(target)!r}, 'w').write('x')]") == 0 and not target.exists()
    assert verifier(task, "[print('1.0'), __import__('os')._exit(0)]") is None
    assert verifier(task, "[__import__('sys').exit(3)]") is None  # the answer's doing, and no fault
    assert verifier(task, "[9**9**9]") is None


UNSTEADY: Any = ("list_functions", "isomorphic_strings")


@locked
def test_items_are_the_same_in_every_process(
    monkeypatch: pytest.MonkeyPatch, verifier: SandboxedVerifier
) -> None:
    """Data sets that go through sets of strings or draw from the global generators: a process with another
    hash seed has the same tasks, and the verifier holds an answer against the item that was asked.
    """
    config = ReasoningGymConfig(datasets=UNSTEADY, num_train=16, num_valid=0, num_test=0)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    tasks = ReasoningGymEnvironment.build(config).tasks("train")
    reasoning_gym._run_generator.cache_clear()
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert ReasoningGymEnvironment.build(config).tasks("train") == tasks
    assert [verifier(task, task.answers[0]) for task in tasks] == [1.0] * 16
    other = replace(tasks[0], key="other", question="another one")
    with pytest.raises(ToolFault, match="its item here is not the task's"):
        verifier(other, "1")


def test_a_data_set_that_is_named_twice_has_two_sets_of_keys() -> None:
    two: Any = tuple({"name": "gcd", "options": {"max_value": size}} for size in (50, 5000))
    tasks = ReasoningGymEnvironment.build(ReasoningGymConfig(datasets=two, num_train=8)).tasks("train")
    assert len({task.key for task in tasks}) == 8
    assert [task.metadata["options"] for task in tasks[:2]] == [one["options"] for one in two]


@locked
def test_a_verifier_that_raises_decides_nothing(verifier: SandboxedVerifier) -> None:
    found = ReasoningGymEnvironment.build(
        ReasoningGymConfig(datasets=("prime_factorization",), num_train=1, num_test=1)
    )
    task = found.tasks("train")[0]
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
def test_the_expert_keeps_to_the_format_or_is_none(reward: dict[str, Any], text: str | None) -> None:
    config = ReasoningGymConfig(reward=reward)  # type: ignore[arg-type]
    environment = ReasoningGymEnvironment(config)
    environment.task = Task(key="x", question="1 + 1", answers=("2",))
    found = environment.expert()
    assert (found is not None) is config.has_experts is (text is not None)
    assert text is None or (found is not None and found[0].text == text.format("2"))


def test_a_step_may_wait_for_the_verdicts_of_others() -> None:
    assert ReasoningGymConfig().waiting_s(64) == 5 * 64
    assert ReasoningGymConfig(tools=("python",)).waiting_s(64) == 5 * 64 + 10 * 64


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"datasets": ["codeio"]}, "differ from process to process"),
        ({"datasets": []}, "at least 1"),
        ({"tools": ["python", "python"]}, "each once"),
        ({"reward": {"answer": "judge", "judge": {"endpoint": {"base_url": "http://x"}}}}, "no judge"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        ReasoningGymConfig(**settings)


def test_an_unknown_data_set_and_option_are_told() -> None:
    for one in ({"name": "no_such"}, {"name": "gcd", "options": {"no_such": 1}}):
        with pytest.raises(ConfigError, match="reasoning-gym cannot make"):
            ReasoningGymEnvironment.build(ReasoningGymConfig(datasets=(one,))).tasks("train")  # type: ignore[arg-type]


def test_other_families_have_no_verifier() -> None:
    from outrider.environments.factbook.environment import FactbookConfig

    with pytest.raises(ValidationError, match="no verifier of their own"):
        FactbookConfig(reward={"answer": "verifier"})  # type: ignore[arg-type]
