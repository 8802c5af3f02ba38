"""Chat templates after what the makers of model families document, short, with each family's habits.

They are written for these tests: what they share with the published ones is the form of a conversation.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
_MARKER = re.compile(
    r"<\|[^|>\s]{1,30}\|>|<｜[^｜]{1,30}｜>|<(?:start|end)_of_turn>|\[/?(?:INST|AVAILABLE_TOOLS|TOOL_CALLS"
    r"|TOOL_RESULTS)\]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A template with what its tokenizer declares. ``plain`` are added tokens that are not special."""

    file: str
    eos: str
    bos: str = "<s>"
    call_format: str = "hermes"
    variables: dict[str, Any] = field(default_factory=dict)
    plain: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return (FOLDER / f"{self.file}.jinja").read_text(encoding="utf-8").rstrip("\n")


_IM = "<|im_end|>"
_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_DATE = {"date_string": "1 Jan 2026"}
FAMILIES = {
    "qwen2.5": Family(file="qwen2_5", eos=_IM, plain=_TAGS[:2]),
    "qwen3": Family(file="qwen3", eos=_IM, plain=_TAGS),
    "qwen3, no thinking": Family(file="qwen3", eos=_IM, plain=_TAGS, variables={"enable_thinking": False}),
    "qwen3, always thinking": Family(file="qwen3_thinking", eos=_IM, plain=_TAGS),
    "qwen3-coder": Family(file="qwen3_coder", eos=_IM, call_format="qwen3_coder", plain=_TAGS[:2]),
    "llama3": Family(
        file="llama3", eos="<|eot_id|>", bos="<|begin_of_text|>", call_format="llama3_json", variables=_DATE
    ),
    "mistral": Family(file="mistral", eos="</s>", call_format="llama3_json"),  # behind [TOOL_CALLS], a list
    "gemma": Family(file="gemma", eos="<end_of_turn>", bos="<bos>"),
    "phi3": Family(file="phi3", eos="<|endoftext|>"),
    "phi4": Family(file="phi4", eos=_IM),
    "phi4-mini": Family(file="phi4_mini", eos="<|endoftext|>"),
    "smollm2": Family(file="smollm2", eos=_IM),
    "smollm3": Family(file="smollm3", eos=_IM),
    "smollm3, no thinking": Family(file="smollm3", eos=_IM, variables={"enable_thinking": False}),
    "deepseek-r1": Family(file="deepseek_r1", eos="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>"),
    "gpt-oss": Family(file="gpt_oss", eos="<|return|>", variables=_DATE),
    "lfm2": Family(file="lfm2", eos=_IM, call_format="pythonic"),
    "hermes": Family(file="hermes", eos=_IM, plain=_TAGS[:2]),
}


def byte_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """One token a byte, so that any text has exact ids, and the family's markers as tokens of their own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=family.eos, bos_token=family.bos)
    found = {*_MARKER.findall(family.source), "<|user|>", "<|system|>", "<|assistant|>"}
    markers = sorted(found - {family.eos, family.bos})
    fast.add_special_tokens({"additional_special_tokens": markers})
    fast.add_tokens(list(family.plain))
    fast.chat_template = family.source
    fast.name_or_path = family.file
    return fast
