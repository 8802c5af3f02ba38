"""An MCP server over HTTP: concurrent calls, bounded answers, servers that hang or end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

from outrider.errors import ToolFault, ToolUnavailable  # noqa: E402
from outrider.tools.mcp.tool import McpServer  # noqa: E402
from tests.tools.mcp.servers import built, http_server, serve_http  # noqa: E402
from tests.tools.mcp.test_calls import meet  # noqa: E402

LOST = "numbers was lost 1 times without an answered call: it is not started again"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_http(tmp_path_factory.mktemp("http")) as (url, _):
        yield url


def test_calls_over_http(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "abc")
    settings = http_server(url, headers={"Authorization": "Bearer $MY_TOKEN"})
    assert McpServer.lines(settings)["add"].startswith("Write <add>")
    with built(settings) as tools:
        assert tools["add"].run_text('{"a": 2, "b": 3}').text == "5"
        assert meet(tools["meet"], tmp_path, 4) == ["met"] * 4


@pytest.mark.parametrize("as_json", [False, True], ids=["events", "json"])
def test_an_answer_over_http_is_bounded(as_json: bool, url: str, tmp_path: Path) -> None:
    def check(url: str) -> None:
        with built(http_server(url, max_bytes=20_000, only=["shout"], timeout_s=10.0)) as tools:
            assert tools["shout"].run_text("x" * 100).text == "X" * 100
            with pytest.raises(ToolFault, match="shout was not answered"):
                tools["shout"].run_text("x" * 30_000)
            assert tools["shout"].run_text("hey").text == "HEY"

    if not as_json:
        check(url)
        return
    with serve_http(tmp_path, "--json") as (json_url, _):
        check(json_url)


def test_a_server_that_ends_is_a_fault_of_its_calls(tmp_path: Path) -> None:
    with serve_http(tmp_path) as (url, process):
        settings = http_server(url, max_restarts=0)
        with built(settings) as tools:
            assert tools["add"].run_text('{"a": 2}').text == "3"
            process.kill()
            process.wait()
            with pytest.raises(ToolFault, match="MCP server numbers: add was not answered"):
                tools["add"].run_text('{"a": 2}')
            with pytest.raises(ToolFault, match=LOST):
                tools["add"].run_text('{"a": 2}')
    with pytest.raises(ToolUnavailable, match="MCP server numbers: it cannot be reached"):
        McpServer.lines(http_server(url, only=["add"]))


def test_a_server_that_hangs_does_not_delay_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.tools.mcp.tool.McpConfig.LOOK_S", 0.3)
    monkeypatch.setattr("outrider.tools.mcp.session._CLOSE_S", 0.3)
    with serve_http(tmp_path) as (url, _):
        settings = http_server(url, timeout_s=1.0, start_timeout_s=30.0, max_restarts=0)
        McpServer.lines(settings)
        with built(settings) as tools:
            with pytest.raises(ToolFault, match="no answer to hang within 1 s; it is started again"):
                tools["hang"].run_text("{}")
            with pytest.raises(ToolFault, match=LOST):
                tools["add"].run_text('{"a": 2}')
