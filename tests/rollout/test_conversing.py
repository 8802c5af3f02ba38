"""Programs that keep the conversation, and do with it what they like: every context that the policy saw is,
as text, what a server would have rendered, and begins with the ids that it had where it had been seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engines.base import Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import EpisodeResult, StepResult
from outrider.environments.conversations import Conversation, ExternalAgent, SampledTurn, ServedTurn
from outrider.rollout.episode import Sampling
from outrider.rollout.hooks import EpisodeState, Hook, Splice, StatelessHook
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.tokens.renderer import HistoryThinking
from outrider.trace import Node, Trace, split_contexts, without_memory
from outrider.types import Message, Origin, Outcome, Task
from tests.rollout.fakes import Factory
from tests.tokens.family_templates import FAMILIES, byte_tokenizer

OPERATIONS = ("append", "new", "back", "again", "rewrite", "drop", "strip", "stop")
WORDS = ("yes", " it is\n", "no. ", "a\n\nb", "<b>")
RENDERERS: dict[tuple[str, HistoryThinking], ChatRenderer] = {}


def renderer_of(name: str, history: HistoryThinking = "keep") -> ChatRenderer:
    if (name, history) not in RENDERERS:
        family = FAMILIES[name]
        RENDERERS[name, history] = ChatRenderer(
            byte_tokenizer(family), template_kwargs=family.variables, history_thinking=history
        )
    return RENDERERS[name, history]


@dataclass
class Program(ExternalAgent):
    """Asks by a list of operations over the conversations that it has had."""

    operations: Sequence[str]
    request: Conversation = field(default_factory=lambda: opening("first"))
    had: list[tuple[Message, ...]] = field(default_factory=list)
    questions: list[Conversation] = field(default_factory=list)
    num_sampled: int = 0
    call_format: None = None

    def reset(self, seed: int) -> Sequence[Message]:
        self.questions.append(self.request)
        return self.request.messages

    def read(self, text: str) -> Message:
        ends = [text.find(one) for one in self.request.stop if one in text]
        return Message(role="assistant", content=text[: min(ends)] if ends else text)

    def sampled(self, turn: SampledTurn | ServedTurn) -> None:
        self.num_sampled += 1
        assert isinstance(turn, SampledTurn)
        assert len(turn.tokens) == len(turn.logprobs) and turn.num_context_tokens > 0

    def step(self, message: Message) -> StepResult:
        number = len(self.had)
        self.had.append((*self.request.messages, message))
        if number == len(self.operations):
            return StepResult(done=True, reward=1.0)
        self.request = self._next(self.operations[number], number)
        self.questions.append(self.request)
        return StepResult(messages=self.request.messages[-1:])

    def _next(self, operation: str, number: int) -> Conversation:
        user = Message(role="user", content=f"then {number}")
        last = self.had[-1]
        if operation == "again":
            return self.request
        if operation == "new":
            return opening(f"another {number}")
        history = self.had[number // 2] if operation == "back" else last
        if operation == "rewrite":
            history = (*history[:-1], Message(role="assistant", content="what I never said"))
        if operation == "strip":  # as clients do that tidy up
            history = (*history[:-1], Message(role="assistant", content=history[-1].content.strip()))
        if operation == "drop":
            history = history[-1:] if len(history) == 2 else (history[0], *history[3:])
            history = history if history and history[0].role != "assistant" else ()
        stop = ("i",) if operation == "stop" else ()
        return Conversation(messages=(*history, user), stop=stop, max_tokens=50)

    def result(self) -> EpisodeResult:
        return EpisodeResult(episode_return=1.0, success=True)

    def close(self) -> None: ...


class Told(Program):
    """As a client that is not told of thinking."""

    def read(self, text: str) -> Message:
        return Message(role="assistant", content=super().read(text).content.rpartition("\n\n")[2])


def opening(text: str) -> Conversation:
    return Conversation(messages=(Message(role="user", content=text),))


def play(
    operations: Sequence[str],
    renderer: ChatRenderer,
    said: Sequence[str],
    made: type[Program] = Program,
    hooks: Sequence[Hook] = (),
    **limits: int,
) -> tuple[Trace, Program, list[str]]:
    program = made(operations)
    seen: list[str] = []

    def script(request: Request, text: str) -> str:
        seen.append(text)
        return said[(len(seen) - 1) % len(said)]

    scheduler = Scheduler(
        engine=ScriptedEngine(tokenizer=renderer.tokenizer, script=script, context_length=1 << 16),
        renderer=renderer,
        factory=Factory(lambda task, number: program),  # type: ignore[arg-type, return-value]
        limits=Limits(**{"max_turns": 100, "max_turn_tokens": 100, "max_response_tokens": 50_000} | limits),
        sampling=Sampling(),
        run_seed=0,
        hooks=hooks,
        max_retries=0,
    )
    [trace] = scheduler.run([Task(key="t", question="")], modes=("m",), training_step=0).traces
    return trace, program, seen


@settings(max_examples=6)
@given(
    name=st.sampled_from(["qwen2.5", "smollm2", "hermes", "llama3", "mistral", "phi4", "gemma"]),
    operations=st.lists(st.sampled_from(OPERATIONS), max_size=8),
    said=st.lists(st.sampled_from(WORDS), min_size=1, max_size=4),
)
def test_every_context_is_what_a_server_renders(name: str, operations: list[str], said: list[str]) -> None:
    renderer = renderer_of(name)
    trace, program, seen = play(operations, renderer, said)
    [(leaf, path)] = trace.rollouts()
    assert leaf.outcome is Outcome.FINISHED, leaf.detail
    assert program.num_sampled == len(seen) == len(program.questions) == len(operations) + 1
    contexts = []
    for sample in split_contexts(path):
        ids: tuple[int, ...] = ()
        for node in sample:
            contexts += [ids] if node.trainable else []
            ids += node.token_ids
    decoded = [renderer.tokenizer.decode(ids, skip_special_tokens=False) for ids in contexts]
    assert decoded == seen  # what is trained on stands where it was sampled
    trimmed = ("mistral", "gemma", "llama3")  # their templates trim what was said; its ids stay as they were
    if name not in trimmed or all(one == one.strip() for one in said):
        rendered = [renderer.whole_text(asked.messages) for asked in program.questions]
        assert seen == [renderer.tokenizer.decode(renderer.template.encode(one)) for one in rendered]


@settings(max_examples=6)
@given(operations=st.lists(st.sampled_from(OPERATIONS), max_size=6))
def test_stripped_thinking_is_in_no_later_context(operations: list[str]) -> None:
    """What a program is told has no thinking: kept, the context goes on with it; stripped, it is rendered."""
    said = ["<think>\nhm\n</think>\n\nyes"]
    renderer = renderer_of("qwen3", "strip")

    _, program, seen = play(operations, renderer, said, made=Told)
    assert seen == [renderer.whole_text(asked.messages) for asked in program.questions]


def test_a_growing_history_is_one_context_with_its_thinking() -> None:
    renderer = renderer_of("qwen3")
    trace, _, seen = play(["append", "append"], renderer, ["<think>\nhm\n</think>\n\nyes"])
    [(_, path)] = trace.rollouts()
    assert len(split_contexts(path)) == 1 and seen[-1].count("hm") == 2


class Tips(StatelessHook):
    """A tip in front of every turn."""

    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        return (Splice(origin=Origin.MEMORY, text=f" (tip {state.turn})"),)


@settings(max_examples=6)
@given(operations=st.lists(st.sampled_from(OPERATIONS), max_size=6))
def test_without_its_tips_a_rollout_equals_one_without_a_memory(operations: list[str]) -> None:
    renderer = renderer_of("qwen2.5")
    with_tips, _, seen = play(operations, renderer, WORDS, hooks=(Tips(),))
    plain, _, _ = play(operations, renderer, WORDS)
    [(leaf, path)], [(_, bare)] = with_tips.rollouts(), plain.rollouts()
    assert leaf.outcome is Outcome.FINISHED and all("(tip " in text for text in seen)

    def contexts(nodes: Sequence[Node]) -> list[tuple[int, ...]]:
        found = []
        for sample in split_contexts(nodes):
            ids: tuple[int, ...] = ()
            for node in sample:
                ids += node.token_ids
                found += [ids] if node.trainable else []
        return found

    kept = without_memory(path)
    # a context that tips have made longer may begin anew where the plain one goes on; its ids are the same
    assert contexts(kept) == contexts(bare)


@pytest.mark.parametrize("limit", [40, 80, 160, 320])
def test_the_response_budget_is_not_exceeded(limit: int) -> None:
    trace, _, _ = play(["append", "new", "back", "append"] * 2, renderer_of("qwen2.5"), ["yes"],
                       max_response_tokens=limit)  # fmt: skip
    [(leaf, path)] = trace.rollouts()
    assert leaf.outcome is Outcome.TRUNCATED_TOKENS or limit == 320
    written = sum(len(node.token_ids) for node in path if node.trainable)
    assert written <= limit
