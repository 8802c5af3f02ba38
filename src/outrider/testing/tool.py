"""The contract of a tool (:mod:`outrider.tools.base`)."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from outrider.testing.common import GARBAGE, require, require_picklable, settings_inside
from outrider.tools.base import Tool, ToolOutput


def check_tool(
    tool: Tool,
    *,
    texts: Sequence[str] = (),
    num_threads: int = 4,
    is_deterministic: bool = True,
) -> None:
    """Call a tool with garbage and with ``texts``, one by one and from several threads; it is closed in the
    end.

    Checked: a tag name that a policy can write, text for whatever it is given, equal text for equal input, it
    closes twice, and its settings go to other processes.
    """
    is_tag = isinstance(tool.name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", tool.name)
    require(is_tag, f"the name {tool.name!r} is no tag: lower-case letters, digits and _")
    usage = getattr(type(tool), "usage", "")
    require(not usage or f"<{tool.name}>" in usage, f"usage does not show <{tool.name}>: {usage!r}")
    if (settings := settings_inside(tool)) is not None:
        require_picklable("the settings", settings)
    given = [text for text in (*GARBAGE, *texts) if text.strip()]  # an empty call never reaches a tool
    try:
        alone = [_call(tool, text) for text in given]
        if not is_deterministic:
            return
        with ThreadPoolExecutor(num_threads) as pool:
            together = list(pool.map(lambda text: _call(tool, text), given))
        for text, one, other in zip(given, alone, together, strict=True):
            require(one == other, f"{text[:40]!r} gives {one!r}, and {other!r} beside other calls")
    finally:
        tool.close()
        tool.close()


def _call(tool: Tool, text: str) -> ToolOutput:
    try:
        found = tool.run_text(text)
    except Exception as error:
        raise AssertionError(f"run_text raises for {text[:40]!r}: {type(error).__name__}: {error}") from error
    is_text = isinstance(found, ToolOutput) and isinstance(found.text, str)
    require(is_text, f"run_text gives {found!r} for {text[:40]!r}, no ToolOutput with text")
    return found
