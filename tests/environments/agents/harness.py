"""Plays the agent programs of the tests with a scripted policy.

All programs of a test session share one endpoint and one launcher, whose start takes a second. Tests of
launchers and endpoints make their own with :func:`own_factory`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from outrider.engines.base import Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.agent.environment import (
    AgentConfig,
    AgentEnvironment,
    AgentTaskSet,
    ProgramFactory,
)
from outrider.rollout.episode import Sampling
from outrider.rollout.scheduler import RolloutReport, Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.trace import Leaf, Node, Trace, split_contexts
from outrider.types import Outcome, Task
from tests.tiny import tiny_tokenizer
from tests.tokens.family_templates import FAMILIES, byte_tokenizer

TOKENIZER = tiny_tokenizer()
PROGRAMS = "tests.environments.agents.programs"
LIMITS = Limits(max_turns=20, max_turn_tokens=400, max_response_tokens=20000)
Script = Callable[[Request, str], str]
_SHARED: dict[str, ProgramFactory] = {}


def own_factory(**settings: Any) -> ProgramFactory:
    return AgentTaskSet(AgentConfig(**settings)).make()


def shared_factory(module: str = PROGRAMS, **settings: Any) -> Callable[[Task], AgentEnvironment]:
    """Makes episodes of the programs that tasks name (:func:`task`)."""
    if module not in _SHARED:
        _SHARED[module] = own_factory(function=f"{module}:run")
    shared, config = _SHARED[module], AgentConfig(function=f"{module}:run", **settings)

    def make(task: Task) -> AgentEnvironment:
        return AgentEnvironment(gateway=shared._gateway, programs=shared._programs, config=config, task=task)

    return make


def close_shared_factories() -> None:
    while _SHARED:
        _SHARED.popitem()[1].close()


def task(program: str, *answers: str, key: str = "t", question: str = "a question") -> Task:
    return Task(key=key, question=question, answers=answers, metadata={"program": program})


def by_turn(*texts: str) -> Script:
    """A policy whose turns are these texts."""
    return lambda request, text: texts[turn_of(request)]


def turn_of(request: Request) -> int:
    return int(request.request_id.rsplit("/", 1)[1])


def scheduler(
    factory: Callable[[Task], Any],
    *,
    script: Script = lambda request, text: f"turn {request.request_id.rsplit('/', 1)[1]}",
    seen: list[tuple[str, str]] | None = None,
    renderer: ChatRenderer | None = None,
    limits: Limits = LIMITS,
    context_length: int = 65536,
    max_retries: int = 0,
    hooks: Sequence[Any] = (),
) -> Scheduler:
    """``seen`` collects the id and the text of every request to the policy."""
    renderer = renderer or ChatRenderer(TOKENIZER)

    def answer(request: Request, text: str) -> str:
        if seen is not None:
            seen.append((request.request_id, text))
        return script(request, text)

    engine = ScriptedEngine(tokenizer=renderer.tokenizer, script=answer, context_length=context_length)
    made = Scheduler(
        engine=engine,
        renderer=renderer,
        factory=factory,  # type: ignore[arg-type]
        limits=limits,
        sampling=Sampling(),
        run_seed=0,
        max_retries=max_retries,
    )
    made.hooks = tuple(hooks)
    return made


_OF_SCHEDULER = ("script", "seen", "renderer", "limits", "context_length", "max_retries", "hooks")


def play(*tasks: Task, group: int = 1, module: str = PROGRAMS, **settings: Any) -> RolloutReport:
    """Play groups of the tasks. ``settings`` are those of :func:`scheduler` and of the environment."""
    given = {name: settings.pop(name) for name in _OF_SCHEDULER if name in settings}
    made = scheduler(shared_factory(module, **settings), **given)
    made.max_concurrent = max(len(tasks), 2)
    return made.run(list(tasks), modes=("m",) * group, training_step=0)


def play_one(task: Task, **settings: Any) -> Leaf:
    [leaf] = play(task, **settings).traces[0].leaves.values()
    return leaf


def leaves(report: RolloutReport) -> dict[str, Leaf]:
    """The only leaf of every task."""
    return {trace.task.key: leaf for trace in report.traces for leaf in trace.leaves.values()}


def assert_contexts(trace: Trace, seen: list[tuple[str, str]], renderer: ChatRenderer | None = None) -> None:
    """Every sampled turn is behind exactly the ids that the engine got for it."""
    tokenizer = (renderer or ChatRenderer(TOKENIZER)).tokenizer
    texts = dict(seen)
    for leaf, path in trace.rollouts():
        turn = 0
        for sample in split_contexts(path):
            before: list[int] = []
            for node in sample:
                if node.trainable:
                    text = texts[f"{trace.task.key}/{leaf.rollout:04d}/{turn:03d}"]
                    assert tokenizer.decode(before, skip_special_tokens=False) == text
                    turn += 1
                before += node.token_ids


def turns_of(path: Sequence[Node]) -> list[Node]:
    return [node for node in path if node.trainable]


def family_renderer(name: str = "qwen3", **settings: Any) -> ChatRenderer:
    """A renderer of a model family, with native calls."""
    family = FAMILIES[name]
    given = {"call_format": family.call_format, "observations": ("tool",), **settings}
    return ChatRenderer(byte_tokenizer(family), template_kwargs=family.variables, **given)


def finished(leaf: Leaf, value: float = 1.0) -> bool:
    assert (leaf.outcome, leaf.episode_return) == (Outcome.FINISHED, value), leaf.detail
    return True


@contextmanager
def closing(factory: ProgramFactory) -> Iterator[ProgramFactory]:
    try:
        yield factory
    finally:
        factory.close()
