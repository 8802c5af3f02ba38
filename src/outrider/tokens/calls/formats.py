"""The forms of calls by name: those that are built in, and those of plug-ins."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, TypeAlias

from outrider.errors import ConfigError
from outrider.plugins.fields import Name
from outrider.plugins.registry import resolve
from outrider.tokens.calls.format import CallFormat, LimitedForm
from outrider.tokens.calls.hermes import Hermes
from outrider.tokens.calls.llama3_json import Llama3Json
from outrider.tokens.calls.pythonic import Pythonic
from outrider.tokens.calls.qwen3_coder import Qwen3Coder
from outrider.types import ToolSchema

CallFormatName: TypeAlias = Annotated[str, Name("call_formats")]
"""A form of calls: one that is built in, a registered one, or ``my_module:MyForm``."""
ProtocolName: TypeAlias = Annotated[str, Name("call_formats", also=("tags",))]
"""``tags``, the papers' tags, or a form of native calls."""

CALL_FORMATS: Final[Mapping[str, CallFormat]] = {
    "hermes": Hermes(),
    "qwen3_coder": Qwen3Coder(),
    "llama3_json": Llama3Json(),
    "pythonic": Pythonic(),
}


def get_call_format(name: str) -> CallFormat:
    """The form of this name. Raises ConfigError for one that nobody has, or that is no form of calls."""
    if name in CALL_FORMATS:
        return CALL_FORMATS[name]
    call_format: object = resolve("call_formats", name)()
    if not isinstance(call_format, CallFormat):
        raise ConfigError(
            f"{name} is no form of calls: it has to have markers, read, write and describe "
            "(outrider.tokens.calls.CallFormat)"
        )
    return call_format


def describe_unwritable(name: str, tools: Sequence[ToolSchema]) -> str:
    """Which of the tools a form cannot call, and the built-in forms that can call all; empty where it can
    itself.
    """
    problem = next((problem for tool in tools if (problem := _unwritable(get_call_format(name), tool))), "")
    if not problem:
        return ""
    others = [
        other for other, form in CALL_FORMATS.items() if not any(_unwritable(form, tool) for tool in tools)
    ]
    return f"calls in the form {name} cannot write {problem}: {', '.join(others)} can"


def _unwritable(form: CallFormat, tool: ToolSchema) -> str:
    return form.unwritable(tool) if isinstance(form, LimitedForm) else ""
