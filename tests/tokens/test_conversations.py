"""Appended ids against the whole conversation rendered at once, for the templates of many model families.

If a template renders a conversation differently, the check at load has reported it.
"""

from collections.abc import Sequence

import pytest

from outrider.engines.local.model import resolve_model
from outrider.errors import ModelError
from outrider.seeding import stream
from outrider.tokens import ChatRenderer
from outrider.tokens.template import decode_text
from outrider.tokens.template_check import (
    LoadCheck,
    append,
    check_template,
    find_difference,
    matching_formats,
    turn_text,
    written_call,
)
from outrider.types import Message, Role, ToolSchema
from tests.conversations import TOOLS, Generator
from tests.tokens.family_templates import FAMILIES, byte_tokenizer, tokenizer_of

OBSERVATIONS: tuple[tuple[Role, ...], ...] = (("user",), ("tool",), ("tool", "user"))
REFUSED = {
    ("gemma", "tool"): "tool message .* must alternate",
    ("phi3", "tool"): "tool message .* drops its text",
    ("phi4", "tool"): "tool message .* drops its text",
    ("gpt-oss", "user"): "user message after an answer",
    ("llama2", "tool"): "tool message .* must alternate",
    ("mistral v1", "tool"): "tool message .* must alternate",
    ("phi3, sentencepiece", "tool"): "tool message .* drops its text",
    ("words", "tool"): "tool message .* drops its text",
    ("gemma2", "tool"): "tool message .* must alternate",
    ("gemma3", "tool"): "tool message .* must alternate",
}
OWN_FORMS = ("deepseek-r1", "gpt-oss", "glm4", "glm4.5", "glm4.5, no thinking", "command-r")
"""Families whose calls no form that is built in reads."""
MOVES_TO_LAST_USER = ("mistral", "mistral v3")
"""Families that write system text and tools into the last user message, at any position."""
EXACT = ("qwen2.5", "qwen3-coder", "lfm2", "smollm2", "phi4-mini")
"""Families that render every conversation of these tests as it is appended."""


def renderer_of(name: str, observations: Sequence[Role]) -> ChatRenderer:
    family = FAMILIES[name]
    return ChatRenderer(
        tokenizer_of(family),
        template_kwargs=family.variables,
        call_format=family.call_format,
        observations=observations,
    )


def orders_in(messages: Sequence[Message]) -> set[str]:
    """The orders of the load check that occur in a conversation."""
    orders = {"a call, then its result"} if any(m.role == "tool" for m in messages) else set()
    last_user = max(number for number, m in enumerate(messages) if m.role == "user")
    first = next(number for number, m in enumerate(messages) if m.role == "assistant")
    for number, turn in enumerate(messages):
        if turn.role != "assistant":
            continue
        following = messages[number + 1]
        thinks = bool(turn.reasoning)
        if following.role == "user":
            orders.add("thinking, then a user message" if thinks else "an answer, then a user message")
            if turn.content != turn.content.strip():
                orders.add("blanks around an answer")
            if number + 2 < len(messages) and messages[number + 2].role == "user":
                orders.add("two user messages in a row")
            continue
        orders |= {"text and a call, then its result"} if turn.content else set()
        orders |= {"several calls, then their results"} if len(turn.tool_calls) > 1 else set()
        orders |= {"a result, another call, then its result"} if number > first else set()
        if thinks:
            orders.add("thinking and a call, then its result")
            orders |= {"a result, thinking, then another result"} if number > first else set()
        if number < last_user:
            orders.add(
                "thinking, a result, an answer, then a user message"
                if thinks
                else "a call, its result, an answer, then a user message"
            )
    return orders


def check_bridges(
    name: str, renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[ToolSchema]
) -> int:
    """Check that the text after each turn is the end of the whole text; return the number of checks."""
    num = 0
    first = next(number for number, m in enumerate(messages) if m.role == "assistant")
    history, rest = list(messages[:first]), list(messages[first:])
    ids = list(renderer.prompt(history, tools))
    while rest:
        turn = rest.pop(0)
        text = turn_text(renderer, history, turn, tools, is_opened=bool(renderer.opened(ids)))
        ids += renderer.template.encode(text)
        num_answers = next((n for n, m in enumerate(rest) if m.role == "assistant"), len(rest))
        answers, rest = rest[:num_answers], rest[num_answers:]
        bridge = renderer.bridge(ids, answers)
        ids += bridge
        history += [turn, *answers]
        has_more = bool(tools) or history[0].role == "system"
        if has_more and history[-1].role == "user" and name in MOVES_TO_LAST_USER:
            continue
        try:
            whole = renderer.template.encode(renderer.whole_text(history, tools))
        except ModelError:
            continue  # refused at once, as reported by the check
        bridge_text, whole_text = (
            decode_text(renderer.tokenizer, ids_, skip_special_tokens=False) for ids_ in (bridge, whole)
        )
        assert whole_text.endswith(bridge_text), (name, history, bridge_text)
        num += 1
    return num


