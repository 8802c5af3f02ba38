"""Native tool calls in the forms that model families write, read and written. No torch."""

from outrider.tokens.calls.format import CallFormat, LimitedForm, ParsedCalls, call_id
from outrider.tokens.calls.formats import (
    CALL_FORMATS,
    CallFormatName,
    ProtocolName,
    describe_unwritable,
    get_call_format,
)
from outrider.tokens.calls.reading import find_call_error, read_turn, read_turn_unchecked
from outrider.tokens.calls.rewriting import convert_calls
from outrider.tokens.calls.schemas import find_schema_flaw

__all__ = [
    "CALL_FORMATS",
    "CallFormat",
    "CallFormatName",
    "LimitedForm",
    "ParsedCalls",
    "ProtocolName",
    "call_id",
    "convert_calls",
    "describe_unwritable",
    "find_call_error",
    "find_schema_flaw",
    "get_call_format",
    "read_turn",
    "read_turn_unchecked",
]
