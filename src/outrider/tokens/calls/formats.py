"""The forms that are built in, by name."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

from outrider.tokens.calls.format import CallFormat
from outrider.tokens.calls.hermes import Hermes
from outrider.tokens.calls.llama3_json import Llama3Json
from outrider.tokens.calls.pythonic import Pythonic
from outrider.tokens.calls.qwen3_coder import Qwen3Coder
from outrider.types import ToolSchema

CallFormatName: TypeAlias = Literal["hermes", "qwen3_coder", "llama3_json", "pythonic"]

CALL_FORMATS: Final[Mapping[CallFormatName, CallFormat]] = {
    "hermes": Hermes(),
    "qwen3_coder": Qwen3Coder(),
    "llama3_json": Llama3Json(),
    "pythonic": Pythonic(),
}


def unwritable_in(name: CallFormatName, tools: Sequence[ToolSchema]) -> str:
    """Which of the tools a form cannot call, and the forms that can call all; empty where it can itself."""
    told = next((told for tool in tools if (told := CALL_FORMATS[name].unwritable(tool))), "")
    if not told:
        return ""
    others = [
        other for other, form in CALL_FORMATS.items() if not any(form.unwritable(tool) for tool in tools)
    ]
    return f"calls in the form {name} cannot write {told}: {', '.join(others)} can"
