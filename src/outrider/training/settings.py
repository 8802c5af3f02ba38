"""Settings of a training run. This module does not import torch, so that errors in a recipe are reported
at once.
"""

import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from outrider.algorithms.base import ObjectiveSettings
from outrider.config import Settings
from outrider.engines.base import PACKAGED, EngineSettings, LocalSettings
from outrider.environments.base import EnvironmentConfig, is_inline
from outrider.errors import ConfigError
from outrider.plugins.registry import EmbedderName, Name, Section
from outrider.protocols import with_protocol
from outrider.rollout.settings import EvaluationSettings, Limits, RolloutSettings
from outrider.viewer.trackers import TrackingSettings

ALL_LINEAR: Final = "all-linear"
"""peft's shorthand for every linear layer except the projection onto the vocabulary."""
_REMOVED: Final = {"in_flight": False, "batching": "rounds", "update_timeout_s": 3600, "turn_timeout_s": 600}
"""Former settings of [cluster] and their defaults."""
_DEFAULT_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraSettings(Settings):
    """Low-rank adapters through peft.

    ``target_modules``: names of the layers with adapters, or of parameters of fused experts. A name may be
    prefixed by the names of enclosing modules, such as ``self_attn.q_proj``. ``"all-linear"`` selects every
    linear layer except the projection onto the vocabulary.
    """

    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: int = Field(32, ge=1)
    """The adapters are scaled by ``alpha`` / ``rank``."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = _DEFAULT_TARGETS
    base: Literal["model", "4bit"] = "model"
    """Frozen weights of the layers with adapters: in the precision of the model, or in 4 bit (NF4, extra
    ``bitsandbytes``).
    """

    @field_validator("target_modules", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("target_modules")
    @classmethod
    def _check_shorthand(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if ALL_LINEAR in names and len(names) > 1:
            raise ValueError(f'"{ALL_LINEAR}" selects all linear layers: remove the other names')
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
    """AdamW. ``max_grad_norm`` clips the global norm; ``warmup_steps`` raises the learning rate linearly
    from its first fraction. After the warm-up the learning rate is constant: there is no schedule.
    """

    learning_rate: float = Field(1e-6, gt=0)
    """Learning rate, constant after the warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of the mean of gradients."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay rate of the mean of squared gradients."""
    max_grad_norm: float = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0)
    states: Literal["float32", "8bit", "cpu"] = "float32"
    """Moments in float32, or in 8 bit (extra ``bitsandbytes``). ``cpu``: moments, master weights and
    gradients are in host memory, where the step is computed.
    """


