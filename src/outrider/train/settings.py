"""The whole configuration of a run: one tree, checked as one, before anything is written."""

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from outrider.algorithms.base import ObjectiveSettings
from outrider.config import Settings
from outrider.engines.base import EngineSettings, LocalSettings
from outrider.engines.model_names import PACKAGED
from outrider.environments.families import EnvironmentConfig, is_inline
from outrider.plugins.fields import EmbedderName, Name, Section
from outrider.rollout.evaluate import EvaluationSettings
from outrider.rollout.limits import Limits
from outrider.train.cluster_settings import ClusterSettings
from outrider.train.learning_settings import (
    ColdStartSettings,
    LoraSettings,
    OptimizerSettings,
    StageSettings,
    UpdateSettings,
)

# The sections whose class the recipe names (outrider.plugins).
EngineConfig: TypeAlias = Annotated[EngineSettings, Section("engines")]
AlgorithmSettings: TypeAlias = Annotated[ObjectiveSettings, Section("algorithms")]
TrackerName: TypeAlias = Annotated[str, Name("trackers")]


class ModelSettings(Settings):
    """``name``: a packaged model, a Hugging Face id or a folder. ``precision`` is that of the working copy; a
    run writes down what ``auto`` (bfloat16 where the matrix unit has it) meant on the machine that began it.
    ``trained_layers``: only the last so many layers train (None: all). ``forward``: the path that computes
    the model (docs/models.md); ``auto`` is packed where that is exact, else unpacked. ``template_kwargs`` are
    variables of the chat template, such as ``{enable_thinking = false}``. ``history_thinking``: whether the
    policy sees the thinking of its earlier turns (``keep``: ids are appended only), or every turn sees the
    conversation rendered again without it (``strip``: as servers do; one rollout may then be several
    samples).
    """

    details: ClassVar[frozenset[str]] = frozenset({"template_kwargs", "history_thinking"})
    input_paths: ClassVar[frozenset[str]] = frozenset({"initial_checkpoint"})

    name: str = "smollm2-135m-instruct"
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    device: str = "cpu"
    context_length: int | None = Field(None, ge=8)
    forward: Literal["auto", "packed", "unpacked"] = "auto"
    lora: LoraSettings | None = None
    trained_layers: int | None = Field(None, ge=1)
    initial_checkpoint: str | None = None
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    history_thinking: Literal["keep", "strip"] = "keep"

    def names_path(self, key: str) -> bool:
        """The checkpoint, and the name unless it is that of a packaged model."""
        return super().names_path(key) or (key == "name" and self.name not in PACKAGED)


class BufferSettings(Settings):
    """The step-trace buffer. ``path`` opens an existing one; without it, experts fill one inside the run
    directory.

    ``num_tasks`` limits the training tasks whose experts are asked (None: all that training can draw);
    ``keep_best`` is K of RAPO section 3.1; ``evolve`` adds the agent's own successful rollouts while
    training, to a copy of the buffer in the run directory.
    """

    input_paths: ClassVar[frozenset[str]] = frozenset({"path"})

    path: str | None = None
    embedder: EmbedderName = "minilm"
    num_tasks: int | None = Field(None, ge=1)
    keep_best: int = Field(5, ge=1)
    min_reward: float | None = None
    evolve: bool = False


