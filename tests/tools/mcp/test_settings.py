"""A section of an MCP server: which settings are refused, and that reading them starts no server."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("mcp", reason="needs the extra mcp")

from outrider.config import Settings, load_settings, to_toml  # noqa: E402
from outrider.environments.base import EnvironmentConfig  # noqa: E402
from outrider.environments.tool_qa.environment import ToolEnvironment, ToolsConfig, system_prompt  # noqa: E402
from outrider.errors import ConfigError  # noqa: E402
from outrider.tools.mcp.session import select_tools  # noqa: E402
from outrider.tools.mcp.tool import McpConfig  # noqa: E402
from tests.tools.mcp.servers import HERE, fake  # noqa: E402

URL = {"url": "http://127.0.0.1:9/mcp"}


class Recipe(Settings):
    environment: EnvironmentConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of command, script and url"),
        ({"command": "a", **URL}, "exactly one of command, script and url"),
        ({**URL, "args": ["a"]}, "args, env and cwd are for a server that is started"),
        ({"command": "a", "headers": {"X": "$K"}}, "headers are for a server with a url"),
        ({**URL, "headers": {"Authorization": "Bearer abc"}}, "the header Authorization names no variable"),
        ({**URL, "headers": {"Authorization": "Bearer $$"}}, "the header Authorization names no variable"),
        ({"url": "http://me:key@host/mcp"}, "url must hold no key"),
        ({"url": "https://host/mcp?project=a&apiKey=sekrit"}, "url must hold no key"),
        ({"url": "https://host/mcp?access_token=sekrit"}, "url must hold no key"),
        ({"url": "ftp://host"}, "url must begin with http"),
        ({"command": "a", "only": ["x", "x"]}, "only names a tool twice"),
        ({"command": "a", "prefix": "Up"}, "prefix"),
        ({"command": "a", "name": "two words"}, "name"),
        ({"command": "a", "timeout_s": 0}, "timeout_s"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        McpConfig.model_validate({"name": "one"} | settings)


def test_reading_a_recipe_starts_nothing_and_keeps_every_setting(tmp_path: Path) -> None:
    tool = {
        "type": "mcp",
        "name": "gone",
        "command": "no-such-program",
        "env": {"KEY": "$KEY"},
        "only": ["a"],
    }
    tree = {"environment": {"type": "tools", "tools": ["python", tool]}}
    (tmp_path / "recipe.toml").write_text(to_toml(tree))
    read = load_settings(Recipe, file=tmp_path / "recipe.toml")
    config = read.environment
    assert isinstance(config, ToolsConfig)
    assert config.tool_names() == ("python", "a")  # known from the recipe: no server is started
    again = tmp_path / "again.toml"
    again.write_text(to_toml(read.model_dump(mode="json")))
    assert load_settings(Recipe, file=again) == read
    with pytest.raises(ConfigError, match=r"environment\.tools\.0\.name: Field required"):
        load_settings(Recipe, file=None, sections={"environment": {"type": "tools", "tools": ["mcp"]}})


def test_the_prompt_contains_the_tools_of_the_server() -> None:
    config = ToolsConfig.model_validate({"tools": ["python", fake(only=["add", "shout"])]})
    assert ToolEnvironment.build(config).stop == ("</python>", "</add>", "</shout>", "</answer>")
    assert 'Write <add>{"a": 1, "b": 1}</add> for this: Do add. a (integer); b' in system_prompt(config)


def test_equal_names_of_two_servers_need_a_prefix() -> None:
    alike = [fake(only=["add"]), fake(name="others", only=["add", "shout"])]
    with pytest.raises(ConfigError, match=r"environment\.tools: .*each once: 'add' is there twice"):
        ToolEnvironment.build(ToolsConfig.model_validate({"tools": alike}))
    apart = [alike[0], alike[1].model_copy(update={"prefix": "other_"})]
    assert ToolsConfig.model_validate({"tools": apart}).tool_names() == ("add", "other_add", "other_shout")


def test_the_wait_for_other_episodes_follows_from_the_servers() -> None:
    tool = fake(num_servers=2, max_concurrent=4, timeout_s=10.0, start_timeout_s=30.0)
    config = ToolsConfig.model_validate({"tools": [tool]})
    assert config.waiting_s(8) == 15.0 + 30.0 and config.waiting_s(17) == 3 * 15.0 + 30.0


def test_a_script_is_found_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.tools.mcp.tool.search_folders", lambda: (tmp_path, HERE))
    assert fake(command=None, args=(), script="fake_server.py").script_path() == HERE / "fake_server.py"
    (tmp_path / "fake_server.py").write_text("")
    assert fake(command=None, args=(), script="fake_server.py").script_path() == tmp_path / "fake_server.py"


def listed(parameters: Any) -> Any:
    tool = SimpleNamespace(name="look", description="Look.", title=None, input_schema=parameters)
    settings = McpConfig.model_validate({"name": "one", **URL})
    return (
        select_tools(settings, server="s", version="1", tools={"look": tool})
        .tools["look"]
        .schema["parameters"]
    )


def test_a_schema_lists_its_arguments_wherever_the_server_declares_them() -> None:
    url = {"properties": {"url": {"type": "string"}}, "required": ["url"]}
    size = {"properties": {"size": {"type": "integer"}}, "required": ["size"]}
    both = {"url": {"type": "string"}, "size": {"type": "integer"}}
    found = listed({"type": "object", "oneOf": [url, size]})
    assert found == {"type": "object", "oneOf": [url, size], "properties": both}
    assert listed(found) == found
    found = listed({"$ref": "#/$defs/Url", "$defs": {"Url": url}})
    assert found == {"type": "object", "$defs": {"Url": url}, **url}
    found = listed({"type": "object", "allOf": [url, size]})
    assert (found["properties"], found["required"]) == (both, ["url", "size"])
    assert listed({"type": "object"}) == {"type": "object", "properties": {}, "additionalProperties": {}}
    assert "additionalProperties" not in listed({"type": "object", "properties": {}})


def test_a_schema_of_a_server_is_cleaned() -> None:
    schema = {"$schema": "x", "properties": {"a": True, "b": {"type": "string"}}, "required": None}
    assert listed(schema) == {"type": "object", "properties": {"a": {}, "b": {"type": "string"}}}
    assert listed({"properties": None}) == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"properties": [1]}, "its properties are no object"),
        ({"required": 5}, "required is no list of names"),
        ({"properties": {"a": {"type": ["integer", {}]}}}, "the type of 'a' is no name"),
    ],
)
def test_an_invalid_schema_is_refused_with_its_tool(parameters: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"server one: the schema of 'look' .* {message}: .* with only"):
        listed(parameters)
