"""What an engine's contexts say: the prompt, what the environment answered, and what was done before."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.algorithms.empo2.hook import action_text
from outrider.algorithms.retrospex.situations import Situation
from outrider.engines.base import FinishReason, Generation, Request
from outrider.tokens import ChatRenderer, Tokenizer, decode_text
from outrider.types import Message

_MARK, _RULES = "@said@", "@rules@"


@dataclass(slots=True)
class _Episode:
    """``ids`` are its tokens up to the end of the newest turn; ``num_turns`` have been played."""

    prompt: str
    ids: tuple[int, ...] = ()
    previous: str = ""
    num_turns: int = 0


class EpisodeReader:
    """Follows the rollouts of an engine by their cache keys. A context that does not go on from the last one
    begins an episode anew: a rollout that is tried again.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        renderer = ChatRenderer(tokenizer)
        self._closing = renderer.closing
        marked = [Message(role="user", content=_MARK)]
        self._around_prompt = self._text(renderer.prompt(marked)).split(_MARK, 1)
        with_rules = self._text(renderer.prompt([Message(role="system", content=_RULES), *marked]))
        before, rest = with_rules.split(_RULES, 1)
        self._around_rules = (before, *rest.split(_MARK, 1))
        self._around_answer = self._text(renderer.bridge((), marked)).split(_MARK, 1)
        self._episodes: dict[str, _Episode] = {}

    def read(self, request: Request) -> tuple[Situation, int]:
        """The situation of a request with a cache key, and its turn."""
        assert request.cache_key is not None
        episode = self._episodes.get(request.cache_key)
        num = 0 if episode is None else len(episode.ids)
        if episode is None or not num or request.token_ids[:num] != episode.ids:
            prompt = self._prompt(self._text(request.token_ids))
            episode = self._episodes[request.cache_key] = _Episode(prompt)
            return Situation(prompt=prompt), 0
        observation = _unwrap(self._text(request.token_ids[num:]), self._around_answer)
        situation = Situation(prompt=episode.prompt, observation=observation, previous=episode.previous)
        return situation, episode.num_turns

    def _prompt(self, text: str) -> str:
        """A system message and a user's are one text in the trace."""
        before, between, after = self._around_rules
        if not text.startswith(self._around_prompt[0]) and text.startswith(before):
            rules, separator, question = text.removeprefix(before).partition(between)
            if separator:
                return f"{rules}\n{question.removesuffix(after)}"
        return _unwrap(text, self._around_prompt)

    def action(self, generation: Generation) -> str:
        """What a turn does."""
        text = decode_text(self._tokenizer, generation.token_ids, skip_special_tokens=True)
        return action_text(self._closing.cut(text) if generation.finish_reason is FinishReason.EOS else text)

    def record_turn(self, request: Request, chosen: Generation) -> None:
        """The turn that the rollout goes on with."""
        assert request.cache_key is not None
        episode = self._episodes[request.cache_key]
        episode.ids = (*request.token_ids, *chosen.token_ids)
        episode.previous = self.action(chosen)
        episode.num_turns += 1

    def clear(self, cache_keys: Sequence[str]) -> None:
        """These rollouts have ended."""
        for key in cache_keys:
            self._episodes.pop(key, None)

    def _text(self, ids: Sequence[int]) -> str:
        return decode_text(self._tokenizer, ids, skip_special_tokens=False)


def _unwrap(text: str, around: Sequence[str]) -> str:
    """Without what the template writes around a message. The policy may have closed its turn itself: then the
    beginning lacks what it wrote.
    """
    before, after = around
    begin = next(before[start:] for start in range(len(before) + 1) if text.startswith(before[start:]))
    return text.removeprefix(begin).removesuffix(after)
