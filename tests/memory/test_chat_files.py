"""Import of chats in all notations of files: steps, counts of dropped fields, refusals with reasons."""

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.errors import DataError
from outrider.memory.chat_files import Imported, import_trajectories
from outrider.memory.step_store import question_key
from outrider.tokens.call_formats import CALL_FORMATS

USER = {"role": "user", "content": "How warm is it in Oslo?"}
END = {"role": "assistant", "content": "It is \\boxed{4}."}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "4 C"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nBetter ask.\n</think>\n\n"


def read(tmp_path: Path, **record: Any) -> Imported:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"reward": 1.0, **record}) + "\n", encoding="utf-8")
    return import_trajectories(path)


def steps(imported: Imported) -> list[tuple[str, str]]:
    return [(step.text, step.observation) for step in imported.trajectories[0].steps]


def call(arguments: Any = '{"city": "Oslo"}', name: str = "weather") -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"arguments": arguments, "name": name}}


CALLS: dict[str, dict[str, Any]] = {
    "arguments as text": {"tool_calls": [call()]},
    "arguments as an object": {"tool_calls": [call({"city": "Oslo"})]},
    "arguments encoded twice": {"tool_calls": [call(json.dumps('{"city": "Oslo"}'))]},
    "no type": {"tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]},
    "bare": {"tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]},
    "LangChain": {
        "tool_calls": [{"name": "weather", "args": {"city": "Oslo"}, "id": "a", "type": "tool_call"}]
    },
    "calls as text": {"tool_calls": json.dumps([call()])},
    "each call as text (verifiers)": {"tool_calls": [json.dumps(call())]},
    "one call": {"tool_calls": call()},
    "function_call": {"function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
    "Anthropic": {"content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}}]},
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_in_every_notation_become_the_same_text(tmp_path: Path, case: str) -> None:
    answer = {"role": "assistant", "content": None, **CALLS[case]}
    imported = read(tmp_path, messages=[USER, answer, RESULT, END])
    assert steps(imported) == [(CALL, "4 C"), ("It is \\boxed{4}.", "")]
    assert imported.dropped == {} and imported.questions == {
        imported.trajectories[0].task_key: USER["content"]
    }
    assert CALL_FORMATS["hermes"].read(CALL, ()).calls[0].arguments == {"city": "Oslo"}


@pytest.mark.parametrize("arguments", [None, "", "{}", {}, " "])
def test_a_call_may_have_no_arguments(tmp_path: Path, arguments: Any) -> None:
    answer = {"role": "assistant", "content": "", "tool_calls": [call(arguments, "now")]}
    assert steps(read(tmp_path, messages=[USER, answer, RESULT, END]))[0][0] == (
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    )


THINKING: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "reasoning_content": ({"reasoning_content": "Better ask."}, {}),
    "reasoning": ({"reasoning": "Better ask.\n"}, {}),
    "thinking": ({"thinking": "Better ask."}, {}),
    "both": ({"reasoning": "Better ask.", "reasoning_content": "Better ask."}, {}),
    "OpenRouter": ({"reasoning_details": [{"type": "reasoning.text", "text": "Better ask."}]}, {}),
    "LiteLLM": ({"thinking_blocks": [{"type": "thinking", "thinking": "Better ask.", "signature": "x"}]}, {}),
    "Anthropic": ({"content": [{"type": "thinking", "thinking": "Better ask.", "signature": "x"}]}, {}),
    "in the text": ({"content": "<think>\nBetter ask.\n</think>\n"}, {}),
    "in both": ({"content": "<think>\nBetter ask.\n</think>\n", "reasoning_content": "Better ask."}, {}),
    "in both, other words": (
        {"content": "<think>\nBetter ask.\n</think>\n", "reasoning_content": "Other words."},
        {"thinking beside <think> in the text": 1},
    ),
}


@pytest.mark.parametrize("case", THINKING)
def test_thinking_is_part_of_the_step(tmp_path: Path, case: str) -> None:
    fields, dropped = THINKING[case]
    answer = {"role": "assistant", "content": None, "tool_calls": [call()], **fields}
    imported = read(tmp_path, messages=[USER, answer, RESULT, END])
    assert steps(imported)[0] == (THOUGHT + CALL, "4 C") and imported.dropped == dropped


def test_text_calls_and_thinking_are_in_the_order_of_a_turn(tmp_path: Path) -> None:
    answer = {
        "role": "assistant",
        "content": [{"type": "text", "text": "The forecast "}, {"type": "text", "text": "knows."}],
        "reasoning": "Better ask.",
        "tool_calls": [call(), call({"city": "Rome"})],
    }
    second = CALL.replace("Oslo", "Rome")
    results = [RESULT, {"role": "tool", "content": [{"type": "text", "text": "20 C"}], "tool_call_id": "b"}]
    imported = read(tmp_path, messages=[USER, answer, *results, END])
    assert steps(imported)[0] == (f"{THOUGHT}The forecast knows.\n{CALL}\n{second}", "4 C\n20 C")


def test_calls_with_a_role_of_their_own_join_their_turn(tmp_path: Path) -> None:
    """As ms-swift writes them: text, parallel calls and results are messages of their own."""
    calls = [json.dumps({"name": "weather", "arguments": {"city": city}}) for city in ("Oslo", "Rome")]
    chat = [
        USER,
        {"role": "assistant", "content": "The forecast knows."},
        *({"role": "tool_call", "content": text} for text in calls),
        *({"role": "tool_response", "content": text} for text in ("4 C", "20 C")),
        END,
    ]
    second = CALL.replace("Oslo", "Rome")
    turns = [(f"The forecast knows.\n{CALL}\n{second}", "4 C\n20 C"), (END["content"], "")]
    assert steps(read(tmp_path, messages=chat)) == turns
    sent = [{**item, "recipient": "user"} for item in chat]  # only with a channel it is Harmony's
    assert steps(read(tmp_path, messages=sent)) == turns
    given = read(tmp_path, prompt=chat[:2], completion=chat[2:])  # text in the prompt is no step
    assert steps(given) == [(f"{CALL}\n{second}", "4 C\n20 C"), (END["content"], "")]


def test_parts_of_a_user_are_joined_by_lines_and_parts_of_an_answer_directly(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": item} for item in ("Context.", "More.", " And", "\nthis?")]
    answer = {
        "role": "assistant",
        "content": [{"type": "output_text", "text": item} for item in ("It is ", "4.")],
    }
    imported = read(tmp_path, messages=[{"role": "user", "content": parts}, answer])
    assert imported.trajectories[0].prompt[0].content == "Context.\nMore. And\nthis?"
    assert steps(imported) == [("It is 4.", "")]


def test_items_of_the_responses_api(tmp_path: Path) -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": USER["content"]}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Better ask."}]},
        {"type": "function_call", "name": "weather", "arguments": '{"city": "Oslo"}', "call_id": "a"},
        {"type": "function_call", "name": "weather", "arguments": '{"city": "Rome"}', "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "4 C"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "20 C"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "It is "}, {"type": "output_text", "text": "4."}],
        },
    ]
    imported = read(tmp_path, messages=items)
    second = CALL.replace("Oslo", "Rome")
    assert steps(imported) == [(f"{THOUGHT}{CALL}\n{second}", "4 C\n20 C"), ("It is 4.", "")]
    assert [item.role for item in imported.trajectories[0].prompt] == ["system", "user"]
    assert imported.dropped == {"thinking that is encrypted": 1}
    record = {"input": USER["content"], "output": items[2:], "instructions": "Be short."}
    assert steps(read(tmp_path, **record)) == steps(imported)


def test_content_blocks_of_anthropic(tmp_path: Path) -> None:
    chat = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Better ask."},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I ask."},
                {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "4 C"}]},
                {"type": "text", "text": "And now?"},
            ],
        },
        END,
    ]
    imported = read(tmp_path, system="Be short.", messages=chat)
    assert steps(imported) == [(f"{THOUGHT}I ask.\n{CALL}", "4 C\nAnd now?"), (END["content"], "")]
    assert imported.trajectories[0].prompt[0].content == "Be short."
    assert imported.dropped == {"thinking that is encrypted": 1}


