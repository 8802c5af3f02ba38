"""A tokenizer and its chat template: rendering, text inside a conversation, and supported messages."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol, TypeAlias

from outrider.errors import ModelError
from outrider.types import ToolCall, ToolSchema


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that Outrider uses."""

    eos_token_id: int | None

    @property
    def added_tokens_decoder(self) -> Any:
        """Id -> added token, with its flag ``special``."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(
        self, token_ids: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> Any: ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> Any:
        """Render a conversation to text; ``options`` are ``tools`` and variables of the template."""
        ...


def decode_text(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the exact text of the ids.

    Some tokenizers are configured to clean it up (``a , b`` becomes ``a, b``), so that a tool would receive
    another text than the policy wrote.
    """
    text = tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    return str(text)


# --- The end of a turn ---


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnClosing:
    """Tokens or text that end a turn according to the template. Generation stops there, whatever the
    tokenizer's EOS token is.

    Attributes:
        token_id: the marker (``<|im_end|>``, ``<end_of_turn>``), if it is one token
        text: the decoded closing: "" for a special token, everything for a marker of ordinary tokens. A
            template that writes only white space has neither, because answers contain white space, too.
        next_roles: if a template writes nothing after an answer (GLM), the tokens that begin the next message
            end the turn; ``token_id`` is then the token of a user message
    """

    token_id: int | None
    text: str
    next_roles: tuple[int, ...] = ()

    @classmethod
    def from_ids(cls, tokenizer: Tokenizer, end_of_turn: Sequence[int]) -> "TurnClosing":
        """Take the first added token that the template writes after an answer, or else its text."""
        added = tokenizer.added_tokens_decoder
        marker = next((i for i in end_of_turn if i in added and str(added[i]).strip()), None)
        closing = list(end_of_turn) if marker is None else [marker]
        return cls(token_id=marker, text=decode_text(tokenizer, closing, skip_special_tokens=True).strip())

    @property
    def token_ids(self) -> frozenset[int]:
        """All tokens that end a turn."""
        return frozenset({self.token_id, *self.next_roles} - {None})  # type: ignore[arg-type]

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings, for templates without a token that ends a turn."""
        return (self.text,) if self.text and self.token_id is None else ()

    def cut(self, text: str) -> str:
        """Remove the closing from the text of a closed turn."""
        head, marker, after = text.rpartition(self.text) if self.text else ("", "", "")
        return head if marker and not after.strip() else text


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenClosing:
    """The ids with which a template closes an assistant message; the policy may have written some of them.

    Attributes:
        num_blank: ids of blanks before the marker (Llama 2), which a policy may leave out
        after_marker: the ids after the first marker; all ids if there is none
    """

    text: str
    ids: tuple[int, ...]
    num_blank: int
    after_marker: tuple[int, ...] = ()

    def missing(self, previous_ids: Sequence[int]) -> tuple[int, ...]:
        """The ids that ``previous_ids`` do not end with."""

        def overlap(ending: Sequence[int]) -> int:
            for length in range(min(len(previous_ids), len(ending)), 0, -1):
                if tuple(previous_ids[-length:]) == tuple(ending[:length]):
                    return length
            return 0

        num_written = overlap(self.ids)
        if self.num_blank and (without_blanks := overlap(self.ids[self.num_blank :])):
            num_written = max(num_written, self.num_blank + without_blanks)
        return self.ids[num_written:]


# --- Text in the middle of a conversation ---

_PROBE: Final = "a b\na  b"
# Text to encode in front of a continuation. One is enough unless a token spans it and the text after it.
_ANCHORS: Final = ("\n", "a", ".", "0", "\u00b6", "\x01", "A", "\n\n\n", "a.")


class Continuation:
    """Encodes and decodes text after other ids, as if the whole conversation were encoded at once.

    SentencePiece tokenizers (Llama 2, Mistral, Phi-3, T5) put a blank in front of everything that they
    encode, some of them also after every special token, and drop the first blank of everything that they
    decode. A turn, a result or a token that is encoded or decoded alone would gain or lose a blank. For other
    tokenizers (byte-level ones), both are the tokenizer's own methods.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {i: str(token) for i, token in added.items()}
        self._stripping = {i for i, token in added.items() if getattr(token, "rstrip", False)}

    def encode(self, text: str, previous_ids: Sequence[int] = ()) -> list[int]:
        """Encode ``text`` after other ids; without ids, in the middle of some text."""
        if not text:
            return []
        last = previous_ids[-1] if previous_ids else None
        if last is not None and last in self._added:
            is_special = last in self._stripping or self._adds_blank_at_start
            return self._encode_after_token(last, text) if is_special else self._encode(text)
        return self._encode_in_text(text) if self._adds_blank_at_start else self._encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode ids in the middle of a conversation, including a first blank."""
        if self._decoding_anchor is None:
            return decode_text(self._tokenizer, ids, skip_special_tokens=skip_special_tokens)
        anchor, text = self._decoding_anchor
        whole = decode_text(self._tokenizer, [anchor, *ids], skip_special_tokens=skip_special_tokens)
        return whole[len(text) :]

    def adds_blank_after(self, ids: Sequence[int]) -> bool:
        """Whether the tokenizer adds a blank to text after these ids."""
        return bool(ids) and ids[-1] in self._added and self._adds_blank_after_tokens

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _encode_after_token(self, token: int, text: str) -> list[int]:
        ids = self._encode(self._added[token] + text)
        return ids[1:] if ids and ids[0] == token else self._encode_in_text(text)

    def _encode_in_text(self, text: str) -> list[int]:
        # If a token ends with the anchor, the anchor does not change the tokens after it.
        for anchor in self._anchors:
            before = self._encode(anchor)
            ids = self._encode(anchor + text)
            if ids[: len(before)] == before and len(ids) > len(before):
                return ids[len(before) :]
        return self._encode(text)

    @cached_property
    def _anchors(self) -> tuple[str, ...]:
        """The anchors that the vocabulary contains."""
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        known = (anchor for anchor in _ANCHORS if unknown is None or unknown not in self._encode(anchor))
        return tuple(anchor for anchor in known if self._encode(anchor))

    @cached_property
    def _adds_blank_at_start(self) -> bool:
        return self._encode_in_text(_PROBE) != self._encode(_PROBE)

    @cached_property
    def _adds_blank_after_tokens(self) -> bool:
        special = [i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special]
        token = next((i for i in special if self._encode(self._added[i]) == [i]), None)
        if token is None or not self._adds_blank_at_start:
            return False
        return self._encode_after_token(token, _PROBE) != self._encode_in_text(_PROBE)

    @cached_property
    def _decoding_anchor(self) -> tuple[int, str] | None:
        """An id and its text to decode other ids after; None if parts decode as they do together."""
        ids = self._encode(_PROBE)
        whole = self._decode(ids)
        parts = [self._decode(ids[:index]) + self._decode(ids[index:]) for index in range(1, len(ids))]
        if all(part == whole for part in parts):
            return None
        # No bytes of a byte fallback, which decode together with the bytes after them.
        for anchor in ("a", "A", "0", "."):
            last = (self._encode(anchor) or ids)[-1]
            text = self._decode([last])
            if text == anchor and self._decode([last, *ids]).startswith(text):
                return last, text
        return None

    def _decode(self, ids: Sequence[int]) -> str:
        return decode_text(self._tokenizer, ids, skip_special_tokens=False)


# --- The chat template ---

Chat: TypeAlias = list[dict[str, Any]]

MARK: Final = "\u241euser\u241e"
USER_MESSAGE: Final = {"role": "user", "content": "a"}
ASSISTANT_MESSAGE: Final = {"role": "assistant", "content": MARK}
REFUSAL: Final = "the tokenizer has no usable chat template: "


CALL_MARK: Final = "markedargument"  # letters only: no template escapes it
_MARKED_CALL: Final = ToolCall(name="lookup", arguments={"key": CALL_MARK}, call_id="call00000")
PLACEHOLDER_TOOL: Final[ToolSchema] = {
    "name": "lookup",
    "description": "d",
    "parameters": {
        "type": "object",
        "properties": {"key": {"type": "string", "description": "d"}},
        "required": ["key"],
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """How a template or server expects the arguments of a call: as an object, or as JSON text."""

    arguments_are_text: bool

    def message(self, calls: Sequence[ToolCall], content: str) -> dict[str, Any]:
        """Build an assistant message with calls."""
        tool_calls = []
        for call in calls:
            # For arguments that are no object, a template that expects objects may refuse the text.
            arguments = call.arguments_text if self.arguments_are_text or call.raw else dict(call.arguments)
            function = {"name": call.name, "arguments": arguments}
            tool_calls.append({"type": "function", "id": call.call_id, "function": function})
        return {"role": "assistant", "content": content, "tool_calls": tool_calls}


class Template:
    """A chat template of a tokenizer with its variables, for example ``enable_thinking``.

    Text that spells a special token (a chat marker in a question, a page or a retrieved step) gets a space
    after its first character, so that only the template writes markers. Raises ModelError for conversations
    that the template refuses.

    Args:
        tokenizer: the tokenizer
        variables: variables of the template
        chosen: the text of one of several templates; None for the only one
        with_tools: it is the template for conversations with tools
        is_chosen: the settings name the template
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        variables: Mapping[str, Any],
        *,
        chosen: str | None = None,
        with_tools: bool = False,
        is_chosen: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.continuation = Continuation(tokenizer)
        self._chosen = chosen
        self.with_tools = with_tools
        self.is_chosen = is_chosen
        self.name = str(getattr(tokenizer, "name_or_path", "") or "the tokenizer")
        self.variables = dict(variables)

        def any_of(tokens: set[str]) -> str:
            longest_first = sorted(tokens, key=lambda token: (-len(token), token))
            return "|".join(map(re.escape, longest_first)) or r"(?!)"

        added = tokenizer.added_tokens_decoder
        special = {str(token) for token in added.values() if token.special}
        self.markers = re.compile(any_of({token for token in special if len(token) > 1}))
        self._added = {str(token): i for i, token in added.items() if str(token).strip()}
        self._next_marker = re.compile(rf"\s*({any_of(set(self._added))})")

    def render(self, chat: Chat, *, opened: bool, tools: Sequence[ToolSchema] = ()) -> str:
        """Render a conversation to text; ``opened``: with the start of the assistant's next turn."""
        options: dict[str, Any] = dict(self.variables)
        if self._chosen is not None:
            options["chat_template"] = self._chosen
        if tools or self.with_tools:  # a template for tools may expect a list
            options["tools"] = [{"type": "function", "function": dict(tool)} for tool in tools]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=opened, **options
                )
            )
        except Exception as error:  # templates raise arbitrary exceptions
            roles = ", ".join(message["role"] for message in chat)
            reason = " ".join(str(error).split())
            raise ModelError(f"{REFUSAL}it refuses {roles}: {reason}") from error

    def text_after_mark(self, label: str, chat: Chat, *, opened: bool = False, mark: str = MARK) -> str:
        """Render a conversation and return the text after the mark. Raises ModelError if it is missing."""
        text = self.render(chat, opened=opened)
        if mark not in text:
            raise ModelError(f"the chat template drops {label}")
        return text.split(mark, 1)[1]

    def renders_mark(
        self, chat: Chat, *, opened: bool = True, tools: Sequence[ToolSchema] = (), mark: str = MARK
    ) -> bool:
        """Whether the template renders a conversation including the mark in it."""
        try:
            return mark in self.render(chat, opened=opened, tools=tools)
        except ModelError:
            return False

    def escape(self, value: Any) -> Any:
        """Insert a space into everything that reads as a marker in a text or in the texts of a JSON value."""
        if isinstance(value, str):
            return self.markers.sub(lambda match: f"{match[0][0]} {match[0][1:]}", value)
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        return [self.escape(item) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str) -> list[int]:
        """Encode a whole text that may contain the template's markers."""
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def first_marker(self, text: str) -> tuple[str, int] | None:
        """The text up to the end of an added token at the start, ignoring blanks, and the id of the token."""
        match = self._next_marker.match(text)
        return (match[0], self._added[match[1]]) if match else None

    def closing(self, closed: str, followed: str) -> WrittenClosing:
        """The common start of the closing of a last answer and of an earlier one: some templates write one
        more marker at the end of a conversation (Phi-3). Raises ModelError if they have no marker in common.
        """
        if followed.startswith(closed):
            return self.written_closing(closed)
        common = ""
        for piece in re.split(f"({self.markers.pattern})", closed):
            if not followed.startswith(common + piece):
                break
            common += piece
        if not self.markers.search(common):
            raise ModelError(
                "the chat template closes the last assistant message differently from an earlier one"
            )
        return self.written_closing(common)

    def written_closing(self, text: str) -> WrittenClosing:
        """Encode a closing and count the blanks before its marker."""
        ids = tuple(self.continuation.encode(text))
        marker = text.lstrip()
        without_blanks = tuple(self.continuation.encode(marker))
        has_blanks = (
            self.first_marker(marker) is not None and ids[len(ids) - len(without_blanks) :] == without_blanks
        )
        num_blank = len(ids) - len(without_blanks) if has_blanks else 0
        marker_index = next((n for n, i in enumerate(ids) if i in self._added.values()), -1)
        return WrittenClosing(text=text, ids=ids, num_blank=num_blank, after_marker=ids[marker_index + 1 :])

    # What the template supports, found by rendering: nothing depends on the name of a model family.

    @cached_property
    def supports_system(self) -> bool:
        """Whether system messages are rendered."""
        return self.renders_mark([{"role": "system", "content": MARK}, USER_MESSAGE])

    @cached_property
    def supports_repeats(self) -> bool:
        """Whether two user messages in a row are rendered."""
        return self.renders_mark([USER_MESSAGE, {"role": "user", "content": MARK}])

    @cached_property
    def shows_tools(self) -> bool:
        """Whether tools are rendered."""
        system: Chat = [{"role": "system", "content": "s"}] if self.supports_system else []
        tool = {**PLACEHOLDER_TOOL, "name": CALL_MARK}
        return self.renders_mark([*system, USER_MESSAGE], tools=[tool], mark=CALL_MARK)

    @cached_property
    def reasoning_key(self) -> str | None:
        """The key of the thinking of a message, or None if the template has none."""
        messages: Chat = [{"role": "assistant", "content": "b"}]
        if self.call_shape is not None:  # some templates render only the thinking before a call (Kimi K2)
            messages.append(self.call_shape.message([_MARKED_CALL], ""))
        for message in messages:
            for key in ("reasoning_content", "reasoning", "thinking"):
                if self.renders_mark([USER_MESSAGE, message | {key: MARK}], opened=False):
                    return key
        return None

    @cached_property
    def call_shape(self) -> CallShape | None:
        """The form of the calls of an assistant message, or None if they are not rendered."""
        for shape in (CallShape(arguments_are_text=False), CallShape(arguments_are_text=True)):
            chat = [USER_MESSAGE, shape.message([_MARKED_CALL], "")]
            if self.renders_mark(chat, opened=False, mark=CALL_MARK):
                return shape
        return None

    def calling_turn(self, results: Chat) -> tuple[dict[str, Any], str]:
        """Build a turn whose calls have these results; return it and the mark at the end of its text.

        It has one call for all results if the template refuses several calls in a turn.
        """
        shape = self.call_shape
        if shape is None:
            return dict(ASSISTANT_MESSAGE), MARK
        calls = [
            ToolCall(
                name=result.get("name") or "lookup",
                arguments={"key": CALL_MARK if result is results[-1] else "b"},
                call_id=result.get("tool_call_id") or f"call{number:05d}",
            )
            for number, result in enumerate(results)
        ]
        whole = shape.message(calls, "")
        if len(calls) > 1 and not self.renders_mark([USER_MESSAGE, whole], opened=False, mark=CALL_MARK):
            return shape.message(calls[-1:], ""), CALL_MARK
        return whole, CALL_MARK


