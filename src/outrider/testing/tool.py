"""The contract of a tool (:mod:`outrider.tools.base`)."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from outrider.testing.common import GARBAGE, require, require_picklable, settings_inside
from outrider.tools.base import SchemaTool, Tool, ToolOutput
from outrider.tools.described import tried_arguments
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
    if (settings := settings_inside(tool)) is not None:
        require_picklable("the settings", settings)
    # an empty call never reaches a tool
    given: list[_Input] = [text for text in (*GARBAGE, *texts) if text.strip()]
    given += tried_arguments(tool.schema) if isinstance(tool, SchemaTool) else []
    try:
        alone = [_call(tool, one) for one in given]
        succeeds = not isinstance(tool, SchemaTool) or not all(one.failed for one in alone)
        require(succeeds, f"no call succeeds (texts= may bring one): {given[-1]!r} gives {alone[-1].text!r}")
        if not is_deterministic:
            return
        with ThreadPoolExecutor(num_threads) as pool:
            together = list(pool.map(lambda one: _call(tool, one), given))
        for said, one, other in zip(given, alone, together, strict=True):
            require(one == other, f"{_shown(said)} gives {one!r}, and {other!r} beside other calls")
    finally:
        tool.close()
        tool.close()


def _call(tool: Tool, given: _Input) -> ToolOutput:
    how = "run_text" if isinstance(given, str) else "run_call"
    try:
        if isinstance(given, str):
            found = tool.run_text(given)
        else:
            assert isinstance(tool, SchemaTool)  # arguments are drawn for no other
            found = tool.run_call(given)
    except Exception as error:
        raise AssertionError(f"{how} raises for {_shown(given)}: {type(error).__name__}: {error}") from error
    is_text = isinstance(found, ToolOutput) and isinstance(found.text, str)
    require(is_text, f"{how} gives {found!r} for {_shown(given)}, no ToolOutput with text")
    return found


def _shown(given: _Input) -> str:
    return repr(given[:40] if isinstance(given, str) else given)
