"""Search by a retrieval server: both request forms, order, retries, and failures that are never results."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.engines.chat import ChatEndpoint, EndpointSettings
from outrider.environments.base import make_task_set
from outrider.environments.tool_qa.environment import ToolsConfig
from outrider.errors import ToolFault, ToolUnavailable
from outrider.tools.http_search import HttpSearch, HttpSearchSettings
from outrider.tools.search import EMPTY_QUERY, NO_HITS, SearchConfig, SearchTool
from outrider.trace import Trace
from outrider.types import Outcome
from tests.chat_server import Answer
from tests.retrieval_server import MALFORMED, passages, retrieval_server
from tests.rollout.fakes import scheduler, scripted

PASSAGES = passages("red sky", "red sea " + "and so on " * 30, "green hill", "red")


def tool(url: str, **settings: object) -> HttpSearch:
    """A tool that does not wait between its tries."""
    config = HttpSearchSettings.model_validate({"base_url": url, "max_chars": 60, **settings})
    endpoint = EndpointSettings(
        base_url=url, timeout_s=config.timeout_s, max_retries=config.max_retries, backoff_s=0
    )
    return HttpSearch(config, ChatEndpoint(endpoint))


@pytest.mark.parametrize("form", ["search-r1", "verl-agent"])
def test_results_are_those_of_the_local_tool_in_the_order_of_their_scores(form: str) -> None:
    with retrieval_server(PASSAGES) as (url, server):
        found = tool(url, request=form).run_text("red sea").text
        (asked,) = server.asked
    assert asked.path == "/retrieve" and asked.authorization is None
    query = {"queries": ["red sea"]} if form == "search-r1" else {"query": "red sea"}
    assert asked.body == {**query, "topk": 3, "return_scores": True}
    local = SearchTool(PASSAGES, SearchConfig(top_k=3, max_chars=58)).run("red sea")
    assert len(local.passages) == 3 and local.num_cut == 1
    # the server's titles are in quotation marks
    assert [line.replace('"', "") for line in found.split("\n")] == local.text.split("\n")


def test_equal_queries_are_sent_once_and_an_empty_one_never() -> None:
    with retrieval_server(PASSAGES) as (url, server):
        search = tool(url)
        assert search.run_text("red  sky").text == search.run_text(" red sky ").text
        assert search.run_text("zebra").text == NO_HITS
        assert search.run_text(" ").text == EMPTY_QUERY
        assert len(server.asked) == 2


def test_ties_do_not_depend_on_the_order_of_the_server() -> None:
    rows = [{"document": {"contents": text}, "score": 1.0} for text in ("b\nx", "a", "a\ny")]
    answers = [Answer({"result": [rows]}), Answer({"result": [rows[::-1]]})]
    with retrieval_server(PASSAGES, answers) as (url, _):
        assert [tool(url).run_text("q").text for _ in range(2)] == ["a\na: y\nb: x"] * 2


@pytest.mark.parametrize("broken", [Answer(status=503), Answer(drop=True), *MALFORMED])
def test_a_failure_is_tried_again_and_then_a_fault(broken: Answer) -> None:
    with retrieval_server(PASSAGES, [broken, broken]) as (url, server):
        assert "red" in tool(url).run_text("red").text
        assert len(server.asked) == 3
    with retrieval_server(PASSAGES, [broken] * 9) as (url, server):
        with pytest.raises(ToolFault, match=r"http-search: .*gave up after 2 tries"):
            tool(url, max_retries=1).run_text("red")
        assert len(server.asked) == 2


def test_a_slow_server_is_a_fault() -> None:
    held = Answer({"result": [[]]}, hold=threading.Event())
    with retrieval_server(PASSAGES, [held]) as (url, _):
        with pytest.raises(ToolFault, match=r"no answer within 0\.05 s"):
            tool(url, timeout_s=0.05, max_retries=0).run_text("red")
        assert held.hold is not None
        held.hold.set()


def test_a_refused_request_is_a_fault_at_once() -> None:
    with retrieval_server(PASSAGES, [Answer({"detail": "topk"}, status=422)]) as (url, server):
        with pytest.raises(ToolFault, match="status 422"):
            tool(url).run_text("red")
        assert len(server.asked) == 1


def test_a_run_does_not_begin_without_its_server() -> None:
    settings = HttpSearchSettings(base_url="http://127.0.0.1:9", max_retries=0)
    with pytest.raises(ToolUnavailable, match=r"http-search: http://127\.0\.0\.1:9/retrieve"):
        HttpSearch.build(settings, SimpleNamespace(environment=None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no http or https address"):
        HttpSearchSettings(base_url="127.0.0.1:8000")


def test_an_episode_shows_results_in_the_chosen_tag_and_masks_failures(tmp_path: Path) -> None:
    (tmp_path / "qa.jsonl").write_text('{"question": "Colour of the sea?", "answer": "red"}\n')
    search, answer = "<think>a</think><search>sea</search>", "<think>b</think><answer>\\boxed{red}</answer>"
    engine = scripted(lambda request, text: answer if text.count("</information>") > 1 else search)

    def play(url: str) -> Trace:
        server = {"type": "http-search", "base_url": url, "max_retries": 0}
        settings = {"tools": [server], "result_tag": "information", "test": {"path": tmp_path / "qa.jsonl"}}
        task_set = make_task_set(ToolsConfig.model_validate(settings))
        player = scheduler(engine, task_set.make(), stop=task_set.stop, max_retries=0)  # type: ignore[arg-type]
        (trace,) = player.run(task_set.tasks("test"), modes=("plain",), training_step=0).traces
        return trace

    with retrieval_server(PASSAGES) as (url, _):
        trace = play(url)
    texts = [node.message.content for node in trace.nodes if node.message is not None]
    ((leaf, _),) = trace.rollouts()
    assert leaf.success and leaf.episode_return == 1.0
    assert any(text.startswith('\n<information>\n"p1": red sea') for text in texts), texts
    assert "result>" not in "".join(texts)  # not in the prompt either
    # the first search is that of the start
    with retrieval_server(PASSAGES, [Answer({"result": [[]]}), Answer(status=500)]) as (url, _):
        ((lost, _),) = play(url).rollouts()
    assert lost.outcome is Outcome.TOOL_FAULT and lost.episode_return is None
    assert "http-search" in (lost.detail or "")
