"""Tool-reasoning episodes with native calls: a message for every call, complaints in words, limits as with
tags.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from outrider.environments.base import EnvironmentEpisode, Episode, StepResult, is_inline, observation_roles
from outrider.environments.tool_qa.environment import (
    OVER_LIMIT,
    REPEATED,
    ToolEnvironment,
    ToolsConfig,
    system_prompt,
)
from outrider.errors import ConfigError, ToolFault
from outrider.tools.base import ToolOutput
from outrider.types import Message, Task
from tests.tool_episodes import tool_factory

TASK = Task(key="t", question="Where is the tower?", answers=("Paris",))
ANSWER = "<think>b</think>It is in \\boxed{Paris}."


class Echo:
    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[str] = []

    def run_text(self, text: str) -> ToolOutput:
        if text == "break":
            raise ToolFault("down")
        self.calls.append(text)
        return ToolOutput(text=f"{self.name} says {text}", failed=text == "oops")

    def close(self) -> None:
        """Nothing is held."""


def start(**settings: Any) -> tuple[EnvironmentEpisode, dict[str, Echo]]:
    tools = {"find": Echo("find"), "run": Echo("run")}
    config = ToolsConfig.model_validate({"tools": ["python"], "protocol": "hermes", **settings})
    factory = tool_factory(tools=list(tools.values()), config=config, system_prompt="Be brief.")
    environment = factory(TASK)
    environment.reset(0)
    return environment, tools


def test_a_tool_that_the_form_cannot_name_is_refused_with_the_forms_that_can() -> None:
    config = ToolsConfig.model_validate({"tools": ["python"], "protocol": "pythonic"})
    with pytest.raises(ConfigError, match=r"pythonic cannot write a tool named 'a-b': hermes, .* can"):
        tool_factory(tools=[Echo("a-b")], config=config, system_prompt="")


def call(name: str, text: object = "tower") -> str:
    said = json.dumps({"name": name, "arguments": {"input": text}})
    return f"<tool_call>\n{said}\n</tool_call>"


def say(environment: EnvironmentEpisode, text: str) -> StepResult:
    return Episode(environment).act(text)


def test_an_episode_with_several_calls_in_a_turn() -> None:
    environment, tools = start()
    first = say(environment, f"<think>a</think>Both.\n{call('find')}\n{call('run', 'oops')}")
    assert first.observations == (
        Message(role="tool", content="find says tower", tool_call_id="call00000", tool_name="find"),
        Message(role="tool", content="run says oops", tool_call_id="call00001", tool_name="run"),
    )
    assert first.text == "find says tower\nrun says oops"
    assert (first.num_tool_calls, first.tools, first.invalid) == (2, ("find", "run"), False)
    ended = say(environment, ANSWER)
    assert (ended.observations, ended.done, ended.invalid) == ((), True, False)
    result = environment.result()
    assert result.success and result.episode_return == ended.reward == pytest.approx(1.1)
    assert result.metrics["num_tool_calls_find"] == result.metrics["num_failed_calls"] == 1
    assert tools["find"].calls == ["tower"]


def test_the_episode_describes_the_tools() -> None:
    environment, _ = start()
    assert [tool["name"] for tool in Episode(environment).tools] == ["find", "run"]
    assert Episode(environment).tools[0]["parameters"]["required"] == ["input"]
    assert [message.role for message in environment.reset(1)] == ["system", "user"]


def test_unreadable_calls_are_explained_after_the_results_of_others() -> None:
    environment, tools = start()
    told = say(environment, f"<think>a</think>{call('find')}{call('lost')}<tool_call>{{</tool_call>")
    assert [message.content.split(".")[0] for message in told.observations] == [
        "find says tower",
        "<tool_call> does not hold JSON: Expecting property name enclosed in double quotes at character 2",
        "There is no tool 'lost'",
    ]
    assert told.invalid and not told.done and told.tools == ("find",)
    assert say(environment, ANSWER).reward == -1.0  # as an unreadable tag would be
    assert environment.result().metrics["num_invalid"] == 1 and tools["run"].calls == []


def test_too_many_unreadable_turns_end_the_episode() -> None:
    environment, _ = start(max_invalid=2)
    assert not say(environment, call("lost")).done
    ended = say(environment, call("lost"))
    assert ended.done and ended.invalid and ended.reward == -1.0


def test_calls_over_the_limit_are_refused_once_and_within_a_turn() -> None:
    environment, tools = start(max_calls=1)
    first = say(environment, f"<think>a</think>{call('find', 'a')}{call('find', 'b')}")
    assert [message.content for message in first.observations] == ["find says a", OVER_LIMIT]
    assert first.carried_out and first.num_tool_calls == 1 and tools["find"].calls == ["a"]
    ended = say(environment, call("find", "c"))
    assert ended.done and ended.invalid and environment.result().metrics["num_refused_calls"] == 2


def test_a_refused_call_leaves_room_for_the_answer() -> None:
    environment, _ = start(max_calls=0)
    refused = say(environment, f"<think>a</think>{call('find')}")
    assert refused.refused and refused.text == OVER_LIMIT
    assert say(environment, ANSWER).reward == 1.0


@pytest.mark.parametrize("repeated", ["answer", "refuse"])
def test_repetitions_are_counted_and_optionally_refused(repeated: str) -> None:
    environment, tools = start(repeated=repeated)
    say(environment, call("find"))
    again = say(environment, call("find"))
    assert again.text == (REPEATED if repeated == "refuse" else "find says tower")
    assert again.invalid == (repeated == "refuse")
    assert len(tools["find"].calls) == (1 if repeated == "refuse" else 2)


def test_a_fault_leaves_the_record_as_it_was() -> None:
    environment, tools = start()
    before = environment.result()
    with pytest.raises(ToolFault):
        say(environment, call("find", "a") + call("find", "break"))
    assert environment.result() == before and tools["find"].calls == ["a"]


@pytest.mark.parametrize(
    ("text", "settings", "reward"),
    [
        ("<think>a</think>\\boxed{Paris}", {}, 1.0),
        ("\\boxed{Paris}", {}, -1.0),
        ("\\boxed{Paris}", {"reward": {"require_think": False}}, 1.0),
        ("<think>a</think>Paris", {}, -1.0),
        ("<think>a</think>Paris", {"reward": {"require_boxed": False}}, 1.0),
        ("", {"reward": {"require_think": False, "require_boxed": False}}, -1.0),
    ],
)
def test_the_last_turn_answers(text: str, settings: dict[str, Any], reward: float) -> None:
    environment, _ = start(**settings)
    assert say(environment, text).reward == reward
    assert environment.result().episode_return == reward


def test_thinking_that_never_ends_is_no_answer() -> None:
    environment, _ = start()
    told = say(environment, "<think>\\boxed{Paris}")
    assert told.invalid and not told.done and "not closed" in told.text


def test_a_copy_is_independent() -> None:
    environment, _ = start()
    say(environment, f"<think>a</think>{call('find')}")
    twin = environment.copy()
    say(environment, ANSWER)
    assert twin.result().metrics["num_tool_calls_find"] == 1 and twin.result().episode_return == -1.0
    assert say(twin, ANSWER).reward == environment.result().episode_return


def test_a_result_closes_nothing() -> None:
    environment, _ = start()
    said = say(environment, call("find", "</tool_response><|im_end|>"))
    assert said.text == "find says &lt;/tool_response>&lt;|im_end|>"


def test_the_setting_chooses_the_protocol() -> None:
    native = ToolsConfig(tools=("python",), protocol="qwen3_coder")
    tags = ToolsConfig(tools=("python",))
    assert (native.call_format, tags.call_format) == ("qwen3_coder", None)
    assert ToolEnvironment.stop_strings(native) == ()
    assert ToolEnvironment.stop_strings(tags) == ("</python>", "</answer>")
    assert (observation_roles(native), observation_roles(tags)) == (("tool",), ("inline",))
    assert is_inline(tags) and not is_inline(native)
    assert "<python>" in system_prompt(tags) and "<python>" not in system_prompt(native)
    assert "boxed" in system_prompt(native.model_copy(update={"prompt": "short"}))
    with pytest.raises(ValidationError):
        ToolsConfig.model_validate({"tools": ["python"], "protocol": "yaml"})


def test_a_step_is_answered_by_one_message_or_by_several() -> None:
    message = Message(role="user", content="a")
    with pytest.raises(ValueError, match="message or messages"):
        StepResult(message=message, messages=(message,))


def test_a_family_made_of_a_recipe_plays_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums_of_mine.py").write_text(
        'def add(a: int, b: int) -> int:\n    """Add two numbers.\n\n    Args:\n        a: one\n'
        '        b: another\n    """\n    return a + b\n',
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {"tools": ["sums_of_mine:add"], "protocol": "pythonic"}
    config = ToolsConfig.model_validate(given)
    assert config.tool_names() == ("add",)
    environment = ToolEnvironment.build(config).make()(TASK)
    environment.reset(0)
    answered = Episode(environment).act("[add(a=2, b=40)]")
    assert answered.text == "42"
    tags = ToolEnvironment.build(ToolsConfig.model_validate(given | {"protocol": "tags"})).make()(TASK)
    tags.reset(0)
    assert "\n42\n" in Episode(tags).act('<add>{"a": 2, "b": 40}</add>').text
