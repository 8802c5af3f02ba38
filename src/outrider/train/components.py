"""The parts of a run (:mod:`outrider.train.building` makes them)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.algorithms.algorithm import Algorithm
from outrider.engines.base import Engine
from outrider.environments.base import EnvironmentFactory, TaskFamily
from outrider.memory.steps.buffer import StepTraceBuffer
from outrider.rollout.whereabouts import Whereabouts
from outrider.tokens import ChatRenderer
from outrider.train.settings import RunSettings
from outrider.types import Message, Step, Task

if TYPE_CHECKING:
    from outrider.train.learner import Learner


@dataclass(slots=True, kw_only=True)
class Components:
    """The parts of a run. ``buffer`` is None for algorithms that do not retrieve."""

    settings: RunSettings
    learner: "Learner"
    engine: Engine
    renderer: ChatRenderer
    family: TaskFamily
    factory: EnvironmentFactory
    train_tasks: Sequence[Task]
    test_tasks: Sequence[Task]
    buffer: StepTraceBuffer | None
    algorithm: Algorithm
    # of the cold start, by task key; None: experts are asked
    demonstrations: Mapping[str, Sequence[Step] | None] | None = None
    whereabouts: Whereabouts = field(default_factory=Whereabouts)  # of all rollouts: for the one who watches


def token_counter(renderer: ChatRenderer) -> Callable[[str], int]:
    """How many tokens a text inside a message has."""
    return lambda text: len(renderer.bridge((), [Message(role="inline", content=text)]))
