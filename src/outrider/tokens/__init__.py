"""Between messages and token ids: rendering, closing, and reading what the policy wrote. No torch."""

from outrider.tokens.chat import ChatRenderer
from outrider.tokens.closing import TurnClosing
from outrider.tokens.parsed import ParsedTurn
from outrider.tokens.renderer import Renderer
from outrider.tokens.tokenizer import Tokenizer, decode_text

__all__ = ["ChatRenderer", "ParsedTurn", "Renderer", "Tokenizer", "TurnClosing", "decode_text"]
