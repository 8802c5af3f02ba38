"""The sandboxed Python tool behind the tool contract."""

import ast
import re
import textwrap
from typing import Final

from outrider.config import Settings
from outrider.tools.base import ToolContext, ToolOutput
from outrider.tools.python import PythonTool

_FENCE: Final = re.compile(r"\s*(`{3,}|~{3,})[ \t]*[\w+.-]*[ \t]*\n(.*?)(?:\n[ \t]*\1`*\s*)?\Z", re.DOTALL)


class PythonAdapter:
    """Python in a sandbox; what a program prints comes back."""

    name = "python"
    usage = "Write <python>code</python> to run Python; what the code prints comes back."
    description = "Run Python code; what it prints comes back."
    argument = "code"

    def __init__(self, tool: PythonTool) -> None:
        self._tool = tool

    @classmethod
    def build(cls, settings: Settings, context: ToolContext) -> "PythonAdapter":
        """By the section ``python`` of the environment. Raises ToolUnavailable where it cannot run here."""
        tool = PythonTool(context.environment.python)
        try:
            tool.check()  # before the first rollout, and not when a program walks through an open door
        except BaseException:
            tool.close()
            raise
        return cls(tool)

    def run_text(self, text: str) -> ToolOutput:
        """Run the code once. A program that prints nothing is no failure; the text says so."""
        result = self._tool.run(extract_code(text))
        return ToolOutput(text=result.output or "(no output)", failed=result.status != "ok")

    def close(self) -> None:
        """Stop the tool's processes; may be called twice."""
        self._tool.close()


def extract_code(text: str) -> str:
    """The program in what a model wrote: without a Markdown fence around it, and without an indentation that
    all lines share. Neither can be Python, so nothing that runs is changed.
    """
    fenced = _FENCE.match(text)
    code = text if fenced is None else fenced[2]
    first = next((line for line in code.split("\n") if line.strip()), "")
    if first[:1] in (" ", "\t"):
        return textwrap.dedent(code)
    head, _, rest = code.partition("\n")  # the first line lost its indentation when its tag was read
    dedented = f"{head}\n{textwrap.dedent(rest)}"
    is_indented = rest[:1] in (" ", "\t") and dedented != code
    return dedented if is_indented and not _is_python(code) and _is_python(dedented) else code


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
