"""Identity of an evaluation: names and hashes of task sets, and settings that make it another evaluation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outrider.config import validate
from outrider.errors import ConfigError
from outrider.evaluation.tasks import EvalTasksSettings, load_benchmark, open_eval_tasks
from tests.chat_server import Answer, chat_server, completion
from tests.evaluation.eval_tasks import evaluate, play, results, summary, with_models, write_rows
from tests.tiny import save_tiny_model

AGENT: dict[str, Any] = {"base_url": "http://127.0.0.1:9/v1"}


def settings(**more: Any) -> EvalTasksSettings:
    return validate(EvalTasksSettings, {"endpoint": AGENT, **more})


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("GSM8K", "gsm8k"), ("MATH-500", "math500"), ("AIME24", "aime24"), ("aime_2025", "aime25"),
        ("HotpotQA", "hotpotqa"), ("2WikiMultihopQA", "2wiki"), ("MuSiQue", "musique"),
        ("Bamboogle", "bamboogle"), ("SimpleQA", "simpleqa"), ("WebWalkerQA", "webwalkerqa"),
        ("GAIA", "gaia"), ("BrowseComp", "browsecomp"),
    ],
)  # fmt: skip
def test_task_sets_have_the_names_of_papers(written: str, name: str, tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "#### 5" if name == "gsm8k" else "5"}]
    if name in ("math500", "aime24", "aime25"):
        rows = [{"problem": "q", "answer": "5"}]
    file = write_rows(tmp_path / "mine.jsonl", rows)
    panel = load_benchmark(f"{written}={file}")
    assert panel.benchmark.name == name and panel.tasks[0].key == f"{name}-0"


@pytest.mark.parametrize("written", ["Factbook", "ScienceWorld", "WebShop", "TextWorld", "ALFWorld"])
def test_names_of_environments_ignore_case(written: str) -> None:
    found = settings(tasks=written)
    assert found.runs_episodes and found.tasks == written.lower()
    assert found.environment is not None and found.environment.type == found.tasks


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"'factbok', did you mean factbook\?; give one of gsm8k, .*, factbook, scienceworld, "
            r"webshop, textworld, house, alfworld, gym, agent, verifiers, openenv, "
            r"reasoning_gym, or a file"
        ),
    ):
        open_eval_tasks(settings(tasks="factbok"))


def test_musique_accepts_aliases(tmp_path: Path) -> None:
    row = {
        "id": "2hop",
        "question": "q",
        "answer": "Rome",
        "answer_aliases": ["Roma", "", "Rome"],
        "answerable": True,
    }
    file = write_rows(tmp_path / "musique_ans_v1.0_dev.jsonl", [row, {**row, "answer_aliases": []}])
    panel = load_benchmark(f"musique={file}")
    assert [task.answers for task in panel.tasks] == [("Rome", "Roma"), ("Rome",)]


def test_tasks_can_be_pinned_by_their_hash(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "q.jsonl", [{"question": f"q{n}?", "answer": "a"} for n in range(3)])
    found = open_eval_tasks(settings(tasks=str(file))).eval_tasks.panel_hash
    assert open_eval_tasks(settings(tasks=str(file), panel=found)).eval_tasks.panel_hash == found
    with pytest.raises(ConfigError, match=rf"panel is {found}, and these 2 tasks are "):
        open_eval_tasks(settings(tasks=str(file), panel=found, limit=2))


def webshop_files(folder: Path, price: str) -> Mapping[str, str]:
    folder.mkdir()
    (folder / "products.json").write_text(json.dumps([{"asin": "A", "price": price}]))
    return {"products": str(folder / "products.json"), "attributes": str(folder / "products.json")}


def test_files_of_an_environment_are_identified_by_content(tmp_path: Path) -> None:
    from outrider.environments.webshop.environment import WebShopConfig
    from outrider.evaluation.tasks import environment_identity

    one, moved, other = (
        environment_identity(WebShopConfig.model_validate(webshop_files(tmp_path / name, price)))
        for name, price in (("one", "$1"), ("moved", "$1"), ("other", "$2"))
    )
    assert one == moved != other
    assert str(tmp_path) not in json.dumps(one)


def test_another_chat_template_is_another_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two folders with the same weights; a prompt is what the template makes of it."""
    model = save_tiny_model(tmp_path / "model")
    questions = write_rows(tmp_path / "q.jsonl", [{"question": "q0?", "answer": "a"}])
    arguments = ("--tasks", str(questions), "--model", str(model), "num_threads=1", "model.precision=float32",
                 "rollout.max_turn_tokens=4")  # fmt: skip
    assert evaluate(tmp_path / "run", *arguments) == 0
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    before = (tmp_path / "run" / "results.jsonl").read_bytes()
    assert evaluate(tmp_path / "run", *arguments) == 2
    assert "chat_template was" in capsys.readouterr().err
    assert (tmp_path / "run" / "results.jsonl").read_bytes() == before


