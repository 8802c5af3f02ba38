"""Between messages and token ids: rendering, closing, and reading what the policy wrote. No torch."""

from outrider.tokens.renderer import ChatRenderer, Renderer
from outrider.tokens.template import Tokenizer, TurnClosing, decode_text
from outrider.tokens.tool_calls import ParsedTurn

__all__ = ["ChatRenderer", "ParsedTurn", "Renderer", "Tokenizer", "TurnClosing", "decode_text"]
