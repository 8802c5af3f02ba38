"""Pages of a file: names of pages, calls, episodes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.environments.base import EnvironmentTaskSet
from outrider.environments.tool_qa.environment import ToolEnvironment, ToolsConfig, system_prompt
from outrider.errors import ToolUnavailable
from outrider.testing import check_tool
from outrider.tools.base import ToolContext
from outrider.tools.browser.pages import BrowserSettings
from outrider.tools.browser.tool import EMPTY, UNKNOWN, Browser
from outrider.types import Message
from tests.tools.browser.pages import ROWS, browser

TOWER = "Tower\nThe tower stands in Paris.\nIt was built in 1889. It is 330 metres high."


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Tower", TOWER),  # rows of one title are one page
        ("  tOWER \n", TOWER),
        ("3", TOWER),  # any row's id
        ("[3]", TOWER),
        ("1", "1\nOne is a number."),  # a title before an id
        ("Sea | a poem", "Sea | a poem\nBlue is the sea. Nobody counts its waves."),
        ("http://a.org/x#part", "Same\nThe first of two."),
        ("https://b.org/x/", "Same\nThe second of two."),
        ("Bridge | height", UNKNOWN),
        ("|", UNKNOWN),
        ("| height", UNKNOWN),
        ("https://c.org/x", UNKNOWN),
        ("file:///etc/passwd", UNKNOWN),
        ("same | which", "Several pages are called that: https://www.a.org/x/, https://b.org/x"),
    ],
)
def test_a_page_has_several_names_and_an_unknown_one_is_an_observation(
    tmp_path: Path, text: str, shown: str
) -> None:
    output = browser(tmp_path).run_text(text)
    is_unknown = shown == UNKNOWN or shown.startswith("Several pages")
    assert (output.text, output.failed) == (shown, is_unknown)


def test_the_passages_about_the_question_are_returned(tmp_path: Path) -> None:
    text = " ".join(f"Chapter {i} is about nothing." for i in range(50))
    rows = [{"title": "Book", "text": f"{text} The whale is white. {text}"}]
    output = browser(tmp_path, rows, max_chars=200, reader={"passage_chars": 60}).run_text(
        "Book | whale white"
    )
    assert "The whale is white." in output.text and len(output.text) <= 200 + len("Book\n")
    assert output.text.startswith("Book\n...\n") and output.text.endswith("\n...")


def test_text_after_max_page_chars_is_not_read(tmp_path: Path) -> None:
    rows = [{"title": "Book", "text": "nothing. " * 40 + "The whale is white."}]
    tool = browser(tmp_path, rows, max_page_chars=300)
    assert "whale" not in tool.run_text("Book | whale").text
    assert "whale" in browser(tmp_path, rows).run_text("Book | whale").text


def test_without_a_reader_the_beginning_is_returned(tmp_path: Path) -> None:
    tool = browser(tmp_path, reader={"type": "none"}, max_chars=40)
    output = tool.run_text("tower | metres")
    assert output.text == "Tower\n" + TOWER.removeprefix("Tower\n")[:37] + "..."


def test_the_contract_of_a_plug_in(tmp_path: Path) -> None:
    check_tool(
        browser(tmp_path), texts=("Tower | high", "Sea | a poem | blue", "same", "9" * 3000 + "|" * 500)
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60), st.sampled_from(["", "Tower", "Tower |", "https://a.org/x |", "2"]))
def test_no_text_of_a_policy_raises(tmp_path: Path, text: str, prefix: str) -> None:
    shown = browser(tmp_path).run_text(prefix + text).text
    assert shown.encode("utf-8")


def test_equal_content_is_read_once_under_any_name(tmp_path: Path) -> None:
    tool = browser(tmp_path)
    questions: list[str] = []
    read = tool._read
    tool._read = lambda page, question: questions.append(question) or read(page, question)  # type: ignore[func-returns-value]
    texts = {tool.run_text(call).text for call in ("Tower | high", "3 |  high", "tower|high")}
    assert len(texts) == 1 and questions == ["high"]


def test_missing_pages_stop_the_run_before_its_first_rollout(tmp_path: Path) -> None:
    def context_with(**files: Path) -> ToolContext:
        return ToolContext(environment=SimpleNamespace(**{"corpus": None, "pages": None} | files))

    with pytest.raises(ToolUnavailable, match="no pages, no corpus and no fetch"):
        Browser.build(BrowserSettings(), context_with())
    with pytest.raises(ToolUnavailable, match=r"browser: .*gone\.jsonl: no such file"):
        Browser.build(BrowserSettings(), context_with(pages=tmp_path / "gone.jsonl"))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"title": "a"}\n')
    with pytest.raises(ToolUnavailable, match=r"bad\.jsonl:1: no column 'text'"):
        Browser.build(BrowserSettings(), context_with(corpus=bad))


def _family(folder: Path, **settings: Any) -> EnvironmentTaskSet:
    corpus, data = folder / "corpus.jsonl", folder / "qa.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    data.write_text('{"question": "How high?", "answer": "330"}\n')
    tree = {"corpus": corpus, "train": {"path": data}, "tools": ["search", "browser"]} | settings
    return ToolEnvironment.build(ToolsConfig.model_validate(tree))


def test_an_episode_searches_then_reads_and_both_are_calls(tmp_path: Path) -> None:
    family = _family(tmp_path, search={"top_k": 1, "show_ids": True})
    factory = family.make()
    environment = factory(family.tasks("train")[0])
    system, _ = environment.reset(0)
    assert "<browser>page | what you look for</browser>" in system.content
    assert family.stop == ("</search>", "</browser>", "</answer>")

    def act(text: str) -> Any:
        return environment.step(Message(role="assistant", content=text))

    output = act("<think>a</think><search>built metres</search>")
    assert "[3] Tower: It was built in 1889." in output.message.content
    read = act("<browser>[3] | high metres</browser>")
    assert "330 metres" in read.message.content
    assert (read.tools, read.num_tool_calls) == (("browser",), 1)
    act("<browser>Nowhere</browser>")
    end = act(r"<answer>\boxed{330}</answer>")
    metrics = environment.result().metrics
    assert (metrics["num_tool_calls_browser"], metrics["num_failed_calls"]) == (2.0, 1.0)
    assert end.reward == pytest.approx(1.1)  # two tools were executed
    factory.close()


def test_the_short_prompt_names_the_browser(tmp_path: Path) -> None:
    family = _family(tmp_path, tools=[{"type": "browser", "reader": {"type": "none"}}], prompt="short")
    assert "<browser>...</browser>" in system_prompt(family.settings)
    family.make().close()


def test_an_empty_page_is_an_observation(tmp_path: Path) -> None:
    tool = browser(tmp_path)
    assert tool._pages is not None
    tool._pages._texts["Tower"] = ["  "]
    assert tool.run_text("Tower").text == EMPTY