class TrainSettings(Settings):
    """``num_steps`` training steps of ``tasks_per_step`` groups, on all training tasks or in ``stages``, one
    after the other on tasks of their own (none: all tasks, all the time). ``max_policy_tokens`` ends the run
    earlier when the policy has written so many (for comparisons at equal tokens; those of tries that a fault
    broke count too). A checkpoint every ``checkpoint_every`` steps. ``expert_timeout_s``: how long an expert
    may take for its whole path (a simulator's planner, for a cold start, a buffer or demonstrations).
    ``group_timeout_s``: a group that takes longer, from its first rollout's start, gives up the rollouts that
    are still under way, each in front of its next turn; those are ``cancelled``, and masked (None: no group
    is given up). What is given up depends on speed, so the same seed may give other bits. ``watchdog_s``:
    after so many seconds without progress a line says where the run waits (0: never).
    """

    num_steps: int = Field(100, ge=0)
    tasks_per_step: int = Field(8, ge=1)
    stages: tuple[StageSettings, ...] = ()
    max_policy_tokens: int | None = Field(None, ge=1)
    checkpoint_every: int = Field(10, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    max_concurrent: int = Field(64, ge=1)
    max_retries: int = Field(2, ge=0)
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

    seed: int = 0
    num_threads: int = Field(2, ge=1)
    model: ModelSettings = ModelSettings()
    engine: EngineConfig = LocalSettings()
    environment: EnvironmentConfig
    algorithm: AlgorithmSettings
    rollout: Limits = Limits()
    buffer: BufferSettings = BufferSettings()
    cold_start: ColdStartSettings = ColdStartSettings()
    train: TrainSettings = TrainSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    update: UpdateSettings = UpdateSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    trackers: tuple[TrackerName, ...] = ()
    cluster: ClusterSettings = ClusterSettings()

    @property
    def num_concurrent(self) -> int:
        """Episodes at a time: never more than the environment has room for, because one that waits holds the
        batch.
        """
        requested, room = self.train.max_concurrent, self.environment.max_concurrent
        return requested if room is None else min(requested, room)

    @property
    def limits(self) -> Limits:
        """The rollout's limits; a step that may wait for others' calls has that much longer before it is a
        fault.
        """
        waiting = self.environment.waiting_s(self.num_concurrent)
        if not waiting:
            return self.rollout
        return self.rollout.model_copy(update={"step_timeout_s": self.rollout.step_timeout_s + waiting})

    @property
    def has_ranks(self) -> bool:
        """Whether trainers are processes of their own: several, or one beside engines on GPUs, because Ray
        says which GPU is whose.
        """
        return self.cluster.num_trainers > 1 or (self.cluster.is_remote and self.model.device != "cpu")

    def idle(self) -> frozenset[str]:
        """Sections that nothing of this run reads."""
        no_cold_start = not self.cold_start.num_examples
        reads_buffer = self.algorithm.retrieves or self.cold_start.retrieve_share > 0
        rules = {
            "cluster": self.cluster.num_trainers == 1 and not self.cluster.is_remote,
            "buffer": not reads_buffer,
            "rollout.max_splice_tokens": not reads_buffer,
            "cold_start": no_cold_start,
            "cold_start.tip_share": self.algorithm.tip_memory is None,
            "evaluation.memory": not self.evaluation.num_trials,
            "optimizer": not self.train.num_steps,
            "update": not self.train.num_steps,
        }
        return frozenset(name for name, rests in rules.items() if rests)

    @model_validator(mode="after")
    def _validate(self) -> "RunSettings":
        if self.rollout.max_turn_tokens > self.rollout.max_response_tokens:
            raise ValueError("rollout.max_turn_tokens exceeds rollout.max_response_tokens")
        if not (self.train.num_steps or self.cold_start.num_examples or self.evaluation.at_start):
            raise ValueError(
                "nothing to do: no training step, no cold start, and evaluation.at_start = false"
            )
        if self.update.num_mini_batches > self.train.tasks_per_step:
            raise ValueError("update.num_mini_batches exceeds train.tasks_per_step")
        self._validate_history()
        self._validate_contexts()
        self._validate_conversations()
        self._validate_buffer()
        self._validate_adapters()
        if self.train.num_steps and (reason := self.engine.no_training()):
            raise ValueError(reason)
        if self.update.attention == "flex" and self.model.device == "cpu":
            raise ValueError("update.attention = flex has no backward pass on a CPU: it needs a GPU")
        self._validate_experts()
        self._validate_cluster()
        self.algorithm.validate_run(self)
        return self

    def _validate_history(self) -> None:
        """Rendering again keeps what the messages hold, and no text between them."""
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
        """What a program keeps has no place for steps that it did not ask for."""
        if not self.environment.keeps_conversations:
            return
        shows_steps = self.cold_start.num_examples and self.cold_start.retrieve_share
        if self.algorithm.retrieves or shows_steps:
            source = "cold_start.retrieve_share" if shows_steps else f"algorithm.type = {self.algorithm.type}"
            raise ValueError(
                f"{source} puts steps into the conversation, which environment.type = {self.environment.type} "
                "leaves to a program: it cannot answer them"
            )

    def _validate_contexts(self) -> None:
        if not self.engine.reads_contexts:
            return
        features = {
            f"environment.type = {self.environment.type}": self.environment.keeps_conversations,
            "model.history_thinking = strip": self.model.history_thinking == "strip",
            "model.template_kwargs": bool(self.model.template_kwargs),
            "native tool calls (environment.protocol)": self.environment.call_format is not None,
        }
        if refused := [name for name, is_used in features.items() if is_used]:
            raise ValueError(
                f"engine.type = {self.engine.type} reads plain messages out of contexts that only grow: "
                f"it goes without {refused[0]}"
            )

    def _validate_buffer(self) -> None:
        if self.buffer.evolve and not self.algorithm.retrieves:
            raise ValueError(
                "buffer.evolve needs algorithm.type = rapo with num_hybrid of at least 1: "
                "nothing else opens the buffer"
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
            raise ValueError("[cluster] takes model.device = cpu or cuda: Ray says which GPU is whose")
        if self.has_ranks and not cluster.is_remote and self.model.device != "cpu":
            raise ValueError(
                f"cluster.num_trainers = {cluster.num_trainers} on GPUs needs engines of their own: the "
                "process that was started has no GPU to generate with. Set engine.type=vllm and "
                f"cluster.placement=colocate cluster.num_engines={cluster.num_trainers} (one on each "
                "trainer's GPU), or cluster.weights=nccl with cluster.num_engines (on further GPUs)"
            )
        if cluster.is_remote:
            self._validate_remote()
            self._validate_gpus()
        if cluster.max_staleness and self.algorithm.sampler_correction is None:
            raise ValueError("cluster.max_staleness needs algorithm.sampler_correction: old tokens need it")
        if cluster.in_flight:
            self._validate_in_flight()

    def _validate_in_flight(self) -> None:
        """Groups that play while weights come and go, several steps of them at a time."""
        refused = {
            "rollouts that branch": self.algorithm.forks_by_replay,
            "algorithm.dynamic_sampling": self.algorithm.drops_groups,
            "buffer.evolve": self.buffer.evolve,
        }
        if conflicts := [name for name, is_there in refused.items() if is_there]:
            raise ValueError(f"cluster.in_flight goes without {' and '.join(conflicts)}")

    def _validate_gpus(self) -> None:
        """What only vLLM does, and only on GPUs."""
        cluster = self.cluster
        has_vllm, has_gpus = self.engine.has_own_processes, self.model.device != "cpu"
        if cluster.tensor_parallel > 1 and not has_vllm:
            raise ValueError("cluster.tensor_parallel needs engine.type = vllm")
        if (cluster.sends_directly or cluster.placement == "colocate") and not (has_vllm and has_gpus):
            setting = f"weights = {cluster.weights}" if cluster.sends_directly else "placement = colocate"
            raise ValueError(f"cluster.{setting} needs engine.type = vllm and model.device = cuda")

    def _validate_remote(self) -> None:
        """Engines and rollout workers as processes of their own."""
        names = "cluster.num_engines, num_rollout_workers and weights"
        if not self.train.num_steps and not self.cold_start.num_examples:
            raise ValueError(f"{names} have nothing to train here")
        if (
            self.cluster.batching == "stream"
            and getattr(self.environment, "max_batch_calls", None) is not None
        ):
            raise ValueError(
                "cluster.batching = stream has no rounds, which environment.max_batch_calls counts"
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
