"""How a turn ends, as a template writes it."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.tokens.tokenizer import Tokenizer, decode_text


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnClosing:
    """Tokens or text that end a turn, by the template: generation stops there, whatever the tokenizer's EOS
    is.

    ``token_id`` is the marker (`<|im_end|>`, `<end_of_turn>`) where it is a token of its own; white space
    around it is the template's. ``text`` is what decoding shows of the closing: nothing of a special token;
    all there is where the marker is spelled in ordinary tokens. Neither is there where a template writes
    white space only, which answers hold too. ``next_roles`` are the tokens that begin the next message, for a
    template that writes nothing else behind an answer (GLM): they end the turn then, and ``token_id`` is the
    user's.
    """

    token_id: int | None
    text: str
    next_roles: tuple[int, ...] = ()

    @classmethod
    def from_ids(cls, tokenizer: Tokenizer, end_of_turn: Sequence[int]) -> "TurnClosing":
        """The first added token in what the template writes behind an answer, else its text."""
        added = tokenizer.added_tokens_decoder
        marker = next((i for i in end_of_turn if i in added and str(added[i]).strip()), None)
        closing = list(end_of_turn) if marker is None else [marker]
        return cls(token_id=marker, text=decode_text(tokenizer, closing, skip_special_tokens=True).strip())

    @property
    def token_ids(self) -> frozenset[int]:
        """Every token that ends a turn."""
        return frozenset({self.token_id, *self.next_roles} - {None})  # type: ignore[arg-type]

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings for where no token says that the turn is over."""
        return (self.text,) if self.text and self.token_id is None else ()

    def cut(self, text: str) -> str:
        """A closed turn's text without its closing."""
        head, marker, behind = text.rpartition(self.text) if self.text else ("", "", "")
        return head if marker and not behind.strip() else text


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenClosing:
    """The ids that close an assistant message, of which the policy may have written some.

    ``num_blank`` of them are blanks before the marker (Llama 2): a policy that has written the marker has
    closed. ``behind_marker`` are those that follow its first marker; all of them if it has none.
    """

    text: str
    ids: tuple[int, ...]
    num_blank: int
    behind_marker: tuple[int, ...] = ()

    def missing(self, previous_ids: Sequence[int]) -> tuple[int, ...]:
        """Those that ``previous_ids`` do not end with."""
        written = _overlap(previous_ids, self.ids)
        if self.num_blank and (without := _overlap(previous_ids, self.ids[self.num_blank :])):
            written = max(written, self.num_blank + without)
        return self.ids[written:]


def _overlap(ids: Sequence[int], ending: Sequence[int]) -> int:
    """How many leading ids of ``ending`` already stand at the end of ``ids``."""
    for length in range(min(len(ids), len(ending)), 0, -1):
        if tuple(ids[-length:]) == tuple(ending[:length]):
            return length
    return 0
