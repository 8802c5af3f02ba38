"""The engine that asks a critic: which turn it takes, what the critic is told, and what passes as it is."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, inf, log, nan
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from outrider.algorithms.reflexion import ReflexionHook
from outrider.algorithms.retrospex import (
    CriticSettings,
    RescoringEngine,
    RetrospexSettings,
    Situation,
    to_transitions,
)
from outrider.algorithms.retrospex_critic import Critic, Networks, load_critic
from outrider.config import validate
from outrider.engines.base import Generation, Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import EpisodeResult, StepResult
from outrider.errors import ConfigError, DataError, EnvironmentFault
from outrider.evaluation.critic_training import build_trajectories
from outrider.memory.embedders import HashEmbedder, load_embedder
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer, decode_text
from outrider.trace import Trace
from outrider.training.settings import RunSettings
from outrider.training.step_records import trace_rows
from outrider.types import Message
from tests.rollout.fakes import TOKENIZER, Factory, Fake, say, scheduler, tasks

Script = Callable[[Request, str], str]
LIMITS = Limits(max_response_tokens=3000, max_turns=4, step_timeout_s=60)


class Sayings(Critic):
    """Likes what ``liking`` says, and keeps what it was told."""

    def __init__(self, liking: Callable[[str], float]) -> None:
        self.liking = liking
        self.told: list[tuple[Situation, tuple[str, ...]]] = []

    def advantages(self, situation: Situation, actions: Sequence[str]) -> list[float]:
        self.told.append((situation, tuple(actions)))
        return [self.liking(action) for action in actions]


class Inner(ScriptedEngine):
    """Log-probs of every token by the text, for the test to choose; all requests of all batches are kept."""

    def __init__(self, script: Script, likely: Callable[[str], float] = lambda text: -1.0) -> None:
        super().__init__(tokenizer=TOKENIZER, script=script, context_length=4096)
        self.likely, self.asked = likely, list[Request]()
        self.released: list[str] = []

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.asked += requests
        found = super().generate(requests)
        return [replace(one, logprobs=(self.likely(said(one)),) * len(one.token_ids)) for one in found]

    def release(self, cache_keys: Sequence[str]) -> None:
        self.released += cache_keys


def number_of(request: Request) -> int:
    """Of a candidate; 0 is the request itself."""
    return int(request.request_id.partition("/candidate-")[2] or 0)


def engine(inner: Inner, critic: Critic, **given: Any) -> RescoringEngine:
    return RescoringEngine(inner, critic, validate(RetrospexSettings, {"critic": "none.file", **given}))


def ask(turn: int = 0, **given: Any) -> Request:
    ids = tuple(TOKENIZER.encode("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
                                 add_special_tokens=False))  # fmt: skip
    return Request(request_id=f"t/0000/{turn:03d}", token_ids=ids, max_tokens=60, seed=7, stop=("</a>",),
                   **{"cache_key": "t/0", **given})  # fmt: skip


def said(generation: Generation) -> str:
    return decode_text(TOKENIZER, generation.token_ids, skip_special_tokens=False)


def following(request: Request, turn: Generation, answer: str) -> Request:
    """The request of the next turn."""
    ids = (*request.token_ids, *turn.token_ids)
    ids += ChatRenderer(TOKENIZER).bridge(ids, [Message(role="user", content=answer)])
    return replace(request, request_id="t/0000/001", token_ids=ids)


@pytest.mark.parametrize(
    ("decay", "floor", "choice"),
    [(1.0, 0.0, "do 0"), (0.5, 0.0, "do 1"), (0.1, 0.0, "do 2"), (0.1, 0.9, "do 0")],
)
def test_the_turn_with_the_best_score_is_taken(decay: float, floor: float, choice: str) -> None:
    """In the first turn the policy decides alone (a weight of 1). Scores of the second: w,
    0.6 w + 0.8 (1 - w), and 1 - w.
    """
    likely = {"0": 1.0, "1": 0.6 + 0.4 * exp(-9), "2": exp(-9)}
    inner = Inner(lambda r, _: f"<a>do {number_of(r)}</a>", lambda text: log(likely[text[-5]]))
    critic = Sayings(lambda action: {"do 0": 0.0, "do 1": 4.0, "do 2": 5.0}[action])
    chosen = engine(inner, critic, num_candidates=3, decay=decay, floor=floor)
    (first,) = chosen.generate([ask()])
    assert (first.request_id, said(first)) == ("t/0000/000", "<a>do 0</a>")
    (second,) = chosen.generate([following(ask(), first, "a room")])
    assert (second.request_id, said(second)) == ("t/0000/001", f"<a>{choice}</a>")
    assert set(second.logprobs) == {log(likely[choice[-1]])}
    actions = ("do 0", "do 1", "do 2")
    after = Situation(prompt="q", observation="a room", previous="do 0")
    assert critic.told == [(Situation(prompt="q"), actions), (after, actions)]


def test_equal_actions_are_one_candidate_with_the_likeliest_turn() -> None:
    inner = Inner(
        lambda r, _: ("<a>go</a>", "well <a>go</a>", "<a>stay</a>")[number_of(r)],
        lambda text: {"<a>g": -2.0, "well": -1.0, "<a>s": -1.5}[text[:4]],
    )
    critic = Sayings(lambda action: 0.0)
    found = engine(inner, critic, num_candidates=3).generate([ask()])
    assert critic.told[0][1] == ("go", "stay")
    assert said(found[0]).startswith("well")


def test_candidates_have_draws_of_their_own_and_no_cache_key() -> None:
    inner = Inner(lambda r, _: "<a>go</a>")
    engine(inner, Sayings(lambda action: 0.0), num_candidates=4).generate(
        [ask(temperature=0.0), ask(cache_key="t/1")]
    )
    assert len({one.seed for one in inner.asked}) == 4  # both requests have one seed
    assert [one.temperature for one in inner.asked] == [0.0, 1.0, 1.0, 1.0] + [1.0] * 4
    assert [one.cache_key for one in inner.asked] == ["t/0", None, None, None, "t/1", None, None, None]
    assert len({one.request_id for one in inner.asked}) == 4 + 3 or len(inner.asked) == 8


def chat(number: int, text: str) -> StepResult:
    return say(f"you did {text.count('x')} in room {number}", role="user")


def play(inner: Inner, critic: Sayings, on_step: Any = chat, **given: Any) -> tuple[list[Trace], Factory]:
    factory = Factory(lambda task, n: Fake(on_step, question=task.question))
    played = scheduler(
        engine(inner, critic, **given), factory, limits=LIMITS, stop=("</a>",), hooks=given.pop("hooks", ())
    )
    return played.run(tasks(2), modes=("plain",) * 2, training_step=0).traces, factory


@pytest.mark.parametrize("ending", ["</a>", ""])
def test_the_critic_is_told_while_it_plays_what_it_was_told_in_training(ending: str) -> None:
    """Turns that a stop string ends, and turns that the policy closes itself."""
    inner = Inner(lambda r, _: f"hm <a>x{number_of(r) * 'x'}{ending}")
    critic = Sayings(lambda action: float(action.count("x")))
    traces, _ = play(inner, critic, num_candidates=3, decay=0.0, floor=0.0)
    rows = trace_rows(traces, step=0, tokenizer=TOKENIZER).nodes
    recorded = [one for path in build_trajectories(rows, name="run") for one in to_transitions(path)]
    assert len(recorded) == 2 * 2 * 4 == len(critic.told)
    told = {
        (situation, max(actions, key=critic.liking) if situation.observation else actions[0])
        for situation, actions in critic.told
    }
    assert {(one.situation, one.action) for one in recorded} == told
    assert {one.situation.observation for one in recorded} == {""} | {
        f"you did {1 if number == 0 else 3} in room {number}" for number in range(3)
    }


def test_the_critic_is_told_of_rules_as_the_trace_keeps_them() -> None:
    """A system message and the user's are one text in a trace, whatever the template writes between them."""

    class Ruled(Fake):
        def reset(self, seed: int) -> Sequence[Message]:
            return (Message(role="system", content="be brief\nand kind"), *super().reset(seed))

    inner = Inner(lambda r, _: f"<a>{number_of(r)}</a>")
    critic = Sayings(lambda action: 0.0)
    factory = Factory(lambda task, n: Ruled(chat, question=task.question))
    made = scheduler(engine(inner, critic, num_candidates=2), factory, limits=LIMITS, stop=("</a>",))
    traces = made.run(tasks(1), modes=("plain",), training_step=0).traces
    recorded = build_trajectories(trace_rows(traces, step=0, tokenizer=TOKENIZER).nodes, name="run")
    [first, *_] = to_transitions(recorded[0])
    assert "be brief" in first.situation.prompt
    assert {situation.prompt for situation, _ in critic.told} == {first.situation.prompt}


