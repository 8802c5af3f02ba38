"""Failures of an MCP server: each is a tool fault in one line, and the server is started again."""

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
from tests.tools.mcp.servers import built, fake, hostile  # noqa: E402

AGAIN = "; it is started again for the next call"


def fault_of(call: Callable[[], object]) -> str:
    with pytest.raises(ToolFault) as fault:
        call()
    return str(fault.value)


def retry(call: Callable[[], str]) -> str:
    """The first answer: the time limits of these servers are too short for a busy machine."""
    for _ in range(50):
        try:
            return call()
        except ToolFault:
            continue
    raise AssertionError("no answer at all")


def test_a_death_in_a_call_is_a_fault_and_the_next_call_is_answered() -> None:
    with built(fake(only=["die", "process_id"])) as tools:
        first = tools["process_id"].run_text("{}").text
        assert fault_of(lambda: tools["die"].run_text('{"status": 3}')) == (
            "MCP server numbers: die was not answered: it closed the connection "
            f"(it ended with status 3; the end of its stderr: a grave fault){AGAIN}"
        )
        assert tools["process_id"].run_text("{}").text != first


def test_a_call_that_takes_too_long_does_not_end_a_server_that_responds() -> None:
    with built(fake(only=["sleep", "process_id"], timeout_s=0.3)) as tools:
        first = retry(lambda: tools["process_id"].run_text("{}").text)
        assert fault_of(lambda: tools["sleep"].run_text("{}")).endswith("no answer to sleep within 0.3 s")
        assert retry(lambda: tools["process_id"].run_text("{}").text) == first


