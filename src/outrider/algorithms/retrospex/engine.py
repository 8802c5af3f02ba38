"""An engine that asks a critic: of several turns that the policy may play, the one with the best score."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.algorithms.retrospex.reader import EpisodeReader
from outrider.algorithms.retrospex.rescoring import policy_weight, probability, rescore
from outrider.algorithms.retrospex.settings import RetrospexSettings
from outrider.engines.base import Engine, EngineContext, Generation, Request
from outrider.engines.plugins import Local
from outrider.memory.embedder import load_embedder
from outrider.seeding import stream_seed
from outrider.tokens import Tokenizer

if TYPE_CHECKING:
    from outrider.algorithms.retrospex.critic import Critic


class Retrospex:
    """The local engine with a critic beside it. For evaluations: what is chosen is not distributed as its
    log-probs say.
    """

    Settings = RetrospexSettings

    @classmethod
    def build(cls, settings: RetrospexSettings, context: EngineContext) -> "RescoringEngine":
        """Raises DataError where the critic cannot be read."""
        from outrider.algorithms.retrospex.critic import load_critic

        critic = load_critic(settings.critic, load_embedder)
        return RescoringEngine(Local.build(settings, context), critic, settings)


class RescoringEngine:
    """Requests without a cache key are of no episode, and those for a reflection are no turn: they pass as
    they are.
    """

    def __init__(self, inner: Engine, critic: "Critic", settings: RetrospexSettings) -> None:
        self.tokenizer: Tokenizer = inner.tokenizer
        self.context_length = inner.context_length
        self.weight_version = inner.weight_version
        self._inner, self._critic, self._settings = inner, critic, settings
        self._reader = EpisodeReader(inner.tokenizer)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """All candidates of all requests in one batch."""
        candidate_groups = [self._candidates(request) for request in requests]
        drawn = iter(
            self._inner.generate([candidate for candidates in candidate_groups for candidate in candidates])
        )
        generations = []
        for request, candidates in zip(requests, candidate_groups, strict=True):
            turns = [next(drawn) for _ in candidates]
            chosen = self._choose(request, turns) if _is_turn(request) else turns[0]
            generations.append(replace(chosen, request_id=request.request_id))
        return generations

    def _candidates(self, request: Request) -> list[Request]:
        """The request itself, and more draws at its temperature, or at 1 where it is greedy: log-probs are
        those at 1 then.
        """
        more = range(1, self._settings.num_candidates) if _is_turn(request) else ()
        return [request] + [
            replace(
                request,
                request_id=f"{request.request_id}/candidate-{number}",
                seed=stream_seed(request.seed, "candidate", number),
                temperature=request.temperature or 1.0,
                cache_key=None,
            )
            for number in more
        ]

    def _choose(self, request: Request, turns: Sequence[Generation]) -> Generation:
        """Of turns that do the same the likeliest one counts, of equal scores the first."""
        situation, turn = self._reader.read(request)
        best: dict[str, Generation] = {}
        for candidate in turns:
            current = best.setdefault(self._reader.action(candidate), candidate)
            if probability(candidate.logprobs) > probability(current.logprobs):
                best[self._reader.action(candidate)] = candidate
        scores = rescore(
            [probability(candidate.logprobs) for candidate in best.values()],
            self._critic.advantages(situation, list(best)),
            weight=policy_weight(turn, decay=self._settings.decay, floor=self._settings.floor),
        )
        chosen = list(best.values())[int(scores.argmax())]
        self._reader.record_turn(request, chosen)
        return chosen

    def release(self, cache_keys: Sequence[str]) -> None:
        """See :class:`Engine`."""
        self._reader.clear(cache_keys)
        self._inner.release(cache_keys)

    def free_cache(self) -> None:
        """See :class:`Engine`."""
        self._inner.free_cache()

    def load(self, version: int) -> None:
        """See :class:`Engine`."""
        self._inner.load(version)
        self.weight_version = self._inner.weight_version


def _is_turn(request: Request) -> bool:
    """A reflection is asked for in an episode's name, and is no action."""
    return request.cache_key is not None and not request.request_id.endswith("/reflection")
