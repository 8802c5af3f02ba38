"""The engine with a critic: its choices, the inputs of the critic, and requests that pass unchanged."""

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


class RecordingCritic(Critic):
    """Has the advantages that ``liking`` returns, and records its inputs."""

    def __init__(self, liking: Callable[[str], float]) -> None:
        self.liking = liking
        self.calls: list[tuple[Situation, tuple[str, ...]]] = []

    def advantages(self, situation: Situation, actions: Sequence[str]) -> list[float]:
        self.calls.append((situation, tuple(actions)))
        return [self.liking(action) for action in actions]


class Inner(ScriptedEngine):
    """Has log-probs that depend on the text, and records all requests."""

    def __init__(self, script: Script, likely: Callable[[str], float] = lambda text: -1.0) -> None:
        super().__init__(tokenizer=TOKENIZER, script=script, context_length=4096)
        self.likely, self.requests = likely, list[Request]()
        self.released: list[str] = []

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.requests += requests
        found = super().generate(requests)
        return [replace(one, logprobs=(self.likely(text_of(one)),) * len(one.token_ids)) for one in found]

    def release(self, cache_keys: Sequence[str]) -> None:
        self.released += cache_keys


def number_of(request: Request) -> int:
    """Return the number of a candidate; 0 is the request itself."""
    return int(request.request_id.partition("/candidate-")[2] or 0)


def engine(inner: Inner, critic: Critic, **given: Any) -> RescoringEngine:
    return RescoringEngine(inner, critic, validate(RetrospexSettings, {"critic": "none.file", **given}))


def new_request(turn: int = 0, **given: Any) -> Request:
    ids = tuple(TOKENIZER.encode("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
                                 add_special_tokens=False))  # fmt: skip
    return Request(request_id=f"t/0000/{turn:03d}", token_ids=ids, max_tokens=60, seed=7, stop=("</a>",),
                   **{"cache_key": "t/0", **given})  # fmt: skip


def text_of(generation: Generation) -> str:
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
    critic = RecordingCritic(lambda action: {"do 0": 0.0, "do 1": 4.0, "do 2": 5.0}[action])
    chosen = engine(inner, critic, num_candidates=3, decay=decay, floor=floor)
    (first,) = chosen.generate([new_request()])
    assert (first.request_id, text_of(first)) == ("t/0000/000", "<a>do 0</a>")
    (second,) = chosen.generate([following(new_request(), first, "a room")])
    assert (second.request_id, text_of(second)) == ("t/0000/001", f"<a>{choice}</a>")
    assert set(second.logprobs) == {log(likely[choice[-1]])}
    actions = ("do 0", "do 1", "do 2")
    after = Situation(prompt="q", observation="a room", previous="do 0")
    assert critic.calls == [(Situation(prompt="q"), actions), (after, actions)]


def test_equal_actions_are_one_candidate_with_the_likeliest_turn() -> None:
    inner = Inner(
        lambda r, _: ("<a>go</a>", "well <a>go</a>", "<a>stay</a>")[number_of(r)],
        lambda text: {"<a>g": -2.0, "well": -1.0, "<a>s": -1.5}[text[:4]],
    )
    critic = RecordingCritic(lambda action: 0.0)
    found = engine(inner, critic, num_candidates=3).generate([new_request()])
    assert critic.calls[0][1] == ("go", "stay")
    assert text_of(found[0]).startswith("well")


def test_candidates_have_draws_of_their_own_and_no_cache_key() -> None:
    inner = Inner(lambda r, _: "<a>go</a>")
    engine(inner, RecordingCritic(lambda action: 0.0), num_candidates=4).generate(
        [new_request(temperature=0.0), new_request(cache_key="t/1")]
    )
    assert len({one.seed for one in inner.requests}) == 4  # both requests have one seed
    assert [one.temperature for one in inner.requests] == [0.0, 1.0, 1.0, 1.0] + [1.0] * 4
    assert [one.cache_key for one in inner.requests] == ["t/0", None, None, None, "t/1", None, None, None]
    assert len({one.request_id for one in inner.requests}) == 4 + 3 or len(inner.requests) == 8


