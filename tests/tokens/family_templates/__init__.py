"""Chat templates after what the makers of model families document, short, with each family's habits.

They are written for these tests: what they share with the published ones is the form of a conversation.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
_MARKER = re.compile(
    r"<\|[^|>\s']{1,30}\|>|<｜[^｜]{1,30}｜>|<(?:start|end)_of_turn>|\[/?(?:INST|AVAILABLE_TOOLS|TOOL_CALLS"
    r"|TOOL_RESULTS)\]|\[gMASK\]|<sop>"
)
Vocabulary = Literal["bytes", "prepend", "first", "always", "gemma"]
"""How a tokenizer makes pieces: byte level, or SentencePiece with a blank in front of every stretch between
special tokens (Llama 2), of the beginning alone (Mistral v3), of every word (T5), or of nothing (Gemma).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A template with what its tokenizer declares. ``plain`` are added tokens that are not special,
    ``spelled`` markers that are no tokens, ``others`` its further templates by name. ``strips``: special
    tokens take the white space after them.
    """

    file: str
    eos: str
    bos: str = "<s>"
    call_format: str = "hermes"
    variables: dict[str, Any] = field(default_factory=dict)
    plain: tuple[str, ...] = ()
    spelled: tuple[str, ...] = ()
    vocabulary: Vocabulary = "bytes"
    strips: bool = False
    others: dict[str, str] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return _source(self.file)

    @property
    def templates(self) -> str | dict[str, str]:
        named = {name: _source(file) for name, file in self.others.items()}
        return {"default": self.source, **named} if named else self.source

    @property
    def markers(self) -> list[str]:
        text = "".join([self.source, *map(_source, self.others.values())])
        roles = [f"<|{role}_TOKEN|>" for role in ("SYSTEM", "USER", "CHATBOT")] if self.others else []
        found = {*_MARKER.findall(text), *roles, "<|user|>", "<|system|>", "<|assistant|>"}
        return sorted(found - {self.eos, self.bos, *self.spelled})


def _source(file: str) -> str:
    return (FOLDER / f"{file}.jinja").read_text(encoding="utf-8").rstrip("\n")


_IM = "<|im_end|>"
_INST = ("[INST]", "[/INST]")
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
    "mistral": Family(file="mistral", eos="</s>", call_format="llama3_json"),  # a list after [TOOL_CALLS]
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
    "glm4": Family(file="glm4", eos="<|endoftext|>"),
    "glm4.5": Family(file="glm4_5", eos="<|endoftext|>", plain=_TAGS),
    "glm4.5, no thinking": Family(
        file="glm4_5", eos="<|endoftext|>", plain=_TAGS, variables={"enable_thinking": False}
    ),
    "llama2": Family(file="llama2", eos="</s>", vocabulary="prepend"),
    "llama3.0": Family(
        file="llama3_0", eos="<|eot_id|>", bos="<|begin_of_text|>", call_format="llama3_json"
    ),
    "mistral v1": Family(file="mistral_v1", eos="</s>", vocabulary="prepend", spelled=_INST),
    "mistral v3": Family(file="mistral_v3", eos="</s>", vocabulary="first", call_format="llama3_json"),
    "phi3, sentencepiece": Family(file="phi3", eos="<|endoftext|>", vocabulary="prepend", strips=True),
    "gemma2": Family(file="gemma", eos="<end_of_turn>", bos="<bos>", vocabulary="gemma"),
    "gemma3": Family(file="gemma3", eos="<end_of_turn>", bos="<bos>", vocabulary="gemma"),
    "command-r": Family(
        file="command_r", eos="<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>",
        others={"tool_use": "command_r_tools", "rag": "command_r_rag"},
    ),
    "qwen3.5": Family(file="qwen3_5", eos=_IM, call_format="qwen3_coder", plain=_TAGS),
    "qwen3.5, no thinking": Family(
        file="qwen3_5", eos=_IM, call_format="qwen3_coder", plain=_TAGS,
        variables={"enable_thinking": False},
    ),
    "words": Family(file="phi3", eos="<|endoftext|>", vocabulary="always"),
}  # fmt: skip


def byte_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """One token a byte, so that any text has exact ids, and the family's markers as tokens of their own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=family.eos, bos_token=family.bos)
    return _with_markers(fast, family)


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """A small tokenizer of the family's own kind."""
    return byte_tokenizer(family) if family.vocabulary == "bytes" else _sentencepiece(family)


_MERGES = ("▁ t", "t h", "▁t h", "▁th e", "▁ T", "▁T h", "▁Th e", "▁ ▁", "i n", "▁ [", "a n", "▁ a", "▁a n",
           "▁ I", "▁I t", "▁ b", "r e", "e r", "▁ <")  # fmt: skip


def _sentencepiece(family: Family) -> PreTrainedTokenizerFast:
    """Letters, a few merges over blanks, and bytes for the rest."""
    whole = [merge.replace(" ", "") for merge in _MERGES]
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    letters = ["▁", *map(chr, range(33, 127))]
    pieces = ["<unk>", "<s>", "</s>", *bytes_, *letters, *dict.fromkeys(whole)]
    merges = [(left, right) for left, right in (merge.split() for merge in _MERGES)]
    made = Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)}, merges, unk_token="<unk>",
            byte_fallback=True, fuse_unk=True,
        )
    )  # fmt: skip
    strip = [decoders.Strip(content=" ", left=1)]
    if family.vocabulary == "prepend":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif family.vocabulary == "gemma":
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "merged_with_previous")
        strip = []
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement="▁", prepend_scheme=family.vocabulary, split=family.vocabulary == "always"
        )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=family.eos, bos_token=family.bos, unk_token="<unk>"
    )
    return _with_markers(fast, family)


def _with_markers(fast: PreTrainedTokenizerFast, family: Family) -> PreTrainedTokenizerFast:
    markers = [
        AddedToken(one, special=True, normalized=False, rstrip=family.strips) for one in family.markers
    ]
    fast.add_special_tokens({"additional_special_tokens": markers})
    fast.add_tokens(list(family.plain))
    fast.chat_template = family.templates
    fast.name_or_path = family.file
    return fast