def check_all(name: str, observations: Sequence[Role], *, num: int) -> None:
    """Generated conversations are the same at once, or they differ as the check at load has reported."""
    num_compared = 0
    renderer = renderer_of(name, observations)
    check = check_template(renderer, observations)
    tools = TOOLS if "tool" in observations else ()
    generator = Generator(stream(0, f"conversations {name} {observations}"), observations)
    for _ in range(num):
        messages = generator.conversation()
        difference = find_difference(renderer, *append(renderer, messages, tools), tools)
        assert not difference or orders_in(messages) & set(check.differs), (name, messages, difference)
        num_compared += check_bridges(name, renderer, messages, tools)
    assert num_compared > 0


def is_refused(name: str, observations: Sequence[Role]) -> bool:
    return any((name, role) in REFUSED for role in observations)


TEMPLATES = [(name, roles) for name in FAMILIES for roles in OBSERVATIONS if not is_refused(name, roles)]
# Of each family all roles that it supports; fewer roles are slow tests.
ALL_ROLES = dict(TEMPLATES)
CASES = [
    item if ALL_ROLES[item[0]] == item[1] else pytest.param(*item, marks=pytest.mark.slow)
    for item in TEMPLATES
]


@pytest.mark.parametrize(("name", "observations"), CASES)
def test_appended_ids_equal_the_whole_or_the_check_reports_it(
    name: str, observations: tuple[Role, ...]
) -> None:
    check_all(name, observations, num=2)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "deepseek-r1"])
def test_these_tests_fail_if_a_bridge_loses_characters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = ChatRenderer.bridge

    def losing(self: ChatRenderer, previous: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        ids = bridge(self, previous, messages)
        lost = self.template.encode("&%")
        return tuple(item for item in ids if item not in lost)

    monkeypatch.setattr(ChatRenderer, "bridge", losing)
    with pytest.raises(AssertionError):
        check_all(name, ("user",), num=20)


@pytest.mark.parametrize(("name", "role"), REFUSED)
def test_roles_that_a_template_refuses_are_errors_at_load(name: str, role: Role) -> None:
    with pytest.raises(ModelError, match=f"the chat template of {FAMILIES[name].file} refuses a") as error:
        check_template(renderer_of(name, (role,)), (role,))
    error.match(REFUSED[name, role])


@pytest.mark.parametrize("name", EXACT)
def test_families_that_render_all_orders_as_appended(name: str) -> None:
    check = check_template(renderer_of(name, ("tool", "user")), ("tool", "user"))
    assert check.differs == {}


def test_the_check_reports_differences_to_a_server() -> None:
    def check(name: str, *roles: Role) -> LoadCheck:
        return check_template(renderer_of(name, roles), roles)

    thinking = check("qwen3, always thinking", "user")
    assert "thinking, then a user message" in thinking.differs
    assert "at once" in thinking.notes()[0] and "qwen3_thinking" in thinking.notes()[0]
    assert "at once it is refused" in check("llama3", "tool").differs["several calls, then their results"]
    # a result that is not the last message gets one line break more
    assert "a result, another call, then its result" in check("hermes", "tool").differs
    assert "channel" in check("gpt-oss", "tool").unread
    assert check("smollm2", "tool").hides_tools and not check("qwen2.5", "tool").hides_tools
    assert not check("llama3", "tool").writes_date


@pytest.mark.parametrize("name", FAMILIES)
def test_the_call_format_of_a_template_is_found(name: str) -> None:
    renderer = renderer_of(name, ("tool",))
    read = matching_formats(renderer)
    if not written_call(renderer) or name in OWN_FORMS:
        assert read == []
    else:
        assert read == [FAMILIES[name].call_format]


def test_a_wrong_call_format_is_reported_with_the_right_one() -> None:
    renderer = ChatRenderer(
        byte_tokenizer(FAMILIES["qwen3-coder"]), call_format="pythonic", observations=("tool",)
    )
    [line] = check_template(renderer, ("tool",)).notes()
    assert "<function=lookup>" in line and line.endswith("set environment.protocol = qwen3_coder")


def test_a_template_that_writes_the_date_is_reported() -> None:
    family = FAMILIES["gpt-oss"]
    renderer = ChatRenderer(byte_tokenizer(family), observations=("tool",), call_format="hermes")
    check = check_template(renderer, ("tool",))
    assert check.writes_date and any("date_string" in line for line in check.notes())


def test_the_packaged_model_renders_conversations_as_appended() -> None:
    """With its own tokenizer, whose tokens span several characters."""
    from transformers import AutoTokenizer

    renderer = ChatRenderer(
        AutoTokenizer.from_pretrained(resolve_model("smollm2-135m-instruct")),
        call_format="hermes",
        observations=("tool", "user"),
    )
    check = check_template(renderer, ("tool", "user"))
    assert check.differs == {} and check.hides_tools
    generator = Generator(stream(0, "conversations packaged"), ("tool", "user"))
    for _ in range(20):
        messages = generator.conversation()
        assert find_difference(renderer, *append(renderer, messages, TOOLS), TOOLS) == ""