def chat(number: int, text: str) -> StepResult:
    return say(f"you did {text.count('x')} in room {number}", role="user")


def play(
    inner: Inner, critic: RecordingCritic, on_step: Any = chat, **given: Any
) -> tuple[list[Trace], Factory]:
    factory = Factory(lambda task, n: Fake(on_step, question=task.question))
    played = scheduler(
        engine(inner, critic, **given), factory, limits=LIMITS, stop=("</a>",), hooks=given.pop("hooks", ())
    )
    return played.run(tasks(2), modes=("plain",) * 2, training_step=0).traces, factory


@pytest.mark.parametrize("ending", ["</a>", ""])
def test_the_critic_sees_the_same_situations_in_rollouts_as_in_training(ending: str) -> None:
    """Turns that a stop string ends, and turns that the policy closes."""
    inner = Inner(lambda r, _: f"hm <a>x{number_of(r) * 'x'}{ending}")
    critic = RecordingCritic(lambda action: float(action.count("x")))
    traces, _ = play(inner, critic, num_candidates=3, decay=0.0, floor=0.0)
    rows = trace_rows(traces, step=0, tokenizer=TOKENIZER).nodes
    recorded = [one for path in build_trajectories(rows, name="run") for one in to_transitions(path)]
    assert len(recorded) == 2 * 2 * 4 == len(critic.calls)
    seen = {
        (situation, max(actions, key=critic.liking) if situation.observation else actions[0])
        for situation, actions in critic.calls
    }
    assert {(one.situation, one.action) for one in recorded} == seen
    assert {one.situation.observation for one in recorded} == {""} | {
        f"you did {1 if number == 0 else 3} in room {number}" for number in range(3)
    }


def test_the_critic_sees_system_messages_as_the_trace_stores_them() -> None:
    """A trace joins a system message and the user's message, independent of the template."""

    class Ruled(Fake):
        def reset(self, seed: int) -> Sequence[Message]:
            return (Message(role="system", content="be brief\nand kind"), *super().reset(seed))

    inner = Inner(lambda r, _: f"<a>{number_of(r)}</a>")
    critic = RecordingCritic(lambda action: 0.0)
    factory = Factory(lambda task, n: Ruled(chat, question=task.question))
    made = scheduler(engine(inner, critic, num_candidates=2), factory, limits=LIMITS, stop=("</a>",))
    traces = made.run(tasks(1), modes=("plain",), training_step=0).traces
    recorded = build_trajectories(trace_rows(traces, step=0, tokenizer=TOKENIZER).nodes, name="run")
    [first, *_] = to_transitions(recorded[0])
    assert "be brief" in first.situation.prompt
    assert {situation.prompt for situation, _ in critic.calls} == {first.situation.prompt}


def test_the_weight_falls_with_the_turns_of_each_episode() -> None:
    """With d = 0.5 and b = 0 the policy's favourite wins turn 0 (1 against 0) and turn 1 (a tie, the first
    counts), the critic's turn 2.
    """
    inner = Inner(lambda r, _: f"<a>{'x' * number_of(r)}y</a>", lambda text: -float(text.count("x")) - 1)
    critic = RecordingCritic(lambda action: float(action.count("x")))
    traces, _ = play(inner, critic, num_candidates=2, decay=0.5, floor=0.0)
    for trace in traces:
        for _, path in trace.rollouts():
            texts = [node.message.content for node in path if node.trainable]
            assert texts == ["<a>y</a>", "<a>y</a>", "<a>xy</a>", "<a>xy</a>"]
    assert inner.released == ["task 0/0", "task 0/1", "task 1/0", "task 1/1"]


def test_a_rollout_that_is_tried_again_begins_at_turn_0() -> None:
    def broken_once(number: int, text: str) -> StepResult:
        if number == 1 and not failed:
            failed.append(True)
            raise EnvironmentFault("gone")
        return chat(number, text)

    failed: list[bool] = []
    critic = RecordingCritic(lambda action: 0.0)
    traces, factory = play(Inner(lambda r, _: "<a>x</a>"), critic, on_step=broken_once, num_candidates=2)
    assert len(factory.made) == 5 and failed
    beginnings = [situation for situation, _ in critic.calls if not situation.observation]
    assert len(beginnings) == 5 and all(one.previous == "" for one in beginnings)
    assert all(leaf.episode_return is not None for trace in traces for leaf, _ in trace.rollouts())


