"""Retrospex: training data of a critic, and an engine that rescores candidate turns with the critic."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from outrider.algorithms.presets import with_preset
from outrider.algorithms.tips import action_text
from outrider.config import Settings
from outrider.engines.base import Engine, EngineContext, FinishReason, Generation, LocalSettings, Request
from outrider.engines.plugins import Local
from outrider.errors import DataError
from outrider.memory.embedders import Embedder, Vectors, load_embedder
from outrider.plugins.registry import EmbedderName
from outrider.seeding import stream_seed
from outrider.tokens import ChatRenderer, Tokenizer, decode_text
from outrider.types import Message, Trajectory

if TYPE_CHECKING:
    from outrider.algorithms.retrospex_critic import Critic


PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "scienceworld": {"num_candidates": 6, "decay": 0.97, "floor": 0.6},
    "webshop": {"num_candidates": 4, "decay": 0.9, "floor": 0.5},
}


class CriticSettings(Settings):
    """Implicit Q-learning (Kostrikov et al., arXiv 2110.06169) as Retrospex runs it.

    V is the ``expectile`` of Q over the recorded actions. ``discount`` is per turn; ``target_rate`` is the
    update rate of the target network. Training runs ``num_updates`` Adam updates with ``learning_rate`` on
    batches of ``batch_size`` turns. ``embedder`` maps texts to vectors; networks have two layers of
    ``hidden`` units.
    """

    embedder: EmbedderName = "minilm"
    hidden: int = Field(128, ge=1)
    expectile: float = Field(0.7, gt=0, lt=1)
    discount: float = Field(0.99, ge=0, le=1)
    target_rate: float = Field(0.005, gt=0, le=1)
    learning_rate: float = Field(1e-4, gt=0)
    batch_size: int = Field(128, ge=1)
    num_updates: int = Field(200_000, ge=1)
    seed: int = 0


class RetrospexSettings(LocalSettings):
    """The local engine, which samples ``num_candidates`` turns per request and returns the one with the best
    combined score of the policy and the critic in the file ``critic``.

    In turn t (from 0) the weight of the policy is max(``floor``, ``decay`` ** t). ``preset`` sets the
    defaults of all keys that you leave out, to the values of the released scripts. ``allow_training`` permits
    training on such turns, although they are not distributed as their log-probs say.
    """

    reads_contexts: ClassVar[bool] = True
    input_paths: ClassVar[frozenset[str]] = frozenset({"critic"})

    type: Literal["retrospex"] = "retrospex"  # type: ignore[assignment]
    critic: Path
    preset: Literal["scienceworld", "webshop"] = "scienceworld"
    num_candidates: int = Field(6, ge=1)
    decay: float = Field(0.97, ge=0, le=1)
    floor: float = Field(0.6, ge=0, le=1)
    allow_training: bool = False

    def no_training(self) -> str:
        if self.allow_training:
            return ""
        return (
            "engine.type = retrospex is for evaluations: turns that a critic chooses are not distributed as "
            "their log-probs say, so training on them is biased; set engine.allow_training = true to train"
            " nevertheless"
        )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        return with_preset(PRESETS, data, default="scienceworld")


# Action rescoring of Retrospex (Xiang et al., EMNLP 2024; ``dynamic_action_scoring`` of the released code).
#
# ``λ_t minmax(p) + (1 - λ_t) minmax(Q - V)`` with ``λ_t = max(b, d^t)``. Shape letter: C candidates of a
# turn.


def policy_weight(turn: int, *, decay: float, floor: float) -> float:
    """Return ``λ_t`` of turn t (from 0): the weight of the critic grows during the episode."""
    return max(floor, decay**turn)


def probability(logprobs: Sequence[float]) -> float:
    """Return the policy's score of a turn: ``exp`` of the mean log-prob of its tokens."""
    return exp(fmean(logprobs))


