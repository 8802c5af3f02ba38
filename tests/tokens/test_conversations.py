"""Appended ids against the whole conversation rendered at once, for the templates of many model families.

Where a template cannot render a conversation as it was appended, the check at load has told so: nothing
differs in silence.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

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
    difference,
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
    ("gpt-oss", "user"): "user message behind an answer",
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
"""Families that write system text and tools into the last user message, wherever that is."""
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
    """The orders of the load check that a conversation holds."""
    found = {"a call, then its result"} if any(m.role == "tool" for m in messages) else set()
    last_user = max(number for number, m in enumerate(messages) if m.role == "user")
    first = next(number for number, m in enumerate(messages) if m.role == "assistant")
    for number, said in enumerate(messages):
        if said.role != "assistant":
            continue
        behind = messages[number + 1]
        thinks = bool(said.reasoning)
        if behind.role == "user":
            found.add("thinking, then a user message" if thinks else "an answer, then a user message")
            if said.content != said.content.strip():
                found.add("blanks around an answer")
            if number + 2 < len(messages) and messages[number + 2].role == "user":
                found.add("two user messages in a row")
            continue
        found |= {"words beside a call"} if said.content else set()
        found |= {"several calls, then their results"} if len(said.tool_calls) > 1 else set()
        found |= {"a result, another call, then its result"} if number > first else set()
        if thinks:
            found.add("thinking and a call, then its result")
            found |= {"a result, thinking, then another result"} if number > first else set()
        if number < last_user:
            found.add(
                "thinking, a result, an answer, then a user message"
                if thinks
                else "a call, its result, an answer, then a user message"
            )
    return found


def bridged(
    renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[ToolSchema]
) -> Iterator[tuple[str, list[Message]]]:
    """The text of every bridge, and the messages up to its end."""
    first = next(number for number, m in enumerate(messages) if m.role == "assistant")
    told, rest = list(messages[:first]), list(messages[first:])
    ids = list(renderer.prompt(told, tools))
    while rest:
        said = rest.pop(0)
        text = turn_text(renderer, told, said, tools, is_opened=bool(renderer.opened(ids)))
        ids += renderer.template.encode(text)
        num_answers = next((n for n, m in enumerate(rest) if m.role == "assistant"), len(rest))
        answers, rest = rest[:num_answers], rest[num_answers:]
        bridge = renderer.bridge(ids, answers)
        ids += bridge
        told += [said, *answers]
        yield decode_text(renderer.tokenizer, bridge, skip_special_tokens=False), list(told)


def check_bridges(
    name: str, renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[ToolSchema]
) -> int:
    """Whatever becomes of earlier turns: what follows the last one stands at the end of the whole, to the
    letter. Returns how many bridges were compared.
    """
    num = 0
    for text, told in bridged(renderer, messages, tools):
        has_more = bool(tools) or told[0].role == "system"
        if has_more and told[-1].role == "user" and name in MOVES_TO_LAST_USER:
            continue
        try:
            whole = renderer.template.encode(renderer.whole_text(told, tools))
        except ModelError:
            continue  # refused at once, as the check has told
        at_once = decode_text(renderer.tokenizer, whole, skip_special_tokens=False)
        assert at_once.endswith(text), (name, told, text, at_once[-len(text) - 40 :])
        num += 1
    return num


def check_all(name: str, observations: Sequence[Role], *, num: int) -> Counter[str]:
    """How many conversations were the same at once, and how many differed as was told."""
    counted: Counter[str] = Counter()
    num_compared = 0
    renderer = renderer_of(name, observations)
    told = check_template(renderer, observations)
    tools = TOOLS if "tool" in observations else ()
    generator = Generator(stream(0, f"conversations {name} {observations}"), observations)
    for _ in range(num):
        messages = generator.conversation()
        appended = append(renderer, messages, tools)
        where = difference(renderer, appended.token_ids, appended.messages, tools)
        expected = orders_in(messages) & set(told.differs)
        assert not where or expected, (name, messages, where)
        counted["differs, as told" if where else "same"] += 1
        num_compared += check_bridges(name, renderer, messages, tools)
    assert num_compared > 0
    return counted


def is_refused(name: str, observations: Sequence[Role]) -> bool:
    return any((name, role) in REFUSED for role in observations)


PLAYED = [(name, roles) for name in FAMILIES for roles in OBSERVATIONS if not is_refused(name, roles)]


# Of each family the most that it takes; the other roles alone are slow.
MOST = dict(PLAYED)
CHOSEN = [one if MOST[one[0]] == one[1] else pytest.param(*one, marks=pytest.mark.slow) for one in PLAYED]


@pytest.mark.parametrize(("name", "observations"), CHOSEN)
def test_appended_ids_are_those_of_the_whole_or_the_check_has_told(
    name: str, observations: tuple[Role, ...]
) -> None:
    counted = check_all(name, observations, num=2)
    assert counted.total() == 2


@pytest.mark.parametrize("name", ["qwen3", "mistral", "deepseek-r1"])
def test_a_bridge_that_loses_letters_is_noticed_where_every_order_differs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ChatRenderer.bridge

    def losing(self: ChatRenderer, previous: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        ids = whole(self, previous, messages)
        lost = self.template.encode("&%")
        return tuple(one for one in ids if one not in lost)

    monkeypatch.setattr(ChatRenderer, "bridge", losing)
    with pytest.raises(AssertionError):
        check_all(name, ("user",), num=20)


@pytest.mark.parametrize(("name", "role"), REFUSED)
def test_what_cannot_be_bridged_is_refused_at_load_with_template_and_role(name: str, role: Role) -> None:
    with pytest.raises(ModelError, match=f"the chat template of {FAMILIES[name].file} refuses a") as found:
        check_template(renderer_of(name, (role,)), (role,))
    found.match(REFUSED[name, role])


@pytest.mark.parametrize("name", EXACT)
def test_families_without_habits_differ_in_nothing(name: str) -> None:
    found = check_template(renderer_of(name, ("tool", "user")), ("tool", "user"))
    assert found.differs == {}


def test_the_check_tells_what_servers_would_see_differently() -> None:
    def told(name: str, *roles: Role) -> LoadCheck:
        return check_template(renderer_of(name, roles), roles)

    thinking = told("qwen3, always thinking", "user")
    assert "thinking, then a user message" in thinking.differs
    assert "at once" in thinking.notes()[0] and "qwen3_thinking" in thinking.notes()[0]
    assert "at once it is refused" in told("llama3", "tool").differs["several calls, then their results"]
    # a result that is not the last message gets one line break more
    assert "a result, another call, then its result" in told("hermes", "tool").differs
    assert "channel" in told("gpt-oss", "tool").unread
    assert told("smollm2", "tool").hides_tools and not told("qwen2.5", "tool").hides_tools
    assert not told("llama3", "tool").writes_date


@pytest.mark.parametrize("name", FAMILIES)
def test_the_form_that_a_template_writes_is_found(name: str) -> None:
    renderer = renderer_of(name, ("tool",))
    read = matching_formats(renderer)
    if not written_call(renderer) or name in OWN_FORMS:
        assert read == []
    else:
        assert read == [FAMILIES[name].call_format]


def test_a_run_with_another_form_is_told_which_one_reads_the_calls() -> None:
    renderer = ChatRenderer(
        byte_tokenizer(FAMILIES["qwen3-coder"]), call_format="pythonic", observations=("tool",)
    )
    [line] = check_template(renderer, ("tool",)).notes()
    assert "<function=lookup>" in line and line.endswith("environment.protocol = qwen3_coder does")


def test_a_template_that_reads_the_clock_is_told() -> None:
    family = FAMILIES["gpt-oss"]
    renderer = ChatRenderer(byte_tokenizer(family), observations=("tool",), call_format="hermes")
    found = check_template(renderer, ("tool",))
    assert found.writes_date and any("date_string" in line for line in found.notes())


def test_the_template_of_the_packaged_model_differs_in_nothing() -> None:
    """With its own tokenizer, whose tokens span several characters."""
    from transformers import AutoTokenizer

    renderer = ChatRenderer(
        AutoTokenizer.from_pretrained(resolve_model("smollm2-135m-instruct")),
        call_format="hermes",
        observations=("tool", "user"),
    )
    found = check_template(renderer, ("tool", "user"))
    assert found.differs == {} and found.hides_tools
    generator = Generator(stream(0, "conversations packaged"), ("tool", "user"))
    for _ in range(20):
        messages = generator.conversation()
        appended = append(renderer, messages, TOOLS)
        assert difference(renderer, appended.token_ids, appended.messages, TOOLS) == ""
