"""Native tool calls: parsing of turns; invalid calls are problems, never exceptions."""

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.tokens.call_formats import CALL_FORMATS, CallFormatName, describe_unwritable, read_turn
from outrider.tokens.tool_calls import opened_thinking, read_calls, split_thinking, without_thoughts
from outrider.types import Json, ToolCall, ToolSchema
from tests.conversations import TOOLS

NAMES: list[CallFormatName] = list(CALL_FORMATS)
GOOD: dict[CallFormatName, str] = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "lookup", "arguments": {"key": "Rome"}}\n</tool_call>\n'
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
    "qwen3_coder": "Let me see.\n<tool_call>\n<function=lookup>\n<parameter=key>\nRome\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call><function=add><parameter=a>1</parameter>"
    "<parameter=b>2</parameter></function></tool_call>",
    "llama3_json": 'Let me see.<|python_tag|>{"name": "lookup", "parameters": {"key": "Rome"}}; '
    '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "pythonic": "Let me see.<|tool_call_start|>[lookup(key='Rome'), add(a=1, b=2)]<|tool_call_end|>",
}
BAD: list[tuple[CallFormatName, str, str]] = [
    ("hermes", "<tool_call>", "not closed"),
    ("hermes", '<tool_call>{"name": "lookup"', "not closed"),
    ("hermes", '<tool_call>{"name": "lookup", "arguments": {"key": "a"}}', "not closed"),
    ("hermes", "<tool_call>{name: lookup}</tool_call>", "does not hold JSON: .* character 2"),
    ("hermes", "<tool_call>[1]</tool_call>", "must be a JSON object"),
    ("hermes", "<tool_call>{}</tool_call>", 'needs a "name"'),
    ("hermes", '<tool_call>{"name": "lookup", "arguments": "Rome"}</tool_call>', '"arguments" of lookup'),
    ("hermes", '<tool_call>{"name": "lookup", "arguments": "{} x"}</tool_call>', "something stands behind"),
    ("hermes", '<tool_call>{"name": "lookup", "arguments": "[1]"}</tool_call>', "must be a JSON object"),
    ("hermes", '<tool_call>{"name": "lookup", "input": {"key": "a"}}</tool_call>', 'under "input", not'),
    ("hermes", '<tool_call>{"name": "lookup", "arguments": {"key": "a"}} x</tool_call>', "nothing else"),
    ("hermes", '<tool_call>{"name": "find", "arguments": {}}</tool_call>', "no tool 'find'. Tools: lookup"),
    ("hermes", '<tool_call>{"name": "lookup", "arguments": {}}</tool_call>', "needs the argument 'key'"),
    ("hermes", '<tool_call>{"name": "lookup", "arguments": {"key": 1}}</tool_call>', "of type string"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": true, "b": 1}}</tool_call>', "of type integer"),
    ("hermes", '<tool_call>{"name": "lookup", "arguments": {"key": "", "x": 1}}</tool_call>', "argument 'x'"),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "too large"),
    ("qwen3_coder", "<tool_call><function=lookup><parameter=key>a", "not closed"),
    ("qwen3_coder", "<tool_call>lookup</function></tool_call>", "needs <function=NAME>"),
    ("qwen3_coder", "<tool_call><function=lookup>a</function></tool_call>", "something else"),
    ("qwen3_coder", "<function=add><parameter=a>x</parameter><parameter=b>1</parameter></function>",
     "of type integer"),
    ("llama3_json", '{"name": "lookup", "parameters": ', "not JSON"),
    ("llama3_json", '{"name": "lookup", "parameters": 1}', '"parameters" of lookup'),
    ("llama3_json", "<|python_tag|>print(1)", "not JSON"),
    ("llama3_json", '[{"name": 1}]', 'needs a "name"'),
    ("pythonic", "[lookup(key='a']", "cannot be read"),
    ("pythonic", "<|tool_call_start|>[lookup(key='it's')]<|tool_call_end|> and words", "cannot be read"),
    ("pythonic", "[lookup('a')]", "every argument of lookup needs its name"),
    ("pythonic", "[lookup(key=open('x'))]", "plain values"),
    ("pythonic", "[lookup(key='a'), 1]", "each element must be a call"),
    ("pythonic", "<|tool_call_start|>" + "(" * 10_000, "cannot be read"),
    ("pythonic", "<|tool_call_start|>lookup(\0)<|tool_call_end|>", "cannot be read"),
    ("hermes", '<tool_call>{"name": "lookup", "arguments": {"key": "\\ud800"}}</tool_call>', "half of a"),
    ("hermes", '<tool_call>{"name": "lookup", "arguments": {"key": NaN}}</tool_call>', "not finite"),
    ("llama3_json", '{"name": "lookup", "parameters": {"key": 1e999}}', "not finite"),
    ("pythonic", "[lookup(key='\\ud800')]", "half of a surrogate pair"),
    ("pythonic", f"[lookup(key={'[' * 60}{']' * 60})]", "more than 32 levels"),
    ("hermes", f'<tool_call>{{"name": "lookup", "arguments": {{"key": {"[" * 400}{"]" * 400}}}}}</tool_call>',
     "more than 32 levels"),
    ("llama3_json", '{"name": "find", "parameters": {"q": "a"}}', "no tool 'find'"),
    ("llama3_json", '{"name": "find", "parameters": {"q": "a', "not JSON"),
    ("llama3_json", '{"name": "lookup", "input": {"key": "a"}}', 'under "input"'),
    ("llama3_json", '{"name": "lookup"}', "needs the argument 'key'"),
    ("llama3_json", '{"name": "lookup"', "not JSON"),
    ("llama3_json", '{"type": "function", "function": {"name": "lookup"}}', 'needs a "name"'),
    ("pythonic", "[find(q='a')]", "no tool 'find'"),
    ("pythonic", "[lookup()]", "needs the argument 'key'"),
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_content_and_calls_of_a_turn(name: CallFormatName) -> None:
    turn = read_turn(f"<think>\nWhich?\n</think>\n\n{GOOD[name]}", CALL_FORMATS[name], TOOLS)
    assert turn.reasoning == "Which?" and turn.content == "Let me see." and turn.problems == ()
    assert turn.tool_calls == (
        ToolCall(name="lookup", arguments={"key": "Rome"}, call_id="call00000"),
        ToolCall(name="add", arguments={"a": 1, "b": 2}, call_id="call00001"),
    )


@pytest.mark.parametrize(("name", "text", "reason"), BAD)
def test_invalid_calls_are_problems(name: CallFormatName, text: str, reason: str) -> None:
    turn = read_turn(text, CALL_FORMATS[name], TOOLS)
    assert turn.tool_calls == () and len(turn.problems) == 1
    assert re.search(reason, turn.problems[0]), turn.problems


def look(key: str) -> ToolCall:
    return ToolCall(name="lookup", arguments={"key": key}, call_id="call00000")


ADD = ToolCall(name="add", arguments={"a": 1, "b": 2}, call_id="call00000")
NOW = ToolCall(name="now", call_id="call00000")
VARIANTS: list[tuple[CallFormatName, str, ToolCall]] = [
    ("hermes", '<tool_call>{"name": "add", "parameters": {"a": 1, "b": 2}}</tool_call>', ADD),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', ADD),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', NOW),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', NOW),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', NOW),
    ("llama3_json", '{"name": "add", "arguments": {"a": 1, "b": 2}}', ADD),
    ("llama3_json", '{"name": "now", "parameters": null}', NOW),
    ("llama3_json", '[{"name": "add", "parameters": {"a": 1, "b": 2}}]', ADD),
    (
        "pythonic",
        "<|tool_call_start|>[lookup(key='<|tool_call_end|>')]<|tool_call_end|>",
        look("<|tool_call_end|>"),
    ),
    ("llama3_json", '{"name": "lookup", "parameters": {"key": "<|python_tag|>"}}', look("<|python_tag|>")),
    ("llama3_json", '{"name": "lookup", "parameters": {"key": "a"}}', look("a")),
    ("llama3_json", '{"parameters": {"key": "a"}, "name": "lookup"}', look("a")),
    ("llama3_json", '{"type": "function", "name": "lookup", "parameters": {"key": "a"}}', look("a")),
    ("llama3_json", '{"id": "1", "name": "lookup", "arguments": {"key": "a"}}', look("a")),
    ("llama3_json", '{"name": "lookup", "parameters": {"key": "a"}, "note": 1}', look("a")),
    ("llama3_json", ' [{"name": "lookup", "parameters": {"key": "a"}}]', look("a")),
]


