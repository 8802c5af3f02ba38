"""One tokenizer's chat template: rendering, and text that must not become its markers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from outrider.errors import ModelError
from outrider.tokens.closing import WrittenClosing
from outrider.tokens.continuation import Continuation
from outrider.tokens.tokenizer import Tokenizer
from outrider.types import ToolSchema

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
