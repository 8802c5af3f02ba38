"""``outrider buffer``: experts with the environment's returns, endpoints, imports, statistics and queries."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import main
from outrider.config import validate
from outrider.environments.base import make_task_set
from outrider.errors import ConfigError, DataError, EngineFault
from outrider.memory.embedders import HashEmbedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.memory.step_store import BuildReport, history_text
from outrider.training import buffer_commands
from outrider.training.buffer_commands import build_buffer, import_trajectories, print_hits, print_stats
from outrider.training.experts import play_expert
from outrider.training.settings import RunSettings
from outrider.types import Step
from tests.chat_server import Answer, Asked, chat_server
from tests.rollout.test_collect import solver
from tests.toy import ToyTaskSet


def recipe(**buffer: Any) -> RunSettings:
    tree = {
        "environment": {"type": "factbook"},
        "algorithm": {"type": "rapo"},
        "buffer": {"embedder": "hash", **buffer},
    }
    return validate(RunSettings, {**tree, "seed": 5, "train": {"max_retries": 1}})


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> ToyTaskSet:
    toy = ToyTaskSet(3)
    monkeypatch.setattr(buffer_commands, "make_task_set", lambda config: toy)
    monkeypatch.setenv("COLUMNS", "200")
    return toy


def build(settings: RunSettings, out: Path, *, endpoint: str | None = None, num_trajectories: int = 3) -> int:
    return build_buffer(
        settings, out=out, endpoint=endpoint, endpoint_model="default", num_trajectories=num_trajectories
    )


def opened(path: Path) -> StepTraceBuffer:
    return StepTraceBuffer(path, HashEmbedder(), mode="read")


def table(text: str) -> dict[str, str]:
    """Rows of the printed two-column tables."""
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in text.splitlines()
        if line.startswith("│")
    ]
    return {row[0]: row[1] for row in cells if len(row) == 2}


def test_experts_are_played_and_have_the_environments_return(
    family: ToyTaskSet, tmp_path: Path, capsys: Any
) -> None:
    assert build(recipe(), tmp_path / "b.sqlite") == 0
    with opened(tmp_path / "b.sqlite") as buffer:
        good, wrong = buffer.trajectory("expert/toy/0"), buffer.trajectory("expert/toy/1")
        assert [step.reward for step in good] == [2.0, 2.0] and [step.reward for step in wrong] == [
            0.25,
            0.25,
        ]
        # what it claims is not what the environment says
        assert good[0].observation == "\n<result>\nit is 5\n</result>\n"
        assert [step.is_terminal for step in good] == [False, True]
        assert good[1].history_text == history_text(
            "question 0", [Step(text=good[0].text, observation=good[0].observation)]
        )
    counts = table(capsys.readouterr().out)
    assert (counts["num_tasks"], counts["num_tasks_without_expert"], counts["num_tasks_unsolved"]) == (
        "3",
        "1",
        "1",
    )
    assert (counts["num_inserted"], counts["num_steps_inserted"], counts["num_tasks_present"]) == (
        "2",
        "4",
        "0",
    )
    assert set(BuildReport.__dataclass_fields__) - {"revision"} <= set(counts)
    assert family.num_factories_open == 0 and family.num_closed == 2


def test_a_second_build_plays_only_what_is_missing(family: ToyTaskSet, tmp_path: Path, capsys: Any) -> None:
    build(recipe(num_tasks=1), tmp_path / "b.sqlite")
    family.num_resets.clear()
    build(recipe(), tmp_path / "b.sqlite")
    assert family.num_resets == {"toy/1": 1}
    assert table(capsys.readouterr().out)["num_tasks_present"] == "1"


def test_min_reward_acts_on_the_real_return(family: ToyTaskSet, tmp_path: Path, capsys: Any) -> None:
    build(recipe(min_reward=1.0), tmp_path / "b.sqlite")
    assert table(capsys.readouterr().out)["num_below_min_reward"] == "1"
    with opened(tmp_path / "b.sqlite") as buffer:
        assert buffer.trajectory("expert/toy/1") == []


def test_an_experts_fault_is_retried_counted_and_named(
    family: ToyTaskSet, tmp_path: Path, capsys: Any
) -> None:
    family.broken.add("toy/0")
    build(recipe(), tmp_path / "b.sqlite")
    text = capsys.readouterr().out
    assert (table(text)["num_tasks_fault"], table(text)["num_retries"]) == ("1", "1")
    assert "fault: toy/0: the toy broke" in text and family.num_resets["toy/0"] == 2


def test_a_real_expert_gets_the_real_return() -> None:
    quick = {"type": "factbook", "num_train": 2, "hops": [1], "passages": "facts"}
    settings = validate(RunSettings, {"environment": quick, "algorithm": {"type": "grpo"}})
    factbook = make_task_set(settings.environment)
    factory = factbook.make()
    task = factbook.tasks("train")[0]
    play = play_expert(factbook, factory, task, settings)
    assert play is not None
    trajectory, is_solved = play
    assert is_solved and trajectory.reward == 1.0
    claimed = factbook.expert(task, 0)
    assert claimed is not None and trajectory.steps == tuple(claimed)
    assert [message.role for message in trajectory.prompt] == ["system", "user"]
    factory.close()


def test_an_endpoint_fills_the_buffer_and_a_second_build_requests_nothing(
    family: ToyTaskSet, tmp_path: Path, capsys: Any
) -> None:
    with chat_server(lambda asked: models() if asked.path.endswith("models") else solver(asked)) as server:
        build(recipe(keep_best=2), tmp_path / "b.sqlite", endpoint=server.url)
        counts = table(capsys.readouterr().out)
        num_asked = len(server.asked)
        build(recipe(keep_best=2), tmp_path / "b.sqlite", endpoint=server.url)
        again = table(capsys.readouterr().out)
        assert len(server.asked) == num_asked + 1  # only the list of models
    assert (counts["num_offered"], counts["num_inserted"], counts["num_outranked"]) == ("9", "6", "3")
    assert (counts["num_finished"], counts["num_successes"], counts["num_done_before"]) == ("9", "9", "0")
    assert (again["num_done_before"], again["num_offered"]) == ("9", "0")
    with opened(tmp_path / "b.sqlite") as buffer:
        assert buffer.stats().num_trajectories_by_agent == {"toy-agent": 6}
        assert buffer.stats().reward_quantiles == (2.0,) * 5


def test_a_kill_between_buffer_and_log_costs_no_duplicate(
    family: ToyTaskSet, tmp_path: Path, capsys: Any
) -> None:
    with chat_server(lambda asked: models() if asked.path.endswith("models") else solver(asked)) as server:
        build(recipe(), tmp_path / "b.sqlite", endpoint=server.url)
        log = tmp_path / "b.sqlite.collected.jsonl"
        text = log.read_text()
        log.write_text(text[: text.index("toy/2/0")])  # torn in the middle of an entry
        build(recipe(), tmp_path / "b.sqlite", endpoint=server.url)
        counts = table(capsys.readouterr().out)
        assert (counts["num_done_before"], counts["num_present"], counts["num_inserted"]) == ("6", "3", "0")
        build(recipe(), tmp_path / "b.sqlite", endpoint=server.url)
        assert table(capsys.readouterr().out)["num_done_before"] == "9"


def test_a_log_without_its_buffer_is_of_another_one(family: ToyTaskSet, tmp_path: Path, capsys: Any) -> None:
    with chat_server(lambda asked: models() if asked.path.endswith("models") else solver(asked)) as server:
        build(recipe(), tmp_path / "b.sqlite", endpoint=server.url)
        (tmp_path / "b.sqlite").unlink()
        build(recipe(), tmp_path / "b.sqlite", endpoint=server.url)
    assert table(capsys.readouterr().out)["num_inserted"] == "9"


def test_faults_of_rollouts_are_counted_named_and_played_again(
    family: ToyTaskSet, tmp_path: Path, capsys: Any
) -> None:
    def script(asked: Asked) -> Answer:
        if asked.path.endswith("models"):
            return models()
        return (
            Answer({"message": "too long"}, status=400) if "question 1" in str(asked.body) else solver(asked)
        )

    with chat_server(script) as server:
        build(recipe(), tmp_path / "b.sqlite", endpoint=server.url)
        text = capsys.readouterr().out
        assert (table(text)["num_engine_fault"], table(text)["num_inserted"]) == ("3", "6")
        assert "fault: toy-agent/toy/1/0: " in text and "too long" in text
        server.script = lambda asked: models() if asked.path.endswith("models") else solver(asked)
        build(recipe(), tmp_path / "b.sqlite", endpoint=server.url)
        assert (table(capsys.readouterr().out)["num_inserted"], family.num_factories_open) == ("3", 0)


def test_nothing_is_made_for_a_wrong_address_or_count(family: ToyTaskSet, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no http or https address"):
        build(recipe(), tmp_path / "b.sqlite", endpoint="localhost:8000")
    with pytest.raises(ConfigError, match="at least 1"):
        build(recipe(), tmp_path / "b.sqlite", num_trajectories=0)
    with chat_server([Answer({}, status=400)]) as server, pytest.raises(EngineFault, match="status 400"):
        build(recipe(), tmp_path / "b.sqlite", endpoint=server.url)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_buffer_in_the_end_is_an_error(family: ToyTaskSet, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no trajectory has entered"):
        build(recipe(min_reward=99.0), tmp_path / "b.sqlite")
    assert family.num_factories_open == 0


def models() -> Answer:
    return Answer({"data": [{"id": "toy-agent", "owned_by": "vllm"}]})


def chats(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def chat(answer: str, reward: float) -> dict[str, Any]:
    said = [
        ("user", "[red]why[/red]?"),
        ("assistant", "<search>sky</search>"),
        ("user", "blue"),
        ("assistant", answer),
    ]
    return {
        "question": "why?",
        "reward": reward,
        "messages": [{"role": role, "content": text} for role, text in said],
    }


def imported(file: Path, out: Path, **options: Any) -> int:
    chosen = {"embedder": "hash", "keep_best": 5, "min_reward": None, "skip_malformed": False}
    return import_trajectories(file, out=out, **{**chosen, **options})


def test_import_counts_everything_and_can_be_repeated(tmp_path: Path, capsys: Any) -> None:
    file, out = (
        chats(tmp_path / "a.jsonl", chat("a", 1.0), "not json", chat("b", 0.5), chat("c", 0.0)),
        tmp_path / "b.sqlite",
    )
    options: dict[str, Any] = {"min_reward": 0.25, "keep_best": 1, "skip_malformed": True}
    assert imported(file, out, **options) == 0
    text = capsys.readouterr().out
    counts = table(text)
    names = (
        "num_malformed",
        "num_offered",
        "num_inserted",
        "num_outranked",
        "num_below_min_reward",
        "num_present",
    )
    assert [counts[name] for name in names] == ["1", "3", "1", "1", "1", "0"]
    assert "malformed: " in text and "a.jsonl:2: not JSON" in text
    imported(file, out, **options)
    again = table(capsys.readouterr().out)
    assert (again["num_inserted"], again["num_present"]) == ("0", "1")


def test_an_import_prints_what_it_left_out(tmp_path: Path, capsys: Any) -> None:
    record = chat("a", 1.0) | {"tools": [{"name": "search"}]}
    record["messages"][1]["weight"] = 0
    image = chat("b", 1.0)
    image["messages"][0]["content"] = [{"type": "image_url", "image_url": {"url": "x"}}]
    file = chats(tmp_path / "a.jsonl", record, image)
    assert imported(file, tmp_path / "b.sqlite", skip_malformed=True) == 0
    text = capsys.readouterr().out
    counts = table(text)
    assert counts["left out: column 'tools'"] == "1" and counts["num_malformed"] == "1"
    assert counts["left out: 'weight' of messages of the role assistant"] == "1"
    assert "a.jsonl:2: message 0 contains a part of the type 'image_url': Outrider trains on text" in text


def test_an_import_that_was_stopped_continues_to_the_same_contents(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer_commands, "_PORTION", 2)
    records = [
        chat(f"{answer} of {task}", 1.0) | {"question": task} for task in "abc" for answer in ("one", "two")
    ]
    file = chats(tmp_path / "a.jsonl", *records)
    imported(file, tmp_path / "whole.sqlite")
    assert "import: 4 of 6 trajectories" in capsys.readouterr().out
    add, calls = StepTraceBuffer.add_trajectories, []

    def stopped(self: StepTraceBuffer, *arguments: Any, **options: Any) -> BuildReport:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return add(self, *arguments, **options)

    monkeypatch.setattr(StepTraceBuffer, "add_trajectories", stopped)
    with pytest.raises(KeyboardInterrupt):
        imported(file, tmp_path / "parts.sqlite")
    imported(file, tmp_path / "parts.sqlite")
    counts = table(capsys.readouterr().out)
    assert (counts["num_inserted"], counts["num_present"]) == ("4", "2")
    for name in ("whole", "parts"):
        with StepTraceBuffer(tmp_path / f"{name}.sqlite", HashEmbedder(), mode="read") as buffer:
            assert sorted(hit.record.text for hit in buffer.query("a", k=50)) == ["<search>sky</search>"] * 6


def test_a_malformed_file_leaves_no_buffer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        imported(chats(tmp_path / "a.jsonl", chat("a", 1.0), "{"), tmp_path / "b.sqlite")
    with pytest.raises(ConfigError, match="keep-best"):
        imported(chats(tmp_path / "a.jsonl", chat("a", 1.0)), tmp_path / "b.sqlite", keep_best=0)
    assert not (tmp_path / "b.sqlite").exists()


def test_stats_and_query_print_what_is_there(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "b.sqlite"
    imported(chats(tmp_path / "a.jsonl", chat("a [/red]", 1.0), chat("b", 0.5)), out)
    capsys.readouterr()
    assert print_stats(out) == 0
    counts = table(capsys.readouterr().out)
    assert (counts["tasks"], counts["trajectories"], counts["steps"]) == ("1", "2", "4")
    assert (counts["trajectories of imported"], counts["share of terminal steps"]) == ("2", "0.500")
    assert counts["rewards (min, quartiles, max)"] == "0.5, 0.625, 0.75, 0.875, 1"
    assert print_hits(out, embedder="hash", history="why?", k=5) == 0
    text = capsys.readouterr().out
    # terminal: not shown
    assert text.count("1.0000") == 2 and text.count("<search>sky</search>") == 2 and "[/red]" not in text
    with pytest.raises(ConfigError, match="at least 1"):
        print_hits(out, embedder="hash", history="why?", k=0)


def test_markup_in_texts_is_shown_as_it_is(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    record = chat("a", 1.0)
    record["messages"][1]["content"] = "[bold]x[/bold] [/nonsense]"
    imported(chats(tmp_path / "a.jsonl", record), tmp_path / "b.sqlite")
    print_hits(tmp_path / "b.sqlite", embedder="hash", history="why?", k=1)
    assert "[bold]x[/bold] [/nonsense]" in capsys.readouterr().out


def test_the_command_line_reaches_all_four(family: ToyTaskSet, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "r.toml"
    file.write_text(
        '[environment]\ntype = "factbook"\n[algorithm]\ntype = "rapo"\n[buffer]\nembedder = "hash"\n'
    )
    out = str(tmp_path / "b.sqlite")
    assert main(["buffer", "build", str(file), "--out", out]) == 0
    assert main(["buffer", "stats", out]) == 0
    assert main(["buffer", "query", out, "question 0", "-k", "1", "--embedder", "hash"]) == 0
    assert (
        main(
            [
                "buffer",
                "import",
                str(chats(tmp_path / "a.jsonl", chat("a", 1.0))),
                "--out",
                out,
                "--embedder",
                "hash",
            ]
        )
        == 0
    )
    assert main(["buffer", "stats", str(tmp_path / "none")]) == 1
    assert main(["buffer", "query", out, "x", "--embedder", "minilm"]) == 2
    assert capsys.readouterr().err.count("\n") == 2
