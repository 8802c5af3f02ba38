"""The contract of a tool (:mod:`outrider.tools.base`)."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from outrider.testing.common import GARBAGE, find_settings, require, require_picklable
from outrider.tools.base import SchemaTool, Tool, ToolOutput
from outrider.tools.described import trial_arguments
from outrider.types import Json

_Input: TypeAlias = str | Mapping[str, Json]
"""Of a call by tag, or of a native one."""


def check_tool(
    tool: Tool,
    *,
    texts: Sequence[str] = (),
    num_threads: int = 4,
    is_deterministic: bool = True,
) -> None:
    """Call a tool with garbage, with ``texts`` and, where it has a schema, with arguments drawn from that:
    one call after the other, and from several threads. It is closed in the end.

    Checked: a tag name that a policy can write, text for whatever it is given, a call that succeeds of a tool
    with a schema, equal text for equal input, it closes twice, and its settings go to other processes.
    """
    is_tag = isinstance(tool.name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", tool.name)
    require(is_tag, f"the name {tool.name!r} is no tag: lower-case letters, digits and _")
    usage = getattr(type(tool), "usage", "")
    require(not usage or f"<{tool.name}>" in usage, f"usage does not show <{tool.name}>: {usage!r}")
    if (settings := find_settings(tool)) is not None:
        require_picklable("the settings", settings)
    # an empty call never reaches a tool
    inputs: list[_Input] = [text for text in (*GARBAGE, *texts) if text.strip()]
    inputs += trial_arguments(tool.schema) if isinstance(tool, SchemaTool) else []
    try:
        alone = [_call(tool, item) for item in inputs]
        succeeds = not isinstance(tool, SchemaTool) or not all(item.failed for item in alone)
        require(succeeds, f"no call succeeds (texts= may bring one): {inputs[-1]!r} gives {alone[-1].text!r}")
        if not is_deterministic:
            return
        with ThreadPoolExecutor(num_threads) as pool:
            together = list(pool.map(lambda item: _call(tool, item), inputs))
        for call_input, item, other in zip(inputs, alone, together, strict=True):
            require(item == other, f"{_shorten(call_input)} gives {item!r}, and {other!r} beside other calls")
    finally:
        tool.close()
        tool.close()


def _call(tool: Tool, call_input: _Input) -> ToolOutput:
    method = "run_text" if isinstance(call_input, str) else "run_call"
    try:
        if isinstance(call_input, str):
            output = tool.run_text(call_input)
        else:
            assert isinstance(tool, SchemaTool)  # arguments are drawn for no other
            output = tool.run_call(call_input)
    except Exception as error:
        raise AssertionError(
            f"{method} raises for {_shorten(call_input)}: {type(error).__name__}: {error}"
        ) from error
    is_text = isinstance(output, ToolOutput) and isinstance(output.text, str)
    require(is_text, f"{method} gives {output!r} for {_shorten(call_input)}, no ToolOutput with text")
    return output


def _shorten(call_input: _Input) -> str:
    return repr(call_input[:40] if isinstance(call_input, str) else call_input)
