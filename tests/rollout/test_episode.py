"""One rollout: every outcome, the token budgets, cuts, and what hooks may do."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.base import Request
from outrider.environments.base import StepResult
from outrider.errors import EngineFault, EnvironmentFault, ToolFault
from outrider.rollout.episode import CUT_MARK
from outrider.rollout.hooks import Attempt, EpisodeState, Hook, Splice
from outrider.rollout.settings import Limits
from outrider.trace import Leaf, Node, Trace
from outrider.types import Message, Origin, Outcome, Step
from tests.rollout.fakes import TOKENIZER, Factory, Fake, RawEngine, say, scheduler, scripted, tasks
from tests.tokens.test_renderer import CHATML, byte_tokenizer

OnStep = Callable[[int, str], StepResult]
END = StepResult(message=None, done=True)


def play(
    on_step: OnStep, *, script: str = "act.", limits: Limits | None = None, question: str = "q",
    engine: RawEngine | None = None, hooks: Sequence["Inserter"] = (), context_length: int = 4096,
) -> tuple[Leaf, list[Node], Fake, Trace]:  # fmt: skip
    environment = Fake(on_step=on_step, question=question)
    runs = scheduler(
        engine or scripted(lambda request, context: script, context_length=context_length),
        Factory(lambda task, number: environment), limits=limits, hooks=hooks, max_retries=0,
    )  # fmt: skip
    trace = runs.run(tasks(1), modes=("hybrid",), training_step=0).traces[0]
    [(leaf, path)] = list(trace.rollouts())
    assert environment.num_closed == 1
    return leaf, path, environment, trace


def num_response(path: Sequence[Node]) -> int:
    return sum(len(node.token_ids) for node in path if node.origin is not Origin.PROMPT)


def raising(error: BaseException) -> OnStep:
    def step(number: int, text: str) -> StepResult:
        raise error

    return step


def test_a_finished_rollout() -> None:
    leaf, path, environment, _ = play(
        lambda n, t: say(" obs") if n == 0 else StepResult(message=None, done=True, reward=0.25)
    )
    assert (leaf.outcome, leaf.episode_return, leaf.success, leaf.metrics) == (
        Outcome.FINISHED,
        0.5,
        True,
        {"steps": 2.0},
    )
    assert [node.origin for node in path] == [Origin.PROMPT, Origin.POLICY, Origin.ENVIRONMENT, Origin.POLICY]
    assert [node.message.content for node in path[1:]] == ["act.", " obs", "act."] and environment.texts == [
        "act.",
        "act.",
    ]
    assert path[-1].reward == 0.25 and leaf.node_id == path[-1].node_id
    assert TOKENIZER.decode(path[2].token_ids) == " obs" and path[2].metadata["num_tokens_cut"] == 0


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (END, Outcome.FINISHED),
        (StepResult(message=Message(role="inline", content="last words"), done=True), Outcome.FINISHED),
        (StepResult(message=None, done=True, invalid=True), Outcome.INVALID),
        (StepResult(message=None, done=True, truncated=True), Outcome.TRUNCATED_TURNS),
        (StepResult(message=None, done=True, truncated=True, invalid=True), Outcome.TRUNCATED_TURNS),
    ],
)
def test_outcomes_of_episodes_that_the_environment_ends(result: StepResult, outcome: Outcome) -> None:
    leaf, path, _, _ = play(lambda n, t: result)
    assert leaf.outcome is outcome and leaf.episode_return == 0.5 and len(path) == 2


def test_the_turn_limit_truncates() -> None:
    leaf, path, environment, _ = play(lambda n, t: say(" o"), limits=Limits(max_turns=3))
    assert leaf.outcome is Outcome.TRUNCATED_TURNS and environment.num_steps == 3 == sum(
        node.trainable for node in path
    )
    assert leaf.episode_return == 0.5


def test_an_invalid_turn_is_marked_and_the_episode_continues() -> None:
    bad = StepResult(message=Message(role="inline", content="what?"), invalid=True)
    leaf, path, _, _ = play(lambda n, t: bad if n == 0 else END)
    assert leaf.outcome is Outcome.FINISHED and [n.metadata["invalid"] for n in path if n.trainable] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ToolFault("x"), Outcome.TOOL_FAULT),
        (type("Derived", (ToolFault,), {})("x"), Outcome.TOOL_FAULT),
        (EnvironmentFault("x"), Outcome.ENVIRONMENT_FAULT),
        (KeyError("x"), Outcome.ENVIRONMENT_FAULT),
        (StopIteration(), Outcome.ENVIRONMENT_FAULT),
        (SystemExit(0), Outcome.ENVIRONMENT_FAULT),
        (TimeoutError("its own"), Outcome.ENVIRONMENT_FAULT),
        (MemoryError(), Outcome.ENVIRONMENT_FAULT),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exceptions_of_an_environment_are_typed_faults_without_a_return(
    error: BaseException, outcome: Outcome
) -> None:
    leaf, path, _, _ = play(raising(error))
    assert leaf.outcome is outcome and leaf.episode_return is None and leaf.node_id is None and path == []
    assert leaf.detail


def test_a_step_without_observation_and_without_end_is_a_fault() -> None:
    leaf, _, _, _ = play(lambda n, t: StepResult(message=None))
    assert leaf.outcome is Outcome.ENVIRONMENT_FAULT and "neither answered nor ended" in leaf.detail


def test_an_engine_fault() -> None:
    def script(request: Request, context: str) -> str:
        raise EngineFault("gone")

    runs = scheduler(
        scripted(script), Factory(lambda task, number: Fake(on_step=lambda n, t: END)), max_retries=0
    )
    leaf = runs.run(tasks(1), modes=("on_policy",), training_step=0).traces[0].leaves[0]
    assert (leaf.outcome, leaf.episode_return, leaf.detail) == (Outcome.ENGINE_FAULT, None, "gone")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_reward_or_return_is_a_fault_of_the_environment(value: float) -> None:
    """One such value would reach every rollout of its group through the statistics."""
    ended = StepResult(message=None, done=True, reward=value)

    def outcome_of(environment: Fake) -> Leaf:
        runs = scheduler(
            scripted(lambda r, c: "a."), Factory(lambda task, number: environment), max_retries=0
        )
        return runs.run(tasks(1), modes=("m",), training_step=0).traces[0].leaves[0]

    for leaf in (
        outcome_of(Fake(on_step=lambda n, t: ended)),
        outcome_of(Fake(on_step=lambda n, t: END, episode_return=value)),
    ):
        assert (
            leaf.outcome is Outcome.ENVIRONMENT_FAULT
            and leaf.episode_return is None
            and str(value) in leaf.detail
        )


def test_an_end_of_message_in_the_inline_protocol_is_invalid_except_after_the_answer() -> None:
    leaf, path, environment, _ = play(lambda n, t: say(" o"), script="no stop string")
    assert leaf.outcome is Outcome.INVALID and environment.texts == ["no stop string"]
    assert path[-1].token_ids[-1] == TOKENIZER.eos_token_id and path[-1].metadata["finish"] == "eos"
    assert play(lambda n, t: END, script="no stop string")[0].outcome is Outcome.FINISHED


def test_an_end_of_message_ends_a_turn_in_the_chat_protocol() -> None:
    leaf, path, _, trace = play(lambda n, t: say("obs", "user") if n == 0 else END, script="go")
    assert leaf.outcome is Outcome.FINISHED
    text = TOKENIZER.decode(trace.token_ids(path[-1].node_id), skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\ngo<|im_end|>\n"
        "<|im_start|>user\nobs<|im_end|>\n<|im_start|>assistant\ngo<|im_end|>"
    )


@pytest.mark.parametrize("context_length", [10, 44, 45])
def test_a_prompt_that_fills_the_context_is_truncated(context_length: int) -> None:
    prompt = len(
        TOKENIZER.encode(
            "<|im_start|>user\nabcdefghijklm<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
        )
    )
    leaf, path, environment, _ = play(
        lambda n, t: END, question="abcdefghijklm", context_length=min(context_length, prompt)
    )
    assert leaf.outcome is Outcome.TRUNCATED_TOKENS and environment.num_steps == 0 and len(path) == 1


@pytest.mark.parametrize("size", [1, 5, 256, 10_000])
def test_endless_output_stops_at_the_limits(size: int) -> None:
    limits = Limits(max_turn_tokens=7, max_response_tokens=20, max_turns=50)
    engine = RawEngine(TOKENIZER, lambda request: [10] * size)
    leaf, path, _, _ = play(lambda n, t: say("o"), engine=engine, limits=limits)
    assert leaf.outcome is Outcome.TRUNCATED_TOKENS and num_response(path) <= 20
    assert max(len(node.token_ids) for node in path if node.trainable) == min(size, 7)


@pytest.mark.parametrize(
    "script", ["", " ", "\n\n\n", "<|im_start|>", "</answer></answer>", "\u00fc\u4e2d\u0000"]
)
def test_garbage_reaches_the_environment_as_text(script: str) -> None:
    leaf, _, environment, _ = play(lambda n, t: END, script=script)
    assert leaf.outcome is Outcome.FINISHED and len(environment.texts) == 1


def test_undecodable_bytes_become_a_replacement_character_and_ids_stay() -> None:
    tokenizer = byte_tokenizer(CHATML)
    half = tokenizer.encode("\u4e2d", add_special_tokens=False)[:2]
    stop = tokenizer.encode(".", add_special_tokens=False)
    leaf, path, environment, trace = play(
        lambda n, t: say("\u4e2d") if n == 0 else END, engine=RawEngine(tokenizer, lambda r: [*half, *stop])
    )
    assert leaf.outcome is Outcome.FINISHED and environment.texts[0] == "\ufffd."
    assert path[1].token_ids == (*half, *stop)
    assert trace.token_ids(path[-1].node_id)[-3:] == (*half, *stop)


def test_special_tokens_do_not_reach_the_environment() -> None:
    ids = [
        TOKENIZER.convert_tokens_to_ids("<|im_start|>"),
        *TOKENIZER.encode("ab", add_special_tokens=False),
        1,
    ]
    _, path, environment, _ = play(lambda n, t: END, engine=RawEngine(TOKENIZER, lambda r: ids))
    assert environment.texts == ["ab"] and path[1].token_ids == tuple(ids)


@pytest.mark.parametrize("role", ["inline", "user"])
def test_a_long_observation_loses_its_middle_and_keeps_the_open_assistant_turn(role: str) -> None:
    long = "start " + "x" * 500 + " finish</result>"
    leaf, path, _, _ = play(
        lambda n, t: say(long, role) if n == 0 else END, limits=Limits(max_observation_tokens=90)
    )  # type: ignore[arg-type]
    node = path[2]
    text = TOKENIZER.decode(node.token_ids, skip_special_tokens=False)
    assert leaf.outcome is Outcome.FINISHED and len(node.token_ids) == 90 and CUT_MARK in text
    closing = "<|im_end|>\n<|im_start|>assistant\n" if role == "user" else "finish</result>"
    assert text.endswith(closing) and ("start x" in text)
    full = len(TOKENIZER.encode(long, add_special_tokens=False)) + (
        len("\nuser\n\nassistant\n") + 4 if role == "user" else 0
    )
    assert node.metadata["num_tokens_cut"] == full - (90 - len(CUT_MARK)) > 0
    assert node.message.content == long  # people still see what the environment said


def test_an_observation_that_leaves_no_room_ends_the_rollout() -> None:
    leaf, path, environment, _ = play(
        lambda n, t: say("y" * 30), limits=Limits(max_response_tokens=20, max_turn_tokens=20)
    )
    assert (
        leaf.outcome is Outcome.TRUNCATED_TOKENS
        and environment.num_steps == 1
        and path[-1].origin is Origin.POLICY
    )


@dataclass(slots=True)
class Inserter(Hook):
    """A hook that wants the same thing before every turn from ``first`` on."""

    wanted: Splice | Attempt
    first: int = 1
    num_after: int = 0
    groups: list[str] = field(default_factory=list)

    def before_turn(self, state: EpisodeState) -> Sequence[Splice | Attempt]:
        return [self.wanted] if state.turn >= self.first else []

    def after_turn(self, state: EpisodeState) -> None:
        self.num_after += 1
        assert state.last_result is not None

    def after_group(self, trace: Trace) -> None:
        self.groups.append(trace.task.key)


def buffer_splice(text: str) -> Splice:
    return Splice(
        origin=Origin.BUFFER, text=text, step=Step(text=text, observation=""), metadata={"similarity": 0.5}
    )


@given(
    turn=st.integers(1, 12),
    response=st.integers(1, 60),
    observation=st.integers(1, 40),
    splice=st.integers(1, 40),
    turns=st.integers(1, 6),
    said=st.integers(1, 15),
    seen=st.integers(1, 50),
    shown=st.integers(1, 50),
    room=st.integers(0, 80),
    role=st.sampled_from(["inline", "user"]),
)
def test_no_budget_is_exceeded(
    turn: int,
    response: int,
    observation: int,
    splice: int,
    turns: int,
    said: int,
    seen: int,
    shown: int,
    room: int,
    role: str,
) -> None:
    limits = Limits(
        max_turns=turns,
        max_turn_tokens=turn,
        max_response_tokens=response,
        max_observation_tokens=observation,
        max_splice_tokens=splice,
    )
    prompt = len(
        TOKENIZER.encode("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    )
    engine = RawEngine(TOKENIZER, lambda request: [20] * said, context_length=prompt + room)
    hook = Inserter(buffer_splice("s" * shown))
    leaf, path, environment, trace = play(
        lambda n, t: say("o" * seen, role), engine=engine, limits=limits, hooks=[hook]
    )  # type: ignore[arg-type]
    assert leaf.outcome in (Outcome.TRUNCATED_TOKENS, Outcome.TRUNCATED_TURNS)
    assert num_response(path) <= response and len(trace.token_ids(path[-1].node_id)) <= prompt + max(room, 0)
    assert engine.longest <= prompt + room and environment.num_steps <= turns
    bounds = {Origin.POLICY: turn, Origin.ENVIRONMENT: observation, Origin.BUFFER: splice}
    assert all(1 <= len(node.token_ids) <= bounds[node.origin] for node in path[1:])
    for before, after in itertools.pairwise(path):
        assert before.origin is not Origin.BUFFER or after.trainable  # a policy turn follows what was shown
    assert path[-1].origin in (Origin.POLICY, Origin.PROMPT, Origin.ENVIRONMENT)
    for node in path[1:]:
        if node.origin is Origin.BUFFER:
            assert (node.metadata["num_tokens_cut"] > 0) == (shown > splice)
        elif node.origin is Origin.ENVIRONMENT and role == "inline":
            assert (node.metadata["num_tokens_cut"] > 0) == (seen > observation)


def test_a_splice_that_leaves_no_room_is_dropped_and_counted() -> None:
    limits = Limits(max_response_tokens=30, max_turn_tokens=10, max_turns=3)
    leaf, path, _, _ = play(lambda n, t: say("o"), limits=limits, hooks=[Inserter(buffer_splice("s" * 26))])
    assert leaf.outcome is Outcome.TRUNCATED_TURNS  # shown, it would have ended the rollout instead
    assert [node.metadata["num_splices_dropped"] for node in path if node.trainable] == [0, 1, 1]
    assert all(node.origin is not Origin.BUFFER for node in path)


def test_an_attempt_is_executed_and_can_end_the_episode() -> None:
    def then(result: StepResult) -> Splice:
        return buffer_splice("<done>")

    last = StepResult(message=None, done=True, reward=0.75)
    leaf, path, environment, _ = play(
        lambda n, t: say("o") if n == 0 else last, hooks=[Inserter(Attempt(action="open", then=then))]
    )
    assert environment.texts == ["act.", "open"] and leaf.outcome is Outcome.FINISHED
    assert path[-1].origin is Origin.BUFFER and path[-1].reward == 0.75 and leaf.node_id == path[-1].node_id


def test_after_a_refused_attempt_the_episode_continues_unless_it_ended() -> None:
    refused = StepResult(message=Message(role="inline", content="no"), invalid=True)
    hook = Inserter(Attempt(action="open", then=lambda result: None))
    leaf, path, environment, _ = play(
        lambda n, t: refused if t == "open" else (say("o") if n == 0 else END), hooks=[hook]
    )
    assert (
        environment.texts == ["act.", "open", "act."] and leaf.outcome is Outcome.FINISHED and len(path) == 4
    )
    cut = StepResult(message=None, done=True, invalid=True, truncated=True)
    leaf, _, environment, _ = play(lambda n, t: cut if t == "open" else say("o"), hooks=[hook])
    assert environment.texts == ["act.", "open"] and leaf.outcome is Outcome.TRUNCATED_TURNS


@pytest.mark.parametrize(
    ("error", "outcome"), [(ValueError("x"), Outcome.ENVIRONMENT_FAULT), (ToolFault("x"), Outcome.TOOL_FAULT)]
)
def test_a_failed_attempt_is_a_typed_fault(error: Exception, outcome: Outcome) -> None:
    def step(number: int, text: str) -> StepResult:
        if text == "open":
            raise error
        return say("o")

    leaf, _, _, _ = play(step, hooks=[Inserter(Attempt(action="open", then=lambda result: None))])
    assert leaf.outcome is outcome and leaf.episode_return is None


def test_hooks_are_called_for_every_turn_and_group() -> None:
    hook = Inserter(buffer_splice("s"), first=99)
    play(lambda n, t: say("o") if n < 2 else END, hooks=[hook])
    assert hook.num_after == 3 and hook.groups == ["task 0"]
