"""What ends a generation, and which contexts have room for one: the same for both paths."""

from collections.abc import Sequence

from outrider.engines.base import FinishReason, Request
from outrider.engines.local.model import LanguageModel
from outrider.engines.local.sampling import StopStrings
from outrider.errors import EngineFault


def max_new_tokens(request: Request, context_length: int) -> int:
    """Tokens that may be written. Raises EngineFault for a context that is empty or leaves no room."""
    if not 0 < len(request.token_ids) < context_length:
        raise EngineFault(
            f"request {request.request_id}: {len(request.token_ids)} tokens do "
            f"not fit a context of {context_length}"
        )
    return min(request.max_tokens, context_length - len(request.token_ids))


class Endings:
    """EOS ids, texts that close a turn, and a request's own stop strings."""

    def __init__(self, language_model: LanguageModel) -> None:
        self._lm = language_model
        self._stops = StopStrings(language_model.tokenizer, len(language_model.tokenizer))

    def reason(self, request: Request, ids: Sequence[int], room: int) -> FinishReason | None:
        """Why ``ids``, what was written so far, is the whole answer; None where it goes on."""
        ends = self._lm.eos_texts
        # An end in the last token that there was room for is an end and no truncation.
        if ids[-1] in self._lm.eos_token_ids or (ends and self._stops.completed(ids, ends)):
            return FinishReason.EOS
        if request.stop and self._stops.completed(ids, request.stop):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(ids) == room else None