@pytest.mark.parametrize(("name", "text", "call"), VARIANTS)
def test_variants_of_a_call(name: CallFormatName, text: str, call: ToolCall) -> None:
    tools = (*TOOLS, {"name": "now", "description": "d", "parameters": {"type": "object", "properties": {}}})
    turn = read_turn(text, CALL_FORMATS[name], tools)
    assert (turn.tool_calls, turn.problems, turn.content) == ((call,), (), "")


@pytest.mark.parametrize("name", NAMES)
def test_a_valid_call_next_to_an_invalid_one_is_executed(name: CallFormatName) -> None:
    call_format = CALL_FORMATS[name]
    good = ToolCall(name="lookup", arguments={"key": "a"})
    turn = read_turn(call_format.write([good, ToolCall(name="find")]), call_format, TOOLS)
    assert [call.name for call in turn.tool_calls] == ["lookup"] and "no tool 'find'" in turn.problems[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text", ["", "Just words.", '\\boxed{4} and {"a": 1}', "[1, 2]", "a < b > c", "f(x)"]
)
def test_plain_text_is_no_call(name: CallFormatName, text: str) -> None:
    turn = read_turn(text, CALL_FORMATS[name], TOOLS)
    assert (turn.content, turn.tool_calls, turn.problems) == (text, (), ())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
