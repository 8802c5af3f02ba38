"""``outrider eval --tasks`` with agents and judges behind a server whose faults are never wrong answers."""

import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.environments.base import EnvironmentTaskSet
from outrider.environments.webshop.environment import WebShopConfig, WebShopEnvironment
from tests.chat_server import Answer, Asked, ChatServer, chat_server, completion
from tests.evaluation.eval_tasks import (
    Script,
    evaluate,
    play,
    question_in,
    results,
    summary,
    with_models,
    write_rows,
)

NUM = 8


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "q.jsonl", [{"question": f"q{i}?", "answer": f"a{i}"} for i in range(NUM)])


def boxed(asked: Asked) -> Answer:
    """The right answer of every question, q3 but for a word more."""
    number = question_in(asked)[1:-1]
    return completion(f"So \\boxed{{{'the other ' if number == '3' else ''}a{number}}}")


def num_asked(server: ChatServer, model: str = "agent") -> int:
    return sum((asked.body or {}).get("model") == model for asked in server.asked)


def test_a_server_without_faults(questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with chat_server(with_models(boxed)) as server:
        assert play(server, f"hotpotqa={questions}", tmp_path / "run") == 0
        assert num_asked(server) == NUM
        body = next(asked.body for asked in server.asked if asked.body)
        assert [message["role"] for message in body["messages"]] == ["system", "user"] and body[
            "temperature"
        ] == 0
        assert play(server, f"hotpotqa={questions}", tmp_path / "run") == 0
        assert num_asked(server) == NUM  # every result is on file
    found = summary(tmp_path / "run")
    f1 = 2 * 0.5 / 1.5  # "other a3" against "a3"
    assert found["scores"]["token F1"]["value"] == pytest.approx((NUM - 1 + f1) / NUM)
    assert found["scores"]["em"] == pytest.approx(
        {"value": 7 / 8, "ci_low": 0.5291, "ci_high": 0.9776, "num_tasks": 8}, abs=1e-4
    )
    assert (found["num_scored"], found["faults"], found["outcomes"]) == (NUM, {}, {"finished": NUM})
    assert (found["num_tokens"], found["num_tool_calls"]) == (7.0, 0.0)
    printed = capsys.readouterr().out
    assert (
        found["panel_hash"] in printed
        and "token F1" in printed
        and "87.5 % [52.9, 97.8]" in printed
        and "FAULTS" not in printed
    )


def misbehaving(kinds: dict[str, Answer], num_times: int) -> Script:
    """These questions get these answers the first times, then what is right."""
    seen: Counter[str] = Counter()

    def script(asked: Asked) -> Answer:
        question = question_in(asked)
        seen[question] += 1
        return kinds[question] if question in kinds and seen[question] <= num_times else boxed(asked)

    return with_models(script)


FAILURES = {"q0?": Answer({}, status=429), "q2?": Answer(b"<html>", status=500), "q4?": Answer(b"garbage")}


def test_a_failed_request_is_retried_and_reported(
    questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hold = threading.Event()
    late = Answer(completion("late").body, hold=hold)
    with chat_server(misbehaving({**FAILURES, "q5?": late}, 1)) as server:
        assert play(server, f"hotpotqa={questions}", tmp_path / "run", "endpoint.timeout_s=2") == 0
        hold.set()
    assert summary(tmp_path / "run")["num_scored"] == NUM
    printed = capsys.readouterr().out
    for reason in ("1 after status 429", "1 after status 500", "1 after garbage", "1 after timeout"):
        assert reason in printed


def test_json_has_the_retried_requests(
    questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chat_server(misbehaving({"q0?": FAILURES["q0?"]}, 1)) as server:
        assert play(server, f"hotpotqa={questions}", tmp_path / "run", "--progress", "json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert "requests sent again: 1 after status 429" in notes


def test_persistent_failures_are_faults_and_are_requested_again_later(
    questions: Path, tmp_path: Path
) -> None:
    with chat_server(misbehaving(FAILURES, 99)) as server:
        assert play(server, f"hotpotqa={questions}", tmp_path / "run") == 0
        assert num_asked(server) == NUM - 3 + 3 * 2
    broken = summary(tmp_path / "run")
    assert (broken["num_scored"], broken["faults"]) == (5, {"engine_fault": 3})
    assert broken["scores"]["em"]["num_tasks"] == 5
    assert broken["scores"]["em"]["value"] == 4 / 5  # all but q3
    lost = {one["task_key"]: one for one in results(tmp_path / "run") if one["outcome"] == "engine_fault"}
    assert sorted(lost) == [f"hotpotqa-{i}" for i in (0, 2, 4)]
    for number, words in ((0, "status 429"), (2, "status 500"), (4, "no JSON")):
        fault = lost[f"hotpotqa-{number}"]
        assert fault["score"] is None
        assert "gave up after 2 tries" in fault["detail"] and words in fault["detail"]
    with chat_server(with_models(boxed)) as server:
        assert play(server, f"hotpotqa={questions}", tmp_path / "run") == 0
        assert num_asked(server) == 3
        assert play(server, f"hotpotqa={questions}", tmp_path / "clean") == 0
    assert summary(tmp_path / "run") == summary(tmp_path / "clean")


def test_another_server_with_the_same_model_name_is_reported(
    questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(2):
        with chat_server(with_models(boxed)) as server:
            assert play(server, f"hotpotqa={questions}", tmp_path / "run", "--progress", "plain") == 0
        assert ("OTHER SERVER: the earlier results are from " in capsys.readouterr().out) is (number == 1)
    (tmp_path / "run" / "evaluation.toml").write_text("damaged")
    with chat_server(with_models(boxed)) as server:
        assert play(server, f"hotpotqa={questions}", tmp_path / "run", "--progress", "plain") == 0
    assert "OTHER SERVER: the earlier results are from an unknown server" in capsys.readouterr().out


def test_a_dead_server_ends_the_evaluation_and_keeps_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_rows(tmp_path / "q.jsonl", [{"question": f"q{i}?", "answer": f"a{i}"} for i in range(40)])
    dead = threading.Event()

    def script(asked: Asked) -> Answer:
        if question_in(asked) == "q5?":
            dead.set()
        return Answer({}, status=503) if dead.is_set() else boxed(asked)

    with chat_server(with_models(script)) as server:
        assert play(server, str(tasks), tmp_path / "run", "batch_size=1") == 1
        assert num_asked(server) < 30
    assert "8 rollouts in a row failed" in capsys.readouterr().err
    assert sum(one["score"] is not None for one in results(tmp_path / "run")) == 5
    with chat_server(with_models(boxed)) as server:
        assert play(server, str(tasks), tmp_path / "run", "batch_size=1") == 0
        assert num_asked(server) == 35


@pytest.mark.parametrize("status", [401, 404])
def test_a_permanent_error_of_the_server(questions: Path, tmp_path: Path, status: int) -> None:
    with chat_server(with_models(lambda asked: Answer({}, status=status))) as server:
        assert play(server, str(questions), tmp_path / "run") == 1
    with chat_server([Answer({}, status=401)]) as server:
        assert play(server, str(questions), tmp_path / "other") == 1
    assert not (tmp_path / "other").exists()


def test_pass_at_k(tmp_path: Path) -> None:
    tasks = write_rows(
        tmp_path / "q.jsonl", [{"question": f"q{i}?", "answer": f"#### {i}"} for i in range(3)]
    )
    right = {"q0?": 1, "q1?": 4, "q2?": 0}
    seen: Counter[str] = Counter()

    def script(asked: Asked) -> Answer:
        question = question_in(asked)
        seen[question] += 1
        return completion(f"\\boxed{{{question[1] if seen[question] <= right[question] else 'x + 7'}}}")

    with chat_server(with_models(script)) as server:
        assert play(server, f"gsm8k={tasks}", tmp_path / "run", "--samples", "4", "--temperature", "0.7") == 0
        bodies = [asked.body for asked in server.asked if asked.body]
    scores = {name: one["value"] for name, one in summary(tmp_path / "run")["scores"].items()}
    assert scores["mathematically equal, avg@4"] == scores["pass@1"] == pytest.approx((1 / 4 + 1 + 0) / 3)
    assert scores["pass@2"] == pytest.approx((1 / 2 + 1 + 0) / 3) and scores["pass@4"] == pytest.approx(2 / 3)
    assert scores["majority@4"] == pytest.approx(1 / 3)
    assert len({body["seed"] for body in bodies}) == 12 and {body["temperature"] for body in bodies} == {0.7}


def judged(verdict: Callable[[str], Answer]) -> Script:
    """The agent writes more than the answer; the judge decides by the question."""

    def script(asked: Asked) -> Answer:
        text = str((asked.body or {})["messages"])
        number = re.search(r"q(\d)\?", text)
        assert number is not None
        if (asked.body or {})["model"] == "agent":
            return completion(f"\\boxed{{maybe a{number[1]}}}")
        return verdict(number[1])

    return with_models(script)


def judgment(number: str) -> Answer:
    return completion(f"<judgment>{'Incorrect' if number == '6' else 'Correct'}</judgment>")


def judge_options(server: ChatServer) -> tuple[str, ...]:
    impatient = ("judge.endpoint.backoff_s=0", "judge.endpoint.max_retries=0", "judge.endpoint.timeout_s=5")
    return ("--judge", server.url, "--judge-model", "judge", *impatient)


def test_faults_of_the_judge_leave_answers_unjudged(questions: Path, tmp_path: Path) -> None:
    bad = {
        "1": Answer({}, status=429),
        "2": Answer({}, status=500),
        "3": Answer(b"junk"),
        "4": completion("Who knows?"),
    }
    tasks = f"simpleqa={questions}"
    with chat_server(judged(lambda number: bad.get(number) or judgment(number))) as server:
        assert play(server, tasks, tmp_path / "run", *judge_options(server)) == 0
    broken = summary(tmp_path / "run")
    assert (broken["num_scored"], broken["faults"], broken["num_unjudged"]) == (4, {"engine_fault": 4}, 4)
    assert broken["scores"]["correct by the judge"]["value"] == 3 / 4
    lost = [one for one in results(tmp_path / "run") if one["answered"] is not None]
    assert (
        all(one["score"] is None and one["prediction"].startswith("maybe") for one in lost) and len(lost) == 4
    )
    assert sum("contained no verdict" in one["detail"] for one in lost) == 1
    with chat_server(judged(judgment)) as server:
        assert play(server, tasks, tmp_path / "run", *judge_options(server)) == 0
        assert (num_asked(server), num_asked(server, "judge")) == (0, 4)
        assert play(server, tasks, tmp_path / "clean", *judge_options(server)) == 0
    assert summary(tmp_path / "run") == summary(tmp_path / "clean")
    assert summary(tmp_path / "run")["scores"]["correct by the judge"]["value"] == 7 / 8


@pytest.mark.parametrize(
    ("status", "num_requests", "message"),
    [(500, 5, "the judge failed 3 times in a row"), (401, 2, "status 401")],
)
def test_a_judge_that_fails_ends_the_evaluation_and_no_answer_is_lost(
    status: int, num_requests: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also an expired key, which is not retried."""
    rows = [{"question": f"q{i % 10}? {i}", "answer": f"a{i}"} for i in range(20)]
    tasks = f"simpleqa={write_rows(tmp_path / 'q.jsonl', rows)}"
    batches = ("batch_size=2", "max_faults_in_a_row=3")
    with chat_server(judged(lambda number: Answer({}, status=status))) as server:
        assert play(server, tasks, tmp_path / "run", *judge_options(server), *batches) == 1
        assert num_asked(server, "judge") <= num_requests
    assert message in capsys.readouterr().err
    kept = len(results(tmp_path / "run"))
    with chat_server(judged(judgment)) as server:
        assert play(server, tasks, tmp_path / "run", *judge_options(server), *batches) == 0
        assert kept >= 1 and (num_asked(server), num_asked(server, "judge")) == (20 - kept, 20)


FACTS = [("lamp", "hill"), ("ship", "lake"), ("ring", "wood")]


def seeker(asked: Asked) -> Answer:
    """Searches once, then answers with what the result says; without results it does not know."""
    text = str((asked.body or {})["messages"])
    found = re.search(r"(\w+): (hill|lake|wood)", text)
    thing = question_in(asked).removesuffix("?").split()[-1]
    if found is not None:
        return completion(f"<think>There.</think><answer>\\boxed{{{found[2]}}}")
    return completion(f"<think>Look.</think><search>{thing}" if "<search>" in text else "\\boxed{nowhere}")


def test_tools_on_and_off(tmp_path: Path) -> None:
    tasks = write_rows(
        tmp_path / "q.jsonl",
        [{"question": f"Where is the {thing}?", "answer": place} for thing, place in FACTS],
    )
    corpus = write_rows(tmp_path / "c.jsonl", [{"id": t, "title": t, "text": f"{t}: {p}"} for t, p in FACTS])
    with chat_server(with_models(seeker)) as server:
        tools = ("--tools", "on", "--corpus", str(corpus), 'environment.tools=["search"]')
        assert play(server, str(tasks), tmp_path / "on", *tools) == 0
        assert play(server, str(tasks), tmp_path / "off", "--tools", "off") == 0
        assert play(server, str(tasks), tmp_path / "on") == 2  # the folder belongs to another evaluation
    on, off = summary(tmp_path / "on"), summary(tmp_path / "off")
    assert (on["scores"]["token F1"]["value"], off["scores"]["token F1"]["value"]) == (1.0, 0.0)
    assert (
        on["num_tool_calls"],
        on["tool_usage_rate"],
        on["num_tokens"],
        on["counts"]["num_written_calls"],
    ) == (1, 1, 14, 1)
    assert (off["num_tool_calls"], off["tool_usage_rate"]) == (0, 0)
    assert on["panel_hash"] == off["panel_hash"]


def test_an_environment_scores_itself(tmp_path: Path) -> None:
    family = EnvironmentTaskSet(WebShopEnvironment, WebShopConfig())
    steps = {task.question: family.expert(task, 0) or () for task in family.tasks("test")[:3]}

    def shopper(asked: Asked) -> Answer:
        messages = (asked.body or {})["messages"]
        plan = next(plan for question, plan in steps.items() if question in messages[0]["content"])
        turn = sum(message["role"] == "assistant" for message in messages)
        return completion(plan[turn].text if turn < len(plan) else "hm")

    with chat_server(with_models(shopper)) as server:
        assert play(server, "webshop", tmp_path / "run", "--limit", "3", "rollout.max_turns=12") == 0
    found = summary(tmp_path / "run")
    played = results(tmp_path / "run")
    assert found["scores"]["success"]["value"] == sum(one["success"] for one in played) / 3
    assert found["scores"]["return"]["value"] == pytest.approx(
        sum(one["metrics"]["episode_return"] for one in played) / 3
    )
    assert sum(one["success"] for one in played) >= 2 and found["counts"]["num_turns"] > 2


def test_deviating_rules_are_reported(
    questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chat_server(with_models(lambda asked: completion("a0"))) as server:
        for rules in ("default", "squad"):
            assert (
                play(server, f"hotpotqa={questions}", tmp_path / rules, "--rules", rules, "--limit", "1") == 0
            )
    default, squad = summary(tmp_path / "default"), summary(tmp_path / "squad")
    assert (default["scores"]["em"]["value"], squad["scores"]["em"]["value"]) == (0.0, 1.0)
    assert (default["outcomes"], squad["outcomes"]) == ({"invalid": 1}, {"finished": 1})
    assert (
        default["deviations"] == []
        and squad["deviations"]
        and "rules: an output with neither" in capsys.readouterr().out
    )


def test_a_truncated_reply_is_not_finished(questions: Path, tmp_path: Path) -> None:
    with chat_server(with_models(lambda asked: completion("and then", finish="length"))) as server:
        assert play(server, str(questions), tmp_path / "run") == 0
    assert summary(tmp_path / "run")["outcomes"] == {"truncated_tokens": NUM}


def test_the_instruction_can_go_into_the_question(questions: Path, tmp_path: Path) -> None:
    with chat_server(with_models(lambda asked: completion("\\boxed{a}"))) as server:
        assert play(server, str(questions), tmp_path / "run", "instruction=user", "--limit", "1") == 0
        (body,) = [asked.body for asked in server.asked if asked.body]
    (message,) = body["messages"]
    assert (
        message["role"] == "user"
        and message["content"].endswith("\n\nq0?")
        and "\\boxed" in message["content"]
    )


NEEDS_MODEL = ("--endpoint", "http://127.0.0.1:9/v1")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give a recipe, or --tasks NAME"),
        (("--limit", "3", "recipe.toml"), "--limit needs --tasks"),
        (("--tasks", "gsm8k"), "exactly one of a model and an endpoint"),
        (("--tasks", "gsm8k", "--model", "m", *NEEDS_MODEL), "exactly one of a model and an endpoint"),
        (("--tasks", "gsm9k", *NEEDS_MODEL), "unknown task set"),
        (
            ("--tasks", "simpleqa=q.jsonl", *NEEDS_MODEL),
            "graded by a judge: set its address (judge.endpoint.base_url",
        ),
        (("--tasks", "gsm8k", "--samples", "2", *NEEDS_MODEL), "num_samples > 1 needs a temperature"),
        (("--tasks", "webshop", "--tools", "off", *NEEDS_MODEL), "needs its environment"),
        (("--tasks", "webshop", "metric=em", *NEEDS_MODEL), "scores itself"),
        (("--tasks", "q.jsonl", "metric=math", *NEEDS_MODEL), "no task set of mathematics"),
        (("--tasks", "q.jsonl", "metric=judge", *NEEDS_MODEL), "needs a judge"),
        (("--tasks", "q.jsonl", "--corpus", "c.jsonl", *NEEDS_MODEL), "only with tools = on"),
        (("--tasks", "webshop", "environment.type=factbook", *NEEDS_MODEL), "contradict"),
        (("--tasks", "gsm8k", "recipe.toml", *NEEDS_MODEL), "cannot be combined with a recipe or --adapt"),
        (("nonsense.key=1", "--tasks", "gsm8k", *NEEDS_MODEL), "nonsense: unknown key"),
    ],
)
def test_an_impossible_combination_is_one_line(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "q.jsonl", [{"question": "q?", "answer": "a"}])
    assert evaluate(tmp_path / "run", *arguments) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1 and says in printed[0] and not (tmp_path / "run").exists()


def test_a_folder_with_other_files_is_left_alone(
    questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").write_text("dear diary")
    assert evaluate(tmp_path / "mine", "--tasks", str(questions), *NEEDS_MODEL) == 2
    assert evaluate(questions, "--tasks", str(questions), *NEEDS_MODEL) == 2
    assert capsys.readouterr().err.count("has no evaluation of tasks") == 2
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["note.txt"]


def test_tools_are_called_natively(questions: Path, tmp_path: Path) -> None:
    def script(asked: Asked) -> Answer:
        body = asked.body or {}
        if body["messages"][-1]["role"] == "tool":
            return boxed(asked)
        function = {"name": body["tools"][0]["function"]["name"], "arguments": '{"code": "print(1)"}'}
        said = {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
        return Answer({"choices": [{"message": said, "finish_reason": "tool_calls"}]})

    native = ("--tools", "on", 'environment.tools=["python"]', "environment.protocol=hermes")
    with chat_server(with_models(script)) as server:
        assert play(server, f"hotpotqa={questions}", tmp_path / "run", "--limit", "2", *native) == 0
        asked = [body for one in server.asked if (body := one.body) and len(body["messages"]) > 2]
    assert {body["messages"][-1]["tool_call_id"] for body in asked} == {"c"}
    found = summary(tmp_path / "run")
    assert (found["num_scored"], found["num_tool_calls"], found["outcomes"]) == (2, 1.0, {"finished": 2})
