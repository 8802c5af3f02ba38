"""Between messages and token ids: rendering, closing, and reading what the policy wrote. No torch."""

from outrider.tokens.chat import ChatRenderer
from outrider.tokens.closing import TurnClosing
from outrider.tokens.parsed import ParsedTurn
from outrider.tokens.renderer import Renderer
from outrider.tokens.tokenizer import Tokenizer, text_of

__all__ = ["ChatRenderer", "ParsedTurn", "Renderer", "Tokenizer", "TurnClosing", "text_of"]
