"""Speed on a device compared with ``generate``, vLLM and a padded update, as shares of the device's limits,
and peak memory compared with ``outrider plan``.
"""

import copy
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu_limits import Limits, seconds, step_bytes, update_operations
from benchmarks.gpu_models import Made, make_model
from benchmarks.gpu_rows import RowFile
from benchmarks.gpu_shapes import TINY
from benchmarks.plan_memory_child import forget_peak, resident
from benchmarks.speed_clock import against, alternate
from benchmarks.speed_sides import WORKLOADS, Contexts, Outrider, Plain, Vllm, Workload, play
from benchmarks.speed_update import UPDATES, Shape, batches, packed, padded
from outrider.engines.base import Request
from outrider.engines.local.attention import IMPLEMENTATION
from outrider.engines.local.engine import LocalEngine
from outrider.planning.memory import MARGIN, Training, rank_bytes
from outrider.training.policy import Policy
from outrider.training.settings import LoraSettings, OptimizerSettings

_MANY = {"64 prompts of 256 x 4, 128 new": Workload(num_prompts=64, samples=4, prompt=256, new=128)}
_TINY = {"2 prompts of 8 x 2, 4 new": Workload(num_prompts=2, samples=2, prompt=8, new=4)}
_TINY_UPDATES = {"group of 2, 16 common + 8 new": Shape(rollouts=2, shared=16, own=0, new=8, rows=2)}
_ROWS, _CONTEXT, _STEPS = 64, 512, 64
_ROOM = 0.9  # share of a device's memory that may be allocated
_GB = 1e9


class SharedPlain(Plain):
    """``generate`` with the attention of torch on the very weights of our engine: no second copy."""

    @torch.no_grad()
    def turn(self, contexts: Contexts, new: int) -> Sequence[Sequence[int]]:
        """See :class:`benchmarks.speed_sides.Plain`."""
        self.model.config._attn_implementation = "sdpa"
        try:
            return super().turn(contexts, new)
        finally:
            self.model.config._attn_implementation = IMPLEMENTATION


def generation(
    name: str, device: str, limits: Limits, vllm: str | None, rows: RowFile, *, repeats: int
) -> None:
    """New tokens a second of every side, and the share of the bandwidth in decoding."""
    made = make_model(name, device=device, dtype=torch.bfloat16)
    _decoding(name, made, device, limits, rows)
    sides = {
        "generate": SharedPlain(made.language_model.model, static=False),
        "outrider": Outrider(made.language_model),
    }
    base = {}
    for told, workload in workloads(name).items():
        runs = {side: lambda one=one, w=workload: play(one, w) for side, one in sides.items()}
        rates = alternate(runs, repeats, device=device)
        base[told] = rates["generate"]
        cells = zip(rates, against(rates, "generate"), strict=True)
        rows.add(
            f"{name}: {told}, new tokens/s",
            "; ".join(f"{side} {cell}" for side, cell in cells),
            medians(repeats),
        )
    for one in sides.values():
        one.close()
    # Last, because it takes longest to start, and alone, because its process allocates a share of the memory.
    _beside_vllm(name, made, vllm, base, device, rows, repeats)


def workloads(name: str) -> dict[str, Workload]:
    """Return the workloads of ``speed.py``, and larger ones than a CPU can run."""
    return _TINY if name == TINY else {**WORKLOADS, **_MANY}


def medians(repeats: int) -> str:
    """Describe what a rate is."""
    return f"medians of {repeats}"


def _beside_vllm(
    name: str,
    made: Made,
    vllm: str | None,
    base: dict[str, float],
    device: str,
    rows: RowFile,
    repeats: int,
) -> None:
    if (python := vllm_python(vllm)) is None:
        rows.add(f"{name}: vLLM", "skipped: not in this Python, and --vllm names no other one")
        return
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "gpu_memory_utilization": 0.5}
    with tempfile.TemporaryDirectory() as folder:
        made.config.save_pretrained(folder)
        try:
            side = Vllm(python, folder, "bfloat16", eager=False, threads=1, options=options)
            for told, workload in workloads(name).items():
                run = {"vllm": lambda w=workload: play(side, w)}
                rate = alternate(run, repeats, device=device)["vllm"]
                rows.add(
                    f"{name}: {told}, new tokens/s", f"vllm {rate:.0f} ({rate / base[told]:.2f} x generate)"
                )
            side.close()
        except (SystemExit, OSError) as error:
            rows.add(f"{name}: vLLM", f"failed: {error}")


def vllm_python(given: str | None) -> str | None:
    """Return the given Python with vLLM, or else this one."""
    return given or (sys.executable if importlib.util.find_spec("vllm") is not None else None)


