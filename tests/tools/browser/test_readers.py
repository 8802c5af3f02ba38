"""Readers of a page: passages within the limit, or the answer of a chat server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ToolFault, ToolUnavailable
from outrider.testing import check_tool
from outrider.tools.browser.pages import Page
from outrider.tools.browser.tool import NO_MATCH, NOTHING_READ, read_passages, split_passages
from tests.chat_server import Answer, Asked, chat_server, completion
from tests.tools.browser.pages import browser

SERVED = Answer({"data": [{"id": "reader", "owned_by": "x"}]})


def page(text: str) -> Page:
    return Page(address="a", title="A", text=text)


@given(st.text(max_size=400), st.integers(40, 90))
def test_passages_contain_every_word_in_order_within_the_limit(text: str, size: int) -> None:
    pieces = list(split_passages(text, size))
    assert all(0 < len(piece) <= size for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


@given(st.text(alphabet="ab. \n", max_size=400), st.text(max_size=9), st.integers(40, 200))
def test_the_answer_is_never_longer_than_the_limit(text: str, question: str, most: int) -> None:
    assert len(read_passages(page(text or "."), question, 50, most)) <= most


def test_passages_end_with_sentences_or_with_words() -> None:
    assert list(split_passages("One is. Two is! Three is?", 16)) == ["One is. Two is!", "Three is?"]
    assert list(split_passages("a" * 20 + " " + "b" * 50, 40)) == ["a" * 20, "b" * 40, "b" * 10]


def test_the_best_passages_are_in_the_order_of_the_page() -> None:
    text = "\n".join(["Red sea."] + [f"Word{i} stands here alone." for i in range(9)] + ["Red red sea sea."])
    assert read_passages(page(text), "red sea", 40, 60).split("\n") == [
        "Red sea. Word0 stands here alone.", "...", "Red red sea sea.",
    ]  # fmt: skip


@given(st.integers(40, 120))
def test_a_hit_is_returned_at_any_limit(most: int) -> None:
    """The marks of omitted text must leave room for it."""
    text = "Nothing is here. " * 20 + "The whale is blue and as long as the text lets it be. " + "No. " * 50
    shown = read_passages(page(text), "whale", most, most)
    assert "whale" in shown and NO_MATCH not in shown and len(shown) <= most


def test_without_a_hit_the_beginning_is_returned_with_a_note() -> None:
    shown = read_passages(page("Blue is the sea. " * 9), "whale", 40, 70)
    assert shown.startswith(f"{NO_MATCH}\nBlue") and len(shown) == 70
    assert read_passages(page("?!"), "whale", 40, 70) == "?!"


def replies_in_order(*replies: Answer) -> Callable[[Asked], Answer]:
    left = list(replies)
    return lambda asked: SERVED if asked.body is None else (left.pop(0) if len(left) > 1 else left[0])


def reader(url: str, **settings: Any) -> dict[str, Any]:
    return {"type": "endpoint", "endpoint": {"base_url": url, "backoff_s": 0, "timeout_s": 5}, **settings}


def test_a_model_reads_the_page_once_for_a_question(tmp_path: Path) -> None:
    script = replies_in_order(completion("<think>hm</think> 330 metres."), completion("other"))
    with chat_server(script) as server:
        tool = browser(tmp_path, reader=reader(server.url, max_tokens=9))
        assert tool.run_text("Tower | height").text == "Tower\n330 metres."
        assert tool.run_text("3 | height").text == "Tower\n330 metres."
        assert tool.run_text("Tower").text.startswith("Tower\nThe tower stands")  # nothing to ask for
        _, (asked) = server.asked
    assert asked.body is not None
    assert (asked.body["model"], asked.body["max_tokens"], asked.body["temperature"]) == ("reader", 9, 0.0)
    assert "Looked for: height" in asked.body["messages"][1]["content"]
    assert "It is 330 metres high." in asked.body["messages"][1]["content"]


@pytest.mark.parametrize(
    ("reply", "shown"),
    [
        (completion(""), NOTHING_READ),
        (completion("<think>and so on", finish="length"), NOTHING_READ),
        (completion("It is", finish="length"), "It is..."),
        (completion("x" * 99), "x" * 37 + "..."),
        (completion("a\ud800b"), "a?b"),
    ],
)
def test_any_answer_of_the_model_becomes_text_within_the_limit(
    tmp_path: Path, reply: Answer, shown: str
) -> None:
    with chat_server(replies_in_order(reply)) as server:
        tool = browser(tmp_path, reader=reader(server.url), max_chars=40)
        assert tool.run_text("Tower | height").text == f"Tower\n{shown}"


def test_a_page_that_is_too_long_for_the_server_is_halved(tmp_path: Path) -> None:
    words = "word " * 1000
    limit = 1500

    def script(asked: Asked) -> Answer:
        if asked.body is None:
            return SERVED
        text = asked.body["messages"][1]["content"]
        if len(text) > limit:
            return Answer("This model's maximum context length is 300 tokens", status=400)
        return completion(f"{text.count('word')} words")

    rows = [{"id": "1", "title": "Long", "text": words}, {"id": "2", "title": "Short", "text": "word"}]
    with chat_server(script) as server:
        tool = browser(tmp_path, rows, reader=reader(server.url))
        assert tool.run_text("Long | height").text == "Long\n250 words"  # a quarter of it
        limit = 0
        with pytest.raises(ToolFault, match="maximum context length"):
            tool.run_text("Short | height")


def test_an_error_of_the_reader_is_a_fault_and_is_not_cached(tmp_path: Path) -> None:
    broken = Answer("down", status=500)
    with chat_server(replies_in_order(broken, broken, completion("330"))) as server:
        tool = browser(tmp_path, reader=reader(server.url))
        with pytest.raises(ToolFault, match=r"the reader's endpoint: .*status 500"):
            tool.run_text("Tower | height")
        assert tool.run_text("Tower | height").text == "Tower\n330"


@pytest.mark.parametrize("status", [401, 500])
def test_a_reader_that_does_not_respond_stops_the_run_before_it_starts(tmp_path: Path, status: int) -> None:
    with (
        chat_server([Answer("no", status=status)]) as server,
        pytest.raises(ToolUnavailable, match=str(status)),
    ):
        browser(tmp_path, reader=reader(server.url))


def test_the_contract_with_a_model_whose_answers_differ(tmp_path: Path) -> None:
    number = iter(range(10**6))
    script: Callable[[Asked], Answer] = lambda asked: (  # noqa: E731
        SERVED if asked.body is None else completion(f"reading {next(number)}")
    )
    with chat_server(script) as server:
        check_tool(browser(tmp_path, reader=reader(server.url)), texts=("Tower | height", "2 | sea"))
