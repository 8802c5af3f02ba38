"""Tools of a real MCP server, over stdio and over HTTP: their list, calls, results, many at a time."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

from outrider.errors import ToolFault, ToolUnavailable  # noqa: E402
from outrider.tools.base import SchemaTool, Tool, ToolOutput, Toolset
from outrider.tools.mcp.tool import McpServer  # noqa: E402
from outrider.types import ToolCall  # noqa: E402
from tests.tools.mcp.servers import HERE, built, is_running, numbers, over_http  # noqa: E402


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, Tool]]:
    with built(numbers()) as found:
        yield found


def test_the_list_becomes_schemas_and_lines(tools: dict[str, Tool]) -> None:
    add = tools["add"]
    assert isinstance(add, SchemaTool)
    assert add.schema["description"] == "Add two numbers."
    assert add.schema["parameters"]["required"] == ["a"]
    lines = McpServer.lines(numbers())
    assert lines["add"] == (
        'Write <add>{"a": 1, "b": 1}</add> for this: Add two numbers. '
        "a (integer); b (integer, may be left out)."
    )
    assert lines["shout"] == "Write <shout>text</shout> for this: Write a text large. text (string)."
    assert list(lines) == list(tools) and "get_time_now" in tools


def test_some_tools_under_a_prefix_in_their_order() -> None:
    settings = numbers(only=["shout", "Get-Time.now"], prefix="n_")
    assert McpServer.names(settings) == ("n_shout", "n_get_time_now") == tuple(McpServer.lines(settings))
    with built(settings) as tools:
        assert tools["n_get_time_now"].run_text("{}") == ToolOutput(text="noon")


def test_a_tool_that_is_not_there_is_refused() -> None:
    with pytest.raises(ToolUnavailable, match="numbers has no tool 'substract': it has add, shout"):
        McpServer.lines(numbers(only=["substract"]))


def test_calls_by_tag_and_natively(tools: dict[str, Tool]) -> None:
    toolset = Toolset(list(tools.values()))
    assert toolset.run_text("shout", "hey") == ToolOutput(text="HEY")
    assert toolset.run_text("add", '{"a": 2}') == ToolOutput(text="3")
    assert toolset.run_call(ToolCall(name="add", arguments={"a": 2, "b": 3})) == ToolOutput(text="5")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("add", "2 and 3", 'Write the arguments as a JSON object: Write <add>{"a"'),
        ("add", '{"a": "two"}', "The argument 'a' of add must be of type integer."),
        ("add", "{}", "add needs the argument 'a'."),
        ("add", '{"a": NaN}', "The arguments of add hold a number that is not finite."),
        ("shout", "down", "Error executing tool shout"),
        ("shout", "\ud800", "The arguments of shout hold half of a surrogate pair."),
    ],
)
def test_the_callers_mistakes_are_told(tools: dict[str, Tool], name: str, text: str, said: str) -> None:
    output = tools[name].run_text(text)
    assert output.failed and output.text.startswith(said)


def test_what_is_no_text_is_said_in_words(tools: dict[str, Tool]) -> None:
    assert tools["picture"].run_text("{}").text == "here:\n[image/png, 3 bytes]"
    assert tools["table"].run_text("{}").text == '{"rows": [1, 2]}'


def test_calls_are_at_the_server_at_the_same_time(tools: dict[str, Tool], tmp_path: Path) -> None:
    with ThreadPoolExecutor(5) as pool:
        asked = {"folder": str(tmp_path), "others": 5}
        met = pool.map(lambda _: Toolset([tools["meet"]]).run_call(_call("meet", asked)), range(5))
    assert [one.text for one in met] == ["met"] * 5


@pytest.mark.slow
def test_several_servers_share_the_calls(tmp_path: Path) -> None:
    with built(numbers(num_servers=2, max_concurrent=1)) as tools, ThreadPoolExecutor(2) as pool:
        asked = {"folder": str(tmp_path), "others": 2}  # one alone would wait for ever: it takes one call
        met = pool.map(lambda _: Toolset([tools["meet"]]).run_call(_call("meet", asked)), range(2))
        assert [one.text for one in met] == ["met"] * 2


def test_variables_reach_the_server_and_keys_stay_out_of_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    monkeypatch.setenv("OTHER", "not meant for it")
    with built(numbers(env={"API_KEY": "$MY_KEY", "PLAIN": "$$1"}, only=["read_environment"])) as tools:
        told = [tools["read_environment"].run_text(one).text for one in ("API_KEY", "PLAIN", "OTHER")]
    assert told == ["secret", "$1", "is not set"]
    with pytest.raises(ToolUnavailable, match="variable NOT_THERE is not set"):
        McpServer.lines(numbers(env={"API_KEY": "${NOT_THERE}"}))


def test_nothing_runs_after_close() -> None:
    with built(numbers(num_servers=2)) as tools:
        pids = {int(tools["process_id"].run_text("{}").text) for _ in range(4)}
        assert all(is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids)
    with pytest.raises(ToolFault, match="was called while it was closed"):
        tools["process_id"].run_text("{}")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death")
def test_nothing_runs_after_the_run_was_killed() -> None:
    program = f"""
        import os, signal, sys
        sys.path.insert(0, {str(HERE.parents[2])!r})
        from tests.tools.mcp.servers import built, numbers
        with built(numbers()) as tools:
            print(tools["process_id"].run_text("{{}}").text, flush=True)
            tools["stop_all"].run_text("{{}}")
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        os.kill(run.pid, signal.SIGKILL)
    ended = os.pidfd_open(pid) if is_running(pid) else None
    if ended is not None:
        import select

        assert select.select([ended], [], [], 60)[0]
    assert not is_running(pid)


@pytest.mark.slow
def test_a_run_that_closes_nothing_ends_all_the_same() -> None:
    program = f"""
        import sys
        sys.path.insert(0, {str(HERE.parents[2])!r})
        from outrider.tools.mcp.tool import McpServer
        from tests.tools.mcp.servers import numbers
        tools = McpServer.build(numbers(only=["process_id"]), None).tools
        print(tools[0].run_text("{{}}").text, flush=True)
        raise SystemExit(7)
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 7, found.stderr
    assert not is_running(int(found.stdout))


def test_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "abc")
    with over_http(tmp_path) as (url, process):
        settings = numbers(
            command=None, args=(), url=url, headers={"Authorization": "Bearer $MY_TOKEN"}, max_restarts=0
        )
        assert McpServer.lines(settings)["add"].startswith("Write <add>")
        with built(settings) as tools:
            assert tools["add"].run_text('{"a": 2, "b": 3}').text == "5"
            with ThreadPoolExecutor(4) as pool:
                asked = {"folder": str(tmp_path), "others": 5}  # the port's file counts too
                met = pool.map(lambda _: Toolset([tools["meet"]]).run_call(_call("meet", asked)), range(4))
                assert [one.text for one in met] == ["met"] * 4
            process.kill()
            process.wait()
            with pytest.raises(ToolFault, match="MCP server numbers: add was not answered"):
                tools["add"].run_text('{"a": 2}')
            with pytest.raises(ToolFault, match="given up"):
                tools["add"].run_text('{"a": 2}')


def _call(name: str, arguments: dict[str, object]) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)
