"""A tokenizer and its chat template: rendering, and text that must not become its markers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Protocol, TypeAlias

from outrider.errors import ModelError
from outrider.tokens.tool_calls import CallFormat
from outrider.types import Message, ToolCall, ToolSchema

# The part of a Hugging Face tokenizer that Outrider uses, and text as it is spelled.


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that Outrider uses."""

    eos_token_id: int | None

    @property
    def added_tokens_decoder(self) -> Any:
        """Id -> added token, with its flag ``special``."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to ids."""
        ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any:
        """Ids to text; :func:`text_of` asks for it as it is meant here."""
        ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> Any:
        """Render a conversation to text; ``options`` are ``tools`` and variables of the template."""
        ...


def decode_text(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text that the ids spell, character by character.

    Some tokenizers are configured to tidy it (``a , b`` becomes ``a, b``): a tool would get other text than
    the policy wrote.
    """
    text = tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    return str(text)


# One tokenizer's chat template: rendering, and text that must not become its markers.


# How a turn ends, as a template writes it.


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnClosing:
    """Tokens or text that end a turn, by the template: generation stops there, whatever the tokenizer's EOS
    is.

    ``token_id`` is the marker (`<|im_end|>`, `<end_of_turn>`) where it is a token of its own; white space
    around it is the template's. ``text`` is what decoding shows of the closing: nothing of a special token;
    all there is where the marker is spelled in ordinary tokens. Neither is there where a template writes
    white space only, which answers hold too. ``next_roles`` are the tokens that begin the next message, for a
    template that writes nothing else behind an answer (GLM): they end the turn then, and ``token_id`` is the
    user's.
    """

    token_id: int | None
    text: str
    next_roles: tuple[int, ...] = ()

    @classmethod
    def from_ids(cls, tokenizer: Tokenizer, end_of_turn: Sequence[int]) -> "TurnClosing":
        """The first added token in what the template writes behind an answer, else its text."""
        added = tokenizer.added_tokens_decoder
        marker = next((i for i in end_of_turn if i in added and str(added[i]).strip()), None)
        closing = list(end_of_turn) if marker is None else [marker]
        return cls(token_id=marker, text=decode_text(tokenizer, closing, skip_special_tokens=True).strip())

    @property
    def token_ids(self) -> frozenset[int]:
        """Every token that ends a turn."""
        return frozenset({self.token_id, *self.next_roles} - {None})  # type: ignore[arg-type]

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings for where no token says that the turn is over."""
        return (self.text,) if self.text and self.token_id is None else ()

    def cut(self, text: str) -> str:
        """A closed turn's text without its closing."""
        head, marker, behind = text.rpartition(self.text) if self.text else ("", "", "")
        return head if marker and not behind.strip() else text


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenClosing:
    """The ids that close an assistant message, of which the policy may have written some.

    ``num_blank`` of them are blanks before the marker (Llama 2): a policy that has written the marker has
    closed. ``behind_marker`` are those that follow its first marker; all of them if it has none.
    """

    text: str
    ids: tuple[int, ...]
    num_blank: int
    behind_marker: tuple[int, ...] = ()

    def missing(self, previous_ids: Sequence[int]) -> tuple[int, ...]:
        """Those that ``previous_ids`` do not end with."""
        written = _overlap(previous_ids, self.ids)
        if self.num_blank and (without := _overlap(previous_ids, self.ids[self.num_blank :])):
            written = max(written, self.num_blank + without)
        return self.ids[written:]


def _overlap(ids: Sequence[int], ending: Sequence[int]) -> int:
    """How many leading ids of ``ending`` already stand at the end of ``ids``."""
    for length in range(min(len(ids), len(ending)), 0, -1):
        if tuple(ids[-length:]) == tuple(ending[:length]):
            return length
    return 0


# Text in the middle of a conversation, as ids and back, as if the whole conversation were encoded at once.
#
# SentencePiece tokenizers (Llama 2, Mistral, Phi-3, T5) put a blank in front of whatever they encode, some of
# them behind every special token too, and drop the first blank of whatever they decode. A turn, a result or
# one token that is encoded or decoded alone would gain or lose a blank.


_PROBE: Final = "a b\na  b"
# Text to encode in front of a continuation. One is enough unless a token spans it and what follows it.
_ANCHORS: Final = ("\n", "a", ".", "0", "\u00b6", "\x01", "A", "\n\n\n", "a.")


class Continuation:
    """Encodes and decodes text that stands behind other ids of one tokenizer.

    For a tokenizer that treats the beginning of a text like any other place (byte-level ones do), both are
    the tokenizer's own.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {i: str(token) for i, token in added.items()}
        self._stripping = {i for i, token in added.items() if getattr(token, "rstrip", False)}

    def encode(self, text: str, behind: Sequence[int] = ()) -> list[int]:
        """Ids of ``text`` behind other ids; without ids, in the middle of some text."""
        if not text:
            return []
        last = behind[-1] if behind else None
        if last is not None and last in self._added:
            is_special = last in self._stripping or self._adds_blank_at_start
            return self._behind_token(last, text) if is_special else self._encode(text)
        return self._encode_in_text(text) if self._adds_blank_at_start else self._encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text that the ids add to a conversation, with its first blank."""
        if self._decoding_anchor is None:
            return decode_text(self._tokenizer, ids, skip_special_tokens=skip_special_tokens)
        anchor, text = self._decoding_anchor
        whole = decode_text(self._tokenizer, [anchor, *ids], skip_special_tokens=skip_special_tokens)
        return whole[len(text) :]

    def adds_blank_behind(self, ids: Sequence[int]) -> bool:
        """Whether text behind these ids is encoded with a blank that nobody wrote."""
        return bool(ids) and ids[-1] in self._added and self._adds_blank_behind_tokens

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _behind_token(self, token: int, text: str) -> list[int]:
        ids = self._encode(self._added[token] + text)
        return ids[1:] if ids and ids[0] == token else self._encode_in_text(text)

    def _encode_in_text(self, text: str) -> list[int]:
        """A boundary of tokens behind the anchor means that nothing in front of it changed what follows."""
        for anchor in self._anchors:
            before = self._encode(anchor)
            ids = self._encode(anchor + text)
            if ids[: len(before)] == before and len(ids) > len(before):
                return ids[len(before) :]
        return self._encode(text)

    @cached_property
    def _anchors(self) -> tuple[str, ...]:
        """Those that the vocabulary spells."""
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        known = (anchor for anchor in _ANCHORS if unknown is None or unknown not in self._encode(anchor))
        return tuple(anchor for anchor in known if self._encode(anchor))

    @cached_property
    def _adds_blank_at_start(self) -> bool:
        return self._encode_in_text(_PROBE) != self._encode(_PROBE)

    @cached_property
    def _adds_blank_behind_tokens(self) -> bool:
        """Whether the blank of the beginning stands behind special tokens too."""
        special = [i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special]
        token = next((i for i in special if self._encode(self._added[i]) == [i]), None)
        if token is None or not self._adds_blank_at_start:
            return False
        return self._behind_token(token, _PROBE) != self._encode_in_text(_PROBE)

    @cached_property
    def _decoding_anchor(self) -> tuple[int, str] | None:
        """An id and its text, to decode others behind; None where pieces decode as they do together."""
        ids = self._encode(_PROBE)
        whole = self._decode(ids)
        pieces = [self._decode(ids[:index]) + self._decode(ids[index:]) for index in range(1, len(ids))]
        if all(piece == whole for piece in pieces):
            return None
        # Letters, and no bytes of a byte fallback: these decode together with the bytes behind them.
        for anchor in ("a", "A", "0", "."):
            last = (self._encode(anchor) or ids)[-1]
            text = self._decode([last])
            if text == anchor and self._decode([last, *ids]).startswith(text):
                return last, text
        return None

    def _decode(self, ids: Sequence[int]) -> str:
        return decode_text(self._tokenizer, ids, skip_special_tokens=False)


Chat: TypeAlias = list[dict[str, Any]]

MARK: Final = "\u241euser\u241e"
USER_MESSAGE: Final = {"role": "user", "content": "a"}
ASSISTANT_MESSAGE: Final = {"role": "assistant", "content": MARK}


class Template:
    """The chat template of a tokenizer with its variables (``enable_thinking`` …). Raises ModelError for what
    it refuses.

    A tokenizer may have several templates by name; ``chosen`` is the text of one of them (None: the only
    one), ``with_tools`` marks the one for conversations with tools, and ``is_chosen`` one that the settings
    name.

    Text that spells a special token (a chat marker in a question, a page or a retrieved step) gets a space
    after its first character: only the template writes markers.
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
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        markers = sorted(
            (token for token in special if len(token) > 1), key=lambda token: (-len(token), token)
        )
        self.markers = re.compile("|".join(map(re.escape, markers)) or r"(?!)")
        added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
        self._added = added
        longest_first = sorted(added, key=lambda token: (-len(token), token))
        self._next_marker = re.compile(rf"\s*({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def render(self, chat: Chat, *, opened: bool, tools: Sequence[ToolSchema] = ()) -> str:
        """The text of a conversation; ``opened``: with the assistant's next turn begun."""
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
        except Exception as error:  # templates raise what they like
            roles = ", ".join(message["role"] for message in chat)
            reason = " ".join(str(error).split())
            raise ModelError(
                f"the tokenizer has no usable chat template: it refuses {roles}: {reason}"
            ) from error

    def behind(self, label: str, chat: Chat, *, opened: bool = False, mark: str = MARK) -> str:
        """The template's text behind the mark. Raises ModelError where the mark was dropped."""
        text = self.render(chat, opened=opened)
        if mark not in text:
            raise ModelError(f"the chat template drops {label}")
        return text.split(mark, 1)[1]

    def renders_mark(
        self, chat: Chat, *, opened: bool = True, tools: Sequence[ToolSchema] = (), mark: str = MARK
    ) -> bool:
        """Whether a conversation with the mark in it is rendered with it."""
        try:
            return mark in self.render(chat, opened=opened, tools=tools)
        except ModelError:
            return False

    def plain(self, text: str) -> str:
        """The text with nothing in it that reads as a marker."""
        return self.markers.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)

    def encode(self, text: str) -> list[int]:
        """Ids of a whole text that may hold the template's markers."""
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def encode_behind(self, previous_ids: Sequence[int], text: str) -> list[int]:
        """Ids of text that stands behind others; see :meth:`Continuation.encode`."""
        return self.continuation.encode(text, previous_ids)

    def first_marker(self, text: str) -> tuple[str, int] | None:
        """The text up to the end of the added token that it begins with, blanks aside, and the token's id."""
        match = self._next_marker.match(text)
        return (match[0], self._added[match[1]]) if match else None

    def closing(self, closed: str, followed: str) -> WrittenClosing:
        """The closing of an answer, the last one or not: some templates write one marker more where a
        conversation ends (Phi-3). Raises ModelError where they have nothing in common.
        """
        common = closed if followed.startswith(closed) else self._common(closed, followed)
        return self.written_closing(common)

    def _common(self, closed: str, followed: str) -> str:
        common = ""
        for piece in re.split(f"({self.markers.pattern})", closed):
            if not followed.startswith(common + piece):
                break
            common += piece
        if not self.markers.search(common):
            raise ModelError(
                "the chat template closes the last assistant message differently from an earlier one"
            )
        return common

    def written_closing(self, text: str) -> WrittenClosing:
        """A closing with the blanks before its marker counted."""
        ids = tuple(self.encode_behind((), text))
        marker = text.lstrip()
        behind = tuple(self.encode_behind((), marker))
        has_blanks = self.first_marker(marker) is not None and ids[len(ids) - len(behind) :] == behind
        num_blank = len(ids) - len(behind) if has_blanks else 0
        marker_index = next((n for n, i in enumerate(ids) if i in self._added.values()), -1)
        return WrittenClosing(text=text, ids=ids, num_blank=num_blank, behind_marker=ids[marker_index + 1 :])


