"""What programs do wrong is theirs alone: one outcome, with the reason, and nothing to anybody else."""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra agent")

from outrider.environments.agent.environment import read_exit  # noqa: E402
from outrider.environments.agent.programs import Report  # noqa: E402
from outrider.environments.agent.server import COUNTED  # noqa: E402
from outrider.errors import InvalidResult  # noqa: E402
from outrider.rollout.faults import require_results  # noqa: E402
from outrider.trace import Leaf, Trace  # noqa: E402
from outrider.types import Outcome, Task  # noqa: E402
from tests.environments.agents.broken import BREAKS  # noqa: E402
from tests.environments.test_agent import ONE, scheduled  # noqa: E402

BROKEN = "tests.environments.agents.broken"


def only(tasks: tuple[Task, ...] = ONE, **settings: Any) -> Leaf:
    with scheduled(**settings, shared=True) as scheduler:
        [leaf] = scheduler.run(tasks, modes=("m",), training_step=0).traces[0].leaves.values()
    return leaf


def test_no_program_ends_another_one(tmp_path: Path) -> None:
    """They share the process that started them, of which each begins as a copy."""
    for kind in BREAKS:
        os.mkfifo(tmp_path / kind)
    tasks = [Task(key=kind, question=str(tmp_path), answers=(kind,)) for kind in ("fine", *BREAKS)]
    with scheduled(function=f"{BROKEN}:beside_others") as scheduler:
        scheduler.max_concurrent = len(tasks)
        report = scheduler.run(tasks, modes=("m",), training_step=0)
    found = {trace.task.key: leaf for trace in report.traces for leaf in trace.leaves.values()}
    assert found.pop("fine").outcome is Outcome.FINISHED
    assert {leaf.outcome for leaf in found.values()} == {Outcome.ENVIRONMENT_FAULT}
    reasons = {"deep": "as JSON (list)", "silenced": "ValueError: unheard", "wordless": "Wordless: ",
               "status": "it exited with status 3"}  # fmt: skip
    assert all(reasons[kind] in leaf.detail for kind, leaf in found.items()), found


@pytest.mark.parametrize("text", ["5", "[", "[" * 100_000, '"fault"'])
def test_a_report_that_the_program_wrote_itself(text: str) -> None:
    assert read_exit(Report(status=3, result=text, tail="a\nlast words\n")).problem == (
        "it ended with status 3 (last words)"
    )


@pytest.mark.parametrize("failed_return", [None, -1.0])
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"function": f"{BROKEN}:early"}, "RuntimeError: no config"),
        ({"command": ("sh", "-c", "echo first >&2; echo boom: no config >&2; exit 3")},
         "sh ended with status 3: boom: no config"),
        ({"command": ("/no/such/program",)}, "/no/such/program"),
    ],
)  # fmt: skip
def test_why_a_program_ended_without_asking(
    settings: dict[str, Any], reason: str, failed_return: float | None
) -> None:
    """Nothing was sampled, so it is a fault whatever a failure is worth."""
    leaf = only(**settings, failed_return=failed_return)
    assert leaf.outcome is Outcome.ENVIRONMENT_FAULT and reason in leaf.detail


@pytest.mark.parametrize(
    ("written", "value"),
    [("np.float32(0.5)", 0.5), ("np.int64(2)", 2.0), ("np.bool_(True)", 1.0), ("np.array(3)", 3.0),
     ("(np.float16(1), {'num_words': np.int8(3)})", 1.0), ("np.longdouble(2)", 2.0), ("True", 1.0),
     ("__import__('decimal').Decimal('0.25')", 0.25), ("__import__('fractions').Fraction(1, 4)", 0.25),
     ("{'reward': np.bool_(True), 'success': np.int8(1)}", 1.0)],
)  # fmt: skip
def test_numbers_of_libraries_are_numbers(written: str, value: float) -> None:
    leaf = only((Task(key="t", question=written),), function=f"{BROKEN}:scalar")
    assert (leaf.outcome, leaf.episode_return) == (Outcome.FINISHED, value), leaf.detail
    assert leaf.metrics.get("num_words", 3.0) == 3.0


@pytest.mark.parametrize(
    ("written", "reason"),
    [("np.ones(3)", "(ndarray)"), ("object()", "object is no number"), ("(1, 2)", "no finite number"),
     ("(1, {'name': 'x'})", "the metric name")],
)  # fmt: skip
def test_and_other_objects_are_none(written: str, reason: str) -> None:
    leaf = only((Task(key="t", question=written),), function=f"{BROKEN}:scalar")
    assert leaf.outcome is Outcome.ENVIRONMENT_FAULT and reason in leaf.detail


@pytest.mark.parametrize(
    "written",
    [
        "'1.0'",
        "[1.0]",
        "1j",
        "{'reward': 1, 'success': 'yes'}",
        "{'v': 1}",
        "float('nan')",
        "np.float32('inf')",
    ],
)
@pytest.mark.parametrize("failed_return", [pytest.param(None, marks=pytest.mark.slow), -1.0])
def test_what_is_no_reward_is_never_a_failed_episode_and_stops_a_run(
    written: str, failed_return: float | None
) -> None:
    task = Task(key="the task", question=written)
    leaf = only((task,), function=f"{BROKEN}:scalar", failed_return=failed_return)
    assert leaf.outcome is Outcome.ENVIRONMENT_FAULT
    trace = Trace(task=task, modes=("m",))
    trace.finish(leaf)
    with pytest.raises(InvalidResult, match="the task"):
        require_results([trace], {"non_finite": 1})


def test_counts_are_not_the_program_s() -> None:
    own = (Task(key="t", question="num_words"),)
    leaf = only(own, function=f"{BROKEN}:overwriting", response_format="ignore")
    assert leaf.metrics.keys() == {*COUNTED, "num_words"} and leaf.metrics["num_requests"] == 1
    for name in (*COUNTED, "", " "):
        leaf = only((Task(key="t", question=name),), function=f"{BROKEN}:overwriting")
        assert leaf.outcome is Outcome.ENVIRONMENT_FAULT
        assert ("another name" if name.strip() else "empty name") in leaf.detail
