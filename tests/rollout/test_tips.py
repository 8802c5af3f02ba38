"""Tips in the loop: without them a rollout is, token by token, a plain one; they end no episode; reflections
are trained on nowhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.reflexion import ReflexionHook
from outrider.algorithms.tips import MemorySettings, TipHook, clean_reflection
from outrider.engines.base import Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import EpisodeResult, StepResult
from outrider.errors import EngineFault
from outrider.memory.embedders import HashEmbedder
from outrider.rollout.episode import Sampling
from outrider.rollout.hooks import EpisodeState, Hook, Splice
from outrider.rollout.scheduler import RolloutReport, Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.trace import Trace, policy_turns, without_memory
from outrider.types import Message, Origin, Outcome, Role
from tests.rollout.fakes import TOKENIZER, Factory, Fake, RawEngine, say, scheduler, tasks
from tests.tokens.family_templates import FAMILIES, byte_tokenizer

END = StepResult(message=None, done=True)


@dataclass
class Tips(Hook):
    """Shows a text before every turn."""

    text: str
    asks: Message | None = None
    max_reflection_tokens: int = 6
    traces: list[Trace] = field(default_factory=list)

    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        return [Splice(origin=Origin.MEMORY, text=self.text)] if self.text else ()

    def after_group(self, trace: Trace) -> None:
        self.traces.append(trace)

    def closing_message(self, state: EpisodeState, result: EpisodeResult) -> Message | None:
        return self.asks


def acts(request: Request) -> list[int]:
    """What is written depends on the rollout and turn, never on the tips."""
    _, rollout, turn = request.request_id.removesuffix("/reflection").split("/")[-3:]
    return [5 + int(rollout), 9 + int(turn), 12]


def play(
    text: str, *, role: Role, limits: Limits, context: int = 4096, asks: Message | None = None
) -> tuple[Any, Tips]:
    hook = Tips(text, asks)
    engine = RawEngine(TOKENIZER, acts, context_length=context)
    factory = Factory(
        lambda task, number: Fake(on_step=lambda n, said: say(f" seen {n}", role) if n < 3 else END)
    )
    report = scheduler(engine, factory, hooks=(hook,), limits=limits).run(
        tasks(2), modes=("tips_on",) * 2, training_step=0
    )
    return report, hook


def ids(trace: Trace, *, plain: bool) -> list[tuple[int, ...]]:
    return [
        tuple(token for node in (without_memory(path) if plain else path) for token in node.token_ids)
        for _, path in trace.rollouts()
    ]


@pytest.mark.parametrize("role", ["user", "inline"])
@pytest.mark.parametrize("max_response", [24, 60, 400])
def test_without_its_tips_a_rollout_equals_a_plain_one(role: Role, max_response: int) -> None:
    limits = Limits(max_turns=6, max_turn_tokens=3, max_response_tokens=max_response, step_timeout_s=60)
    plain, _ = play("", role=role, limits=limits)
    tipped, _ = play("\n<tip>try\n</tip>", role=role, limits=limits)
    for one, other in zip(plain.traces, tipped.traces, strict=True):
        assert ids(other, plain=True) == ids(one, plain=True) == ids(one, plain=False)
        assert ids(other, plain=False) != ids(one, plain=False)
        assert [leaf.outcome for leaf, _ in other.rollouts()] == [leaf.outcome for leaf, _ in one.rollouts()]
        for (_, path), (_, bare) in zip(other.rollouts(), one.rollouts(), strict=True):
            assert sum(node.origin is Origin.MEMORY for node in path) == sum(node.trainable for node in path)
            assert [turn.observation for turn in policy_turns(path)] == [
                turn.observation for turn in policy_turns(bare)
            ]


def test_a_tip_is_inside_the_user_message_and_the_group_shares_the_prompt() -> None:
    limits = Limits(max_turns=6, max_turn_tokens=3, step_timeout_s=60)
    report, _ = play("\n<tip>try</tip>", role="user", limits=limits)
    trace = report.traces[0]
    paths = [path for _, path in trace.rollouts()]
    assert paths[0][0] is paths[1][0] and paths[0][1] is not paths[1][1]
    text = TOKENIZER.decode([t for node in paths[0] for t in node.token_ids], skip_special_tokens=False)
    assert "q\n<tip>try</tip><|im_end|>\n<|im_start|>assistant\n" in text
    assert "<|im_start|>user\n seen 0\n<tip>try</tip><|im_end|>\n<|im_start|>assistant\n" in text
    assert not any(node.trainable for node in trace.nodes if node.origin is Origin.MEMORY)


@given(
    context=st.integers(20, 160),
    length=st.integers(1, 80),
    max_response=st.integers(10, 120),
    role=st.sampled_from(["user", "inline"]),
)
def test_no_episode_ends_because_of_tips(context: int, length: int, max_response: int, role: Role) -> None:
    """The same outcome and the same tokens as without tips, however little room there is."""
    limits = Limits(max_turns=4, max_turn_tokens=3, max_response_tokens=max_response, step_timeout_s=60)
    plain, _ = play("", role=role, limits=limits, context=context)
    tipped, _ = play("x" * length, role=role, limits=limits, context=context)
    for one, other in zip(plain.traces, tipped.traces, strict=True):
        assert ids(other, plain=True) == ids(one, plain=False)
        assert [leaf.outcome for leaf, _ in other.rollouts()] == [leaf.outcome for leaf, _ in one.rollouts()]
        assert all(len(path) <= context for path in ids(other, plain=False))
        for _, path in other.rollouts():
            turns = [node.metadata for node in path if node.trainable]
            num_shown = sum(node.origin is Origin.MEMORY for node in path)
            assert num_shown + sum(data.get("num_tips_dropped", 0) for data in turns) == len(turns)
            assert not any(data["num_splices_dropped"] for data in turns)  # those of retrieval


@pytest.mark.parametrize("role", ["user", "inline"])
def test_a_reflection_is_requested_after_the_end_and_is_in_no_node(role: Role) -> None:
    limits = Limits(max_turns=6, max_turn_tokens=3, step_timeout_s=60)
    report, hook = play("", role=role, limits=limits, asks=Message(role="user", content="a tip?"))
    silent, _ = play("", role=role, limits=limits)
    assert hook.max_reflection_tokens > 0
    for trace, other in zip(report.traces, silent.traces, strict=True):
        assert [len(trace.nodes), *ids(trace, plain=False)] == [len(other.nodes), *ids(other, plain=False)]
        for leaf, path in trace.rollouts():
            turns = sum(node.trainable for node in path)
            request = Request(
                request_id=f"x/{leaf.rollout}/{turns}/reflection", token_ids=(1,), max_tokens=6, seed=0
            )
            assert leaf.reflection == TOKENIZER.decode(acts(request), skip_special_tokens=True)
            assert leaf.num_reflection_tokens == 3
    assert hook.traces[0].leaves[0].reflection


def test_truncated_thinking_is_not_a_reflection() -> None:
    family = FAMILIES["qwen3, always thinking"]
    renderer = ChatRenderer(byte_tokenizer(family), template_kwargs=family.variables)

    def script(request: Request, text: str) -> str:
        if request.request_id.endswith("/reflection"):
            return "so" if "0001" in request.request_id else "so</think>\n\ntry"
        return "</think>\n\nact"

    runs = Scheduler(
        engine=ScriptedEngine(tokenizer=renderer.tokenizer, script=script), renderer=renderer,
        factory=Factory(lambda task, number: Fake(on_step=lambda n, said: END)),
        limits=Limits(step_timeout_s=60), sampling=Sampling(), run_seed=0,
        hooks=(Tips("", asks=Message(role="user", content="a tip?"), max_reflection_tokens=60),),
    )  # fmt: skip
    [trace] = runs.run(tasks(1), modes=("tips_on",) * 2, training_step=0).traces
    assert [clean_reflection(leaf.reflection) for leaf, _ in trace.rollouts()] == ["try", ""]


def test_a_reflection_without_room_or_with_a_fault_fails_no_rollout() -> None:
    limits = Limits(max_turns=2, max_turn_tokens=3, max_response_tokens=30, step_timeout_s=60)
    crowded, _ = play(
        "", role="inline", limits=limits, context=60, asks=Message(role="user", content="why " * 20)
    )
    assert all(
        leaf.reflection == "" and leaf.num_reflection_tokens == 0
        for t in crowded.traces
        for leaf, _ in t.rollouts()
    )

    class Breaks(RawEngine):
        def generate(self, requests: Sequence[Request]) -> Any:
            if any(request.request_id.endswith("reflection") for request in requests):
                raise EngineFault("no")
            return super().generate(requests)

    factory = Factory(lambda task, number: Fake(on_step=lambda n, said: END))
    hook = Tips("", Message(role="user", content="a tip?"))
    runs = scheduler(Breaks(TOKENIZER, acts), factory, hooks=(hook,), limits=limits)
    report = runs.run(tasks(1), modes=("tips_on",) * 2, training_step=0)
    assert [leaf.outcome for leaf, _ in report.traces[0].rollouts()] == [Outcome.FINISHED] * 2
    assert report.num_retries == 0 and report.faults == {"reflection": 2}
    assert report.fault_reasons[0].startswith("no reflection: no in ") and len(report.fault_reasons) == 2


class Asked(RawEngine):
    """Keeps the reflections' requests as text."""

    def __init__(self, *, context_length: int = 4096) -> None:
        super().__init__(TOKENIZER, acts, context_length=context_length)
        self.requests: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> Any:
        self.requests += [request for request in requests if request.request_id.endswith("reflection")]
        return super().generate(requests)

    def texts(self) -> list[str]:
        return [str(TOKENIZER.decode(one.token_ids, skip_special_tokens=False)) for one in self.requests]


