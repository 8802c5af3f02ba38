"""Settings of what changes the weights. They need no torch: a recipe is read, and a mistake in it told, in a
moment.
"""

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, field_validator

from outrider.config import Settings

ALL_LINEAR: Final = "all-linear"
"""peft's shorthand for every linear layer but the projection onto the vocabulary."""
_DEFAULT_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraSettings(Settings):
    """Low-rank adapters through peft. ``target_modules``: names of the layers that get one, or of parameters
    of fused experts; a name may have the names of modules above in front, such as ``self_attn.q_proj``.
    ``"all-linear"``: every linear layer but the projection onto the vocabulary.
    """

    rank: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = _DEFAULT_TARGETS

    @field_validator("target_modules", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("target_modules")
    @classmethod
    def _check_shorthand(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if ALL_LINEAR in names and len(names) > 1:
            raise ValueError(f'"{ALL_LINEAR}" stands for all linear layers: no other name goes with it')
        if any(not name.strip() for name in names):
            raise ValueError("a name of a layer is empty")
        return names

    @property
    def is_all_linear(self) -> bool:
        """Whether every linear layer gets an adapter."""
        return self.target_modules == (ALL_LINEAR,)

    @property
    def has_default_targets(self) -> bool:
        """Whether the names are those of the Llama and Qwen families, which other families have in part."""
        return self.target_modules == _DEFAULT_TARGETS


class OptimizerSettings(Settings):
    """AdamW. ``max_grad_norm`` clips the global norm; ``warmup_steps`` raises the rate linearly from its
    first share.
    """

    details: ClassVar[frozenset[str]] = frozenset({"beta1", "beta2"})

    learning_rate: float = Field(1e-6, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0)


class ColdStartSettings(Settings):
    """``num_examples`` expert rollouts of the training split, ``num_epochs`` passes, ``batch_size`` an
    optimiser step.

    ``demonstrations`` names a file of trajectories (docs/formats.md) that stand for the experts: those of the
    first ``num_examples`` training tasks that have one are played again, and
    the solved ones are imitated. ``retrieve_share`` of the examples show one middle step inside
    ``<retrieve>`` (done in the environment, not trained on), so that the policy has met the form before
    hybrid rollouts use it. ``tip_share`` of the examples show tips of the memory that all experts' episodes
    fill, so that the policy has learned to read them (EMPO² with ``memory.writer = "environment"``). 0
    examples: no cold start.
    """

    details: ClassVar[frozenset[str]] = frozenset({"num_epochs", "warmup_steps"})
    input_paths: ClassVar[frozenset[str]] = frozenset({"demonstrations"})

    num_examples: int = Field(0, ge=0)
    demonstrations: str | None = None
    num_epochs: int = Field(1, ge=1)
    batch_size: int = Field(16, ge=1)
    learning_rate: float = Field(1e-4, gt=0)
    warmup_steps: int = Field(2, ge=0)
    retrieve_share: float = Field(0.0, ge=0, le=1)
    tip_share: float = Field(0.0, ge=0, le=1)

    @property
    def max_steps(self) -> int:
        """Optimiser steps if every example is used."""
        return self.num_epochs * -(-self.num_examples // self.batch_size)


class UpdateSettings(Settings):
    """How a batch becomes optimiser steps.

    ``num_mini_batches`` splits the tasks of a step into that many optimiser steps; ``num_epochs`` repeats
    them; ``max_tokens`` bounds the unique tokens of a micro-batch. ``max_logprob_gap`` stops the run before
    its first update when trainer and engine disagree by more (mean absolute difference over a mini-batch,
    nats): a template or weight fault, not noise. ``checkpoint_activations`` trades a second forward pass for
    the memory of the layers' activations. ``attention``: segment by segment (``segments``), or one compiled
    call of flex attention for a whole micro-batch (``flex``, on a GPU; ``auto`` there).
    """

    details: ClassVar[frozenset[str]] = frozenset({"max_logprob_gap"})

    num_mini_batches: int = Field(1, ge=1)
    num_epochs: int = Field(1, ge=1)
    max_tokens: int = Field(4096, ge=1)
    max_logprob_gap: float = Field(0.1, gt=0)
    checkpoint_activations: bool = False
    attention: Literal["auto", "segments", "flex"] = "auto"

    def uses_flex(self, device: str) -> bool:
        """Whether a micro-batch on this device is one call of flex attention."""
        return self.attention == "flex" or (self.attention == "auto" and device.startswith("cuda"))


class StageSettings(Settings):
    """One stage of training: ``num_steps`` steps on the training tasks whose keys fit one of ``tasks``.

    ``tasks`` are patterns as of a shell, such as ``scienceworld/find-animal/*``; keys are in traces and
    evaluations. The last stage has no ``num_steps``: it lasts as long as the run.
    """

    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    num_steps: int | None = Field(None, ge=1)
