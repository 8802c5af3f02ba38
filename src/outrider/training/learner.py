"""The learner of a run: weights, optimizer and reference, in this process or in several
(:mod:`outrider.distributed`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from outrider.algorithms.base import Algorithm
from outrider.engines.local.model import LanguageModel
from outrider.trace import Trace
from outrider.training.checkpoint import load_reference, save_reference
from outrider.training.cold_start import cold_start
from outrider.training.packing import RolloutPath
from outrider.training.policy import TEACHER, AveragedTeacher, Policy, Scorer, export
from outrider.training.settings import RunSettings
from outrider.training.update import UpdateReport, measure_kl, update

OnStep = Callable[[int, int, dict[str, float]], None]


class Learner(Protocol):
    """The weights in training, their optimizer, and the frozen reference if the run needs one.

    An engine in this process generates with ``language_model``, which has the newest weights after every
    method that changes them.
    """

    @property
    def language_model(self) -> LanguageModel:
        """The policy's model and tokenizer."""

    @property
    def trained_parameters(self) -> frozenset[str]:
        """Names of the parameters that train."""

    @property
    def num_steps(self) -> int:
        """Steps since the optimizer was created or reset."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the newest optimizer step."""

    @property
    def has_reference(self) -> bool:
        """Whether the run has a frozen reference."""

    def update(
        self,
        traces: Sequence[Trace],
        algorithm: Algorithm,
        *,
        on_batch: Callable[[int], None],
        version: int | None = None,
        probes: Sequence[Trace] = (),
        training_step: int = 0,
    ) -> UpdateReport:
        """Make the optimizer steps of a training step (:func:`outrider.training.update.update`)."""

    def score(self, traces: Sequence[Trace]) -> None:
        """Write ``kl`` to the reference on the policy nodes (:mod:`outrider.training.update`)."""

    def fit(self, paths: Sequence[RolloutPath], *, on_step: OnStep) -> None:
        """Run the cold start (:mod:`outrider.training.cold_start`) and reset the optimizer."""

    def save(self, folder: Path) -> None:
        """Write weights and optimizer as safetensors into an existing folder. Raises OSError."""

    def load(self, folder: Path, *, num_steps: int) -> None:
        """Load what :meth:`save` of any learner wrote. Raises CheckpointError."""

    def freeze_reference(self, path: Path) -> int:
        """Make the current policy the reference, write its weights into a file, and return the file's
        checksum.
        """

    def load_reference(self, path: Path, *, checksum: int | None) -> None:
        """Load what :meth:`freeze_reference` wrote. Raises CheckpointError."""

    def export(self, folder: Path) -> None:
        """Write the policy and its tokenizer as a Hugging Face folder for an engine. The folder is not
        checked, because every update compares the engine's log-probs with the trainer's.
        """

    def close(self) -> None:
        """End the learner's processes; may be called twice."""


@dataclass(slots=True, kw_only=True)
class LocalLearner:
    """The policy in this process; an engine may share its very weights."""

    settings: RunSettings
    policy: Policy
    reference: Scorer | None
    teacher: AveragedTeacher | None = field(init=False)

    def __post_init__(self) -> None:
        self._start_teacher()

    def _start_teacher(self) -> None:
        distill = self.settings.algorithm.distill
        is_averaged = distill is not None and distill.teacher == "ema"
        self.teacher = AveragedTeacher(self.policy) if is_averaged else None

    @property
    def language_model(self) -> LanguageModel:
        return self.policy.language_model

    @property
    def trained_parameters(self) -> frozenset[str]:
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
        training_step: int = 0,
    ) -> UpdateReport:
        num_steps = self.policy.num_steps
        report = update(
            self.policy,
            traces,
            objective=algorithm.objective,
            settings=self.settings.update,
            token_loss=algorithm.token_loss,
            reference=self.reference,
            teacher=self.teacher,
            # engines in other processes have their own weights
            always_check_mismatch=not self.settings.engine.is_exact or self.settings.cluster.is_remote,
            version=version,
            probes=probes,
            on_batch=on_batch,
            seed=self.settings.seed,
            training_step=training_step,
        )
        distill = self.settings.algorithm.distill
        if self.teacher is not None and distill is not None and self.policy.num_steps != num_steps:
            self.teacher.follow(self.policy, rate=distill.teacher_rate)
        return report

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
        self._start_teacher()

    def save(self, folder: Path) -> None:
        self.policy.save(folder)
        if self.teacher is not None:
            self.teacher.save(folder)

    def load(self, folder: Path, *, num_steps: int) -> None:
        self.policy.load(folder, num_steps=num_steps)
        if self.teacher is not None and (folder / TEACHER).exists():
            self.teacher.load(folder)
        else:  # an evaluation of the weights of another run
            self._start_teacher()

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
