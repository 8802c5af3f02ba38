"""Unmodified agents of other people against the proxy: only where the model is was told to them."""

import pytest

pytest.importorskip("openai", reason="needs the package openai")

from outrider.engines.base import Request  # noqa: E402
from outrider.tokens import ChatRenderer  # noqa: E402
from outrider.trace import samples_of  # noqa: E402
from outrider.types import Outcome, Task  # noqa: E402
from tests.environments.test_agent import scheduled  # noqa: E402
from tests.templates_of_families import FAMILIES, byte_tokenizer  # noqa: E402

CLIENTS = "tests.environments.agents.clients"
ONE = (Task(key="t", question="How is Paris?", answers=("sunny",)),)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "It is sunny."}}\n</tool_call>'
CODE = [
    "Thought: add them.\n<code>\nx = 1 + 2 + 3\nprint(x)\n</code>",
    "Thought: done.\n<code>\nfinal_answer(x)\n</code>",
]


def forecast(request: Request, text: str) -> str:
    return "It is sunny." if "sunny" in text else CALL


def turns(*said: str):  # type: ignore[no-untyped-def]
    return lambda request, text: said[int(request.request_id.rsplit("/", 1)[1])]


@pytest.mark.parametrize(
    ("agent", "script", "num_turns", "value"),
    [
        ("sdk_tools", forecast, 2, 1.0),
        ("sdk_parallel", turns("a", "b"), 2, 2.0),
        ("sdk_responses", forecast, 2, 1.0),
        ("agents_sdk", forecast, 2, 1.0),
        ("smol_tools", turns(CALL, FINAL), 2, 1.0),
        ("smol_code", turns(*CODE), 2, 1.0),
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
        for sample in samples_of(path):
            before: list[int] = []
            for node in sample:
                if node.trainable:
                    text = asked[f"t/{leaf.rollout:04d}/{turn:03d}"]
                    assert renderer.tokenizer.decode(before, skip_special_tokens=False) == text
                    turn += 1
                before += node.token_ids
