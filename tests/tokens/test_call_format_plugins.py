"""Call formats as plug-ins: named in a recipe, recorded, checked by their contract."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.config import load_settings
from outrider.environments.agent.environment import AgentConfig
from outrider.errors import ConfigError
from outrider.plugins.listing import plugin_digests
from outrider.testing import check_call_format
from outrider.tokens import ChatRenderer
from outrider.tokens.call_formats import CALL_FORMATS, Hermes, get_call_format, read_turn
from outrider.tokens.tool_calls import ParsedCalls
from outrider.training.settings import RunSettings
from outrider.types import Message, ToolCall, ToolSchema
from tests.conversations import TOOLS
from tests.tokens.family_templates import FAMILIES, byte_tokenizer

RECIPE = Path(__file__).parents[2] / "recipes" / "tool-reasoning.toml"
MINE = "tests.tokens.test_call_format_plugins:Mistral"


class Mistral(Hermes):
    """Hermes with other tags."""

    markers = ("[CALL]", "[/CALL]")

    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        return super().read(text.replace("[CALL]", "<tool_call>").replace("[/CALL]", "</tool_call>"), tools)

    def write(self, calls: Sequence[ToolCall]) -> str:
        return re.sub("</tool_call>", "[/CALL]", re.sub("<tool_call>", "[CALL]", super().write(calls)))


class Raises(Hermes):
    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        return super().read(text[: text.index("<tool_call>") + 10**6], tools)


class Forgets(Hermes):
    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        parsed = super().read(text, tools)
        return ParsedCalls(content=parsed.content, calls=parsed.calls[:1], problems=parsed.problems)


class NoFormat:
    markers = ()
    read = write = str


@pytest.mark.parametrize("name", [*CALL_FORMATS, MINE])
def test_the_contract_of_a_plug_in(name: str) -> None:
    check_call_format(get_call_format(name))


@pytest.mark.parametrize(("form", "reason"), [(Raises(), "read raises"), (Forgets(), "is parsed as")])
def test_the_contract_check_finds_a_broken_format(form: Hermes, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        check_call_format(form)


def test_a_recipe_names_a_format_and_the_run_records_its_code() -> None:
    settings = load_settings(RunSettings, file=RECIPE, overrides=[f"environment.protocol={MINE}"])
    assert settings.environment.call_format == MINE
    assert "plug-in environment.protocol" in plugin_digests(settings)
    assert AgentConfig(function="m:f", tool_calls=MINE).call_format == MINE


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "hermess",
            "environment.protocol: there is no 'hermess', did you mean hermes? (one of tags, hermes,",
        ),
        (
            "tests.tokens.test_call_format_plugins:Mistrall",
            "tests.tokens.test_call_format_plugins .* has no 'Mistrall', did you mean Mistral?",
        ),
        (
            "tests.tokens.test_call_format_plugins:TOOLS",
            "tests.tokens.test_call_format_plugins:TOOLS is no class",
        ),
    ],
)
def test_an_unknown_name_is_an_error_of_one_line(name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings(RunSettings, file=RECIPE, overrides=[f"environment.protocol={name}"])
    assert re.search(reason.replace("(", r"\(").replace("?", r"\?"), str(error.value)), error.value


def test_a_class_that_is_no_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no call format: it must have markers, read, write"):
        get_call_format("tests.tokens.test_call_format_plugins:NoFormat")


def test_thinking_tags_inside_a_call_of_a_plug_in_are_its_text() -> None:
    form = get_call_format(MINE)
    call = ToolCall(name="lookup", arguments={"key": "a</think>b"}, call_id="call00000")
    turn = read_turn(form.write([call]), form, TOOLS)
    assert (turn.tool_calls, turn.reasoning, turn.problems) == ((call,), "", ())


def test_a_renderer_parses_and_describes_tools_by_the_format() -> None:
    family = FAMILIES["smollm2"]
    renderer = ChatRenderer(byte_tokenizer(family), call_format=MINE, observations=("tool",))
    ids = renderer.tokenizer.encode('[CALL]{"name": "lookup", "arguments": {"key": "a"}}[/CALL]')
    [call] = renderer.parse(ids, tools=TOOLS).tool_calls
    assert (call.name, call.arguments) == ("lookup", {"key": "a"})
    shown = renderer.whole_text([Message(role="user", content="q")], TOOLS)
    assert "You may call these functions" in shown
