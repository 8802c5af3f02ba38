"""Text and turns in the tokenizers and templates of model families: the ids of a cold start, of sampled turns
and of a conversation rendered at once are the same, or the check at load has reported the difference.
"""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from outrider.engines.base import FinishReason, Generation, Request
from outrider.engines.local.sampling import StopStrings
from outrider.engines.scripted import ScriptedEngine
from outrider.errors import ModelError
from outrider.rollout.episode import truncate_text
from outrider.rollout.external_agent import token_bytes
from outrider.seeding import stream
from outrider.tokens import ChatRenderer
from outrider.tokens.call_formats import CALL_FORMATS, convert_calls
from outrider.tokens.template import Continuation
from outrider.tokens.template_check import check_template
from outrider.types import Message, Role, ToolCall, ToolSchema
from tests.conversations import TOOLS, Generator
from tests.tokens.family_templates import FAMILIES, Family, tokenizer_of

TOKENIZERS = {name: tokenizer_of(family) for name, family in FAMILIES.items()}
SENTENCEPIECE = [name for name, family in FAMILIES.items() if family.vocabulary != "bytes"]
# Without line breaks at the start (some special tokens take them) and without what reads as a marker.
TEXT = st.text(st.sampled_from("ab theTheInIt .,<>/:é日🙂\n"), min_size=1, max_size=20).filter(
    lambda text: not text.startswith("\n")
)


def renderer_of(name: str, observations: Sequence[Role]) -> ChatRenderer:
    family = FAMILIES[name]
    return ChatRenderer(
        TOKENIZERS[name],
        template_kwargs=family.variables,
        call_format=family.call_format,
        observations=observations,
    )


def spelled(name: str, ids: Sequence[int]) -> str:
    """The exact text of ids in the middle of a text."""
    return Continuation(TOKENIZERS[name]).decode(ids)


def generate(engine: ScriptedEngine, ids: Sequence[int], *stop: str, max_tokens: int = 10_000) -> Generation:
    request = Request(request_id="t/0000/000", token_ids=tuple(ids), max_tokens=max_tokens, seed=0, stop=stop)
    [turn] = engine.generate([request])
    return turn


# Text in the middle


@pytest.mark.parametrize("name", SENTENCEPIECE)
@settings(max_examples=8)
@given(before=TEXT, text=TEXT)
def test_text_after_text_gains_and_loses_no_blank(name: str, before: str, text: str) -> None:
    continuation = Continuation(TOKENIZERS[name])
    first = continuation.encode(before)
    ids = continuation.encode(text, first)
    is_words = FAMILIES[name].vocabulary == "always"  # of several blanks it keeps what it can
    if not is_words:
        assert continuation.decode(ids) == text
        assert continuation.decode([*first, *ids]) == before + text
    assert ids == continuation.encode(text)


@pytest.mark.parametrize("name", SENTENCEPIECE)
@settings(max_examples=8)
@given(text=st.text(st.sampled_from("ab theTheInIt .,<>/:"), min_size=1, max_size=20))
def test_texts_of_single_tokens_are_the_whole_text(name: str, text: str) -> None:
    continuation = Continuation(TOKENIZERS[name])
    ids = continuation.encode(text)
    assert "".join(continuation.decode([item]) for item in ids) == continuation.decode(ids)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=4)