FORMS: dict[str, dict[str, Any]] = {
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": USER["content"]},
            {"from": "function_call", "value": json.dumps(call()["function"])},
            {"from": "observation", "value": "4 C"},
            {"from": "gpt", "value": END["content"]},
        ]
    },
    "ShareGPT, Hermes": {
        "conversations": [
            {"from": "human", "value": USER["content"]},
            {"from": "gpt", "value": CALL},
            {"from": "tool", "value": "4 C"},
            {"from": "gpt", "value": END["content"]},
        ]
    },
    "role function": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": "",
                "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'},
            },
            {"role": "function", "name": "weather", "content": "4 C"},
            END,
        ]
    },
    "TRL": {"prompt": [USER], "completion": [{"role": "assistant", "tool_calls": [call()]}, RESULT, END]},
    "a prompt and messages after it": {
        "prompt": USER["content"],
        "messages": [{"role": "assistant", "content": None, "tool_calls": [call()]}, RESULT, END],
    },
    "messages as text": {
        "messages": json.dumps([USER, {"role": "assistant", "tool_calls": [call()]}, RESULT, END])
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_chats_in_the_usual_columns(tmp_path: Path, form: str) -> None:
    imported = read(tmp_path, **FORMS[form])
    assert steps(imported) == [(CALL, "4 C"), (END["content"], "")]
    assert list(imported.questions.values()) == [USER["content"]] and imported.dropped == {}
    assert [item.content for item in imported.trajectories[0].prompt] == [USER["content"]]


@pytest.mark.parametrize(
    ("more", "left_out"),
    [
        ({"completion": "last"}, {}),
        ({"completion": [{"role": "assistant", "content": "last"}]}, {}),
        ({"output": [{"role": "assistant", "content": "last"}]}, {}),
        ({"completion": "last", "output": "a text"}, {}),
    ],
)
def test_the_last_answer_may_have_a_column_of_its_own(
    tmp_path: Path, more: dict[str, Any], left_out: dict[str, int]
) -> None:
    imported = read(tmp_path, messages=[USER, {"role": "assistant", "content": "first"}, USER], **more)
    assert steps(imported) == [("first", USER["content"]), ("last", "")] and imported.dropped == left_out


@pytest.mark.parametrize("text", ['{"a": 1}', "[1, 2]", "4"])
def test_an_answer_may_look_like_json(tmp_path: Path, text: str) -> None:
    assert steps(read(tmp_path, messages=[USER], completion=text)) == [(text, "")]


@pytest.mark.parametrize(
    "more", [{"completion": True}, {"completion": ""}, {"completion": {"a": 1}}, {"output": []}]
)
def test_other_columns_add_no_step(tmp_path: Path, more: dict[str, Any]) -> None:
    turns = [USER, {"role": "assistant", "tool_calls": [call()]}, RESULT]
    imported = read(tmp_path, messages=turns, **more)
    assert steps(imported) == [(CALL, "4 C")]
    assert sum(imported.dropped.values()) == (more.get("completion") in (True, {"a": 1}))


def test_a_repeated_conversation_is_read_once(tmp_path: Path) -> None:
    whole = [USER, {"role": "assistant", "content": "first"}, USER, END]
    for messages in (whole[:3], whole):
        imported = read(tmp_path, messages=messages, output=whole)
        assert steps(imported) == [("first", USER["content"]), (END["content"], "")]
        assert imported.dropped == {}
    chain = [{"type": "human", "content": "q"}, {"type": "ai", "content": "a"}]
    assert steps(read(tmp_path, messages=chain, output=chain[1:])) == [("a", "")]


def test_columns_with_another_chat_are_counted(tmp_path: Path) -> None:
    whole = [USER, END]
    assert read(tmp_path, messages=whole, completion=END["content"]).dropped == {}
    assert read(tmp_path, messages=whole, completion=[END]).dropped == {}
    imported = read(tmp_path, messages=whole, conversations=[USER, END], completion="other")
    assert imported.dropped == {"column 'conversations'": 1, "column 'completion'": 1}
    assert read(tmp_path, messages=whole, output="a text").dropped == {"column 'output'": 1}


def test_examples_in_the_column_of_the_prompt_are_no_steps(tmp_path: Path) -> None:
    example = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    imported = read(tmp_path, prompt=[*example, USER], completion=[END], system="Be brief.")
    assert steps(imported) == [(END["content"], "")]
    assert list(imported.questions.values()) == [USER["content"]]
    assert [m.role for m in imported.trajectories[0].prompt] == ["system", "user", "assistant", "user"]


@pytest.mark.skipif(not hasattr(pa, "json_"), reason="pyarrow has no type of JSON text")
def test_columns_of_json_text_in_parquet(tmp_path: Path) -> None:
    """``datasets`` 5 writes such columns if a field is text in some records and a list in others."""
    parts = [{"type": "text", "text": "It is \\boxed{4}."}]
    texts = pa.array([json.dumps("What is\n2+2?"), json.dumps(parts)])
    contents = pa.StructArray.from_arrays(
        [pa.array(["user", "assistant"]), pa.ExtensionArray.from_storage(pa.json_(), texts)],
        ["role", "content"],
    )
    column = pa.ListArray.from_arrays([0, 2], contents)
    table = pa.table({"messages": column, "reward": pa.array([0.5], pa.float32())})
    pq.write_table(table, tmp_path / "chats.parquet")
    [trajectory] = import_trajectories(tmp_path / "chats.parquet").trajectories
    assert trajectory.prompt[0].content == "What is\n2+2?"
    assert trajectory.steps[0].text == "It is \\boxed{4}."


def test_a_prompt_and_a_completion_may_be_text(tmp_path: Path) -> None:
    imported = read(tmp_path, prompt="2+2?", completion="4")
    assert steps(imported) == [("4", "")] and list(imported.questions.values()) == ["2+2?"]


@pytest.mark.parametrize(
    ("given", "reward"),
    [
        (True, 1.0),
        (False, 0.0),
        ("1", 1.0),
        (" 0.5 ", 0.5),
        ("true", 1.0),
        ("False", 0.0),
        ("incorrect", 0.0),
        ("-1e2", -100.0),
        (3, 3.0),
    ],
)
def test_a_reward_may_be_a_truth_value_or_text(tmp_path: Path, given: Any, reward: float) -> None:
    assert read(tmp_path, reward=given, messages=[USER, END]).trajectories[0].reward == reward


def test_dropped_fields_are_counted(tmp_path: Path) -> None:
    chat = [
        {**USER, "name": "Ada"},
        {"role": "assistant", "content": "I ask.", "tool_calls": [call()], "weight": 0, "refusal": None},
        {**RESULT, "name": "weather"},
        {**END, "weight": 1, "train": True, "annotations": [], "audio": None, "logprobs": {"content": [1]}},
    ]
    imported = read(tmp_path, messages=chat, tools=[{"type": "function"}], parallel_tool_calls=True, id=3)
    assert imported.dropped == {
        "'logprobs' of messages of the role assistant": 1,
        "'name' of messages of the role user": 1,
        "'train' of messages of the role assistant": 1,
        "'weight' of messages of the role assistant": 2,
        "column 'id'": 1,
        "column 'parallel_tool_calls'": 1,
        "column 'tools'": 1,
    }


def test_a_refusal_is_the_text_of_the_assistant(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": None, "refusal": "I cannot help."}
    parts = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot help."}]}
    for item in (answer, parts):
        assert steps(read(tmp_path, messages=[USER, item])) == [("I cannot help.", "")]


@pytest.mark.parametrize(
    "content", [None, "", {"degrees": 4}, [{"degrees": 4}], [], {"type": "text", "text": "a"}]
)
def test_a_tool_may_return_json_or_nothing(tmp_path: Path, content: Any) -> None:
    answer = {"role": "assistant", "tool_calls": [call()]}
    imported = steps(read(tmp_path, messages=[USER, answer, {"role": "tool", "content": content}, END]))[0][1]
    text = "a" if isinstance(content, dict) and "type" in content else json.dumps(content) if content else ""
    assert imported == text


def answer(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", **fields}, END]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [END]}, "no column 'question' .* and no user message .* has the columns reward, messages"),
    ({"question": "q?"}, "no column 'messages' .*; the record has the columns reward, question"),
    ({"messages": [USER, END], "reward": None}, "'reward' must be a finite number, not None"),
    ({"messages": [USER, END], "reward": "nan"}, "'reward' must be a finite number, not 'nan'"),
    ({"messages": [USER, END], "reward": ""}, "'reward' must be a finite number"),
    ({"prompt": " ", "messages": [END]}, "'prompt' is empty"),
    (answer(content=""), "message 1 of the assistant is empty"),
    (answer(content=" \n", tool_calls=[]), "message 1 of the assistant is empty"),
    (answer(content=[]), "message 1 of the assistant is empty"),
    (answer(content=3), "message 1: 'content' must be text, not int"),
    (
        answer(content="a", tool_calls=[call("{city: Oslo}")]),
        "message 1: the arguments of weather are not JSON",
    ),
    (answer(content="a", tool_calls=[call([1])]), "the arguments of weather must be an object, not list"),
    (answer(content="a", tool_calls=[{"id": "a"}]), "'tool_calls' must be a list of function calls"),
    (answer(content="a", tool_calls=[call(name="")]), "each with a name"),
    (answer(content="a", reasoning=3), "thinking must be text, not int"),
    (
        answer(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        "type 'image_url': Outrider trains on text",
    ),
    (answer(content=[{"type": "input_audio"}]), "type 'input_audio': Outrider trains on text"),
    (answer(content="a", images=["x"]), "contains 'images': Outrider trains on text"),
    ({"messages": [USER, END], "images": ["x"]}, "column 'images' is not text"),
    (answer(content=[{"type": "hologram"}]), "a part of the unknown type 'hologram'"),
    (answer(content=[3]), "a part of 'content' must be an object, not int"),
    (answer(content=[{"type": "text"}]), "a part of the type 'text' has no text"),
    (
        {"messages": [USER, {"type": "web_search_call", "id": "a"}, END]},
        "an item of the type 'web_search_call'",
    ),
    (
        {"messages": [{"role": "user", "content": None}, END]},
        "message 0: 'content' must be text, not NoneType",
    ),
    ({"conversations": [{"from": "narrator", "value": "a"}]}, "message 0 has unknown role 'narrator'"),
    (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "no JSON"}]},
        "message 1: 'tool_calls' must be a list of function calls",
    ),
    (answer(content="Better ask.", channel="analysis"), "message 1 is thinking or a call in OpenAI"),
    (answer(content="{}", channel="commentary", recipient="functions.weather"), "Harmony format"),
]