def rescore(
    probabilities: Sequence[float], advantages: Sequence[float], *, weight: float
) -> NDArray[np.float64]:
    """Return ``[C]`` scores. A component that is equal for all candidates contributes nothing; the released
    code divides by 0.
    """
    scores_C: NDArray[np.float64] = weight * _min_max_scale(probabilities) + (1 - weight) * _min_max_scale(
        advantages
    )
    return scores_C


def _min_max_scale(values: Sequence[float]) -> NDArray[np.float64]:
    """Scale linearly from 0 (minimum) to 1 (maximum)."""
    values_C = np.asarray(values, np.float64)
    spread = values_C.max() - values_C.min()
    return (values_C - values_C.min()) / spread if spread > 0 else np.zeros_like(values_C)


# Recorded trajectories as transitions for a critic: state, action, reward and next state.


_PORTION = 256  # texts embedded at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A state as text: the ``prompt``, which contains the task, the newest ``observation`` (empty in the
    first turn) and the ``previous`` action.
    """

    prompt: str
    observation: str = ""
    previous: str = ""

    @property
    def texts(self) -> tuple[str, str, str]:
        """The three texts in the order of the critic's input."""
        return self.prompt, self.observation, self.previous


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One turn. ``next_situation`` is None if the episode ended."""

    situation: Situation
    action: str
    reward: float
    next_situation: Situation | None


def to_transitions(trajectory: Trajectory) -> list[Transition]:
    """Return the turns of a trajectory. The last one gets its whole reward: records have no step rewards."""
    situation = Situation(prompt="\n".join(message.content for message in trajectory.prompt))
    transitions = []
    for number, step in enumerate(trajectory.steps, start=1):
        action, is_last = action_text(step.text), number == len(trajectory.steps)
        after = Situation(prompt=situation.prompt, observation=step.observation, previous=action)
        reward = trajectory.reward if is_last else 0.0
        next_situation = None if is_last else after
        transitions.append(
            Transition(situation=situation, action=action, reward=reward, next_situation=next_situation)
        )
        situation = after
    return transitions


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """N transitions as numbers. Texts are rows of ``vectors_UD``; ``states_N3`` and ``next_states_N3`` have
    three row indices each (see :attr:`Situation.texts`), ``actions_N`` has one. After the last turn
    ``next_states_N3`` repeats the state, and ``is_last_N`` is True.
    """

    vectors_UD: Vectors
    states_N3: NDArray[np.int64]
    actions_N: NDArray[np.int64]
    rewards_N: NDArray[np.float32]
    next_states_N3: NDArray[np.int64]
    is_last_N: NDArray[np.bool_]


def encode_turns(trajectories: Iterable[Trajectory], embedder: Embedder) -> Turns:
    """Encode trajectories, embedding each distinct text once. Raises DataError if there is no action."""
    transitions = [transition for trajectory in trajectories for transition in to_transitions(trajectory)]
    if not transitions:
        raise DataError("the trajectories contain no turn")
    rows: dict[str, int] = {}

    def number(texts: Sequence[str]) -> list[int]:
        return [rows.setdefault(text, len(rows)) for text in texts]

    states = np.array([number(transition.situation.texts) for transition in transitions], np.int64)
    actions = np.array([number([transition.action])[0] for transition in transitions], np.int64)
    next_states = np.array(
        [number((transition.next_situation or transition.situation).texts) for transition in transitions],
        np.int64,
    )
    texts = list(rows)
    vectors = [embedder.embed(texts[start : start + _PORTION]) for start in range(0, len(texts), _PORTION)]
    return Turns(
        vectors_UD=np.concatenate(vectors),
        states_N3=states,
        actions_N=actions,
        rewards_N=np.array([transition.reward for transition in transitions], np.float32),
        next_states_N3=next_states,
        is_last_N=np.array([transition.next_situation is None for transition in transitions], np.bool_),
    )


# Parsing of an engine's contexts into prompt, observation and previous action.


_MARK, _RULES = "@said@", "@rules@"


@dataclass(slots=True)
class _Episode:
    """``ids`` are the episode's tokens up to the end of the newest turn; ``num_turns`` turns were sampled."""

    prompt: str
    ids: tuple[int, ...] = ()
    previous: str = ""
    num_turns: int = 0


