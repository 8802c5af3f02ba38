"""Removing a model's thoughts from its text, whatever markers its family writes around them.

Servers with a reasoning parser send thoughts in a field of their own; everywhere else they come in the text.
Graders, judges and readers must see only the text that is left.
"""

import re
from typing import Final

_NAMES: Final = (
    "think", "thinking", "thought", "thoughts", "thought_process", "chain_of_thought", "cot", "reason",
    "reasoning", "reflection", "analysis", "scratchpad", "inner_monologue", "internal_monologue",
    "longcat_think", "seed:think", "mm:think",
)  # fmt: skip
_NAME: Final = "|".join(sorted(map(re.escape, _NAMES), key=len, reverse=True))
_PAIRS: Final = (
    (r"(?<=\[)THINK\]", r"(?<=\[)/THINK\]"),  # Mistral
    (r"(?<=\u25c1)think\u25b7", r"(?<=\u25c1)/think\u25b7"),  # Kimi-VL
    (r"(?<=<)\|START_THINKING\|>", r"(?<=<)\|END_THINKING\|>"),  # Command A
    (r"(?<=<)\|begin_of_thought\|>", r"(?<=<)\|end_of_thought\|>"),  # Sky-T1, OpenThinker
    (r"(?<=<)\|inner_prefix\|>", r"(?<=<)\|inner_suffix\|>"),  # Apertus
    (r"(?<=<)\|channel>thought", r"(?<=<)channel\|>"),  # Gemma 4
    (r"(?<=<)unused94>", r"(?<=<)unused95>"),  # MedGemma
)
# The first sign of a marker comes first, alone, so that the search skips all other text quickly.
_MARKERS: Final = re.compile(
    rf"[<\[\u25c1](?:(?<=<)(?P<end>/?)\s*(?P<name>{_NAME})(?:\s[^<>]*)?>|"
    + "|".join(
        rf"(?P<open{index}>{opening})|(?P<close{index}>{closing})"
        for index, (opening, closing) in enumerate(_PAIRS)
    )
    + ")",
    re.IGNORECASE,
)
# gpt-oss: channels, with their special tokens or, where a server skips those, with the bare words.
_FINAL_CHANNEL: Final = re.compile(r"<\|channel\|>\s*final[^<]*<\|message\|>")
_ANALYSIS_CHANNEL: Final = re.compile(
    r"<\|channel\|>\s*analysis.*?(?:<\|(?:end|return|call|start)\|>|(?=<\|channel\|>)|\Z)", re.DOTALL
)
_CHANNEL_END: Final = re.compile(r"<\|(?:end|return|call)\|>")
_BARE_ANALYSIS: Final = re.compile(r"\s*analysis(?=[^\W_])")
# Granite 3 writes headings.
_HEADINGS: Final = re.compile(
    r"\A\s*Here(?:'s| is) my thought process:.*?(?:Here(?:'s| is) my response:|\Z)", re.DOTALL
)


def without_thoughts(text: str) -> str:
    """The part of a model's text that it addresses to its reader.

    A block that is never closed takes the rest of the text. A closing marker without an opening one ends a
    block that the chat template had opened: all text before it is thought. Blocks may be nested. Text without
    markers is returned unchanged. The time is proportional to the length.
    """
    text = _without_channels(text)
    parts: list[str] = []
    fallback = ""
    position = 0
    opened: str | None = None  # the kind of the open block
    num_opened = num_nested = 0
    for match in _MARKERS.finditer(text):
        kind, is_closing = _kind(match)
        if opened is not None:
            if kind == opened and is_closing:
                opened, position = None, match.end()
            elif kind == opened:
                num_nested += 1
            continue
        if not is_closing:
            parts.append(text[position : match.start()])
            opened = kind
            num_opened += 1
            continue
        # No block is open. Of a block that was closed before, this may be a repeated closing at the very end.
        is_repeated = num_opened > 0 and num_nested == 0
        fallback = "".join(parts) + text[position : match.start()] if is_repeated else ""
        num_nested = max(num_nested - 1, 0)
        parts, position = [], match.end()
    if opened is None:
        parts.append(text[position:])
    result = "".join(parts)
    return result if result.strip() else fallback or result


def _kind(match: re.Match[str]) -> tuple[str, bool]:
    """The kind of block that a marker belongs to, and whether it closes one."""
    if name := match["name"]:
        return name.lower(), bool(match["end"])
    group = match.lastgroup or ""
    return group.removeprefix("open").removeprefix("close"), group.startswith("close")


def _without_channels(text: str) -> str:
    if "<|channel|>" in text:
        if finals := list(_FINAL_CHANNEL.finditer(text)):
            return _CHANNEL_END.split(text[finals[-1].end() :], maxsplit=1)[0]
        return _ANALYSIS_CHANNEL.sub("", text)
    if _BARE_ANALYSIS.match(text):
        return text.rpartition("assistantfinal")[2] if "assistantfinal" in text else ""
    return _HEADINGS.sub("", text)
