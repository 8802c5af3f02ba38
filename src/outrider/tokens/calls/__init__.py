"""Native tool calls in the forms that model families write, read and written. No torch."""

from outrider.tokens.calls.format import CallFormat, FoundCalls, call_id
from outrider.tokens.calls.formats import CALL_FORMATS, CallFormatName, ProtocolName, form_named
from outrider.tokens.calls.reading import fault_of, read_turn

__all__ = [
    "CALL_FORMATS",
    "CallFormat",
    "CallFormatName",
    "FoundCalls",
    "ProtocolName",
    "call_id",
    "fault_of",
    "form_named",
    "read_turn",
]
