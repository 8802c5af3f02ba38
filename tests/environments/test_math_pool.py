r"""A short answer that keeps the algebra system busy for ever ends a grading process, and nothing
else.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider.environments.grading import math_answers, math_worker
from outrider.environments.grading.math_answers import MathPool, Verdict, compare_all, compare_math, math_pool
from outrider.environments.tool_qa.rewards import RewardConfig, Turn, score_turns
from outrider.errors import EnvironmentFault

BOMBS = (
    r"99999999999\ln{7}",
    r"1000000\ln{7}",
    r"(1+\sqrt2+\sqrt3+\sqrt5+\sqrt6+\sqrt7+\sqrt{10}+\sqrt{11})^{29}",
    r"\cup".join(f"({i},{i + 2})" for i in range(0, 36, 3)),
)


def new_pool() -> Iterator[MathPool]:
    """One process and a limit of a second."""
    made = MathPool(num_processes=1, cpu_seconds=1)
    yield made
    made.close()


shared_pool = pytest.fixture(scope="module")(new_pool)
own_pool = pytest.fixture(new_pool)


@pytest.fixture
def pool(shared_pool: MathPool, monkeypatch: pytest.MonkeyPatch) -> MathPool:
    """In place of the pool of the process. Its worker loads the algebra system once for these tests."""
    monkeypatch.setattr(math_answers, "math_pool", lambda: shared_pool)
    return shared_pool


def test_a_bomb_is_undecided_and_the_next_answer_is_graded(pool: MathPool) -> None:
    for bomb in BOMBS[:2]:
        assert compare_math(bomb, "5") is Verdict.UNDECIDED
        assert compare_math("1/2", "0.5") is Verdict.EQUAL


def burn(left: str, right: str) -> bool:
    """Uses as many seconds of the processor as the text says."""
    end = time.process_time() + float(left)
    while time.process_time() < end:
        pass
    return True


def test_every_pair_has_the_whole_time_limit() -> None:
    child = math_worker._Child(1, burn)
    try:
        assert [child.compare("0.35", "") for _ in range(6)] == [b"1"] * 6
        assert child.compare("1.5", "") == b""
    finally:
        child.end()


def test_no_pair_pays_for_imports() -> None:
    """Each loss would otherwise load the algebra system again, within the next pair's limit or beside it."""
    code = (
        "import sys, os; from outrider.environments.grading import math_worker as w;"
        "w._Child = lambda *_: os._exit(7 if 'math_verify' in sys.modules else 8); w.main(os.getppid(), 1)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=b'[["1", "1"]]\n', capture_output=True)
    assert (done.stdout, done.returncode) == (b"[]\n", 7)


@pytest.mark.parametrize(
    "bomb",
    [pytest.param(bomb, marks=[pytest.mark.slow] if number % 2 else []) for number, bomb in enumerate(BOMBS)],
)
def test_every_reported_bomb_returns(pool: MathPool, bomb: str) -> None:
    assert compare_math(bomb, "5") in (Verdict.UNDECIDED, Verdict.DIFFERENT)


def test_a_bomb_among_the_accepted_answers_leaves_the_others_their_verdicts(pool: MathPool) -> None:
    assert compare_all("0.5", ("1/2", BOMBS[0], "7", "")) == [
        Verdict.EQUAL, Verdict.UNDECIDED, Verdict.DIFFERENT, Verdict.DIFFERENT,
    ]  # fmt: skip


def test_a_bomb_is_a_wrong_answer_and_counted(pool: MathPool) -> None:
    turn = Turn(text=f"<think>a</think><answer>\\boxed{{{BOMBS[0]}}}</answer>")
    score = score_turns([turn], ("5",), (), RewardConfig(answer="math"))
    assert (score.reward, score.is_correct, score.num_undecided, score.fault) == (0.0, False, 1, None)


def test_threads_share_the_pool_and_get_their_own_verdicts() -> None:
    with ThreadPoolExecutor(6) as threads:
        found = list(
            threads.map(lambda i: compare_math(f"{i}/2", f"{i}.0/2" if i % 2 else f"{i + 1}/2"), range(30))
        )
    assert found == [Verdict.EQUAL if i % 2 else Verdict.DIFFERENT for i in range(30)]


def test_a_lost_process_is_started_again_and_no_verdict_is_lost(pool: MathPool) -> None:
    assert pool.same_values([("1/2", "0.5")]) == [True]
    os.kill(processes_of(pool)[0], 9)
    assert pool.same_values([("1/2", "0.5"), ("1", "2")]) == [True, False]


def test_processes_that_cannot_be_started_are_a_fault(
    own_pool: MathPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(EnvironmentFault, match="lost twice"):
        own_pool.same_values([("1", "2")])
    monkeypatch.undo()
    assert own_pool.same_values([("1", "1.0")]) == [True]


def test_nothing_is_left_of_a_closed_pool(own_pool: MathPool) -> None:
    own_pool.same_values([("1/2", "0.5")])
    family = processes_of(own_pool)
    own_pool.close()
    assert family and processes_of(own_pool) == []
    assert not Path(f"/proc/{family[0]}").exists()


def test_a_process_has_one_pool() -> None:
    assert math_pool() is math_pool()


def processes_of(pool: MathPool) -> list[int]:
    """Process ids of the running workers of a pool whose workers are all idle."""
    return [worker._process.pid for worker in pool._workers._idle if worker._process is not None]
