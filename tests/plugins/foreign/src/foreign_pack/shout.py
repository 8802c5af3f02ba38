"""A tool: upper case."""

import outrider as o


class Shout:
    """Says it louder."""

    class Settings(o.Settings):
        mark: str = "!"

    name = "shout"
    usage = "Write <shout>a text</shout> to hear it louder."

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def run_text(self, text: str) -> o.ToolOutput:
        return o.ToolOutput(text=text.upper() + self.settings.mark)

    def close(self) -> None:
        pass