@pytest.mark.parametrize(("record", "reason"), REFUSED, ids=[reason[:40] for _, reason in REFUSED])
def test_records_that_cannot_be_read_are_refused_with_the_reason(
    tmp_path: Path, record: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DataError, match=f"a.jsonl:1: .*{reason}"):
        read(tmp_path, **record)
    path = tmp_path / "a.jsonl"
    path.write_text(path.read_text() + json.dumps({"messages": [USER, END], "reward": 1}) + "\n")
    imported = import_trajectories(path, on_malformed="skip")
    assert len(imported.trajectories) == len(imported.problems) == 1


def test_a_missing_reward_is_named_with_the_columns(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [USER, END], "score": 1}))
    with pytest.raises(DataError, match=r"no column 'reward' .* has the columns messages, score"):
        import_trajectories(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("record", "suggestion"),
    [
        ({"messages": [USER, END], "Rewards": 1}, "if 'Rewards' contains it, rename it to 'reward'"),
        ({"messages": [USER, END], "score": 1}, "if 'score' contains it, rename it to 'reward'"),
        ({"message": [USER, END], "reward": 1}, "if 'message' contains it, rename it to 'messages'"),
        ({"trajectory": [USER, END], "reward": 1}, "if 'trajectory' contains it, rename it to 'messages'"),
        (
            {"prompt": "q?", "response": "a", "reward": 1},
            "if 'response' contains it, rename it to 'completion'",
        ),
        ({"messages": [END], "instruction": "q?", "reward": 1}, "if 'instruction' contains it, rename it to"),
        ({"messages": [USER, END], "notes": 1}, "has the columns messages, notes$"),
    ],
)
def test_a_missing_column_comes_with_a_suggestion(
    record: dict[str, Any], suggestion: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(DataError, match=suggestion):
        import_trajectories(tmp_path / "a.jsonl")


CHAT = [
    USER,
    {"role": "assistant", "content": None, "reasoning": "Better ask.", "tool_calls": [call()]},
    RESULT,
    END,
]
RECORDS = [
    {"messages": CHAT, "reward": 1.0, "task_key": "t"},
    {"messages": [USER, END], "reward": 0.0, "task_key": "t"},
]


def _jsonl(path: Path) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, RECORDS)).encode())
    return path


