"""An engine that replays text, for unit tests and `outrider replay`."""

from collections.abc import Callable, Sequence

from outrider.engines.base import FinishReason, Generation, Request
from outrider.errors import EngineFault, ModelError
from outrider.tokens import ChatRenderer, Tokenizer, decode_text


class ScriptedEngine:
    """Returns the text of ``script(request, context text)`` for every request.

    Turns are tokenized by ``renderer`` (None: the tokenizer's plain one). Stop strings and the token limit
    act as in a real engine. Log-probs are 0, and entropies are 0 unless ``entropy(request, index)`` is given.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        script: Callable[[Request, str], str],
        context_length: int = 4096,
        entropy: Callable[[Request, int], float] | None = None,
        renderer: ChatRenderer | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.weight_version = 0
        self._script = script
        self._renderer = renderer or ChatRenderer(tokenizer, observations=())
        self._entropy = entropy

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        return [self._replay(request) for request in requests]

    def _replay(self, request: Request) -> Generation:
        text = self._script(
            request, decode_text(self.tokenizer, request.token_ids, skip_special_tokens=False)
        )
        try:
            ids, is_closed = self._renderer.recorded_turn(text, request.token_ids, stop=request.stop)
        except ModelError as error:
            raise EngineFault(str(error)) from error
        reason = FinishReason.EOS if is_closed else FinishReason.STOP
        if len(ids) > request.max_tokens:
            ids, reason = ids[: request.max_tokens], FinishReason.LENGTH
        entropies = tuple(self._entropy(request, i) if self._entropy else 0.0 for i in range(len(ids)))
        return Generation(
            request_id=request.request_id,
            token_ids=tuple(ids),
            logprobs=(0.0,) * len(ids),
            entropies=entropies,
            finish_reason=reason,
            weight_version=self.weight_version,
        )

    def release(self, cache_keys: Sequence[str]) -> None:
        """Do nothing: there is no cache."""

    def free_cache(self) -> None:
        """Do nothing: there is no cache."""

    def load(self, version: int) -> None:
        self.weight_version = version