ANY_TOOL = {"name": "any", "description": "d", "parameters": {"type": "object", "additionalProperties": True}}


@pytest.mark.parametrize("name", NAMES)
@given(arguments=st.dictionaries(st.sampled_from(["a", "b", "key"]), VALUES, max_size=3))
def test_calls_survive_writing_and_reading(name: CallFormatName, arguments: dict[str, Json]) -> None:
    call_format = CALL_FORMATS[name]
    if name == "qwen3_coder":  # text between tags: nothing that ends them, and no types without a schema
        arguments = {key: json.dumps(value).replace("<", "") for key, value in arguments.items()}
    call = ToolCall(name="any", arguments=arguments, call_id="call00000")
    assert read_turn(call_format.write([call]), call_format, [ANY_TOOL]).tool_calls == (call,)


@pytest.mark.parametrize("name", NAMES)
@given(
    pieces=st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "<function=", "add", ">", "</function>",
                         "<parameter=a>", "</parameter>", '{"name": "add", "arguments": ', "{", "}",
                         '"', "[add(", "a=1", ")]",
                         "<|python_tag|>", "<|tool_call_start|>", "<|tool_call_end|>", "</think>", "<think>"])
        | st.text(max_size=5),
        max_size=12,
    )
)  # fmt: skip
def test_no_turn_raises(name: CallFormatName, pieces: list[str]) -> None:
    turn = read_turn("".join(pieces), CALL_FORMATS[name], TOOLS)
    assert all(call.name in ("lookup", "add") for call in turn.tool_calls)
    assert all(problem.strip() for problem in turn.problems)


def test_qwen3_coder_arguments_get_their_types_from_the_schema() -> None:
    tool = {
        "name": "plot",
        "description": "d",
        "parameters": {"type": "object", "properties": {
            "text": {"type": "string"}, "count": {"type": "integer"}, "points": {"type": "array"},
            "shown": {"type": "boolean"}, "options": {"type": "object"}, "share": {"type": "number"},
        }},
    }  # fmt: skip
    given_text = {"text": "7", "count": "7", "points": "[1, 2]", "shown": "True", "options": '{"a": null}',
                  "share": "0.5"}  # fmt: skip
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given_text.items())
    turn = read_turn(
        f"<tool_call><function=plot>{written}</function></tool_call>", CALL_FORMATS["qwen3_coder"], [tool]
    )
    assert turn.tool_calls[0].arguments == {
        "text": "7", "count": 7, "points": [1, 2], "shown": True, "options": {"a": None}, "share": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"), [("7", 7), ("1.5", "1.5"), ("2.0", "2.0"), ("null", "null"), ("[1]", "[1]")]
)
def test_qwen3_coder_keeps_text_if_the_schema_accepts_text(text: str, value: Json) -> None:
    properties = {"key": {"type": ["integer", "string"]}}
    tool = {"name": "find", "description": "d", "parameters": {"properties": properties}}
    written = f"<tool_call><function=find><parameter=key>{text}</parameter></function></tool_call>"
    turn = read_turn(written, CALL_FORMATS["qwen3_coder"], [tool])
    assert turn.problems == () and turn.tool_calls[0].arguments == {"key": value}


def test_thinking_is_split_from_the_answer() -> None:
    assert split_thinking("<think>\na\n</think>\n\nb") == ("a", "b", ())
    assert split_thinking("a\n</think>b") == ("a", "b", ())
    assert split_thinking(" plain ") == ("", " plain ", ())
    thought, rest, problems = split_thinking("<think>never closed")
    assert (thought, rest) == ("never closed", "") and "not closed" in problems[0]
    assert opened_thinking("<|im_start|>assistant\n<think>\n") == "<think>\n"
    assert opened_thinking("<think>\n\n</think>\n\n") == ""