def _array(path: Path) -> Path:
    path = path.with_suffix(".json")
    path.write_text("\n" + json.dumps(RECORDS, indent=1))
    return path


def _array_of_lines(path: Path) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text(json.dumps(RECORDS))
    return path


def _lines_called_json(path: Path) -> Path:
    path = path.with_suffix(".json")
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    return path


def _parquet(path: Path) -> Path:
    path = path.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(RECORDS), path)
    return path


def _csv(path: Path) -> Path:
    path = path.with_suffix(".csv")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["messages", "reward", "task_key"])
        writer.writeheader()
        writer.writerows({**item, "messages": json.dumps(item["messages"])} for item in RECORDS)
    return path


def _saved(path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(RECORDS).save_to_disk(str(path))
    return path


KINDS = [_jsonl, _array, _array_of_lines, _lines_called_json, _parquet, _csv, _saved]


@pytest.mark.parametrize("write", KINDS)
def test_every_kind_of_file_gives_the_same_trajectories(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    imported = import_trajectories(write(tmp_path / "a"))
    assert [[step.text for step in item.steps] for item in imported.trajectories] == [
        [THOUGHT + CALL, END["content"]],
        [END["content"]],
    ]
    assert imported.dropped == {} and [item.reward for item in imported.trajectories] == [1.0, 0.0]


def test_errors_of_other_kinds_of_files(tmp_path: Path) -> None:
    cases: dict[str, tuple[bytes, str]] = {
        "a.json": (b"[{]", "a.json:1: not JSON"),
        "b.json": (b"[" * 100_000, "b.json:1: "),
        "c.json": (b"[1]", "c.json:1: a record is an object, not int"),
        "d.csv": (b"messages,reward\n[],x\n", r"d.csv:1: "),
        "e.csv": (b"\xff\xfe\n1", "e.csv: cannot be read"),
        "f.csv": (b'messages,reward\n"a', "f.csv: cannot be read"),
        "g.json": (b"", "g.json: no usable trajectory"),
    }
    for name, (data, reason) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=reason):
            import_trajectories(tmp_path / name)
    with pytest.raises(DataError, match="is no folder that datasets saved: name a file"):
        import_trajectories(tmp_path)
    (tmp_path / "dataset_dict.json").write_text("{}")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "state.json").write_text("{}")
    with pytest.raises(DataError, match="contains the splits train: name the folder of one of them"):
        import_trajectories(tmp_path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["text", "{", "[1]", "{}"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "name", "input", "arguments", "function", "content", "role", "value"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["assistant", "user", "tool", "system", "function"])},
    optional=dict.fromkeys(
        ("content", "tool_calls", "function_call", "reasoning", "thinking", "type", "from", "refusal"), JSON
    ),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(MESSAGES | JSON, max_size=4), key=st.sampled_from(["messages", "conversations"]))