def test_the_weight_falls_with_the_turns_of_each_episode() -> None:
    """With d = 0.5 and b = 0 the policy's favourite wins turn 0 (1 against 0) and turn 1 (a tie, the first
    counts), the critic's turn 2.
    """
    inner = Inner(lambda r, _: f"<a>{'x' * number_of(r)}y</a>", lambda text: -float(text.count("x")) - 1)
    critic = Sayings(lambda action: float(action.count("x")))
    traces, _ = play(inner, critic, num_candidates=2, decay=0.5, floor=0.0)
    for trace in traces:
        for _, path in trace.rollouts():
            said = [node.message.content for node in path if node.trainable]
            assert said == ["<a>y</a>", "<a>y</a>", "<a>xy</a>", "<a>xy</a>"]
    assert inner.released == ["task 0/0", "task 0/1", "task 1/0", "task 1/1"]


def test_a_rollout_that_is_tried_again_begins_at_turn_0() -> None:
    def broken_once(number: int, text: str) -> StepResult:
        if number == 1 and not failed:
            failed.append(True)
            raise EnvironmentFault("gone")
        return chat(number, text)

    failed: list[bool] = []
    critic = Sayings(lambda action: 0.0)
    traces, factory = play(Inner(lambda r, _: "<a>x</a>"), critic, on_step=broken_once, num_candidates=2)
    assert len(factory.made) == 5 and failed
    beginnings = [situation for situation, _ in critic.told if not situation.observation]
    assert len(beginnings) == 5 and all(one.previous == "" for one in beginnings)
    assert all(leaf.episode_return is not None for trace in traces for leaf, _ in trace.rollouts())


