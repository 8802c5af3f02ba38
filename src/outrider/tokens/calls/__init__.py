"""Native tool calls in the forms that model families write, read and written. No torch."""

from outrider.tokens.calls.format import CallFormat, FoundCalls, LimitedForm, call_id
from outrider.tokens.calls.formats import (
    CALL_FORMATS,
    CallFormatName,
    ProtocolName,
    form_named,
    unwritable_in,
)
from outrider.tokens.calls.reading import fault_of, read_turn, read_turn_unchecked
from outrider.tokens.calls.rewriting import in_form
from outrider.tokens.calls.schemas import flaw_of

__all__ = [
    "CALL_FORMATS",
    "CallFormat",
    "CallFormatName",
    "FoundCalls",
    "LimitedForm",
    "ProtocolName",
    "call_id",
    "fault_of",
    "flaw_of",
    "form_named",
    "in_form",
    "read_turn",
    "read_turn_unchecked",
    "unwritable_in",
]