def _decoding(name: str, made: Made, device: str, limits: Limits, rows: RowFile) -> None:
    """Seconds of a step from two lengths, so that prefill is not counted; with torch's deterministic mode, as
    in a run, and without.
    """
    num, context, steps = (4, 16, 4) if name == TINY else (_ROWS, _CONTEXT, _STEPS)

    def step() -> float:
        engine = LocalEngine(made.language_model)
        engine.generate(_prompts(num, context, 2 + steps))  # creates the cache and records graphs
        few, many = (
            seconds(lambda n=n: engine.generate(_prompts(num, context, n)), device) for n in (2, 2 + steps)
        )
        return (many - few) / steps

    wanted = step_bytes(made.shape, rows=num, context=context + steps // 2, value_bytes=2) / limits.copy
    mode = torch.are_deterministic_algorithms_enabled()
    for deterministic in (True, False):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        took = step()
        kind = "deterministic mode" if deterministic else "without deterministic mode"
        rows.add(
            f"{name}: a decoding step, {num} rows, {kind}",
            f"{took * 1e3:.2f} ms, {wanted / took:.0%} of the bandwidth limit",
            f"{wanted * 1e3:.2f} ms to read weights, keys and values",
        )
    torch.use_deterministic_algorithms(mode, warn_only=True)


def _prompts(num: int, context: int, new: int) -> list[Request]:
    """Different ids, so that nothing is shared."""
    return [
        Request(
            request_id=str(i), token_ids=tuple((7 * i + 13 * j) % 9000 + 100 for j in range(context)),
            max_tokens=new, seed=i,
        )
        for i in range(num)
    ]  # fmt: skip


def updates(name: str, device: str, limits: Limits, rows: RowFile, *, repeats: int) -> None:
    """Measure forward and backward pass compared with a padded one, the share of the matrix rate, and the
    peak memory with an optimizer step.
    """
    before = allocated(device)
    made = make_model(name, device=device, dtype=torch.bfloat16)
    shapes = _TINY_UPDATES if name == TINY else UPDATES
    tokens = max(batch.num_tokens for shape in shapes.values() for batch in batches(shape))
    planned = MARGIN * sum(rank_bytes(made.shape, Training(max_tokens=tokens)).values())
    lora = planned > _ROOM * free_memory(device)
    if lora and importlib.util.find_spec("peft") is None:
        rows.add(f"{name}: update", f"skipped: {planned / _GB:.0f} GB do not fit, and peft is not installed")
        return
    policy = Policy(
        made.language_model, OptimizerSettings(learning_rate=1e-9), lora=LoraSettings() if lora else None,
        uses_flex=is_gpu(device),
    )  # fmt: skip
    kind = "adapters of rank 16" if lora else "all weights"
    forget(device)
    for told, shape in shapes.items():
        run = packed(policy, shape)
        rates = alternate({"outrider": run}, repeats, device=device)
        useful = sum(update_operations(made.shape, one, trains_all=not lora) for one in batches(shape))
        num_padded = shape.rollouts * (shape.shared + shape.own + shape.new)
        share = useful * rates["outrider"] / num_padded / limits.product
        rows.add(
            f"{name}: update, {kind}, {told}",
            f"{rates['outrider']:.0f} padded tokens/s, {share:.0%} of the matrix rate",
            f"{useful / 1e12:.2f} TFLOP without recomputation",
        )
    _step(policy, next(iter(shapes.values())))
    peak = peak_memory(device) - before
    beside = "plan does not count adapters" if lora else f"plan {planned / _GB:.2f} GB"
    rows.add(f"{name}: peak memory of an update, {kind}", f"{peak / _GB:.2f} GB", beside)
    _beside_padded(name, made, policy, shapes, device, rows, repeats)


def _step(policy: Policy, shape: Shape) -> None:
    """Twice: moments exist from the first step on."""
    for _ in range(2):
        for batch in batches(shape):
            (-policy.score(batch).logprobs_T.mean()).backward()
        policy.step()


def _beside_padded(
    name: str,
    made: Made,
    policy: Policy,
    shapes: dict[str, Shape],
    device: str,
    rows: RowFile,
    repeats: int,
) -> None:
    """Measure float32 weights with autocast, as in a plain trainer, if there is room for a second model."""
    needed = MARGIN * 3 * 4 * made.shape.num_parameters  # weights, gradients, activations of as much
    if needed > _ROOM * free_memory(device):
        rows.add(f"{name}: padded update", f"skipped: {needed / _GB:.0f} GB more do not fit")
        return
    config = copy.deepcopy(made.config)  # ours names our attention
    with torch.device(device):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    for told, shape in shapes.items():
        sides = {"padded": padded(plain, shape, lower=True), "outrider": packed(policy, shape)}
        rates = alternate(sides, repeats, device=device)
        cells = zip(rates, against(rates, "padded"), strict=True)
        rows.add(
            f"{name}: update, {told}, padded tokens/s",
            "; ".join(f"{side} {cell}" for side, cell in cells),
            medians(repeats),
        )


def allocated(device: str) -> int:
    """Return the allocated bytes."""
    return torch.cuda.memory_allocated(device) if is_gpu(device) else resident("VmRSS")


def forget(device: str) -> None:
    """Reset the peak."""
    torch.cuda.reset_peak_memory_stats(device) if is_gpu(device) else forget_peak()


def peak_memory(device: str) -> int:
    """Bytes of tensors on a GPU, of the process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if is_gpu(device) else resident("VmHWM")


def free_memory(device: str) -> float:
    """Return the bytes that can still be allocated."""
    if is_gpu(device):
        return float(torch.cuda.mem_get_info(device)[0])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def is_gpu(device: str) -> bool:
    """Whether it is CUDA's."""
    return torch.device(device).type == "cuda"
