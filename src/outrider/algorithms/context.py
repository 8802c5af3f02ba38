"""Facts of a run for its algorithm: ``build(settings, context)`` of the class takes what it needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outrider.memory.embedder import CachedEmbedder
from outrider.memory.steps.buffer import StepTraceBuffer
from outrider.types import Step, Task

Demonstrations = Mapping[str, Sequence[Step] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmContext:
    """``groups_per_step`` groups are played in each of ``num_training_steps`` steps; ``max_response_tokens``
    is the rollout's limit.

    ``vocabulary_size`` is the model's, ``count_tokens`` counts those of a text inside a message.
    ``is_stateful``: an action of the environment changes what is hidden. ``buffer`` is None where the
    settings do not retrieve (``ObjectiveSettings.retrieves``). ``read_demonstrations`` reads a file of
    trajectories, by task key, for ``train_tasks``. Raises DataError.
    """

    seed: int
    num_training_steps: int
    groups_per_step: int
    max_response_tokens: int
    vocabulary_size: int
    is_stateful: bool
    count_tokens: Callable[[str], int]
    train_tasks: Sequence[Task]
    buffer: StepTraceBuffer | None
    load_embedder: Callable[[str], CachedEmbedder]
    read_demonstrations: Callable[[str, Sequence[Task]], Demonstrations]