def test_any_chat_is_imported_or_refused(tmp_path: Path, messages: list[Any], key: str) -> None:
    try:
        imported = read(tmp_path, **{key: [USER, *messages, END]})
    except DataError as error:
        assert str(error).startswith(f"{tmp_path / 'a.jsonl'}:1: ")
    else:
        assert all(step.text.strip() for step in imported.trajectories[0].steps)


def test_nulls_of_a_table_are_no_arguments(tmp_path: Path) -> None:
    def record(arguments: Mapping[str, Any]) -> dict[str, Any]:
        chat = [USER, {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}, RESULT, END]
        return {"messages": chat, "reward": 1.0}

    table = pa.Table.from_pylist([record({"city": "Oslo"}), record({"country": "Norway"})])
    pq.write_table(table, tmp_path / "a.parquet")
    imported = import_trajectories(tmp_path / "a.parquet")
    assert '"arguments": {"city": "Oslo"}}' in imported.trajectories[0].steps[0].text
    assert '"arguments": {"country": "Norway"}}' in imported.trajectories[1].steps[0].text


def test_nulls_that_a_table_wrote_to_json_lines_are_no_arguments(tmp_path: Path) -> None:
    """Arguments in JSON text are as they were written."""
    for arguments, expected in (
        ({"city": "Oslo", "country": None}, '{"city": "Oslo"}'),
        ('{"city": "Oslo", "country": null}', '{"city": "Oslo", "country": null}'),
    ):
        calls = [{"type": "function", "function": {"name": "find", "arguments": arguments}}]
        chat = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, RESULT, END]
        (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat, "reward": 1.0}) + "\n")
        [trajectory] = import_trajectories(tmp_path / "a.jsonl").trajectories
        assert f'"arguments": {expected}}}' in trajectory.steps[0].text


