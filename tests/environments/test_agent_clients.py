"""Unmodified agents of other people against the proxy: only where the model is was told to them."""

import json
from pathlib import Path

import pytest

pytest.importorskip("openai", reason="needs the package openai")

from outrider.cli import main  # noqa: E402
from outrider.engines.base import Request  # noqa: E402
from outrider.tokens import ChatRenderer  # noqa: E402
from outrider.trace import split_contexts  # noqa: E402
from outrider.types import Outcome, Task  # noqa: E402
from tests.environments.test_agent import scheduled  # noqa: E402
from tests.tiny import save_tiny_model  # noqa: E402
from tests.tokens.family_templates import FAMILIES, byte_tokenizer  # noqa: E402

CLIENTS = "tests.environments.agents.clients"
ONE = (Task(key="t", question="How is Paris?", answers=("sunny",)),)
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


def forecast(request: Request, text: str) -> str:
    return "It is sunny." if "sunny" in text else CALL


def thoughtful(request: Request, text: str) -> str:
    return f"<think>\nHm.\n</think>\n\n{forecast(request, text)}"


def turns(*said: str):  # type: ignore[no-untyped-def]
    return lambda request, text: said[int(request.request_id.rsplit("/", 1)[1])]


@pytest.mark.parametrize(
    ("agent", "script", "num_turns", "value"),
    [
        ("sdk_tools", forecast, 2, 1.0),
        ("sdk_parallel", turns("a", "b"), 2, 2.0),
        ("sdk_responses", forecast, 2, 1.0),
        pytest.param("agents_sdk", forecast, 2, 1.0, marks=pytest.mark.slow),
        ("agents_sdk", thoughtful, 2, 1.0),
        pytest.param("smol_tools", turns(CALL, FINAL), 2, 1.0, marks=pytest.mark.slow),
        pytest.param("smol_code", turns(*CODE), 2, 1.0, marks=pytest.mark.slow),
    ],
)
def test_an_unmodified_agent(agent: str, script, num_turns: int, value: float) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip({"agents": "agents", "smol": "smolagents"}.get(agent.partition("_")[0], "openai"))
    family = FAMILIES["qwen3"]
    renderer = ChatRenderer(
        byte_tokenizer(family), template_kwargs=family.variables, call_format="hermes", observations=("tool",)
    )
    seen: list[tuple[str, str]] = []
    with scheduled(
        renderer=renderer, script=script, seen=seen, tool_calls="hermes", function=f"{CLIENTS}:{agent}"
    ) as scheduler:
        scheduler.engine.context_length = 65536
        scheduler.limits = scheduler.limits.model_copy(
            update={"max_response_tokens": 60000, "max_turn_tokens": 4000}
        )
        report = scheduler.run(ONE, modes=("m",) * 2, training_step=0)
    assert not report.faults, report.fault_reasons
    for leaf, path in report.traces[0].rollouts():
        assert (leaf.outcome, leaf.episode_return) == (Outcome.FINISHED, value)
        assert sum(node.trainable for node in path) == num_turns
        asked = dict(seen)
        turn = 0
        for sample in split_contexts(path):
            before: list[int] = []
            for node in sample:
                if node.trainable:
                    text = asked[f"t/{leaf.rollout:04d}/{turn:03d}"]
                    assert renderer.tokenizer.decode(before, skip_special_tokens=False) == text
                    turn += 1
                before += node.token_ids


@pytest.mark.parametrize(
    "agent",
    [
        "sdk_tools",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("agents_sdk", "smol_tools", "smol_code")),
    ],
)
def test_an_unmodified_agent_is_trained(agent: str, tmp_path: Path) -> None:
    """Some steps through the command line, with a model of random weights: what it says means nothing to the
    agents, whose failures are paid as such, and no rollout is lost.
    """
    pytest.importorskip({"agents": "agents", "smol": "smolagents"}.get(agent.partition("_")[0], "openai"))
    save_tiny_model(tmp_path / "model", context=16384)
    (tmp_path / "tasks.jsonl").write_text('{"question": "How is Paris?", "answer": "sunny"}\n')
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(root=tmp_path, agent=f"{CLIENTS}:{agent}"))
    assert main(["train", str(recipe), "--run", str(tmp_path / "run"), "--progress", "none"]) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["kind"] == "train"]
    assert len(train) == 2
    for record in train:
        assert record["rollout/num_masked"] == record["rollout/num_retries"] == 0
        assert record["rollout/policy_tokens_mean"] > 0
