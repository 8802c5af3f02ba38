"""Texts of a WebShop agent: the prompt, the pages, the action tag and what is said about a bad one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from outrider.environments.tool_qa.tag_protocol import neutralise
from outrider.environments.webshop.pages import Sight

STOP: Final = "</action>"
MAX_ACTION_CHARACTERS: Final = 500
SEPARATOR: Final = " [SEP] "
_TAGGED: Final = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.DOTALL)
_ACTION: Final = re.compile(r"(search|click) ?\[(.*)\]", re.IGNORECASE)

INSTRUCTIONS: Final = (
    "You are shopping on a web site, one action a turn. Find the product that fits the request, "
    "choose the options that it asks for, and buy it; buying ends the task.\n"
    "You may think first. Then write exactly one action between <action> and </action>:\n"
    "<action>search[words]</action> searches, on the page with the search bar only;\n"
    "<action>click[name]</action> clicks a button, a product number or an option value of the page, "
    "for example <action>click[buy now]</action>.\n"
    "The next message shows the page that follows, its parts separated by [SEP]."
)
NO_SEARCH_BAR: Final = "This page has no search bar, so nothing was done. Go back to search first."
NO_SUCH_NAME: Final = "Nothing on this page has that name, so nothing was done."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopAction:
    """A readable action. The name of a click is in lower case; white space is collapsed."""

    verb: Literal["search", "click"]
    argument: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """Text that is no action; ``problem`` says why in words for the policy."""

    problem: str


ParsedAction: TypeAlias = ShopAction | Unreadable


def parse_action(text: str) -> ParsedAction:
    """Read the one ``<action>...</action>`` of a message; everything around it is free thought. Never
    raises.
    """
    actions = _TAGGED.findall(text)
    if not actions:
        return Unreadable(problem="No action found. Write exactly one, as <action>search[words]</action>.")
    if len(actions) > 1:
        return Unreadable(problem=f"Found {len(actions)} actions, so nothing was done. Write exactly one.")
    action = " ".join(actions[0].split())
    if len(action) > MAX_ACTION_CHARACTERS:
        return Unreadable(
            problem=f"The action is longer than {MAX_ACTION_CHARACTERS} characters, so nothing was done."
        )
    read = _ACTION.fullmatch(action)
    if read is None or not read[2].strip():
        return Unreadable(problem="The action must read search[words] or click[name], so nothing was done.")
    argument = read[2].strip()
    return ShopAction(verb="search", argument=argument) if read[1].lower() == "search" else _click(argument)


def render_action(verb: Literal["search", "click"], argument: str) -> str:
    """A policy message that holds the action and nothing else."""
    return f"<action>{verb}[{argument}]{STOP}"


def render_prompt(request: str, page: str) -> str:
    """The first user message: how to act, what to buy, and the first page."""
    return f"{INSTRUCTIONS}\n\nRequest: {neutralise(request)}\n\n{page}"


def render_page(sight: Sight, clickables: Sequence[str] | None) -> str:
    """The page in one line and, unless ``clickables`` is None, the actions that it allows in another.

    Scraped texts may hold what reads as a tag or as a chat template's special token; their ``<`` becomes
    ``&lt;``.
    """
    page = f"Page: {SEPARATOR.join(sight.fields)}"
    if clickables is not None:
        actions = [f"click[{name}]" for name in clickables] or ["search[words]"]
        page += "\nActions: " + " ".join(actions)
    return neutralise(page)


def _click(name: str) -> ShopAction:
    return ShopAction(verb="click", argument=name.lower())
