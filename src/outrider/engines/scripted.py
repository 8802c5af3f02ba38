"""An engine that replays text: unit tests, and `outrider replay` of recorded rollouts."""

from collections.abc import Callable, Sequence

from outrider.engines.base import FinishReason, Generation, Request
from outrider.errors import EngineFault
from outrider.tokens import ChatRenderer, Tokenizer, text_of


class ScriptedEngine:
    """Answers every request with the text that ``script(request, context text)`` returns.

    Stop strings and the token limit act as in a real engine. Log-probs are 0 and entropies 0 unless
    ``entropy`` gives a value for the turn: a replayed policy is certain of its script.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        script: Callable[[Request, str], str],
        context_length: int = 4096,
        entropy: Callable[[Request, int], float] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.weight_version = 0
        self._script = script
        self._closing = ChatRenderer(tokenizer, observations=()).closing
        self._entropy = entropy

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Replay the script for each request."""
        return [self._one(request) for request in requests]

    def _one(self, request: Request) -> Generation:
        text = self._script(request, text_of(self.tokenizer, request.token_ids, skip_special_tokens=False))
        ends = [text.index(stop) + len(stop) for stop in request.stop if stop in text]
        reason = FinishReason.STOP if ends else FinishReason.EOS
        ids = self.tokenizer.encode(text[: min(ends)] if ends else text, add_special_tokens=False)
        if reason is FinishReason.EOS:
            ids = [*ids, *self._close()]
        if len(ids) > request.max_tokens:
            ids, reason = ids[: request.max_tokens], FinishReason.LENGTH
        return self._generation(request, ids, reason)

    def _close(self) -> list[int]:
        """Ids that end a turn, where the template has a marker: an expert's turns teach the policy to end its
        own.
        """
        if self._closing.stop:
            return self.tokenizer.encode(self._closing.text, add_special_tokens=False)
        marker = self.tokenizer.eos_token_id if self._closing.token_id is None else self._closing.token_id
        if marker is None:
            raise EngineFault("the tokenizer has no end-of-turn id")
        return [marker]

    def _generation(self, request: Request, ids: Sequence[int], reason: FinishReason) -> Generation:
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
        """Nothing is kept between turns."""

    def free_cache(self) -> None:
        """Nothing is kept."""

    def load(self, version: int) -> None:
        """A script has no weights; only the version moves."""
        self.weight_version = version