OTHER = {"id": "b", "type": "function", "function": {"name": "tides", "arguments": "{}"}}
BOTH = CALL + '\n<tool_call>\n{"name": "tides", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("answer", "text", "is_different"),
    [
        ({"content": CALLS["Anthropic"]["content"], "tool_calls": [call()]}, CALL, False),
        ({"content": None, "tool_calls": [call()], **CALLS["function_call"]}, CALL, False),
        ({"content": CALL, "tool_calls": [call()]}, CALL, False),
        ({"content": None, "tool_calls": [call(), call()]}, f"{CALL}\n{CALL}", False),
        ({"content": CALLS["Anthropic"]["content"], "tool_calls": [OTHER]},
         BOTH.removeprefix(CALL + "\n"), True),
        ({"content": CALL, "tool_calls": [call(), OTHER]}, BOTH, False),
    ],
)  # fmt: skip
def test_repeated_calls_of_a_message_are_used_once(
    tmp_path: Path, answer: dict[str, Any], text: str, is_different: bool
) -> None:
    imported = read(tmp_path, messages=[USER, {"role": "assistant", **answer}, RESULT, END])
    assert steps(imported)[0] == (text, "4 C")
    assert ("calls beside others of the same message" in imported.dropped) == is_different


PARALLEL: dict[str, list[dict[str, Any]]] = {
    "OpenAI": [
        {"role": "assistant", "content": None, "tool_calls": [call(), OTHER]},
        {"role": "tool", "tool_call_id": "b", "content": "low"},
        RESULT,
    ],
    "Anthropic": [
        {"role": "assistant", "content": [
            *CALLS["Anthropic"]["content"], {"type": "tool_use", "id": "b", "name": "tides", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "low"}]},
            {"type": "tool_result", "tool_use_id": "a", "content": "4 C"},
        ]},
    ],
    "Responses": [
        {"type": "function_call", "id": "1", "call_id": "a", "name": "weather",
         "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "id": "2", "call_id": "b", "name": "tides", "arguments": "{}"},
        {"type": "function_call_output", "id": "3", "call_id": "b", "output": "low"},
        {"type": "function_call_output", "id": "4", "call_id": "a", "output": "4 C"},
    ],
    "Vercel": [
        {"role": "assistant", "content": [
            {"type": "tool-call", "toolCallId": "a", "toolName": "weather", "input": {"city": "Oslo"}},
            {"type": "tool-call", "toolCallId": "b", "toolName": "tides", "input": {}},
        ]},
        {"role": "tool", "content": [
            {"type": "tool-result", "toolCallId": "b", "output": {"type": "text", "value": "low"}},
            {"type": "tool-result", "toolCallId": "a", "output": {"type": "text", "value": "4 C"}},
        ]},
    ],
    "LangChain": [
        {"type": "ai", "content": "", "tool_calls": [
            {"name": "weather", "args": {"city": "Oslo"}, "id": "a"},
            {"name": "tides", "args": {}, "id": "b"},
        ]},
        {"type": "tool", "data": {"content": "low", "tool_call_id": "b"}},
        {"type": "tool", "content": "4 C", "tool_call_id": "a"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", PARALLEL)
def test_results_of_parallel_calls_are_in_the_order_of_the_calls(tmp_path: Path, form: str) -> None:
    assert steps(read(tmp_path, messages=[USER, *PARALLEL[form], END]))[0] == (BOTH, "4 C\nlow")


def test_results_without_the_ids_of_the_calls_stay_in_their_order(tmp_path: Path) -> None:
    results = [{"role": "tool", "content": "low"}, RESULT]
    imported = read(tmp_path, messages=[USER, PARALLEL["OpenAI"][0], *results, END])
    assert steps(imported)[0] == (BOTH, "low\n4 C")


@pytest.mark.parametrize(
    "result", [[{"type": "museum", "name": "M"}], [{"type": "file", "path": "a"}, {"type": "folder"}]]
)
def test_a_result_that_is_a_list_with_types_stays_json(tmp_path: Path, result: list[Any]) -> None:
    answer = {"role": "assistant", "content": None, "tool_calls": [call()]}
    imported = read(tmp_path, messages=[USER, answer, {"role": "tool", "content": result}, END])
    assert json.loads(steps(imported)[0][1]) == result


def test_smaller_faults_of_chats(tmp_path: Path) -> None:
    spoken = {"from": "Function_Call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'}
    assert steps(read(tmp_path, conversations=[{"from": "human", "value": "q"}, spoken]))[0][0] == CALL
    with pytest.raises(DataError, match="message 1 of a call has no call"):
        read(tmp_path, conversations=[{"from": "human", "value": "q"}, spoken | {"value": None}])
    imported = read(tmp_path, prompt="q", completion="[1, 2]", document="a text")
    assert steps(imported)[0][0] == "[1, 2]" and imported.dropped["column 'document'"] == 1
    spaced = read(tmp_path, question=" q ", messages=[USER, END]).trajectories[0].task_key
    assert spaced == read(tmp_path, question="q", messages=[USER, END]).trajectories[0].task_key


def test_what_cannot_be_read_in_a_chat_is_counted_or_named(tmp_path: Path) -> None:
    unread = "<tool_call>\n{'name': 'weather', 'arguments': {}}\n</tool_call>"
    imported = read(tmp_path, messages=[USER, {"role": "assistant", "content": unread}, RESULT, END])
    assert steps(imported)[0][0] == unread
    assert imported.dropped["calls in the text that cannot be read (they stay as they are)"] == 1
    thinking = {"role": "assistant", "content": "hm</think>\n5", "reasoning_content": "hm"}
    assert steps(read(tmp_path, messages=[USER, thinking]))[0][0] == "hm</think>\n5"
    mention = {"role": "assistant", "content": "The tag </think> ends it.", "reasoning_content": "hm"}
    assert steps(read(tmp_path, messages=[USER, mention]))[0][0].startswith("<think>\nhm\n</think>")
    asked = {"role": "assistant", "content": "I ask.", "tool_calls": [call()]}
    counted = read(tmp_path, messages=[USER, asked, {**RESULT, "content": 5}, END])
    assert steps(counted)[0][1] == "5"
    for key in ("parts", "toolInvocations", "additional_kwargs"):
        said = {"role": "assistant", "content": "", key: [{"text": "5"}]}
        with pytest.raises(DataError, match=f"message 1 has '{key}', which Outrider does not"):
            read(tmp_path, messages=[USER, said])


def test_calls_of_older_langchain_exports_are_read(tmp_path: Path) -> None:
    older = {"role": "assistant", "content": "I ask.", "additional_kwargs": {"tool_calls": [call()]}}
    imported = read(tmp_path, messages=[USER, older, RESULT, END])
    assert CALL in steps(imported)[0][0] and not imported.dropped
    both = {**older, "tool_calls": [call()]}
    both["additional_kwargs"] = {**older["additional_kwargs"], "refusal": None}  # type: ignore[dict-item]
    assert not read(tmp_path, messages=[USER, both, RESULT, END]).dropped
    said = {**USER, "additional_kwargs": {"tool_calls": [call()]}}
    assert read(tmp_path, messages=[said, older, RESULT, END]).dropped


def test_a_key_that_occurs_twice_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "twice.jsonl").write_text('{"reward": 1, "reward": 0, "messages": []}\n')
    with pytest.raises(DataError, match="'reward' occurs more than once"):
        import_trajectories(tmp_path / "twice.jsonl")


def test_items_in_a_text_column_are_messages(tmp_path: Path) -> None:
    items = [{"type": "reasoning", "content": "Better ask."}, *PARALLEL["Responses"][:1],
             {"type": "function_call_output", "call_id": "a", "output": "4 C"}, END]  # fmt: skip
    imported = read(tmp_path, prompt="q", completion=json.dumps(items))
    assert steps(imported) == [(THOUGHT + CALL, "4 C"), ("It is \\boxed{4}.", "")]
    with pytest.raises(DataError, match="unknown role 'critic'"):
        read(tmp_path, prompt="q", completion='[{"role": "critic", "content": "x"}]')


def test_results_stay_behind_a_message_of_the_user(tmp_path: Path) -> None:
    nameless = {"id": None, "function": {"name": "tides", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [nameless, call()]}
    between = [RESULT, {"role": "user", "content": "and?"}, {"role": "tool", "content": "low"}]
    assert steps(read(tmp_path, messages=[USER, answer, *between, END]))[0][1] == "4 C\nand?\nlow"


def test_a_call_in_thinking_is_no_call_of_the_message(tmp_path: Path) -> None:
    thought = "<think>\n<tool_call>{}</tool_call>\n</think>\n\nok".replace(
        "{}", '{"name": "tides", "arguments": {}}'
    )
    imported = read(
        tmp_path, messages=[USER, {"role": "assistant", "content": thought, "tool_calls": [call()]}, END]
    )
    assert steps(imported)[0][0] == f"{thought}\n{CALL}" and not imported.dropped


@pytest.mark.parametrize(
    "part",
    [{"type": "image", "data": "AAAA"}, {"type": "image", "url": "x"}, {"type": "audio", "base64": "AAAA"},
     {"type": "input_file", "file_url": "x"}, {"type": "image", "source": {"data": "AAAA"}}],
    ids=str,
)  # fmt: skip
def test_a_result_with_an_image_is_refused(tmp_path: Path, part: dict[str, Any]) -> None:
    result = [{"type": "text", "text": "see"}, part]
    answer = {"role": "assistant", "content": None, "tool_calls": [call()]}
    with pytest.raises(DataError, match="trains on text"):
        read(tmp_path, messages=[USER, answer, {"role": "tool", "content": result}, END])


def test_an_instruction_and_ok_are_not_the_question(tmp_path: Path) -> None:
    def record(number: int, **columns: Any) -> dict[str, Any]:
        texts = ["Solve tasks.", "OK", f"Your task is {number}.", "go", "You see it.", "take"]
        items = [{"from": "gpt" if n % 2 else "human", "value": text} for n, text in enumerate(texts)]
        return {"conversations": items, "reward": 1.0, **columns}

    path = tmp_path / "eto.jsonl"
    path.write_text("\n".join(json.dumps(record(n % 3)) for n in range(6)))
    imported = import_trajectories(path)
    keys = [question_key(f"Your task is {n % 3}.") for n in range(6)]
    assert [one.task_key for one in imported.trajectories] == keys
    assert {one.trajectory_id for one in imported.trajectories} == {
        one.trajectory_id for one in import_trajectories(path).trajectories
    }
    assert all(len(one.steps) == 2 and len(one.prompt) == 3 for one in imported.trajectories)
    assert imported.questions[keys[0]] == "Your task is 0."
    blank = record(0)
    blank["conversations"][2]["value"] = " "
    path.write_text(json.dumps(blank))
    assert import_trajectories(path).trajectories[0].task_key == question_key("Solve tasks.")
    path.write_text("\n".join(json.dumps(record(n, question="Solve tasks.")) for n in range(3)))
    assert all(len(one.steps) == 3 for one in import_trajectories(path).trajectories)


@pytest.mark.parametrize("column", ["agent", "task_key", "trajectory_id"])
def test_null_is_a_missing_value(column: str, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    [one] = read(tmp_path, messages=chat, **{column: None}).trajectories
    assert one == read(tmp_path, messages=chat).trajectories[0]
