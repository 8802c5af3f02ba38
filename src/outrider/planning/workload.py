"""What of a run's settings decides its memory and its work."""

from dataclasses import dataclass
from typing import Final

from outrider.engines.base import VllmSettings
from outrider.planning.memory import Training
from outrider.planning.shape import ModelShape
from outrider.train.settings import RunSettings

USED_SHARE: Final = 0.35  # of a device's peak rate, an assumption


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``context``: tokens of the longest episode, prompt and response. ``shares_weights``: the engine is the
    model that trains. ``extra_forwards``: passes without a gradient over the tokens of an update.
    ``contexts``: samples that an episode may become at most, which are one micro-batch together.
    ``engine_memory``: ``engine.memory`` of the vLLM engine; ``has_vllm``: whether there is one.
    """

    training: Training
    context: int
    episodes: int
    shares_weights: bool
    extra_forwards: int
    contexts: int = 1
    has_vllm: bool = False
    engine_memory: float | None = None

    @property
    def episode_tokens(self) -> int:
        """Tokens that an update computes of an episode at most."""
        return self.context * self.contexts

    @property
    def step_tokens(self) -> int:
        """Tokens of a step at most: every episode as long as it may be, and nothing shared."""
        return self.episodes * self.episode_tokens

    def update_seconds(self, shape: ModelShape, *, ranks: int, peak: float) -> float:
        """Estimate ``(6 + 2 c + 2 m) P U / (0.35 N peak)``: forward and backward pass are 6 operations per
        parameter and token, a pass computed again (c) and each of m extra forwards 2. Attention's products
        are not counted. With adapters the backward pass has 2 of its 4 operations, because frozen weights
        have no gradient; with ``trained_layers`` it runs through these layers only.
        """
        training = self.training
        backward = 4.0 if training.lora_rank is None else 2.0
        if training.trained_layers is not None:
            backward *= training.trained_parameters(shape) / shape.num_parameters
        per_parameter = 2 + backward + 2 * training.checkpointed + 2 * self.extra_forwards
        operations = per_parameter * shape.num_parameters * self.step_tokens
        return operations / (USED_SHARE * ranks * peak)


def make_workload(settings: RunSettings, *, prompt_tokens: int, longest: int | None = None) -> Workload:
    """Of a recipe. The length of prompts is not in it, so it is given; ``longest``: positions of the model.

    ``precision = "auto"`` counts as bfloat16 on a GPU and float32 on a CPU.
    """
    device, update, algorithm = settings.model.device, settings.update, settings.algorithm
    engine, lora = settings.engine, settings.model.lora
    precision = settings.model.precision
    if precision == "auto":
        precision = "float32" if device == "cpu" else "bfloat16"
    limits = [limit for limit in (settings.model.context_length, longest) if limit]
    context = min([prompt_tokens + settings.rollout.max_response_tokens, *limits])
    # a conversation that is rendered again before a turn may begin a context anew
    contexts = settings.rollout.max_turns if settings.model.history_thinking == "strip" else 1
    has_several_updates = update.num_mini_batches * update.num_epochs > 1
    return Workload(
        training=Training(
            # a rollout that is longer is a micro-batch of its own
            max_tokens=max(update.max_tokens, context * contexts),
            precision=precision,
            checkpointed=update.checkpoint_activations,
            has_reference=algorithm.needs_reference,
            lora_rank=None if lora is None else lora.rank,
            lora_targets=() if lora is None else tuple(lora.target_modules),
            trained_layers=settings.model.trained_layers,
        ),
        context=context,
        episodes=settings.train.tasks_per_step * algorithm.group_size,
        shares_weights=settings.engine.is_exact,
        extra_forwards=has_several_updates + algorithm.needs_reference,
        contexts=contexts,
        has_vllm=isinstance(engine, VllmSettings),
        engine_memory=engine.memory if isinstance(engine, VllmSettings) else None,
    )