class ColdStartSettings(Settings):
    """Supervised fine-tuning on expert rollouts before training.

    It imitates the solved ones of ``num_examples`` expert rollouts on training tasks (0: no cold start).
    After ``warmup_steps``, the learning rate falls linearly to a tenth. ``demonstrations`` names a file of
    trajectories (docs/formats.md) that replace the experts: those of the first ``num_examples`` training
    tasks that have one are rolled out again. ``retrieve_share`` of the examples contain a middle step inside
    ``<retrieve>`` (executed in the environment, not trained on), so that the policy knows the format before
    hybrid rollouts use it. ``tip_share`` of the examples contain tips of a memory that all experts' episodes
    fill, so that the policy has learned to read them (EMPO² with ``memory.writer = "environment"``).
    """

    input_paths: ClassVar[frozenset[str]] = frozenset({"demonstrations"})

    num_examples: int = Field(0, ge=0)
    demonstrations: str | None = None
    num_epochs: int = Field(1, ge=1)
    """Number of passes over the examples."""
    batch_size: int = Field(16, ge=1)
    """Number of examples per optimizer step."""
    learning_rate: float = Field(1e-4, gt=0)
    """Highest learning rate of the cold start; it falls linearly to a tenth."""
    warmup_steps: int = Field(2, ge=0)
    """Optimizer steps of the linear warm-up."""
    retrieve_share: float = Field(0.0, ge=0, le=1)
    tip_share: float = Field(0.0, ge=0, le=1)

    @property
    def max_steps(self) -> int:
        """Number of optimizer steps if every example is used."""
        return self.num_epochs * -(-self.num_examples // self.batch_size)


class UpdateSettings(Settings):
    """The optimizer steps of a training step.

    ``num_mini_batches`` splits the tasks of a step into that many optimizer steps. With
    ``mini_batch_samples`` N, the samples of a step (a rollout, or each of its contexts if it has several)
    are shuffled, and every N of them are one optimizer step; the last step has the rest. ``num_epochs``
    repeats the optimizer steps. ``max_tokens`` limits the unique tokens of a micro-batch;
    a longer rollout is split between its contexts, unless the loss needs all of its tokens at once.
    ``max_logprob_gap`` stops the run before its first update if the log-probs of trainer and engine
    differ by more (mean absolute difference over a mini-batch, nats), which indicates a fault of the
    template or the weights. ``checkpoint_activations`` trades a second forward pass for the memory of the
    layers' activations. ``attention``: segment by segment (``segments``), or one compiled call of flex
    attention for a whole micro-batch (``flex``, on a GPU; ``auto`` there).
    """

    num_mini_batches: int = Field(1, ge=1)
    mini_batch_samples: int | None = Field(None, ge=1)
    num_epochs: int = Field(1, ge=1)
    max_tokens: int = Field(4096, ge=1)
    max_logprob_gap: float = Field(0.1, gt=0)
    checkpoint_activations: bool = False
    attention: Literal["auto", "segments", "flex"] = "auto"

    @model_validator(mode="after")
    def _validate(self) -> "UpdateSettings":
        if self.mini_batch_samples is not None and self.num_mini_batches > 1:
            raise ValueError("mini_batch_samples decides the number of mini-batches: remove num_mini_batches")
        return self

    def uses_flex(self, device: str) -> bool:
        """Whether a micro-batch on this device is one call of flex attention."""
        return self.attention == "flex" or (self.attention == "auto" and device.startswith("cuda"))


class StageSettings(Settings):
    """One stage of training: a number of steps on a part of the training tasks."""

    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    """Shell patterns, such as ``scienceworld/find-animal/*``. The stage uses the training tasks whose keys
    match one of them; traces and evaluations contain the keys.
    """
    num_steps: int | None = Field(None, ge=1)
    """Number of steps of the stage (None: until the end of the run). Only the last stage has none."""


class ClusterSettings(Settings):
    """More than one process.

    ``num_trainers`` ranks share the weights, their optimizer, the reference and every update in shards;
    ``num_engines`` and ``num_rollout_workers`` processes generate and run episodes. A single engine and
    worker are in the training process, unless another setting of this section needs them outside of it.
    ``weights`` selects how weights reach engines: through files in shared memory (``files``), or from the
    trainers' GPUs to those of vLLM (``nccl``; ``auto`` on GPUs with ``placement = disaggregate``). An engine
    has ``tensor_parallel`` GPUs. With ``placement = colocate`` there is one engine on the GPU of each
    trainer, which sleeps during updates. Loss and gradient equal those of one process within 1e-6; the same
    number of ranks gives the same bits.

    ``max_staleness`` is the number of steps whose groups may begin ahead of the update: 0 alternates rollouts
    and updates. With 1, the rollouts of the next step are generated during the update of this one. With more,
    engines take new weights between two turns of an episode. No token is older than ``max_staleness``
    versions, and the sampler correction weighs it. Up to 1, the same seed gives the same bits with the local
    engine.

    A process that dies or does not respond is replaced and its groups are played again, or all processes
    restart from the newest checkpoint: at most ``max_restarts`` times within an hour, counted together.
    """

    num_trainers: int = Field(1, ge=1)
    num_engines: int = Field(1, ge=1)
    tensor_parallel: int = Field(1, ge=1)
    num_rollout_workers: int = Field(1, ge=1)
    placement: Literal["disaggregate", "colocate"] = "disaggregate"
    """Engines have GPUs of their own (``disaggregate``), or share those of the trainers (``colocate``)."""
    max_staleness: int = Field(0, ge=0)
    weights: Literal["auto", "nccl", "files"] = "auto"
    ray_address: str = "local"
    """``local``: all processes run on this machine. ``auto`` or an address: an existing Ray places them on
    its machines (extra ``cluster``)."""
    placement_timeout_s: float = Field(120.0, gt=0)
    """Longest wait for processors of Ray, in seconds."""
    heartbeat_s: float = Field(60.0, gt=0)
    """Longest time in which a process may neither respond nor use its processor, in seconds."""
    stall_s: float = Field(1800.0, gt=0)
    """Longest time in which an engine or a trainer rank may compute without progress, in seconds."""
    max_restarts: int = Field(3, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _drop_removed(cls, values: Any) -> Any:
        """Accept the settings of runs of earlier versions."""
        if not isinstance(values, Mapping):
            return values
        kept = {name: value for name, value in values.items() if name not in _REMOVED}
        removed = {name for name, value in _REMOVED.items() if values.get(name, value) != value}
        if kept.get("weights") in ("store", "disk", "ipc"):
            removed.add(f"weights = {kept['weights']}")
            kept["weights"] = "files"
        if removed:
            text = f"cluster: {', '.join(sorted(removed))} no longer exist; see max_staleness and weights"
            warnings.warn(text, FutureWarning, stacklevel=2)
        return kept

    @property
    def is_remote(self) -> bool:
        """Whether engines and rollout workers are processes of their own."""
        several = self.num_engines > 1 or self.num_rollout_workers > 1 or self.tensor_parallel > 1
        return several or self.weights != "auto" or self.placement == "colocate" or self.max_staleness > 0

    @property
    def num_processes(self) -> int:
        """Number of processes of the run beside the training process."""
        trainers = self.num_trainers if self.num_trainers > 1 else 0
        return trainers + (self.num_engines + self.num_rollout_workers if self.is_remote else 0)

    @model_validator(mode="after")
    def _validate(self) -> "ClusterSettings":
        if self.placement == "colocate" and self.max_staleness:
            raise ValueError("placement = colocate has max_staleness = 0: engines sleep while trainers work")
        if self.placement == "colocate" and (self.tensor_parallel, self.num_engines) != (
            1,
            self.num_trainers,
        ):
            raise ValueError(
                "placement = colocate puts an engine on the GPU of each trainer: tensor_parallel = 1 and "
                "num_engines = num_trainers"
            )
        if self.weights == "nccl" and self.placement == "colocate":
            raise ValueError("weights = nccl needs placement = disaggregate: colocated engines read files")
        return self


# The sections whose class the recipe names (outrider.plugins).
EngineConfig: TypeAlias = Annotated[EngineSettings, Section("engines")]
AlgorithmSettings: TypeAlias = Annotated[ObjectiveSettings, Section("algorithms")]
TrackerName: TypeAlias = Annotated[str, Name("trackers")]


class ModelSettings(Settings):
    """``name``: a packaged model, a Hugging Face id or a folder.

    ``precision`` is that of the working copy; a run records the value of ``auto`` (bfloat16 if it is
    faster, docs/portability.md) on the machine that began it. ``trained_layers``: number of last layers that
    train (None: all). ``forward``: how the model is computed (docs/models.md); ``auto`` is packed if that is
    exact, else unpacked. ``template_kwargs`` are variables of the chat template, such as ``{enable_thinking =
    false}``. ``history_thinking``: whether the policy sees the thinking of its earlier turns (``keep``: token
    ids are only appended), or every turn sees the conversation rendered again without it (``strip``, as
    servers do; one rollout may then be several samples).
    """

    input_paths: ClassVar[frozenset[str]] = frozenset({"initial_checkpoint"})

    name: str = "smollm2-135m-instruct"
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    device: str = "cpu"
    """``cpu``, ``cuda``, ``cuda:1``, or another device of torch."""
    context_length: int | None = Field(None, ge=8)
    """Most tokens of prompt and response together (None: the limit of the model)."""
    forward: Literal["auto", "packed", "unpacked"] = "auto"
    lora: LoraSettings | None = None
    trained_layers: int | None = Field(None, ge=1)
    initial_checkpoint: str | None = None
    """Checkpoint folder of another run, whose weights replace those of the model."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    history_thinking: Literal["keep", "strip"] = "keep"

    def names_path(self, key: str) -> bool:
        """The checkpoint, and the name unless it is that of a packaged model."""
        return super().names_path(key) or (key == "name" and self.name not in PACKAGED)


class BufferSettings(Settings):
    """The step-trace buffer. ``path`` opens an existing one; without it, experts fill one in the run
    directory.

    ``num_tasks`` limits the training tasks whose experts fill the buffer (None: all training tasks);
    ``keep_best`` is K of RAPO section 3.1; ``evolve`` adds the agent's own successful rollouts during
    training, to a copy of the buffer in the run directory.
    """

    input_paths: ClassVar[frozenset[str]] = frozenset({"path"})

    path: str | None = None
    embedder: EmbedderName = "minilm"
    """Embedder of histories. A buffer can only be used with the embedder that built it."""
    num_tasks: int | None = Field(None, ge=1)
    keep_best: int = Field(5, ge=1)
    min_reward: float | None = None
    """Trajectories with a lower reward are not added (None: all are)."""
    evolve: bool = False


class TrainSettings(Settings):
    """``num_steps`` training steps of ``tasks_per_step`` groups.

    Tasks come from all training tasks, or from ``stages`` with their own tasks, one after the other.
    ``max_policy_tokens`` ends the run earlier, after that many tokens of the policy, for comparisons at equal
    tokens; tokens of tries that a fault ended count too. A checkpoint is written every ``checkpoint_every``
    steps. ``expert_timeout_s`` limits an expert's whole path (a simulator's planner, for a cold start, a
    buffer or demonstrations). After ``group_timeout_s`` from the start of its first rollout, a group cancels
    its unfinished rollouts before their next turn; those are masked (None: no limit). Which ones depends on
    speed, so the same seed may give other bits. After ``watchdog_s`` seconds without progress a line reports
    where the run waits (0: never).
    """

    num_steps: int = Field(100, ge=0)
    """Number of training steps."""
    tasks_per_step: int = Field(8, ge=1)
    """Number of tasks of a training step, each with ``algorithm.group_size`` rollouts."""
    stages: tuple[StageSettings, ...] = ()
    max_policy_tokens: int | None = Field(None, ge=1)
    checkpoint_every: int = Field(10, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    max_concurrent: int = Field(64, ge=1)
    """Most rollouts at the same time; with ``cluster.num_engines``, of each engine."""
    max_retries: int = Field(2, ge=0)
    """Number of times that a rollout starts again after an infrastructure fault."""
    expert_timeout_s: float = Field(300.0, gt=0)
    group_timeout_s: float | None = Field(None, gt=0)
    watchdog_s: float = Field(300.0, ge=0)

    @model_validator(mode="after")
    def _validate_stages(self) -> "TrainSettings":
        *before, last = (stage.num_steps for stage in self.stages) if self.stages else (None,)
        if last is not None:
            raise ValueError(
                "the last of train.stages has no num_steps: it lasts until train.num_steps are done"
            )
        if None in before:
            raise ValueError("every one of train.stages but the last needs num_steps")
        if 0 < self.num_steps <= (last_start := sum(filter(None, before))):
            raise ValueError(
                f"the last of train.stages would begin at step {last_start}: "
                f"train.num_steps = {self.num_steps} ends before it"
            )
        return self


class RunSettings(Settings):
    """Everything that decides what a run computes."""

    protocol: str | None = None
    """Protocol whose settings are the defaults of this recipe (``outrider protocol list``)."""
    protocol_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the protocol, which the run records with its settings; leave it out in a recipe."""
    seed: int = 0
    """Seed of all random streams of the run."""
    num_threads: int = Field(2, ge=1)
    """Threads of torch. Leave a core to tools and simulators."""
    model: ModelSettings = ModelSettings()
    """The model to train."""
    engine: EngineConfig = LocalSettings()
    """How the policy generates text."""
    environment: EnvironmentConfig
    """The tasks, and how they are played and rewarded."""
    algorithm: AlgorithmSettings
    """How rollouts are sampled and become an update."""
    rollout: RolloutSettings = RolloutSettings()
    """Limits of one rollout: turns, tokens and time."""
    buffer: BufferSettings = BufferSettings()
    """The step-trace buffer that RAPO retrieves from."""
    cold_start: ColdStartSettings = ColdStartSettings()
    train: TrainSettings = TrainSettings()
    """Length of the training, checkpoints and time limits."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """AdamW, its learning rate and the norm of its gradients."""
    update: UpdateSettings = UpdateSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    """Which tasks are evaluated, when, and how."""
    trackers: tuple[TrackerName, ...] = ()
    """Where metrics are logged besides the run directory (docs/look/trackers.md)."""
    tracking: TrackingSettings = TrackingSettings()
    """Project, name and tags of the run in trackers."""
    cluster: ClusterSettings = ClusterSettings()

    @property
    def num_concurrent(self) -> int:
        """Concurrent episodes of all processes: at most as many as the environment has room for, because a
        waiting episode delays the batch.
        """
        return self._in_room(
            self.train.max_concurrent * (self.cluster.num_engines if self.cluster.is_remote else 1)
        )

    @property
    def group_concurrent(self) -> int:
        """Concurrent episodes of a group on a rollout worker. The number of engines and workers is left out,
        because bits depend on the group's batches.
        """
        return self._in_room(self.train.max_concurrent)

    def _in_room(self, requested: int) -> int:
        room = self.environment.max_concurrent
        return requested if room is None else min(requested, room)

    @property
    def limits(self) -> Limits:
        """The limits of a rollout. If a step may wait for calls of other episodes, its timeout is longer."""
        waiting = self.environment.waiting_s(self.num_concurrent)
        if not waiting:
            return self.rollout
        return self.rollout.model_copy(update={"step_timeout_s": self.rollout.step_timeout_s + waiting})

    @property
    def has_ranks(self) -> bool:
        """Whether trainers run in their own processes: several, or one with engines on GPUs."""
        return self.cluster.num_trainers > 1 or (self.cluster.is_remote and self.model.device != "cpu")

    @property
    def uses_nccl(self) -> bool:
        """Whether weights go from the GPUs of the trainers to those of the engines."""
        cluster = self.cluster
        is_direct = cluster.placement == "disaggregate" and self.model.device != "cpu"
        is_default = cluster.weights == "auto" and cluster.is_remote and self.engine.has_own_processes
        return cluster.weights == "nccl" or (is_default and is_direct)

    @property
    def has_group_batches(self) -> bool:
        """Whether the engine processes generate group by group, so that the same seed gives the same bits;
        otherwise an engine batches the requests of all groups.
        """
        return self.engine.is_exact and self.cluster.max_staleness <= 1

    @property
    def max_rollout_tokens(self) -> int:
        """Most tokens of a rollout without its prompts. If every turn has a prompt of its own, the budget
        ``rollout.max_response_tokens`` is that of a turn.
        """
        rollout = self.rollout
        if self.environment.rebuilt_prompt_tokens is None:
            return rollout.max_response_tokens
        return rollout.max_turns * rollout.max_turn_tokens

    @property
    def trains(self) -> bool:
        """Whether the run changes weights, in a cold start or in steps; if not, it only evaluates."""
        return bool(self.train.num_steps or self.cold_start.num_examples)

    @property
    def unread_sections(self) -> frozenset[str]:
        """Sections with input paths that this run does not read."""
        unread = set() if self.cold_start.num_examples else {"cold_start"}
        if not (self.algorithm.retrieves or self.cold_start.retrieve_share > 0):
            unread.add("buffer")
        return frozenset(unread)

    @model_validator(mode="before")
    @classmethod
    def _fill_protocol(cls, data: Any) -> Any:
        try:
            return with_protocol(data) if isinstance(data, Mapping) else data
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _validate(self) -> "RunSettings":
        if self.rollout.max_turn_tokens > self.rollout.max_response_tokens:
            raise ValueError("rollout.max_turn_tokens exceeds rollout.max_response_tokens")
        if not (self.trains or self.evaluation.at_start):
            raise ValueError(
                "nothing to do: no training step, no cold start, and evaluation.at_start = false"
            )
        if self.update.num_mini_batches > self.train.tasks_per_step:
            raise ValueError("update.num_mini_batches exceeds train.tasks_per_step")
        self._validate_samples()
        self._validate_history()
        self._validate_contexts()
        self._validate_conversations()
        if self.buffer.evolve and not self.algorithm.retrieves:
            raise ValueError(
                "buffer.evolve needs algorithm.type = rapo with num_hybrid of at least 1: "
                "nothing else opens the buffer"
            )
        self._validate_adapters()
        if self.evaluation.truncation and not self.engine.truncates:
            raise ValueError(
                f"evaluation.top_p and top_k: engine.type = {self.engine.type} samples from all tokens; "
                "remove them, or use another engine"
            )
        if self.train.num_steps and (reason := self.engine.no_training()):
            raise ValueError(reason)
        if self.update.attention == "flex" and self.model.device == "cpu":
            raise ValueError("update.attention = flex has no backward pass on a CPU: it needs a GPU")
        self._validate_experts()
        self._validate_cluster()
        self.algorithm.validate_run(self)
        return self

    def _validate_samples(self) -> None:
        """Check that no value of a whole rollout is needed if mini-batches may divide rollouts."""
        if self.update.mini_batch_samples is None:
            return
        is_divided = (
            self.environment.keeps_conversations
            or self.model.history_thinking == "strip"
            or getattr(self.algorithm, "num_episodes", 1) > 1
        )
        if is_divided and (refused := self.algorithm.whole_rollout_settings):
            raise ValueError(
                f"{refused[0]} needs all tokens of a rollout, and update.mini_batch_samples divides rollouts "
                "that have several contexts: use update.num_mini_batches"
            )

    def _validate_history(self) -> None:
        """Check that no text between messages is lost when a conversation is rendered again."""
        if self.model.history_thinking == "keep":
            return
        if is_inline(self.environment):
            raise ValueError(
                "model.history_thinking = strip needs turns that are messages of their own: "
                "these episodes are one message (environment.protocol)"
            )
        if self.algorithm.retrieves or self.algorithm.tip_memory is not None:
            raise ValueError(
                f"model.history_thinking = strip leaves out what algorithm.type = {self.algorithm.type} "
                "puts between messages: use keep"
            )
        if self.cold_start.num_examples and self.cold_start.retrieve_share:
            raise ValueError(
                "model.history_thinking = strip leaves out the steps that cold_start.retrieve_share shows "
                "between messages: use 0, or keep"
            )
        if self.evaluation.num_trials:
            raise ValueError(
                "model.history_thinking = strip leaves out what evaluation.memory shows in a trial "
                "(evaluation.num_trials): use keep"
            )

    def _validate_conversations(self) -> None:
        """Check that no steps are inserted into a conversation that something else writes."""
        if not self.environment.keeps_conversations:
            return
        is_window = self.environment.rebuilt_prompt_tokens is not None
        if is_window and self.evaluation.num_trials and self.evaluation.memory == "reflexion":
            raise ValueError(
                "evaluation.memory = reflexion shows plans in the first prompt of a trial, and "
                'environment.context = "window" builds every prompt anew: set context = "chat"'
            )
        shows_steps = self.cold_start.num_examples and self.cold_start.retrieve_share
        if self.algorithm.retrieves or shows_steps:
            source = "cold_start.retrieve_share" if shows_steps else f"algorithm.type = {self.algorithm.type}"
            if is_window:
                raise ValueError(
                    f"{source} shows retrieved steps inside a growing conversation, and "
                    'environment.context = "window" builds every prompt anew: set context = "chat"'
                )
            raise ValueError(
                f"{source} puts steps into the conversation, which environment.type = "
                f"{self.environment.type} leaves to a program: it cannot answer them"
            )

    def _validate_contexts(self) -> None:
        if not self.engine.reads_contexts:
            return
        is_window = self.environment.rebuilt_prompt_tokens is not None
        features = {
            f"environment.{'context = window' if is_window else f'type = {self.environment.type}'}": (
                self.environment.keeps_conversations
            ),
            "model.history_thinking = strip": self.model.history_thinking == "strip",
            "model.template_kwargs": bool(self.model.template_kwargs),
            "native tool calls (environment.protocol)": self.environment.call_format is not None,
        }
        if refused := [name for name, is_used in features.items() if is_used]:
            raise ValueError(
                f"engine.type = {self.engine.type} reads plain messages out of contexts that only grow: "
                f"it does not support {refused[0]}"
            )

    def _validate_adapters(self) -> None:
        if self.model.lora is None:
            return
        if self.model.trained_layers is not None:
            raise ValueError(
                "model.lora and model.trained_layers exclude each other: adapters have target_modules"
            )
        if not self.engine.takes_adapters:
            raise ValueError(
                f"engine.type = {self.engine.type} needs full fine-tuning: "
                "it does not say that it takes adapters (model.lora)"
            )

    def _validate_experts(self) -> None:
        memory = self.algorithm.tip_memory
        writes_tips = memory is not None and memory.writer == "environment"
        if self.cold_start.num_examples and self.cold_start.tip_share and not writes_tips:
            raise ValueError(
                'cold_start.tip_share needs algorithm.type = empo2 with memory.writer = "environment": '
                "experts write no tips"
            )
        if self.algorithm.forks_by_replay and (refused := self.environment.replayed_differently()):
            raise ValueError(
                f"algorithm.type = {self.algorithm.type} forks by replay, "
                f"and these tasks replay differently: {', '.join(refused)}"
            )
        if self.algorithm.needs_experts and not self.environment.has_experts:
            raise ValueError("these tasks come without experts: name a file with algorithm.demonstrations")

    def _validate_cluster(self) -> None:
        cluster = self.cluster
        if cluster.num_trainers > 1 and not self.train.num_steps and not self.cold_start.num_examples:
            raise ValueError("cluster.num_trainers above 1 has nothing to train here")
        if cluster.num_processes and self.model.device not in ("cpu", "cuda"):
            raise ValueError("[cluster] takes model.device = cpu or cuda: each process gets its own GPU")
        if self.has_ranks:
            single_process = {
                f"optimizer.states = {self.optimizer.states}": self.optimizer.states != "float32",
                "model.lora.base = 4bit": self.model.lora is not None and self.model.lora.base != "model",
            }
            if setting := next((name for name, is_set in single_process.items() if is_set), None):
                raise ValueError(
                    f"{setting} needs the trainer in the process that was started, and this [cluster] "
                    "runs trainers in processes of their own, which shard float32 states: remove it"
                )
        if self.has_ranks and not cluster.is_remote and self.model.device != "cpu":
            raise ValueError(
                f"cluster.num_trainers = {cluster.num_trainers} on GPUs needs engines of their own: the "
                "process that was started has no GPU to generate with. Set engine.type=vllm and "
                f"cluster.placement=colocate cluster.num_engines={cluster.num_trainers} (one on each "
                "trainer's GPU), or cluster.num_engines on further GPUs"
            )
        if cluster.is_remote:
            self._validate_remote()
            has_vllm, has_gpus = self.engine.has_own_processes, self.model.device != "cpu"
            if cluster.tensor_parallel > 1 and not has_vllm:
                raise ValueError("cluster.tensor_parallel needs engine.type = vllm")
            if (cluster.weights == "nccl" or cluster.placement == "colocate") and not (has_vllm and has_gpus):
                setting = "weights = nccl" if cluster.weights == "nccl" else "placement = colocate"
                raise ValueError(f"cluster.{setting} needs engine.type = vllm and model.device = cuda")
        if cluster.max_staleness and self.algorithm.sampler_correction is None:
            raise ValueError("cluster.max_staleness needs algorithm.sampler_correction: old tokens need it")
        if cluster.max_staleness > 1:  # groups of several steps, while weights come and go
            refused = {
                "rollouts that branch": self.algorithm.forks_by_replay,
                "algorithm.dynamic_sampling": self.algorithm.drops_groups,
                "buffer.evolve": self.buffer.evolve,
            }
            if conflicts := [name for name, is_there in refused.items() if is_there]:
                raise ValueError(f"cluster.max_staleness above 1 does not support {' and '.join(conflicts)}")

    def _validate_remote(self) -> None:
        """Check settings of engines and rollout workers in their own processes."""
        names = "cluster.num_engines, num_rollout_workers and weights"
        if not self.train.num_steps and not self.cold_start.num_examples:
            raise ValueError(f"{names} have nothing to train here")
        if not self.has_group_batches and getattr(self.environment, "max_batch_calls", None) is not None:
            raise ValueError(
                "environment.max_batch_calls counts rounds: it needs engine.type = local and "
                "cluster.max_staleness of at most 1"
            )
        if self.evaluation.num_trials:
            raise ValueError(f"{names} are for training: an adaptation plays in one process")
        if self.cluster.num_rollout_workers > self.num_concurrent:
            raise ValueError(
                f"cluster.num_rollout_workers {self.cluster.num_rollout_workers} exceeds the "
                f"{self.num_concurrent} episodes at a time (train.max_concurrent, or what the environment "
                "has room for): each worker plays at least one"
            )
        if self.cluster.num_rollout_workers > self.train.tasks_per_step:
            raise ValueError(
                f"cluster.num_rollout_workers {self.cluster.num_rollout_workers} exceeds "
                f"train.tasks_per_step {self.train.tasks_per_step}: a worker plays whole groups"
            )


def require_extras(settings: RunSettings) -> None:
    """Raise ConfigError if the settings need a package that is not installed. Imports none of them."""
    lora = settings.model.lora
    needs = {
        "model.lora": ("peft", "lora", lora is not None),
        "model.lora.base = 4bit": ("bitsandbytes", "bitsandbytes", lora is not None and lora.base == "4bit"),
        "optimizer.states = 8bit": ("bitsandbytes", "bitsandbytes", settings.optimizer.states == "8bit"),
    }
    for name, (package, extra, is_set) in needs.items():
        if is_set and find_spec(package) is None:
            raise ConfigError(f"{name} needs an extra: pip install 'outrider[{extra}]'")


def require_experts(settings: RunSettings) -> None:
    """Raise ConfigError for a cold start, or a buffer to fill, without the experts that it needs."""
    if settings.environment.has_experts:
        return
    file, kind = "a file of trajectories (docs/formats.md)", settings.environment.type
    why = (
        f"{'questions of your own' if kind == 'tools' else 'its tasks'} "
        f"(environment.type = {kind}) have no expert"
    )
    if settings.cold_start.num_examples and settings.cold_start.demonstrations is None:
        raise ConfigError(
            f"cold_start.num_examples = {settings.cold_start.num_examples}, and {why}: name {file} with "
            "cold_start.demonstrations, or begin without a cold start (cold_start.num_examples=0)"
        )
    if settings.algorithm.retrieves and settings.train.num_steps > 0 and settings.buffer.path is None:
        raise ConfigError(
            f"algorithm.type = {settings.algorithm.type} retrieves from a buffer, and {why} to fill one: "
            f"make it from {file} with `outrider buffer "
            "import FILE --out steps.sqlite`, or from an agent with `outrider buffer build RECIPE --endpoint "
            "URL --out steps.sqlite`, and set buffer.path=steps.sqlite; "
            "or train without retrieval (algorithm.num_hybrid=0)"
        )