def test_requests_that_are_no_turns_of_an_episode_pass_unchanged() -> None:
    inner = Inner(lambda r, _: "<a>x</a>")
    critic = RecordingCritic(lambda action: 0.0)
    chosen = engine(inner, critic, num_candidates=3)
    other = [new_request(cache_key=None), replace(new_request(), request_id="t/0000/003/reflection")]
    assert [one.request_id for one in chosen.generate(other)] == [one.request_id for one in other]
    assert inner.requests == other and critic.calls == []
    assert chosen.generate([]) == []


class Failing(Fake):
    def result(self) -> EpisodeResult:
        return EpisodeResult(episode_return=0.0, success=False)


def test_plans_of_reflexion_are_requested_once() -> None:
    """Only the name of such a request differs from that of a turn."""
    inner = Inner(lambda r, _: "a plan." if r.request_id.endswith("/reflection") else "<a>x</a>")
    critic = RecordingCritic(lambda action: 0.0)
    made = scheduler(
        engine(inner, critic, num_candidates=2),
        Factory(lambda task, n: Failing(chat, question=task.question)),
        limits=LIMITS, stop=("</a>",), hooks=(ReflexionHook(),),
    )  # fmt: skip
    traces = made.run(tasks(2), modes=("plain",), training_step=0).traces
    assert [leaf.reflection for trace in traces for leaf, _ in trace.rollouts()] == ["a plan."] * 2
    assert len(critic.calls) == 2 * 4
    assert sum(one.request_id.endswith("/reflection") for one in inner.requests) == 2


def critic_of(seed: int = 0) -> Critic:
    settings = CriticSettings(embedder="hash", hidden=8)
    return Critic(Networks(256, 8, seed=seed), HashEmbedder(), settings)


def test_a_saved_critic_says_the_same(tmp_path: Path) -> None:
    situation, actions = Situation(prompt="p", observation="o", previous="a"), ["go", "stay"]
    critic = critic_of(seed=3)
    critic.save(tmp_path / "critic.safetensors")
    again = load_critic(tmp_path / "critic.safetensors", load_embedder)
    assert again.settings == critic.settings
    values = critic.advantages(situation, actions)
    assert again.advantages(situation, actions) == values and values[0] != values[1]
    # one action at a time or together: what else is a candidate changes nothing that decides
    assert critic.advantages(situation, ["stay"])[0] == pytest.approx(values[1], abs=1e-5)


def test_invalid_critic_files_are_errors(tmp_path: Path) -> None:
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
        [(name, record)] = opened.metadata().items()
    for wrong in ("{", "[]", "{}", record.replace('"dim"', '"dam"')):
        save_file(weights, path, metadata={name: wrong})
        with pytest.raises(DataError, match="does not record what it was trained on"):
            load_critic(path, load_embedder)


@pytest.mark.parametrize("value", [nan, inf])
def test_weights_that_are_not_finite_are_errors(tmp_path: Path, value: float) -> None:
    """They would silently choose the first candidate in every turn."""
    critic = critic_of()
    next(critic.networks.parameters()).data.view(-1)[-1] = value
    critic.save(tmp_path / "critic")
    with pytest.raises(DataError, match="not finite"):
        load_critic(tmp_path / "critic", load_embedder)


def test_training_on_rescored_turns_is_an_error() -> None:
    run = {"environment": {"type": "webshop"}, "algorithm": {"type": "grpo"}, "train": {"num_steps": 1}}
    chosen = {"type": "retrospex", "critic": "none.file"}
    with pytest.raises(ConfigError, match="is for evaluations"):
        validate(RunSettings, {**run, "engine": chosen})
    validate(RunSettings, {**run, "engine": {**chosen, "allow_training": True}})
    validate(RunSettings, {**run, "engine": chosen, "train": {"num_steps": 0}})