def test_an_evaluation_without_one_scored_sample_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = write_rows(tmp_path / "q.jsonl", [{"question": f"q{n}?", "answer": "a"} for n in range(3)])

    with chat_server(with_models(lambda asked: Answer({}, status=500))) as server:
        assert play(server, str(questions), tmp_path / "run") == 1
    printed = capsys.readouterr()
    assert "0 of 3 samples scored" in printed.out and "FAULTS" in printed.out
    assert "no sample could be scored" in printed.err
    assert summary(tmp_path / "run")["num_scored"] == 0 and len(results(tmp_path / "run")) == 3


def test_answers_that_a_server_does_not_count_are_not_counted_as_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = write_rows(
        tmp_path / "[red]q.jsonl", [{"question": f"q{n}?", "answer": "a"} for n in range(3)]
    )

    def script(asked: Any) -> Answer:
        counted = json.dumps(asked.body).count("q0?")
        return completion("\\boxed{a}", num_tokens=7 if counted else 0)

    with chat_server(with_models(script)) as server:
        assert play(server, str(questions), tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert summary(tmp_path / "run")["num_tokens"] == 7.0
    assert summary(tmp_path / "run")["num_uncounted"] == 2
    assert "an answer: 7.0 tokens (2 answers came without a count)" in printed
    assert "[red]q, 3 tasks" in printed  # a name is no markup


def output_of_environment(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    reply = with_models(lambda asked: completion("<answer>\\boxed{nothing}</answer>"))
    with chat_server(reply) as server:
        assert play(server, name, run, "--limit", "3", "rollout.max_turns=2") == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_equal_results_have_no_interval_of_width_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three wrong answers do not say that the next one is wrong too."""
    printed = output_of_environment(tmp_path / "run", "factbook", capsys)
    found = summary(tmp_path / "run")["scores"]
    for name in ("success", "em", "f1", "answer_contained", "format_ok"):
        assert found[name]["ci_low"] < found[name]["ci_high"], name
    rows = {name: line for line in printed.splitlines() for name in ("em", "return") if f" {name} " in line}
    assert (
        "(no share)" in rows["return"]
        and "(all equal)" in rows["return"]
        and "0.0 % [0.0, 56.1]" in rows["em"]
    )  # Wilson's of none of three
    assert "answers used a tool" in printed


def test_an_environment_without_tools_has_no_tool_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = output_of_environment(tmp_path / "run", "webshop", capsys)
    assert "tokens" in printed and "used a tool" not in printed and "productivity" not in printed


def test_eval_of_tasks_prints_the_conditions_of_its_scores_and_sends_the_truncation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = write_rows(tmp_path / "q.jsonl", [{"question": f"q{n}?", "answer": "a"} for n in range(2)])
    options = ("--samples", "3", "--temperature", "0.6", "top_p=0.95", "top_k=20")
    with chat_server(with_models(lambda asked: completion("\\boxed{a}"))) as server:
        assert play(server, str(questions), tmp_path / "run", *options) == 0
        bodies = [asked.body for asked in server.asked if asked.body is not None]
    assert len(bodies) == 6
    assert {(body["temperature"], body["top_p"], body["top_k"]) for body in bodies} == {(0.6, 0.95, 20)}
    panel = summary(tmp_path / "run")["panel_hash"]
    line = f"panel {panel}, temperature 0.6, top_p 0.95, top_k 20, n = 3"
    assert line in " ".join(capsys.readouterr().out.split())