def test_a_server_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.tools.mcp.tool.McpConfig.LOOK_S", 0.3)
    with built(fake(only=["hang", "process_id"], timeout_s=0.3)) as tools:
        first = retry(lambda: tools["process_id"].run_text("{}").text)
        with ThreadPoolExecutor(2) as pool:  # both at that server: one restart, two faults
            calls = [pool.submit(tools["hang"].run_text, "{}") for _ in range(2)]
            faults = [str(call.exception()) for call in calls]
        assert all("no answer to hang" in fault or "closed the connection" in fault for fault in faults)
        assert any(fault.endswith(AGAIN) for fault in faults)
        assert retry(lambda: tools["process_id"].run_text("{}").text) != first


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("garbage", {}, "it wrote 100 lines in a row that are no message"),
        ("endless-line", {"max_bytes": 2**20}, "it wrote a line of more than 1,048,576 bytes"),
        ("half-a-line", {}, 'it ended with status 4; it wrote \'{"jsonrpc": "2.0", "id"\' where messages'),
        ("long-answer", {"max_bytes": 100_000}, "it wrote a line of more than 100,000 bytes"),
    ],
)
def test_garbage_and_floods_end_the_server(
    mode: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with built(hostile(mode, tmp_path, **options)) as tools:
        for _ in range(2):
            fault = fault_of(lambda: tools["say"].run_text("{}"))
            assert message in fault and fault.endswith(AGAIN)
    assert len((tmp_path / "starts").read_text()) == 3


@pytest.mark.parametrize("mode", ["broken", "no-result"])
def test_a_fault_of_one_call_does_not_end_the_server(mode: str, tmp_path: Path) -> None:
    with built(hostile(mode, tmp_path)) as tools:
        for _ in range(2):
            assert "say was not answered" in fault_of(lambda: tools["say"].run_text("{}"))
    assert len((tmp_path / "starts").read_text()) == 2  # one for the list


@pytest.mark.parametrize(
    ("mode", "options", "text", "output"),
    [
        ("banner", {}, "{}", ToolOutput(text="start 2")),
        ("bad-arguments", {}, "{}", ToolOutput(text="it does not work", failed=True)),
        ("any-argument", {}, '{"what": [1]}', ToolOutput(text="start 2")),
        ("any-argument", {}, "{}", ToolOutput(text="say needs the argument 'what'.", failed=True)),
        ("long-answer", {"max_chars": 10}, "{}", ToolOutput(text="xxxxxxxxxx\n[199990 more characters]")),
    ],
)
def test_a_banner_an_error_of_arguments_and_a_long_result_are_no_faults(
    mode: str, options: dict[str, Any], text: str, output: ToolOutput, tmp_path: Path
) -> None:
    with built(hostile(mode, tmp_path, **options)) as tools:
        assert tools["say"].run_text(text) == output


def test_starts_without_an_answered_call_are_limited(tmp_path: Path) -> None:
    with built(hostile("starts-once", tmp_path, max_restarts=2)) as tools:
        assert tools["say"].run_text("{}").text == "start 2"
        faults = [fault_of(lambda: tools["say"].run_text("{}")) for _ in range(5)]
        assert "not again" in faults[1] or "not again" in faults[2]
        assert faults[-1].endswith("it is not started again") and faults[-1] == faults[-2]


def test_an_answered_call_resets_the_count(tmp_path: Path) -> None:
    with built(hostile("dies-after-each", tmp_path, max_restarts=1)) as tools:
        answered = 0
        for _ in range(12):
            try:
                tools["say"].run_text("{}")
                answered += 1
            except ToolFault as fault:
                assert "not started again" not in str(fault)
        assert answered >= 4


def test_the_wait_before_a_start_doubles() -> None:
    waits = []
    for num_lost in range(5):
        server = object.__new__(session_module._Server)
        server._settings, server._num_lost = fake(restart_wait_s=2.0), num_lost
        waits.append(server._wait_s())
    assert waits == [0.0, 0.0, 2.0, 6.0, 14.0]


def test_a_server_that_restarts_with_another_version_is_a_fault(tmp_path: Path) -> None:
    with built(hostile("other-version", tmp_path)) as tools:
        fault = fault_of(lambda: tools["say"].run_text("{}"))
    assert "has other tools, or another version, than before" in fault


@pytest.mark.parametrize(
    ("mode", "error", "message"),
    [
        ("no-tools", ToolUnavailable, "MCP server hostile has no tool"),
        ("endless-list", ToolUnavailable, "its list of tools does not end"),
        ("two-alike", ConfigError, "'say' and 'Say' are both the tag 'say': choose one of them with only"),
        ("never-starts", ToolUnavailable, "it has not started within 0.3 s"),
    ],
)
def test_a_bad_list_stops_the_run_before_its_first_rollout(
    mode: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    limit = {"start_timeout_s": 0.3} if mode == "never-starts" else {}
    with pytest.raises(error, match=message):
        McpServer.lines(hostile(mode, tmp_path, **limit))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"args": ("-c", "raise SystemExit('no data')")}, "cannot be reached: .*end of its stderr: no data"),
        ({"command": "no-such-server"}, "there is no program 'no-such-server'"),
        ({"command": None, "script": "no_server.py"}, r"there is no file 'no_server\.py' in "),
    ],
)
def test_a_program_that_is_no_server_is_reported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolUnavailable, match=message):
        McpServer.lines(fake(**options))


def test_faults_contain_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that no header can contain is not sent, and a key that a server prints is replaced."""
    url = {"name": "far", "url": "http://127.0.0.1:9/mcp", "headers": {"Authorization": "Bearer $MY_TOKEN"}}
    for key in ("sek\nret", "sekr\u00eft"):
        monkeypatch.setenv("MY_TOKEN", key)
        with pytest.raises(ToolUnavailable, match="header Authorization holds characters") as refused:
            McpServer.lines(McpConfig.model_validate(url))
        assert "sek" not in str(refused.value)
    monkeypatch.setenv("MY_TOKEN", "sekret\n")
    assert McpConfig.model_validate(url).sent_headers() == {"Authorization": "Bearer sekret"}
    program = ("-c", "import os, sys; sys.exit('no entry for ' + os.environ['API_KEY'])")
    with pytest.raises(ToolUnavailable, match=r"no entry for \$MY_TOKEN"):
        McpServer.lines(fake(args=program, env={"API_KEY": "$MY_TOKEN"}))