class Lost(Fake):
    """Ends with what ``on_step`` says, and nothing reached."""

    def result(self) -> EpisodeResult:
        return EpisodeResult(episode_return=-0.25, success=False)


def ended(
    words: str | None, *, engine: Asked, kind: str, done: bool = True, hooked: bool = True
) -> RolloutReport:
    """Two rollouts of two turns; the environment's last step says ``words``."""
    message = None if words is None else Message(role="user", content=words)

    def step(number: int, said: str) -> StepResult:
        return say(f"seen {number}", "user") if number < 1 else StepResult(message=message, done=done)

    settings_ = MemorySettings(max_tip_tokens=6)
    tips = TipHook(settings_, embedder=HashEmbedder(), count_tokens=len, seed=0)
    hook = tips if kind == "tips" else ReflexionHook(max_plan_tokens=6)
    limits = Limits(
        max_turns=2, max_turn_tokens=3, max_response_tokens=200, max_observation_tokens=40, step_timeout_s=60
    )
    runs = scheduler(
        engine,
        Factory(lambda task, number: Lost(on_step=step)),
        hooks=(hook,) if hooked else (),
        limits=limits,
    )
    return runs.run(tasks(1), modes=("plain",) * 2, training_step=0)


@pytest.mark.parametrize("kind", ["tips", "reflexion"])
def test_the_reflection_request_contains_the_end_of_the_episode(kind: str) -> None:
    engine = Asked()
    report = ended("the vase broke", engine=engine, kind=kind)
    assert len(engine.texts()) == 2
    for text in engine.texts():
        request = text[text.rindex("<|im_start|>user") :]
        assert request.startswith("<|im_start|>user\nthe vase broke\n\nThe ") and "score of -0.25" in request
        assert text.count("the vase broke") == 1
    silent = ended("the vase broke", engine=Asked(), kind=kind, hooked=False)
    # what is trained on stays as it was
    assert ids(report.traces[0], plain=False) == ids(silent.traces[0], plain=False)
    assert len(report.traces[0].nodes) == len(silent.traces[0].nodes)


