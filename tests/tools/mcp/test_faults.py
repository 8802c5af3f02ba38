"""What breaks on an MCP server's side: each is a tool fault in one line, and the server is started again."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

from outrider.errors import ConfigError, ToolFault, ToolUnavailable  # noqa: E402
from outrider.tools.base import ToolOutput  # noqa: E402
from outrider.tools.mcp import session as session_module  # noqa: E402
from outrider.tools.mcp.tool import McpConfig, McpServer
from tests.tools.mcp.servers import built, hostile, numbers, over_http  # noqa: E402

AGAIN = "; it is started again for the next call"


def test_a_death_in_a_call_is_a_fault_and_the_next_call_is_answered() -> None:
    with built(numbers(only=["die", "process_id"])) as tools:
        first = tools["process_id"].run_text("{}").text
        with pytest.raises(ToolFault) as fault:
            tools["die"].run_text('{"status": 3}')
        assert str(fault.value) == (
            "MCP server numbers: die was not answered: it hung up (it ended with status 3; its last words: "
            f"a grave fault){AGAIN}"
        )
        assert tools["process_id"].run_text("{}").text != first


def test_a_call_that_takes_too_long_ends_alone_where_the_server_still_answers() -> None:
    with built(numbers(only=["sleep", "process_id"], timeout_s=0.5)) as tools:
        first = _patiently(lambda: tools["process_id"].run_text("{}").text)
        with pytest.raises(ToolFault, match=r"no answer to sleep within 0\.5 s$"):
            tools["sleep"].run_text("{}")
        assert _patiently(lambda: tools["process_id"].run_text("{}").text) == first


@pytest.mark.long
def test_a_server_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.tools.mcp.tool.McpConfig.LOOK_S", 0.5)
    with built(numbers(only=["stop_all", "process_id"], timeout_s=0.5)) as tools:
        first = _patiently(lambda: tools["process_id"].run_text("{}").text)
        with ThreadPoolExecutor(2) as pool:  # both at that server: one restart, two faults
            faults = [pool.submit(tools["stop_all"].run_text, "{}").exception() for _ in range(2)]
        assert all("no answer to stop_all" in str(one) or "hung up" in str(one) for one in faults)
        assert any(str(one).endswith(AGAIN) for one in faults)
        assert _patiently(lambda: tools["process_id"].run_text("{}").text) != first


@pytest.mark.parametrize(
    ("how", "given", "said"),
    [
        ("garbage", {}, "it wrote 100 lines in a row that are no message"),
        ("endless-line", {"max_bytes": 2**20}, "it wrote a line of more than 1,048,576 bytes"),
        ("half-a-line", {}, 'it ended with status 4; it wrote \'{"jsonrpc": "2.0", "id"\' where messages'),
        ("long-answer", {"max_bytes": 100_000}, "it wrote a line of more than 100,000 bytes"),
    ],
)
def test_garbage_and_floods_end_the_server(
    how: str, given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with built(hostile(how, tmp_path, **given)) as tools:
        for _ in range(2):
            with pytest.raises(ToolFault) as fault:
                tools["say"].run_text("{}")
            assert said in str(fault.value) and str(fault.value).endswith(AGAIN)
    assert len((tmp_path / "starts").read_text()) == 3


@pytest.mark.parametrize("how", ["broken", "no-result"])
def test_a_fault_of_one_call_ends_no_server(how: str, tmp_path: Path) -> None:
    with built(hostile(how, tmp_path)) as tools:
        for _ in range(2):
            with pytest.raises(ToolFault, match="say was not answered"):
                tools["say"].run_text("{}")
    assert len((tmp_path / "starts").read_text()) == 2  # one for the list


def test_a_banner_on_stdout_is_passed_over_and_an_error_of_arguments_is_told(tmp_path: Path) -> None:
    with built(hostile("banner", tmp_path)) as tools:
        assert tools["say"].run_text("{}") == ToolOutput(text="start 2")
    with built(hostile("bad-arguments", tmp_path)) as tools:
        assert tools["say"].run_text("{}") == ToolOutput(text="it does not work", failed=True)


def test_an_argument_of_any_kind_is_taken(tmp_path: Path) -> None:
    with built(hostile("any-argument", tmp_path)) as tools:
        assert tools["say"].run_text('{"what": [1]}') == ToolOutput(text="start 2")
        assert tools["say"].run_text("{}").failed


def test_a_long_result_is_cut(tmp_path: Path) -> None:
    with built(hostile("long-answer", tmp_path, max_chars=10)) as tools:
        assert tools["say"].run_text("{}").text == "xxxxxxxxxx\n[199990 more characters]"


def test_starts_without_an_answered_call_are_limited(tmp_path: Path) -> None:
    with built(hostile("starts-once", tmp_path, max_restarts=2)) as tools:
        assert tools["say"].run_text("{}").text == "start 2"
        said = [_fault_of(lambda: tools["say"].run_text("{}")) for _ in range(5)]
        assert "not again" in said[1] or "not again" in said[2]
        assert said[-1].endswith("given up") and said[-1] == said[-2]


def test_an_answered_call_begins_the_count_anew(tmp_path: Path) -> None:
    with built(hostile("dies-after-each", tmp_path, max_restarts=1)) as tools:
        answered = 0
        for _ in range(12):
            try:
                tools["say"].run_text("{}")
                answered += 1
            except ToolFault as fault:
                assert "given up" not in str(fault)
        assert answered >= 4


def test_the_wait_before_a_start_doubles() -> None:
    waits = []
    for num_lost in range(5):
        one = object.__new__(session_module._Server)
        one._settings, one._num_lost = numbers(restart_wait_s=2.0), num_lost
        waits.append(one._wait_s())
    assert waits == [0.0, 0.0, 2.0, 6.0, 14.0]


def test_a_server_that_comes_back_as_another_one_is_a_fault(tmp_path: Path) -> None:
    said = "has other tools, or another version, than before"
    with built(hostile("other-version", tmp_path)) as tools, pytest.raises(ToolFault, match=said):
        tools["say"].run_text("{}")


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ("no-tools", ToolUnavailable, "MCP server hostile has no tool"),
        ("endless-list", ToolUnavailable, "its list of tools does not end"),
        ("two-alike", ConfigError, "'say' and 'Say' are both the tag 'say': choose one of them with only"),
        ("never-starts", ToolUnavailable, "it has not started within 0.5 s"),
    ],
)
def test_what_stops_a_run_before_its_first_rollout(
    how: str, error: type[Exception], said: str, tmp_path: Path
) -> None:
    limit = {"start_timeout_s": 0.5} if how == "never-starts" else {}
    with pytest.raises(error, match=said):
        McpServer.lines(hostile(how, tmp_path, **limit))


def test_a_program_that_is_no_server_is_told_with_its_last_words() -> None:
    with pytest.raises(ToolUnavailable, match=r"cannot be reached: .*its last words: nothing to serve"):
        McpServer.lines(numbers(args=("-c", "raise SystemExit('nothing to serve')")))
    with pytest.raises(ToolUnavailable, match="there is no program 'no-such-server'"):
        McpServer.lines(numbers(command="no-such-server"))
    with pytest.raises(ToolUnavailable, match=r"there is no file 'no_server\.py' in "):
        McpServer.lines(numbers(command=None, script="no_server.py"))


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["events", "json"])
def test_an_answer_over_http_is_bounded(flags: tuple[str, ...], tmp_path: Path) -> None:
    with over_http(tmp_path, *flags) as (url, _):
        settings = numbers(command=None, args=(), url=url, max_bytes=20_000, only=["shout"], timeout_s=10.0)
        with built(settings) as tools:
            assert tools["shout"].run_text("x" * 100).text == "X" * 100
            with pytest.raises(ToolFault, match="shout was not answered"):
                tools["shout"].run_text("x" * 30_000)
            assert tools["shout"].run_text("hey").text == "HEY"


def test_a_server_over_http_that_hangs_is_given_up_and_closing_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.tools.mcp.tool.McpConfig.LOOK_S", 0.3)
    monkeypatch.setattr("outrider.tools.mcp.session._CLOSE_S", 0.3)
    with over_http(tmp_path) as (url, _):
        settings = numbers(
            command=None, args=(), url=url, timeout_s=2.0, start_timeout_s=30.0, max_restarts=0
        )
        McpServer.lines(settings)
        with built(settings) as tools:
            with pytest.raises(ToolFault, match=f"no answer to stop_all within 2 s{AGAIN}$"):
                tools["stop_all"].run_text("{}")
            with pytest.raises(ToolFault, match="given up"):
                tools["add"].run_text('{"a": 2}')


def test_no_server_at_a_url(tmp_path: Path) -> None:
    with over_http(tmp_path) as (url, _):
        pass
    with pytest.raises(ToolUnavailable, match="MCP server numbers: it cannot be reached"):
        McpServer.lines(numbers(command=None, args=(), url=url))


def _fault_of(call: Callable[[], object]) -> str:
    with pytest.raises(ToolFault) as fault:
        call()
    return str(fault.value)


def _patiently(call: Callable[[], str]) -> str:
    """What answers, however slow the machine: the limits of these servers are short."""
    for _ in range(50):
        try:
            return call()
        except ToolFault:
            continue
    raise AssertionError("no answer at all")


def test_no_fault_tells_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that no header can carry is not sent, and one that a server repeats is not told."""
    url = {"name": "far", "url": "http://127.0.0.1:9/mcp", "headers": {"Authorization": "Bearer $MY_TOKEN"}}
    for key in ("sek\nret", "sekr\u00eft"):
        monkeypatch.setenv("MY_TOKEN", key)
        with pytest.raises(ToolUnavailable, match="header Authorization holds characters") as refused:
            McpServer.lines(McpConfig.model_validate(url))
        assert "sek" not in str(refused.value)
    monkeypatch.setenv("MY_TOKEN", "sekret\n")
    assert McpConfig.model_validate(url).sent_headers() == {"Authorization": "Bearer sekret"}
    says = "import os, sys; sys.exit('no entry for ' + os.environ['API_KEY'])"
    program = {"name": "near", "command": sys.executable, "args": ["-c", says]}
    with pytest.raises(ToolUnavailable, match=r"no entry for \$MY_TOKEN"):
        McpServer.lines(McpConfig.model_validate({**program, "env": {"API_KEY": "$MY_TOKEN"}}))