@given(text=TEXT)
def test_text_after_a_marker_is_encoded_as_in_the_whole(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    marker = FAMILIES[name].markers[0]
    [marker_id] = tokenizer.encode(marker, add_special_tokens=False)
    whole = tokenizer.encode(marker + text, add_special_tokens=False)
    assert [marker_id, *Continuation(tokenizer).encode(text, [marker_id])] == whole


@pytest.mark.parametrize("name", SENTENCEPIECE)
@pytest.mark.parametrize("stop", ["Answer: ", " the", "</it> ", ".\n", " "])
def test_stop_strings_with_blanks_at_their_ends_stop(name: str, stop: str) -> None:
    tokenizer = TOKENIZERS[name]
    stops = StopStrings(tokenizer, len(tokenizer))
    ids = Continuation(tokenizer).encode(f"It is{stop}b")
    ends = [n for n in range(1, len(ids) + 1) if stops.completed(ids[:n], (stop,))]
    assert ends and stop in spelled(name, ids[: ends[0]])
    assert stop not in spelled(name, ids[: ends[0] - 1])


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_a_truncated_text_keeps_its_beginning(name: str) -> None:
    renderer = ChatRenderer(TOKENIZERS[name])
    cut = truncate_text("the " * 60, 30, renderer=renderer)
    assert cut.startswith("the the ") and "[...]" in cut
    assert truncate_text(" the " * 60, 30, renderer=renderer).startswith(" the")


# Turns


def differs(name: str, roles: tuple[Role, ...]) -> bool:
    """Whether the check at load reports a difference or refuses the family."""
    try:
        result = check_template(renderer_of(name, roles), roles)
    except ModelError:
        return True
    return bool(result.differs or result.demonstrated)


def conversations(name: str, num: int) -> list[list[Message]]:
    """Conversations of questions, answers without thinking, and observations."""
    generator = Generator(stream(0, f"families {name}"), ("user",))
    result: list[list[Message]] = []
    while len(result) < num:
        messages = [m for m in generator.conversation() if not m.tool_calls]
        plain = [
            Message(role=m.role, content=m.content.strip() if m.role == "assistant" else m.content)
            for m in messages
        ]
        result.append(plain)
    return result


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(item, marks=[pytest.mark.slow] if number % 3 else [])
        for number, item in enumerate(FAMILIES)
    ],
)
def test_a_cold_start_trains_on_the_ids_of_the_rendered_conversation(name: str) -> None:
    """Turn by turn through the engine that plays experts, and at once."""
    if differs(name, ("user",)):
        pytest.skip("the check at load reports a difference")
    renderer = renderer_of(name, ("user",))
    for messages in conversations(name, 12):
        turns = [m.content for m in messages if m.role == "assistant"][::-1]
        engine = ScriptedEngine(
            tokenizer=renderer.tokenizer,
            script=lambda request, text, turns=turns: turns.pop(),
            renderer=renderer,
        )
        first = next(n for n, m in enumerate(messages) if m.role == "assistant")
        ids = list(renderer.prompt(messages[:first]))
        for number, message in enumerate(messages):
            if number < first:
                continue
            if message.role == "assistant":
                turn = generate(engine, ids)
                assert turn.finish_reason is FinishReason.EOS
                assert renderer.turn_text(turn.token_ids, context=ids) == message.content
                ids += turn.token_ids
                answers: list[Message] = []
                for other in messages[number + 1 :]:
                    if other.role == "assistant":
                        break
                    answers.append(other)
                ids += renderer.bridge(ids, answers)
                whole = renderer.template.encode(renderer.whole_text(messages[: number + 1 + len(answers)]))
                assert spelled(name, ids) == spelled(name, whole)
                if FAMILIES[name].vocabulary == "bytes":
                    assert ids == whole


@pytest.mark.parametrize("name", [name for name in FAMILIES if differs(name, ("user",))])
def test_differences_are_reported_in_one_line_each(name: str) -> None:
    try:
        lines = check_template(renderer_of(name, ("user",)), ("user",)).notes()
    except ModelError as error:
        lines = [str(error)]
    assert lines and all("\n" not in line and FAMILIES[name].file in line for line in lines)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("answer", ["The end.", " two  blanks", "a\n\nb"])
def test_inline_results_are_unchanged(name: str, answer: str) -> None:
    renderer = renderer_of(name, ("inline",))
    engine = ScriptedEngine(
        tokenizer=renderer.tokenizer, script=lambda request, text: f"{answer}</search>", renderer=renderer
    )
    prompt = renderer.prompt([Message(role="user", content="Who?")])
    turn = generate(engine, prompt, "</search>")
    assert turn.finish_reason is FinishReason.STOP
    context = (*prompt, *turn.token_ids)
    ids = renderer.bridge(context, [Message(role="inline", content="<result>x</result>")])
    assert spelled(name, ids).removeprefix(" " if FAMILIES[name].vocabulary == "always" else "") == (
        "<result>x</result>"
    )
    again = generate(engine, (*context, *ids), "</search>")
    if FAMILIES[name].vocabulary != "always":
        assert spelled(name, again.token_ids) == f"{answer}</search>"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_ends_once(name: str) -> None:
    """However the expert's text or the policy ends it."""
    renderer = renderer_of(name, ("inline",))
    tokenizer = renderer.tokenizer
    prompt = renderer.prompt([Message(role="user", content="Who?")])
    ends = {tokenizer.eos_token_id, *renderer.closing.token_ids}
    spelling = tokenizer.convert_ids_to_tokens(renderer.closing.token_id)
    for text in ("It is.", f"It is.{spelling}", f"It is.{spelling}{spelling}\n", f"It{spelling} is."):
        engine = ScriptedEngine(
            tokenizer=tokenizer, script=lambda request, context, text=text: text, renderer=renderer
        )
        turn = generate(engine, prompt)
        assert [item in ends for item in turn.token_ids] == [False] * (len(turn.token_ids) - 1) + [True]
    written = [*prompt, *Continuation(tokenizer).encode("It is.", prompt), tokenizer.eos_token_id]
    try:
        bridge = ChatRenderer(tokenizer, template_kwargs=FAMILIES[name].variables).bridge(
            written, [Message(role="user", content="Why?")]
        )
    except ModelError:
        return
    own_end = renderer.closing.token_id
    assert not renderer.closing.next_roles or bridge.count(own_end) == 1
    assert renderer.closing.next_roles or own_end not in bridge[: len(renderer.end_of_turn)]


