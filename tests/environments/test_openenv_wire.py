"""Invalid responses of an OpenEnv server, the formats of actions and observations, and invalid settings."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

pytest.importorskip("websockets", reason="needs the extra openenv")

from outrider.environments.openenv.environment import (
    OpenEnvEnvironment,
    OpenEnvTaskSet,
    describe_errors,
    field_action,
    json_action,
    make_action,
    observation_text,
)
from outrider.environments.openenv.server import OpenEnvConfig  # noqa: E402
from outrider.errors import EnvironmentFault, ToolUnavailable  # noqa: E402
from outrider.training.settings import RunSettings  # noqa: E402
from outrider.types import Message  # noqa: E402
from tests.environments.openenv_fake import fake_server, observed  # noqa: E402

URL = "http://127.0.0.1:8000"
FIELDS = {"row": {"type": "integer", "minimum": 2}, "word": {"enum": ["a", "b"]}, "metadata": {}}


def of(url: str, **settings: Any) -> OpenEnvConfig:
    return OpenEnvConfig(server_url=url, num_train=4, num_valid=0, num_test=0, **settings)


def started(url: str, **settings: Any) -> OpenEnvEnvironment:
    family = OpenEnvTaskSet(of(url, **settings))
    environment = family.make()(family.tasks("train")[0])
    environment.reset(0)
    return environment


def act(environment: OpenEnvEnvironment, text: str = "x") -> Any:
    return environment.step(Message(role="assistant", content=f"<action>{text}</action>"))


GARBAGE: dict[str, tuple[str | bytes | None, str]] = {
    "closed": (None, "lost in step"),
    "no JSON": ("<html>", "what is no JSON"),
    "bytes": (b"\xff\x00", "what is no JSON"),
    "a list": ("[]", "what is no answer"),
    "no data": ('{"type": "observation"}', "what is no answer"),
    "deep": ("[" * 100_000, "what is no JSON"),
    "a state": ('{"type": "state", "data": {"step_count": 1}}', "did not return an observation"),
    "no observation": (
        json.dumps({"type": "observation", "data": {"reward": 1, "done": True}}),
        "not return an observation",
    ),
    "a text as reward": (
        json.dumps({"type": "observation", "data": {"observation": {}, "reward": "1", "done": True}}),
        "not return an observation",
    ),
    "no number": (observed("x", float("nan")), "returned the reward nan"),
    "no finite number": (observed("x", float("inf")), "returned the reward inf"),
    "a huge reward": (observed("x", 10**400), "did not return an observation"),
    "an error": ('{"type": "error", "data": {"code": "SESSION_ERROR", "message": "gone"}}', "failed: gone"),
    "a bare error": ('{"type": "error", "data": {}}', r"no reason given \(UNKNOWN\)"),
    "another field": (
        json.dumps({"type": "observation", "data": {"observation": {"b": 1}, "reward": 1, "done": False}}),
        "observation lacks text",
    ),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_an_invalid_response_is_a_fault_and_no_reward(what: str) -> None:
    answer, expected = GARBAGE[what]
    steps: list[str] = []

    def answers(kind: str, data: Any) -> str | bytes | None:
        if kind == "reset":
            return observed("go")
        steps.append(kind)
        return answer if len(steps) > 1 else observed("on", 0.5)

    with fake_server(answers) as server:
        environment = started(server.url, takes_seeds=False, observation=("text",))
        assert act(environment).reward == 0.5
        with pytest.raises(EnvironmentFault, match=expected):
            act(environment)
        assert environment.result().episode_return == 0.5
        environment.close()
        environment.close()
    assert server.num_left() == 0


@pytest.mark.parametrize("what", ["closed", "no JSON", "no observation", "an error"])
def test_an_invalid_response_to_reset(what: str) -> None:
    """With seeds it is an error before the first rollout, because seeds are checked."""
    with fake_server(lambda kind, data: GARBAGE[what][0]) as server:
        with pytest.raises(EnvironmentFault, match=GARBAGE[what][1].replace("step", "reset")):
            started(server.url, takes_seeds=False)
        with pytest.raises(ToolUnavailable, match="the OpenEnv server fake does not run"):
            OpenEnvTaskSet(of(server.url)).make()


def test_an_episode_that_is_over_before_its_first_turn_is_a_fault() -> None:
    with (
        fake_server(lambda kind, data: observed("over", done=True)) as server,
        pytest.raises(EnvironmentFault, match="ended the episode before its first turn"),
    ):
        started(server.url, takes_seeds=False)


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ({"metadata": "no JSON"}, "what is no JSON"),
        ({"metadata": "{}"}, "is no OpenEnv server"),
        ({"schema": "[]"}, "is no OpenEnv server"),
    ],
)
def test_another_server_is_an_error_before_the_first_rollout(pages: dict[str, str], expected: str) -> None:
    with fake_server(lambda kind, data: None, **pages) as server:
        with pytest.raises(ToolUnavailable, match=expected):
            OpenEnvTaskSet(of(server.url)).tasks("train")
        with pytest.raises(ToolUnavailable, match=r"/metadata: 404"):
            OpenEnvTaskSet(of(f"{server.url}/below")).make()
    with pytest.raises(ToolUnavailable, match="no connection"):
        OpenEnvTaskSet(of(server.url)).make()  # it has ended


@given(st.text(), st.sampled_from([field_action("row", FIELDS["row"]), json_action(FIELDS, ())]))
def test_any_text_is_an_action_or_a_problem(text: str, action: Any) -> None:
    for turn in (text, f"<action>{text}</action>", f'<action>{{"a": {text}}}</action>'):
        value, problem = action.read(turn)
        assert bool(problem) != bool(value) or value == {}
        assert json.loads(json.dumps(value, allow_nan=False).encode()) == value


def test_the_schema_determines_the_format_of_actions() -> None:
    one, several = (
        make_action({"properties": {"row": FIELDS["row"], "metadata": {}}}, None),
        {"properties": FIELDS},
    )
    assert one.probes == ("<action>2</action>",) and one.probes[0] in one.instructions
    assert one.read("I go <action> 3\n4 </action>") == ({"row": "3\n4"}, "")
    both = make_action(several, None)
    assert both.probes == ('<action>{"row": 2, "word": "a"}</action>',)
    assert both.probes[0] in both.instructions
    assert '{"word": "a"}' in make_action({**several, "required": ["word"]}, None).probes[0]
    assert make_action({**several, "required": ["word"]}, "word").read("<action>b</action>")[0] == {
        "word": "b"
    }
    named = {"way": {"$ref": "#/$defs/Way"}, "far": {"anyOf": [{"const": 3}, {"type": "null"}]}}
    schema = {"properties": named, "$defs": {"Way": {"enum": ["north", "south"], "type": "string"}}}
    assert '{"way": "north", "far": 3}' in make_action(schema, None).probes[0]
    assert "is no number" in both.read('<action>{"row": 1e999}</action>')[1]
    assert "No command found" in both.read("nothing")[1]
    assert describe_errors([{"loc": ["a", 1], "msg": "too long"}, {"msg": "bad"}, "?"]) == (
        "The action was not accepted (a.1: too long; bad)."
    )
    assert describe_errors(None) == "The action was not accepted (it does not fit)."


def test_observations_are_text_or_json() -> None:
    assert observation_text({"text": "a\nb"}, ()) == "a\nb"
    assert observation_text({"cells": [[1]]}, ()) == "[[1]]" and observation_text({"text": None}, ()) == ""
    assert observation_text({"text": "a", "n": 1}, ()) == '{"text": "a", "n": 1}'
    assert observation_text({"text": "a", "n": 1}, ("n", "text")) == "n: 1\ntext: a"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "name a server"),
        ({"server_url": URL, "command": ("x",)}, "name a server"),
        ({"server_url": "localhost:8000"}, "is an address such as"),
        ({"server_url": "http://a:b"}, "is an address such as"),
        ({"server_url": "http://me:secret@a"}, "a user name or a password"),
        ({"server_url": URL, "reset_options": {"seed": 1}}, "contains a seed"),
        ({"server_url": URL, "num_train": 0, "num_valid": 0, "num_test": 0}, "nothing to play"),
        ({"server_url": URL, "expert": "no path"}, "import path"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        OpenEnvConfig(**settings)


def test_methods_that_fork_by_replay_refuse_a_server_without_seeds() -> None:
    environment = {"type": "openenv", "server_url": URL, "num_sessions": 3, "takes_seeds": False}
    settings = RunSettings.model_validate({"environment": environment, "algorithm": {"type": "grpo"}})
    assert settings.num_concurrent == 3
    assert settings.limits.step_timeout_s == settings.rollout.step_timeout_s + 60  # it may wait for a session
    with pytest.raises(ValidationError, match=r"forks by replay.*takes_seeds = false"):
        RunSettings.model_validate({"environment": environment, "algorithm": {"type": "arpo"}})
