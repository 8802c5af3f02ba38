"""The forms that are built in, by name."""

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from outrider.tokens.calls.format import CallFormat
from outrider.tokens.calls.hermes import Hermes
from outrider.tokens.calls.llama3_json import Llama3Json
from outrider.tokens.calls.pythonic import Pythonic
from outrider.tokens.calls.qwen3_coder import Qwen3Coder

CallFormatName: TypeAlias = Literal["hermes", "qwen3_coder", "llama3_json", "pythonic"]

CALL_FORMATS: Final[Mapping[CallFormatName, CallFormat]] = {
    "hermes": Hermes(),
    "qwen3_coder": Qwen3Coder(),
    "llama3_json": Llama3Json(),
    "pythonic": Pythonic(),
}
