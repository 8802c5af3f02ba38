"""The plan of a recipe: memory requirements, whether it fits, and suggested changes."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, get_args

from outrider.errors import ConfigError, ModelError
from outrider.planning.memory import (
    USED_SHARE,
    Fit,
    Layout,
    Placement,
    Workload,
    fit,
    fit_cpu,
    make_workload,
    smallest_fit,
    state_bytes,
    suggested_overrides,
)
from outrider.planning.shape import GB, Device, ModelShape, find_shape
from outrider.printing import plural
from outrider.training.settings import RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of the command line; None: use the recipe's ``[cluster]``."""

    device: Device
    gpus_per_node: int = 8
    gpus: int | None = None
    placement: Placement | None = None
    tensor_parallel: int | None = None
    engines: int | None = None
    prompt_tokens: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``fewest``: the smallest layouts that fit, in one process, colocated and disaggregated; ``advice``:
    other changes.
    """

    shape: ModelShape
    work: Workload
    options: PlanOptions
    fit: Fit
    fewest: Sequence[Fit]
    advice: Sequence[str]

    @property
    def sync_bytes(self) -> float:
        """Bytes of one transfer of weights to an engine; 0 if it uses the trainer's."""
        return self.fit.weights * self.fit.layout.tensor_parallel

    @property
    def update_seconds(self) -> float:
        ranks, peak = self.fit.layout.trainers, self.options.device.peak
        return self.work.update_seconds(self.shape, ranks=ranks, peak=peak)


def make_plan(settings: RunSettings, options: PlanOptions) -> Plan:
    """Read the model's shape and compute its memory.

    The device determines the estimate: a recipe for a CPU can be planned for a GPU and vice versa. Raises
    ModelError if the model's shape is not available, and ConfigError for an invalid layout or settings that
    the plan does not support.
    """
    is_cpu = options.device.is_cpu
    if is_cpu and (options.gpus or options.placement or options.tensor_parallel):
        raise ConfigError("--gpus, --placement and --tensor-parallel need a GPU: choose one with --device")
    if is_cpu != (settings.model.device == "cpu"):
        model = settings.model.model_copy(update={"device": "cpu" if is_cpu else "cuda"})
        settings = settings.model_copy(update={"model": model})
    shape = find_shape(settings.model.name)
    if settings.model.forward == "unpacked":
        shape = replace(shape, is_unpacked=True)
    work = make_workload(settings, prompt_tokens=options.prompt_tokens, longest=shape.longest)
    layout, memory = make_layout(settings, options, shape), options.device.memory
    if is_cpu:
        result = fit_cpu(shape, work, layout, memory=memory)
        advice = _fewer_episodes(work, result)
        return Plan(shape=shape, work=work, options=options, fit=result, fewest=[], advice=advice)
    result = fit(shape, work, layout, gpu_memory=memory)
    fewest = [
        candidate
        for placement in get_args(Placement)
        if (
            candidate := smallest_fit(
                shape, work, placement, gpu_memory=memory, gpus_per_node=options.gpus_per_node
            )
        )
    ]
    advice = _fewer_episodes(work, result)
    if not result.fits:
        advice = suggested_overrides(shape, work, layout, gpu_memory=memory)
    return Plan(shape=shape, work=work, options=options, fit=result, fewest=fewest, advice=advice)


def unpacked_refusal(settings: RunSettings) -> str:
    """Return why a model that is computed unpacked cannot run with these settings; empty if it can, or if the
    model's shape is not known before it is loaded.
    """
    try:
        shape = find_shape(settings.model.name)
    except ModelError:
        return ""
    if not (shape.is_unpacked or settings.model.forward == "unpacked"):
        return ""
    needs = {
        f"cluster.num_trainers = {settings.cluster.num_trainers}": settings.cluster.num_trainers > 1,
        "update.attention = flex": settings.update.attention == "flex",
    }
    name = next((name for name, is_set in needs.items() if is_set), None)
    return packed_only(name, shape) if name else ""


def packed_only(setting: str, shape: ModelShape) -> str:
    """Format the error for a setting that needs a packed model."""
    return f"{setting} needs a model that runs packed (model.forward), and {shape.name} does not"


def _fewer_episodes(work: Workload, fit: Fit) -> list[str]:
    """Return the number of concurrent episodes with room in the local engine, if the recipe has more."""
    if work.has_vllm or not fit.fits or fit.layout.engines * fit.episodes >= work.concurrent:
        return []
    return [f"train.max_concurrent={fit.layout.engines * fit.episodes}"]


