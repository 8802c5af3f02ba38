"""Named rules that extract the command from a policy's reply.

Published code bases read the same reply differently: for example, one plays the last 30 characters of a reply
without tags, another one plays nothing. Every rule is tested against recorded results of the function whose
behavior it has (``tests/vectors/parse_rules.json``).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

from outrider.environments.text_games import parse_action

NUM_NUMBERED: Final = 50
"""Number of commands that the rule ``index`` can choose from: the first ones."""

_CHINESE: Final = re.compile("[\u4e00-\u9fff]")
_SPACED_TAGS: Final = {
    tag: re.compile(rf"<{slash}\s*{name}\s*>", re.IGNORECASE)
    for tag, slash, name in (
        ("<think>", "", "think"), ("</think>", "/", "think"),
        ("<action>", "", "action"), ("</action>", "/", "action"),
    )
}  # fmt: skip
_WHOLE_FORM: Final = re.compile(r"\s*<think>.*</think>\s*<action>(.*)</action>\s*", re.IGNORECASE | re.DOTALL)
_INDEX: Final = re.compile(r"###\s*ACTION:\s*([0-9]{1,9})\s*###")
_SEARCH_TAGS: Final = {
    name: (re.compile(f"<{name}>", re.IGNORECASE), re.compile(f"</{name}>", re.IGNORECASE))
    for name in ("search", "answer")
}


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply as a rule reads it.

    Attributes:
        command: the command; empty if the rule finds none.
        valid: whether the reply has the form that the rule requires. Invalid replies can be penalized.
        executed: whether the environment executes the command, which some rules do for invalid replies too;
            False for an empty command.
    """

    command: str
    valid: bool
    executed: bool


ParseRule: TypeAlias = Callable[[str, Sequence[str]], Parsed]
"""Parses a reply, given the commands that are possible now. Never raises."""

ParseRuleName: TypeAlias = Literal[
    "strict",
    "verl-agent-30",
    "verl-agent-20",
    "verl-agent-think-optional",
    "one-pair",
    "strict-admissible",
    "tag-only",
    "index",
    "verl-agent-search",
]


def parse(rule: str, reply: str, admitted: Sequence[str]) -> Parsed:
    """Parse a reply by a rule of ``PARSE_RULES``. ``admitted`` are the commands that are possible now."""
    return PARSE_RULES[rule](reply, admitted)


def _played(command: str, *, valid: bool) -> Parsed:
    """A command that is executed whether or not the reply is valid."""
    return Parsed(command, valid, executed=bool(command.strip()))


def _strict(reply: str, admitted: Sequence[str]) -> Parsed:
    command, problem = parse_action(reply)
    return Parsed(command, valid=not problem, executed=not problem)


def _tagged(reply: str) -> str | None:
    """The lower-case text from the first opening to the first closing tag, empty if the closing one is first;
    None if a tag is missing.
    """
    text = reply.lower()
    start, end = text.find("<action>"), text.find("</action>")
    return None if min(start, end) < 0 else text[start + len("<action>") : end].strip()


def _first_tag(
    reply: str, admitted: Sequence[str], *, num_characters: int, has_thought: bool, has_no_chinese: bool
) -> Parsed:
    """The first pair of tags, or the last ``num_characters`` of a reply without one, which is invalid.

    With ``has_thought``, a valid reply contains both tags of a thought in any order; with ``has_no_chinese``,
    it contains no Chinese character.
    """
    command = _tagged(reply)
    if command is None:
        return _played(reply.lower()[-num_characters:], valid=False)
    without_thought = has_thought and not ("<think>" in reply and "</think>" in reply)
    return _played(command, valid=not (without_thought or (has_no_chinese and _CHINESE.search(reply))))


def _one_pair(reply: str, admitted: Sequence[str]) -> Parsed:
    """No command if a tag of the action is missing or occurs twice. A valid reply also has exactly one pair
    of think tags and no Chinese character.
    """
    text = reply.lower()
    command = _tagged(reply)
    if command is None or text.count("<action>") > 1 or text.count("</action>") > 1:
        return _played("", valid=False)
    has_thought = reply.count("<think>") == reply.count("</think>") == 1
    return _played(command, valid=has_thought and not _CHINESE.search(reply))


def _strict_admissible(reply: str, admitted: Sequence[str]) -> Parsed:
    """A valid reply is one thought and one action, nothing else, and its command is possible now. Of another
    reply, the first action is executed, or the last 30 characters.
    """
    counts = {len(tag.findall(reply)) for tag in _SPACED_TAGS.values()}
    form = _WHOLE_FORM.fullmatch(reply) if counts == {1} and not _CHINESE.search(reply) else None
    if form is not None:
        command = form[1].strip().lower()
        return _played(command, valid=command in {other.lower() for other in admitted})
    if (start := _SPACED_TAGS["<action>"].search(reply)) and (
        end := _SPACED_TAGS["</action>"].search(reply, start.end())
    ):
        return _played(reply[start.end() : end.start()].strip().lower(), valid=False)
    return _played(reply[-30:], valid=False)


def _index(reply: str, admitted: Sequence[str]) -> Parsed:
    """The number of a command in the list. Any other reply plays number 0."""
    form = _INDEX.fullmatch(reply.strip())
    number = int(form[1]) if form else NUM_NUMBERED
    numbered = admitted[:NUM_NUMBERED]
    valid = number < len(numbered)
    command = numbered[number if valid else 0] if numbered else ""
    return _played(command, valid=valid)


def _search(reply: str, admitted: Sequence[str]) -> Parsed:
    """The first search, or the first answer if there is none, with its tags. Text after the first closing tag
    is ignored, but a reply with both kinds of tags or with one kind twice is invalid.
    """
    shortened = reply
    for closing in ("</search>", "</answer>"):
        if closing in reply:
            shortened = reply[: reply.index(closing)] + closing
            break
    counts = [len(opening.findall(reply)) for opening, _ in _SEARCH_TAGS.values()]
    for name, (opening, closing_tag) in _SEARCH_TAGS.items():
        if (start := opening.search(shortened)) and (end := closing_tag.search(shortened, start.end())):
            text = shortened[start.end() : end.start()].strip()
            return _played(f"<{name}>{text}</{name}>", valid=sum(counts) == 1)
    return _played("", valid=False)


_VERL_AGENT: Final = partial(_first_tag, has_thought=True, has_no_chinese=True)

PARSE_RULES: Final[Mapping[str, ParseRule]] = {
    "strict": _strict,
    "verl-agent-30": partial(_VERL_AGENT, num_characters=30),
    "verl-agent-20": partial(_VERL_AGENT, num_characters=20),
    "verl-agent-think-optional": partial(
        _first_tag, num_characters=30, has_thought=False, has_no_chinese=True
    ),
    "one-pair": _one_pair,
    "strict-admissible": _strict_admissible,
    "tag-only": partial(_first_tag, num_characters=30, has_thought=False, has_no_chinese=False),
    "index": _index,
    "verl-agent-search": _search,
}
"""The rules by name.

``strict`` is Outrider's own; ``verl-agent-*`` are those of verl-agent for ALFWorld and ScienceWorld (30),
WebShop (20) and search; ``verl-agent-think-optional`` of UCOB, ``one-pair`` of SkillZero,
``strict-admissible`` of T²PO and ARL-Arena, ``tag-only`` of LaMer, ``index`` of agent-lightning's
ScienceWorld.
"""