class EpisodeReader:
    """Tracks the rollouts of an engine by their cache keys. If a context does not continue the previous one,
    the rollout is being retried, and the reader starts its episode again.
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
        """Return the situation of a request with a cache key, and the number of its turn."""
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
        """Join the messages of a prompt: system and user message are one text in the trace."""
        before, between, after = self._around_rules
        if not text.startswith(self._around_prompt[0]) and text.startswith(before):
            rules, separator, question = text.removeprefix(before).partition(between)
            if separator:
                return f"{rules}\n{question.removesuffix(after)}"
        return _unwrap(text, self._around_prompt)

    def action(self, generation: Generation) -> str:
        """Return the action of a turn."""
        text = decode_text(self._tokenizer, generation.token_ids, skip_special_tokens=True)
        return action_text(self._closing.cut(text) if generation.finish_reason is FinishReason.EOS else text)

    def record_turn(self, request: Request, chosen: Generation) -> None:
        """Record the turn that the rollout continues with."""
        assert request.cache_key is not None
        episode = self._episodes[request.cache_key]
        episode.ids = (*request.token_ids, *chosen.token_ids)
        episode.previous = self.action(chosen)
        episode.num_turns += 1

    def clear(self, cache_keys: Sequence[str]) -> None:
        """Drop the state of finished rollouts."""
        for key in cache_keys:
            self._episodes.pop(key, None)

    def _text(self, ids: Sequence[int]) -> str:
        return decode_text(self._tokenizer, ids, skip_special_tokens=False)


def _unwrap(text: str, around: Sequence[str]) -> str:
    """Remove the text that the template adds around a message. If the policy sampled the end of its turn
    itself, that text is missing from the beginning.
    """
    before, after = around
    begin = next(before[start:] for start in range(len(before) + 1) if text.startswith(before[start:]))
    return text.removeprefix(begin).removesuffix(after)


# The engine, which samples several candidates per turn and returns the one with the best score.


class Retrospex:
    """The local engine with a critic, for evaluations: the chosen turns are not distributed as their
    log-probs say.
    """

    Settings = RetrospexSettings

    @classmethod
    def build(cls, settings: RetrospexSettings, context: EngineContext) -> "RescoringEngine":
        """Build the engine. Raises DataError if the critic cannot be read."""
        from outrider.algorithms.retrospex_critic import load_critic

        critic = load_critic(settings.critic, load_embedder)
        return RescoringEngine(Local.build(settings, context), critic, settings)


class RescoringEngine:
    """Rescores candidate turns. Requests without a cache key (no episode) and requests for reflections (no
    turn) are passed to the inner engine unchanged.
    """

    def __init__(self, inner: Engine, critic: "Critic", settings: RetrospexSettings) -> None:
        self.tokenizer: Tokenizer = inner.tokenizer
        self.context_length = inner.context_length
        self.weight_version = inner.weight_version
        self._inner, self._critic, self._settings = inner, critic, settings
        self._reader = EpisodeReader(inner.tokenizer)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Generate all candidates of all requests in one batch."""
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
        """Return the request and additional draws at its temperature, or at temperature 1 if it is greedy;
        log-probs are then those at 1.
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
        """Return the best turn: of equal actions the likeliest, of equal scores the first."""
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
        self._reader.clear(cache_keys)
        self._inner.release(cache_keys)

    def free_cache(self) -> None:
        self._inner.free_cache()

    def load(self, version: int) -> None:
        self._inner.load(version)
        self.weight_version = self._inner.weight_version


def _is_turn(request: Request) -> bool:
    """Return whether a request is for an action. Requests for reflections also have the episode's key."""
    return request.cache_key is not None and not request.request_id.endswith("/reflection")