def make_layout(settings: RunSettings, options: PlanOptions, shape: ModelShape) -> Layout:
    """Return the requested layout of processes. Raises ConfigError if the numbers are inconsistent."""
    cluster = settings.cluster
    tp = options.tensor_parallel or cluster.tensor_parallel
    if shape.num_heads % tp or tp > options.gpus_per_node:
        raise ConfigError(
            f"tensor_parallel {tp} must divide the {shape.num_heads} heads and be at most the "
            f"{options.gpus_per_node} GPUs of a node"
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


# Output of a plan as text and as JSON values.


_MB = 1e6
_LABELS = {
    "masters": "float32 weights",
    "moments": "optimizer moments",
    "working copy": "bfloat16 copy",
    "reference": "reference model",
    "activations kept": "stored activations",
    "pass in work": "current layer or head",
}


def lines(plan: Plan, refusals: Mapping[Layout, str] = MappingProxyType({})) -> Iterator[str]:
    """Yield lines of name, value and a short explanation.

    ``refusals``: layouts that the recipe cannot use, with the reasons.
    """
    shape, work, fit = plan.shape, plan.work, plan.fit
    yield _line("model", shape.name, shape.family)
    yield _line("parameters", f"{shape.num_parameters:,}")
    device = plan.options.device
    memory_label = "GB of this CPU's memory" if device.is_cpu else "GB per GPU"
    yield _line("layout", layout_words(plan), f"{device.memory / GB:,.4g} {memory_label}")
    if (trained := work.training.trained_parameters(shape)) != shape.num_parameters:
        training = work.training
        words = (
            f"the last {training.trained_layers} layers and the final norm"
            if training.lora_rank is None
            else f"adapters of rank {training.lora_rank}" + " on 4-bit weights" * training.is_4bit
        )
        yield _line("trained parameters", f"{trained:,}", words)
    yield _line("trainer rank", _gb(sum(fit.rank.values())), "at its peak, of which:")
    for name, size in fit.rank.items():
        if size:
            yield _line(f"  {_LABELS.get(name, name)}", _gb(size))
    if fit.host:
        yield _line("host memory", _gb(fit.host), "float32 weights, moments and gradients")
    engine_precision = work.training.precision if device.is_cpu else "bfloat16"
    shared = "shared with the trainer" if not fit.weights else engine_precision
    yield _line("engine, weights" if device.is_cpu else "engine GPU, weights", _gb(fit.weights), shared)
    yield _line("  keys and values", f"{fit.token / 1e3:,.1f} kB", "per token")
    if states := state_bytes(shape):
        yield _line("  recurrent states", _gb(states), "per episode")
    words = "with a margin of 10 % and 2 GB, without keys and values"
    if device.is_cpu:
        words = "with a margin of 10 % and 0.5 GB per process, without keys and values"
        yield _line("all processes", _gb(fit.trainer_gpu), words)
    elif fit.layout.placement == "disaggregate":
        yield _line("a trainer's GPU", _gb(fit.trainer_gpu), "with a margin of 10 % and 2 GB")
        yield _line("an engine's GPU", _gb(fit.engine_gpu), words)
    else:
        yield _line("a GPU", _gb(fit.trainer_gpu), words)
    share = f", engine.memory = {fit.engine_share:g}" if fit.engine_share is not None else ""
    yield _line("episodes at a time", f"{fit.episodes:,}", f"per engine, of {work.context:,} tokens{share}")
    yield _line("tokens per step", f"{work.step_tokens:,}", f"at most: {work.episodes:,} episodes")
    if plan.sync_bytes:
        yield _line("bytes of a sync", _gb(plan.sync_bytes), "per engine")
    if plan.options.device.peak:
        yield _line("seconds of an update", _seconds(plan.update_seconds), seconds_words(plan))
    shortage = doubt = ""
    if not fit.fits:
        is_too_large = max(fit.trainer_gpu, fit.engine_gpu) > fit.gpu_memory
        owner = "this CPU" if device.is_cpu else "a GPU"
        shortage = (
            f"needs more memory than {owner} has"
            if is_too_large
            else "no room for the keys and values of one episode"
        )
    elif refusal := refusals.get(fit.layout):
        shortage = f"the memory is enough, but the recipe cannot use this layout: {refusal}"
    elif shape.is_unpacked:
        doubt = "its activations are a lower bound, because this model is computed unpacked"
    yield _line("fits", "no" if shortage else "yes", shortage or doubt)
    for advice in plan.advice:
        words = "has room for keys and values" if fit.fits else "would fit"
        yield _line("change", advice, words)
    if device.is_cpu:
        return
    for smallest in plan.fewest:
        refusal = refusals.get(smallest.layout)
        needs = f"; the recipe needs other settings for it: {refusal}" if refusal else ""
        yield _line("fewest GPUs", str(smallest.layout.num_gpus), _gpu_words(smallest) + needs)
    if not plan.fewest:
        yield _line("fewest GPUs", "none", "no supported layout has enough memory")


def layout_words(plan: Plan) -> str:
    """Describe the processes of the layout."""
    layout = plan.fit.layout
    if not plan.options.device.is_cpu:
        return _gpu_words(plan.fit)
    if layout.placement == "process":
        return "one process on the CPU"
    ranks = plural(layout.trainers, "trainer", "trainer ranks")
    return f"{ranks} and {plural(layout.engines, 'engine')} on the CPU"


def _gpu_words(fit: Fit) -> str:
    layout = fit.layout
    if layout.placement == "process":
        return "one process on one GPU"
    processes = (
        f"{plural(layout.trainers, 'trainer', 'trainer ranks')} and {plural(layout.engines, 'engine')}"
    )
    size = f" of {layout.tensor_parallel} GPUs" if layout.tensor_parallel > 1 else ""
    if layout.placement == "colocate":
        gpus = f"{layout.trainers} GPUs" if layout.trainers > 1 else "GPU"
        return f"{processes}{size} on the same {gpus} (colocate)"
    return f"{processes}{size} on separate GPUs (disaggregate)"


def seconds_words(plan: Plan) -> str:
    """Describe the assumptions of the time estimate."""
    device, m = plan.options.device, plan.work.extra_forwards
    return (
        f"estimate: {plural(plan.fit.layout.trainers, 'rank')} at {USED_SHARE:.0%} of {device.name}'s "
        f"{device.peak / 1e12:g} TFLOP/s, {m} extra forward passes, all tokens of the step, no attention"
    )


def _line(name: str, value: str, words: str = "") -> str:
    start = f"{name:<24} {value:>16}"
    return "\n".join(
        textwrap.wrap(f"{start}  {words}", 79, subsequent_indent=" " * 43, break_on_hyphens=False)
        if words
        else [start]
    )


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _gb(size: float) -> str:
    return f"{size / GB:,.2f} GB" if size >= GB / 10 else f"{size / _MB:,.1f} MB"


def as_json(plan: Plan, refusals: Mapping[Layout, str]) -> dict[str, Any]:
    """Return bytes, tokens and seconds as JSON values; keys are stable. ``refusals`` as in :func:`lines`."""
    work, fit = plan.work, plan.fit
    return {
        "trained_parameters": work.training.trained_parameters(plan.shape),
        "model": asdict(plan.shape) | {"num_parameters": plan.shape.num_parameters},
        "device": asdict(plan.options.device),
        "training": asdict(work.training) | {"ranks": fit.layout.trainers},
        **_fit_json(fit, refusals),
        "context": work.context,
        "tokens_per_step": work.step_tokens,
        "sync_bytes": plan.sync_bytes,
        "update_seconds": plan.update_seconds if plan.options.device.peak else None,
        "change": list(plan.advice),
        "fewest": [_fit_json(candidate, refusals) for candidate in plan.fewest],
    }


def _fit_json(fit: Fit, refusals: Mapping[Layout, str]) -> dict[str, Any]:
    refusal = refusals.get(fit.layout)
    return {
        "fits": fit.fits and refusal is None,
        "refused": refusal,
        "layout": asdict(fit.layout) | {"num_gpus": fit.layout.num_gpus},
        "rank_bytes": dict(fit.rank),
        "host_bytes": fit.host,
        "engine_weight_bytes": fit.weights,
        "token_bytes": fit.token,
        "trainer_gpu_bytes": fit.trainer_gpu,
        "engine_gpu_bytes": fit.engine_gpu,
        "episodes": fit.episodes,
        "engine_memory_share": fit.engine_share,
    }
