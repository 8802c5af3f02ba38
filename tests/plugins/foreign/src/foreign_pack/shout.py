"""A tool: upper case."""

from outrider.config import Settings
from outrider.tools.base import ToolOutput


class ShoutSettings(Settings):
    """Keys of its table."""

    mark: str = "!"


class Shout:
    """Says it louder."""

    Settings = ShoutSettings
    name = "shout"
    usage = "Write <shout>a text</shout> to hear it louder."

    def __init__(self, settings: ShoutSettings) -> None:
        self.settings = settings

    def run_text(self, text: str) -> ToolOutput:
        return ToolOutput(text=text.upper() + self.settings.mark)

    def close(self) -> None:
        pass