def load_templates(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> tuple[Template, Template]:
    """Return the templates for conversations without and with tools.

    They are the same unless the tokenizer has several and the variable ``chat_template`` does not choose one.
    Raises ModelError if there are several without a default.
    """
    templates = named_templates(tokenizer)
    chosen = variables.get("chat_template")
    if not templates or chosen is not None:
        others = {name: value for name, value in variables.items() if name != "chat_template"}
        source = templates.get(chosen, chosen) if isinstance(chosen, str) else None
        template = Template(
            tokenizer,
            others,
            chosen=source,
            with_tools=chosen == "tool_use",
            is_chosen=source is not None,
        )
        return template, template
    default, tools_template = templates.get("default"), templates.get("tool_use")
    plain = tools_template if default is None else default
    if plain is None:
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise ModelError(
            f"{name} has the chat templates {', '.join(sorted(templates))} and no default: name one in "
            "model.template_kwargs (chat_template)"
        )
    template = Template(tokenizer, variables, chosen=plain, with_tools=plain is tools_template)
    if tools_template is None or tools_template is plain:
        return template, template
    return template, Template(tokenizer, variables, chosen=tools_template, with_tools=True)


def named_templates(tokenizer: Tokenizer) -> dict[str, str]:
    """Name -> text of the templates of a tokenizer; empty if it has one without a name."""
    templates = getattr(tokenizer, "chat_template", None)
    if isinstance(templates, list | tuple):  # the form of tokenizer_config.json
        templates = {str(entry["name"]): entry["template"] for entry in templates}
    return dict(templates) if isinstance(templates, Mapping) else {}
