"""Tools of an MCP server: their list, calls, results, concurrent calls, and the end of its processes."""

import os
import select
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
from tests.tools.mcp.servers import HERE, built, fake, is_running, stdio_server  # noqa: E402

REAL = stdio_server("real_server.py")


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, Tool]]:
    with built(REAL) as result:
        yield result


def meet(tool: Tool, folder: Path, num_calls: int) -> list[str]:
    """Call a tool that responds only when all calls have reached the server."""
    call = ToolCall(name="meet", arguments={"folder": str(folder), "others": num_calls})
    with ThreadPoolExecutor(num_calls) as pool:
        return [output.text for output in pool.map(Toolset([tool]).run_call, [call] * num_calls)]


def test_the_list_becomes_schemas_and_usage_lines(tools: dict[str, Tool]) -> None:
    add = tools["add"]
    assert isinstance(add, SchemaTool)
    assert add.schema["description"] == "Add two numbers."
    assert add.schema["parameters"]["required"] == ["a"]
    lines = McpServer.lines(REAL)
    assert lines["add"] == (
        'Write <add>{"a": 1, "b": 1}</add> for this: Add two numbers. '
        "a (integer); b (integer, may be left out)."
    )
    assert lines["shout"] == "Write <shout>text</shout> for this: Write a text large. text (string)."
    assert list(lines) == list(tools) and "get_time_now" in tools


def test_calls_and_results(tools: dict[str, Tool], tmp_path: Path) -> None:
    toolset = Toolset(list(tools.values()))
    assert toolset.run_text("shout", "hey") == ToolOutput(text="HEY")
    assert toolset.run_text("add", '{"a": 2}') == ToolOutput(text="3")
    assert toolset.run_call(ToolCall(name="add", arguments={"a": 2, "b": 3})) == ToolOutput(text="5")
    assert tools["picture"].run_text("{}").text == "here:\n[image/png, 3 bytes]"
    assert tools["table"].run_text("{}").text == '{"rows": [1, 2]}'
    assert meet(tools["meet"], tmp_path, 5) == ["met"] * 5


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("add", "2 and 3", 'Write the arguments as a JSON object: Write <add>{"a"'),
        ("add", '{"a": "two"}', "The argument 'a' of add must be of type integer."),
        ("add", "{}", "add needs the argument 'a'."),
        ("add", '{"a": NaN}', "The arguments of add hold a number that is not finite."),
        ("shout", "down", "Error executing tool shout"),
        ("shout", "\ud800", "The arguments of shout hold half of a surrogate pair."),
    ],
)
def test_mistakes_of_the_caller_are_observations(
    tools: dict[str, Tool], name: str, text: str, message: str
) -> None:
    output = tools[name].run_text(text)
    assert output.failed and output.text.startswith(message)


def test_a_section_selects_tools_and_adds_a_prefix() -> None:
    settings = fake(only=["shout", "Get-Time.now"], prefix="n_")
    assert McpServer.names(settings) == ("n_shout", "n_get_time_now") == tuple(McpServer.lines(settings))
    with built(settings) as tools:
        assert tools["n_get_time_now"].run_text("{}") == ToolOutput(text="noon")
    with pytest.raises(ToolUnavailable, match="numbers has no tool 'substract': it has add, shout"):
        McpServer.lines(fake(only=["substract"]))


def test_several_servers_share_the_calls(tmp_path: Path) -> None:
    with built(fake(num_servers=2, max_concurrent=1)) as tools:
        assert meet(tools["meet"], tmp_path, 2) == ["met"] * 2  # one server alone would wait for ever


def test_variables_of_the_environment_are_passed_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    monkeypatch.setenv("OTHER", "not meant for it")
    with built(fake(env={"API_KEY": "$MY_KEY", "PLAIN": "$$1"}, only=["variable"])) as tools:
        values = [tools["variable"].run_text(name).text for name in ("API_KEY", "PLAIN", "OTHER")]
    assert values == ["secret", "$1", "is not set"]
    with pytest.raises(ToolUnavailable, match="variable NOT_THERE is not set"):
        McpServer.lines(fake(env={"API_KEY": "${NOT_THERE}"}))


def test_no_process_remains_after_close() -> None:
    with built(fake(num_servers=2)) as tools:
        pids = {int(tools["process_id"].run_text("{}").text) for _ in range(4)}
        assert all(is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids)
    with pytest.raises(ToolFault, match="was called while it was closed"):
        tools["process_id"].run_text("{}")


def program(body: str) -> list[str]:
    setup = f"""
        import sys
        sys.path.insert(0, {str(HERE.parents[2])!r})
        from outrider.tools.mcp.tool import McpServer
        from tests.tools.mcp.servers import fake
        tools = {{tool.name: tool for tool in McpServer.build(fake(), None).tools}}
        print(tools["process_id"].run_text("{{}}").text, flush=True)
    """
    return [sys.executable, "-c", textwrap.dedent(setup) + body]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death")
def test_no_process_remains_after_the_run_was_killed() -> None:
    command = program('tools["hang"].run_text("{}")')
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        os.kill(run.pid, signal.SIGKILL)
    if is_running(pid):
        assert select.select([os.pidfd_open(pid)], [], [], 60)[0]
    assert not is_running(pid)


@pytest.mark.slow
def test_no_process_remains_after_a_run_that_closes_nothing() -> None:
    command = program("raise SystemExit(7)")
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 7, result.stderr
    assert not is_running(int(result.stdout))
