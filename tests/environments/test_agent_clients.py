"""Unmodified clients and agents of other projects: the only change is the endpoint of their model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs the package openai")
pytest.importorskip("uvicorn", reason="needs the extra agent")

from outrider.cli import main  # noqa: E402
from outrider.trace import split_contexts  # noqa: E402
from tests.environments.agents.harness import (  # noqa: E402
    assert_contexts,
    by_turn,
    family_renderer,
    finished,
    play,
    task,
    turns_of,
)
from tests.environments.test_agent_calls import UNFIT  # noqa: E402
from tests.environments.test_agent_endpoint import answered  # noqa: E402
from tests.environments.test_agent_endpoint import play as play_behind_endpoint  # noqa: E402
from tests.tiny import save_tiny_model  # noqa: E402

CLIENTS = "tests.environments.agents.clients"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "It is sunny."}}\n</tool_call>'
CODE = [
    "Thought: add them.\n<code>\nx = 1 + 2 + 3\nprint(x)\n</code>",
    "Thought: done.\n<code>\nfinal_answer(x)\n</code>",
]
RECIPE = """
num_threads = 1
[model]
name = "{root}/model"
precision = "float32"
[environment]
type = "agent"
function = "{agent}"
tool_calls = "hermes"
failed_return = 0.0
train = {{ path = "{root}/tasks.jsonl" }}
test = {{ path = "{root}/tasks.jsonl" }}
[algorithm]
type = "grpo"
group_size = 4
[rollout]
max_turns = 3
max_turn_tokens = 12
max_response_tokens = 12000
[train]
num_steps = 2
tasks_per_step = 1
[evaluation]
num_tasks = 1
"""


def forecast(request: Any, text: str) -> str:
    return "It is sunny." if "sunny" in text else CALL


def thoughtful(request: Any, text: str) -> str:
    return f"<think>\nHm.\n</think>\n\n{forecast(request, text)}"


def require(program: str) -> None:
    pytest.importorskip({"agents": "agents", "smol": "smolagents"}.get(program.partition("_")[0], "openai"))


@pytest.mark.parametrize(
    ("program", "script", "num_turns", "value"),
    [
        ("sdk_tools", forecast, 2, 1.0),
        ("sdk_parallel", by_turn("a", "b"), 2, 2.0),
        ("sdk_responses", forecast, 2, 1.0),
        ("sdk_streamed_calls", by_turn(UNFIT["one that fits and one that does not"][0]), 1, 1.0),
        pytest.param("agents_sdk", forecast, 2, 1.0, marks=pytest.mark.slow),
        ("agents_sdk", thoughtful, 2, 1.0),
        pytest.param("agents_sdk_defaults", by_turn(CALL, "It is sunny."), 2, 1.0, marks=pytest.mark.slow),
        pytest.param("smol_tools", by_turn(CALL, FINAL), 2, 1.0, marks=pytest.mark.slow),
        pytest.param("smol_code", by_turn(*CODE), 2, 1.0, marks=pytest.mark.slow),
    ],
)
def test_an_unmodified_agent(
    program: str, script: Callable[[Any, str], str], num_turns: int, value: float
) -> None:
    require(program)
    renderer = family_renderer()
    seen: list[tuple[str, str]] = []
    report = play(
        task(program, "sunny", question="How is Paris?"),
        module=CLIENTS,
        script=script,
        seen=seen,
        renderer=renderer,
        tool_calls="hermes",
    )
    assert not report.faults, report.fault_reasons
    assert_contexts(report.traces[0], seen, renderer)
    for leaf, path in report.traces[0].rollouts():
        assert finished(leaf, value) and len(turns_of(path)) == num_turns
        num_unfit = program in ("sdk_streamed_calls", "agents_sdk_defaults")
        assert leaf.metrics["num_unfit_calls"] == num_unfit


def test_openais_client_accepts_answers_without_finish_reason_and_usage() -> None:
    played, _ = play_behind_endpoint(task("sdk_untold"), answered("It is sunny.", None), module=CLIENTS)
    assert played.success, played.detail


@pytest.mark.slow
def test_an_agent_with_an_output_type() -> None:
    require("agents")
    [leaf] = (
        play(
            task("agents_sdk_typed", question="How is Paris?"),
            module=CLIENTS,
            script=by_turn(CALL, '{"sky": "sunny"}'),
            renderer=family_renderer(),
            response_format="ignore",
            tool_calls="hermes",
        )
        .traces[0]
        .leaves.values()
    )
    assert finished(leaf) and leaf.metrics["num_ignored_formats"] == leaf.metrics["num_requests"] == 2


@pytest.mark.parametrize("history", [pytest.param("keep", marks=pytest.mark.slow), "strip"])
def test_reasoning_is_the_same_with_responses_and_chat_completions(history: Any) -> None:
    def texts_of(form: str) -> list[str]:
        seen: list[tuple[str, str]] = []
        [trace] = play(
            task("sdk_thinking", form),
            module=CLIENTS,
            script=by_turn(f"Where?</think>{CALL}", "It shines.</think>It is sunny.", "Well.</think>Yes."),
            seen=seen,
            renderer=family_renderer("qwen3, always thinking", history_thinking=history),
            tool_calls="hermes",
        ).traces
        [(leaf, path)] = trace.rollouts()
        assert finished(leaf) and (history == "strip" or len(split_contexts(path)) == 1)
        return [text for _, text in seen]

    by_responses, by_chat = texts_of("responses"), texts_of("chat")
    assert by_responses == by_chat and len(by_chat) == 3
    assert "Where?" in by_chat[1] and ("Where?" in by_chat[2]) is (history == "keep")


@pytest.mark.parametrize(
    "program",
    [
        "sdk_tools",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("agents_sdk", "smol_tools", "smol_code")),
    ],
)
def test_an_unmodified_agent_is_trained(program: str, tmp_path: Path) -> None:
    """With a model of random weights, whose text means nothing to the agents: every rollout is counted."""
    require(program)
    save_tiny_model(tmp_path / "model", context=16384)
    (tmp_path / "tasks.jsonl").write_text('{"question": "How is Paris?", "answer": "sunny"}\n')
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(root=tmp_path, agent=f"{CLIENTS}:{program}"))
    assert main(["train", str(recipe), "--run", str(tmp_path / "run"), "--progress", "none"]) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["kind"] == "train"]
    assert len(train) == 2
    for record in train:
        assert record["rollout/num_masked"] == record["rollout/num_retries"] == 0
        assert record["rollout/policy_tokens_mean"] > 0
