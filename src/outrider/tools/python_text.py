"""The sandboxed Python tool behind the tool contract."""

from outrider.config import Settings
from outrider.tools.base import ToolContext, ToolOutput
from outrider.tools.python import PythonTool


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
        result = self._tool.run(text)
        return ToolOutput(text=result.output or "(no output)", failed=result.status != "ok")

    def close(self) -> None:
        """Stop the tool's processes; may be called twice."""
        self._tool.close()
