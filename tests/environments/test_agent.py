"""Rollouts of agent programs: what is trained has the context that it was sampled in, and every episode has
one outcome.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra agent")

from outrider.environments.agent.environment import (  # noqa: E402
    AgentConfig,
    AgentEnvironment,
    AgentTaskSet,
    read_exit,
)
from outrider.environments.agent.programs import Report  # noqa: E402
from outrider.environments.agent.server import COUNTED  # noqa: E402
from outrider.environments.base import Episode  # noqa: E402
from outrider.environments.tool_qa.datasets import DatasetConfig  # noqa: E402
from outrider.errors import EnvironmentFault, InvalidResult, ToolUnavailable  # noqa: E402
from outrider.rollout.faults import require_results  # noqa: E402
from outrider.rollout.settings import Limits  # noqa: E402
from outrider.trace import Trace, split_contexts  # noqa: E402
from outrider.types import Message, Outcome, Task, ToolCall  # noqa: E402
from tests.environments.agents.harness import (  # noqa: E402
    PROGRAMS,
    TOKENIZER,
    assert_contexts,
    family_renderer,
    finished,
    leaves,
    own_factory,
    play,
    play_one,
    scheduler,
    shared_factory,
    task,
)
from tests.environments.agents.programs import BREAKS  # noqa: E402
from tests.rollout.fakes import Forking  # noqa: E402


def halve(request: Any, text: str) -> str:
    low, high = 1, 50
    for number, hint in re.findall(r"(\d+) is too (high|low)", text):
        high, low = (int(number) - 1, low) if hint == "high" else (high, int(number) + 1)
    return str((low + high) // 2)


def test_a_growing_history_is_one_context() -> None:
    report = play(*(task("guess", str(n), key=str(n)) for n in (3, 25, 49)), group=4, script=halve)
    for trace in report.traces:
        for leaf, path in trace.rollouts():
            assert finished(leaf) and leaf.success and len(split_contexts(path)) == 1
            assert leaf.metrics["num_requests"] == sum(node.trainable for node in path)
    assert not report.faults


@pytest.mark.parametrize(
    ("program", "num_samples", "value"), [("rewriting", 2, 0.5), ("nested", 3, 1.0), ("several", 3, 3.0)]
)
def test_every_other_history_is_another_sample(program: str, num_samples: int, value: float) -> None:
    seen: list[tuple[str, str]] = []
    [trace] = play(task(program), group=2, seen=seen).traces
    assert_contexts(trace, seen)
    for leaf, path in trace.rollouts():
        assert finished(leaf, value) and len(split_contexts(path)) == num_samples
    if program == "nested":  # the main agent's context continues after the helper's with the same ids
        first, helper, again = split_contexts(path)
        before = [token for node in first for token in node.token_ids]
        assert list(again[0].token_ids[: len(before)]) == before
        assert "it said turn 001" in TOKENIZER.decode(again[0].token_ids, skip_special_tokens=False)
        assert "You help." in TOKENIZER.decode(helper[0].token_ids, skip_special_tokens=False)


FAILURES = {
    "silent": "without asking the policy",
    "dying": "signal 9",
    "raising": "RuntimeError: no idea",
    "raising_group": "LookupError: no tool",
    "hanging": "longer than 1 s",
    "odd": "no finite number",
    "words": "no finite number",
}


def test_a_program_that_fails_is_a_fault_and_is_repeated() -> None:
    report = play(*(task(name, key=name) for name in FAILURES), group=2, max_retries=1, time_limit_s=1.0)
    for trace in report.traces:
        for leaf in trace.leaves.values():
            assert leaf.outcome is Outcome.ENVIRONMENT_FAULT and FAILURES[trace.task.key] in leaf.detail
    assert report.faults["environment_fault"] == 4 * len(FAILURES)
    assert report.faults["retries"] == 2 * len(FAILURES)


def test_with_failed_return_it_is_an_episode() -> None:
    """If nothing was sampled, or the result is no reward, it stays a fault."""
    assert AgentConfig(function="a:b", time_limit_s=300.0).waiting_s(8) >= 300  # a step's limit is a fault
    report = play(*(task(name, key=name) for name in FAILURES), failed_return=-0.5, time_limit_s=1.0)
    for name, leaf in leaves(report).items():
        if name in ("dying", "raising", "raising_group", "hanging"):
            assert finished(leaf, -0.5) and not leaf.success and leaf.metrics["num_failed"] == 1
            cause = FAILURES[name].partition(":")[0]
            cause = {"dying": "it was ended by signal 9"}.get(name, cause)
            assert leaf.grade["reason"].removeprefix("the program failed: ") in (cause, f"it took {cause}")
        else:
            assert leaf.outcome is Outcome.ENVIRONMENT_FAULT and FAILURES[name] in leaf.detail


def test_the_reason_of_a_program_that_never_called_the_policy() -> None:
    assert "RuntimeError: no config" in play_one(task("early"), failed_return=-1.0).detail
    reasons = {
        "echo first >&2; echo boom: no config >&2; exit 3": "sh ended with status 3: boom: no config",
        "kill -9 $$": "sh ended with status -9",
    }
    for command, cases in (
        (("sh", "-c", "{question}"), reasons),
        (("{question}",), {"/no/such/program": "/no/such/program cannot be started: .*No such file"}),
    ):
        factory = own_factory(command=command, failed_return=-1.0)
        try:
            tasks = [task("", key=one, question=one) for one in cases]
            report = scheduler(factory).run(tasks, modes=("m",), training_step=0)
        finally:
            factory.close()
        for one, leaf in leaves(report).items():
            assert leaf.outcome is Outcome.ENVIRONMENT_FAULT and re.search(cases[one], leaf.detail)


def test_no_program_ends_another_one(tmp_path: Path) -> None:
    """They are forks of the same process."""
    for kind in BREAKS:
        os.mkfifo(tmp_path / kind)
    tasks = [task("beside_others", kind, key=kind, question=str(tmp_path)) for kind in ("fine", *BREAKS)]
    found = leaves(play(*tasks))
    assert finished(found.pop("fine"))
    assert {leaf.outcome for leaf in found.values()} == {Outcome.ENVIRONMENT_FAULT}
    reasons = {"deep": "as JSON (list)", "silenced": "ValueError: unheard", "wordless": "Wordless: ",
               "status": "it exited with status 3"}  # fmt: skip
    assert all(reasons[kind] in leaf.detail for kind, leaf in found.items()), found


@pytest.mark.parametrize("text", ["5", "[", "[" * 100_000, '"fault"'])
def test_a_report_that_the_program_wrote_itself(text: str) -> None:
    failure = read_exit(Report(status=3, result=text, tail="a\nlast words\n"))
    assert getattr(failure, "problem", "") == "it ended with status 3 (last words)"


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (None, "it ended with status 1"),
        ({"error": "FileNotFoundError: '/home/me/key'"}, "FileNotFoundError"),
        ({"failed": "/home/me/run.sh ended with status 3"}, "it ended with status 3"),
        ({"failed": "/home/me/run.sh cannot be started: no such file"}, "its command failed"),
        ({"value": None}, "it ended without a reward"),
    ],
)
def test_the_cause_of_a_failure_has_no_text_of_the_program(result: object, cause: str) -> None:
    tail = "FileNotFoundError: No such file: '/home/me/key'"
    assert getattr(read_exit(Report(status=1, result=json.dumps(result), tail=tail)), "cause", "") == cause


REWARDS: dict[str, float | str] = {  # expressions: the return, or why it is no reward
    "np.float32(0.5)": 0.5,
    "np.int64(2)": 2.0,
    "np.bool_(True)": 1.0,
    "np.array(3)": 3.0,
    "(np.float16(1), {'num_words': np.int8(3)})": 1.0,
    "np.longdouble(2)": 2.0,
    "True": 1.0,
    "__import__('decimal').Decimal('0.25')": 0.25,
    "__import__('fractions').Fraction(1, 4)": 0.25,
    "{'reward': np.bool_(True), 'success': np.int8(1)}": 1.0,
    "np.ones(3)": "(ndarray)",
    "object()": "object is no number",
    "(1, 2)": "no finite number",
    "(1, {'name': 'x'})": "the metric name",
    "'1.0'": "no finite number",
    "[1.0]": "no finite number",
    "1j": "(complex)",
    "{'reward': 1, 'success': 'yes'}": "success",
    "{'v': 1}": "the key reward",
    "float('nan')": "the reward",
    "np.float32('inf')": "the reward",
}


@pytest.mark.parametrize("failed_return", [None, -1.0])
def test_rewards_are_numbers_of_any_library_and_anything_else_stops_the_run(
    failed_return: float | None,
) -> None:
    tasks = [task("scalar", key=written, question=written) for written in REWARDS]
    for written, leaf in leaves(play(*tasks, failed_return=failed_return)).items():
        expected = REWARDS[written]
        if isinstance(expected, float):
            assert finished(leaf, expected) and leaf.metrics.get("num_words", 3.0) == 3.0
            continue
        assert leaf.outcome is Outcome.ENVIRONMENT_FAULT and expected in leaf.detail, (written, leaf.detail)
        trace = Trace(task=task("scalar", key="the task"), modes=("m",))
        trace.finish(leaf)
        with pytest.raises(InvalidResult, match="the task"):
            require_results([trace], {"non_finite": 1})


def test_a_program_cannot_replace_our_counts() -> None:
    [leaf] = leaves(play(task("overwriting", question="num_words"), response_format="ignore")).values()
    assert leaf.metrics.keys() == {*COUNTED, "num_words"} and leaf.metrics["num_requests"] == 1
    names = (*COUNTED, "", " ")
    for name, leaf in leaves(play(*(task("overwriting", key=n or "-", question=n) for n in names))).items():
        assert leaf.outcome is Outcome.ENVIRONMENT_FAULT
        assert ("another name" if name in COUNTED else "empty name") in leaf.detail


def test_a_posted_reward_and_the_budgets_end_an_episode() -> None:
    leaf = play_one(task("handing_in"))
    assert finished(leaf, 0.25) and leaf.success and leaf.metrics["num_words"] == 3.0
    leaf = play_one(task("endless"), limits=Limits(max_turns=3), cut_return=-1.0)
    assert (leaf.outcome, leaf.episode_return) == (Outcome.TRUNCATED_TURNS, -1.0)
    leaf = play_one(task("endless"), limits=Limits(max_response_tokens=100))
    assert (leaf.outcome, leaf.episode_return) == (Outcome.TRUNCATED_TOKENS, 0.0)


def test_odd_input_and_output_break_nothing() -> None:
    """Malformed requests are refused, lone surrogates replaced, and endless output is discarded."""
    leaf = play_one(task("garbage"))
    assert finished(leaf, 21.0) and leaf.metrics["num_refused_requests"] == 21
    assert leaf.metrics["num_requests"] == 1
    assert finished(play_one(task("printing")))
    assert finished(play_one(task("halves"), renderer=family_renderer(), tool_calls="hermes"))


def test_stop_strings_apply_to_the_policys_text_and_not_to_what_the_template_opened() -> None:
    cases = {
        ("\n",): ("one\ntwo</think>3", "", "one"),
        ("think",): ("2+2</think>four", "", "2+2</"),
        ("<think>",): ("why<think>not", "", "why"),
        ("</think>",): ("2+2</think>four", "", "2+2"),
        (".", ","): ("2+2</think>four, five.", "four", "2+2"),
        ("<",): ("nothing else", "", "nothing else"),
    }
    keys = {str(number): stop for number, stop in enumerate(cases)}
    seen: list[tuple[str, str]] = []
    report = play(
        *(task("halting", *stop, key=key) for key, stop in keys.items()),
        renderer=family_renderer("qwen3, always thinking"),
        script=lambda request, text: cases[keys[request.request_id.split("/")[0]]][0],
        seen=seen,
        tool_calls="hermes",
    )
    texts = dict(seen)
    for key, leaf in leaves(report).items():
        assert leaf.outcome is Outcome.FINISHED, report.fault_reasons
        assert json.dumps(list(cases[keys[key]][1:])) in texts[f"{key}/0000/001"]


@pytest.mark.parametrize(("program", "num_faults"), [("going_on", 0), ("unsteady", 1)])
def test_a_fork_sends_the_same_requests_or_is_a_fault(program: str, num_faults: int) -> None:
    seen: list[tuple[str, str]] = []
    hook = Forking(lambda state: state.rollout == 0 and state.turn == 1, first_wave=1, wave=1)
    report = play(task(program), group=2, hooks=(hook,), seen=seen)
    assert report.faults.get("environment_fault", 0) == num_faults, report.fault_reasons
    if not num_faults:
        assert seen[-1] == ("t/0001/001", seen[1][1]) and "length 3 3" in seen[1][1]


def test_ids_of_calls() -> None:
    """They are ours, unique, and no part of a conversation whose template writes none."""
    call = '<tool_call>{"name":"look","arguments":{}}</tool_call>'  # not as a template writes it
    renderer = family_renderer()
    report = play(task("renaming"), renderer=renderer, script=lambda *_: call, tool_calls="hermes")
    [(leaf, path)] = report.traces[0].rollouts()
    assert finished(leaf) and len(split_contexts(path)) == 1
    environment = shared_factory(tool_calls="hermes")(task("ids"))
    try:
        environment.reset(0)
        look = ToolCall(name="look")  # as a server parses it
        result = environment.step(Message(role="assistant", content="", tool_calls=(look, look)))
        assert result.done and environment.result().episode_return == 2
        assert [(call.name, call.status) for call in result.tool_calls] == [("look", "ok")] * 2
    finally:
        environment.close()


def test_the_calls_of_the_last_turn_of_a_program_that_fails_are_failed() -> None:
    environment = shared_factory(tool_calls="hermes", failed_return=-1.0)(task("raising"))
    try:
        environment.reset(0)
        turn = Message(
            role="assistant", content="", tool_calls=(ToolCall(name="look"),), problems=("no JSON",)
        )
        result = environment.step(turn)
        assert result.done
        assert [(call.name, call.status) for call in result.tool_calls] == [("look", "error"), ("", "error")]
    finally:
        environment.close()


class Unreadable(AgentEnvironment):
    def read(self, text: str) -> Message:
        raise TypeError("unhashable")


def test_an_environment_that_cannot_parse_a_turn_is_a_fault_of_its_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[AgentEnvironment] = []
    plain = shared_factory()

    def factory(task: Task) -> Any:
        made.append(plain(task))
        if len(made) == 1:
            made[0].__class__ = Unreadable
        return made[-1]

    report = scheduler(factory, script=lambda *_: "7").run(
        [task("guess", "7")], modes=("m",) * 3, training_step=0
    )
    found = sorted(leaf.outcome.value for leaf in report.traces[0].leaves.values())
    assert found == ["environment_fault", "finished", "finished"]
    assert "Unreadable cannot read a turn: TypeError: unhashable" in " ".join(report.fault_reasons)

    class BadTools:
        call_format = "hermes"
        tool_schemas = ({"name": "look", "parameters": {"required": 5}},)

    def broken(*_: Any) -> Any:
        raise SystemExit(3)

    monkeypatch.setattr("outrider.environments.base.read_turn", broken)
    with pytest.raises(EnvironmentFault, match="BadTools cannot read a turn: SystemExit: 3"):
        Episode(BadTools()).read("x")  # type: ignore[arg-type]


def test_an_expert_answers_the_program(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": secret} for secret in ("7", "60")]  # numbers are from 1 to 50
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = DatasetConfig(path=tmp_path / "tasks.jsonl")
    task_set = AgentTaskSet(
        AgentConfig(function=f"{PROGRAMS}:guess", expert=f"{PROGRAMS}:halved", train=data)
    )
    possible, impossible = task_set.tasks("train")
    steps = task_set.expert(possible, 0)
    assert steps is not None and [step.text for step in steps] == ["25", "12", "6", "9", "7"]
    assert steps[-1].is_terminal and not steps[0].is_terminal
    assert task_set.expert(impossible, 0) is None  # no success
    task_set.close()
    task_set.close()


def test_an_agent_that_cannot_be_loaded() -> None:
    with pytest.raises(ToolUnavailable, match="nosuch"):
        own_factory(function="tests.environments.agents.nosuch:run")
