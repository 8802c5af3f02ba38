"""A recipe's plan: what it needs, whether it fits, what to change."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.planning.change import fits_if_checkpointed, largest_tokens, smallest_fit, smallest_share
from outrider.planning.devices import Device
from outrider.planning.fit import Fit, Layout, Placement, fit, fit_cpu
from outrider.planning.memory import weight_bytes
from outrider.planning.read_shape import find_shape
from outrider.planning.shape import ModelShape
from outrider.planning.workload import Workload, make_workload
from outrider.train.settings import RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the command line says beside the recipe; None: as the recipe's ``[cluster]`` has it."""

    device: Device
    gpus_per_node: int = 8
    gpus: int | None = None
    placement: Placement | None = None
    tensor_parallel: int | None = None
    engines: int | None = None
    prompt_tokens: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``smaller``: the fewest GPUs that hold the recipe, colocated and apart; ``advice``: what else."""

    shape: ModelShape
    work: Workload
    options: PlanOptions
    fit: Fit
    fewest: Sequence[Fit]
    advice: Sequence[str]

    @property
    def sync_bytes(self) -> float:
        """Of one transfer of weights to an engine: bfloat16, ``2 P``."""
        return weight_bytes(self.shape, tensor_parallel=1)

    @property
    def update_seconds(self) -> float:
        """See :meth:`Workload.update_seconds`."""
        ranks, peak = self.fit.layout.trainers, self.options.device.peak
        return self.work.update_seconds(self.shape, ranks=ranks, peak=peak)


def make_plan(settings: RunSettings, options: PlanOptions) -> Plan:
    """Read the model's shape and count. Raises ModelError for a model whose shape is not here, ConfigError
    for a layout that cannot be, or settings that plan does not count.

    The device decides where the run is counted: a recipe for a CPU can be planned for a GPU and back.
    """
    is_cpu = options.device.is_cpu
    if is_cpu and (options.gpus or options.placement or options.tensor_parallel):
        raise ConfigError("--gpus, --placement and --tensor-parallel are of GPUs: name one with --device")
    if is_cpu != (settings.model.device == "cpu"):
        model = settings.model.model_copy(update={"device": "cpu" if is_cpu else "cuda"})
        settings = settings.model_copy(update={"model": model})
    shape = find_shape(settings.model.name)
    work = make_workload(settings, prompt_tokens=options.prompt_tokens, longest=shape.longest)
    layout, memory = make_layout(settings, options, shape), options.device.memory
    if is_cpu:
        result = fit_cpu(shape, work, layout, memory=memory)
        return Plan(shape=shape, work=work, options=options, fit=result, fewest=[], advice=[])
    result = fit(shape, work, layout, gpu_memory=memory)
    fewest = [
        candidate
        for placement in ("colocate", "disaggregate")
        if (
            candidate := smallest_fit(
                shape, work, placement, gpu_memory=memory, gpus_per_node=options.gpus_per_node
            )
        )
    ]
    advice = [] if result.fits else _advice(shape, work, layout, memory)
    return Plan(shape=shape, work=work, options=options, fit=result, fewest=fewest, advice=advice)


def make_layout(settings: RunSettings, options: PlanOptions, shape: ModelShape) -> Layout:
    """The processes that are asked for. Raises ConfigError where the numbers do not go together."""
    cluster = settings.cluster
    tp = options.tensor_parallel or cluster.tensor_parallel
    if shape.num_heads % tp or tp > options.gpus_per_node:
        raise ConfigError(
            f"tensor_parallel {tp} has to divide the {shape.num_heads} heads and fit into a node of "
            f"{options.gpus_per_node} GPUs"
        )
    engines, gpus = options.engines or cluster.num_engines, options.gpus
    alone = cluster.num_trainers == 1 and not cluster.is_remote
    placement = options.placement or ("colocate" if gpus and gpus > 1 else None)
    if placement is None:
        placement = "process" if alone or gpus == 1 else cluster.placement
    if placement == "process":
        return Layout()
    trainers = gpus or cluster.num_trainers
    if placement == "disaggregate":
        trainers = gpus - engines * tp if gpus else cluster.num_trainers
        if trainers < 1:
            raise ConfigError(f"{gpus} GPUs are too few for {engines} engines of {tp} beside a trainer")
    elif trainers % tp:
        raise ConfigError(f"tensor_parallel {tp} does not divide {trainers} colocated GPUs")
    else:
        engines = trainers // tp
    return Layout(placement=placement, trainers=trainers, engines=engines, tensor_parallel=tp)


def _advice(shape: ModelShape, work: Workload, layout: Layout, memory: float) -> list[str]:
    advice = []
    if fits_if_checkpointed(shape, work, layout, gpu_memory=memory):
        advice.append("update.checkpoint_activations=true")
    if (tokens := largest_tokens(shape, work, layout, gpu_memory=memory)) is not None:
        advice.append(f"update.max_tokens={tokens}")
    if work.has_vllm and (share := smallest_share(shape, work, layout, gpu_memory=memory)) is not None:
        advice.append(f"engine.memory={share:g}")
    return advice