OPENED = [
    name for name in FAMILIES if renderer_of(name, ()).opened(renderer_of(name, ()).opening)
]  # their templates open a block of thinking


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("It is.", "", "It is."),
        ("<think>So</think>It is.", "So", "It is."),
        ("So</think>It is.", "So", "It is."),
    ],
)
def test_a_demonstration_after_opened_thinking_is_an_answer(
    name: str, text: str, thought: str, answer: str
) -> None:
    renderer = renderer_of(name, ("user",))
    prompt = renderer.prompt([Message(role="user", content="Who?")])
    ids = renderer.turn_ids(renderer.demonstration(text, prompt), prompt, is_closed=True)
    read = renderer.parse(ids, context=prompt)
    assert (read.reasoning, read.content, read.problems) == (thought, answer, ())


# Templates that write nothing after an answer


@pytest.mark.parametrize("name", ["glm4", "glm4.5", "glm4.5, no thinking"])
@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize(("role", "marker"), [("user", "<|user|>"), ("tool", "<|observation|>")])
def test_the_marker_of_the_next_role_occurs_once(name: str, written: bool, role: Role, marker: str) -> None:
    renderer = renderer_of(name, (role,))
    tokenizer = TOKENIZERS[name]
    marker_id = tokenizer.convert_tokens_to_ids(marker)
    tools: Sequence[ToolSchema] = TOOLS if role == "tool" else ()
    ids = list(renderer.prompt([Message(role="user", content="Sky?")], tools))
    ids += tokenizer.encode("\nBlue.", add_special_tokens=False) + [marker_id] * written
    answer = Message(
        role=role, content="Night?", tool_call_id="call00000" * (role == "tool"), tool_name="lookup"
    )
    text = tokenizer.decode([*ids, *renderer.bridge(ids, [answer])]).split("Blue.")[1]
    assert text.startswith(f"{marker}\n") and text.count(marker) == 1
    assert marker_id in renderer.closing.token_ids
    assert renderer.turn_text([*tokenizer.encode("Blue."), marker_id], context=ids) == "Blue."


def test_calls_and_answers_end_with_the_marker_of_the_next_role() -> None:
    renderer = renderer_of("glm4.5, no thinking", ("tool",))
    prompt = renderer.prompt([Message(role="user", content="Sky?")], TOOLS)
    call = '<tool_call>\n{"name": "lookup", "arguments": {"key": "k"}}\n</tool_call>'
    for text, end in ((call, "<|observation|>"), ("Blue.", "<|user|>")):
        engine = ScriptedEngine(
            tokenizer=renderer.tokenizer, script=lambda request, context, text=text: text, renderer=renderer
        )
        turn = generate(engine, prompt)
        assert renderer.tokenizer.convert_ids_to_tokens(turn.token_ids[-1]) == end


# Several templates


TWO: dict[str, str] = {
    "default": "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "tool_use": "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "rag": "{{ raise_exception('no documents') }}",
}


def tokenizer_with(templates: object) -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_of(Family(file="qwen2_5", eos="<|im_end|>"))
    tokenizer.chat_template = templates
    return tokenizer


@pytest.mark.parametrize("templates", [TWO, [{"name": name, "template": text} for name, text in TWO.items()]])
def test_conversations_with_tools_use_the_template_tool_use(templates: object) -> None:
    tokenizer = tokenizer_with(templates)
    renderer = ChatRenderer(tokenizer, observations=("tool",), call_format="hermes")
    question, result = Message(role="user", content="q"), Message(role="tool", content="r")
    ids = list(renderer.prompt([question], TOOLS))
    assert tokenizer.decode(ids).endswith("<user>q<|im_end|>\n<assistant>")
    assert tokenizer.decode(renderer.bridge(ids, [result])) == "<|im_end|>\n<tool>r<|im_end|>\n<assistant>"
    assert tokenizer.decode(renderer.bridge(ids, [question])) == "<|im_end|>\n<user>q<|im_end|>\n<assistant>"
    assert tokenizer.decode(renderer.prompt([question])) == "[user]q<|im_end|>\n[assistant]"
    plain = ChatRenderer(tokenizer, observations=("user",), call_format="hermes")
    assert tokenizer.decode(plain.prompt([question])) == "[user]q<|im_end|>\n[assistant]"
    assert tokenizer.decode(plain.bridge(ids, [question])) == "<|im_end|>\n[user]q<|im_end|>\n[assistant]"
    assert tokenizer.decode(plain.bridge(ids, [result])).startswith("<|im_end|>\n<tool>r")
    for checked, roles in ((renderer, ("tool",)), (plain, ("user",))):
        lines = check_template(checked, roles).notes()
        assert any("default, rag, tool_use: tool_use renders conversations with tools" in x for x in lines)


