"""Scripted environments and engines that record every call, and hooks and helpers for tests of the loop."""

import copy
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.engines.base import Engine, FinishReason, Generation, Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import Env, EpisodeResult, StepResult
from outrider.rollout.episode import Sampling
from outrider.rollout.hooks import EpisodeState, Hook
from outrider.rollout.scheduler import RolloutReport, Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer, Tokenizer
from outrider.trace import Trace
from outrider.types import Message, Role, Task
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = StepResult(message=None, done=True)


def say(text: str, role: Role = "inline") -> StepResult:
    return StepResult(message=Message(role=role, content=text))


@dataclass(slots=True)
class Fake:
    """An environment: ``on_step(number, text)`` returns the result of a turn after ``delay`` seconds."""

    on_step: Callable[[int, str], StepResult]
    question: str = "q"
    delay: float = 0.0
    episode_return: float = 0.5
    num_steps: int = 0
    num_closed: int = 0
    texts: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    def reset(self, seed: int) -> Sequence[Message]:
        self.seeds.append(seed)
        return (Message(role="user", content=self.question),)

    def step(self, message: Message) -> StepResult:
        assert self.num_closed == 0
        time.sleep(self.delay)
        self.texts.append(message.content)
        self.num_steps += 1
        return self.on_step(self.num_steps - 1, message.content)

    def result(self) -> EpisodeResult:
        return EpisodeResult(
            episode_return=self.episode_return, success=True, metrics={"steps": float(self.num_steps)}
        )

    def close(self) -> None:
        self.num_closed += 1


@dataclass(slots=True)
class Factory:
    """Creates environments with ``make(task, number)`` and stores them in ``made``."""

    make: Callable[[Task, int], Env]
    made: list[Env] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, task: Task) -> Env:
        with self.lock:
            environment = self.make(task, len(self.made))
            self.made.append(environment)
        return environment

    def close(self) -> None:
        """Close nothing."""


class CopyableFake(Fake):
    """The same environment with copies."""

    def copy(self) -> "CopyableFake":
        return copy.deepcopy(self)


def three_observations(number: int, text: str) -> StepResult:
    """Observe the three first turns and end the episode at the fourth."""
    return say(f" o{number}:{text}") if number < 3 else END


class RawEngine(ScriptedEngine):
    """An engine that generates token ids, also those that no tokenizer would write."""

    def __init__(
        self, tokenizer: Tokenizer, ids: Callable[[Request], Sequence[int]], context_length: int = 4096
    ) -> None:
        super().__init__(tokenizer=tokenizer, script=lambda request, text: "", context_length=context_length)
        self._ids = ids
        self.longest = 0

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        answers = []
        for request in requests:
            assert 0 < len(request.token_ids) < self.context_length and request.max_tokens >= 1
            ids = tuple(self._ids(request))[: request.max_tokens]
            self.longest = max(self.longest, len(request.token_ids) + len(ids))
            draw = random.Random(request.seed)
            answers.append(
                Generation(
                    request_id=request.request_id,
                    token_ids=ids,
                    logprobs=tuple(-draw.random() for _ in ids),
                    entropies=tuple(draw.random() for _ in ids),
                    weight_version=3,
                    finish_reason=FinishReason.EOS
                    if ids and ids[-1] == self.tokenizer.eos_token_id
                    else FinishReason.LENGTH,
                )
            )
        return answers


def scripted(script: Callable[[Request, str], str], *, context_length: int = 4096) -> ScriptedEngine:
    return ScriptedEngine(tokenizer=TOKENIZER, script=script, context_length=context_length)


def scheduler(
    engine: Engine,
    factory: Factory,
    *,
    limits: Limits | None = None,
    hooks: Sequence[Hook] = (),
    stop: tuple[str, ...] = (".",),
    max_concurrent: int = 16,
    max_retries: int = 2,
    seed: int = 0,
) -> Scheduler:  # fmt: skip
    return Scheduler(
        engine=engine,
        renderer=ChatRenderer(engine.tokenizer),
        factory=factory,
        limits=limits or Limits(step_timeout_s=60),
        sampling=Sampling(stop=stop),
        run_seed=seed,
        hooks=hooks,
        max_concurrent=max_concurrent,
        max_retries=max_retries,
    )


def tasks(num: int) -> list[Task]:
    return [Task(key=f"task {i}", question=f"question {i}") for i in range(num)]


def random_ids_engine() -> RawEngine:
    """Ids and lengths that depend on the seed of the request."""

    def ids(request: Request) -> Sequence[int]:
        draw = random.Random(request.seed)
        return [draw.randrange(10, 60) for _ in range(draw.randrange(1, 8))]

    return RawEngine(TOKENIZER, ids)


def contents(report: RolloutReport) -> list[Any]:
    """Everything in the traces, for exact comparison."""
    return [
        (trace.task.key, trace.nodes, [trace.leaves[i] for i in sorted(trace.leaves)])
        for trace in report.traces
    ]


@dataclass
class Forking(Hook):
    """Requests ``rule(state)`` forks at every turn."""

    rule: Callable[[EpisodeState], int]
    first_wave: int = 3
    wave: int | None = 5
    streak_scope: Literal["lineage", "prompt"] = "lineage"
    calls: list[tuple[str, int, int]] = field(default_factory=list)

    def num_forks(self, state: EpisodeState) -> int:
        self.calls.append((state.task.key, state.rollout, state.turn))
        return int(self.rule(state))

    def budget(self, trace: Trace) -> int | None:
        return self.wave