ANALYSIS = "<|channel|>analysis<|message|>"


@pytest.mark.parametrize(
    ("begun", "content"),
    [
        ("<think>Shall I CALL? No.</think>", "Done."),
        ("Shall I CALL? No.</think>", "Done."),
        ("<think>a</think>\n<think>Shall I CALL? No.</think>", "Done."),
        ("<think>a</think>[THINK]Shall I CALL? No.[/THINK]", "Done."),
        ("[THINK]Shall I CALL? No.[/THINK]", "Done."),
        ("<seed:think>Shall I CALL? No.</seed:think>", "Done."),
        ("<|channel>thought\nShall I CALL? No.<channel|>", "Done."),
        ("<|START_THINKING|>Shall I CALL? No.<|END_THINKING|>", "Done."),
        ("Shall I CALL? No.<|END_THINKING|>", "Done."),  # the template opened the block
        ("Not in [think]. Shall I CALL? No.</think>", "Done."),
        ("<|inner_prefix|>Shall I CALL? No.<|inner_suffix|>", "Done."),
        (f"{ANALYSIS}Shall I CALL? No.<|end|><|start|>assistant<|channel|>final<|message|>", "Done."),
        (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}Shall I CALL?<|end|>", "Done."),
        ("<thinking>Shall I CALL? No.</thinking>", None),  # such tags may be those of the prompt
        ("<think>a</think><reasoning>Shall I CALL? No.</reasoning>\n", None),
        ("<analysis>a</analysis>\n<reasoning>Shall I CALL? No.</reasoning>", None),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_calls_inside_thoughts_are_not_executed(
    name: CallFormatName, begun: str, content: str | None
) -> None:
    if name == "llama3_json" and begun.startswith("Shall"):
        return  # its calls have no end
    form = CALL_FORMATS[name]
    written = form.write([look("secret")])
    if name == "pythonic":
        written = f"<|tool_call_start|>{written}<|tool_call_end|>"
    thoughts = begun.replace("CALL", written)
    turn = read_turn(f"{thoughts}Done.", form, TOOLS)
    assert (turn.tool_calls, turn.problems) == ((), ())
    assert without_thoughts(turn.content).strip() == "Done."
    assert turn.content == (content or thoughts.removeprefix("<think>a</think>") + "Done.")
    assert not content or "secret" in turn.reasoning
    turn = read_turn(f"{thoughts}{written}", form, TOOLS)
    assert (turn.tool_calls, turn.problems) == ((look("secret"),), ())


def test_an_unclosed_block_after_another_one_is_a_problem() -> None:
    written = CALL_FORMATS["hermes"].write([look("a")])
    for opening in ("<think>", "[THINK]", "<|channel>thought\n", ANALYSIS):
        before = "" if opening == ANALYSIS else "<think>a</think>\n"
        turn = read_turn(f"{before}{opening}Shall I {written}", CALL_FORMATS["hermes"], TOOLS)
        assert (turn.content, turn.tool_calls) == ("", ()) and "not closed" in turn.problems[0]
        assert turn.reasoning.startswith("a\nShall I" if before else "Shall I")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("begun", [
    "<reasoning>Shall I", "<thinking>Shall I", "<think>a</think><analysis>Shall I", "Well. <think>Shall I",
    "<think>a</think> Well. [THINK]Shall I", "<reasoning>a</reasoning><scratchpad>Shall I",
])  # fmt: skip
def test_a_call_in_an_unclosed_block_is_a_problem(name: CallFormatName, begun: str) -> None:
    written = CALL_FORMATS[name].write([look("a")])
    if name == "pythonic":
        written = f"<|tool_call_start|>{written}<|tool_call_end|>"
    turn = read_turn(f"{begun} {written}", CALL_FORMATS[name], TOOLS)
    assert turn.tool_calls == () and turn.problems == ("The thinking was not closed.",)
    assert f"{begun} {written}".endswith(turn.content) and written in turn.content


def test_tags_of_prompts_stay_in_the_content() -> None:
    """A reward may ask for them; text next to a call is as before."""
    written = CALL_FORMATS["hermes"].write([look("a")])
    for text in ("<reasoning>a</reasoning>\nLet me look.", "<reasoning>a</reasoning>"):
        turn = read_turn(f"{text}\n{written}\n", CALL_FORMATS["hermes"], TOOLS)
        assert (turn.reasoning, turn.content, turn.tool_calls) == ("", text, (look("a"),))
        assert read_turn(text, CALL_FORMATS["hermes"], TOOLS).content == text


@pytest.mark.parametrize("block", ["<think>a</think>", "[THINK]a[/THINK]", "<reasoning>a</reasoning>",
                                   "<|channel|>analysis", "[THINK]"])  # fmt: skip
def test_many_blocks_are_read_in_linear_time(block: str) -> None:
    text = block * 30_000 + CALL_FORMATS["hermes"].write([look("a")])
    begun = time.process_time()
    _, rest, _ = split_thinking(text, CALL_FORMATS["llama3_json"])
    read_calls(rest, CALL_FORMATS["hermes"], TOOLS)
    assert time.process_time() - begun < 5


THOUGHT_TAGS = [
    "</think>", "<think>a</think>", "a</think>b</think>", "[/THINK]", "[THINK]a[/THINK]",
    "<reasoning>a</reasoning>", "a</reasoning>", "<channel|>",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", THOUGHT_TAGS)
@pytest.mark.parametrize("begun", ["", "Words.\n", "<think>\nHm.\n</think>\n\n", "[THINK]Hm.[/THINK]"])
def test_thinking_tags_inside_an_argument_are_its_text(name: CallFormatName, key: str, begun: str) -> None:
    if begun == "Words.\n" and name == "pythonic":
        return  # of Llama 3.2 the calls are the whole turn
    turn = read_turn(begun + CALL_FORMATS[name].write([look(key)]), CALL_FORMATS[name], TOOLS)
    assert (turn.tool_calls, turn.problems) == ((look(key),), ())
    assert turn.reasoning == ("Hm." if "Hm." in begun else "")


def test_text_before_and_after_a_call_of_llama() -> None:
    form, written = CALL_FORMATS["llama3_json"], '{"name": "lookup", "parameters": {"key": "a"}}'
    turn = read_turn(f"I look.\n[{written}]", form, TOOLS)
    assert (turn.content, turn.tool_calls, turn.problems) == ("I look.", (look("a"),), ())
    turn = read_turn(f"{written} and words", form, TOOLS)
    assert turn.tool_calls == (look("a"),) and "not JSON" in turn.problems[0]
    turn = read_turn(f"{written}<|python_tag|>{written}", form, TOOLS)
    assert len(turn.tool_calls) == 2 and turn.problems == ()
    for words in ('It is {"name": "Rome", "parameters": {}}', 'Say {"name": "lookup"}'):
        assert read_turn(words, form, TOOLS).content == words


def test_a_name_that_a_format_cannot_write_is_reported() -> None:
    def named(name: str, *arguments: str) -> ToolSchema:
        properties: dict[str, Json] = {argument: {} for argument in arguments}
        return {"name": name, "description": "d", "parameters": {"properties": properties}}

    odd = named("get-time")
    assert describe_unwritable("pythonic", [named("calendar.add", "day", "ü")]) == ""
    assert "a tool named 'get-time': hermes, qwen3_coder, llama3_json can" in describe_unwritable(
        "pythonic", [odd]
    )
    assert "the argument 'from' of f" in describe_unwritable("pythonic", [named("f", "a", "from")])
    assert "the argument 'max-n' of f" in describe_unwritable("pythonic", [named("f", "max-n")])
    for name in NAMES:
        assert bool(describe_unwritable(name, [named("a b", "<x>")])) == (name in ("pythonic", "qwen3_coder"))
        assert name == "pythonic" or describe_unwritable(name, [odd]) == ""
    turn = read_turn("[get-time(zone='x')]", CALL_FORMATS["pythonic"], [odd])
    assert turn.content == "" and "cannot be read" in turn.problems[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("opening", ["<think>", ""])  # the template may have written it
def test_calls_inside_thinking_are_thoughts(name: CallFormatName, opening: str) -> None:
    if name in ("hermes", "qwen3_coder"):
        written = f"Maybe {GOOD[name]} or not.</think>Done."
    else:
        written = f"Maybe {GOOD['hermes']} or {GOOD['pythonic']}?</think>Done."
    turn = read_turn(opening + written, CALL_FORMATS[name], TOOLS)
    assert turn.tool_calls == () and turn.content == "Done."


@pytest.mark.parametrize(("before", "after"), [("Use", " to do it."), ("```json", "\n```")])
def test_text_after_a_call_after_text_is_no_problem(before: str, after: str) -> None:
    written = f'{before}\n{{"name": "add", "parameters": {{"a": 1, "b": 2}}}}{after}'
    turn = read_turn(written, CALL_FORMATS["llama3_json"], TOOLS)
    assert (turn.tool_calls, turn.problems, turn.content) == ((ADD,), (), before)


ANSWERS: list[tuple[CallFormatName, str]] = (
    [
        ("llama3_json", text)
        for text in (
            '{"type": "circle", "radius": 3}',
            '{"parameters": {"width": 2}}',
            '{"arguments": ["for", "against"]}',
            '{"name": "Marie Curie", "born": 1867}',
            '{"answer": 4}',
            ' {"answer": 4}\n',
            '{"answer": 4} it is.',
            '[{"name": "Marie"}, {"name": "Pierre"}]',
            '{"name": "lookup", "born": 1867}',
            '{"name": "Rome"}',
            '{"name": {"first": "Marie"}, "born": 1867}',
            '{"name": null, "id": 3, "price": 1}',
            '["lookup"]',
            '{"name": "Marie Curie", "parameters": {"born": 1867}}',
            '{"name": "Rome", "arguments": ["for"]}',
            '{"name": "Rome", "parameters": "many", "type": "city"}',
            '{"type": "object", "properties": {}}',
            '{"answer": [{"name": "lookup", "parameters": {"key": "a"}}]}',
            '{"name": "Marie',
            "{broken",
            "[1, 2]",
            '{"id": "a", "name": "Marie"}',
            '{"type": "person", "name": "Marie"}',
            "{}",
            "[]",
            "null",
            '"lookup"',
            '{"text": "<|python_tag|>"}',
            '[{"name": "Rome", "parameters": {}, "size": 1}]',
            '{"name": "look',
        )
    ]
    + [
        ("pythonic", text)
        for text in (
            "[sin(x), cos(x)]",
            "[f(x)](https://a.b)",
            "[f()]",
            "[f(x) for x in y]",
            "[f(x=1), 2]",
            "[a(b] c",
            "[note(see below)]",
            '{"answer": 4}',
            "[1, lookup]",
            "[x.y(z)]",
        )
    ]
    + [
        ("hermes", '{"name": "lookup", "arguments": {"key": "a"}}'),
        ("hermes", "lookup(key='a')"),
        ("qwen3_coder", '{"name": "lookup", "arguments": {"key": "a"}}'),
        ("qwen3_coder", "<parameter=key>a</parameter>"),
    ]
)


@pytest.mark.parametrize(("name", "text"), ANSWERS)
def test_an_answer_in_json_or_as_a_list_is_no_call(name: CallFormatName, text: str) -> None:
    turn = read_turn(text, CALL_FORMATS[name], TOOLS)
    assert (turn.content, turn.tool_calls, turn.problems) == (text, (), ())
    turn = read_turn(f"<think>\nHm.\n</think>\n\n{text.strip()}", CALL_FORMATS[name], TOOLS)
    assert (turn.reasoning, turn.content, turn.tool_calls) == ("Hm.", text.strip(), ())


def test_a_closing_tag_inside_a_value_ends_it() -> None:
    """As in the family's own parser, because the format has no way to escape it."""
    form = CALL_FORMATS["qwen3_coder"]
    turn = read_turn(form.write([look("a</parameter>b")]), form, TOOLS)
    assert turn.tool_calls == () and "something else than <parameter=KEY>" in turn.problems[0]


def test_unclosed_parameters_are_read_in_linear_time() -> None:
    written = f"<tool_call><function=lookup>{'<parameter=key>' * 100_000}</function></tool_call>"
    turn = read_turn(written, CALL_FORMATS["qwen3_coder"], TOOLS)
    assert turn.tool_calls == () and "something else than <parameter=KEY>" in turn.problems[0]


def test_a_turn_of_blanks_is_read_in_linear_time() -> None:
    blanks = "\n" * 300_000
    assert split_thinking(blanks, CALL_FORMATS["llama3_json"]) == ("", blanks, ())


def test_a_value_outside_an_enum_is_a_problem() -> None:
    tool = {"name": "pick", "description": "d", "parameters": {
        "type": "object", "properties": {"unit": {"type": "string", "enum": ["km", "mile"]}},
    }}  # fmt: skip
    turn = read_turn("[pick(unit='foot')]", CALL_FORMATS["pythonic"], [tool])
    assert "must be one of km, mile" in turn.problems[0]