def test_settings_may_choose_the_template() -> None:
    tokenizer = tokenizer_with(TWO)
    renderer = ChatRenderer(tokenizer, template_kwargs={"chat_template": "tool_use"})
    question = Message(role="user", content="q")
    assert tokenizer.decode(renderer.prompt([question])) == "<user>q<|im_end|>\n<assistant>"
    assert check_template(renderer, ("user",)).templates == ()


def test_templates_without_a_default_are_refused() -> None:
    with pytest.raises(ModelError, match=r"a, b and no default: name one in model\.template_kwargs") as error:
        ChatRenderer(tokenizer_with({"a": TWO["default"], "b": TWO["tool_use"]}))
    assert "\n" not in str(error.value)


def test_a_template_without_an_end_of_turn_is_reported() -> None:
    tokenizer = tokenizer_of(Family(file="qwen2_5", eos="<|endoftext|>"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    renderer = ChatRenderer(tokenizer)
    lines = check_template(renderer, ("user",)).notes()
    assert any("turns end with <|endoftext|>" in line for line in lines)


# White space around an answer


@pytest.mark.parametrize(
    "name", ["llama2", "llama3", "llama3.0", "gemma3", "mistral v1", "mistral v3", "glm4"]
)
@pytest.mark.parametrize("answer", ["The end.\n", " The end.", "\n\nThe end. \n", "  b"])
def test_a_demonstration_has_the_white_space_that_the_template_writes(name: str, answer: str) -> None:
    """Imported answers often end with a line break: some templates trim them, others keep it."""
    renderer = renderer_of(name, ("user",))
    question, written = Message(role="user", content="Who?"), Message(role="assistant", content=answer)
    prompt = renderer.prompt([question])
    ids = [*prompt, *renderer.turn_ids(renderer.demonstration(answer, prompt), prompt, is_closed=True)]
    ids += renderer.bridge(ids, [question])
    assert ids == list(renderer.template.encode(renderer.whole_text([question, written, question])))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("answer", ["The end.", "  b", "\u2603 It"])
def test_the_bytes_of_a_sampled_turn_are_those_of_its_visible_text(name: str, answer: str) -> None:
    """With white space of the template before an answer, and of SentencePiece before a word."""
    renderer = renderer_of(name, ())
    prompt = renderer.prompt([Message(role="user", content="Who?")])
    ids = renderer.turn_ids(answer, prompt, is_closed=True)
    written = renderer.turn_text(ids, context=prompt, is_closed=False).removeprefix(renderer.opened(prompt))
    result = token_bytes(renderer.tokenizer, ids, visible_text=written)
    assert len(result) == len(ids)
    assert b"".join(result).startswith(written.encode())
    if FAMILIES[name].vocabulary != "always" and not FAMILIES[name].strips:
        assert written.startswith(answer)


@pytest.mark.parametrize("name", FAMILIES)
def test_differences_of_a_demonstrated_call_with_text_are_reported(name: str) -> None:
    """For example, Qwen3-Coder writes an empty line between them, and a cold start does not."""
    family, renderer = FAMILIES[name], renderer_of(name, ("tool",))
    try:
        checked = check_template(renderer, ("tool",))
    except ModelError:
        pytest.skip("loading refuses results of tools")
    call = ToolCall(name="lookup", arguments={"key": "c"}, call_id="call00000")
    question = Message(role="user", content="Who?")
    prompt = renderer.prompt([question], TOOLS)
    text = convert_calls(
        f"Words.\n{CALL_FORMATS['hermes'].write([call])}", CALL_FORMATS[family.call_format], TOOLS
    )
    ids = [*prompt, *renderer.turn_ids(renderer.demonstration(text, prompt), prompt, is_closed=False)]
    written = Message(role="assistant", content="Words.", tool_calls=(call,))
    whole = renderer.template.encode(renderer.whole_text([question, written], TOOLS, opened=False))
    is_said = bool(
        checked.demonstrated_call or checked.unread or "text and a call, then its result" in checked.differs
    )
    assert is_said or spelled(name, whole).startswith(spelled(name, ids))
    assert not checked.demonstrated_call or any("text and a call" in line for line in checked.notes())