@pytest.mark.parametrize("kind", ["tips", "reflexion"])
def test_the_reflection_request_repeats_no_observation(kind: str) -> None:
    for words, done in ((None, True), ("seen last", False)):  # ended without a word; cut by the loop
        engine = Asked()
        ended(words, engine=engine, kind=kind, done=done)
        for text in engine.texts():
            assert text[text.rindex("<|im_start|>user") :].startswith("<|im_start|>user\nThe ")
            assert text.count("seen last") == (words is not None)


@given(context=st.integers(60, 700), length=st.integers(1, 120), kind=st.sampled_from(["tips", "reflexion"]))
def test_the_last_observation_is_truncated_to_its_budget(context: int, length: int, kind: str) -> None:
    engine, without = Asked(context_length=context), Asked(context_length=context)
    report = ended("z" * length, engine=engine, kind=kind)
    bare = ended(None, engine=without, kind=kind)
    assert len(engine.requests) == len(without.requests)
    for (leaf, _), (other, _) in zip(report.traces[0].rollouts(), bare.traces[0].rollouts(), strict=True):
        assert (leaf.reflection, leaf.num_reflection_tokens) == (
            other.reflection,
            other.num_reflection_tokens,
        )
    for long, short in zip(engine.requests, without.requests, strict=True):
        assert len(long.token_ids) + 6 <= context
        added, room = len(long.token_ids) - len(short.token_ids), context - 6 - len(short.token_ids)
        assert added <= 40 + 2  # max_observation_tokens, and the empty line
        assert added >= min(length, 40, room - 2)  # nothing is cut that there is room for
