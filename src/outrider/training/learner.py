"""What learns in a run, as the trainer and the run's state ask it: one process here, many in
``outrider.distributed``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from outrider.algorithms.base import Algorithm
from outrider.engines.local.model import LanguageModel
from outrider.trace import Trace
from outrider.training.checkpoint import load_reference, save_reference
from outrider.training.cold_start import cold_start
from outrider.training.packing import RolloutPath
from outrider.training.policy import Policy, Scorer, export
from outrider.training.settings import RunSettings
from outrider.training.update import UpdateReport, measure_kl, update

OnStep = Callable[[int, int, dict[str, float]], None]


class Learner(Protocol):
    """The weights in training, their optimiser, and the frozen reference where a run needs one.

    ``language_model`` is what an engine in this process generates with: its weights are the newest ones after
    every method that moves them. ``trained`` are the names of the parameters that move.
    """

    @property
    def language_model(self) -> LanguageModel:
        """The policy's model and tokenizer."""
        ...

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that move."""
        ...

    @property
    def num_steps(self) -> int:
        """Optimiser steps since the optimiser was fresh."""
        ...

    @property
    def learning_rate(self) -> float:
        """Of the newest optimiser step."""
        ...

    @property
    def has_reference(self) -> bool:
        """Whether the run has one."""
        ...

    def update(
        self,
        traces: Sequence[Trace],
        algorithm: Algorithm,
        *,
        on_batch: Callable[[int], None],
        version: int | None = None,
        probes: Sequence[Trace] = (),
    ) -> UpdateReport:
        """The optimiser steps of a training step (:func:`outrider.training.update.update`)."""
        ...

    def score(self, traces: Sequence[Trace]) -> None:
        """Write ``kl`` to the reference on the policy nodes (:mod:`outrider.training.update`)."""
        ...

    def fit(self, paths: Sequence[RolloutPath], *, on_step: OnStep) -> None:
        """The cold start, and a fresh optimiser after it (:mod:`outrider.training.cold_start`)."""
        ...

    def save(self, folder: Path) -> None:
        """Weights and optimiser as safetensors, into an existing folder. Raises OSError."""
        ...

    def load(self, folder: Path, *, num_steps: int) -> None:
        """What :meth:`save` wrote, by any learner. Raises CheckpointError."""
        ...

    def freeze_reference(self, path: Path) -> int:
        """The reference is the policy as it is now; its weights go into a file, whose checksum it is."""
        ...

    def load_reference(self, path: Path, *, checksum: int | None) -> None:
        """What :meth:`freeze_reference` wrote. Raises CheckpointError."""
        ...

    def export(self, folder: Path) -> None:
        """The policy with its tokenizer as a Hugging Face folder for an engine, whose log-probs every update
        compares with the trainer's: the folder is not checked here.
        """
        ...

    def close(self) -> None:
        """End what was started for it; may be called twice."""
        ...


@dataclass(slots=True, kw_only=True)
class LocalLearner:
    """The policy in this process; an engine may share its very weights."""

    settings: RunSettings
    policy: Policy
    reference: Scorer | None

    @property
    def language_model(self) -> LanguageModel:
        return self.policy.language_model

    @property
    def trained(self) -> frozenset[str]:
        return frozenset(self.policy.masters)

    @property
    def num_steps(self) -> int:
        return self.policy.num_steps

    @property
    def learning_rate(self) -> float:
        return self.policy.learning_rate

    @property
    def has_reference(self) -> bool:
        return self.reference is not None

    def update(
        self,
        traces: Sequence[Trace],
        algorithm: Algorithm,
        *,
        on_batch: Callable[[int], None],
        version: int | None = None,
        probes: Sequence[Trace] = (),
    ) -> UpdateReport:
        return update(
            self.policy,
            traces,
            objective=algorithm.objective,
            settings=self.settings.update,
            token_loss=algorithm.token_loss,
            reference=self.reference,
            # an engine elsewhere has weights of its own
            gate_always=not self.settings.engine.is_exact or self.settings.cluster.is_remote,
            version=version,
            probes=probes,
            on_batch=on_batch,
        )

    def score(self, traces: Sequence[Trace]) -> None:
        assert self.reference is not None
        measure_kl(self.policy, self.reference, traces, max_tokens=self.settings.update.max_tokens)

    def fit(self, paths: Sequence[RolloutPath], *, on_step: OnStep) -> None:
        cold_start(
            self.policy,
            paths,
            self.settings.cold_start,
            run_seed=self.settings.seed,
            max_tokens=self.settings.update.max_tokens,
            on_step=on_step,
        )
        self.policy.fresh_optimizer()

    def save(self, folder: Path) -> None:
        self.policy.save(folder)

    def load(self, folder: Path, *, num_steps: int) -> None:
        self.policy.load(folder, num_steps=num_steps)

    def freeze_reference(self, path: Path) -> int:
        self.reference = self.policy.frozen_copy()
        return save_reference(path, self.reference)

    def load_reference(self, path: Path, *, checksum: int | None) -> None:
        assert self.reference is not None
        load_reference(path, self.reference, checksum=checksum)

    def export(self, folder: Path) -> None:
        export(self.policy.language_model, folder, check=False)

    def close(self) -> None:
        pass  # nothing was started