def test_what_is_no_turn_of_an_episode_passes_as_it_is() -> None:
    inner = Inner(lambda r, _: "<a>x</a>")
    critic = Sayings(lambda action: 0.0)
    chosen = engine(inner, critic, num_candidates=3)
    other = [ask(cache_key=None), replace(ask(), request_id="t/0000/003/reflection")]
    assert [one.request_id for one in chosen.generate(other)] == [one.request_id for one in other]
    assert inner.asked == other and critic.told == []
    assert chosen.generate([]) == []


class Failing(Fake):
    def result(self) -> EpisodeResult:
        return EpisodeResult(episode_return=0.0, success=False)


def test_reflexion_s_plans_are_asked_for_once() -> None:
    """The name of such a request is what tells it from a turn."""
    inner = Inner(lambda r, _: "a plan." if r.request_id.endswith("/reflection") else "<a>x</a>")
    critic = Sayings(lambda action: 0.0)
    made = scheduler(
        engine(inner, critic, num_candidates=2),
        Factory(lambda task, n: Failing(chat, question=task.question)),
        limits=LIMITS, stop=("</a>",), hooks=(ReflexionHook(),),
    )  # fmt: skip
    traces = made.run(tasks(2), modes=("plain",), training_step=0).traces
    assert [leaf.reflection for trace in traces for leaf, _ in trace.rollouts()] == ["a plan."] * 2
    assert len(critic.told) == 2 * 4
    assert sum(one.request_id.endswith("/reflection") for one in inner.asked) == 2


def critic_of(seed: int = 0) -> Critic:
    settings = CriticSettings(embedder="hash", hidden=8)
    return Critic(Networks(256, 8, seed=seed), HashEmbedder(), settings)


def test_a_saved_critic_says_the_same(tmp_path: Path) -> None:
    situation, actions = Situation(prompt="p", observation="o", previous="a"), ["go", "stay"]
    critic = critic_of(seed=3)
    critic.save(tmp_path / "critic.safetensors")
    again = load_critic(tmp_path / "critic.safetensors", load_embedder)
    assert again.settings == critic.settings
    said = critic.advantages(situation, actions)
    assert again.advantages(situation, actions) == said and said[0] != said[1]
    # one action at a time or together: what else is a candidate changes nothing that decides
    assert critic.advantages(situation, ["stay"])[0] == pytest.approx(said[1], abs=1e-5)


def test_what_is_no_critic_is_refused(tmp_path: Path) -> None:
    for content in (None, b"", b"x" * 100):
        path = tmp_path / "critic.safetensors"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match="is no critic"):
            load_critic(path, load_embedder)

    class Other(HashEmbedder):
        def __init__(self) -> None:
            super().__init__()
            self.name = "other"

    critic_of().save(path)
    with pytest.raises(DataError, match="vectors of hash:256, here is other"):
        load_critic(path, lambda name: Other())
    weights = load_file(path)
    with safe_open(path, framework="pt") as opened:
        [(name, told)] = opened.metadata().items()
    for wrong in ("{", "[]", "{}", told.replace('"dim"', '"dam"')):
        save_file(weights, path, metadata={name: wrong})
        with pytest.raises(DataError, match="does not record what it was trained on"):
            load_critic(path, load_embedder)


@pytest.mark.parametrize("value", [nan, inf])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, value: float) -> None:
    """They would choose the first candidate in every turn, without a word."""
    critic = critic_of()
    next(critic.networks.parameters()).data.view(-1)[-1] = value
    critic.save(tmp_path / "critic")
    with pytest.raises(DataError, match="no numbers"):
        load_critic(tmp_path / "critic", load_embedder)


def test_training_on_what_a_critic_chooses_is_refused() -> None:
    run = {"environment": {"type": "webshop"}, "algorithm": {"type": "grpo"}, "train": {"num_steps": 1}}
    chosen = {"type": "retrospex", "critic": "none.file"}
    with pytest.raises(ConfigError, match="is for evaluations"):
        validate(RunSettings, {**run, "engine": chosen})
    validate(RunSettings, {**run, "engine": {**chosen, "allow_training": True}})
    validate(RunSettings, {**run, "engine": chosen, "train": {"num_steps": 0}})