def load_templates(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> tuple[Template, Template]:
    """The templates for conversations without and with tools; one for both unless the tokenizer has several,
    and unless ``variables`` choose one of these (``chat_template``). Raises ModelError if none is the default
    one.
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
    if default is None and tools_template is None:
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise ModelError(
            f"{name} has the chat templates {', '.join(sorted(templates))} and no default: name one in "
            "model.template_kwargs (chat_template)"
        )
    plain = tools_template if default is None else default
    with_tools = plain if tools_template is None else tools_template
    assert plain is not None and with_tools is not None
    template = Template(tokenizer, variables, chosen=plain, with_tools=plain is tools_template)
    if with_tools is plain:
        return template, template
    return template, Template(tokenizer, variables, chosen=with_tools, with_tools=True)


def named_templates(tokenizer: Tokenizer) -> dict[str, str]:
    """Name -> text of a tokenizer's templates; empty if it has one without a name."""
    templates = getattr(tokenizer, "chat_template", None)
    if isinstance(templates, list | tuple):  # as tokenizer_config.json holds them
        templates = {str(entry["name"]): entry["template"] for entry in templates}
    return dict(templates) if isinstance(templates, Mapping) else {}


# What a chat template can render, found by trying it: nothing is known by its family's name.


# Of letters alone: no template escapes it.
CALL_MARK: Final = "markedargument"
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
    """How a template wants the arguments of a call: as an object, or as JSON text."""

    arguments_are_text: bool

    def message(self, calls: Sequence[ToolCall], content: str) -> dict[str, Any]:
        """The message as the template takes it."""
        return {
            "role": "assistant",
            "content": content,
            "tool_calls": [self._call(call) for call in calls],
        }

    def _call(self, call: ToolCall) -> dict[str, Any]:
        # a template that wants an object may refuse the text of what is none, as it does behind a server
        arguments = call.arguments_text if self.arguments_are_text or call.raw else dict(call.arguments)
        return {
            "type": "function",
            "id": call.call_id,
            "function": {"name": call.name, "arguments": arguments},
        }


_SHAPES: Final = (CallShape(arguments_are_text=False), CallShape(arguments_are_text=True))


class Abilities:
    """Answers of one template, each found when it is first asked for."""

    def __init__(self, template: Template) -> None:
        self._template = template

    @cached_property
    def supports_system(self) -> bool:
        """Whether a system message is shown."""
        return self._template.renders_mark([{"role": "system", "content": MARK}, USER_MESSAGE])

    @cached_property
    def supports_repeats(self) -> bool:
        """Whether two user messages may stand in a row."""
        return self._template.renders_mark([USER_MESSAGE, {"role": "user", "content": MARK}])

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the model is told which tools there are."""
        system: Chat = [{"role": "system", "content": "s"}] if self.supports_system else []
        tool = {**PLACEHOLDER_TOOL, "name": CALL_MARK}
        return self._template.renders_mark([*system, USER_MESSAGE], tools=[tool], mark=CALL_MARK)

    @cached_property
    def reasoning_key(self) -> str | None:
        """The key of a message's thinking, where the template knows one."""
        keys = ("reasoning_content", "reasoning", "thinking")
        return next((key for key in keys if self._shows_reasoning(key)), None)

    def _shows_reasoning(self, key: str) -> bool:
        return self._template.renders_mark(
            [USER_MESSAGE, {"role": "assistant", "content": "b", key: MARK}], opened=False
        )

    @cached_property
    def call_shape(self) -> CallShape | None:
        """How calls of an assistant message are shown; None where they are not."""
        call = ToolCall(name="lookup", arguments={"key": CALL_MARK}, call_id="call00000")
        for shape in _SHAPES:
            if self._template.renders_mark(
                [USER_MESSAGE, shape.message([call], "")], opened=False, mark=CALL_MARK
            ):
                return shape
        return None

    def calling_turn(self, results: Chat) -> tuple[dict[str, Any], str]:
        """A turn that these results could answer, and the mark that its text ends with.

        With one call for all where a template takes no more in a turn.
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
        if len(calls) > 1 and not self._template.renders_mark(
            [USER_MESSAGE, whole], opened=False, mark=CALL_MARK
        ):
            return shape.message(calls[-1:], ""), CALL_MARK
        return whole, CALL_MARK

    def refuses(self, chat: Chat, *, tools: Sequence[ToolSchema] = ()) -> str:
        """Why the template does not render a conversation; empty where it does."""
        try:
            self._template.render(chat, opened=True, tools=tools)
        except ModelError as error:
            return str(error).partition("it refuses ")[2] or str(error)
        return ""


# Messages as a template takes them: roles that it lacks, thinking and calls of earlier turns, tools.


class ChatWriter:
    """Writes the conversations of one template. ``keeps_thinking``: of templates that have no place for it,
    thinking stands in the text; else it is left out there.
    """

    def __init__(
        self,
        template: Template,
        abilities: Abilities,
        call_format: CallFormat | None,
        *,
        keeps_thinking: bool,
    ) -> None:
        self._template = template
        self._abilities = abilities
        self._call_format = call_format
        self._keeps_thinking = keeps_thinking

    def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[Chat, Sequence[ToolSchema]]:
        """The messages but the inline ones, and the tools that the template itself has to show."""
        if tools and not self._abilities.shows_tools:
            messages, tools = self._with_tool_descriptions(messages, tools), ()
        chat: Chat = []
        joins = False
        for message in messages:
            if message.role == "inline":
                continue
            is_system = message.role == "system" and not self._abilities.supports_system
            entry = self._to_dict(message, "user" if is_system else message.role)
            if self._joins(chat, entry, is_forced=joins):
                chat[-1]["content"] += f"\n\n{entry['content']}"
            else:
                chat.append(entry)
            joins = is_system
        return chat, [self._plain(tool) for tool in tools]

    def _joins(self, chat: Chat, entry: Mapping[str, Any], *, is_forced: bool) -> bool:
        if not chat or chat[-1]["role"] != entry["role"] or entry["role"] == "tool":
            return False
        return is_forced or not self._abilities.supports_repeats

    def _to_dict(self, message: Message, role: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"role": role, "content": self._template.plain(message.content)}
        if role == "tool":
            ids = {"tool_call_id": message.tool_call_id, "name": message.tool_name}
            return entry | {key: value for key, value in ids.items() if value}
        if role == "assistant":
            return self._assistant(message, entry)
        return entry

    def _assistant(self, message: Message, entry: dict[str, Any]) -> dict[str, Any]:
        calls = [
            replace(call, arguments=self._plain(call.arguments), raw=self._template.plain(call.raw))
            for call in message.tool_calls
        ]
        shape = self._abilities.call_shape if calls else None
        if shape is not None:
            entry = shape.message(calls, entry["content"])
        elif calls:
            if self._call_format is None:
                raise ModelError("the chat template has no place for tool calls: name their form")
            written = self._call_format.write(calls)
            entry["content"] = f"{entry['content']}\n{written}" if entry["content"] else written
        if message.reasoning:
            thinking = self._template.plain(message.reasoning)
            key = self._abilities.reasoning_key
            if key is not None:
                entry[key] = thinking
            elif self._keeps_thinking:
                entry["content"] = f"<think>\n{thinking}\n</think>\n\n{entry['content'] or ''}"
        return entry

    def _with_tool_descriptions(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> Sequence[Message]:
        """The tools in the words of the form of calls, behind the system message's own."""
        if self._call_format is None:
            raise ModelError("the chat template does not show tools to the model: name the form of calls")
        words = self._call_format.describe(tools)
        if messages and messages[0].role == "system":
            first = replace(messages[0], content=f"{messages[0].content}\n\n{words}")
            return [first, *messages[1:]]
        return [Message(role="system", content=words), *messages]

    def _plain(self, value: Any) -> Any:
        """A JSON value with nothing in it that reads as a marker."""
        if isinstance(value, str):
            return self._template.plain(value)
        if isinstance(value, Mapping):
            return {self._plain(key): self._plain(item) for key, item in value.items()}
        return [self._plain(item) for item in value] if isinstance(value, list | tuple) else value
